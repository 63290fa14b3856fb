"""The Hopper kernels: one warpgroup a row, which it keeps in registers between the sum of squares and the product."""

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

VECTOR = 4  # neighbouring entries of one thread


def embed_norm(
    table: jax.Array, ids: jax.Array, weight: jax.Array, eps: float, interpret: Any = None
) -> tuple[jax.Array, jax.Array]:
    """`table [V, D]`, `ids [M]` int32."""
    out = jax.ShapeDtypeStruct((ids.shape[0], table.shape[1]), table.dtype)

    def body(table, ids, weight, rows, normed):
        row = lax.axis_index("row")
        found = _load(table.at[jnp.clip(ids[row], 0, table.shape[0] - 1)], VECTOR)
        rows.at[row][...] = found
        normed.at[row][...] = _norm(found, _load(weight, VECTOR), eps)

    return _kernel(body, "embed_norm", ids.shape[0], (out, out), interpret)(table, ids, weight)


def stream_norm(stream: jax.Array, rows: int, weight: jax.Array, eps: float, interpret: Any = None) -> jax.Array:
    """`stream [D, n]`."""
    out = jax.ShapeDtypeStruct((rows, stream.shape[0]), weight.dtype)

    def body(stream, weight, normed):
        row = lax.axis_index("row")
        found = _load(stream.at[:, row], 1).astype(normed.dtype)
        normed.at[row][...] = _norm(found, _load(weight, 1), eps)

    return _kernel(body, "stream_norm", rows, out, interpret)(stream, weight)


def norm_rows(rows: jax.Array, weight: jax.Array, eps: float, interpret: Any = None) -> jax.Array:
    """`rows [M, D]`."""

    def body(rows, weight, normed):
        row = lax.axis_index("row")
        normed.at[row][...] = _norm(_load(rows.at[row], VECTOR), _load(weight, VECTOR), eps)

    return _kernel(body, "norm_rows", rows.shape[0], jax.ShapeDtypeStruct(rows.shape, rows.dtype), interpret)(
        rows, weight
    )


def _kernel(body: Any, name: str, rows: int, out: Any, interpret: Any) -> Any:
    named: Any = functools.partial(body)
    named.__name__ = name  # what profilers show
    return plgpu.kernel(
        named, out_type=out, grid=(rows,), grid_names=("row",), compiler_params=plgpu.CompilerParams(approx_math=True),
        **({} if interpret is None else {"interpret": interpret}),
    )  # fmt: skip


def _load(ref: Any, vector: int) -> jax.Array:
    return plgpu.load(ref, layout=plgpu.Layout.WG_STRIDED(ref.shape, vec_size=vector), optimized=False)


def _norm(row: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    wide = row.astype(jnp.float32)
    factor = lax.rsqrt((wide * wide).sum() * (1 / row.shape[0]) + eps)
    return (weight.astype(jnp.float32) * (wide * factor).astype(row.dtype).astype(jnp.float32)).astype(row.dtype)
