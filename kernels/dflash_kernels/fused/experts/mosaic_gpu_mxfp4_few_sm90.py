"""Mixture of experts in MXFP4 for a few rows on Hopper: whole rows lie in shared memory, weights stream past them.

As in `mosaic_gpu_mxfp4_sm90` a work item is 64 rows of weights, which consumers widen and multiply. Of few rows all columns fit
shared memory, twice: a CTA takes neighbouring items, mostly of one expert, so it reads an expert's rows once, those of its next
expert while it multiplies with the others. Consumers do nothing but multiply: they leave what they have to a warpgroup that adds it
up and runs the epilogues, while they go on with the next item.
"""

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.core.mxfp4 import PIECE, PIECES, SHIFT, TILE
from dflash_kernels.fused.experts.plan_mxfp4 import KEPT, Mxfp4Plan
from dflash_kernels.fused.experts.routing_sm90 import sort_call
from dflash_kernels.fused.experts.rows_sm90 import load_rows, store_out, touch_tiles, zero_rows
from dflash_kernels.mosaic_gpu.counters import announce, await_announced_by
from dflash_kernels.mosaic_gpu.layouts import TILED, row_of
from dflash_kernels.mosaic_gpu.mxfp4 import add_kept, gated_bias, keep, store_gated, widened
from dflash_kernels.mosaic_gpu.pipeline import Ring, arrive_by_warps, div, rem
from dflash_kernels.mosaic_gpu.tma import address_of, copied, copy_line, prefetch_rows
from dflash_kernels.mosaic_gpu.wgmma import add_tiles, zeros

GATED, DOWN = "gated", "down"
BIASES = {GATED: "gate_up_bias", DOWN: "down_bias"}


# Launch


def program(plan: Mxfp4Plan) -> Callable[..., None]:
    """The CTA program, as `stages.launch` takes it."""
    return program_of(plan, lambda *of_cta: run(Cta(*of_cta)))


def program_of(plan: Mxfp4Plan, run_cta: Callable[..., None]) -> Callable[..., None]:
    """The program of CTAs each of which `run_cta` runs, told a `Cta`'s fields."""

    def body(stages: Sequence[str], refs: Mapping[str, Any], buffers: Mapping[str, Any]) -> None:
        places = {name: address_of(one) for name, one in buffers.items() if name.endswith("_in")}
        run_cta(plan, stages, refs, buffers, places, lax.axis_index("cta"))

    return body


def scratch(plan: Mxfp4Plan, dtype: Any) -> dict[str, Any]:
    """Shared memory and barriers of one CTA; those whose names end in "_in" are arrived at by address."""
    shared, consumers, width = plgpu.SMEM, plan.consumers, max(plan.hidden, plan.inner) // TILE
    return {
        "weights": shared((plan.stages, consumers * plan.unit * PIECES, PIECE), jnp.int32),
        "rows": shared((2, width, plan.columns, TILE), dtype, transforms=TILED),
        "kept": shared((KEPT, consumers, TILE, plan.columns), jnp.float32),
        "sorted": shared((plan.padded,), jnp.int32), "shares": shared((plan.padded,), jnp.float32),
        "spare": shared((plan.spare,), jnp.int32), "groups": shared((3 * plan.groups + 1,), jnp.int32),
        "sorted_in": plgpu.Barrier(), "rows_in": plgpu.Barrier(num_barriers=2),
        "weights_in": plgpu.Barrier(num_barriers=plan.stages),
        "empty_in": plgpu.Barrier(num_arrivals=consumers, num_barriers=plan.stages),
        "kept_in": plgpu.Barrier(num_arrivals=consumers, num_barriers=KEPT), "added_in": plgpu.Barrier(num_barriers=KEPT),
    }  # fmt: skip


# CTA program


@dataclasses.dataclass(frozen=True)
class Item:
    """A work item.

    Attributes:
      stage: the product that it is of.
      number, step: items and steps of this CTA before it.
      group, tile, part: which one it is.
      turn: groups of this CTA before its group: whose rows lie in the buffer of its parity.
      begins: whether it is the CTA's first one of its group.
    """

    stage: str
    number: Any
    step: Any
    group: Any
    tile: Any
    part: Any
    turn: Any
    begins: Any


@dataclasses.dataclass(frozen=True)
class Cta:
    """State of a CTA's program, which its functions share.

    Attributes:
      stages: products that this launch runs, in order.
      refs: arrays in global memory; buffers: shared memory and barriers, by name; places: where barriers lie.
      index: of this CTA in the grid.
    """

    plan: Mxfp4Plan
    stages: Sequence[str]
    refs: Mapping[str, Any]
    buffers: Mapping[str, Any]
    places: Mapping[str, Any]
    index: Any

    @property
    def ring(self) -> Ring:
        """Ring of the weights."""
        return Ring(self.plan.stages, self.buffers["weights_in"], self.buffers["empty_in"])

    def parts(self, stage: str) -> int:
        return 1 if stage == GATED else self.plan.parts

    def of_group(self, stage: str) -> int:
        """Work items of a group."""
        return self.parts(stage) * (self.plan.gated_tiles if stage == GATED else self.plan.down_tiles)

    def steps(self, stage: str) -> int:
        """Stages of the ring that one work item takes: of its columns, so many tiles as there are consumers."""
        columns = self.plan.hidden if stage == GATED else self.plan.inner
        return columns // TILE // (self.plan.consumers * self.plan.unit) // self.parts(stage)

    def group(self, group: Any) -> list[Any]:
        """Expert, first place among the sorted entries, and how many there are."""
        return [self.buffers["groups"][row * self.plan.groups + group] for row in range(3)]

    def items(self, stage: str) -> tuple[Any, Any]:
        """This CTA's first work item, and the one after its last: neighbours."""
        total = self.buffers["groups"][3 * self.plan.groups] * self.of_group(stage)
        return div(self.index * total, self.plan.ctas), div((self.index + 1) * total, self.plan.ctas)

    def place(self, stage: str, item: Any) -> tuple[Any, Any, Any]:
        """Group, tile and part of a work item."""
        count, parts = self.of_group(stage), self.parts(stage)
        group, place = div(item, count), rem(item, count)
        return group, div(place, parts), rem(place, parts)

    def first_piece(self, stage: str, group: Any, tile: Any, part: Any) -> Any:
        """Start of a work item's weights."""
        plan, gated = self.plan, stage == GATED
        expert, _, _ = self.group(group)
        tiles, units = (plan.gated_tiles, plan.hidden) if gated else (plan.down_tiles, plan.inner)
        of_item = self.steps(stage) * plan.consumers * plan.unit * PIECES
        return (expert * tiles + tile) * (units // TILE * PIECES) + part * of_item

    def groups(self, stage: str) -> tuple[Any, Any]:
        """Groups of its items: the first one, and the one after the last; equal if there are none."""
        (begin, end), count = self.items(stage), self.of_group(stage)
        first = div(begin, count)
        return first, jnp.where(end > begin, div(end - 1, count) + 1, first)

    def work_items(
        self, work: Callable[[Item], None], begin: Callable[[str, Any], None] | None = None
    ) -> tuple[Any, Any]:
        """`work` for all work items in turn, once entries are sorted, and `begin(stage, groups before)` before those of a product.

        Returns how many items and steps there were.
        """
        number, step, turn = jnp.int32(0), jnp.int32(0), jnp.int32(0)
        for stage in self.stages:
            (first, end), (first_group, end_group) = self.items(stage), self.groups(stage)
            of_item = self.steps(stage)
            if begin is not None:
                begin(stage, turn)

            def one(
                index: Any, _: None, stage=stage, first=first, first_group=first_group, of_item=of_item, number=number,
                step=step, turn=turn,
            ) -> None:  # fmt: skip
                group, tile, part = self.place(stage, first + index)
                begins = (index == 0) | ((tile == 0) & (part == 0))
                turns = turn + group - first_group
                work(Item(stage, number + index, step + index * of_item, group, tile, part, turns, begins))

            lax.fori_loop(0, end - first, one, None)
            number, step, turn = number + end - first, step + (end - first) * of_item, turn + end_group - first_group
        return number, step


def run(cta: Cta) -> None:
    """Dispatches the warpgroups: consumers, who adds up their results, producer of weights."""
    warpgroup, consumers = lax.axis_index("wg"), cta.plan.consumers
    pl.when(warpgroup < consumers)(lambda: consume(cta, warpgroup))
    pl.when(warpgroup == consumers)(lambda: finish(cta))
    pl.when(warpgroup == consumers + 1)(lambda: produce(cta))


def produce(cta: Cta) -> None:
    """Starts the copies of all work items' weights, each as soon as its stage is empty."""
    plan, ring = cta.plan, cta.ring
    pieces = plan.consumers * plan.unit * PIECES
    plgpu.barrier_wait(cta.buffers["sorted_in"])

    def begin(stage: str, _turn: Any) -> None:
        """Asks for weights of the second product that the ring has no room for yet: memory is idle until its rows are there."""
        count = cta.steps(stage)
        held, (first, end) = plan.stages // count, cta.items(stage)
        for item in range(held, 2 * held) if stage == DOWN and GATED in cta.stages else ():

            @pl.when(first + item < end)
            def _(item: int = item) -> None:
                group, tile, part = cta.place(stage, first + item)
                rows = pl.ds(cta.first_piece(stage, group, tile, part), count * pieces)
                prefetch_rows(cta.refs[stage].at[rows])

    def of_item(item: Item) -> None:
        name, count = {GATED: "gate_up", DOWN: "down"}[item.stage], cta.steps(item.stage)
        first = cta.first_piece(item.stage, item.group, item.tile, item.part)

        def fill(step: Any, _: None) -> None:
            place = ring.stage(item.step + step)
            ring.producer_acquire(item.step + step, place)
            target = cta.buffers["weights"].at[place]
            copy_line(cta.refs[name], first + step * pieces, pieces, target, cta.places["weights_in"], place)

        lax.fori_loop(0, count, fill, None)

    ring.drain(cta.work_items(of_item, begin)[1])


# Consumers


def consume(cta: Cta, warpgroup: Any) -> None:
    """The first one sorts; all multiply, work item by work item."""
    added = cta.buffers["added_in"]

    @pl.when(warpgroup == 0)
    def _():
        sort_call(cta)
        plgpu.barrier_arrive(cta.buffers["sorted_in"])
        zero_others(cta)

    plgpu.barrier_wait(cta.buffers["sorted_in"])

    def of_item(item: Item) -> None:
        pl.when(item.begins)(lambda: plgpu.barrier_wait(cta.buffers["rows_in"].at[rem(item.turn, 2)]))
        own, slot = mainloop(cta, warpgroup, item), rem(item.number, KEPT)
        pl.when(item.number >= KEPT)(lambda: plgpu.barrier_wait(added.at[slot]))
        keep(cta.buffers["kept"].at[slot, warpgroup], own)
        arrive_by_warps(cta.places["kept_in"], slot)

    items, _ = cta.work_items(of_item)
    # Every completion of a barrier is waited for.
    Ring(KEPT, None, added).drain(items)


def zero_others(cta: Any) -> None:
    """Zeros for choices that others have, where the call has a share of the experts, by the warpgroup that sorted."""
    plan = cta.plan
    for part in range(0 if plan.among is None else plan.parts):
        out, how = cta.refs["out"].at[part], {"entries": plan.entries, "ctas": plan.ctas}
        zero_rows(out, cta.buffers["spare"], cta.index, **how, shape=cta.refs["out"].shape[1:])


def mainloop(cta: Cta, warpgroup: Any, item: Item) -> Any:
    """One consumer's tiles of a work item times a group's columns, `[64, columns]` float32."""
    plan, ring, weights, count = cta.plan, cta.ring, cta.buffers["weights"], cta.steps(item.stage)
    rows = cta.buffers["rows"].at[rem(item.turn, 2)]

    def one(step: Any, carry: Any) -> Any:
        total, stage = carry
        first = ((item.part * count + step) * plan.consumers + warpgroup) * plan.unit
        held = weights.at[stage, pl.ds(warpgroup * plan.unit * PIECES, plan.unit * PIECES)]
        ring.consumer_wait(stage)

        def tiles() -> Iterator[tuple[Any, Any]]:
            for tile in range(plan.unit):
                wide = widened(held, place=tile)
                if tile == plan.unit - 1:
                    arrive_by_warps(cta.places["empty_in"], stage)
                yield wide, rows.at[first + tile]

        return add_tiles(total, tiles()), ring.after(stage)

    start = zeros((TILE, plan.columns)), ring.stage(item.step)
    return lax.fori_loop(0, count, one, start)[0]


# Who adds up


def finish(cta: Cta) -> None:
    """Loads the rows of the groups, adds up what consumers have of each work item, and runs its epilogue."""
    plgpu.barrier_wait(cta.buffers["sorted_in"])
    for stage in cta.stages:
        tiles = cta.plan.gated_tiles if stage == GATED else cta.plan.down_tiles
        how = {"tiles": tiles, "parts": cta.parts(stage)}
        touch_tiles(cta.refs[BIASES[stage]], cta.buffers["groups"], *cta.items(stage), **how)

    def begin(stage: str, turn: Any) -> None:
        # All items of the product before are multiplied: both buffers are free.
        first, end = cta.groups(stage)
        for place in range(2):
            pl.when(first + place < end)(lambda place=place: _load(cta, stage, first + place, turn + place))

    def of_item(item: Item) -> None:
        first, end = cta.groups(item.stage)
        ahead = item.group + 1
        # So are those of the group before.
        pl.when(item.begins & (item.group > first) & (ahead < end))(
            lambda: _load(cta, item.stage, ahead, item.turn + 1)
        )
        slot, kept, bias = rem(item.number, KEPT), cta.buffers["kept"], bias_of(cta, item)
        plgpu.barrier_wait(cta.buffers["kept_in"].at[slot])
        product = zeros((TILE, cta.plan.columns))
        for consumer in range(cta.plan.consumers):
            product = add_kept(product, kept.at[slot, consumer])
        arrive_by_warps(cta.places["added_in"], slot)
        _epilogue(cta, product, bias, item)

    cta.work_items(of_item, begin)


def _load(cta: Cta, stage: str, group: Any, turn: Any) -> None:
    """The rows of a group, once they are there, to the buffer of its turn."""
    _, first, live = cta.group(group)
    if stage == DOWN:
        begin, end = cta.items(stage)
        count = cta.of_group(stage)
        own = jnp.minimum(end, (group + 1) * count) - jnp.maximum(begin, group * count)
        await_announced_by(cta.refs["ready"], group, own, given=cta.plan.gated_tiles, taken=count)
    source, place = cta.refs["x" if stage == GATED else "inner"], rem(turn, 2)
    target = cta.buffers["rows"].at[place]
    load_rows(source, target, cta.buffers["sorted"], first, live, top_k=cta.plan.top_k if stage == GATED else 0)
    copied(0)
    arrive_by_warps(cta.places["rows_in"], place)


def bias_of(cta: Cta, item: Item) -> Any:
    """Biases of a work item's rows, loaded while consumers multiply."""
    plan, (expert, _, _), bias = cta.plan, cta.group(item.group), cta.refs[BIASES[item.stage]]
    if item.stage == GATED:
        return gated_bias(bias, expert * plan.gated_tiles + item.tile)
    bias = bias.at[pl.ds(expert * plan.hidden + item.tile * TILE, TILE)]
    return row_of(bias)


def _epilogue(cta: Cta, product: Any, bias: Any, item: Item) -> None:
    plan, refs, tile = cta.plan, cta.refs, item.tile
    _, first, live = cta.group(item.group)
    if item.stage == GATED:
        where = tile * (TILE // 2), first, live
        store_gated(refs["inner"], product, bias, *where, alpha=plan.gate.alpha, limit=plan.gate.limit)
        announce(refs["ready"], item.group)
        return
    feature, out = tile * TILE, refs["out"].at[item.part]
    bias = bias.astype(jnp.float32) * jnp.where(item.part == 0, 1.0, 0.0)
    product = product * 2.0**SHIFT + lax.broadcast_in_dim(bias, product.shape, [0])
    tables = cta.buffers["sorted"], cta.buffers["shares"]
    store_out(out, product, *tables, first, live, feature, shape=refs["out"].shape[1:])
