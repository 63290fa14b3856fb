"""One CTA of the chain: what it takes of each product, how it brings, multiplies and hands over."""

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.layer_chain.mosaic_gpu_ops import (
    arrive,
    await_count,
    copied,
    copy_rows,
    counter_value,
    div,
    rem,
    rows_of,
    sigmoid,
    store_turned,
)
from dflash_kernels.layer_chain.mosaic_gpu_plan import BLOCK, FLIGHT, ROWS, X_BLOCKS, Plan, Product

_WGMMA = plgpu.Layout.WGMMA


class Share:
    """What one CTA does of the stages it is given, as its three warpgroups."""

    def __init__(self, plan: Plan, stages, refs, buffers, interpret):
        self.plan, self.stages, self.refs, self.buffers, self.interpret = plan, stages, refs, buffers, interpret
        self.cta = lax.axis_index("cta")
        self.syncs = interpret is None

    def run(self):
        for thread, work in enumerate((self._multiply, self._bring_weights, self._bring_activations)):
            pl.when(lax.axis_index("wg") == thread)(work)

    def _part(self, product: Product):
        """Which part of the depth is this CTA's."""
        return rem(self.cta, product.splits)

    def _first_step(self, product: Product, part):
        return div(part * product.steps, product.splits)

    def _steps(self, product: Product):
        """Slots that this CTA takes: none where there are more CTAs than tiles."""
        part = self._part(product)
        steps = self._first_step(product, part + 1) - self._first_step(product, part)
        return jnp.where(self.cta < product.ctas, steps, 0).astype(jnp.int32)

    def _units(self, product: Product):
        """Slots of activations that this CTA takes."""
        return div(self._steps(product), product.unit)

    def _first_row(self, product: Product):
        return jnp.minimum(div(self.cta, product.splits) * product.rows, product.features - product.rows)

    def _first_column(self, product: Product):
        return self._first_step(product, self._part(product)) * (product.blocks * BLOCK)

    def _products(self):
        """Products with their place among the stages and what this CTA has taken before each: slots of weights, of activations."""
        taken, x_taken = jnp.int32(0), jnp.int32(0)
        for place, stage in enumerate(self.stages):
            if isinstance(stage, Product):
                yield place, stage, taken, x_taken
                taken, x_taken = taken + self._steps(stage), x_taken + self._units(stage)

    def _tiles(self, product: Product, step):
        """Where the copies of one step come from: rows and columns of the weights, block by block, gate before up."""
        column = self._first_column(product) + step * (product.blocks * BLOCK)
        for block in range(product.blocks):
            for part in range(product.parts):
                rows = pl.ds(self._first_row(product) + part * product.features, product.rows)
                yield rows, pl.ds(column + block * BLOCK, BLOCK)

    def _bring_weights(self):
        arrived, left = self.buffers["w_in"], self.buffers["w_out"]
        for _, product, taken, _ in self._products():

            def bring(step, _, product=product, taken=taken):
                index = taken + step
                slot = rem(index, self.plan.slots)
                pl.when(index >= self.plan.slots)(lambda: plgpu.barrier_wait(left.at[slot]))
                if self.syncs:
                    # With more requests at once, everybody else's would wait longer for memory.
                    landed = index - FLIGHT
                    pl.when(landed >= 0)(lambda: plgpu.barrier_wait(arrived.at[rem(landed, self.plan.slots)]))
                for copy, (rows, columns) in enumerate(self._tiles(product, step)):
                    target = self.buffers["w_sm"].at[slot, pl.ds(copy * product.rows, product.rows)]
                    plgpu.copy_gmem_to_smem(self.refs[product.name].at[rows, columns], target, arrived.at[slot])

            lax.fori_loop(0, self._steps(product), bring, None)
        if self.syncs and "ahead" in self.refs:
            self._prefetch(self.plan.products[0], self.refs["ahead"])

    def _prefetch(self, product: Product, source):
        """Brings to the cache what the next launch reads first: memory is idle while other kernels run in between."""

        def bring(step, _):
            for rows, columns in self._tiles(product, step):
                plgpu.async_prefetch(source.at[rows, columns])

        lax.fori_loop(0, self._steps(product), bring, None)

    def _bring_activations(self):
        source = {"o": "x", "gate_up": "scaled", "down": "gated", "next": "scaled"}
        lag, buffers, launches = self.plan.x_slots // 2, self.buffers, jnp.int32(0)
        if self.syncs:
            # Every launch leaves a count for each CTA at the second meeting, which is not complete without this CTA.
            launches = div(counter_value(self.refs["counter"].at[1, 0]), self.plan.ctas)
        for place, product, _, taken in self._products():
            if self.syncs and place > 0:
                arriving = (self.plan.owners, self.plan.ctas, self.plan.owners)[place - 1]
                await_count(self.refs["counter"].at[place - 1, 0], (launches + 1) * arriving)
                plgpu.barrier_arrive(buffers["met"])
            column, held = self._first_column(product), self.refs[source[product.name]]

            def ready(index, taken=taken):
                plgpu.barrier_arrive(buffers["x_in"].at[rem(taken + index, self.plan.x_slots)])

            def bring(unit, _, product=product, taken=taken, column=column, held=held, ready=ready):
                slot = rem(taken + unit, self.plan.x_slots)

                @pl.when(taken + unit >= self.plan.x_slots)
                def _():
                    plgpu.barrier_wait(buffers["x_out"].at[slot])

                first = column + unit * (X_BLOCKS * BLOCK)
                copy_rows(held, first, buffers["x_sm"].at[slot], rows=self.plan.live, interpret=self.interpret)

                @pl.when(unit >= lag)
                def _():
                    copied(lag, self.interpret)
                    ready(unit - lag)

            units = self._units(product)
            lax.fori_loop(0, units, bring, None)
            copied(0, self.interpret)
            lax.fori_loop(jnp.maximum(units - lag, 0), units, lambda unit, _, ready=ready: ready(unit), None)

    def _multiply(self):
        taken = {place: counts for place, _, *counts in self._products()}
        for place, stage in enumerate(self.stages):
            if self.syncs and place > 0:
                plgpu.barrier_wait(self.buffers["met"])
            if isinstance(stage, Product):
                self._product(stage, *taken[place])
            else:
                self._add_up(next(product for product in self.plan.products if product.name == stage), None)

    def _product(self, product: Product, taken, x_taken):
        pieces = [(part, offset) for part in range(product.parts) for offset in product.offsets]
        shape, units, steps, factors = (ROWS, self.plan.tokens), self._units(product), self._steps(product), None
        if product.name in ("gate_up", "next"):
            factors = self._factors()

        def multiply(*accs):
            def step(unit, _):
                x_slot = rem(x_taken + unit, self.plan.x_slots)
                plgpu.barrier_wait(self.buffers["x_in"].at[x_slot])
                for part_of_unit in range(product.unit):
                    index = taken + unit * product.unit + part_of_unit
                    slot = rem(index, self.plan.slots)
                    plgpu.barrier_wait(self.buffers["w_in"].at[slot])
                    for block in range(product.blocks):
                        x = self.buffers["x_sm"].at[x_slot, part_of_unit * product.blocks + block].transpose((1, 0))
                        for acc, (part, offset) in zip(accs, pieces, strict=True):
                            first = (block * product.parts + part) * product.rows + offset
                            plgpu.wgmma(acc, self.buffers["w_sm"].at[slot, pl.ds(first, ROWS)], x)
                    # All but this slot's instructions are done: the slot before can be filled again.
                    plgpu.wgmma_wait(product.blocks * len(pieces))
                    pl.when(index > taken)(lambda index=index: self._release(index - 1))
                pl.when(unit > 0)(lambda: self._release_x(x_taken + unit - 1))

            lax.fori_loop(0, units, step, None)
            results = tuple(acc[...] for acc in accs)

            @pl.when(units > 0)
            def _():
                self._release(taken + steps - 1)
                self._release_x(x_taken + units - 1)

            return results

        tiles = pl.run_scoped(multiply, *[plgpu.ACC(shape, jnp.float32) for _ in pieces])
        finish = {"o": self._split, "down": self._split, "gate_up": self._gate, "next": self._write_next}
        pl.when(self.cta < product.ctas)(lambda: finish[product.name](product, tiles, factors))
        if self.syncs and product.name == "gate_up":
            arrive(self.refs["counter"].at[1, 0])

    def _release(self, index):
        plgpu.barrier_arrive(self.buffers["w_out"].at[rem(index, self.plan.slots)])

    def _release_x(self, index):
        plgpu.barrier_arrive(self.buffers["x_out"].at[rem(index, self.plan.x_slots)])

    def _split(self, product: Product, tiles, _):
        """Leaves a part of the sum of 64 features, or adds to it what others have left: the CTA of the depth's first part does."""
        (tile,) = tiles
        part, ready = (
            self._part(product),
            self.refs["counter"].at[3 + div(self.cta, product.splits), 0] if self.syncs else None,
        )

        @pl.when((part > 0) | (not self.syncs))
        def _():
            self.refs["parts"].at[part, pl.ds(self._first_row(product), ROWS)][...] = tile
            if self.syncs:
                arrive(ready)

        if self.syncs:
            pl.when(part == 0)(lambda: self._add_up(product, tile, ready))

    def _add_up(self, product: Product, tile, ready=None):
        """Adds the parts of 64 features to the residual stream, in order, and leaves what the next product's norm needs."""
        norm = "post" if product.name == "o" else "next"
        # Under the interpreter all parts are in memory, and CTAs without features are here too.
        tile_index = self.cta if tile is None else div(self.cta, product.splits)
        add = functools.partial(self._add, product, norm, tile_index * ROWS, tile, ready)
        pl.when(tile_index < self.plan.owners)(add) if tile is None else add()

    def _add(self, product: Product, norm: str, first, tile, ready):
        rows, last = pl.ds(first, ROWS), norm == "next" and len(self.plan.products) == 3
        stream = rows_of(self.refs["before" if norm == "post" else "stream"].at[rows], _WGMMA)
        weight = jnp.zeros((ROWS,)) if last else rows_of(self.refs[f"{norm}_norm"].at[rows], _WGMMA.reduce(1))
        if ready is not None and product.splits > 1:
            await_count(ready, product.splits - 1, reset=True)
        if tile is None:
            tile = rows_of(self.refs["parts"].at[0, rows], _WGMMA)
        for part in range(1, product.splits):
            tile = tile + rows_of(self.refs["parts"].at[part, rows], _WGMMA)
        stream = stream + tile
        self.refs["stream"].at[rows][...] = stream
        if not last:
            self.refs["squares"].at[div(first, ROWS)][...] = (stream * stream).sum(axis=0)
            scaled = stream * lax.broadcast_in_dim(weight.astype(jnp.float32), stream.shape, [0])
            self._store("scaled", first, scaled, ROWS, self.plan.live)
        if self.syncs:
            arrive(self.refs["counter"].at[0 if norm == "post" else 2, 0])

    def _factors(self):
        """What the norm multiplies each token with: over all features, from the sums of squares of 64 each."""
        total = jnp.zeros((self.plan.tokens,), jnp.float32)
        for first in range(0, self.refs["squares"].shape[0], ROWS):
            squares = rows_of(self.refs["squares"].at[pl.ds(first, ROWS)], _WGMMA)
            if self.plan.owners - first < ROWS:
                index = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, squares.shape, 0), _WGMMA)
                squares = jnp.where(index < self.plan.owners - first, squares, 0.0)
            total = total + squares.sum(axis=0)
        factors = lax.rsqrt(total * (1 / self.plan.hidden) + self.plan.eps)
        return lax.broadcast_in_dim(factors, (ROWS, self.plan.tokens), [1])

    def _store(self, name, first_feature, tile, rows, tokens):
        """Writes the first rows of a tile as features of the first tokens."""
        store_turned(self.refs[name], first_feature, tile, rows=rows, tokens=tokens, interpret=self.interpret)

    def _gate(self, product: Product, tiles, factors):
        count = len(product.offsets)
        for offset, gate, up in zip(product.offsets, tiles[:count], tiles[count:], strict=True):
            gate = gate * factors
            gated, first = gate * sigmoid(gate) * (up * factors), self._first_row(product) + offset
            self._store("gated", first, gated, min(product.rows - offset, ROWS), self.plan.live)

    def _write_next(self, product: Product, tiles, factors):
        for offset, tile in zip(product.offsets, tiles, strict=True):
            first, rows = self._first_row(product) + offset, min(product.rows - offset, ROWS)
            self._store("projected", first, tile * factors, rows, self.plan.live)
