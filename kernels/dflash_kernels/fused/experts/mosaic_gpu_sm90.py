"""Mixture of experts for few rows on Hopper: persistent CTAs stream the weights of the experts that are taken, each once.

Weights are the left operand of the matrix instruction and an expert's rows of x the right one, so that few rows waste nothing. The
consumer warpgroup sorts the entries by expert, every CTA for itself, then multiplies. The weights' producer starts TMA copies into
a ring and runs ahead across work items and across the two products; the activations' producer gathers rows with `cp.async`.
"""

# Measured on an H200, worse: bringing the next layer's projections to the cache at the end (a step of 48 layers 3.21 ms, not 2.93).

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.fused.experts.plan import BLOCK, ROWS, UNIT, Plan
from dflash_kernels.fused.experts.routing_sm90 import sort_call
from dflash_kernels.fused.experts.rows_sm90 import gather_rows, store_out, zero_rows
from dflash_kernels.mosaic_gpu import ptx as th
from dflash_kernels.mosaic_gpu import stages
from dflash_kernels.mosaic_gpu.counters import announce, await_announced
from dflash_kernels.mosaic_gpu.layouts import TILED
from dflash_kernels.mosaic_gpu.pipeline import Ring, div, rem
from dflash_kernels.mosaic_gpu.softmax import sigmoid
from dflash_kernels.mosaic_gpu.thread_op import GLOBAL, MATRIX, SCALAR, thread_op
from dflash_kernels.mosaic_gpu.tma import copied, prefetch_rows

GATED, DOWN = "gated", "down"


# Launch


def experts(
    plan: Plan,
    x: jax.Array,
    entries: jax.Array,
    named: Mapping[str, jax.Array],
    gate_up: jax.Array,
    down: jax.Array,
    ready: Any,
    interpret: Any = None,
) -> jax.Array:
    """`[k, T, D]` float32; matrices are `[E * 2F, D]` and `[E * D, F]`, `entries` and `weights`, which is `named`, `[T * k]`.

    `ready` is a Ref of `plan.groups` zeros or more that no other launch uses at the same time, and holds zeros afterwards. Where
    the plan chooses, `entries` are the logits, one after the other, and no weights are named; of a share of the experts `first [1]`
    is the number of the first one.
    """
    given = {"x": x, "entries": entries, **named, "gate_up": gate_up, "down": down, "ready": ready}
    results = {
        "inner": jax.ShapeDtypeStruct((plan.entries, plan.inner), x.dtype),
        "out": jax.ShapeDtypeStruct((plan.top_k, plan.tokens, plan.hidden), jnp.float32),
    }
    return stages.launch(
        program(plan), "experts_gated_down", (GATED, DOWN), given, results, interpret=interpret,
        scratch_types=_scratch(plan, x.dtype), grid=(plan.ctas,), grid_names=("cta",), num_threads=3, thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )["out"]  # fmt: skip


def program(plan: Plan) -> Callable[..., None]:
    """The CTA program, as `stages.launch` takes it."""
    return lambda stages, refs, buffers: run(Cta(plan, stages, refs, buffers, lax.axis_index("cta")))


def _scratch(plan: Plan, dtype: Any) -> dict[str, Any]:
    """Shared memory and barriers of one CTA."""
    w_full, w_empty = plgpu.Barrier(num_arrivals=2, num_barriers=plan.stages), plgpu.Barrier(num_barriers=plan.stages)
    x_ring = plgpu.Barrier(num_barriers=plan.x_stages)
    return {
        "w_sm": plgpu.SMEM((plan.stages, 2 * ROWS, BLOCK), dtype, transforms=TILED), "w_ring": (w_full, w_empty),
        "x_sm": plgpu.SMEM((plan.x_stages, UNIT, plan.columns, BLOCK), dtype, transforms=TILED), "x_ring": (x_ring, x_ring),
        "sorted": plgpu.SMEM((plan.padded,), jnp.int32), "shares": plgpu.SMEM((plan.padded,), jnp.float32),
        "spare": plgpu.SMEM((plan.spare,), jnp.int32), "groups": plgpu.SMEM((3 * plan.groups + 1,), jnp.int32),
        "is_sorted": plgpu.Barrier(),
    }  # fmt: skip


# CTA program


@dataclasses.dataclass(frozen=True)
class Cta:
    """State of a CTA's program, which its functions share.

    Attributes:
      stages: products that this launch runs, in order.
      refs: arrays in global memory; buffers: shared memory and barriers, by name.
      index: of this CTA in the grid.
    """

    plan: Plan
    stages: Sequence[str]
    refs: Mapping[str, Any]
    buffers: Mapping[str, Any]
    index: Any

    @property
    def weights(self) -> Ring:
        return Ring(self.plan.stages, *self.buffers["w_ring"])

    @property
    def activations(self) -> Ring:
        return Ring(self.plan.x_stages, *self.buffers["x_ring"])

    def x_tiles(self, stage: str) -> int:
        """Stages of activations of one work item."""
        return (self.plan.hidden if stage == GATED else self.plan.inner) // (UNIT * BLOCK)

    def first_feature(self, tile: Any) -> Any:
        """First feature of a tile of the first product."""
        return jnp.minimum(tile * self.plan.gated_rows, self.plan.inner - self.plan.gated_rows)

    def group(self, group: Any) -> list[Any]:
        """Expert, first place among the sorted entries, and how many there are."""
        return [self.buffers["groups"][row * self.plan.groups + group] for row in range(3)]

    def work_items(self, work: Callable[..., None]) -> Any:
        """`work(stage, steps before, group, tile)` for all work items in turn, once entries are sorted; then the steps of all."""
        before, used = jnp.int32(0), self.buffers["groups"][3 * self.plan.groups]
        for stage in self.stages:
            tiles = self.plan.gated_tiles if stage == GATED else self.plan.down_tiles
            steps = self.x_tiles(stage)
            # Those that have nothing of the first product take more of the second.
            behind = stage == DOWN and self.plan.one_turn
            first = self.plan.ctas - 1 - self.index if behind else self.index
            turns = div(used * tiles - first + self.plan.ctas - 1, self.plan.ctas)

            def one(turn: Any, _: None, stage=stage, tiles=tiles, steps=steps, before=before, first=first) -> None:
                item = first + turn * self.plan.ctas
                work(stage, before + turn * steps, div(item, tiles), rem(item, tiles))

            lax.fori_loop(0, turns, one, None)
            before = before + turns * steps
        return before


def run(cta: Cta) -> None:
    """Dispatches the warpgroups: consumer, producer of weights, producer of activations."""
    warpgroup = lax.axis_index("wg")
    for index, work in enumerate((consume, produce_weights, produce_activations)):
        pl.when(warpgroup == index)(lambda work=work: work(cta))


# Producers


def produce_weights(cta: Cta) -> None:
    """Starts the copies of all work items' weights, each as soon as its stage is empty."""
    plan, ring = cta.plan, cta.weights
    if plan.choice is not None and plan.choice.shared and plan.among is None:
        _ask_for_shared(cta)
    plgpu.barrier_wait(cta.buffers["is_sorted"])

    def produce(stage: str, before: Any, group: Any, tile: Any) -> None:
        expert, _, _ = cta.group(group)
        if stage == GATED:
            source, rows = cta.refs["gate_up"], plan.gated_rows
            first = expert * (2 * plan.inner) + cta.first_feature(tile)
            second = first + plan.inner
        else:
            source, rows = cta.refs["down"], ROWS
            first = expert * plan.hidden + tile * (2 * rows)
            second = first + rows

        def fill(k_tile: Any, _: None) -> None:
            step = before * UNIT + k_tile
            place = ring.stage(step)
            ring.producer_acquire(step, place)
            for half, row in enumerate((first, second)):
                tile = source.at[pl.ds(row, rows), pl.ds(k_tile * BLOCK, BLOCK)]
                target = cta.buffers["w_sm"].at[place, pl.ds(half * ROWS, rows)]
                plgpu.copy_gmem_to_smem(tile, target, ring.full.at[place])

        lax.fori_loop(0, cta.x_tiles(stage) * UNIT, fill, None)

    steps = cta.work_items(produce) * UNIT
    ring.drain(steps)


def _ask_for_shared(cta: Cta) -> None:
    """The expert that every token takes is on its way to the L2 while entries are sorted: each CTA asks for some of its rows."""
    plan = cta.plan
    for name, rows in (("gate_up", 2 * plan.inner), ("down", plan.hidden)):
        # Both are multiples of 128, so parts of a power of two leave none out.
        part = min(1 << (-(-rows // plan.ctas) - 1).bit_length(), 128)
        turns = -(-rows // (part * plan.ctas))
        for turn in range(turns):
            first = (cta.index + turn * plan.ctas) * part

            @pl.when(first < rows)
            def _(name: str = name, first: Any = first, part: int = part, rows: int = rows) -> None:
                prefetch_rows(cta.refs[name].at[pl.ds(plan.ranked * rows + first, part)])


def produce_activations(cta: Cta) -> None:
    """Gathers the rows of each work item's group, half a ring at a time."""
    plan, ring = cta.plan, cta.activations
    plgpu.barrier_wait(cta.buffers["is_sorted"])
    lag = plan.x_stages // 2

    def produce(stage: str, before: Any, group: Any, _tile: Any) -> None:
        _, first, live = cta.group(group)
        source = cta.refs["x" if stage == GATED else "inner"]
        if stage == DOWN:
            await_announced(cta.refs["ready"], group, given=plan.gated_tiles, taken=plan.down_tiles)

        def fill(x_tile: Any, _: None) -> None:
            step = before + x_tile
            place = ring.stage(step)
            ring.producer_acquire(step, place)
            gather_rows(
                source, x_tile * (UNIT * BLOCK), cta.buffers["x_sm"].at[place], cta.buffers["sorted"], first, live,
                top_k=plan.top_k if stage == GATED else 0,
            )  # fmt: skip

            @pl.when(x_tile >= lag)
            def _():
                copied(lag)
                plgpu.barrier_arrive(ring.full.at[ring.stage(step - lag)])

        count = cta.x_tiles(stage)
        lax.fori_loop(0, count, fill, None)
        copied(0)
        begun = jnp.int32(max(count - lag, 0))
        lax.fori_loop(
            begun, count, lambda x_tile, _: plgpu.barrier_arrive(ring.full.at[ring.stage(before + x_tile)]), None
        )

    ring.drain(cta.work_items(produce))


# Consumer


def consume(cta: Cta) -> None:
    """Sorts, then multiplies and has the epilogues, work item by work item."""
    sort_call(cta)
    plgpu.barrier_arrive(cta.buffers["is_sorted"])
    plgpu.barrier_wait(cta.buffers["is_sorted"])
    if cta.plan.among is not None:
        out, how = cta.refs["out"], {"entries": cta.plan.entries, "ctas": cta.plan.ctas}
        zero_rows(out, cta.buffers["spare"], cta.index, **how, shape=out.shape)
    cta.work_items(lambda *item: _work_item(cta, *item))


def _work_item(cta: Cta, stage: str, before: Any, group: Any, tile: Any) -> None:
    _, first, live = cta.group(group)
    upper, lower = _mainloop(cta, cta.x_tiles(stage), before)
    if stage == GATED:
        inner, rows = upper * sigmoid(upper) * lower, cta.plan.gated_rows
        feature = cta.first_feature(tile)
        store_inner(cta.refs["inner"], inner.astype(cta.refs["inner"].dtype), first, live, feature, rows=rows)
        announce(cta.refs["ready"], group)
        return
    order, shares = cta.buffers["sorted"], cta.buffers["shares"]
    for half, product in enumerate((upper, lower)):
        feature = (tile * 2 + half) * ROWS
        store_out(cta.refs["out"], product, order, shares, first, live, feature, shape=cta.refs["out"].shape)


def _mainloop(cta: Cta, x_tiles: int, before: Any) -> tuple[Any, Any]:
    """The two halves of a work item's weight rows times a group's columns."""
    w_ring, x_ring, w_sm, x_sm = cta.weights, cta.activations, cta.buffers["w_sm"], cta.buffers["x_sm"]

    def multiply(*accs: Any) -> tuple[Any, ...]:
        def one(x_tile: Any, _: None) -> None:
            x_stage = x_ring.stage(before + x_tile)
            x_ring.consumer_wait(x_stage)
            for block in range(UNIT):
                step = (before + x_tile) * UNIT + block
                stage = w_ring.stage(step)
                w_ring.consumer_wait(stage)
                x = x_sm.at[x_stage, block].transpose((1, 0))
                for half, acc in enumerate(accs):
                    plgpu.wgmma(acc, w_sm.at[stage, pl.ds(half * ROWS, ROWS)], x)
                # All but this block's instructions are done: the stage before can be filled again.
                plgpu.wgmma_wait(len(accs))
                again = x_tile * UNIT + block > 0
                pl.when(again)(lambda step=step: w_ring.consumer_release(w_ring.stage(step - 1)))
            pl.when(x_tile > 0)(lambda: x_ring.consumer_release(x_ring.stage(before + x_tile - 1)))

        lax.fori_loop(0, x_tiles, one, None)
        results = tuple(acc[...] for acc in accs)
        w_ring.consumer_release(w_ring.stage((before + x_tiles) * UNIT - 1))
        x_ring.consumer_release(x_ring.stage(before + x_tiles - 1))
        return results

    shape = (ROWS, cta.plan.columns)
    return pl.run_scoped(multiply, *[plgpu.ACC(shape, jnp.float32) for _ in range(2)])


def _store_inner_interpreted(target: Any, tile: Any, first: Any, live: Any, feature: Any, *, rows: int) -> None:
    for column in range(tile.shape[1]):

        @pl.when(column < live)
        def _(column=column):
            target.at[first + column, pl.ds(feature, rows)][...] = tile[:rows, column]


@thread_op(args=(GLOBAL, MATRIX, SCALAR, SCALAR, SCALAR), interpret=_store_inner_interpreted)
def store_inner(target: Any, tile: Any, first: Any, live: Any, feature: Any, *, rows: int) -> None:
    """`target[first + column, feature + row] = tile[row, column]`, two bytes each, for the first rows and `live` columns."""
    pitch, base = th.shape_and_strides(target)[0][1], th.word_address(target, th.number(0))

    def store(value: Any, position: Any) -> None:
        row, column = (th.index_word(place) for place in position)
        element = th.add(th.mul(th.add(first, column), pitch), th.add(feature, row))
        there = th.compare(column, "ult", live)
        if rows < tile.shape[0]:
            there = th.every(there, th.under(row, rows))
        bits = th.bits(value)
        th.when(there, "st.global.b16 [$0], $1;", th.offset(base, th.mul(element, 2)), bits)

    tile.foreach(store)
