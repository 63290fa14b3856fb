"""Mixture of experts in MXFP4 for few rows on Hopper: persistent CTAs stream the four-bit weights of the experts that are taken.

As in `fused.experts`, weights are the left operand of the matrix instruction and an expert's rows of x the right one; sorting,
gathering and the hand-over between the two products are that kernel's. What differs: a work item is 64 rows of weights, whose tiles
the consumers share, since widening four bits keeps several warpgroups busy. Each widens its tiles from shared memory to registers,
exactly, and multiplies; the first one adds up what they have and runs the epilogue. Where tokens are so few that the second product
has too few items for the GPU, its columns are cut into parts, whose results are added by whoever wants them.

Where rows are so few that all their columns fit shared memory, `mosaic_gpu_mxfp4_few_sm90` does the same another way, and
`mosaic_gpu_mxfp4_one_sm90` of one token.
"""

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.core.mxfp4 import PIECE, PIECES, SHIFT, TILE
from dflash_kernels.fused.experts import mosaic_gpu_mxfp4_few_sm90 as few
from dflash_kernels.fused.experts import mosaic_gpu_mxfp4_one_sm90 as one
from dflash_kernels.fused.experts.plan_mxfp4 import Mxfp4Plan
from dflash_kernels.fused.experts.routing_sm90 import sort_call
from dflash_kernels.fused.experts.rows_sm90 import gather_rows, store_out
from dflash_kernels.mosaic_gpu import stages
from dflash_kernels.mosaic_gpu.counters import announce, await_announced
from dflash_kernels.mosaic_gpu.layouts import TILED, row_of
from dflash_kernels.mosaic_gpu.mxfp4 import add_kept, gated_bias, keep, store_gated, widened
from dflash_kernels.mosaic_gpu.pipeline import Ring, div, rem
from dflash_kernels.mosaic_gpu.tma import copied
from dflash_kernels.mosaic_gpu.wgmma import add_tiles, zeros

GATED, DOWN = "gated", "down"


# Launch


def experts(
    plan: Mxfp4Plan,
    x: jax.Array,
    routing: Mapping[str, jax.Array],
    matrices: Sequence[jax.Array],
    ready: Any,
    interpret: Any = None,
) -> jax.Array:
    """`[parts, k, T, D]` float32.

    Args:
      routing: `entries` and `weights` `[T * k]`; where the plan chooses, `entries` are the logits, one after the other, without
        weights, and of a share of the experts `first [1]` is the number of the first one.
      matrices: pieces of the gated matrices' tiles `[pieces, 136]`, their biases `[E * 2F]`, and both of the second ones.
      ready: a Ref of `plan.groups` zeros or more that no other launch uses at the same time, and holds zeros afterwards.
    """
    given = {"x": x, **routing}
    given |= dict(zip(("gate_up", "gate_up_bias", "down", "down_bias"), matrices, strict=True)) | {"ready": ready}
    results = {
        "inner": jax.ShapeDtypeStruct((plan.entries, plan.inner), x.dtype),
        "out": jax.ShapeDtypeStruct((plan.parts, plan.top_k, plan.tokens, plan.hidden), jnp.float32),
    }
    name, made, warpgroups = "mxfp4_experts_gated_down", (program, scratch), plan.consumers + 2
    if plan.alone:
        name, made, warpgroups = "mxfp4_experts_one_gated_down", (one.program, one.scratch), plan.consumers + 3
    elif plan.resident:
        name, made = "mxfp4_experts_few_gated_down", (few.program, few.scratch)
    body, memory = made[0](plan), made[1](plan, x.dtype)
    return stages.launch(
        body, name, (GATED, DOWN), given, results, interpret=interpret, scratch_types=memory, grid=(plan.ctas,),
        grid_names=("cta",), num_threads=warpgroups, thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )["out"]  # fmt: skip


def program(plan: Mxfp4Plan) -> Callable[..., None]:
    """The CTA program, as `stages.launch` takes it."""
    return lambda stages, refs, buffers: run(Cta(plan, stages, refs, buffers, lax.axis_index("cta")))


def scratch(plan: Mxfp4Plan, dtype: Any) -> dict[str, Any]:
    """Shared memory and barriers of one CTA."""

    def ring(stages: int) -> tuple[Any, Any]:
        return (
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_arrivals=plan.consumers, num_barriers=stages),
        )

    buffers = {
        "w_sm": plgpu.SMEM((plan.stages, plan.consumers * PIECES, PIECE), jnp.int32), "w_ring": ring(plan.stages),
        "x_sm": plgpu.SMEM((plan.x_stages, plan.consumers, plan.columns, TILE), dtype, transforms=TILED),
        "x_ring": ring(plan.x_stages),
        "sorted": plgpu.SMEM((plan.padded,), jnp.int32), "shares": plgpu.SMEM((plan.padded,), jnp.float32),
        "spare": plgpu.SMEM((plan.spare,), jnp.int32), "groups": plgpu.SMEM((3 * plan.groups + 1,), jnp.int32),
        "is_sorted": plgpu.Barrier(),
    }  # fmt: skip
    if plan.consumers > 1:
        buffers["kept"] = plgpu.SMEM((plan.consumers - 1, TILE, plan.columns), jnp.float32)
        buffers["given"], buffers["taken"] = plgpu.Barrier(num_arrivals=plan.consumers - 1), plgpu.Barrier()
    return buffers


# CTA program


@dataclasses.dataclass(frozen=True)
class Cta:
    """State of a CTA's program, which its functions share.

    Attributes:
      stages: products that this launch runs, in order.
      refs: arrays in global memory; buffers: shared memory and barriers, by name.
      index: of this CTA in the grid.
    """

    plan: Mxfp4Plan
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

    def steps(self, stage: str) -> int:
        """Stages of one work item: of its columns, so many tiles as there are consumers."""
        if stage == GATED:
            return self.plan.hidden // TILE // self.plan.consumers
        return self.plan.inner // TILE // self.plan.consumers // self.plan.parts

    def group(self, group: Any) -> list[Any]:
        """Expert, first place among the sorted entries, and how many there are."""
        return [self.buffers["groups"][row * self.plan.groups + group] for row in range(3)]

    def work_items(self, work: Callable[..., None]) -> tuple[Any, Any]:
        """`work(stage, items before, steps before, group, tile, part)` for all work items in turn, once entries are sorted.

        Returns how many items and steps there were.
        """
        items, steps, used = jnp.int32(0), jnp.int32(0), self.buffers["groups"][3 * self.plan.groups]
        for stage in self.stages:
            parts = 1 if stage == GATED else self.plan.parts
            tiles = self.plan.gated_tiles if stage == GATED else self.plan.down_tiles
            of_item = self.steps(stage)
            turns = div(used * (tiles * parts) - self.index + self.plan.ctas - 1, self.plan.ctas)

            def one(
                turn: Any, _: None, stage=stage, tiles=tiles, parts=parts, of_item=of_item, items=items, steps=steps
            ) -> None:
                item = self.index + turn * self.plan.ctas
                place = rem(item, tiles * parts)
                work(
                    stage, items + turn, steps + turn * of_item, div(item, tiles * parts), div(place, parts), rem(place, parts)
                )  # fmt: skip

            lax.fori_loop(0, turns, one, None)
            items, steps = items + turns, steps + turns * of_item
        return items, steps


def run(cta: Cta) -> None:
    """Dispatches the warpgroups: consumers, producer of weights, producer of activations."""
    warpgroup, consumers = lax.axis_index("wg"), cta.plan.consumers
    pl.when(warpgroup < consumers)(lambda: consume(cta, warpgroup))
    pl.when(warpgroup == consumers)(lambda: produce_weights(cta))
    pl.when(warpgroup == consumers + 1)(lambda: produce_activations(cta))


# Producers


def produce_weights(cta: Cta) -> None:
    """Starts the copies of all work items' weights, each as soon as its stage is empty."""
    plan, ring = cta.plan, cta.weights
    plgpu.barrier_wait(cta.buffers["is_sorted"])

    def produce(stage: str, _items: Any, before: Any, group: Any, tile: Any, part: Any) -> None:
        expert, _, _ = cta.group(group)
        name, tiles, units = (
            ("gate_up", plan.gated_tiles, plan.hidden) if stage == GATED else ("down", plan.down_tiles, plan.inner)
        )
        pieces, count = plan.consumers * PIECES, cta.steps(stage)
        first = (expert * tiles + tile) * (units // TILE * PIECES) + part * (count * pieces)

        def fill(step: Any, _: None) -> None:
            place = ring.stage(before + step)
            ring.producer_acquire(before + step, place)
            source = cta.refs[name].at[pl.ds(first + step * pieces, pieces)]
            plgpu.copy_gmem_to_smem(source, cta.buffers["w_sm"].at[place], ring.full.at[place])

        lax.fori_loop(0, count, fill, None)

    ring.drain(cta.work_items(produce)[1])


def produce_activations(cta: Cta) -> None:
    """Gathers the rows of each work item's group, half a ring at a time."""
    plan, ring = cta.plan, cta.activations
    plgpu.barrier_wait(cta.buffers["is_sorted"])
    lag = plan.x_stages // 2

    def produce(stage: str, _items: Any, before: Any, group: Any, _tile: Any, part: Any) -> None:
        _, first, live = cta.group(group)
        source, count, width = cta.refs["x" if stage == GATED else "inner"], cta.steps(stage), plan.consumers * TILE
        if stage == DOWN:
            await_announced(cta.refs["ready"], group, given=plan.gated_tiles, taken=plan.down_tiles * plan.parts)

        def fill(step: Any, _: None) -> None:
            place = ring.stage(before + step)
            ring.producer_acquire(before + step, place)
            gather_rows(
                source, (part * count + step) * width, cta.buffers["x_sm"].at[place], cta.buffers["sorted"], first, live,
                top_k=plan.top_k if stage == GATED else 0,
            )  # fmt: skip

            @pl.when(step >= lag)
            def _():
                copied(lag)
                plgpu.barrier_arrive(ring.full.at[ring.stage(before + step - lag)])

        lax.fori_loop(0, count, fill, None)
        copied(0)
        begun = jnp.int32(max(count - lag, 0))
        lax.fori_loop(begun, count, lambda step, _: plgpu.barrier_arrive(ring.full.at[ring.stage(before + step)]), None)

    ring.drain(cta.work_items(produce)[1])


# Consumers


def consume(cta: Cta, warpgroup: Any) -> None:
    """The first one sorts; all multiply, work item by work item, and the first one has the epilogues."""

    @pl.when(warpgroup == 0)
    def _():
        sort_call(cta)
        plgpu.barrier_arrive(cta.buffers["is_sorted"])
        few.zero_others(cta)

    plgpu.barrier_wait(cta.buffers["is_sorted"])
    items, _ = cta.work_items(lambda *item: _work_item(cta, warpgroup, *item))
    if cta.plan.consumers > 1:
        # Every completion of a barrier is waited for.
        pl.when((warpgroup > 0) & (items > 0))(lambda: plgpu.barrier_wait(cta.buffers["taken"]))


def _work_item(cta: Cta, warpgroup: Any, stage: str, items: Any, before: Any, group: Any, tile: Any, part: Any) -> None:
    own = _mainloop(cta, warpgroup, cta.steps(stage), before)
    if cta.plan.consumers == 1:
        _epilogue(cta, own, stage, group, tile, part)
        return

    @pl.when(warpgroup > 0)
    def _():
        pl.when(items > 0)(lambda: plgpu.barrier_wait(cta.buffers["taken"]))
        keep(cta.buffers["kept"].at[warpgroup - 1], own)
        plgpu.barrier_arrive(cta.buffers["given"])

    @pl.when(warpgroup == 0)
    def _():
        plgpu.barrier_wait(cta.buffers["given"])
        product = own
        for other in range(cta.plan.consumers - 1):
            product = add_kept(product, cta.buffers["kept"].at[other])
        plgpu.barrier_arrive(cta.buffers["taken"])
        _epilogue(cta, product, stage, group, tile, part)


def _epilogue(cta: Cta, product: Any, stage: str, group: Any, tile: Any, part: Any) -> None:
    expert, first, live = cta.group(group)
    if stage == GATED:
        bias, gate = gated_bias(cta.refs["gate_up_bias"], expert * cta.plan.gated_tiles + tile), cta.plan.gate
        where = tile * (TILE // 2), first, live
        store_gated(cta.refs["inner"], product, bias, *where, alpha=gate.alpha, limit=gate.limit)
        announce(cta.refs["ready"], group)
        return
    feature, out = tile * TILE, cta.refs["out"].at[part]
    bias = cta.refs["down_bias"].at[pl.ds(expert * cta.plan.hidden + feature, TILE)]
    bias = row_of(bias).astype(jnp.float32)
    bias = bias * jnp.where(part == 0, 1.0, 0.0)
    product = product * 2.0**SHIFT + lax.broadcast_in_dim(bias, product.shape, [0])
    tables = cta.buffers["sorted"], cta.buffers["shares"]
    store_out(out, product, *tables, first, live, feature, shape=cta.refs["out"].shape[1:])


def _mainloop(cta: Cta, warpgroup: Any, steps: int, before: Any) -> Any:
    """One consumer's tiles of a work item times a group's columns, `[64, columns]` float32."""
    w_ring, x_ring, w_sm, x_sm = cta.weights, cta.activations, cta.buffers["w_sm"], cta.buffers["x_sm"]

    def one(step: Any, total: Any) -> Any:
        stage, x_stage = w_ring.stage(before + step), x_ring.stage(before + step)
        w_ring.consumer_wait(stage)
        wide = widened(w_sm.at[stage, pl.ds(warpgroup * PIECES, PIECES)])
        w_ring.consumer_release(stage)
        x_ring.consumer_wait(x_stage)
        total = add_tiles(total, [(wide, x_sm.at[x_stage, warpgroup])])
        x_ring.consumer_release(x_stage)
        return total

    return lax.fori_loop(0, steps, one, zeros((TILE, cta.plan.columns)))
