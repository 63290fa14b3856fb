"""The Hopper kernel: one persistent CTA on every multiprocessor takes a share of each product in turn.

Weights are the left operand of the matrix instruction, tokens the right one, so that few tokens waste nothing. One warpgroup
does nothing but start copies of weights into a ring of shared memory: it depends on no result, runs ahead of everybody
across the products, and keeps memory busy while the grid waits for itself. A second one copies blocks of activations, the third
multiplies. Between two products all CTAs meet at a counter in global memory.

The output and down projections are split over their depth, or they would not fill the machine: each part is written in float32,
and after a meeting CTAs of 64 features each add the parts in a fixed order to the residual stream. They leave the stream times the
norm's weight; the factor that the norm still lacks, one for a token, is known only when all have met again, and multiplies the
product instead of its input.
"""

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.layer_chain.mosaic_gpu_ops import (
    TILED,
    copied,
    copy_rows,
    counter_value,
    div,
    meet,
    rem,
    rows_of,
    sigmoid,
    store_turned,
)
from dflash_kernels.layer_chain.mosaic_gpu_plan import BLOCK, ROWS, Plan, Product

_WGMMA = plgpu.Layout.WGMMA


def stages_of(plan: Plan) -> tuple[Product | str, ...]:
    """Products and the additions between them, in order; the grid meets between two."""
    o, gate_up, down, *following = plan.products
    return (o, "post", gate_up, down, "next", *following)


def scratch(plan: Plan, dtype: Any) -> dict[str, Any]:
    """Shared memory and barriers of one CTA."""
    buffers: dict[str, Any] = {
        "w_sm": plgpu.SMEM((plan.slots, plan.slot_rows, BLOCK), dtype, transforms=TILED),
        "x_sm": plgpu.SMEM((plan.x_slots, plan.blocks, plan.tokens, BLOCK), dtype, transforms=TILED),
        "w_out": plgpu.Barrier(num_barriers=plan.slots), "x_out": plgpu.Barrier(num_barriers=plan.x_slots),
        "x_in": plgpu.Barrier(num_barriers=plan.x_slots), "met": plgpu.Barrier(),
    }  # fmt: skip
    for product in plan.products:
        buffers[f"{product.name}_in"] = plgpu.Barrier(num_arrivals=product.copies, num_barriers=plan.slots)
    return buffers


def results(plan: Plan, dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """What the kernel writes; all but `stream` and `next` matter only inside of it."""
    _, gate_up, _, *following = plan.products
    splits = max(product.splits for product in plan.products)
    shapes = {
        "stream": ((plan.hidden, plan.tokens), jnp.float32),
        "projected": ((plan.live, following[0].features) if following else (1, ROWS), dtype),
        "parts": ((splits, plan.hidden, plan.tokens), jnp.float32),
        "squares": ((-(-plan.reducers // ROWS) * ROWS, plan.tokens), jnp.float32),
        "scaled": ((plan.tokens, plan.hidden), dtype), "gated": ((plan.tokens, gate_up.features), dtype),
    }  # fmt: skip
    return {name: jax.ShapeDtypeStruct(*shape) for name, shape in shapes.items()}


def chain(
    plan: Plan, inputs: dict[str, jax.Array], counter: Any, interpret: Any = None
) -> tuple[jax.Array, jax.Array | None]:
    """Runs the kernel.

    Args:
      plan: shapes and schedule.
      inputs: `x [live, heads]`, `before [hidden, tokens]` float32, weights `o`, `gate_up`, `down`, `next`, norms `post_norm`,
        `next_norm`.
      counter: Ref of `[1]` int32 that no other launch uses at the same time; holds whole launches' counts, 0 at first.

    Returns:
      The residual stream `[hidden, tokens]` float32, and the next projection `[live, features]`, None without `next`.
    """
    dtype, outputs = inputs["x"].dtype, results(plan, inputs["x"].dtype)
    names, out_names = list(inputs), list(outputs)
    stages = stages_of(plan)
    options: dict[str, Any] = {
        "grid": (plan.ctas,), "grid_names": ("cta",), "num_threads": 3, "thread_name": "wg",
        "scratch_types": scratch(plan, dtype),
        "compiler_params": plgpu.CompilerParams(approx_math=True),
    }  # fmt: skip

    def body(*refs, run, held, **buffers):
        _Share(plan, run, dict(zip(held, refs, strict=True)), buffers, interpret).run()

    if interpret is None:
        whole = functools.partial(body, run=stages, held=(*names, "counter", *out_names))
        out = plgpu.kernel(whole, out_type=tuple(outputs.values()), **options)(*inputs.values(), counter)
        return out[0], out[1] if "next" in inputs else None
    # The interpreter cannot make CTAs wait for each other: one launch for each stage, which share their results.
    shared = [jax.new_ref(jnp.full(out.shape, jnp.nan, out.dtype)) for out in outputs.values()]
    for stage in stages:
        one = functools.partial(body, run=(stage,), held=(*names, *out_names))
        plgpu.kernel(one, out_type=(), interpret=interpret, **options)(*inputs.values(), *shared)
    return shared[0][...], shared[1][...] if "next" in inputs else None


class _Share:
    """One CTA's work."""

    def __init__(self, plan: Plan, stages, refs, buffers, interpret):
        self.plan, self.stages, self.refs, self.buffers, self.interpret = plan, stages, refs, buffers, interpret
        self.cta = lax.axis_index("cta")
        self.syncs = interpret is None

    def run(self):
        for thread, work in enumerate((self._multiply, self._bring_weights, self._bring_activations)):
            pl.when(lax.axis_index("wg") == thread)(work)

    def _steps(self, product: Product):
        """Slots that this CTA takes: none where there are more CTAs than tiles."""
        return jnp.where(self.cta < product.ctas, product.steps, 0).astype(jnp.int32)

    def _first_row(self, product: Product):
        return jnp.minimum(div(self.cta, product.splits) * product.rows, product.features - product.rows)

    def _first_column(self, product: Product):
        return rem(self.cta, product.splits) * (product.steps * product.blocks * BLOCK)

    def _units(self, product: Product):
        """Blocks of activations that this CTA takes."""
        return jnp.where(self.cta < product.ctas, product.units, 0).astype(jnp.int32)

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
        reads = self._reads()
        for product, source, taken in reads[: sum(isinstance(stage, Product) for stage in self.stages)]:
            filled = self.buffers[f"{product.name}_in"]

            def bring(step, _, product=product, taken=taken, source=source, filled=filled):
                slot = rem(taken + step, self.plan.slots)

                @pl.when(taken + step >= self.plan.slots)
                def _():
                    plgpu.barrier_wait(self.buffers["w_out"].at[slot])

                if self.syncs and self.plan.flight:
                    self._landed(reads, taken + step - self.plan.flight)
                for copy, (rows, columns) in enumerate(self._tiles(product, step)):
                    target = self.buffers["w_sm"].at[slot, pl.ds(copy * product.rows, product.rows)]
                    plgpu.copy_gmem_to_smem(source.at[rows, columns], target, filled.at[slot])
                if self.syncs and self.plan.lead:
                    self._prefetch(reads, taken + step + self.plan.lead)

            lax.fori_loop(0, self._steps(product), bring, None)

    def _reads(self):
        """Products, their weights and the slots taken before each, the next launch's first product after this launch's."""
        taken, reads = jnp.int32(0), []
        for product in self.plan.products:
            if product in self.stages:
                reads.append((product, self.refs[product.name], taken))
                taken = taken + self._steps(product)
        if "ahead" in self.refs:
            reads.append((self.plan.products[0], self.refs["ahead"], taken))
        return reads

    def _landed(self, reads, index):
        """Waits for the weights of one slot: more requests at once would only make everybody's wait longer."""
        for product, _, taken in reads[: len(self.plan.products)]:

            @pl.when((index >= taken) & (index < taken + self._steps(product)))
            def _(product=product):
                plgpu.barrier_wait(self.buffers[f"{product.name}_in"].at[rem(index, self.plan.slots)])

    def _prefetch(self, reads, index):
        """Brings the weights of one slot to the cache: it keeps memory busy where the ring is full and its CTA has to wait."""
        for product, source, taken in reads:

            @pl.when((index >= taken) & (index < taken + self._steps(product)))
            def _(product=product, source=source, taken=taken):
                for rows, columns in self._tiles(product, index - taken):
                    plgpu.async_prefetch(source.at[rows, columns])

    def _bring_activations(self):
        source = {"o": "x", "gate_up": "scaled", "down": "gated", "next": "scaled"}
        place, lag, buffers = 0, self.plan.x_slots // 2, self.buffers
        for later, product, _, taken in self._products():
            for _ in range(later - place):
                if self.syncs:
                    plgpu.barrier_wait(buffers["met"])
            place = later
            column, held = self._first_column(product), self.refs[source[product.name]]

            def arrive(index, taken=taken):
                plgpu.barrier_arrive(buffers["x_in"].at[rem(taken + index, self.plan.x_slots)])

            def bring(unit, _, product=product, taken=taken, column=column, held=held, arrive=arrive):
                slot = rem(taken + unit, self.plan.x_slots)

                @pl.when(taken + unit >= self.plan.x_slots)
                def _():
                    plgpu.barrier_wait(buffers["x_out"].at[slot])

                target = buffers["x_sm"].at[slot, pl.ds(0, product.unit_blocks)]
                first = column + unit * (product.unit_blocks * BLOCK)
                copy_rows(held, first, target, rows=self.plan.live, interpret=self.interpret)

                @pl.when(unit >= lag)
                def _():
                    copied(lag, self.interpret)
                    arrive(unit - lag)

            units = self._units(product)
            lax.fori_loop(0, units, bring, None)
            copied(0, self.interpret)
            lax.fori_loop(jnp.maximum(units - lag, 0), units, lambda unit, _, arrive=arrive: arrive(unit), None)

    def _multiply(self):
        before = jnp.int32(0)
        if self.syncs:
            # Earlier launches have left whole meetings, and this one's first is not complete without this CTA.
            before = div(counter_value(self.refs["counter"].at[0]), self.plan.ctas) * self.plan.ctas
        taken = {place: counts for place, _, *counts in self._products()}
        for place, stage in enumerate(self.stages):
            if isinstance(stage, Product):
                self._product(stage, *taken[place])
            else:
                pl.when(self.cta < self.plan.reducers)(lambda stage=stage: self._add(stage))
            if self.syncs and place + 1 < len(self.stages):
                meet(self.refs["counter"].at[0], before + (place + 1) * self.plan.ctas)
                plgpu.barrier_arrive(self.buffers["met"])

    def _product(self, product: Product, taken, x_taken):
        pieces = [(part, offset) for part in range(product.parts) for offset in product.offsets]
        shape, units, factors = (ROWS, self.plan.tokens), self._units(product), None
        if product.name in ("gate_up", "next"):
            factors = self._factors()

        def multiply(*accs):
            def step(unit, _):
                x_slot = rem(x_taken + unit, self.plan.x_slots)
                plgpu.barrier_wait(self.buffers["x_in"].at[x_slot])
                for part_of_unit in range(product.steps // product.units):
                    index = taken + unit * (product.steps // product.units) + part_of_unit
                    slot = rem(index, self.plan.slots)
                    plgpu.barrier_wait(self.buffers[f"{product.name}_in"].at[slot])
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
                self._release(taken + product.steps - 1)
                self._release_x(x_taken + product.units - 1)

            return results

        tiles = pl.run_scoped(multiply, *[plgpu.ACC(shape, jnp.float32) for _ in pieces])
        finish = {"o": self._write_parts, "down": self._write_parts, "gate_up": self._gate, "next": self._write_next}
        pl.when(self.cta < product.ctas)(lambda: finish[product.name](product, tiles, factors))

    def _release(self, index):
        plgpu.barrier_arrive(self.buffers["w_out"].at[rem(index, self.plan.slots)])

    def _release_x(self, index):
        plgpu.barrier_arrive(self.buffers["x_out"].at[rem(index, self.plan.x_slots)])

    def _write_parts(self, product: Product, tiles, _):
        part, row = rem(self.cta, product.splits), self._first_row(product)
        for offset, tile in zip(product.offsets, tiles, strict=True):
            self.refs["parts"].at[part, pl.ds(row + offset, ROWS)][...] = tile

    def _factors(self):
        """What the norm multiplies each token with: over all features, from the sums of squares of 64 each."""
        total = jnp.zeros((self.plan.tokens,), jnp.float32)
        for first in range(0, self.refs["squares"].shape[0], ROWS):
            squares = rows_of(self.refs["squares"].at[pl.ds(first, ROWS)], _WGMMA)
            if self.plan.reducers - first < ROWS:
                index = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, squares.shape, 0), _WGMMA)
                squares = jnp.where(index < self.plan.reducers - first, squares, 0.0)
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

    def _add(self, norm: str):
        """The parts of 64 features, added in order to the residual stream."""
        rows = pl.ds(self.cta * ROWS, ROWS)
        before = self.refs["before" if norm == "post" else "stream"]
        split = self.plan.products[0 if norm == "post" else 2].splits
        total = rows_of(self.refs["parts"].at[0, rows], _WGMMA)
        for part in range(1, split):
            total = total + rows_of(self.refs["parts"].at[part, rows], _WGMMA)
        stream = rows_of(before.at[rows], _WGMMA) + total
        self.refs["stream"].at[rows][...] = stream
        self.refs["squares"].at[self.cta][...] = (stream * stream).sum(axis=0)
        if norm == "next" and len(self.plan.products) == 3:
            return
        weight = rows_of(self.refs[f"{norm}_norm"].at[rows], _WGMMA.reduce(1)).astype(jnp.float32)
        scaled = stream * lax.broadcast_in_dim(weight, stream.shape, [0])
        self._store("scaled", self.cta * ROWS, scaled, ROWS, self.plan.live)
