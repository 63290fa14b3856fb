"""The norms at a model's two ends on Hopper: one warpgroup a row, in registers between the sum of squares and the product."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dflash_kernels.mosaic_gpu.rows import load_row, rms_norm, row_kernel


def embed_norm(
    table: jax.Array,
    ids: jax.Array,
    weight: jax.Array,
    eps: float,
    interpret: Any = None,
    *,
    zero_centered: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """`table [V, D]`, `ids [M]` int32."""
    out = jax.ShapeDtypeStruct((ids.shape[0], table.shape[1]), table.dtype)

    def body(table, ids, weight, rows, normed):
        row = lax.axis_index("row")
        found = load_row(table.at[jnp.clip(ids[row], 0, table.shape[0] - 1)])
        rows.at[row][...] = found
        normed.at[row][...] = rms_norm(found, load_row(weight), eps, zero_centered=zero_centered)

    return row_kernel(body, "embed_norm", ids.shape, (out, out), interpret)(table, ids, weight)


def stream_norm(
    stream: jax.Array, rows: int, weight: jax.Array, eps: float, interpret: Any = None, *, zero_centered: bool = False
) -> jax.Array:
    """`stream [D, n]`: a column for each row of the result."""
    out = jax.ShapeDtypeStruct((rows, stream.shape[0]), weight.dtype)

    def body(stream, weight, normed):
        row = lax.axis_index("row")
        found = load_row(stream.at[:, row], 1).astype(normed.dtype)
        normed.at[row][...] = rms_norm(found, load_row(weight, 1), eps, zero_centered=zero_centered)

    return row_kernel(body, "stream_norm", (rows,), out, interpret)(stream, weight)
