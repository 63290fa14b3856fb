"""Parts of a split sequence as threads hold them, written by one kernel and put together by another; in terms of single threads.

Every eight rows of a part lie in memory as the lanes of a warp have them of a matrix instruction's result, sixteen columns after
sixteen columns: sixteen bytes of each lane, columns `2 c`, `2 c + 1`, `2 c + 8` and `2 c + 9` of row r: lane `4 r + c`.
So a warp writes and reads 512 bytes in a row. Written out while a kernel is lowered for a GPU.
"""

import functools
import math
from typing import Any

import numpy as np
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from dflash_kernels.mosaic_gpu import ptx as th

_UNIT = 512  # bytes: eight rows of sixteen columns


def store(target, tile, first_row, rows: int) -> None:
    """A tile `[64, H]` of float32 to rows `first_row` and on of `target [R, H]` in global memory, whose first `rows` exist.

    `first_row` and `rows` are multiples of eight.
    """
    lane, warp = th.lane_and_warp()
    head_dim = th.shape_and_strides(target)[1][0]
    base, places = th.add(th.address(target), th.widen_index(th.mul(lane, 16))), []
    for half in range(2):
        row = th.add(th.add(first_row.registers.item(), th.mul(warp, 16)), 8 * half)
        places.append((th.below(row, rows), th.add(base, th.widen_index(th.mul(row, 4 * head_dim)))))
    # Rows take turns, eight columns after eight columns.
    held = [tile.registers[index] for index in np.ndindex(tile.registers.shape)]
    for half, (exists, address) in enumerate(places):
        for unit in range(len(held) // 4):
            pairs = held[4 * unit + half], held[4 * unit + 2 + half]
            four = [vector.extract(pair, [], [i]) for pair in pairs for i in range(2)]
            place = th.add(address, _UNIT * unit)
            th.when(exists, "st.global.v4.f32 [$0], {$1, $2, $3, $4};", place, *four)


def merge(block, parts, lses, target, sinks: Any = None, *, rows: int) -> None:
    """Four units of a KV head, a warp each, all of whose parts are asked for before the first is used.

    Args:
      block: int32 scalar, which four units.
      parts: `[splits, R, H]` float32 in global memory, each normalised; lses: `[splits, R or more]`, natural, -inf where empty.
      target: `[T, G, H]` in global memory, of whose rows `t * G + g` the first `rows` exist.
      sinks: `[G]` float32 in global memory, or None.
    """
    i32, f32 = th.i32(), ir.F32Type.get()
    (splits, held, head_dim), (part_stride, _, _) = th.shape_and_strides(parts)
    (_, group, _), (token_stride, group_stride, _) = th.shape_and_strides(target)
    dtype, lse_stride = ir.MemRefType(target.type).element_type, th.shape_and_strides(lses)[1][0]
    lane, warp = th.lane_and_warp()
    across, last = head_dim // 16, held // 8 * (head_dim // 16) - 1
    unit = th.add(th.mul(block.registers.item(), 4), warp)
    inside = arith.cmpi(arith.CmpIPredicate.sle, unit, utils.c(last, i32))
    unit = arith.minsi(unit, utils.c(last, i32))
    row = th.add(th.mul(th.div(unit, across), 8), th.div(lane, 4))
    column = th.add(th.mul(th.rem(unit, across), 16), th.mul(th.rem(lane, 4), 2))
    token = th.div(row, group)
    of_group = th.sub(row, th.mul(token, group))
    place = th.add(th.address(lses), th.widen_index(th.mul(row, 4)))
    logits = [_load(th.add(place, 4 * lse_stride * split), 1)[0] for split in range(splits)]
    place = th.add(th.address(parts), th.widen_index(th.add(th.mul(unit, _UNIT), th.mul(lane, 16))))
    found = [_load(th.add(place, 4 * part_stride * split), 4) for split in range(splits)]
    if sinks is not None:
        logits.append(_load(th.add(th.address(sinks), th.widen_index(th.mul(of_group, 4))), 1)[0])
    zero, one, lowest = (utils.c(value, f32) for value in (0.0, 1.0, -math.inf))
    top = functools.reduce(arith.maximumf, logits)
    top = arith.select(arith.cmpf(arith.CmpFPredicate.OEQ, top, lowest), zero, top)
    weights = [_exponential(logit, top) for logit in logits]
    total = functools.reduce(arith.addf, weights)
    share = arith.divf(one, arith.select(arith.cmpf(arith.CmpFPredicate.OGT, total, zero), total, one))
    sums: list[Any] = [zero] * 4
    for weight, values in zip(weights, found, strict=False):
        factor = arith.mulf(weight, share)
        some = arith.cmpf(arith.CmpFPredicate.UNE, factor, zero)
        # Empty parts were never written: what lies there is skipped, not weighted.
        added = [arith.select(some, arith.mulf(factor, value), zero) for value in values]
        sums = [arith.addf(a, b) for a, b in zip(sums, added, strict=True)]
    exists = arith.andi(inside, th.below(row, rows))
    offset = th.add(th.add(th.mul(token, token_stride), th.mul(of_group, group_stride)), column)
    address = th.add(th.address(target), th.mul(th.widen_index(offset), 2))
    for start in range(2):
        pair = vector.from_elements(ir.VectorType.get((2,), f32), sums[2 * start : 2 * start + 2])
        word = utils.bitcast(arith.truncf(ir.VectorType.get((2,), dtype), pair), i32)
        th.when(exists, "st.global.b32 [$0], $1;", th.add(address, 16 * start), word)


def _load(address, count: int):
    """Float32, asked for where it stands in the code."""
    names, vectors = ", ".join(f"${i}" for i in range(count)), "" if count == 1 else f".v{count}"
    names = names if count == 1 else f"{{{names}}}"
    return utils.inline_ptx(
        f"ld.volatile.global{vectors}.f32 {names}, [${count}];", address, result_types=[ir.F32Type.get()] * count,
        has_side_effects=True,
    )  # fmt: skip


def _exponential(logit, top):
    exponent = arith.mulf(arith.subf(logit, top), utils.c(math.log2(math.e), ir.F32Type.get()))
    return utils.inline_ptx("ex2.approx.ftz.f32 $0, $1;", exponent, result_types=ir.F32Type.get())
