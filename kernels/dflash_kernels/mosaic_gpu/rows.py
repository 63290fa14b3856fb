"""Row kernels: one warpgroup a row, which it keeps in registers."""

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

WARPGROUP = 128  # threads
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
    return plgpu.kernel(
        named, out_type=out, grid=grid, grid_names=("row", "part")[: len(grid)],
        compiler_params=plgpu.CompilerParams(approx_math=True), **({} if interpret is None else {"interpret": interpret}),
    )  # fmt: skip


def load_row(ref: Any, vector: int = VECTOR) -> jax.Array:
    """A row, `vector` neighbouring numbers a thread."""
    return plgpu.load(ref, layout=plgpu.Layout.WG_STRIDED(ref.shape, vec_size=vector), optimized=False)


def rms_norm(row: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """A row's root-mean-square norm, rounded to its dtype, times the weight, rounded again."""
    wide = row.astype(jnp.float32)
    factor = lax.rsqrt((wide * wide).sum() * (1 / row.shape[0]) + eps)
    return (weight.astype(jnp.float32) * (wide * factor).astype(row.dtype).astype(jnp.float32)).astype(row.dtype)
