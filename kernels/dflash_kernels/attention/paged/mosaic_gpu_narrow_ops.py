"""Steps of the kernel for one-byte pages that Pallas has no words for, each with what the interpreter runs in its place.

What has to widen goes from shared memory to registers as bytes, becomes float16 there, and is a matrix product's first operand:
nothing widened is ever stored. A thread gets four bytes at a time, of which two at a time become a pair. That fixes the order in
which a product sees them:

* along a float8 key's head dim, each 16 columns come as `[half, column // 4, column % 2]`, so must the queries' (`in_key_order`);
* loaded transposed, a value's columns become rows of the product, each 16 as `[parity, column // 2]` (`store` puts them back).

Both are exact. int8 keys multiply as they lie, with queries cut into two bytes a number; those products are exact, too. Where rows
may be unused, a float8 NaN, which has no infinity beside it, reads as 480 among the values: nothing in such rows can then do harm.
Among the keys it may stay, because scores of unused rows are replaced.
"""

# Pallas declares ACC less public than it documents it, and what it inlines as if it were called as written.
# pyright: reportPrivateImportUsage=false, reportCallIssue=false

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.mosaic_gpu.layouts import in_column_order, in_key_order, in_value_order, tile_of
from dflash_kernels.mosaic_gpu.thread_op import NUMBER, SCALAR

# What int8 values have more, and are multiplied with, as float16 without an exponent: whoever adds them up takes it off again.
LIFT, SHRUNK = 128.0, 2.0**-24
KEYS = 64  # of a tile: the M of the product that makes scores
_MATRIX = plgpu.Layout.WGMMA
_COLUMN = plgpu.Layout.WGMMA.reduce(0)


def _plain(stored: jax.Array) -> jax.Array:
    wide = stored.astype(jnp.float32)
    if stored.dtype == jnp.int8:
        return (wide + LIFT) * SHRUNK
    return jnp.where(jnp.isnan(wide), 480.0, wide)


def start_scores(tile, queries, interpret: Any):
    """Starts `keys @ queries.T` for a `[64, H]` tile of the ring, which must stay until `finish_scores` ends it.

    `queries` lie in shared memory as `put_queries` leaves them: `[64, N]` float32, or `[64, 2 N]` int32 of int8.
    """
    whole = queries.dtype == jnp.int8
    if interpret is not None:
        keys = tile[...].astype(jnp.float32)
        product = jnp.dot(
            keys if whole else in_key_order(keys), queries[...].astype(jnp.float32).T, precision=lax.Precision.HIGHEST
        )
        return product.astype(jnp.int32) if whole else product

    from dflash_kernels.attention.paged import mosaic_gpu_narrow_lanes as lanes

    @plgpu.inline_mgpu(
        arg_types=(tile_of(tile), tile_of(queries)),
        return_type=_matrix((KEYS, queries.shape[0]), jnp.int32 if whole else jnp.float32),
    )
    def start(_ctx, tile, queries):
        return lanes.start_scores(tile, queries)

    return start(tile, queries)


def finish_scores(scores, interpret: Any, *, later: int = 0):
    """Scores when they are there, `[64, N]` float32; so many products that were started `later` may still run."""
    whole = scores.dtype == jnp.int32
    count = scores.shape[1] // 2 if whole else scores.shape[1]
    if interpret is not None:
        return (scores[:, :count] * 256 + scores[:, count:]).astype(jnp.float32) if whole else scores

    from dflash_kernels.attention.paged import mosaic_gpu_narrow_lanes as lanes

    @plgpu.inline_mgpu(arg_types=(_MATRIX,), return_type=_matrix((KEYS, count), jnp.float32))
    def end(_ctx, scores):
        return lanes.finish_scores(scores, later)

    return end(scores)


def values(tile, interpret: Any, *, finite: bool):
    """A `[64, H]` tile of values in registers: transposed, in the product's order of rows; int8 as `(value + LIFT) * SHRUNK`.

    With `finite`, values may be NaN and do not become so.
    """
    if interpret is not None:
        return in_value_order(_plain(tile[...]).T)

    from dflash_kernels.mosaic_gpu import convert as words

    @plgpu.inline_mgpu(arg_types=(tile_of(tile),), return_type=_matrix(tile.shape[::-1], jnp.float16))
    def widen(_ctx, tile):
        return words.values(tile, finite)

    return widen(tile)


def start_values(acc, values, weights, interpret: Any):
    """Starts `acc + values @ weights`: `[H, N]`, the weights `[64, N]` in shared memory, which `finish` is to end."""
    if interpret is not None:
        return acc + jnp.dot(values, weights[...].astype(jnp.float32), precision=lax.Precision.HIGHEST)

    from dflash_kernels.attention.paged import mosaic_gpu_narrow_lanes as lanes

    @plgpu.inline_mgpu(arg_types=(_MATRIX, _MATRIX, tile_of(weights)), return_type=_matrix(acc.shape, jnp.float32))
    def start(_ctx, acc, values, weights):
        return lanes.start_values(acc, values, weights)

    return start(acc, values, weights)


def by_one_warp(condition, task: Callable[[], None], interpret: Any):
    """Runs copies, if the condition holds: a warpgroup would arrive at each barrier thread by thread, and wait for all."""
    if interpret is not None:
        pl.when(condition)(task)
        return

    plgpu.warp_map(lambda warp: pl.when((warp == 0) & condition)(task))


def finish(product, interpret: Any):
    """A product when it is there."""
    if interpret is not None:
        return product

    from dflash_kernels.attention.paged import mosaic_gpu_narrow_lanes as lanes

    @plgpu.inline_mgpu(arg_types=(_MATRIX,), return_type=_matrix(product.shape, jnp.float32))
    def end(_ctx, product):
        return lanes.finish(product)

    return end(product)


def publish(weights, target, limit: int, interpret: Any):
    """Weights `[64, N]` to shared memory; whether any column may exceed `limit`. All threads wait for each other."""
    if interpret is not None:
        target[...] = weights.astype(target.dtype)
        plgpu.commit_smem()
        return jnp.max(jnp.where(jnp.isnan(weights), jnp.inf, weights)) > limit

    from dflash_kernels.attention.paged import mosaic_gpu_narrow_lanes as lanes

    @plgpu.inline_mgpu(arg_types=(_MATRIX, tile_of(target)), return_type=NUMBER)
    def store_and_vote(_ctx, weights, target):
        return lanes.publish(weights, target, limit)

    return store_and_vote(weights, target) != 0


def _matrix(shape, dtype):
    return plgpu.ShapeDtypeStruct(shape, jnp.dtype(dtype), layout=_MATRIX)


def sum_weights(weights, interpret: Any):
    """Weights `[64, N]` as far as sums along the keys go; which key a thread's share stands at is left open."""
    if interpret is not None:
        return weights

    from dflash_kernels.attention.paged import mosaic_gpu_narrow_lanes as lanes

    @plgpu.inline_mgpu(arg_types=(_MATRIX,), return_type=_matrix(weights.shape, jnp.float32))
    def sum_up(_ctx, weights):
        return lanes.sum_weights(weights)

    return sum_up(weights)


def add_sums(total, sums, interpret: Any):
    """`total + sums`, both of `sum_weights`."""
    if interpret is not None:
        return total + sums

    from dflash_kernels.attention.paged import mosaic_gpu_narrow_lanes as lanes

    @plgpu.inline_mgpu(arg_types=(_MATRIX, _MATRIX), return_type=_matrix(total.shape, jnp.float32))
    def add(_ctx, total, sums):
        return lanes.add_sums(total, sums)

    return add(total, sums)


def over_keys(array, like, memory, interpret: Any, *, highest: bool):
    """Sums, or maxima, of the columns of `array [64, N]` as `like [N]` lies. All threads wait for each other.

    `memory`: `[4, N]` float32 in shared memory, which no thread may read later than the barrier before this one's.
    """
    if interpret is not None:
        return array.max(axis=0) if highest else array.sum(axis=0)

    from dflash_kernels.attention.paged import mosaic_gpu_narrow_lanes as lanes

    @plgpu.inline_mgpu(
        arg_types=(_MATRIX, _COLUMN, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct(like.shape, jnp.dtype(jnp.float32), layout=_COLUMN),
    )
    def over(_ctx, array, like, memory):
        return lanes.over_keys(array, like, memory, highest)

    return over(array, like, memory)


def store(out, target, first_row, rows: int, factors, interpret: Any):
    """Writes `out [H, N]`, rows in the product's order, to `target`: column n is the query row `first_row + n`.

    Args:
      target: `[T, G, H]` in global memory, of whose rows `t * G + g` the first `rows` exist; out is rounded to its dtype.
      factors: `[H]` float32 in global memory to multiply the channels with, or None.
    """
    group = target.shape[1]
    if interpret is not None:
        plain = in_column_order(out).T
        if factors is not None:
            plain = plain * factors[...]

        @pl.loop(0, plain.shape[0])
        def _(column):
            row = first_row + column

            @pl.when(row < rows)
            def _():
                token = lax.div(row, jnp.int32(group))
                target[token, row - token * group] = plain[column].astype(target.dtype)

        return

    from dflash_kernels.attention.paged import mosaic_gpu_narrow_lanes as lanes

    given = () if factors is None else (factors,)

    @plgpu.inline_mgpu(arg_types=(_MATRIX, plgpu.RefType(), SCALAR, *(plgpu.RefType() for _ in given)))
    def write(_ctx, out, target, first_row, *given):
        lanes.store(out, target, first_row, rows, given[0] if given else None)

    write(out, target, first_row, *given)
