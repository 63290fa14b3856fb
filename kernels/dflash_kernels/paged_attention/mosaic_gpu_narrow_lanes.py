"""The kernel for one-byte pages below Pallas: bytes loaded as matrix fragments, widened in registers, multiplied, and stored.

Every function stands for code that all 128 threads of a warpgroup run together.
"""

from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from dflash_kernels.paged_attention import mosaic_gpu_threads as th


def scores_and_values(_ctx, keys, values, queries):
    (_, _, _, width), narrow = ir.MemRefType(keys.type).shape, ir.MemRefType(keys.type).element_type
    columns = ir.MemRefType(queries.type).shape[0] * 8
    scores = mgpu.WGMMAAccumulator.zero(64, columns)
    transposed = mgpu.memref_transpose(queries, (1, 0, 3, 2))
    scores = mgpu.wgmma(scores, _widened(keys, narrow, width, _key_loads), transposed, swizzle=th.swizzle(queries))
    nvvm.wgmma_commit_group_sync_aligned()
    # The values widen while the product runs; without a barrier the compiler would put that off until they are multiplied.
    wide = mgpu.optimization_barrier(_widened(values, narrow, width, _value_loads))
    nvvm.wgmma_wait_group_sync_aligned(0)
    return mgpu.optimization_barrier(scores.value), wide


def widened_keys(_ctx, keys):
    """A `[64, H]` tile of keys, or of any rows whose columns may be taken in the keys' order."""
    (_, _, _, width), narrow = ir.MemRefType(keys.type).shape, ir.MemRefType(keys.type).element_type
    return mgpu.optimization_barrier(_widened(keys, narrow, width, _key_loads))


def any_above(values: Any, limit: int) -> Any:
    i32, f32 = th.i32(), ir.F32Type.get()
    elements = [vector.extract(register, [], [i]) for register in values.registers.flat for i in range(2)]
    while len(elements) > 1:
        left = elements[len(elements) // 2 * 2 :]
        elements = [arith.maxnumf(a, b) for a, b in zip(elements[::2], elements[1::2], strict=False)] + left
    voted = utils.inline_ptx(
        "{ .reg .pred mine, anyones; setp.gt.f32 mine, $1, $2; bar.red.or.pred anyones, $3, 128, mine;"
        " selp.b32 $0, 1, 0, anyones; }",
        elements[0], utils.c(float(limit), f32), utils.warpgroup_barrier_idx(sync=False), result_types=i32,
        has_side_effects=True, convergent=True,
    )  # fmt: skip
    return mgpu.FragmentedArray.splat(voted, (), is_signed=True)


def add_weights(total, weights):
    """Adds up a thread's two rows in the first and leaves a constant 0 in the second, which then needs no register."""
    registers = np.empty_like(total.registers)
    registers[:, :, :, :, 1] = utils.c(0.0, total.registers.flat[0].type)
    for place in np.ndindex(registers.shape):
        if place[4] == 0:
            both = arith.addf(weights.registers[place], weights.registers[*place[:4], 1, *place[5:]])
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


def _widened(tile, narrow, width: int, loads) -> Any:
    """A `[64, H]` tile of the ring as bfloat16 in the matrix layout, as it is or transposed; `loads` says where from and to."""
    bf16 = ir.VectorType.get((2,), ir.BF16Type.get())
    head_dim = ir.MemRefType(tile.type).shape[1] * width
    base, (shape, opcode, steps) = th.address(tile, space=3), loads(head_dim, width)
    registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(shape), dtype=object)
    i32 = th.i32()
    for offset, places in steps:
        words = utils.inline_ptx(
            f"ldmatrix.sync.aligned.m8n8.x4{opcode}.shared.b16 {{$0, $1, $2, $3}}, [$4];", th.add(base, offset),
            result_types=[i32] * 4, has_side_effects=True, convergent=True,
        )  # fmt: skip
        for word, of_word in zip(words, places, strict=True):
            for (row, column, half), value in zip(of_word, _pairs(word, narrow), strict=True):
                registers[row, column, 0, 0, half, 0, 0, 0, 0] = utils.bitcast(value, bf16)
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
        places = [[(0, 2 * (first + i // 2) + parity, i % 2) for parity in range(2)] for i in range(4)]
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


def _pairs(word, narrow) -> tuple[Any, Any]:
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
