"""Norms on Hopper: what the kernels take."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_kernels.core.device import require_hopper

WIDTH = 512  # of rows: a multiple of this


def embed_norm_mosaic_gpu(
    table: Float[Array, "V D"], ids: Int[Array, "M"], weight: Float[Array, "D"], *, eps: float
) -> tuple[Float[Array, "M D"], Float[Array, "M D"]]:
    """See `embed_norm`."""
    require_hopper()
    return embed_norm_launch(table, ids, weight, eps=eps)


def stream_norm_mosaic_gpu(
    stream: Float[Array, "D n"], rows: int, weight: Float[Array, "D"], *, eps: float
) -> Float[Array, "M D"]:
    """See `stream_norm`."""
    require_hopper()
    return stream_norm_launch(stream, rows, weight, eps=eps)


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def embed_norm_launch(
    table: Array, ids: Array, weight: Array, *, eps: float, interpret: Any = None
) -> tuple[Array, Array]:
    """`embed_norm` without the device check."""
    _refuse(table.dtype, weight)
    # Not at the top: other machines need neither Pallas nor the time its import takes.
    from dflash_kernels.norm import mosaic_gpu_kernel as kernel

    return kernel.embed_norm(table, ids, weight, eps, interpret)


@functools.partial(jax.jit, static_argnames=("rows", "eps", "interpret"))
def stream_norm_launch(stream: Array, rows: int, weight: Array, *, eps: float, interpret: Any = None) -> Array:
    """`stream_norm` without the device check."""
    _refuse(stream.dtype, weight)
    from dflash_kernels.norm import mosaic_gpu_kernel as kernel

    return kernel.stream_norm(stream, rows, weight, eps, interpret)


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def norm_rows_launch(rows: Array, weight: Array, *, eps: float, interpret: Any = None) -> Array:
    """The norm of `rows [M, D]` times `weight`, for products that end in the stream."""
    _refuse(rows.dtype, weight)
    from dflash_kernels.norm import mosaic_gpu_kernel as kernel

    return kernel.norm_rows(rows, weight, eps, interpret)


def _refuse(dtype: Any, weight: Array) -> None:
    if weight.dtype != jnp.bfloat16 or weight.shape[0] % WIDTH or dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(
            f"takes bfloat16 weights of a multiple of {WIDTH}, not {weight.dtype} of {weight.shape[0]} for {dtype}"
        )
