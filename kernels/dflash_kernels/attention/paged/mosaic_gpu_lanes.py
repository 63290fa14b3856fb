"""Steps of the Hopper kernels below Pallas, in terms of single threads; written out while a kernel is lowered for a GPU.

Every function stands for code that all 128 threads of a warpgroup run together.
"""

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from dflash_kernels.attention.paged.launch import ROWS
from dflash_kernels.mosaic_gpu import ptx as th

_STORE = "st.shared.v4.b32 [$0], {$1, $2, $3, $4};"


def ask_for_queries(source, first_row, rows: int, columns: int) -> list:
    """Query rows from `source [T, G, H]` for `put_queries`, zeros where `rows` are over and in `columns` past its own."""
    (_, group, head_dim), (token_stride, group_stride, _) = th.shape_and_strides(source)
    base, first, found = th.address(source), first_row.registers.item(), []
    for row, column in _chunks(columns):
        exists = arith.andi(th.below(row, ROWS), th.below(th.add(first, row), rows))
        if columns > head_dim:
            exists = arith.andi(exists, th.below(column, 2 * head_dim))
        token = th.div(th.add(first, row), group)
        offset = th.mul(token, token_stride)
        offset = th.add(offset, th.mul(th.sub(th.add(first, row), th.mul(token, group)), group_stride))
        address = th.add(base, th.add(th.mul(th.widen_index(offset), 2), th.widen_index(column)))
        found.append(th.load_if(exists, address, "ld.volatile.global"))
    return found


def put_queries(asked: list, target) -> None:
    """What was asked for, to swizzled shared memory; then all threads may read it."""
    width, (_, columns), place = th.swizzle(target), th.rows_and_columns(target), th.address(target, space=3)
    for words, (row, column) in zip(asked, _chunks(columns), strict=True):
        th.when(th.below(row, ROWS), _STORE, th.add(place, th.within(row, column, columns, width)), *words)
    mgpu.commit_shared()


def _chunks(columns: int) -> list:
    """Row and byte of a row of each sixteen bytes that a thread moves of a block of query rows."""
    units, (lane, warp) = 2 * columns // th.CHUNK, th.lane_and_warp()
    numbers = [th.add(th.add(th.mul(warp, 32), lane), start) for start in range(0, ROWS * units, 128)]
    return [(th.div(number, units), th.mul(th.rem(number, units), th.CHUNK)) for number in numbers]


def hold_entries(table, begin, stride: int, per_page: int):
    """See `mosaic_gpu_ops.hold_entries`."""
    lane, _ = th.lane_and_warp()
    address = _entry_address(table, th.add(begin.registers.item(), th.mul(lane, stride)), per_page)
    # Volatile: as a plain load it would be moved behind the first branch.
    word = utils.inline_ptx("ld.volatile.global.b32 $0, [$1];", address, result_types=th.i32(), has_side_effects=True)
    held = np.array([vector.from_elements(ir.VectorType.get((1,), th.i32()), [word])], dtype=object)
    return mgpu.FragmentedArray(_registers=held, _layout=mgpu.WGStridedFragLayout((128,), 1), _is_signed=True)


def held_entry(entries, table, begin, index, stride: int, per_page: int):
    """See `mosaic_gpu_ops.held_entry`."""
    word, index = vector.extract(entries.registers.item(), [], [0]), index.registers.item()
    address = _entry_address(table, th.add(begin.registers.item(), th.mul(index, stride)), per_page)
    found = utils.inline_ptx(
        "{ .reg .pred far; .reg .b32 lane; setp.ge.s32 far, $3, 32; and.b32 lane, $3, 31;"
        " shfl.sync.idx.b32 $0, $1, lane, 31, -1; @far ld.global.b32 $0, [$2]; }",
        word, address, index, result_types=th.i32(), has_side_effects=True, convergent=True,
    )  # fmt: skip
    return mgpu.FragmentedArray.splat(found, (), is_signed=True)


def _entry_address(table, tile, per_page: int):
    last = th.shape_and_strides(table)[0][0] - 1
    entry = arith.minsi(th.div(tile, per_page), utils.c(last, th.i32()))
    return th.add(th.address(table), th.mul(th.widen_index(entry), 4))


def pad_columns(source, target) -> None:
    """Rows of shared memory, packed, to a swizzled tile with more columns, zeros there; then all threads may read them."""
    i32 = th.i32()
    (count, columns), packed, width = (
        th.rows_and_columns(target),
        2 * th.shape_and_strides(source)[0][1],
        th.swizzle(target),
    )
    units = 2 * columns // th.CHUNK
    lane, warp = th.lane_and_warp()
    base, place = th.address(source, space=3), th.address(target, space=3)
    for start in range(0, count * units, 128):
        unit = th.add(th.add(th.mul(warp, 32), lane), start)
        row, column = th.div(unit, units), th.mul(th.rem(unit, units), th.CHUNK)
        inside = th.below(row, count)
        words = utils.inline_ptx(
            "{ .reg .pred there; setp.ne.b32 there, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;"
            " @there ld.shared.v4.b32 {$0, $1, $2, $3}, [$4]; }",
            th.add(base, th.add(th.mul(row, packed), column)),
            arith.extui(i32, arith.andi(inside, th.below(column, packed))),
            result_types=[i32] * 4, has_side_effects=True,
        )  # fmt: skip
        th.when(inside, _STORE, th.add(place, th.within(row, column, columns, width)), *words)
    mgpu.commit_shared()


def clear_rows(target, first) -> None:
    """Zeroes the rows from `first`, an int32 scalar, on of a swizzled tile; then matrix instructions may read it."""
    (count, columns), width = th.rows_and_columns(target), th.swizzle(target)
    units, (lane, warp) = 2 * columns // th.CHUNK, th.lane_and_warp()
    first, zero, base = first.registers.item(), utils.c(0, th.i32()), th.address(target, space=3)
    for start in range(0, count * units, 128):
        unit = th.add(th.add(th.mul(warp, 32), lane), start)
        row, column = th.div(unit, units), th.mul(th.rem(unit, units), th.CHUNK)
        unused = arith.andi(arith.cmpi(arith.CmpIPredicate.sge, row, first), th.below(row, count))
        th.when(unused, _STORE, th.add(base, th.within(row, column, columns, width)), *[zero] * 4)
    mgpu.commit_shared()


def store_rows(target, tile, column, rows: int) -> None:
    """Row `t * G + g` of a tile to `target [T, G, H]` in global memory, from a column on; the first `rows` exist.

    `tile`: `[64, C]` of two-byte elements in the layout of a matrix instruction's result.
    """
    (_, group, _), (token_stride, group_stride, _) = th.shape_and_strides(target)
    lane, warp = th.lane_and_warp()
    base, own = th.address(target), th.mul(th.rem(lane, 4), 4)  # bytes: two columns of every eight
    column = column.registers.item()
    places = []
    for half in range(2):
        row = th.add(th.add(th.mul(warp, 16), th.div(lane, 4)), 8 * half)
        token = th.div(row, group)
        offset = th.add(th.mul(token, token_stride), th.mul(th.sub(row, th.mul(token, group)), group_stride))
        address = th.add(base, th.add(th.mul(th.widen_index(th.add(offset, column)), 2), th.widen_index(own)))
        places.append((th.below(row, rows), address))
    for place, index in enumerate(np.ndindex(tile.registers.shape)):
        # Rows take turns, eight columns after eight columns.
        exists, address = places[place % 2]
        word = utils.bitcast(tile.registers[index], th.i32())
        th.when(exists, "st.global.b32 [$0], $1;", th.add(address, 16 * (place // 2)), word)


def store_part(target, tile, first_row, rows: int) -> None:
    """A tile `[64, H]` of float32 to rows `first_row` and on of `target [R, H]` in global memory, whose first `rows` exist."""
    f32_bytes, row_stride = 4, th.shape_and_strides(target)[1][0]
    lane, warp = th.lane_and_warp()
    base = th.add(
        th.address(target), th.widen_index(th.mul(th.rem(lane, 4), 2 * f32_bytes))
    )  # two columns of every eight
    places = []
    for half in range(2):
        row = th.add(th.add(th.mul(warp, 16), th.div(lane, 4)), 8 * half)
        row = th.add(first_row.registers.item(), row)
        places.append((th.below(row, rows), th.add(base, th.mul(th.widen_index(row), row_stride * f32_bytes))))
    for place, index in enumerate(np.ndindex(tile.registers.shape)):
        # Rows take turns, eight columns after eight columns.
        exists, address = places[place % 2]
        both = (vector.extract(tile.registers[index], [], [i]) for i in range(2))
        th.when(exists, "st.global.v2.f32 [$0], {$1, $2};", th.add(address, 8 * f32_bytes * (place // 2)), *both)
