"""Steps of the kernel for one-byte pages that Pallas has no words for, each with what the interpreter runs in its place.

Keys and values go from shared memory to registers as bytes, widen to bfloat16 there, and are the matrix products' first operand:
nothing widened is ever stored. A thread gets four bytes at a time. The bytes at 0 and 2 become one pair of bfloat16 and those at
1 and 3 another, which fixes the order in which a product sees them:

* along a key's head dim, each 16 columns come as `[parity, column // 2]`, and so must the queries' (`in_key_order`);
* loaded transposed, a value's columns become rows of the product, each 16 as `[parity, column // 2]` (`store` puts them back).

float8_e4m3fn bits shifted to bfloat16's places are the value times 2^-120, exactly, subnormals included (`FLOAT8_SHIFT`). A float8
NaN, which has no infinity beside it, reads as 480: what lies in unused rows can therefore do no harm.
"""

# Pallas declares ACC less public than it documents it, and what it inlines as if it were called as written.
# pyright: reportPrivateImportUsage=false, reportCallIssue=false

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.paged_attention.mosaic_gpu_ops import swizzled

KEYS = 64  # of a tile: the M of the product that makes scores
FLOAT8_SHIFT = 120
_MATRIX = plgpu.Layout.WGMMA
_SCALAR = plgpu.Layout.WG_SPLAT(())


def in_key_order(q: jax.Array) -> jax.Array:
    """`[..., H]` in the order in which products see a key's columns."""
    return q.reshape(*q.shape[:-1], -1, 8, 2).swapaxes(-1, -2).reshape(q.shape)


def _in_value_order(values: jax.Array) -> jax.Array:
    """`[H, keys]` in the order of the product's rows."""
    return values.reshape(-1, 8, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)


def _in_column_order(out: jax.Array) -> jax.Array:
    """The other way round."""
    return out.reshape(-1, 2, 8, out.shape[1]).swapaxes(1, 2).reshape(out.shape)


def _plain(stored: jax.Array) -> jax.Array:
    wide = stored.astype(jnp.float32)
    return jnp.where(jnp.isnan(wide), 480.0, wide)


def scores_and_values(keys, values, queries, dtype: Any, interpret: Any):
    """`[64, H] @ [N, H].T` in float32 and the values `[H, 64]` in bfloat16, in the product's order of rows.

    Args:
      keys, values: a tile of the ring, one byte each, both there.
      queries: `[N, H]` bfloat16 in shared memory, in the keys' order.
      dtype: of the tiles.

    Returns:
      Of float8, both come times 2^-120 (interpreted, the values come plain and in float32).
    """
    head_dim, columns = keys.shape[1], queries.shape[0]
    if interpret is not None:
        shift = 2.0**-FLOAT8_SHIFT if dtype == jnp.float8_e4m3fn else 1.0
        wide = queries[...].astype(jnp.float32) * shift
        scores = jnp.dot(in_key_order(_plain(keys[...])), wide.T, precision=lax.Precision.HIGHEST)
        return scores, _in_value_order(_plain(values[...]).T)

    from dflash_kernels.paged_attention import mosaic_gpu_narrow_lanes as lanes

    tile = plgpu.RefType(swizzled(dtype, head_dim))
    multiply = plgpu.inline_mgpu(
        arg_types=(tile, tile, plgpu.RefType(swizzled(jnp.bfloat16, head_dim))),
        return_type=(
            plgpu.ShapeDtypeStruct((KEYS, columns), jnp.dtype(jnp.float32), layout=_MATRIX),
            plgpu.ShapeDtypeStruct((head_dim, KEYS), jnp.dtype(jnp.bfloat16), layout=_MATRIX),
        ),
    )(lanes.scores_and_values)
    return multiply(keys, values, queries)


def add_values(acc, values, weights, dtype: Any, interpret: Any):
    """`acc + values @ weights`: `[H, N]`, the values from `scores_and_values`, the weights `[64, N]` in shared memory."""
    if interpret is None:
        return pl.run_state(lambda total: plgpu.wgmma(total, values, weights))(plgpu.ACC.init(acc))
    shift = 2.0**-FLOAT8_SHIFT if dtype == jnp.float8_e4m3fn else 1.0
    return acc + jnp.dot(values, weights[...].astype(jnp.float32) * shift, precision=lax.Precision.HIGHEST)


def any_above(values, limit: int, interpret: Any):
    """Whether any of `values [64, N]` is greater than `limit`; NaN is not. All threads wait for each other."""
    if interpret is not None:
        return jnp.max(jnp.where(jnp.isnan(values), -jnp.inf, values)) > limit

    from dflash_kernels.paged_attention import mosaic_gpu_narrow_lanes as lanes

    @plgpu.inline_mgpu(
        arg_types=(_MATRIX,), return_type=plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=_SCALAR)
    )  # fmt: skip
    def vote(_ctx, values):
        return lanes.any_above(values, limit)

    return vote(values) != 0


def add_weights(total, weights, interpret: Any):
    """`total + weights`, both `[64, N]`, as far as sums along the keys go; which key a thread's share stands at is left open."""
    if interpret is not None:
        return total + weights

    from dflash_kernels.paged_attention import mosaic_gpu_narrow_lanes as lanes

    shape = plgpu.ShapeDtypeStruct(total.shape, jnp.dtype(jnp.float32), layout=_MATRIX)

    @plgpu.inline_mgpu(arg_types=(_MATRIX, _MATRIX), return_type=shape)
    def add(_ctx, total, weights):
        return lanes.add_weights(total, weights)

    return add(total, weights)


def store(out, target, first_row, rows: int, factors, interpret: Any):
    """Writes `out [H, N]`, rows in the product's order, to `target`: column n is the query row `first_row + n`.

    Args:
      target: `[T, G, H]` in global memory, of whose rows `t * G + g` the first `rows` exist; out is rounded to its dtype.
      factors: `[H]` float32 in global memory to multiply the channels with, or None.
    """
    group = target.shape[1]
    if interpret is not None:
        plain = _in_column_order(out).T
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

    from dflash_kernels.paged_attention import mosaic_gpu_narrow_lanes as lanes

    given = () if factors is None else (factors,)

    @plgpu.inline_mgpu(arg_types=(_MATRIX, plgpu.RefType(), _SCALAR, *(plgpu.RefType() for _ in given)))
    def write(_ctx, out, target, first_row, *given):
        lanes.store(out, target, first_row, rows, given[0] if given else None)

    write(out, target, first_row, *given)
