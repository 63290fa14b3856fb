"""Queries of the kernel for one-byte pages below Pallas: scaled by powers of two, and as float16 or as two bytes a number.

Every function stands for code that all 128 threads of a warpgroup run together.
"""

import functools

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from dflash_kernels.mosaic_gpu import ptx as th

_TOP = 14  # exponent of a row's largest number once it is scaled
_LEAST = 20  # exponent that a row is taken to have at least, as float32 has it
_NAN = 0x7FC00000


def ask_for_queries(source, first_row, count: int) -> list:
    """Query rows from `source [T, G, H]` for `put_queries`: `count` from `first_row` on, zeros where there are none."""
    (tokens, group, head_dim), (token_stride, group_stride, _) = th.shape_and_strides(source)
    base, first, found = th.address(source), first_row.registers.item(), []
    for row, column in _units(count, head_dim):
        row = th.add(first, row)
        inside = arith.andi(th.below(row, tokens * group), th.below(column, 2 * head_dim))
        token = th.div(row, group)
        offset = th.add(th.mul(token, token_stride), th.mul(th.sub(row, th.mul(token, group)), group_stride))
        address = th.add(base, th.add(th.mul(th.widen_index(offset), 2), th.widen_index(column)))
        found += [th.load_if(inside, th.add(address, i * th.CHUNK), "ld.volatile.global") for i in range(2)]
    return found


def put_queries(asked: list, source, target, factors, first_row, rows, tops=None):
    """What was asked for to shared memory, zeros from row `rows` on; then all may read it.

    A target of float16 gets them in the keys' order, each row times the power of two that brings its largest number to between
    2^14 and 2^15, rows of float16 as they are; `factors` gets the inverses. One of int8 gets them rounded, all upper bytes before
    all lower ones (`_bytes`), times one power of two that does so to the largest number of all finite rows, by way of `tops`, four
    words of shared memory; `factors` gets NaN for rows that are not finite throughout, and 0. Returns its inverse for int8.
    """
    i32, f32 = th.i32(), ir.F32Type.get()
    wide = isinstance(ir.MemRefType(source.type).element_type, ir.BF16Type)
    split = isinstance(ir.MemRefType(target.type).element_type, ir.IntegerType)
    head_dim = th.shape_and_strides(source)[0][2]
    width, (count, columns) = th.swizzle(target), th.rows_and_columns(target)
    count = count // 2 if split else count
    place, first, sharing = th.address(target, space=3), first_row.registers.item(), _sharing(head_dim)
    units, held, found = _units(count, head_dim), [], []
    for index, (row, _) in enumerate(units):
        # Rows of dead tokens may hold anything.
        exists = arith.cmpi(arith.CmpIPredicate.slt, th.add(first, row), rows.registers.item())
        loaded = [word for words in asked[2 * index : 2 * index + 2] for word in words]
        held.append([arith.select(exists, word, utils.c(0, i32)) for word in loaded])
        as_they_are = utils.c(127 + _TOP, i32), None
        found.append(_exponent_of_row(held[-1], sharing, wide) if wide or split else as_they_are)
    common = _largest(found, sharing, tops) if split else None
    for (row, column), words, (exponent, finite) in zip(units, held, found, strict=True):
        inside = arith.andi(th.below(row, count), th.below(column, 2 * head_dim))
        exponent = exponent if common is None else common
        times = utils.bitcast(th.shift_left(arith.subi(utils.c(254 + _TOP, i32), exponent), 23), f32)
        inverse = th.shift_left(th.sub(exponent, _TOP), 23)
        if split:
            inverse = arith.select(finite, utils.c(0, i32), utils.c(_NAN, i32))
            pairs = [_bytes(words[i], words[i + 1], times, wide) for i in range(0, 8, 2)]
            parts = [[pair[part] for pair in pairs] for part in range(2)]
            inner = [th.within(th.add(row, part * count), th.div(column, 2), columns // 2, width) for part in range(2)]
        else:
            words = [_scaled(word, times) if wide else word for word in (*words[::2], *words[1::2])]
            parts = words[:4], words[4:]
            inner = [th.within(row, th.add(column, part * th.CHUNK), columns, width) for part in range(2)]
        for part, offset in zip(parts, inner, strict=True):
            th.when(inside, "st.shared.v4.b32 [$0], {$1, $2, $3, $4};", th.add(place, offset), *part)
        leads = arith.andi(inside, th.below(column, 1))
        th.when(leads, "st.shared.b32 [$0], $1;", th.add(th.address(factors, space=3), th.mul(row, 4)), inverse)
    mgpu.commit_shared()
    if split:
        inverse = utils.bitcast(th.shift_left(th.sub(common, _TOP), 23), f32)
        return mgpu.FragmentedArray.splat(inverse, ())
    return None


def _largest(found: list, sharing: int, tops):
    """The largest exponent of all threads' finite rows."""
    i32 = th.i32()
    top = functools.reduce(
        arith.maxui, [arith.select(finite, exponent, utils.c(_LEAST, i32)) for exponent, finite in found]
    )
    distance = sharing
    while distance < 32:
        top = arith.maxui(top, utils.shfl_bfly(top, distance))
        distance *= 2
    lane, warp = th.lane_and_warp()
    th.when(th.below(lane, 1), "st.shared.b32 [$0], $1;", th.add(th.address(tops, space=3), th.mul(warp, 4)), top)
    utils.warpgroup_barrier()
    all_four = utils.inline_ptx(
        "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];",
        th.address(tops, space=3),
        result_types=[i32] * 4,
        has_side_effects=True,
    )
    return functools.reduce(arith.maxui, all_four)


def asked_words(count: int, head_dim: int) -> int:
    """How many times sixteen bytes a thread asks for."""
    return 2 * (-(-count * _sharing(head_dim) // 128))


def _sharing(head_dim: int) -> int:
    """Lanes that share a row, 16 columns each: a power of two, the last of which may have none."""
    return 1 << (head_dim // 16 - 1).bit_length()


def _units(count: int, head_dim: int) -> list:
    """Row and first byte of a row of what a thread moves of so many rows, 32 bytes at a time."""
    sharing, (lane, warp) = _sharing(head_dim), th.lane_and_warp()
    units = [th.add(th.add(th.mul(warp, 32), lane), start) for start in range(0, count * sharing, 128)]
    return [(th.div(unit, sharing), th.mul(th.rem(unit, sharing), 2 * th.CHUNK)) for unit in units]


def _exponent_of_row(words, sharing: int, wide: bool):
    """Of the largest number of the row that `sharing` lanes hold: its exponent as float32 has it, kept where powers of two have
    inverses; and whether it is finite."""
    i32 = th.i32()
    tops = [arith.andi(word, utils.c(0x7FFF7FFF, i32)) for word in words]
    halves = [th.div(top, 1 << 16) for top in tops] + [arith.andi(top, utils.c(0xFFFF, i32)) for top in tops]
    top = functools.reduce(arith.maxui, halves)
    for distance in range(sharing.bit_length() - 1):
        top = arith.maxui(top, utils.shfl_bfly(top, 1 << distance))
    exponent = th.div(top, 1 << 7) if wide else th.add(th.div(top, 1 << 10), 127 - 15)
    exponent = arith.maxui(arith.minui(exponent, utils.c(254, i32)), utils.c(_LEAST, i32))
    return exponent, th.below(top, 0x7F80 if wide else 0x7C00)


def _bytes(first, second, times, wide: bool):
    """Four numbers in two words, times a power of two and rounded to `256 * upper + lower`: their upper and their lower bytes."""
    halves = (
        "shl.b32 f{0}, ${2}, 16; and.b32 f{1}, ${2}, 0xffff0000;" if wide
        else "mov.b32 {{low, high}}, ${2}; cvt.f32.f16 f{0}, low; cvt.f32.f16 f{1}, high;"
    )  # fmt: skip
    # 32640, the largest, has a lower byte of 128 above the upper one that remains: one less has not.
    rounded = (
        "mul.f32 f{0}, f{0}, $4; cvt.rni.s32.f32 x{0}, f{0}; min.s32 x{0}, x{0}, 32639; add.s32 y{0}, x{0}, 128;"
        " shr.s32 y{0}, y{0}, 8;"
    )
    packed = "prmt.b32 {0}0, {0}0, {0}1, 0x0040; prmt.b32 {0}2, {0}2, {0}3, 0x0040; prmt.b32 ${1}, {0}0, {0}2, 0x5410;"
    steps = [halves.format(2 * i, 2 * i + 1, 2 + i) for i in range(2)] + [rounded.format(i) for i in range(4)]
    steps += [packed.format(name, i) for i, name in enumerate("yx")]
    return utils.inline_ptx(
        f"{{ .reg .b32 f<4>, x<4>, y<4>; .reg .b16 low, high; {' '.join(steps)} }}",
        first, second, times, result_types=[th.i32()] * 2,
    )  # fmt: skip


def _scaled(word, times):
    """Two bfloat16 times a power of two, as float16."""
    return utils.inline_ptx(
        "{ .reg .b32 low, high; shl.b32 low, $1, 16; and.b32 high, $1, 0xffff0000; mul.f32 low, low, $2;"
        " mul.f32 high, high, $2; cvt.rn.f16x2.f32 $0, high, low; }",
        word, times, result_types=th.i32(),
    )  # fmt: skip
