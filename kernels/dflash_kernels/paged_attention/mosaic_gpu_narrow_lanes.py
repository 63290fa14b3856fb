"""The kernel for one-byte pages below Pallas: queries scaled, products begun and ended, weights shared.

Every function stands for code that all 128 threads of a warpgroup run together.
"""

import functools
from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from dflash_kernels.paged_attention import mosaic_gpu_narrow_words as narrow_words
from dflash_kernels.paged_attention import mosaic_gpu_threads as th


def load_queries(source, target, factors, first_row, rows) -> None:
    """Query rows from `source [T, G, H]` to shared memory in the keys' order, zeros from row `rows` on; then all may read them.

    Each bfloat16 row is multiplied by the power of two that brings its largest number to between 2^14 and 2^15; `factors` gets the
    inverse. Rows of float16 stay as they are.
    """
    i32, f32 = th.i32(), ir.F32Type.get()
    wide = isinstance(ir.MemRefType(source.type).element_type, ir.BF16Type)
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
        exponent = _exponent_of_row(words, sharing) if wide else utils.c(127 + 14, i32)
        times = utils.bitcast(th.shift_left(arith.subi(utils.c(268, i32), exponent), 23), f32)
        words = [_scaled(word, times) if wide else word for word in (*words[::2], *words[1::2])]
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


def start_scores(first, tile, queries) -> Any:
    """Product with the columns that are widened already, and with the others, widened meanwhile: `[64, N]`, under way."""
    (_, head_dim), (_, done) = th.rows_and_columns(queries), first.shape
    count, width = th.rows_and_columns(queries)[0], th.swizzle(queries)
    transposed = utils.memref_transpose(queries, (1, 0, 3, 2))
    first_tiles = done * 2 // width
    scores = mgpu.WGMMAAccumulator.zero(64, count)
    scores = mgpu.wgmma(scores, first, utils.memref_slice(transposed, slice(0, first_tiles)), swizzle=width)
    nvvm.wgmma_commit_group_sync_aligned()
    if done < head_dim:
        others = utils.memref_slice(transposed, slice(first_tiles, head_dim * 2 // width))
        scores = mgpu.wgmma(scores, narrow_words.keys(tile, done, head_dim), others, swizzle=width)
        nvvm.wgmma_commit_group_sync_aligned()
    return scores.value


def finish_scores(scores, values, finite: bool) -> tuple[Any, Any]:
    """The product done; and values, which were loaded while it ran."""
    loaded = narrow_words.loaded_values(values)
    scores = finish(scores)
    return scores, narrow_words.widened_values(loaded, values, finite)


def start_values(acc, values, weights) -> Any:
    """`acc + values @ weights`, under way."""
    total = mgpu.wgmma(mgpu.WGMMAAccumulator.from_registers(acc), values, weights, swizzle=th.swizzle(weights))
    nvvm.wgmma_commit_group_sync_aligned()
    return total.value


def finish(product) -> Any:
    nvvm.wgmma_wait_group_sync_aligned(0)
    # What follows must not be moved before the wait.
    return mgpu.optimization_barrier(product)


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
