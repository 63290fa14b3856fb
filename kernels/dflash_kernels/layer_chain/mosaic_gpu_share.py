"""One CTA of the chain: how it multiplies what is brought, and what it hands over."""

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.layer_chain import mosaic_gpu_exchange as exchange
from dflash_kernels.layer_chain.mosaic_gpu_bring import Bring
from dflash_kernels.layer_chain.mosaic_gpu_narrow import deal_registers, times_rows, widened
from dflash_kernels.layer_chain.mosaic_gpu_ops import div, rem, rows_of, sigmoid, store_turned
from dflash_kernels.layer_chain.mosaic_gpu_plan import COPIES, LINE, ROWS, Product

_WGMMA = plgpu.Layout.WGMMA


class Share(Bring):
    """What one CTA does of the stages it is given, as its warpgroups."""

    def run(self):
        works = [self._multiply, self._bring_weights, self._bring_activations]
        works += [self._help] if self.plan.narrow else []
        for thread, work in enumerate(works):
            takes_turns = self.syncs and work in (self._multiply, self._bring_activations)
            task = functools.partial(self._turn, thread, work) if takes_turns else work
            begin = functools.partial(self._begin, thread, task) if self.plan.narrow else task
            pl.when(lax.axis_index("wg") == thread)(begin)

    def _begin(self, thread: int, task):
        """All that a warpgroup does, in one branch: it has registers of its own."""
        if self.syncs:
            deal_registers(thread)
        self._prepare(thread)
        task()

    def _prepare(self, thread: int):
        """What comes before the first product."""

    def _turn(self, thread: int, work):
        """Runs `work` with the part of the exchange that is this launch's; each warpgroup counts launches for itself."""
        own = self.cta * LINE + thread
        self.launches = exchange.launches(self.refs["exchange"], own)
        self.area = self.plan.exchange.area(rem(self.launches, 2))
        work()
        exchange.launched(self.refs["exchange"], own, self.launches + 1)

    def _multiply(self):
        taken = {place: counts for place, _, *counts in self._products()}
        if self.syncs:
            share = self.plan.exchange.share
            other = self.plan.exchange.area(1 - rem(self.launches, 2)) + self.cta * share
            exchange.empty(self.refs["exchange"], other, words=share)
        for place, stage in enumerate(self.stages):
            if isinstance(stage, Product):
                self._product(stage, *taken[place])
            else:
                self._add_up(next(product for product in self.plan.products if product.name == stage), None)

    def _product(self, product: Product, taken, x_taken):
        pieces = product.pieces
        shape, units, steps = (ROWS, self.plan.tokens), self._units(product), self._steps(product)

        def multiply(*accs):
            def step(unit, _):
                x_slot = rem(x_taken + unit, self.plan.x_slots)
                plgpu.barrier_wait(self.buffers["x_in"].at[x_slot])
                for turn in range(product.parts):
                    index = taken + unit * product.parts + turn
                    slot = rem(index, self.plan.slots)
                    plgpu.barrier_wait(self.buffers["w_in"].at[slot])
                    for block in range(COPIES):
                        x = self.buffers["x_sm"].at[x_slot, block].transpose((1, 0))
                        for acc, (part, offset) in zip(accs, pieces, strict=True):
                            if part == turn:
                                rows = pl.ds(block * product.rows + offset, ROWS)
                                plgpu.wgmma(acc, self.buffers["w_sm"].at[slot, rows], x)
                    # All but this slot's instructions are done: the slot before can be filled again.
                    plgpu.wgmma_wait(COPIES * len(product.offsets))
                    pl.when(index > taken)(lambda index=index: self._release(index - 1))
                pl.when(unit > 0)(lambda: self._release_x(x_taken + unit - 1))

            # The norm's factors are known a little later than the first activations, and the product's first half needs none.
            half = div(units, 2) if product.name in ("gate_up", "next") else units
            body = self._narrow_step(product, taken, x_taken, accs, 0) if self.plan.narrow else step
            lax.fori_loop(0, half, body, None)
            factors = self._factors(product) if product.name in ("gate_up", "next") else None
            if factors is not None:
                lax.fori_loop(half, units, body, None)
            results = tuple(acc[...] for acc in accs)
            if self.plan.narrow:
                results = self._with_others(product, results)
            else:

                @pl.when(units > 0)
                def _():
                    self._release(taken + steps - 1)
                    self._release_x(x_taken + units - 1)

            return results if factors is None else (*results, factors)

        tiles = pl.run_scoped(multiply, *[plgpu.ACC(shape, jnp.float32) for _ in pieces])
        finish = {"o": self._split, "down": self._split, "gate_up": self._gate, "next": self._write_next}
        pl.when(self.cta < product.ctas)(lambda: finish[product.name](product, tiles))

    def _narrow_step(self, product: Product, taken, x_taken, accs, block: int):
        """A step with weights of one byte, for one block of each slot: registers hold them before they are multiplied."""
        spare = self.buffers["wide_sm"].at[block] if "wide_sm" in self.buffers else None

        def step(unit, _):
            x_slot = rem(x_taken + unit, self.plan.x_slots)
            plgpu.barrier_wait(self.buffers["x_in"].at[x_slot])
            for turn in range(product.parts):
                index = taken + unit * product.parts + turn
                slot = rem(index, self.plan.slots)
                plgpu.barrier_wait(self.buffers["w_in"].at[slot])
                for half in range(2):
                    x = self.buffers["x_sm"].at[x_slot, 2 * block + half].transpose((1, 0))
                    for acc, (part, offset) in zip(accs, product.pieces, strict=True):
                        if part == turn:
                            rows = pl.ds(block * product.rows + offset, ROWS)
                            wide = widened(self.buffers["w_sm"].at[slot, rows], half, spare, self.interpret)
                            plgpu.wgmma(acc, wide, x)
                            # Registers of the one before are free again.
                            plgpu.wgmma_wait(1)
                self._release(index)
            plgpu.wgmma_wait(0)
            self._release_x(x_taken + unit)

        return step

    def _help(self):
        """The second warpgroup that multiplies weights of one byte, for the first one to add."""
        for count, (_, product, taken, x_taken) in enumerate(self._products()):

            def multiply(*accs, product=product, taken=taken, x_taken=x_taken):
                step = self._narrow_step(product, taken, x_taken, accs, 1)
                lax.fori_loop(0, self._units(product), step, None)
                return tuple(acc[...] for acc in accs)

            shape = (ROWS, self.plan.tokens)
            tiles = pl.run_scoped(multiply, *[plgpu.ACC(shape, jnp.float32) for _ in product.pieces])
            if count:
                plgpu.barrier_wait(self.buffers["added"])
            for place, tile in enumerate(tiles):
                self.buffers["sum_sm"].at[place][...] = tile
            plgpu.barrier_arrive(self.buffers["summed"])

    def _with_others(self, product: Product, tiles):
        """Tiles with those of the other warpgroup, times the scales of their rows of weights."""
        plgpu.barrier_wait(self.buffers["summed"])
        others = [rows_of(self.buffers["sum_sm"].at[place], _WGMMA) for place in range(len(tiles))]
        plgpu.barrier_arrive(self.buffers["added"])
        scales, last = self.refs[f"{product.name}_scales"], product.parts * product.features - 1
        found = []
        for (part, offset), tile, other in zip(product.pieces, tiles, others, strict=True):
            first = self._first_row(product) + (part * product.features + offset)
            found.append(times_rows(tile + other, scales, first, last, self.interpret))
        return tuple(found)

    def _release(self, index):
        plgpu.barrier_arrive(self.buffers["w_out"].at[rem(index, self.plan.slots)])

    def _release_x(self, index):
        plgpu.barrier_arrive(self.buffers["x_out"].at[rem(index, self.plan.x_slots)])

    def _split(self, product: Product, tiles):
        """Leaves a part of the sum of 64 features, or adds to it what others have left: the CTA of the depth's first part does."""
        (tile,), part = tiles, self._part(product)

        @pl.when((part > 0) | (not self.syncs))
        def _():
            if self.syncs:
                exchange.put_tile(
                    self.refs["exchange"], self._part_word(product, div(self.cta, product.splits), part), tile
                )
            else:
                self.refs["parts"].at[part, pl.ds(self._first_row(product), ROWS)][...] = tile

        if self.syncs:
            pl.when(part == 0)(lambda: self._add_up(product, tile))

    def _part_word(self, product: Product, tile_index, part):
        return self._handed("parts", product) + (tile_index * product.splits + part) * self.plan.exchange.tile

    def _add_up(self, product: Product, tile):
        """Adds the parts of 64 features to the residual stream, in order, and leaves what the next product's norm needs."""
        norm = "post" if product.name == "o" else "next"
        # Under the interpreter all parts are in memory, and CTAs without features are here too.
        tile_index = self.cta if tile is None else div(self.cta, product.splits)
        add = functools.partial(self._add, product, norm, tile_index, tile)
        pl.when(tile_index < self.plan.owners)(add) if tile is None else add()

    def _add(self, product: Product, norm: str, tile_index, tile):
        first, last = tile_index * ROWS, norm == "next" and len(self.plan.products) == 3
        rows = pl.ds(first, ROWS)
        stream = self._stream(norm, rows)
        weight = jnp.zeros((ROWS,)) if last else rows_of(self.refs[f"{norm}_norm"].at[rows], _WGMMA.reduce(1))
        if tile is None:
            tile = rows_of(self.refs["parts"].at[0, rows], _WGMMA)
            for part in range(1, product.splits):
                tile = tile + rows_of(self.refs["parts"].at[part, rows], _WGMMA)
        else:
            places = [self._part_word(product, tile_index, part) for part in range(1, product.splits)]
            tile = exchange.add_tiles(self.refs["exchange"], places, tile)
        stream = stream + tile
        if not last:
            scaled = stream * lax.broadcast_in_dim(weight.astype(jnp.float32), stream.shape, [0])
            self._hand("scaled", product, first, scaled, ROWS)
            squares = (stream * stream).sum(axis=0)
            if self.syncs:
                word = self._handed("squares", product) + tile_index * self.plan.tokens
                exchange.put_columns(self.refs["exchange"], word, squares)
            else:
                self.refs["squares"].at[tile_index][...] = squares
        self._keep(rows, stream)

    def _stream(self, norm: str, rows):
        """The residual stream so far."""
        return rows_of(self.refs["before" if norm == "post" else "stream"].at[rows], _WGMMA)

    def _keep(self, rows, stream):
        self.refs["stream"].at[rows][...] = stream

    def _factors(self, product: Product):
        """What the norm multiplies each token with: over all features, from the sums of squares of 64 each."""
        squares = self._squares(product)
        factors = lax.rsqrt(squares.sum(axis=0) * (1 / self.plan.hidden) + self.plan.eps)
        return lax.broadcast_in_dim(factors, (ROWS, self.plan.tokens), [1])

    def _squares(self, product: Product):
        owners = self.plan.owners
        if self.syncs:
            word = self._handed("squares", product)
            return exchange.take_columns(self.refs["exchange"], word, rows=owners, tokens=self.plan.tokens)
        squares = rows_of(self.refs["squares"], _WGMMA)
        index = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, squares.shape, 0), _WGMMA)
        return jnp.where(index < owners, squares, 0.0)

    def _hand(self, name: str, product: Product, first_feature, tile, rows: int):
        """Writes the first rows of a tile as features of the live tokens."""
        if not self.syncs:
            store_turned(
                self.refs[name], first_feature, tile, rows=rows, tokens=self.plan.live, interpret=self.interpret
            )
            return
        pitch = self.plan.products[1].features if name == "gated" else self.plan.hidden
        exchange.put_turned(
            self.refs["exchange"], self._handed(name, product), first_feature, tile,
            rows=rows, tokens=self.plan.live, pitch=pitch,
        )  # fmt: skip

    def _gate(self, product: Product, results):
        *tiles, factors = results
        count = len(product.offsets)
        for offset, gate, up in zip(product.offsets, tiles[:count], tiles[count:], strict=True):
            gate = gate * factors
            gated, first = gate * sigmoid(gate) * (up * factors), self._first_row(product) + offset
            self._hand("gated", product, first, gated, min(product.rows - offset, ROWS))

    def _write_next(self, product: Product, results):
        *tiles, factors = results
        for offset, tile in zip(product.offsets, tiles, strict=True):
            first, rows = self._first_row(product) + offset, min(product.rows - offset, ROWS)
            store_turned(
                self.refs["projected"],
                first,
                tile * factors,
                rows=rows,
                tokens=self.plan.live,
                interpret=self.interpret,
            )
