"""Steps of the Hopper kernels below Pallas, in terms of single threads; written out while a kernel is lowered for a GPU.

Every function stands for code that all 128 threads of a warpgroup run together. A fragment of the matrix layout gives
the thread of warp w, row r of 8 and column pair c of 4 the elements at rows `16 w + r` and `+ 8`, columns `2 c` and `2 c + 1`.
"""

import functools
import math
from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

_CHUNK = 16  # bytes of a row that one 8 by 8 matrix of 16-bit elements spans
_STORE = "st.shared.v4.b32 [$0], {$1, $2, $3, $4};"


def scores_and_values(_ctx, keys, values, queries):
    (_, _, _, width), narrow = ir.MemRefType(keys.type).shape, ir.MemRefType(keys.type).element_type
    columns = ir.MemRefType(queries.type).shape[0] * 8
    scores = mgpu.WGMMAAccumulator.zero(64, columns)
    transposed = mgpu.memref_transpose(queries, (1, 0, 3, 2))
    scores = mgpu.wgmma(scores, _widened(keys, narrow, width, _key_loads), transposed, swizzle=_swizzle(queries))
    nvvm.wgmma_commit_group_sync_aligned()
    # The values widen while the product runs; without a barrier the compiler would put that off until they are multiplied.
    wide = mgpu.optimization_barrier(_widened(values, narrow, width, _value_loads))
    nvvm.wgmma_wait_group_sync_aligned(0)
    return mgpu.optimization_barrier(scores.value), wide


def any_above(values: Any, limit: int) -> Any:
    i32, f32 = _i32(), ir.F32Type.get()
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


def merge_cluster(part, lse, target, rows: int, parts: int) -> None:
    """Every CTA of the cluster merges `64 / parts` rows of all, four columns in each thread; none leaves before all are read."""
    i32, f32 = _i32(), ir.F32Type.get()
    (_, group, head_dim), (token_stride, group_stride, _) = _shape_and_strides(target)
    dtype = ir.MemRefType(target.type).element_type
    lane, warp = _lane_and_warp()
    thread, threads = _add(_mul(warp, 32), lane), head_dim // 4
    at_once, of_cta = 128 // threads, 64 // parts
    rank = utils.inline_ptx("mov.u32 $0, %cluster_ctarank;", result_types=i32)
    column, held, held_lse, base = _rem(thread, threads), _address(part, 3), _address(lse, 3), _address(target)
    _cluster_barrier()
    zero, one, lowest = (utils.c(value, f32) for value in (0.0, 1.0, -math.inf))
    for step in range(0, of_cta, at_once):
        row = _add(_add(_mul(rank, of_cta), _div(thread, threads)), step)
        logits = [_load_peer(_add(held_lse, _mul(row, 4)), other, 1)[0] for other in range(parts)]
        top = functools.reduce(arith.maximumf, logits)
        top = arith.select(arith.cmpf(arith.CmpFPredicate.OEQ, top, lowest), zero, top)
        place = _add(held, _add(_mul(row, 4 * head_dim), _mul(column, 16)))
        total, sums = zero, [zero] * 4
        for other, logit in enumerate(logits):
            weight = _exp2(arith.mulf(arith.subf(logit, top), utils.c(math.log2(math.e), f32)))
            some = arith.cmpf(arith.CmpFPredicate.OGT, weight, zero)
            # Empty parts were never written: what lies there is skipped, not weighted.
            values = [arith.select(some, value, zero) for value in _load_peer(place, other, 4)]
            sums = [arith.addf(one_sum, arith.mulf(weight, value)) for one_sum, value in zip(sums, values, strict=True)]
            total = arith.addf(total, weight)
        share = arith.divf(one, arith.select(arith.cmpf(arith.CmpFPredicate.OGT, total, zero), total, one))
        quad = vector.from_elements(ir.VectorType.get((4,), f32), [arith.mulf(value, share) for value in sums])
        rounded = utils.bitcast(arith.truncf(ir.VectorType.get((4,), dtype), quad), ir.VectorType.get((2,), i32))
        token = _div(row, group)
        offset = _add(_mul(token, token_stride), _mul(_sub(row, _mul(token, group)), group_stride))
        address = _add(base, _mul(_widen_index(_add(offset, _mul(column, 4))), 2))
        low, high = (vector.extract(rounded, [], [i]) for i in range(2))
        _when(_below(row, rows), "st.global.v2.b32 [$0], {$1, $2};", address, low, high)
    _cluster_barrier()


def _cluster_barrier() -> None:
    for ptx in ("barrier.cluster.arrive.release.aligned;", "barrier.cluster.wait.acquire.aligned;"):
        utils.inline_ptx(ptx, has_side_effects=True, convergent=True)


def _load_peer(address, rank: int, count: int):
    """Float32 from the shared memory of the cluster's CTA `rank`, at an address of the own."""
    f32, vectors = ir.F32Type.get(), "" if count == 1 else ".v4"
    names = ", ".join(f"${i}" for i in range(count))
    return utils.inline_ptx(
        f"{{ .reg .b32 there; mapa.shared::cluster.u32 there, ${count}, {rank};"
        f" ld.shared::cluster{vectors}.f32 {names if count == 1 else '{' + names + '}'}, [there]; }}",
        address, result_types=[f32] * count, has_side_effects=True,
    )  # fmt: skip


def _exp2(value):
    return utils.inline_ptx("ex2.approx.ftz.f32 $0, $1;", value, result_types=ir.F32Type.get())


def add_weights(total, weights):
    """Adds up a thread's two rows in the first and leaves a constant 0 in the second, which then needs no register."""
    registers = np.empty_like(total.registers)
    registers[:, :, :, :, 1] = utils.c(0.0, total.registers.flat[0].type)
    for place in np.ndindex(registers.shape):
        if place[4] == 0:
            both = arith.addf(weights.registers[place], weights.registers[*place[:4], 1, *place[5:]])
            registers[place] = arith.addf(total.registers[place], both)
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)


def load_queries(source, target, first_row, rows: int, interleaved: bool, exponent: int) -> None:
    """Query rows from `source [T, G, H]` to shared memory, zeros where `rows` are over; then all threads may read them.

    Where `interleaved`, every 16 columns are stored as the even ones and then the odd ones, times two to the `exponent`.
    """
    (_, group, head_dim), (token_stride, group_stride, _) = _shape_and_strides(source)
    width, (count, columns) = _swizzle(target), _rows_and_columns(target)
    at_once = 2 * _CHUNK if interleaved else _CHUNK  # bytes
    units = 2 * columns // at_once
    lane, warp = _lane_and_warp()
    base, place, first = _address(source), _address(target, space=3), first_row.registers.item()
    for start in range(0, count * units, 128):
        unit = _add(_add(_mul(warp, 32), lane), start)
        row, column = _div(unit, units), _mul(_rem(unit, units), at_once)
        inside = _below(row, count)
        exists = arith.andi(inside, _below(_add(first, row), rows))
        if columns > head_dim:
            exists = arith.andi(exists, _below(column, 2 * head_dim))
        token = _div(_add(first, row), group)
        offset = _mul(token, token_stride)
        offset = _add(offset, _mul(_sub(_add(first, row), _mul(token, group)), group_stride))
        address = _add(base, _add(_mul(_widen_index(offset), 2), _widen_index(column)))
        words = [word for i in range(at_once // _CHUNK) for word in _load_if(exists, _add(address, i * _CHUNK))]
        if interleaved:
            pairs = list(zip(words[::2], words[1::2], strict=True))
            words = [_scaled(_permuted(*pair, selector), exponent) for selector in (0x5410, 0x7632) for pair in pairs]
        for i in range(at_once // _CHUNK):
            inner = _within(row, _add(column, i * _CHUNK), columns, width)
            _when(inside, _STORE, _add(place, inner), *words[4 * i : 4 * i + 4])
    mgpu.commit_shared()


def pad_columns(source, target) -> None:
    """Rows of shared memory, packed, to a swizzled tile with more columns, zeros there; then all threads may read them."""
    i32 = _i32()
    (count, columns), packed, width = _rows_and_columns(target), 2 * _shape_and_strides(source)[0][1], _swizzle(target)
    units = 2 * columns // _CHUNK
    lane, warp = _lane_and_warp()
    base, place = _address(source, space=3), _address(target, space=3)
    for start in range(0, count * units, 128):
        unit = _add(_add(_mul(warp, 32), lane), start)
        row, column = _div(unit, units), _mul(_rem(unit, units), _CHUNK)
        inside = _below(row, count)
        words = utils.inline_ptx(
            "{ .reg .pred there; setp.ne.b32 there, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;"
            " @there ld.shared.v4.b32 {$0, $1, $2, $3}, [$4]; }",
            _add(base, _add(_mul(row, packed), column)),
            arith.extui(i32, arith.andi(inside, _below(column, packed))),
            result_types=[i32] * 4, has_side_effects=True,
        )  # fmt: skip
        _when(inside, _STORE, _add(place, _within(row, column, columns, width)), *words)
    mgpu.commit_shared()


def _within(row, column, columns: int, width: int):
    """Byte offset in a tile of two-byte elements, swizzled over `width` bytes; `column` in bytes."""
    of_8, in_8 = _mul(_div(row, 8), 16 * columns), _mul(_rem(row, 8), width)
    across = _mul(_div(column, width), 8 * width)
    return _add(_add(_add(of_8, in_8), across), _xor(_rem(column, width), _swizzle_of(_rem(row, 8), width)))


def _load_if(predicate, address) -> tuple[Any, ...]:
    """Sixteen bytes of global memory, zeros without the predicate."""
    i32 = _i32()
    return utils.inline_ptx(
        "{ .reg .pred there; setp.ne.b32 there, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;"
        " @there ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4]; }",
        address, arith.extui(i32, predicate), result_types=[i32] * 4,
    )  # type: ignore  # fmt: skip


def _permuted(low, high, selector: int):
    i32 = _i32()
    return utils.inline_ptx(f"prmt.b32 $0, $1, $2, {selector};", low, high, result_types=i32)


def _scaled(pair, exponent: int):
    """A pair of bfloat16 times a power of two."""
    if exponent == 0:
        return pair
    i32, bits = _i32(), (127 + exponent) << 7
    return utils.inline_ptx("mul.rn.bf16x2 $0, $1, $2;", pair, utils.c(bits << 16 | bits, i32), result_types=i32)


def store(out, target, first_row, rows: int, factors) -> None:
    """Columns of `out [H, N]`, rows in the product's order, to rows `first_row` and on of `target [T, G, H]`, if there are any."""
    i32, f32 = _i32(), ir.F32Type.get()
    dtype = ir.MemRefType(target.type).element_type
    (_, group, head_dim), (token_stride, group_stride, _) = _shape_and_strides(target)
    size, pair = utils.bytewidth(dtype), ir.VectorType.get((2,), f32)
    lane, warp = _lane_and_warp()
    row_in_matrix, first_column = _div(lane, 4), _mul(_rem(lane, 4), 2)
    channel = _add(_mul(warp, 16), _mul(row_in_matrix, 2))
    base, first = _address(target), first_row.registers.item()
    scales = []
    for tile in range(head_dim // 64):
        if factors is not None:
            at = _add(_address(factors), _widen_index(_mul(_add(channel, 64 * tile), 4)))
            scales.append(llvm.load(pair, llvm.inttoptr(llvm.PointerType.get(), at)))
    for columns in range(out.shape[1] // 8):
        for of_pair in range(2):
            row = _add(first, _add(first_column, 8 * columns + of_pair))
            exists = _below(row, rows)
            token = _div(row, group)
            place = _add(_mul(token, token_stride), _mul(_sub(row, _mul(token, group)), group_stride))
            place = _add(base, _mul(_widen_index(_add(place, channel)), size))
            for tile in range(head_dim // 64):
                both = [out.registers[tile, columns, 0, 0, half, 0, 0, 0, 0] for half in range(2)]
                value = vector.from_elements(pair, [vector.extract(one, [], [of_pair]) for one in both])
                if scales:
                    value = arith.mulf(value, scales[tile])
                address = _add(place, 64 * tile * size)
                if size == 4:
                    low, high = (vector.extract(value, [], [i]) for i in range(2))
                    _when(exists, "st.global.v2.f32 [$0], {$1, $2};", address, low, high)
                else:
                    rounded = arith.truncf(ir.VectorType.get((2,), dtype), value)
                    _when(exists, "st.global.b32 [$0], $1;", address, utils.bitcast(rounded, i32))


def _when(predicate, ptx: str, *operands) -> None:
    utils.inline_ptx(ptx, *operands, predicate=predicate, has_side_effects=True)


def _widened(tile, narrow, width: int, loads) -> Any:
    """A `[64, H]` tile of the ring as bfloat16 in the matrix layout, as it is or transposed; `loads` says where from and to."""
    bf16 = ir.VectorType.get((2,), ir.BF16Type.get())
    head_dim = ir.MemRefType(tile.type).shape[1] * width
    base, (shape, opcode, steps) = _address(tile, space=3), loads(head_dim, width)
    registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(shape), dtype=object)
    i32 = _i32()
    for offset, places in steps:
        words = utils.inline_ptx(
            f"ldmatrix.sync.aligned.m8n8.x4{opcode}.shared.b16 {{$0, $1, $2, $3}}, [$4];", _add(base, offset),
            result_types=[i32] * 4, has_side_effects=True, convergent=True,
        )  # fmt: skip
        for word, of_word in zip(words, places, strict=True):
            for (row, column, half), value in zip(of_word, _pairs(word, narrow), strict=True):
                registers[row, column, 0, 0, half, 0, 0, 0, 0] = utils.bitcast(value, bf16)
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)


def _key_loads(head_dim: int, width: int):
    """Each load: rows 0 to 7 and 8 to 15 of the warp's, for two neighbouring chunks."""
    lane, warp = _lane_and_warp()
    matrix, row = _div(lane, 8), _rem(lane, 8)
    group_of_8 = _add(_mul(warp, 2), _rem(matrix, 2))
    start = _add(_mul(group_of_8, 8 * head_dim), _mul(row, width))
    chunk = _xor(_mul(_div(matrix, 2), _CHUNK), _swizzle_of(row, width))
    steps = []
    for first in range(0, head_dim // _CHUNK, 2):
        across, inside = divmod(first * _CHUNK, width)
        offset = _add(_add(start, across * 8 * width), _xor(chunk, inside))
        places = [[(0, 2 * (first + i // 2) + parity, i % 2) for parity in range(2)] for i in range(4)]
        steps.append((offset, places))
    return (64, head_dim), "", steps


def _value_loads(head_dim: int, width: int):
    """Each load: 32 keys of the chunk of 16 channels that is the warp's in 64."""
    lane, warp = _lane_and_warp()
    matrix, row = _div(lane, 8), _rem(lane, 8)
    start = _add(_mul(matrix, 8 * head_dim), _mul(row, width))
    swizzle, own = _swizzle_of(row, width), _mul(warp, _CHUNK)
    steps = []
    for tile in range(head_dim // 64):
        across, inside = divmod(tile * 64, width)
        chunk = _xor(_add(own, inside), swizzle)
        for keys in range(2):
            offset = _add(_add(start, keys * 32 * head_dim + across * 8 * width), chunk)
            steps.append((offset, [[(tile, 4 * keys + i, parity) for parity in range(2)] for i in range(4)]))
    return (head_dim, 64), ".trans", steps


def _swizzle_of(row, width: int):
    """What is exclusively-ored to the byte offset within a row of `width` bytes, the swizzle's size."""
    return _mul(_rem(_div(row, 128 // width), width // _CHUNK), _CHUNK)


def _pairs(word, narrow) -> tuple[Any, Any]:
    """Bytes 0 and 2 of four, and bytes 1 and 3, as pairs of bfloat16."""
    i32 = _i32()
    if isinstance(narrow, ir.Float8E4M3FNType):
        sources = [(_shift_left(word, 4), _shift_left(word, 8)), (arith.shrui(word, utils.c(4, i32)), word)]
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


def _shape_and_strides(ref) -> tuple[list[int], list[int]]:
    ty = ir.MemRefType(ref.type)
    return ty.shape, ty.get_strides_and_offset()[0]


def _rows_and_columns(tile) -> tuple[int, int]:
    down, across, rows, columns = ir.MemRefType(tile.type).shape
    return down * rows, across * columns


def _swizzle(tile) -> int:
    ty = ir.MemRefType(tile.type)
    return ty.shape[-1] * utils.bytewidth(ty.element_type)


def _address(ref, space: int = 0):
    """Address of a memory's first element: 32 bits in shared memory, 64 in global memory."""
    return llvm.ptrtoint(ir.IntegerType.get_signless(32 if space == 3 else 64), utils.memref_ptr(ref))


def _lane_and_warp():
    thread = _rem(utils.thread_idx(), 128)
    return _rem(thread, 32), _div(thread, 32)


def _constant(value, like):
    return utils.c(value, like.type) if isinstance(value, int) else value


def _below(a, bound: int):
    return arith.cmpi(arith.CmpIPredicate.slt, a, utils.c(bound, _i32()))


def _add(a, b):
    return arith.addi(a, _constant(b, a))


def _sub(a, b):
    return arith.subi(a, _constant(b, a))


def _mul(a, b):
    return arith.muli(a, _constant(b, a))


def _xor(a, b):
    return arith.xori(a, _constant(b, a))


def _div(a, b: int):
    return arith.divui(a, _constant(b, a))


def _rem(a, b: int):
    return arith.remui(a, _constant(b, a))


def _shift_left(a, bits: int):
    return arith.shli(a, utils.c(bits, a.type))


def _widen_index(a):
    return arith.extui(ir.IntegerType.get_signless(64), a)


def _i32():
    return ir.IntegerType.get_signless(32)
