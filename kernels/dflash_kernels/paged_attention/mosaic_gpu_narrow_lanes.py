"""The kernel for one-byte pages below Pallas: bytes loaded as matrix fragments, widened in registers, multiplied, and stored.

Every function stands for code that all 128 threads of a warpgroup run together.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from dflash_kernels.paged_attention import mosaic_gpu_threads as th


def load_queries(source, target, factors, first_row, rows) -> None:
    """Query rows from `source [T, G, H]` to shared memory in the keys' order, zeros from row `rows` on; then all may read them.

    Each is multiplied by the power of two that brings its largest number to between 2^14 and 2^15; `factors` gets the inverse.
    """
    i32, f32 = th.i32(), ir.F32Type.get()
    (_, group, head_dim), (token_stride, group_stride, _) = th.shape_and_strides(source)
    width, (count, columns) = th.swizzle(target), th.rows_and_columns(target)
    # Lanes that share a row, 16 columns each: a power of two, the last of which may have none.
    sharing = 1 << (head_dim // 16 - 1).bit_length()
    lane, warp = th.lane_and_warp()
    base, place, first = th.address(source), th.address(target, space=3), first_row.registers.item()
    for start in range(0, count * sharing, 128):
        unit = th.add(th.add(th.mul(warp, 32), lane), start)
        row, column = th.div(unit, sharing), th.mul(th.rem(unit, sharing), 2 * th.CHUNK)
        inside = arith.andi(th.below(row, count), th.below(column, 2 * head_dim))
        exists = arith.cmpi(arith.CmpIPredicate.slt, th.add(first, row), rows.registers.item())
        exists = arith.andi(inside, exists)
        token = th.div(th.add(first, row), group)
        offset = th.mul(token, token_stride)
        offset = th.add(offset, th.mul(th.sub(th.add(first, row), th.mul(token, group)), group_stride))
        address = th.add(base, th.add(th.mul(th.widen_index(offset), 2), th.widen_index(column)))
        words = [word for i in range(2) for word in th.load_if(exists, th.add(address, i * th.CHUNK))]
        exponent = _exponent_of_row(words, sharing)
        times = utils.bitcast(th.shift_left(arith.subi(utils.c(268, i32), exponent), 23), f32)
        words = [_scaled(word, times) for word in (*words[::2], *words[1::2])]
        for i in range(2):
            inner = th.within(row, th.add(column, i * th.CHUNK), columns, width)
            th.when(inside, "st.shared.v4.b32 [$0], {$1, $2, $3, $4};", th.add(place, inner), *words[4 * i : 4 * i + 4])
        leads = arith.andi(inside, th.below(column, 1))
        inverse = th.shift_left(th.sub(exponent, 14), 23)
        th.when(leads, "st.shared.b32 [$0], $1;", th.add(th.address(factors, space=3), th.mul(row, 4)), inverse)
    mgpu.commit_shared()


def _exponent_of_row(words, sharing: int):
    """Biased exponent of the largest bfloat16 of the row that `sharing` lanes hold, kept where powers of two have inverses."""
    i32 = th.i32()
    tops = [arith.andi(word, utils.c(0x7FFF7FFF, i32)) for word in words]
    halves = [th.div(top, 1 << 16) for top in tops] + [arith.andi(top, utils.c(0xFFFF, i32)) for top in tops]
    top = functools.reduce(arith.maxui, halves)
    for distance in range(sharing.bit_length() - 1):
        top = arith.maxui(top, utils.shfl_bfly(top, 1 << distance))
    exponent = th.div(top, 1 << 7)
    return arith.maxui(arith.minui(exponent, utils.c(254, i32)), utils.c(20, i32))


def _scaled(word, times):
    """Two bfloat16 times a power of two, as float16."""
    return utils.inline_ptx(
        "{ .reg .b32 low, high; shl.b32 low, $1, 16; and.b32 high, $1, 0xffff0000; mul.f32 low, low, $2;"
        " mul.f32 high, high, $2; cvt.rn.f16x2.f32 $0, high, low; }",
        word, times, result_types=th.i32(),
    )  # fmt: skip


def publish(weights: Any, target: Any, limit: int) -> Any:
    """Weights to shared memory in float16, for the product; whether any thread's add up to more than `limit`, or to NaN."""
    i32, f32 = th.i32(), ir.F32Type.get()
    weights.astype(ir.F16Type.get()).store_tiled(target, swizzle=th.swizzle(target))
    sums = _pair_sums(weights)
    while len(sums) > 1:
        left = sums[len(sums) // 2 * 2 :]
        sums = [arith.addf(a, b) for a, b in zip(sums[::2], sums[1::2], strict=False)] + left
    voted = utils.inline_ptx(
        "{ .reg .pred mine, anyones; fence.proxy.async.shared::cta; setp.gtu.f32 mine, $1, $2;"
        " bar.red.or.pred anyones, $3, 128, mine; selp.b32 $0, 1, 0, anyones; }",
        sums[0], utils.c(float(limit), f32), utils.warpgroup_barrier_idx(sync=False), result_types=i32,
        has_side_effects=True, convergent=True,
    )  # fmt: skip
    return mgpu.FragmentedArray.splat(voted, (), is_signed=True)


def publish_and_widen(weights: Any, target: Any, limit: int, values: Any, finite: bool) -> tuple[Any, Any]:
    """`publish`, and a tile of values, read before the vote and widened once the product before it is done."""
    loaded = _loaded(values, across=True)
    over = publish(weights, target, limit)
    # Its operands' registers are free then.
    nvvm.wgmma_wait_group_sync_aligned(0)
    return over, _widened(loaded, values, across=True, finite=finite)


def _pair_sums(weights) -> list[Any]:
    """Of a thread's two rows."""
    first = [place for place in np.ndindex(weights.registers.shape) if place[4] == 0]
    pairs = [(weights.registers[place], weights.registers[*place[:4], 1, *place[5:]]) for place in first]
    return [
        arith.addf(vector.extract(one, [], [i]), vector.extract(other, [], [i]))
        for one, other in pairs
        for i in range(2)
    ]


def add_weights(total, weights):
    """Adds up a thread's two rows in the first and leaves a constant 0 in the second, which then needs no register."""
    registers, f32 = np.empty_like(total.registers), ir.F32Type.get()
    zeros = vector.from_elements(ir.VectorType.get((2,), f32), [utils.c(0.0, f32)] * 2)
    sums = iter(_pair_sums(weights))
    for place in np.ndindex(registers.shape):
        if place[4] == 1:
            registers[place] = zeros
            continue
        both = vector.from_elements(zeros.type, [next(sums), next(sums)])
        registers[place] = arith.addf(total.registers[place], both)
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)


def store(out, target, first_row, rows: int, factors) -> None:
    """Columns of `out [H, N]`, rows in the product's order, to rows `first_row` and on of `target [T, G, H]`, if there are any."""
    i32, f32 = th.i32(), ir.F32Type.get()
    dtype = ir.MemRefType(target.type).element_type
    (_, group, head_dim), (token_stride, group_stride, _) = th.shape_and_strides(target)
    size, pair = utils.bytewidth(dtype), ir.VectorType.get((2,), f32)
    lane, warp = th.lane_and_warp()
    row_in_matrix, first_column = th.div(lane, 4), th.mul(th.rem(lane, 4), 2)
    channel = th.add(th.mul(warp, 16), th.mul(row_in_matrix, 2))
    base, first = th.address(target), first_row.registers.item()
    scales = []
    for tile in range(head_dim // 64):
        if factors is not None:
            at = th.add(th.address(factors), th.widen_index(th.mul(th.add(channel, 64 * tile), 4)))
            scales.append(llvm.load(pair, llvm.inttoptr(llvm.PointerType.get(), at)))
    for columns in range(out.shape[1] // 8):
        for of_pair in range(2):
            row = th.add(first, th.add(first_column, 8 * columns + of_pair))
            exists = th.below(row, rows)
            token = th.div(row, group)
            place = th.add(th.mul(token, token_stride), th.mul(th.sub(row, th.mul(token, group)), group_stride))
            place = th.add(base, th.mul(th.widen_index(th.add(place, channel)), size))
            for tile in range(head_dim // 64):
                both = [out.registers[tile, columns, 0, 0, half, 0, 0, 0, 0] for half in range(2)]
                value = vector.from_elements(pair, [vector.extract(one, [], [of_pair]) for one in both])
                if scales:
                    value = arith.mulf(value, scales[tile])
                address = th.add(place, 64 * tile * size)
                if size == 4:
                    low, high = (vector.extract(value, [], [i]) for i in range(2))
                    th.when(exists, "st.global.v2.f32 [$0], {$1, $2};", address, low, high)
                else:
                    rounded = arith.truncf(ir.VectorType.get((2,), dtype), value)
                    th.when(exists, "st.global.b32 [$0], $1;", address, utils.bitcast(rounded, i32))


def widened_keys(tile) -> Any:
    return _widened(_loaded(tile, across=False), tile, across=False, finite=False)


def _loads(tile, across: bool) -> tuple[Any, str, Any]:
    _, columns, _, width = ir.MemRefType(tile.type).shape
    return (_value_loads if across else _key_loads)(columns * width, width)


def _loaded(tile, across: bool) -> list[Any]:
    """Words of a `[64, H]` tile of the ring: keys as they are, values `across`, which is transposed."""
    base, (_, opcode, steps) = th.address(tile, space=3), _loads(tile, across)
    return [
        utils.inline_ptx(
            f"ldmatrix.sync.aligned.m8n8.x4{opcode}.shared.b16 {{$0, $1, $2, $3}}, [$4];", th.add(base, offset),
            result_types=[th.i32()] * 4, has_side_effects=True, convergent=True,
        )
        for offset, _ in steps
    ]  # fmt: skip


def _widened(loaded: list[Any], tile, across: bool, finite: bool) -> Any:
    """The tile's words as float16 in the matrix layout."""
    narrow = ir.MemRefType(tile.type).element_type
    return _assembled(loaded, tile, across, lambda word: _pairs(word, narrow, across, finite), ir.F16Type.get())


def widened_rows(_ctx, tile) -> Any:
    """A `[64, H]` tile as bfloat16, float8 times 2^-120, its columns in parity order."""
    narrow = ir.MemRefType(tile.type).element_type
    loaded = _loaded(tile, across=False)
    wide = _assembled(loaded, tile, False, lambda word: _bfloat16_pairs(word, narrow), ir.BF16Type.get())
    return mgpu.optimization_barrier(wide)


def _assembled(loaded: list[Any], tile, across: bool, pairs: Callable[[Any], tuple[Any, ...]], dtype) -> Any:
    pair, (shape, _, steps) = ir.VectorType.get((2,), dtype), _loads(tile, across)
    registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(shape), dtype=object)
    for words, (_, places) in zip(loaded, steps, strict=True):
        for word, of_word in zip(words, places, strict=True):
            for (row, column, half), value in zip(of_word, pairs(word), strict=True):
                registers[row, column, 0, 0, half, 0, 0, 0, 0] = utils.bitcast(value, pair)
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)


def _key_loads(head_dim: int, width: int):
    """Each load: rows 0 to 7 and 8 to 15 of the warp's, for two neighbouring chunks."""
    lane, warp = th.lane_and_warp()
    matrix, row = th.div(lane, 8), th.rem(lane, 8)
    group_of_8 = th.add(th.mul(warp, 2), th.rem(matrix, 2))
    start = th.add(th.mul(group_of_8, 8 * head_dim), th.mul(row, width))
    chunk = th.xor(th.mul(th.div(matrix, 2), th.CHUNK), th.swizzle_of(row, width))
    steps = []
    for first in range(0, head_dim // th.CHUNK, 2):
        across, inside = divmod(first * th.CHUNK, width)
        offset = th.add(th.add(start, across * 8 * width), th.xor(chunk, inside))
        places = [[(0, 2 * (first + i // 2) + pair, i % 2) for pair in range(2)] for i in range(4)]
        steps.append((offset, places))
    return (64, head_dim), "", steps


def _value_loads(head_dim: int, width: int):
    """Each load: 32 keys of the chunk of 16 channels that is the warp's in 64."""
    lane, warp = th.lane_and_warp()
    matrix, row = th.div(lane, 8), th.rem(lane, 8)
    start = th.add(th.mul(matrix, 8 * head_dim), th.mul(row, width))
    swizzle, own = th.swizzle_of(row, width), th.mul(warp, th.CHUNK)
    steps = []
    for tile in range(head_dim // 64):
        across, inside = divmod(tile * 64, width)
        chunk = th.xor(th.add(own, inside), swizzle)
        for keys in range(2):
            offset = th.add(th.add(start, keys * 32 * head_dim + across * 8 * width), chunk)
            steps.append((offset, [[(tile, 4 * keys + i, parity) for parity in range(2)] for i in range(4)]))
    return (head_dim, 64), ".trans", steps


def _paired(across: bool) -> tuple[tuple[int, int], ...]:
    """Which of a word's bytes become a pair, as a product takes it: neighbours, or where a word lies across two keys, theirs."""
    return ((0, 2), (1, 3)) if across else ((0, 1), (2, 3))


def _pairs(word, narrow, across: bool, finite: bool) -> tuple[Any, ...]:
    """The pairs of a word's bytes as float16, float8's NaN as 480 where they have to be `finite`."""
    i32 = th.i32()
    if isinstance(narrow, ir.Float8E4M3FNType) and not finite:
        if across:
            (a, b), (c, d) = _paired(across)
            word = utils.inline_ptx(f"prmt.b32 $0, $1, 0, {a | b << 4 | c << 8 | d << 12};", word, result_types=i32)
        return utils.inline_ptx(
            "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }",
            word, result_types=[i32] * 2,
        )  # type: ignore  # fmt: skip
    if isinstance(narrow, ir.Float8E4M3FNType):
        # Each byte below eight copies of its sign; at a float16's places they are the value times 2^-8, subnormals included.
        above, other = (8, 9, 10, 11), 0
        steps = (
            "shl.b32 wide, wide, 7; and.b32 wide, wide, 0xbf80bf80; mov.b32 by, 0x5c005c00; mul.rn.f16x2 $0, wide, by;"
        )
    else:
        # The byte, sign turned, as the last of a float16 between 1024 and 1280, less 1024 and 128.
        word, above, other = arith.xori(word, utils.c(0x80808080 - 2**32, i32)), (4, 4, 4, 4), 0x64646464
        steps = "mov.b32 by, 0x64806480; sub.rn.f16x2 $0, wide, by;"
    selectors = [a | above[a] << 4 | b << 8 | above[b] << 12 for a, b in _paired(across)]
    return tuple(
        utils.inline_ptx(
            f"{{ .reg .b32 wide, by; prmt.b32 wide, $1, {other}, {selector}; {steps} }}", word, result_types=i32
        )
        for selector in selectors
    )


def _bfloat16_pairs(word, narrow) -> tuple[Any, Any]:
    """Bytes 0 and 2 of four, and bytes 1 and 3, as pairs of bfloat16."""
    i32 = th.i32()
    if isinstance(narrow, ir.Float8E4M3FNType):
        sources = [(th.shift_left(word, 4), th.shift_left(word, 8)), (arith.shrui(word, utils.c(4, i32)), word)]
        return tuple(
            arith.ori(arith.andi(bits, utils.c(0x07F007F0, i32)), arith.andi(sign, utils.c(0x80008000 - 2**32, i32)))
            for bits, sign in sources
        )  # type: ignore
    # The byte as the fraction of a bfloat16 between 128 and 256, less 128 or, where its sign bit is in the exponent's place, 256.
    return tuple(
        utils.inline_ptx(
            f"{{ .reg .b32 both, low, high; prmt.b32 both, $1, 0x43, {selector}; and.b32 low, both, 0xff7fff7f;"
            " and.b32 high, both, 0xff80ff80; sub.bf16x2 $0, low, high; }",
            word, result_types=i32,
        )
        for selector in ("0x4240", "0x4341")
    )  # type: ignore  # fmt: skip
