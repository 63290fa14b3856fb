"""Mixture of experts in MXFP4 for one token on Hopper: the second product of the first experts hides how others are waited for.

As `mosaic_gpu_mxfp4_few_sm90`, but each choice of the one token is a group, so who does what is known before experts are chosen.
All CTAs work through the first expert's items of the first product, then through the next one's, and through the second product's
likewise. When the last expert's rows are asked for, there is work with those of others. A column of the second product's right
operand is an expert's row: an item takes what its weights give of its expert's column. CTAs with fewer items of the first product
have as many more of the second.
"""

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.core.mxfp4 import PIECES, SHIFT, TILE
from dflash_kernels.fused.experts import mosaic_gpu_mxfp4_few_sm90 as few
from dflash_kernels.fused.experts.mosaic_gpu_mxfp4_few_sm90 import (
    BIASES,
    DOWN,
    GATED,
    Cta,
    Item,
    bias_of,
    mainloop,
)
from dflash_kernels.fused.experts.plan_mxfp4 import KEPT, Mxfp4Plan
from dflash_kernels.fused.experts.routing_sm90 import sort_entries
from dflash_kernels.fused.experts.rows_sm90 import store_column, touch_tile
from dflash_kernels.mosaic_gpu.announced_rows import load_row, load_rows_announced
from dflash_kernels.mosaic_gpu.counters import announce
from dflash_kernels.mosaic_gpu.mxfp4 import add_kept, keep, store_gated
from dflash_kernels.mosaic_gpu.pipeline import Ring, arrive_by_warps, div, rem
from dflash_kernels.mosaic_gpu.tma import copy_line, gathered
from dflash_kernels.mosaic_gpu.wgmma import zeros

# Words from a group's count to the next one's: all CTAs look at them again and again, so each has a line of its own.
APART = 32


# Launch


def program(plan: Mxfp4Plan) -> Callable[..., None]:
    """The CTA program, as `stages.launch` takes it."""
    return few.program_of(plan, lambda *of_cta: run(OneToken(*of_cta)))


def scratch(plan: Mxfp4Plan, dtype: Any) -> dict[str, Any]:
    """Shared memory of the launch for a few tokens, with a barrier for the token's row and one for each choice's."""
    return few.scratch(plan, dtype) | {"rows_in": plgpu.Barrier(num_barriers=1 + plan.top_k)}


# CTA program


@dataclasses.dataclass(frozen=True)
class OneToken(Cta):
    """See `Cta`. A group is a choice, and rows of both products have a buffer each: `Item.turn` is 0 or 1."""

    def dealt(self, stage: str) -> tuple[Any, Callable[[Any], Any]]:
        """Work items of a product that this CTA has, in rising order, and their number."""
        plan, index, total = self.plan, self.index, self.plan.top_k * self.of_group(stage)
        if stage == GATED:
            return div(total - index + plan.ctas - 1, plan.ctas), lambda turn: index + turn * plan.ctas
        busy, of_idle, last = plan.dealt
        idle, rest = plan.ctas - busy, total - last
        # Of all but the last items, the first ones go to CTAs that have fewer of the first product.
        theirs, is_idle = min(idle * of_idle, rest), index >= busy
        begin = jnp.where(is_idle, index - busy, theirs + index)
        end, stride = jnp.where(is_idle, theirs, rest), jnp.where(is_idle, idle, busy)
        count = jnp.maximum(lax.div(end - begin + stride - 1, stride), 0)
        return count + int(last > 0), lambda turn: jnp.where(turn < count, begin + turn * stride, rest + index)

    def work_items(
        self, work: Callable[[Item], None], begin: Callable[[str, Any], None] | None = None
    ) -> tuple[Any, Any]:
        number, step = jnp.int32(0), jnp.int32(0)
        for stage in self.stages:
            (count, item_of), of_item, buffer = self.dealt(stage), self.steps(stage), int(stage == DOWN)
            if begin is not None:
                begin(stage, buffer)

            def one(
                turn: Any, before: Any, stage=stage, item_of=item_of, of_item=of_item, number=number, step=step, buffer=buffer
            ) -> Any:  # fmt: skip
                group, tile, part = self.place(stage, item_of(turn))
                begins = (group != before) if stage == DOWN else (turn == 0)
                work(Item(stage, number + turn, step + turn * of_item, group, tile, part, buffer, begins))
                return group

            lax.fori_loop(0, count, one, jnp.int32(-1))
            number, step = number + count, step + count * of_item
        return number, step

    def own_items(self) -> list[Any]:
        """This CTA's items of the second product, of each group."""
        owned, (count, item_of) = [jnp.int32(0)] * self.plan.top_k, self.dealt(DOWN)

        def one(turn: Any, owned: list[Any]) -> list[Any]:
            group = div(item_of(turn), self.of_group(DOWN))
            return [number + (group == place).astype(jnp.int32) for place, number in enumerate(owned)]

        return lax.fori_loop(0, count, one, owned)


def run(cta: OneToken) -> None:
    """Dispatches the warpgroups: consumers, who adds up their results, producer of weights, producer of rows."""
    warpgroup, consumers = lax.axis_index("wg"), cta.plan.consumers
    pl.when(warpgroup < consumers)(lambda: consume(cta, warpgroup))
    for index, work in enumerate((finish, produce, produce_rows)):
        pl.when(warpgroup == consumers + index)(lambda work=work: work(cta))


def produce(cta: OneToken) -> None:
    """Chooses experts, then starts the copies of all work items' weights, each as soon as its stage is empty."""
    plan, ring = cta.plan, cta.ring
    pieces = plan.consumers * plan.unit * PIECES
    tables = [cta.buffers[name] for name in ("sorted", "shares", "spare", "groups")]
    sort_entries([cta.refs["entries"]], tables, plan=plan)
    plgpu.barrier_arrive(cta.buffers["sorted_in"])

    def of_item(item: Item) -> None:
        name, count = {GATED: "gate_up", DOWN: "down"}[item.stage], cta.steps(item.stage)
        first = cta.first_piece(item.stage, item.group, item.tile, item.part)

        def fill(step: Any, _: None) -> None:
            place = ring.stage(item.step + step)
            ring.producer_acquire(item.step + step, place)
            target = cta.buffers["weights"].at[place]
            copy_line(cta.refs[name], first + step * pieces, pieces, target, cta.places["weights_in"], place)

        lax.fori_loop(0, count, fill, None)

    ring.drain(cta.work_items(of_item)[1])


def produce_rows(cta: OneToken) -> None:
    """Loads the token's row, then what each expert makes of it, once it is there."""
    barriers = cta.places["rows_in"]
    if GATED in cta.stages:
        load_row(cta.refs["x"], cta.buffers["rows"].at[0], barriers)
    if DOWN in cta.stages:
        how = {"apart": APART, "given": cta.plan.gated_tiles, "taken": cta.of_group(DOWN)}
        load_rows_announced(
            cta.refs["inner"], cta.buffers["rows"].at[1], cta.refs["ready"], cta.own_items(), barriers, **how
        )


def consume(cta: OneToken, warpgroup: Any) -> None:
    """Multiplies, work item by work item."""
    added = cta.buffers["added_in"]

    def of_item(item: Item) -> None:
        @pl.when(item.begins)
        def _():
            plgpu.barrier_wait(cta.buffers["rows_in"].at[0 if item.stage == GATED else 1 + item.group])
            gathered()

        own, slot = mainloop(cta, warpgroup, item), rem(item.number, KEPT)
        pl.when(item.number >= KEPT)(lambda: plgpu.barrier_wait(added.at[slot]))
        keep(cta.buffers["kept"].at[slot, warpgroup], own)
        arrive_by_warps(cta.places["kept_in"], slot)

    items, _ = cta.work_items(of_item)
    # Every completion of a barrier is waited for.
    Ring(KEPT, None, added).drain(items)


# Who adds up


def finish(cta: OneToken) -> None:
    """Adds up what consumers have of each work item, and runs its epilogue."""
    plgpu.barrier_wait(cta.buffers["sorted_in"])
    cta.work_items(lambda item: touch_tile(cta.refs[BIASES[item.stage]], _line(cta, item)))

    def of_item(item: Item) -> None:
        slot, kept, bias = rem(item.number, KEPT), cta.buffers["kept"], bias_of(cta, item)
        plgpu.barrier_wait(cta.buffers["kept_in"].at[slot])
        product = zeros((TILE, cta.plan.columns))
        for consumer in range(cta.plan.consumers):
            product = add_kept(product, kept.at[slot, consumer])
        arrive_by_warps(cta.places["added_in"], slot)
        _epilogue(cta, product, bias, item)

    cta.work_items(of_item)


def _line(cta: OneToken, item: Item) -> Any:
    """Tile of a work item's biases."""
    expert, _, _ = cta.group(item.group)
    return expert * (cta.plan.gated_tiles if item.stage == GATED else cta.plan.down_tiles) + item.tile


def _epilogue(cta: OneToken, product: Any, bias: Any, item: Item) -> None:
    plan, refs, tile = cta.plan, cta.refs, item.tile
    if item.stage == GATED:
        where = tile * (TILE // 2), item.group, jnp.int32(1)
        store_gated(refs["inner"], product, bias, *where, alpha=plan.gate.alpha, limit=plan.gate.limit)
        announce(refs["ready"], item.group * APART)
        return
    bias = bias.astype(jnp.float32) * jnp.where(item.part == 0, 1.0, 0.0)
    product = product * 2.0**SHIFT + lax.broadcast_in_dim(bias, product.shape, [0])
    out = refs["out"].at[item.part, item.group, 0, pl.ds(tile * TILE, TILE)]
    store_column(out, product, cta.buffers["shares"], item.group)
