"""The kernel for one-byte pages below Pallas: products begun and ended, weights shared.

Every function stands for code that all 128 threads of a warpgroup run together.
"""

import functools
from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from dflash_kernels.mosaic_gpu import convert as narrow_words
from dflash_kernels.mosaic_gpu import ptx as th


def entry(row, index) -> Any:
    """An entry of a row of int32 in global memory."""
    address = th.add(th.address(row), th.mul(th.widen_index(index.registers.item()), 4))
    value = utils.inline_ptx("ld.volatile.global.b32 $0, [$1];", address, result_types=th.i32(), has_side_effects=True)
    return mgpu.FragmentedArray.splat(value, (), is_signed=True)


def publish(weights: Any, target: Any, limit: int) -> Any:
    """Weights to shared memory in float16, for the product; whether two of any thread's add up to more than `limit`, or to NaN."""
    i32 = th.i32()
    weights.astype(ir.F16Type.get()).store_tiled(target, swizzle=th.swizzle(target))
    # Floats without a sign are in order as integers, NaN above all, and of those Hopper compares three at once.
    highest = functools.reduce(_highest, [arith.bitcast(i32, one) for one in _pair_sums(weights)])
    # Voted on again in each warp: the compiler does not know that threads agree on a barrier's result, and what follows a branch
    # on it, the next step included, would be compiled for threads that do not.
    voted = utils.inline_ptx(
        "{ .reg .pred mine, anyones; fence.proxy.async.shared::cta; setp.gt.s32 mine, $1, $2;"
        " bar.red.or.pred anyones, $3, 128, mine; vote.sync.any.pred anyones, anyones, 0xffffffff; selp.b32 $0, 1, 0, anyones; }",
        highest, utils.c(int(np.float32(limit).view(np.int32)), i32), utils.warpgroup_barrier_idx(sync=False), result_types=i32,
        has_side_effects=True, convergent=True,
    )  # fmt: skip
    return mgpu.FragmentedArray.splat(voted, (), is_signed=True)


def _highest(a: Any, b: Any) -> Any:
    return utils.inline_ptx("max.s32 $0, $1, $2;", a, b, result_types=th.i32())


def start_scores(tile, queries) -> Any:
    """The product of keys and queries, under way: `[64, N]`; int8 keys as they lie, others widened in registers."""
    (count, head_dim), width = th.rows_and_columns(queries), th.swizzle(queries)
    transposed = utils.memref_transpose(queries, (1, 0, 3, 2))
    if isinstance(ir.MemRefType(queries.type).element_type, ir.IntegerType):
        scores = mgpu.WGMMAAccumulator.zero(64, count, th.i32(), is_signed=True)
        scores = mgpu.wgmma(scores, tile, transposed, swizzle=width)
    else:
        scores = mgpu.WGMMAAccumulator.zero(64, count)
        # By halves, the second of which widens while the first multiplies.
        step = -(-head_dim // 128) * 64
        for start in range(0, head_dim, step):
            stop = min(start + step, head_dim)
            columns = utils.memref_slice(transposed, slice(start * 2 // width, stop * 2 // width))
            scores = mgpu.wgmma(scores, narrow_words.keys(tile, start, stop), columns, swizzle=width)
    nvvm.wgmma_commit_group_sync_aligned()
    return scores.value


def finish_scores(scores, later: int) -> Any:
    """The product done, where only the `later` groups that were started last may still run; in float32."""
    scores = finish(scores, later)
    return _joined(scores) if isinstance(scores.mlir_dtype, ir.IntegerType) else scores


def _joined(halves) -> Any:
    """`256 * upper + lower` of `[64, 2 N]` int32, as float32."""
    shape, pair = (64, halves.shape[1] // 2), ir.VectorType.get((2,), ir.F32Type.get())
    registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(shape), dtype=object)
    for place in np.ndindex(registers.shape):
        upper, lower = halves.registers[place], halves.registers[place[0], place[1] + shape[1] // 8, *place[2:]]
        bits = vector.broadcast(upper.type, utils.c(8, th.i32()))
        registers[place] = arith.sitofp(pair, arith.addi(arith.shli(upper, bits), lower))
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)


def start_values(acc, values, weights) -> Any:
    """`acc + values @ weights`, under way."""
    total = mgpu.wgmma(mgpu.WGMMAAccumulator.from_registers(acc), values, weights, swizzle=th.swizzle(weights))
    nvvm.wgmma_commit_group_sync_aligned()
    return total.value


def finish(product, later: int = 0) -> Any:
    nvvm.wgmma_wait_group_sync_aligned(later)
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


def sum_weights(weights):
    """Adds up a thread's two rows in the first and leaves a constant 0 in the second, which then needs no register."""
    pair, sums = ir.VectorType.get((2,), ir.F32Type.get()), iter(_pair_sums(weights))
    # Here, while exponentials are made, and not behind the barrier where they are needed.
    added = _in_first_rows(weights, lambda _: vector.from_elements(pair, [next(sums), next(sums)]))
    return mgpu.optimization_barrier(added)


def add_sums(total, sums):
    """The sum of two such."""
    return _in_first_rows(total, lambda place: arith.addf(total.registers[place], sums.registers[place]))


def _in_first_rows(like, value):
    registers, f32 = np.empty_like(like.registers), ir.F32Type.get()
    zeros = vector.from_elements(ir.VectorType.get((2,), f32), [utils.c(0.0, f32)] * 2)
    for place in np.ndindex(registers.shape):
        registers[place] = zeros if place[4] == 1 else value(place)
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)


def over_keys(array, like, memory, highest: bool) -> Any:
    """Sums, or maxima, of the columns of `array [64, N]` as `like [N]` lies, by way of `memory [4, N]`, which must be unread since
    the last barrier."""
    combine, f32 = (arith.maximumf if highest else arith.addf), ir.F32Type.get()
    lane, warp = th.lane_and_warp()
    of_four, first = th.rem(lane, 4), th.below(lane, 4)
    place, count = th.add(th.address(memory, space=3), th.mul(of_four, 8)), array.shape[1]
    own = th.add(place, th.mul(warp, 4 * count))
    for group in range(count // 8):
        pair = combine(array.registers[0, group, 0, 0, 0, 0, 0, 0, 0], array.registers[0, group, 0, 0, 1, 0, 0, 0, 0])
        found = []
        for i in range(2):
            value = vector.extract(pair, [], [i])
            for distance in (4, 8, 16):
                value = combine(value, utils.shfl_bfly(value, distance))
            found.append(value)
        th.when(first, "st.shared.v2.f32 [$0], {$1, $2};", th.add(own, 32 * group), *found)
    utils.warpgroup_barrier()
    registers = np.empty_like(like.registers)
    for group, at in enumerate(np.ndindex(registers.shape)):
        loaded = [
            utils.inline_ptx(
                "ld.shared.v2.f32 {$0, $1}, [$2];", th.add(place, 4 * count * other + 32 * group), result_types=[f32] * 2,
                has_side_effects=True,
            )
            for other in range(4)
        ]  # fmt: skip
        both = [functools.reduce(combine, [some[i] for some in loaded]) for i in range(2)]
        registers[at] = vector.from_elements(ir.VectorType.get((2,), f32), both)
    return mgpu.FragmentedArray(_registers=registers, _layout=like.layout, _is_signed=None)


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
