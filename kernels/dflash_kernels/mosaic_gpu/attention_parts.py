"""Parts of a chain's attention below Pallas, in terms of single threads; written out while a kernel is lowered for a GPU.

Every function stands for code that all 128 threads of a warpgroup run together. CTAs hand parts over as words that are EMPTY until
they are written: whoever needs them reads until none is, and nobody counts or waits for stores.
"""

import functools
import math

import numpy as np
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from dflash_kernels.fused.layer.mosaic_gpu_plan import HEAD_DIM, KEYS, QUADS, Attention
from dflash_kernels.fused.layer.plan import EMPTY
from dflash_kernels.mosaic_gpu import ptx as th
from dflash_kernels.mosaic_gpu.attention_words import packed


def leave_part(target, lses, tile, lse, column: int, rows: int) -> None:
    """Leaves the first rows of a matrix instruction's result in `target [rows, H]`, from a column on, for `put_together`.

    With `lse`, one number for each row, also these in `lses [64]`.
    """
    base, pitch = th.address(target), th.shape_and_strides(target)[1][0]
    for position, place in zip(tile.layout.thread_idxs(tile.shape), np.ndindex(tile.registers.shape), strict=True):
        row, first = (arith.index_cast(th.i32(), index) for index in position)
        pair = tile.registers[place]
        low, high = (vector.extract(pair, [], [i]) for i in range(2))
        address = th.add(base, th.mul(th.widen_index(th.add(th.mul(row, pitch), th.add(first, column))), 4))
        th.when(th.below(row, rows), "st.relaxed.gpu.global.v2.f32 [$0], {$1, $2};", address, low, high)
    if lse is None:
        return
    for position, place in zip(lse.layout.thread_idxs(lse.shape), np.ndindex(lse.registers.shape), strict=True):
        row = arith.index_cast(th.i32(), position[0])
        value = lse.registers[place]
        if isinstance(value.type, ir.VectorType):
            value = vector.extract(value, [], [0])
        address = th.add(th.address(lses), th.mul(th.widen_index(row), 4))
        th.when(th.below(row, rows), "st.relaxed.gpu.global.f32 [$0], $1;", address, value)


def put_together(attention: Attention, parts, lses, target, first_item, sequence, head, split, busy) -> None:
    """Adds up all parts of some rows of a head, weighted, in the parts' order, and writes them as bfloat16 to `target`.

    Reads what `leave_part` leaves until no word is EMPTY, and makes the words EMPTY again.

    Args:
      parts: `[items, rows, H]`, float32 bits, normalised; lses: `[items, 64]`, natural.
      target: `[B * T, N * H / 2]` words.
      first_item: of the head; split: which of its CTAs this is; busy: how many of its parts have keys, int32 scalars.
    """
    first_item, sequence, head, split, busy = (
        value.registers.item() for value in (first_item, sequence, head, split, busy)
    )
    lane, _ = th.lane_and_warp()
    for exists, row, column, address in _quads(attention, target, sequence, head, split):
        of_lse = th.add(th.mul(first_item, KEYS), row)
        of_part = th.add(th.mul(th.add(th.mul(first_item, attention.rows), row), HEAD_DIM), column)
        lse, values = (
            th.add(th.address(ref), th.mul(th.widen_index(of), 4)) for ref, of in ((lses, of_lse), (parts, of_part))
        )
        wanted = arith.select(exists, busy, utils.c(0, th.i32()))
        low, high = packed(_weighted(_take_parts(attention, lse, values, wanted)))
        if attention.paired:
            _store_paired(exists, address, column, low, high)
        else:
            th.when(exists, "st.relaxed.gpu.global.v2.b32 [$0], {$1, $2};", address, low, high)
        # Only now: others wait for the row.
        _empty_parts(attention, lse, values, wanted, lane)


def _store_paired(exists, address, column, low, high) -> None:
    """Writes four columns, two in a word, where they lie when columns are in pairs; `address` is theirs when they are not."""
    i16, i64 = (ir.IntegerType.get_signless(bits) for bits in (16, 64))
    among = arith.andi(column, utils.c(15, th.i32()))
    place = th.add(th.mul(arith.andi(column, utils.c(7, th.i32())), 2), th.div(among, 8))
    address = arith.addi(address, arith.extsi(i64, th.mul(th.sub(place, among), 2)))
    halves = [
        arith.trunci(i16, half) for word in (low, high) for half in (word, arith.shrui(word, utils.c(16, th.i32())))
    ]
    for index, half in enumerate(halves):
        th.when(exists, f"st.relaxed.gpu.global.b16 [$0 + {4 * index}], $1;", address, half)


def empty_heads(attention: Attention, target, sequence, head, split) -> None:
    """Makes the words EMPTY that `put_together` has written."""
    places = (value.registers.item() for value in (sequence, head, split))
    for exists, _, _, address in _quads(attention, target, *places):
        th.when(exists, "st.relaxed.gpu.global.v2.b32 [$0], {$1, $1};", address, utils.c(EMPTY, th.i32()))


def _quads(attention: Attention, target, sequence, head, split):
    """What this thread of a head's CTA puts together: whether it exists, row and column of the head, and address.

    A row is a warp's: all its threads exist or none.
    """
    lane, warp = th.lane_and_warp()
    thread = th.add(th.add(th.mul(warp, 32), lane), th.mul(split, QUADS))
    words = th.shape_and_strides(target)[0][1]
    for start in range(0, attention.quads, attention.mergers * QUADS):
        quad = th.add(thread, start)
        exists = th.below(quad, attention.quads)
        quad = arith.minsi(quad, utils.c(attention.quads - 1, th.i32()))
        row, column = th.div(quad, HEAD_DIM // 4), th.mul(th.rem(quad, HEAD_DIM // 4), 4)
        token, among = th.div(row, attention.group), th.rem(row, attention.group)
        token = th.add(th.mul(sequence, attention.tokens), token)
        word = th.div(th.add(th.mul(th.add(th.mul(head, attention.group), among), HEAD_DIM), column), 2)
        offset = th.add(th.mul(token, words), word)
        yield exists, row, column, th.add(th.address(target), th.mul(th.widen_index(offset), 4))


def _take_parts(attention: Attention, lse, values, busy) -> list[list]:
    """A row's lse and a thread's four columns of the first `busy` parts, as soon as all are there; -inf and anything of the others.

    Args:
      lse, values: addresses in the first part.
    """
    count, f32 = attention.splits, ir.F32Type.get()
    strides = _strides(attention)
    lines = ["{", f".reg .pred p, q<{count}>; .reg .b32 m, busy; .reg .b64 l, v;"]
    lines += [f"mov.b64 l, ${5 * count}; mov.b64 v, ${5 * count + 1}; mov.b32 busy, ${5 * count + 2};"]
    for part in range(count):
        lines += [f"setp.gt.s32 q{part}, busy, {part}; mov.b32 ${5 * part}, 0xff800000;"]
        lines += [f"mov.b32 ${5 * part + word}, 0;" for word in range(1, 5)]
    lines += ["again:"]
    for part in range(count):
        words = ", ".join(f"${5 * part + word}" for word in range(1, 5))
        lines += [f"@q{part} ld.relaxed.gpu.global.b32 ${5 * part}, [l + {part * strides[0]}];"]
        lines += [f"@q{part} ld.relaxed.gpu.global.v4.b32 {{{words}}}, [v + {part * strides[1]}];"]
    lines += ["mov.b32 m, $0;", *(f"max.u32 m, m, ${word};" for word in range(1, 5 * count))]
    lines += [f"setp.eq.u32 p, m, {EMPTY & 0xFFFFFFFF}; vote.sync.any.pred p, p, 0xffffffff; @p bra again;", "}"]
    found = utils.inline_ptx(
        "\n".join(lines), lse, values, busy, result_types=[th.i32()] * (5 * count), has_side_effects=True
    )
    return [[utils.bitcast(word, f32) for word in found[5 * part : 5 * part + 5]] for part in range(count)]


def _empty_parts(attention: Attention, lse, values, busy, lane) -> None:
    """Makes the words EMPTY again that `_take_parts` has read."""
    strides = _strides(attention)
    empty, first_lane = utils.c(EMPTY, th.i32()), arith.cmpi(arith.CmpIPredicate.eq, lane, utils.c(0, th.i32()))
    for part in range(attention.splits):
        there = arith.cmpi(arith.CmpIPredicate.sgt, busy, utils.c(part, th.i32()))
        th.when(there, "st.global.v4.b32 [$0], {$1, $1, $1, $1};", th.add(values, part * strides[1]), empty)
        one = arith.andi(there, first_lane)
        th.when(one, "st.global.b32 [$0], $1;", th.add(lse, part * strides[0]), empty)


def _strides(attention: Attention) -> tuple[int, int]:
    """Bytes from one part's lse and values to the next one's."""
    return 4 * KEYS, 4 * attention.rows * HEAD_DIM


def _weighted(found: list[list]) -> list:
    """The sum of parts, each its lse and four columns; zeros where no part holds anything."""
    f32 = ir.F32Type.get()
    lowest, zero, one = (utils.c(value, f32) for value in (-math.inf, 0.0, 1.0))
    top = functools.reduce(arith.maximumf, [lse for lse, *_ in found])
    base = arith.select(arith.cmpf(arith.CmpFPredicate.OEQ, top, lowest), zero, top)
    total, sums = zero, [zero] * 4
    for lse, *values in found:
        weight = _exponential(arith.subf(lse, base))
        total = arith.addf(total, weight)
        sums = [arith.addf(a, arith.mulf(weight, b)) for a, b in zip(sums, values, strict=True)]
    some = arith.cmpf(arith.CmpFPredicate.OGT, total, zero)
    share = arith.divf(one, arith.select(some, total, one))
    return [arith.mulf(value, share) for value in sums]


def _exponential(value):
    exponent = arith.mulf(value, utils.c(math.log2(math.e), ir.F32Type.get()))
    return utils.inline_ptx("ex2.approx.ftz.f32 $0, $1;", exponent, result_types=ir.F32Type.get())
