"""The Hopper kernel: persistent CTAs stream the weights of the experts that are taken, each once.

Weights are the left operand of the matrix instruction and an expert's rows of x the right one, so that few rows waste nothing. One
warpgroup starts copies of weights into a ring of shared memory and runs ahead across items, and across the two products; a second
one gathers blocks of activations; the third multiplies. Every CTA sorts the entries by expert for itself before it begins.

Measured on an H200, worse: bringing the next layer's projections to the cache at the end (a step of 48 layers 3.21 ms, not 2.93).
"""

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.fused.experts import mosaic_gpu_ops as ops
from dflash_kernels.fused.experts.mosaic_gpu_sort import sort_entries
from dflash_kernels.fused.experts.plan import BLOCK, ROWS, UNIT, Plan
from dflash_kernels.mosaic_gpu.layouts import TILED
from dflash_kernels.mosaic_gpu.pipeline import div, rem
from dflash_kernels.mosaic_gpu.softmax import sigmoid
from dflash_kernels.mosaic_gpu.tma import copied

_MULTIPLY, _WEIGHTS, _ACTIVATIONS = range(3)
GATED, DOWN = "gated", "down"


def experts(
    plan: Plan,
    x: jax.Array,
    entries: jax.Array,
    weights: jax.Array | None,
    gate_up: jax.Array,
    down: jax.Array,
    exchange: Any,
    interpret: Any = None,
) -> jax.Array:
    """`[k, T, D]` float32; matrices are `[E * 2F, D]` and `[E * D, F]`, `entries` and `weights` `[T * k]`.

    `exchange` is a Ref of `plan.groups` zeros or more that no other launch uses at the same time, and holds zeros afterwards. Where
    the plan chooses, `entries` are the logits `[T * E]` and `weights` None.
    """
    inner = jax.ShapeDtypeStruct((plan.entries, plan.inner), x.dtype)
    out = jax.ShapeDtypeStruct((plan.taken, plan.tokens, plan.hidden), jnp.float32)
    given, names = ((entries,), ("entries",)) if weights is None else ((entries, weights), ("entries", "weights"))
    if interpret is None:
        both = _launch(plan, x.dtype, (GATED, DOWN), ("x", *names, "gate_up", "down", "ready"), (inner, out))
        return both(x, *given, gate_up, down, exchange)[1]
    # The interpreter cannot make CTAs wait for each other: one launch for each product.
    between = _launch(plan, x.dtype, (GATED,), ("x", *names, "gate_up"), (inner,), interpret)
    (between,) = between(x, *given, gate_up)
    last = _launch(plan, x.dtype, (DOWN,), ("inner", *names, "down"), (out,), interpret)
    return last(between, *given, down)[0]


def _launch(
    plan: Plan,
    dtype: Any,
    stages: tuple[str, ...],
    names: tuple[str, ...],
    outs: tuple[Any, ...],
    interpret: Any = None,
):
    results = [{GATED: "inner", DOWN: "out"}[stage] for stage in stages]

    def body(*refs, **buffers):
        _Cta(plan, stages, dict(zip((*names, *results), refs, strict=True)), buffers, interpret).run()

    body.__name__ = "_".join(("experts", *stages))  # what profilers show
    return plgpu.kernel(
        body, out_type=outs, scratch_types=_scratch(plan, dtype),
        grid=(plan.ctas,), grid_names=("cta",), num_threads=3, thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True), **({} if interpret is None else {"interpret": interpret}),
    )  # fmt: skip


def _scratch(plan: Plan, dtype: Any) -> dict[str, Any]:
    """Shared memory and barriers of one CTA."""
    return {
        "w_sm": plgpu.SMEM((plan.slots, 2 * ROWS, BLOCK), dtype, transforms=TILED),
        "x_sm": plgpu.SMEM((plan.x_slots, UNIT, plan.columns, BLOCK), dtype, transforms=TILED),
        "sorted": plgpu.SMEM((plan.padded,), jnp.int32), "share": plgpu.SMEM((plan.padded,), jnp.float32),
        "spare": plgpu.SMEM((2 * plan.padded + plan.threads,), jnp.int32), "groups": plgpu.SMEM((3 * plan.groups + 1,), jnp.int32),
        "dealt": plgpu.Barrier(),
        "w_in": plgpu.Barrier(num_arrivals=2, num_barriers=plan.slots), "w_out": plgpu.Barrier(num_barriers=plan.slots),
        "x_in": plgpu.Barrier(num_barriers=plan.x_slots), "x_out": plgpu.Barrier(num_barriers=plan.x_slots),
    }  # fmt: skip


class _Cta:
    """The work of one CTA."""

    def __init__(
        self, plan: Plan, stages: tuple[str, ...], refs: dict[str, Any], buffers: dict[str, Any], interpret: Any
    ):
        self.plan, self.stages, self.refs, self.buffers, self.interpret = plan, stages, refs, buffers, interpret
        self.cta = lax.axis_index("cta")

    def run(self) -> None:
        wg = lax.axis_index("wg")
        pl.when(wg == _MULTIPLY)(self._multiply)
        pl.when(wg == _WEIGHTS)(self._bring_weights)
        pl.when(wg == _ACTIVATIONS)(self._bring_activations)

    def _tiles(self, stage: str) -> int:
        return self.plan.gated_tiles if stage == GATED else self.plan.down_tiles

    def _units(self, stage: str) -> int:
        """Slots of activations of one item."""
        return (self.plan.hidden if stage == GATED else self.plan.inner) // (UNIT * BLOCK)

    def _items(self, work) -> Any:
        """`work(stage, units before, group, tile)` for all items in turn, once the entries are sorted; then the units of all."""
        before, used = jnp.int32(0), self.buffers["groups"][3 * self.plan.groups]
        for stage in self.stages:
            tiles, units = self._tiles(stage), self._units(stage)
            turns = div(used * tiles - self.cta + self.plan.ctas - 1, self.plan.ctas)

            def one(turn, _, stage=stage, tiles=tiles, units=units, before=before):
                item = self.cta + turn * self.plan.ctas
                work(stage, before + turn * units, div(item, tiles), rem(item, tiles))

            lax.fori_loop(0, turns, one, None)
            before = before + turns * units
        return before

    def _group(self, group):
        """Expert, first place among the sorted entries, and how many there are."""
        return [self.buffers["groups"][row * self.plan.groups + group] for row in range(3)]

    def _bring_weights(self) -> None:
        plan, (target, arrived, left) = self.plan, (self.buffers[name] for name in ("w_sm", "w_in", "w_out"))
        plgpu.barrier_wait(self.buffers["dealt"])

        def bring(stage, before, group, tile):
            expert, _, _ = self._group(group)
            if stage == GATED:
                source, rows = self.refs["gate_up"], plan.gated_rows
                first = expert * (2 * plan.inner) + tile * rows
                second = first + plan.inner
            else:
                source, rows = self.refs["down"], ROWS
                first = expert * plan.hidden + tile * (2 * rows)
                second = first + rows

            def block(step, _):
                index = before * UNIT + step
                slot = rem(index, plan.slots)
                pl.when(index >= plan.slots)(lambda: plgpu.barrier_wait(left.at[slot]))
                for half, row in enumerate((first, second)):
                    tile = source.at[pl.ds(row, rows), pl.ds(step * BLOCK, BLOCK)]
                    plgpu.copy_gmem_to_smem(tile, target.at[slot, pl.ds(half * ROWS, rows)], arrived.at[slot])

            lax.fori_loop(0, self._units(stage) * UNIT, block, None)

        blocks = self._items(bring) * UNIT
        self._drain(blocks, plan.slots, left)

    def _bring_activations(self) -> None:
        plan, (target, arrived, left) = self.plan, (self.buffers[name] for name in ("x_sm", "x_in", "x_out"))
        plgpu.barrier_wait(self.buffers["dealt"])
        lag = plan.x_slots // 2

        def bring(stage, before, group, _tile):
            _, first, live = self._group(group)
            held = self.refs["x" if stage == GATED else "inner"]
            if stage == DOWN and "ready" in self.refs:
                ops.await_tiles(self.refs["ready"], group, given=plan.gated_tiles, taken=plan.down_tiles)

            def unit(step, _):
                index = before + step
                slot = rem(index, plan.x_slots)
                pl.when(index >= plan.x_slots)(lambda: plgpu.barrier_wait(left.at[slot]))
                ops.copy_entries(
                    held, step * (UNIT * BLOCK), target.at[slot], self.buffers["sorted"], first, live,
                    taken=plan.taken if stage == GATED else 0, interpret=self.interpret,
                )  # fmt: skip

                @pl.when(step >= lag)
                def _():
                    copied(lag, self.interpret)
                    plgpu.barrier_arrive(arrived.at[rem(index - lag, plan.x_slots)])

            units = self._units(stage)
            lax.fori_loop(0, units, unit, None)
            copied(0, self.interpret)
            begun = jnp.int32(max(units - lag, 0))
            lax.fori_loop(
                begun, units, lambda step, _: plgpu.barrier_arrive(arrived.at[rem(before + step, plan.x_slots)]), None
            )

        self._drain(self._items(bring), plan.x_slots, left)

    def _drain(self, count, slots: int, left) -> None:
        """Every completion of a barrier is waited for."""
        lax.fori_loop(
            jnp.maximum(count - slots, 0), count, lambda index, _: plgpu.barrier_wait(left.at[rem(index, slots)]), None
        )

    def _multiply(self) -> None:
        sort_entries(self.plan, self.refs["entries"], self.refs.get("weights"), self.buffers, self.interpret)
        plgpu.barrier_arrive(self.buffers["dealt"])
        plgpu.barrier_wait(self.buffers["dealt"])
        self._items(self._item)

    def _item(self, stage, before, group, tile) -> None:
        _, first, live = self._group(group)
        upper, lower = self._product(self._units(stage), before)
        if stage == GATED:
            inner = upper * sigmoid(upper) * lower
            rows = self.plan.gated_rows
            ops.put_inner(self.refs["inner"], inner, first, live, tile * rows, rows=rows, interpret=self.interpret)
            if "ready" in self.refs:
                ops.announce_tile(self.refs["ready"], group)
            return
        order, share = self.buffers["sorted"], self.buffers["share"]
        for half, product in enumerate((upper, lower)):
            feature = (tile * 2 + half) * ROWS
            ops.put_out(self.refs["out"], product, order, share, first, live, feature, self.interpret)

    def _product(self, units: int, before):
        """The two halves of an item's weight rows times a group's columns."""
        plan, shape = self.plan, (ROWS, self.plan.columns)
        w_sm, w_in, w_out, x_sm, x_in, x_out = (
            self.buffers[name] for name in ("w_sm", "w_in", "w_out", "x_sm", "x_in", "x_out")
        )

        def multiply(*accs):
            def unit(step, _):
                x_slot = rem(before + step, plan.x_slots)
                plgpu.barrier_wait(x_in.at[x_slot])
                for block in range(UNIT):
                    index = (before + step) * UNIT + block
                    slot = rem(index, plan.slots)
                    plgpu.barrier_wait(w_in.at[slot])
                    x = x_sm.at[x_slot, block].transpose((1, 0))
                    for half, acc in enumerate(accs):
                        plgpu.wgmma(acc, w_sm.at[slot, pl.ds(half * ROWS, ROWS)], x)
                    # All but this block's instructions are done: the slot before can be filled again.
                    plgpu.wgmma_wait(len(accs))
                    again = step * UNIT + block > 0
                    pl.when(again)(lambda index=index: plgpu.barrier_arrive(w_out.at[rem(index - 1, plan.slots)]))
                pl.when(step > 0)(lambda: plgpu.barrier_arrive(x_out.at[rem(before + step - 1, plan.x_slots)]))

            lax.fori_loop(0, units, unit, None)
            results = tuple(acc[...] for acc in accs)
            plgpu.barrier_arrive(w_out.at[rem((before + units) * UNIT - 1, plan.slots)])
            plgpu.barrier_arrive(x_out.at[rem(before + units - 1, plan.x_slots)])
            return results

        return pl.run_scoped(multiply, *[plgpu.ACC(shape, jnp.float32) for _ in range(2)])
