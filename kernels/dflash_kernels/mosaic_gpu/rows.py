"""Row kernels: one warpgroup a row, which it keeps in registers."""

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.core.layouts import interleave_columns
from dflash_kernels.mosaic_gpu.convert import interleaved_float8
from dflash_kernels.mosaic_gpu.thread_op import kernel, thread_op

VECTOR = 4  # neighbouring numbers of one thread


def row_kernel(
    body: Callable[..., None], name: str, grid: tuple[int, ...], out: Any, interpret: Any = None
) -> Callable[..., Any]:
    """A kernel with a CTA of one warpgroup for each row, or for each part of one.

    Args:
      body: its axes are "row", and "part" where the grid has two.
      name: as profilers show it.
      grid: rows, or rows and parts.
      out: shapes of the results.
      interpret: not None under Pallas's interpreter.
    """
    named: Any = functools.partial(body)
    named.__name__ = name
    return kernel(
        named, out_type=out, grid=grid, grid_names=("row", "part")[: len(grid)],
        compiler_params=plgpu.CompilerParams(approx_math=True), interpret=interpret,
    )  # fmt: skip


def load_row(ref: Any, vector: int = VECTOR) -> jax.Array:
    """A row, `vector` neighbouring numbers a thread."""
    return plgpu.load(ref, layout=plgpu.Layout.WG_STRIDED(ref.shape, vec_size=vector), optimized=False)


def rms_norm(row: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """A row's root-mean-square norm, rounded to its dtype, times the weight, rounded again."""
    wide = row.astype(jnp.float32)
    factor = lax.rsqrt((wide * wide).sum() * (1 / row.shape[0]) + eps)
    return (weight.astype(jnp.float32) * (wide * factor).astype(row.dtype).astype(jnp.float32)).astype(row.dtype)


def _float8_words(row: jax.Array) -> jax.Array:
    most = float(jnp.finfo(jnp.float8_e4m3fn).max)
    numbers = jnp.where(jnp.isnan(row), row, jnp.clip(row, -most, most)).astype(jnp.float8_e4m3fn)
    return lax.bitcast_convert_type(interleave_columns(numbers).reshape(-1, VECTOR), jnp.int32)


def _strided(width: int, vector: int) -> Any:
    return plgpu.Layout.WG_STRIDED((width,), vec_size=vector)


@thread_op(
    args=lambda row: (_strided(row.shape[0], VECTOR),),
    returns=lambda row: plgpu.ShapeDtypeStruct(
        (row.shape[0] // VECTOR,), jnp.dtype(jnp.int32), layout=_strided(row.shape[0] // VECTOR, 1)
    ),
    interpret=_float8_words,
)
def float8_words(row: Any) -> Any:
    """A row of float32 as int32 words of four float8 numbers, columns interleaved. NaN stays, others saturate."""
    return interleaved_float8(row, _strided(row.shape[0] // VECTOR, 1).to_mgpu())
