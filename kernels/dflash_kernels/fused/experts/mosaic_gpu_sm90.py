"""Mixture of experts for few rows on Hopper: persistent CTAs stream the weights of the experts that are taken, each once.

Weights are the left operand of the matrix instruction and an expert's rows of x the right one, so that few rows waste nothing. The
consumer warpgroup sorts the entries by expert, every CTA for itself, then multiplies. The weights' producer starts TMA copies into
a ring and runs ahead across work items and across the two products; the activations' producer gathers rows with `cp.async`.

Pallas' interpreter cannot make CTAs wait for each other: there each product is a launch of its own.
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

from dflash_kernels.core.device import WARP, WARPGROUP
from dflash_kernels.fused.experts.plan import BLOCK, LOOK, ROWS, UNIT, Choice, Plan
from dflash_kernels.fused.experts.reference import chosen
from dflash_kernels.mosaic_gpu import ptx as th
from dflash_kernels.mosaic_gpu.layouts import TILED
from dflash_kernels.mosaic_gpu.pipeline import Ring, div, rem
from dflash_kernels.mosaic_gpu.softmax import sigmoid
from dflash_kernels.mosaic_gpu.thread_op import GLOBAL, MATRIX, SCALAR, kernel, thread_op
from dflash_kernels.mosaic_gpu.tma import copied, prefetch_rows

GATED, DOWN = "gated", "down"
_WARPS, _VECTOR = WARPGROUP // WARP, 4
_SIGN = 1 << 31
_PLACES = 1 << 16  # more than entries: what is packed above them counts groups


# Launch


def experts(
    plan: Plan,
    x: jax.Array,
    entries: jax.Array,
    weights: jax.Array | None,
    gate_up: jax.Array,
    down: jax.Array,
    ready: Any,
    interpret: Any = None,
) -> jax.Array:
    """`[k, T, D]` float32; matrices are `[E * 2F, D]` and `[E * D, F]`, `entries` and `weights` `[T * k]`.

    `ready` is a Ref of `plan.groups` zeros or more that no other launch uses at the same time, and holds zeros afterwards. Where
    the plan chooses, `entries` are the logits `[T * E]` and `weights` None.
    """
    inner = jax.ShapeDtypeStruct((plan.entries, plan.inner), x.dtype)
    out = jax.ShapeDtypeStruct((plan.top_k, plan.tokens, plan.hidden), jnp.float32)
    given, names = ((entries,), ("entries",)) if weights is None else ((entries, weights), ("entries", "weights"))
    if interpret is None:
        both = _launch(plan, x.dtype, (GATED, DOWN), ("x", *names, "gate_up", "down", "ready"), (inner, out))
        return both(x, *given, gate_up, down, ready)[1]
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
) -> Callable[..., Any]:
    results = [{GATED: "inner", DOWN: "out"}[stage] for stage in stages]

    def body(*refs: Any, **buffers: Any) -> None:
        run(Cta(plan, stages, dict(zip((*names, *results), refs, strict=True)), buffers, lax.axis_index("cta")))

    body.__name__ = "_".join(("experts", *stages))  # what profilers show
    return kernel(
        body, out_type=outs, scratch_types=_scratch(plan, dtype), grid=(plan.ctas,), grid_names=("cta",), num_threads=3,
        thread_name="wg", compiler_params=plgpu.CompilerParams(approx_math=True), interpret=interpret,
    )  # fmt: skip


def _scratch(plan: Plan, dtype: Any) -> dict[str, Any]:
    """Shared memory and barriers of one CTA."""
    w_full, w_empty = plgpu.Barrier(num_arrivals=2, num_barriers=plan.stages), plgpu.Barrier(num_barriers=plan.stages)
    x_ring = plgpu.Barrier(num_barriers=plan.x_stages)
    return {
        "w_sm": plgpu.SMEM((plan.stages, 2 * ROWS, BLOCK), dtype, transforms=TILED), "w_ring": (w_full, w_empty),
        "x_sm": plgpu.SMEM((plan.x_stages, UNIT, plan.columns, BLOCK), dtype, transforms=TILED), "x_ring": (x_ring, x_ring),
        "sorted": plgpu.SMEM((plan.padded,), jnp.int32), "shares": plgpu.SMEM((plan.padded,), jnp.float32),
        "spare": plgpu.SMEM((2 * plan.padded + plan.threads,), jnp.int32), "groups": plgpu.SMEM((3 * plan.groups + 1,), jnp.int32),
        "is_sorted": plgpu.Barrier(),
    }  # fmt: skip


def choices(plan: Plan, choice: Choice, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Experts and weights of all entries, `[T * k]` each, of logits `[T * E]`: a launch of its own, for many tokens."""

    def body(logits: Any, entries: Any, weights: Any) -> None:
        _choose_tokens(logits, entries, weights, lax.axis_index("cta"), plan=plan, choice=choice)

    body.__name__ = "choose_experts"
    kinds = jax.ShapeDtypeStruct((plan.entries,), jnp.int32), jax.ShapeDtypeStruct((plan.entries,), jnp.float32)
    chosen, weights = kernel(body, out_type=kinds, grid=(-(-plan.tokens // _WARPS),), grid_names=("cta",))(logits)
    return chosen, weights


# CTA program


@dataclasses.dataclass(frozen=True)
class Cta:
    """What the functions of the CTA program share.

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

    def group(self, group: Any) -> list[Any]:
        """Expert, first place among the sorted entries, and how many there are."""
        return [self.buffers["groups"][row * self.plan.groups + group] for row in range(3)]

    def work_items(self, work: Callable[..., None]) -> Any:
        """`work(stage, steps before, group, tile)` for all work items in turn, once entries are sorted; then the steps of all."""
        before, used = jnp.int32(0), self.buffers["groups"][3 * self.plan.groups]
        for stage in self.stages:
            tiles = self.plan.gated_tiles if stage == GATED else self.plan.down_tiles
            steps = self.x_tiles(stage)
            turns = div(used * tiles - self.index + self.plan.ctas - 1, self.plan.ctas)

            def one(turn: Any, _: None, stage=stage, tiles=tiles, steps=steps, before=before) -> None:
                item = self.index + turn * self.plan.ctas
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
    if plan.choice is not None and plan.choice.shared:
        _ask_for_shared(cta)
    plgpu.barrier_wait(cta.buffers["is_sorted"])

    def produce(stage: str, before: Any, group: Any, tile: Any) -> None:
        expert, _, _ = cta.group(group)
        if stage == GATED:
            source, rows = cta.refs["gate_up"], plan.gated_rows
            first = expert * (2 * plan.inner) + tile * rows
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
    _drain(ring, steps)


def _ask_for_shared(cta: Cta) -> None:
    """The expert that every token takes is on its way to the L2 while entries are sorted: each CTA asks for some of its rows."""
    plan = cta.plan
    for name, rows in (("gate_up", 2 * plan.inner), ("down", plan.hidden)):
        if name not in cta.refs:
            continue
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
        if stage == DOWN and "ready" in cta.refs:
            await_tiles(cta.refs["ready"], group, given=plan.gated_tiles, taken=plan.down_tiles)

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

    _drain(ring, cta.work_items(produce))


def _drain(ring: Ring, steps: Any) -> None:
    """Every completion of a barrier is waited for."""
    lax.fori_loop(
        jnp.maximum(steps - ring.stages, 0), steps, lambda step, _: plgpu.barrier_wait(ring.empty.at[ring.stage(step)]), None
    )  # fmt: skip


# Consumer


def consume(cta: Cta) -> None:
    """Sorts, then multiplies and has the epilogues, work item by work item."""
    given = [cta.refs[name] for name in ("entries", "weights") if name in cta.refs]
    tables = [cta.buffers[name] for name in ("sorted", "shares", "spare", "groups")]
    sort_entries(given, tables, plan=cta.plan)
    plgpu.barrier_arrive(cta.buffers["is_sorted"])
    plgpu.barrier_wait(cta.buffers["is_sorted"])
    cta.work_items(lambda *item: _work_item(cta, *item))


def _work_item(cta: Cta, stage: str, before: Any, group: Any, tile: Any) -> None:
    _, first, live = cta.group(group)
    upper, lower = _mainloop(cta, cta.x_tiles(stage), before)
    if stage == GATED:
        inner, rows = upper * sigmoid(upper) * lower, cta.plan.gated_rows
        feature = tile * rows
        store_inner(cta.refs["inner"], inner.astype(cta.refs["inner"].dtype), first, live, feature, rows=rows)
        if "ready" in cta.refs:
            announce_tile(cta.refs["ready"], group)
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


# Gather and epilogues, in terms of single threads


def _gather_rows_interpreted(
    source: Any, column: Any, target: Any, order: Any, first: Any, live: Any, *, top_k: int
) -> None:
    blocks, columns, width = target.shape
    places = jnp.minimum(first + lax.iota(jnp.int32, columns), first + live - 1)
    rows = order[...][places] // top_k if top_k else places
    held = source[...][rows]
    for block in range(blocks):
        part = lax.dynamic_slice_in_dim(held, column + block * width, width, axis=1)
        target.at[block][...] = jnp.where(lax.iota(jnp.int32, columns)[:, None] < live, part, jnp.zeros_like(part))


@thread_op(args=(GLOBAL, SCALAR, plgpu.RefType(TILED), GLOBAL, SCALAR, SCALAR), interpret=_gather_rows_interpreted)
def gather_rows(source: Any, column: Any, target: Any, order: Any, first: Any, live: Any, *, top_k: int) -> None:
    """Starts `cp.async` copies of a group's rows of `source`, some columns of them; columns of no entry become zeros.

    Args:
      source: `[rows, columns]` in global memory, two bytes an element: a row for each token, or for each sorted entry.
      column: first column, int32 scalar.
      target: `[blocks, N, 64]` in shared memory, in swizzled tiles of 8 rows.
      order: the sorted entries in shared memory.
      first, live: the group's first one and how many there are, int32 scalars.
      top_k: entries of a token, where source has a row for each token; else 0.
    """
    blocks, groups, _, rows_of_group, width = th.shape_and_strides(target)[0]
    columns, pitch = groups * rows_of_group, th.shape_and_strides(source)[1][0] * 2
    base, to, entries = th.address(source), th.address(target, space=3), th.address(order, space=3)
    chunks = blocks * columns * width * 2 // th.CHUNK
    for begin in range(0, chunks, WARPGROUP):
        chunk = th.add(th.thread(), begin)
        line, piece = th.div(chunk, 8), th.rem(chunk, 8)
        block, place = th.div(line, columns), th.rem(line, columns)
        there = th.compare(place, "ult", live)
        row = th.add(first, th.select(there, place, th.number(0)))
        if top_k:
            row = th.div(_shared_word(entries, row), top_k)
        bytes_ = th.add(th.mul(th.add(column, th.mul(block, width)), 2), th.mul(piece, th.CHUNK))
        where = th.add(th.add(base, th.mul(th.widen_index(row), pitch)), th.widen_index(bytes_))
        swizzled = th.mul(th.xor(piece, th.rem(place, 8)), th.CHUNK)
        target_at = th.add(th.add(to, th.mul(line, width * 2)), swizzled)
        size = th.select(there, th.number(th.CHUNK), th.number(0))
        copy = f"cp.async.cg.shared.global [$0], [$1], {th.CHUNK}, $2;"
        if begin + WARPGROUP > chunks:
            th.when(th.under(chunk, chunks), copy, target_at, where, size)
        else:
            th.inline(copy, target_at, where, size)
    th.inline("cp.async.commit_group;")


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


def _store_out_interpreted(
    target: Any, tile: Any, order: Any, shares: Any, first: Any, live: Any, feature: Any, *, shape: tuple[int, int, int]
) -> None:
    top_k = shape[0]
    for column in range(tile.shape[1]):

        @pl.when(column < live)
        def _(column=column):
            entry = order[first + column]
            place = target.at[lax.rem(entry, top_k), lax.div(entry, top_k), pl.ds(feature, tile.shape[0])]
            place[...] = tile[:, column] * shares[first + column]


@thread_op(args=(GLOBAL, MATRIX, GLOBAL, GLOBAL, SCALAR, SCALAR, SCALAR), interpret=_store_out_interpreted)
def store_out(
    target: Any, tile: Any, order: Any, shares: Any, first: Any, live: Any, feature: Any, *, shape: tuple[int, int, int]
) -> None:
    """`target[choice, token, feature + row] = share * tile[row, column]` for the entries of the `live` first columns.

    Args:
      target: `[k, T, D]` float32 in global memory, of this shape.
      tile: `[64, N]` float32.
      order, shares: sorted entries and their weights, in shared memory.
    """
    top_k, tokens, hidden = shape
    base, entries = th.word_address(target, th.number(0)), th.address(order, space=3)
    of_shares, found = th.address(shares, space=3), {}

    def column_of(column: Any, key: Any) -> Any:
        """Where a column's entry goes, and its weight: once for all rows of a thread."""
        if key not in found:
            there = th.compare(column, "ult", live)
            place = th.add(first, th.select(there, column, th.number(0)))
            entry = _shared_word(entries, place)
            token, choice = th.div(entry, top_k), th.rem(entry, top_k)
            row = th.widen_index(th.add(th.mul(choice, tokens), token))
            start = th.add(base, th.mul(row, hidden * 4))
            found[key] = there, start, th.as_real(_shared_word(of_shares, place))
        return found[key]

    count = 0

    def store(value: Any, position: Any) -> None:
        nonlocal count
        row, column = (th.index_word(place) for place in position)
        # Two rows of two neighbouring columns follow one another.
        there, start, share = column_of(column, (count // 4, count % 2))
        count += 1
        where = th.offset(start, th.mul(th.add(feature, row), 4))
        th.when(there, "st.global.f32 [$0], $1;", where, th.fmul(value, share))

    tile.foreach(store)


@thread_op(args=(GLOBAL, SCALAR))
def announce_tile(ready: Any, group: Any) -> None:
    """Counts one more tile of a group, after all that this warpgroup has written."""
    th.inline("fence.acq_rel.gpu;")
    th.warpgroup_barrier()
    with th.one_thread():
        th.inline("red.release.gpu.global.add.u32 [$0], 1;", th.word_address(ready, group))


@thread_op(args=(GLOBAL, SCALAR))
def await_tiles(ready: Any, group: Any, *, given: int, taken: int) -> None:
    """Waits until so many tiles of a group are there. The last of `taken` who wait leaves the count at 0 for the next launch."""
    with th.branch(th.compare(th.thread(), "eq", 0)):
        th.inline(
            "{ .reg .pred p; .reg .b32 w; .reg .b64 a; mov.b64 a, $0; again: ld.acquire.gpu.global.u32 w, [a]; "
            f"setp.lt.u32 p, w, {given}; @p bra again; atom.relaxed.gpu.global.add.u32 w, [a], 1; "
            f"setp.eq.u32 p, w, {given + taken - 1}; @p st.relaxed.gpu.global.u32 [a], 0; }}",
            th.word_address(ready, group),
        )
    th.warpgroup_barrier()


# Router: a warp takes a token, its lanes a part of the logits each


@thread_op(args=(GLOBAL, GLOBAL, GLOBAL, SCALAR))
def _choose_tokens(logits: Any, entries: Any, weights: Any, cta: Any, *, plan: Plan, choice: Choice) -> None:
    lane, warp = _lane_and_warp()
    token = th.add(th.mul(cta, _WARPS), warp)
    with th.branch(th.under(token, plan.tokens)):
        _choose_one(plan, choice, logits, token, lane, [(entries, "global"), (weights, "global")])


def _choose(plan: Plan, choice: Choice, logits: Any, entries: Any, weights: Any) -> None:
    """Experts and weights of all entries, by one warpgroup.

    Args:
      logits: `[T * E]` float32 in global memory.
      entries, weights: addresses in shared memory, of a word for each entry.
    """
    lane, warp = _lane_and_warp()

    @th.fori(th.number(-(-plan.tokens // _WARPS)), [])
    def _(turn: Any, carry: list) -> list:
        token = th.add(th.mul(turn, _WARPS), warp)
        with th.branch(th.under(token, plan.tokens)):
            _choose_one(plan, choice, logits, token, lane, [(entries, "shared"), (weights, "shared")])
        return carry


def _lane_and_warp() -> tuple[Any, Any]:
    return th.rem(th.thread(), WARP), th.div(th.thread(), WARP)


def _choose_one(plan: Plan, choice: Choice, logits: Any, token: Any, lane: Any, targets: list) -> None:
    """One token's experts and weights, to two places in memory of the kinds that are named."""
    taken = plan.top_k - int(choice.shared)
    places = [th.add(lane, first) for first in range(0, plan.ranked, WARP)]
    bits = [_logit(plan, logits, token, place) for place in places]
    keys = [_key(value) for value in bits]
    expert, largest, top = th.number(0), th.number(0), th.number(0)
    for turn in range(taken):
        best = keys[0]
        for key in keys[1:]:
            best = th.unsigned_max(best, key)
        best = _over_lanes("max", best)
        where = th.number(plan.experts)
        for key, place in zip(keys, places, strict=True):
            where = th.unsigned_min(where, th.select(_equal(key, best), place, th.number(plan.experts)))
        where = _over_lanes("min", where)
        keys = [th.select(_equal(place, where), th.number(0), key) for key, place in zip(keys, places, strict=True)]
        mine = _equal(lane, th.number(turn))
        expert, largest = th.select(mine, where, expert), th.select(mine, best, largest)
        top = top if turn else best
    highest = th.as_real(_unkey(top))
    inside = th.under(lane, taken)
    share = th.select(inside, th.exp(th.fsub(th.as_real(_unkey(largest)), highest)), th.real(0.0))
    total = share
    if not choice.normed:
        total = th.real(0.0)
        for value in bits:
            total = th.fadd(total, th.exp(th.fsub(th.as_real(value), highest)))
    share = th.fmul(th.fdiv(share, _summed(total)), th.real(choice.scale))
    if choice.shared:
        last, logit = _equal(lane, th.number(taken)), th.add(th.mul(token, plan.experts), plan.ranked)
        of_shared = th.exp(th.fsub(th.real(0.0), th.as_real(_global_word(logits, logit))))
        of_shared = th.fdiv(th.real(1.0), th.fadd(th.real(1.0), of_shared))
        expert, share = th.select(last, th.number(plan.ranked), expert), th.select(last, of_shared, share)
        inside = th.under(lane, plan.top_k)
    with th.branch(inside):
        entry = th.add(th.mul(token, plan.top_k), lane)
        for (target, space), value in zip(targets, (expert, th.bits(share)), strict=True):
            where = th.word_address(target, entry) if space == "global" else th.add(target, th.mul(entry, 4))
            th.inline(f"st.{space}.b32 [$0], $1;", where, value)


def _logit(plan: Plan, logits: Any, token: Any, place: Any) -> Any:
    """Bits of one logit; -inf past the last expert that is chosen by its logit."""
    there = th.under(place, plan.ranked)
    where = th.add(th.mul(token, plan.experts), th.select(there, place, th.number(0)))
    return th.select(there, _global_word(logits, where), th.number(0xFF800000 - (1 << 32)))


def _key(bits: Any) -> Any:
    """Bits of a float32 as an integer without sign in the same order, larger than 0; both zeros are the same."""
    bits = th.select(_equal(bits, th.number(-_SIGN)), th.number(0), bits)
    negative = th.compare(bits, "slt", 0)
    return th.xor(bits, th.select(negative, th.number(-1), th.number(-_SIGN)))


def _unkey(key: Any) -> Any:
    negative = th.compare(key, "sge", 0)
    return th.xor(key, th.select(negative, th.number(-1), th.number(-_SIGN)))


def _equal(a: Any, b: Any) -> Any:
    return th.compare(a, "eq", b)


def _over_lanes(kind: str, value: Any) -> Any:
    return th.inline(f"redux.sync.{kind}.u32 $0, $1, 0xffffffff;", value, returns=th.i32(), convergent=True)


def _summed(value: Any) -> Any:
    """The sum over a warp's lanes, in every lane, always in the same order."""
    for distance in (16, 8, 4, 2, 1):
        text = f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, 0xffffffff;"
        other = th.inline(text, value, returns=th.f32(), convergent=True)
        value = th.fadd(value, other)
    return value


# Counting sort by expert: every thread of a warpgroup counts and places the entries of its own experts


def _sort_interpreted(given: list[Any], tables: list[Any], *, plan: Plan) -> None:
    order_sm, shares_sm, _, groups_sm = tables
    if plan.choice:
        taken = plan.top_k - int(plan.choice.shared)
        given = list(chosen(given[0][...].reshape(plan.tokens, -1), taken, plan.choice))
    entries, weights = (part[...].reshape(-1) for part in given)
    order = jnp.argsort(entries, stable=True).astype(jnp.int32)
    counts = (entries[:, None] == jnp.arange(plan.experts)).sum(axis=0).astype(jnp.int32)
    of_expert = -(-counts // plan.columns)
    ends, firsts = jnp.cumsum(of_expert), jnp.cumsum(counts) - counts
    groups = jnp.arange(plan.groups)
    owners = jnp.minimum(jnp.searchsorted(ends, groups, side="right"), plan.experts - 1)
    inside = (groups - (ends - of_expert)[owners]) * plan.columns
    table = owners, firsts[owners] + inside, jnp.minimum(counts[owners] - inside, plan.columns), ends[-1:]
    more = plan.padded - plan.entries
    order_sm[...] = jnp.pad(order, (0, more))
    shares_sm[...] = jnp.pad(weights[order], (0, more))
    groups_sm[...] = jnp.concatenate([part.astype(jnp.int32) for part in table])


@thread_op(args=(GLOBAL, GLOBAL), interpret=_sort_interpreted)
def sort_entries(given: list[Any], tables: list[Any], *, plan: Plan) -> None:
    """Writes the tables of a CTA in two rounds over all entries, one that counts and one that places.

    Args:
      given: expert and weight of each entry, `[T * k]` in global memory; with `plan.choice`, the logits `[T * E]` alone.
      tables: shared memory. Entries by expert, those of one expert in order; their weights; anything; experts of all groups, then
        each one's first place, then how many entries it has, then the number of groups.
    """
    order, shares, flat, groups = (th.address(table, space=3) for table in tables)
    counts, own_weights = (th.add(flat, 4 * place) for place in (plan.padded, plan.padded + plan.threads))
    own = [th.add(th.thread(), first) for first in range(0, plan.threads, WARPGROUP)]
    for first in range(0, plan.padded, WARPGROUP):
        place = th.add(th.thread(), first)
        if plan.choice is None:
            with th.branch(th.under(place, plan.entries)):
                _store_shared(flat, place, _global_word(given[0], place))
        with th.branch(th.every(th.under(place, plan.padded), th.compare(place, "uge", plan.entries))):
            _store_shared(flat, place, th.number(-1))
    if plan.choice is not None:
        _choose(plan, plan.choice, given[0], flat, own_weights)
    th.warpgroup_barrier()

    zeros = [th.number(0) for _ in own]

    @th.fori(th.number(plan.padded // LOOK), zeros)
    def counted(step: Any, carry: list) -> list:
        for value in _entries(flat, step):
            carry = [th.add(count, _one(value, expert)) for count, expert in zip(carry, own, strict=True)]
        return carry

    found = counted.results
    sums = _sums_before([_packed(plan, count) for count in found], counts)
    places = [th.bit_and(value, _PLACES - 1) for value in sums]
    numbers = [th.div(value, _PLACES) for value in sums]
    for expert, count, place, first in zip(own, found, places, numbers, strict=True):
        full = _groups(plan, count)

        @th.fori(full, [])
        def _(index: Any, carry: list, expert=expert, count=count, place=place, first=first) -> list:
            group, taken = th.add(first, index), th.mul(index, plan.columns)
            live = th.least(th.sub(count, taken), plan.columns)
            for row, value in enumerate((expert, th.add(place, taken), live)):
                _store_shared(groups, th.add(th.number(row * plan.groups), group), value)
            return carry

        with th.branch(_equal(expert, th.number(plan.experts - 1))):
            _store_shared(groups, th.number(3 * plan.groups), th.add(first, full))

    @th.fori(th.number(plan.padded // LOOK), list(places))
    def _(step: Any, carry: list) -> list:
        for lane, value in enumerate(_entries(flat, step)):
            for index, expert in enumerate(own):
                address, entry = th.add(order, th.mul(carry[index], 4)), th.add(th.mul(step, LOOK), th.number(lane))
                th.when(_equal(value, expert), "st.shared.b32 [$0], $1;", address, entry)
            carry = [th.add(place, _one(value, expert)) for place, expert in zip(carry, own, strict=True)]
        return carry

    th.warpgroup_barrier()
    for first in range(0, plan.entries, WARPGROUP):
        place = th.add(th.thread(), first)
        with th.branch(th.under(place, plan.entries)):
            entry = _shared_word(order, place)
            share = _shared_word(own_weights, entry) if plan.choice is not None else _global_word(given[1], entry)
            _store_shared(shares, place, share)
    th.warpgroup_barrier()


def _groups(plan: Plan, count: Any) -> Any:
    return th.div(th.add(count, plan.columns - 1), plan.columns)


def _packed(plan: Plan, count: Any) -> Any:
    """How many entries an expert has and how many groups, in one word."""
    return th.add(count, th.mul(_groups(plan, count), _PLACES))


def _sums_before(values: list, spare: Any) -> list:
    """Sums over all experts before each thread's own, of words that threads hold for theirs; `spare` takes a word for each warp."""
    lane, warp = _lane_and_warp()
    sums = []
    for index, value in enumerate(values):
        upto = value
        for distance in (1, 2, 4, 8, 16):
            text = f"shfl.sync.up.b32 $0, $1, {distance}, 0, 0xffffffff;"
            other = th.inline(text, upto, returns=th.i32(), convergent=True)
            reaches = th.compare(lane, "uge", distance)
            upto = th.add(upto, th.select(reaches, other, th.number(0)))
        with th.branch(_equal(lane, th.number(WARP - 1))):
            _store_shared(spare, th.add(warp, index * _WARPS), upto)
        sums.append(th.sub(upto, value))
    th.warpgroup_barrier()
    wholes = [value for step in range(len(values)) for value in _shared_vector(spare, th.number(step))]
    for index in range(len(values)):
        for place, whole in enumerate(wholes[: (index + 1) * _WARPS]):
            earlier = th.compare(th.number(place), "ult", th.add(warp, index * _WARPS))
            sums[index] = th.add(sums[index], th.select(earlier, whole, th.number(0)))
    return sums


def _one(value: Any, expert: Any) -> Any:
    return th.as_word(_equal(value, expert))


def _entries(base: Any, step: Any) -> list:
    """`LOOK` neighbouring words of shared memory, all asked for before the first one is looked at."""
    vectors = LOOK // _VECTOR
    asked = [_shared_vector(base, th.add(th.mul(step, vectors), place)) for place in range(vectors)]
    return [value for vector in asked for value in vector]


def _shared_vector(base: Any, step: Any) -> list:
    """Four neighbouring words of shared memory."""
    return th.load(th.add(base, th.mul(step, 4 * _VECTOR)), _VECTOR, op="ld.shared")


def _shared_word(base: Any, place: Any) -> Any:
    return th.load(th.add(base, th.mul(place, 4)), op="ld.shared")[0]


def _store_shared(base: Any, place: Any, value: Any) -> None:
    th.inline("st.shared.b32 [$0], $1;", th.add(base, th.mul(place, 4)), value)


def _global_word(ref: Any, place: Any) -> Any:
    return th.load(th.word_address(ref, place), op="ld.global")[0]
