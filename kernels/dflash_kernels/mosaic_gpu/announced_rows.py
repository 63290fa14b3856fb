"""Rows of a few columns' operand, each from where it was announced: asynchronous copies that hold up nobody."""

# Pallas declares what it inlines with the context that it passes itself.
# pyright: reportAbstractUsage=false, reportCallIssue=false

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.core.device import WARP, WARPGROUP
from dflash_kernels.mosaic_gpu import ptx as th
from dflash_kernels.mosaic_gpu.layouts import TILED
from dflash_kernels.mosaic_gpu.thread_op import GLOBAL, SCALAR, interpreting, thread_op

_ARRIVE = "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];"  # once this thread's copies until now are there
_BARRIER = 8  # bytes


def load_row(source: Any, target: Any, barriers: Any) -> None:
    """Starts `cp.async` copies of `source`'s row to column 0 of the target, the others of which are left as they are.

    Args:
      source: `[1, columns]` in global memory, two bytes an element.
      target: `[blocks, N, 64]` in shared memory, in swizzled tiles of 8 rows.
      barriers: `address_of` some, the first of which completes when the row is there. Whoever has waited for it calls `gathered`.
    """
    if interpreting():
        _fill_columns(source, target)
        plgpu.barrier_arrive(barriers.at[0])
    else:
        _load_row(source, target, barriers)


@thread_op(args=(GLOBAL, plgpu.RefType(TILED), SCALAR))
def _load_row(source: Any, target: Any, barrier: Any) -> None:
    _copy_to_column(source, target, 0, th.thread(), WARPGROUP)
    th.inline(_ARRIVE, barrier)


def load_rows_announced(
    source: Any, target: Any, ready: Any, owned: list[Any], barriers: Any, *, apart: int, given: int, taken: int
) -> None:
    """Starts `cp.async` copies of rows of `source` to the target's columns, each once it is announced (`counters`).

    A warp waits for a row, or for several in turn: those that come later hold up nobody.

    Args:
      source, target, barriers: as of `load_row`; row g completes barrier 1 + g.
      ready: counts of what is announced, for each row.
      owned: for each row, how many of its `taken` users this CTA has; it waits for no row that it does not use.
      apart: words from a row's count to the next one's; given: how many announcements make a row.
    """
    if interpreting():
        _fill_columns(source, target)
        for row, own in enumerate(owned):
            pl.when(own > 0)(lambda row=row: plgpu.barrier_arrive(barriers.at[1 + row]))
    else:
        _load_rows_announced(source, target, ready, owned, barriers, apart=apart, given=given, taken=taken)


@thread_op(args=(GLOBAL, plgpu.RefType(TILED), GLOBAL, SCALAR, SCALAR))
def _load_rows_announced(
    source: Any, target: Any, ready: Any, owned: list[Any], barriers: Any, *, apart: int, given: int, taken: int
) -> None:
    lane, warp = th.lane_and_warp()
    warps = WARPGROUP // WARP
    for row, own in enumerate(owned):
        with th.branch(th.every(th.compare(warp, "eq", row % warps), th.compare(own, "sgt", 0))):
            count, leads = th.word_address(ready, th.number(row * apart)), th.compare(lane, "eq", 0)
            with th.branch(leads):
                th.inline(
                    "{ .reg .pred p; .reg .b32 w; .reg .b64 a; mov.b64 a, $0; again: ld.acquire.gpu.global.u32 w, [a]; "
                    f"setp.lt.u32 p, w, {given}; @p bra again; }}",
                    count,
                )
            th.warp_barrier()
            _copy_to_column(source, target, row, lane, WARP)
            # Barriers count arrivals of all threads of a warpgroup.
            for _ in range(warps):
                th.inline(_ARRIVE, th.add(barriers, _BARRIER * (1 + row)))
            with th.branch(leads):
                # Who takes last leaves the count at 0 for the next launch.
                th.inline(
                    "{ .reg .pred p; .reg .b32 w; .reg .b64 a; mov.b64 a, $0; "
                    "atom.relaxed.gpu.global.add.u32 w, [a], $1; add.u32 w, w, $1; "
                    f"setp.eq.u32 p, w, {given + taken}; @p st.relaxed.gpu.global.u32 [a], 0; }}",
                    count, own,
                )  # fmt: skip


def _copy_to_column(source: Any, target: Any, row: int, thread: Any, threads: int) -> None:
    """Starts the copies of row `row` to the column of the same number, by so many threads."""
    _, length = th.shape_and_strides(source)[0]
    columns, width = th.shape_and_strides(target)[0][1] * 8, th.shape_and_strides(target)[0][4]
    start = th.offset(th.address(source), th.number(2 * length * row))
    to, chunks = th.address(target, space=3), length * 2 // th.CHUNK
    for begin in range(0, chunks, threads):
        chunk = th.add(thread, begin)
        block, piece = th.div(chunk, 8), th.rem(chunk, 8)
        line = th.add(th.mul(block, columns), row)
        swizzled = th.mul(th.xor(piece, th.number(row % 8)), th.CHUNK)
        target_at = th.add(th.add(to, th.mul(line, width * 2)), swizzled)
        where = th.add(start, th.widen_index(th.mul(chunk, th.CHUNK)))
        copy = f"cp.async.cg.shared.global [$0], [$1], {th.CHUNK};"
        if begin + threads > chunks:
            th.when(th.under(chunk, chunks), copy, target_at, where)
        else:
            th.inline(copy, target_at, where)


def _fill_columns(source: Any, target: Any) -> None:
    """The interpreter's form: what no row is copied to is NaN."""
    columns, width = target.shape[1:]
    held = source[...]
    held = jnp.concatenate([held, jnp.full((columns - held.shape[0], held.shape[1]), jnp.nan, held.dtype)])
    for block in range(held.shape[1] // width):
        target.at[block][...] = held[:, block * width : (block + 1) * width]
