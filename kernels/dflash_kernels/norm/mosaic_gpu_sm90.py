"""The norms at a model's two ends and after a sum over GPUs on Hopper: one warpgroup a row, in registers from load to store."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dflash_kernels.core.rank_exchange import RankExchange
from dflash_kernels.mosaic_gpu import rank_mailbox
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


def reduce_add_norm(
    parts: jax.Array,
    stream: jax.Array,
    weight: jax.Array,
    exchange: RankExchange,
    eps: float,
    *,
    zero_centered: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """`parts [S, M, D]` of this rank, `stream [M, D]`. Row m meets those of other ranks at place m."""

    def body(parts, before, weight, counts, area, peers, rows, normed):
        row = lax.axis_index("row")
        own = _own_sum(parts, row, before.dtype)
        total = rank_mailbox.summed_row(own, counts, area, peers, row)
        rows.at[row][...], normed.at[row][...] = _added(total, before, weight, row, eps, zero_centered)

    out = jax.ShapeDtypeStruct(stream.shape, stream.dtype)
    return row_kernel(body, "reduce_add_norm", stream.shape[:1], (out, out))(parts, stream, weight, *exchange)


def own_sums(parts: jax.Array, dtype: Any, interpret: Any = None) -> jax.Array:
    """Interpreter form of `reduce_add_norm`'s exchange: the sum of `parts [S, M, D]`. It has no other ranks."""

    def body(parts, sums):
        row = lax.axis_index("row")
        sums.at[row][...] = _own_sum(parts, row, sums.dtype)

    out = jax.ShapeDtypeStruct(parts.shape[1:], dtype)
    return row_kernel(body, "own_sums", out.shape[:1], out, interpret)(parts)


def sums_add_norm(
    sums: jax.Array,
    stream: jax.Array,
    weight: jax.Array,
    eps: float,
    interpret: Any = None,
    *,
    zero_centered: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Interpreter form of `reduce_add_norm` on all ranks' `sums [n, M, D]`."""

    def body(sums, before, weight, rows, normed):
        row = lax.axis_index("row")
        total = load_row(sums.at[0, row]).astype(jnp.float32)
        for rank in range(1, sums.shape[0]):
            total = total + load_row(sums.at[rank, row]).astype(jnp.float32)
        rows.at[row][...], normed.at[row][...] = _added(total, before, weight, row, eps, zero_centered)

    out = jax.ShapeDtypeStruct(stream.shape, stream.dtype)
    return row_kernel(body, "sums_add_norm", stream.shape[:1], (out, out), interpret)(sums, stream, weight)


def _own_sum(parts: Any, row: Any, dtype: Any) -> jax.Array:
    total = load_row(parts.at[0, row]).astype(jnp.float32)
    for part in range(1, parts.shape[0]):
        total = total + load_row(parts.at[part, row]).astype(jnp.float32)
    return total.astype(dtype)


def _added(
    total: jax.Array, before: Any, weight: Any, row: Any, eps: float, zero_centered: bool
) -> tuple[jax.Array, jax.Array]:
    """A row of the stream with a sum added that is rounded before, and its norm."""
    rounded = total.astype(before.dtype).astype(jnp.float32)
    added = (load_row(before.at[row]).astype(jnp.float32) + rounded).astype(before.dtype)
    return added, rms_norm(added, load_row(weight), eps, zero_centered=zero_centered)
