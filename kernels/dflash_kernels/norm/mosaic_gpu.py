"""Norms on Hopper: what the kernels support, and their launches."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_kernels.core.device import require_hopper
from dflash_kernels.core.rank_exchange import RankExchange

WIDTH = 512  # of rows: a multiple of this


def embed_norm_mosaic_gpu(
    table: Float[Array, "V D"],
    ids: Int[Array, "M"],
    weight: Float[Array, "D"],
    *,
    eps: float,
    zero_centered: bool = False,
) -> tuple[Float[Array, "M D"], Float[Array, "M D"]]:
    """See `embed_norm`."""
    require_hopper()
    return launch_embed_norm(table, ids, weight, eps=eps, zero_centered=zero_centered)


def stream_norm_mosaic_gpu(
    stream: Float[Array, "D n"], rows: int, weight: Float[Array, "D"], *, eps: float, zero_centered: bool = False
) -> Float[Array, "M D"]:
    """See `stream_norm`."""
    require_hopper()
    return launch_stream_norm(stream, rows, weight, eps=eps, zero_centered=zero_centered)


def reduce_add_norm_mosaic_gpu(
    parts: Float[Array, "S M D"], stream: Float[Array, "M D"], weight: Float[Array, "D"], *, eps: float, axis: str | None,
    exchange: RankExchange | None, zero_centered: bool = False,
) -> tuple[Float[Array, "M D"], Float[Array, "M D"]]:  # fmt: skip
    """See `reduce_add_norm`."""
    require_hopper()
    del axis
    if exchange is None:
        raise NotImplementedError("needs memory for the exchange")
    _require_rows(stream.dtype, weight)
    (rows, width), (_, _, places, words) = stream.shape, exchange.area.shape
    if rows > places or words * 4 != width * stream.dtype.itemsize:
        raise NotImplementedError(f"{rows} rows of {width} {stream.dtype} do not fit {places} places of {words} words")
    return _reduce_add_norm(parts, stream, weight, exchange, eps=eps, zero_centered=zero_centered)


def launch_reduce_add_norm(
    parts: Float[Array, "n S M D"], stream: Array, weight: Array, *, eps: float, zero_centered: bool = False, interpret: Any,
) -> tuple[Array, Array]:  # fmt: skip
    """`reduce_add_norm` of all ranks' parts in the interpreter, which has one device: every rank's share of it, one by one."""
    _require_rows(stream.dtype, weight)
    from dflash_kernels.norm import mosaic_gpu_sm90 as kernel

    sums = jnp.stack([kernel.own_sums(own, stream.dtype, interpret) for own in parts])
    return kernel.sums_add_norm(sums, stream, weight, eps, interpret, zero_centered=zero_centered)


# Compiled as a function of its own, so that the layers of a model share one trace and one lowering of the kernel.
@functools.partial(jax.jit, static_argnames=("eps", "zero_centered"))
def _reduce_add_norm(
    parts: Array, stream: Array, weight: Array, exchange: RankExchange, *, eps: float, zero_centered: bool
) -> tuple[Array, Array]:
    from dflash_kernels.norm import mosaic_gpu_sm90 as kernel

    return kernel.reduce_add_norm(parts, stream, weight, exchange, eps, zero_centered=zero_centered)


@functools.partial(jax.jit, static_argnames=("eps", "zero_centered", "interpret"))
def launch_embed_norm(
    table: Array, ids: Array, weight: Array, *, eps: float, zero_centered: bool = False, interpret: Any = None
) -> tuple[Array, Array]:
    """`embed_norm` without the device check."""
    _require_rows(table.dtype, weight)
    # Not at the top: other machines need neither Pallas nor the time its import takes.
    from dflash_kernels.norm import mosaic_gpu_sm90 as kernel

    return kernel.embed_norm(table, ids, weight, eps, interpret, zero_centered=zero_centered)


@functools.partial(jax.jit, static_argnames=("rows", "eps", "zero_centered", "interpret"))
def launch_stream_norm(
    stream: Array, rows: int, weight: Array, *, eps: float, zero_centered: bool = False, interpret: Any = None
) -> Array:
    """`stream_norm` without the device check."""
    _require_rows(stream.dtype, weight)
    from dflash_kernels.norm import mosaic_gpu_sm90 as kernel

    return kernel.stream_norm(stream, rows, weight, eps, interpret, zero_centered=zero_centered)


def rows_refusal(width: int, dtype: Any, kind: Any = jnp.bfloat16) -> str | None:
    """Why no kernel here takes rows of this width and dtype with a norm's weight of this kind."""
    if kind != jnp.bfloat16 or width % WIDTH or dtype not in (jnp.bfloat16, jnp.float32):
        return f"takes bfloat16 weights of a multiple of {WIDTH}, not {kind} of {width} for {dtype}"
    return None


def _require_rows(dtype: Any, weight: Array) -> None:
    if (reason := rows_refusal(weight.shape[0], dtype, weight.dtype)) is not None:
        raise NotImplementedError(reason)
