"""Rows of experts on Hopper, in terms of single threads: gathered to a product, scattered from one."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.core.device import MATRIX_ROWS, WARPGROUP
from dflash_kernels.mosaic_gpu import ptx as th
from dflash_kernels.mosaic_gpu.layouts import TILED
from dflash_kernels.mosaic_gpu.thread_op import GLOBAL, MATRIX, SCALAR, thread_op


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
            row = th.div(th.shared_word(entries, row), top_k)
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


def _load_rows_interpreted(source: Any, target: Any, order: Any, first: Any, live: Any, *, top_k: int) -> None:
    columns, width = target.shape[1:]
    places = jnp.minimum(first + lax.iota(jnp.int32, columns), first + live - 1)
    held = source[...][order[...][places] // top_k if top_k else places]
    for block in range(source.shape[1] // width):
        target.at[block][...] = held[:, block * width : (block + 1) * width]


@thread_op(args=(GLOBAL, plgpu.RefType(TILED), GLOBAL, SCALAR, SCALAR), interpret=_load_rows_interpreted)
def load_rows(source: Any, target: Any, order: Any, first: Any, live: Any, *, top_k: int) -> None:
    """Starts `cp.async` copies of whole rows of `source`, those of a group; columns of no entry are left as they are.

    Arguments are those of `gather_rows`; the target may have more blocks than the source.
    """
    groups, rows_of_group, width = (th.shape_and_strides(target)[0][axis] for axis in (1, 3, 4))
    length, pitch = th.shape_and_strides(source)[0][1], th.shape_and_strides(source)[1][0]
    chunks, columns = length * 2 // th.CHUNK, groups * rows_of_group
    base, to, entries = th.address(source), th.address(target, space=3), th.address(order, space=3)

    @th.fori(live, [])
    def _(place: Any, carry: list) -> list:
        row = th.add(first, place)
        if top_k:
            row = th.div(th.shared_word(entries, row), top_k)
        start = th.add(base, th.mul(th.widen_index(row), pitch * 2))
        for begin in range(0, chunks, WARPGROUP):
            chunk = th.add(th.thread(), begin)
            block, piece = th.div(chunk, 8), th.rem(chunk, 8)
            line = th.add(th.mul(block, columns), place)
            swizzled = th.mul(th.xor(piece, th.rem(place, 8)), th.CHUNK)
            target_at = th.add(th.add(to, th.mul(line, width * 2)), swizzled)
            where = th.add(start, th.widen_index(th.mul(chunk, th.CHUNK)))
            copy = f"cp.async.cg.shared.global [$0], [$1], {th.CHUNK};"
            if begin + WARPGROUP > chunks:
                th.when(th.under(chunk, chunks), copy, target_at, where)
            else:
                th.inline(copy, target_at, where)
        return carry

    th.inline("cp.async.commit_group;")


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
        """Destination of a column's entry, and its weight: once for all rows of a thread."""
        if key not in found:
            there = th.compare(column, "ult", live)
            place = th.add(first, th.select(there, column, th.number(0)))
            entry = th.shared_word(entries, place)
            token, choice = th.div(entry, top_k), th.rem(entry, top_k)
            row = th.widen_index(th.add(th.mul(choice, tokens), token))
            start = th.add(base, th.mul(row, hidden * 4))
            found[key] = there, start, th.as_real(th.shared_word(of_shares, place))
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


def _zero_rows_interpreted(
    target: Any, experts: Any, cta: Any, *, entries: int, ctas: int, shape: tuple[int, int, int]
) -> None:
    top_k = shape[0]
    for turn in range(-(-entries // ctas)):
        entry = jnp.minimum(cta + turn * ctas, entries - 1)

        @pl.when((cta + turn * ctas < entries) & (experts[entry] < 0))
        def _(entry=entry):
            row = target.at[lax.rem(entry, top_k), lax.div(entry, top_k)]
            row[...] = jnp.zeros(shape[2:], target.dtype)


@thread_op(args=(GLOBAL, GLOBAL, SCALAR), interpret=_zero_rows_interpreted)
def zero_rows(target: Any, experts: Any, cta: Any, *, entries: int, ctas: int, shape: tuple[int, int, int]) -> None:
    """Zeros for those entries that are nobody's, a part of them by each CTA.

    Args:
      target: `[k, T, D]` float32 in global memory, of this shape.
      experts: of all entries, in shared memory, below zero where nobody takes one.
    """
    top_k, tokens, hidden = shape
    base, of_entries = th.word_address(target, th.number(0)), th.address(experts, space=3)

    @th.fori(th.number(-(-entries // ctas)), [])
    def _(turn: Any, carry: list) -> list:
        entry = th.add(th.mul(turn, ctas), cta)
        inside = th.under(entry, entries)
        expert = th.shared_word(of_entries, th.select(inside, entry, th.number(0)))
        with th.branch(th.every(inside, th.compare(expert, "slt", 0))):
            row = th.widen_index(th.add(th.mul(th.rem(entry, top_k), tokens), th.div(entry, top_k)))
            start = th.add(base, th.mul(row, hidden * 4))
            for first in range(0, hidden // 4, WARPGROUP):
                quad = th.add(th.thread(), first)
                where = th.offset(start, th.mul(quad, 16))
                th.when(th.under(quad, hidden // 4), "st.global.v4.b32 [$0], {$1, $1, $1, $1};", where, th.number(0))
        return carry


@thread_op(args=(GLOBAL, GLOBAL, SCALAR, SCALAR), interpret=lambda *_, **__: None)
def touch_tiles(source: Any, experts: Any, begin: Any, end: Any, *, tiles: int, parts: int) -> None:
    """Brings to the L2 what lies beside the tiles of work items `begin` to `end`, 128 at most: 64 numbers of two bytes for each.

    Args:
      source: `[experts * tiles * 64]` in global memory.
      experts: of all groups, in shared memory; each has `tiles * parts` items.
    """
    item = th.add(begin, th.thread())
    with th.branch(th.compare(item, "slt", end)):
        group, tile = th.div(item, tiles * parts), th.div(th.rem(item, tiles * parts), parts)
        expert = th.shared_word(th.address(experts, space=3), group)
        line = th.add(th.mul(expert, tiles), tile)
        th.inline("prefetch.global.L2 [$0];", th.word_address(source, th.mul(line, MATRIX_ROWS // 2)))


def _store_column_interpreted(target: Any, tile: Any, shares: Any, column: Any) -> None:
    for place in range(tile.shape[1]):

        @pl.when(place == column)
        def _(place=place):
            target[...] = tile[:, place] * shares[place]


@thread_op(args=(GLOBAL, MATRIX, GLOBAL, SCALAR), interpret=_store_column_interpreted)
def store_column(target: Any, tile: Any, shares: Any, column: Any) -> None:
    """`target[row] = shares[column] * tile[row, column]` of one column.

    Args:
      target: `[64]` float32 in global memory; tile: `[64, N]` float32; shares: of the columns, in shared memory.
    """
    share = th.as_real(th.shared_word(th.address(shares, space=3), column))

    def store(value: Any, position: Any) -> None:
        row, place = (th.index_word(one) for one in position)
        there = th.compare(place, "eq", column)
        th.when(there, "st.global.f32 [$0], $1;", th.word_address(target, row), th.fmul(value, share))

    tile.foreach(store)


@thread_op(args=(GLOBAL, SCALAR), interpret=lambda *_: None)
def touch_tile(source: Any, line: Any) -> None:
    """Brings 64 numbers of two bytes to the L2, those from `64 * line` on."""
    with th.branch(th.compare(th.thread(), "eq", 0)):
        th.inline("prefetch.global.L2 [$0];", th.word_address(source, th.mul(line, MATRIX_ROWS // 2)))
