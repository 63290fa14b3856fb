"""Transposed attention products for 8-bit keys and values: `scores [keys, rows] = K Q^T` and `out [H, rows] += V^T P`.

The first operand of a matrix instruction may lie in registers, where what is stored in eight bits widens on its way; only the
second, small one must be in shared memory: queries and softmax weights. Nothing widened is ever stored. A thread gets four bytes
at a time, of which two at a time become a pair. That fixes the order in which a product sees them:

* along a float8 key's head dim, each 16 columns come as `[half, column // 4, column % 2]`, so must the queries' (`in_key_order`);
* loaded transposed, a value's columns become rows of the product, each 16 as `[parity, column // 2]` (`store` puts them back).

Both are exact. int8 keys multiply as they lie, with queries in two bytes a number, hi and lo; those products are exact, too.
Where rows may be unused, a float8 NaN, which has no infinity beside it, reads as 480 among the values: nothing in such rows can
then do harm. Among the keys it may stay, because scores of unused rows are replaced.
"""

# pyright: reportCallIssue=false

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, nvvm, vector

from dflash_kernels.core.device import MATRIX_ROWS as KEYS
from dflash_kernels.mosaic_gpu import convert
from dflash_kernels.mosaic_gpu import ptx as th
from dflash_kernels.mosaic_gpu.layouts import in_column_order, in_key_order, in_value_order, tile_of
from dflash_kernels.mosaic_gpu.thread_op import COLUMN, GLOBAL, MATRIX, NUMBER, SCALAR, matrix, thread_op

# What int8 values have more, and are multiplied with, as float16 without an exponent: whoever adds them up takes it off again.
LIFT, SHRUNK = 128.0, 2.0**-24


def _entry(row, index):
    return row[index]


@thread_op(args=(GLOBAL, SCALAR), returns=NUMBER, interpret=_entry)
def entry(row, index):
    """An entry of a row of int32 in global memory, asked for here and not where it is needed."""
    return th.load(th.add(th.address(row), th.mul(th.widen_index(index), 4)), op="ld.volatile.global")[0]


def _started_scores(tile, queries):
    whole = queries.dtype == jnp.int8
    keys = tile[...].astype(jnp.float32)
    product = jnp.dot(
        keys if whole else in_key_order(keys), queries[...].astype(jnp.float32).T, precision=lax.Precision.HIGHEST
    )
    return product.astype(jnp.int32) if whole else product


def _scores(tile, queries):
    return matrix((KEYS, queries.shape[0]), jnp.int32 if queries.dtype == jnp.int8 else jnp.float32)


@thread_op(args=lambda tile, queries: (tile_of(tile), tile_of(queries)), returns=_scores, interpret=_started_scores)
def start_scores(tile, queries):
    """Starts `keys @ queries.T` for a `[64, H]` tile of the ring, which must stay until `finish_scores` ends it.

    int8 keys multiply as they lie, others are widened in registers. `queries` lie in shared memory as `convert.put_queries` leaves
    them. Returns `[64, N]` float32, or `[64, 2 N]` int32 of int8.
    """
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
            scores = mgpu.wgmma(scores, convert.keys(tile, start, stop), columns, swizzle=width)
    nvvm.wgmma_commit_group_sync_aligned()
    return scores.value


def _finished_scores(scores, *, later: int = 0):
    del later
    count = _rows_of(scores)
    return (scores[:, :count] * 256 + scores[:, count:]).astype(jnp.float32) if scores.dtype == jnp.int32 else scores


def _rows_of(scores) -> int:
    return scores.shape[1] // 2 if scores.dtype == jnp.int32 else scores.shape[1]


@thread_op(args=(MATRIX,), returns=lambda scores, **_: matrix((KEYS, _rows_of(scores))), interpret=_finished_scores)
def finish_scores(scores, *, later: int = 0):
    """Scores when they are there, `[64, N]` float32; so many products that were started `later` may still run."""
    scores = _finish(scores, later)
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


@thread_op(
    args=(MATRIX, MATRIX, MATRIX), returns=lambda scores, *_: matrix(scores.shape),
    interpret=lambda scores, factors, offsets: scores * factors - offsets,
)  # fmt: skip
def exponents(scores, factors, offsets):
    """`scores * factors - offsets`, all `[64, N]`, rounded once wherever it stands: of a product and a difference a compiler makes
    one instruction in some places and two in others.
    """
    registers = np.empty_like(scores.registers)
    for place in np.ndindex(registers.shape):
        less = arith.negf(offsets.registers[place])
        registers[place] = math.fma(scores.registers[place], factors.registers[place], less)
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)


def _values(tile, *, finite: bool):
    del finite
    stored, wide = tile.dtype, tile[...].astype(jnp.float32)
    wide = (wide + LIFT) * SHRUNK if stored == jnp.int8 else jnp.where(jnp.isnan(wide), 480.0, wide)
    return in_value_order(wide.T)


@thread_op(
    args=lambda tile, **_: (tile_of(tile),), returns=lambda tile, **_: matrix(tile.shape[::-1], jnp.float16), interpret=_values
)  # fmt: skip
def values(tile, *, finite: bool):
    """A `[64, H]` tile of values in registers: transposed, in the product's order of rows; int8 as `(value + LIFT) * SHRUNK`.

    With `finite`, values may be NaN and do not become so.
    """
    return convert.values(tile, finite)


def _started_values(acc, values, weights):
    return acc + jnp.dot(values, weights[...].astype(jnp.float32), precision=lax.Precision.HIGHEST)


@thread_op(
    args=lambda acc, values, weights: (MATRIX, MATRIX, tile_of(weights)),
    returns=lambda acc, *_: matrix(acc.shape),
    interpret=_started_values,
)
def start_values(acc, values, weights):
    """Starts `acc + values @ weights`: `[H, N]`, the weights `[64, N]` in shared memory, which `finish` is to end."""
    total = mgpu.wgmma(mgpu.WGMMAAccumulator.from_registers(acc), values, weights, swizzle=th.swizzle(weights))
    nvvm.wgmma_commit_group_sync_aligned()
    return total.value


@thread_op(args=(MATRIX,), returns=lambda product: matrix(product.shape), interpret=lambda product: product)
def finish(product):
    """A product when it is there."""
    return _finish(product, 0)


def _finish(product, later: int):
    nvvm.wgmma_wait_group_sync_aligned(later)
    # What follows must not be moved before the wait.
    return mgpu.optimization_barrier(product)


def publish(weights, target, *, limit: int):
    """Weights `[64, N]` to shared memory in float16; whether any two of a thread's add up to more than `limit`, or to NaN.

    All threads wait for each other.
    """
    return _publish(weights, target, limit=limit) != 0


def _published(weights, target, *, limit: int):
    target[...] = weights.astype(target.dtype)
    plgpu.commit_smem()
    return (jnp.max(jnp.where(jnp.isnan(weights), jnp.inf, weights)) > limit).astype(jnp.int32)


@thread_op(args=lambda weights, target, **_: (MATRIX, tile_of(target)), returns=NUMBER, interpret=_published)
def _publish(weights, target, *, limit: int):
    i32 = th.i32()
    weights.astype(ir.F16Type.get()).store_tiled(target, swizzle=th.swizzle(target))
    # Floats without a sign are in order as integers, NaN above all, and of those Hopper compares three at once.
    highest = functools.reduce(_highest, [arith.bitcast(i32, one) for one in _pair_sums(weights)])
    # Voted on again in each warp: the compiler does not know that threads agree on a barrier's result, and what follows a branch
    # on it, the next step included, would be compiled for threads that do not.
    return utils.inline_ptx(
        "{ .reg .pred mine, anyones; fence.proxy.async.shared::cta; setp.gt.s32 mine, $1, $2;"
        " bar.red.or.pred anyones, $3, 128, mine; vote.sync.any.pred anyones, anyones, 0xffffffff; selp.b32 $0, 1, 0, anyones; }",
        highest, utils.c(int(np.float32(limit).view(np.int32)), i32), utils.warpgroup_barrier_idx(sync=False), result_types=i32,
        has_side_effects=True, convergent=True,
    )  # fmt: skip


def _highest(a: Any, b: Any) -> Any:
    return utils.inline_ptx("max.s32 $0, $1, $2;", a, b, result_types=th.i32())


def _pair_sums(weights) -> list[Any]:
    """Of a thread's two rows."""
    first = [place for place in np.ndindex(weights.registers.shape) if place[4] == 0]
    pairs = [(weights.registers[place], weights.registers[*place[:4], 1, *place[5:]]) for place in first]
    return [
        arith.addf(vector.extract(one, [], [i]), vector.extract(other, [], [i]))
        for one, other in pairs
        for i in range(2)
    ]


@thread_op(args=(MATRIX,), returns=lambda weights: matrix(weights.shape), interpret=lambda weights: weights)
def sum_weights(weights):
    """Weights `[64, N]` as far as sums along the keys go; which key a thread's share stands at is left open.

    Adds up a thread's two rows in the first and leaves a constant 0 in the second, which then needs no register.
    """
    pair, sums = ir.VectorType.get((2,), ir.F32Type.get()), iter(_pair_sums(weights))
    # Here, while exponentials are made, and not behind the barrier where they are needed.
    added = _in_first_rows(weights, lambda _: vector.from_elements(pair, [next(sums), next(sums)]))
    return mgpu.optimization_barrier(added)


@thread_op(
    args=(MATRIX, MATRIX), returns=lambda total, _: matrix(total.shape), interpret=lambda total, sums: total + sums
)
def add_sums(total, sums):
    """`total + sums`, both of `sum_weights`."""
    return _in_first_rows(total, lambda place: arith.addf(total.registers[place], sums.registers[place]))


def _in_first_rows(like, value):
    registers, f32 = np.empty_like(like.registers), ir.F32Type.get()
    zeros = vector.from_elements(ir.VectorType.get((2,), f32), [utils.c(0.0, f32)] * 2)
    for place in np.ndindex(registers.shape):
        registers[place] = zeros if place[4] == 1 else value(place)
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)


def _reduced(array, like, memory, *, highest: bool):
    del like, memory
    return array.max(axis=0) if highest else array.sum(axis=0)


def _like(array, like, memory, *, highest: bool):
    del array, memory, highest
    return plgpu.ShapeDtypeStruct(like.shape, jnp.dtype(jnp.float32), layout=COLUMN)


@thread_op(args=(MATRIX, COLUMN, GLOBAL), returns=_like, interpret=_reduced)
def over_keys(array, like, memory, *, highest: bool):
    """Sums, or maxima, of the columns of `array [64, N]` as `like [N]` lies. All threads wait for each other.

    `memory`: `[4, N]` float32 in shared memory, which no thread may read later than the barrier before this one's.
    """
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
            th.load(th.add(place, 4 * count * other + 32 * group), 2, op="ld.shared", kind="f32") for other in range(4)
        ]
        both = [functools.reduce(combine, [some[i] for some in loaded]) for i in range(2)]
        registers[at] = vector.from_elements(ir.VectorType.get((2,), f32), both)
    return mgpu.FragmentedArray(_registers=registers, _layout=like.layout, _is_signed=None)


def _stored(out, target, first_row, factors, *, rows: int) -> None:
    plain, group = in_column_order(out).T, target.shape[1]
    if factors is not None:
        plain = plain * factors[...]

    @pl.loop(0, plain.shape[0])
    def _(column):
        row = first_row + column

        @pl.when(row < rows)
        def _():
            token = lax.div(row, jnp.int32(group))
            target[token, row - token * group] = plain[column].astype(target.dtype)


@thread_op(args=(MATRIX, GLOBAL, SCALAR, GLOBAL), interpret=_stored)
def store(out, target, first_row, factors, *, rows: int) -> None:
    """Writes `out [H, N]`, rows in the product's order, to `target`: column n is the query row `first_row + n`.

    Args:
      target: `[T, G, H]` in global memory, of whose rows `t * G + g` the first `rows` exist; out is rounded to its dtype.
      factors: `[H]` float32 in global memory to multiply the channels with, or None.
    """
    i32, f32 = th.i32(), ir.F32Type.get()
    dtype = ir.MemRefType(target.type).element_type
    (_, group, head_dim), (token_stride, group_stride, _) = th.shape_and_strides(target)
    size, pair = utils.bytewidth(dtype), ir.VectorType.get((2,), f32)
    lane, warp = th.lane_and_warp()
    row_in_matrix, first_column = th.div(lane, 4), th.mul(th.rem(lane, 4), 2)
    channel = th.add(th.mul(warp, 16), th.mul(row_in_matrix, 2))
    base, first = th.address(target), first_row
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
