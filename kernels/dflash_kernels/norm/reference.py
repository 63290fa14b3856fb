"""The definitions in plain jnp."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def embed_norm_reference(
    table: Float[Array, "V D"],
    ids: Int[Array, "M"],
    weight: Float[Array, "D"],
    *,
    eps: float,
    zero_centered: bool = False,
) -> tuple[Float[Array, "M D"], Float[Array, "M D"]]:
    """See `embed_norm`."""
    rows = jnp.take(table, ids, axis=0, mode="clip")
    return rows, weighted_norm(rows, weight, eps, zero_centered=zero_centered)


def stream_norm_reference(
    stream: Float[Array, "D n"], rows: int, weight: Float[Array, "D"], *, eps: float, zero_centered: bool = False
) -> Float[Array, "M D"]:
    """See `stream_norm`."""
    # One row is no transpose: XLA would lay the hidden state out by columns, and a copy of the head with it.
    first = stream[:, 0][None] if rows == 1 else stream[:, :rows].T
    return weighted_norm(first.astype(weight.dtype), weight, eps, zero_centered=zero_centered)


def reduce_add_norm_reference(
    parts: Float[Array, "n S M D"],
    stream: Float[Array, "M D"],
    weight: Float[Array, "D"],
    *,
    eps: float,
    zero_centered: bool = False,
) -> tuple[Float[Array, "M D"], Float[Array, "M D"]]:
    """See `reduce_add_norm`, with the parts of all n devices, which all have this."""
    sums = parts.astype(jnp.float32).sum(axis=1).astype(stream.dtype)
    total = sums[0].astype(jnp.float32)
    for own in sums[1:]:
        total = total + own.astype(jnp.float32)
    stream = (stream + total.astype(stream.dtype)).astype(stream.dtype)
    return stream, weighted_norm(stream, weight, eps, zero_centered=zero_centered)


def reduce_add_norm_xla(
    parts: Float[Array, "S M D"], stream: Float[Array, "M D"], weight: Float[Array, "D"], *, eps: float, axis: str | None,
    exchange: Any = None, zero_centered: bool = False,
) -> tuple[Float[Array, "M D"], Float[Array, "M D"]]:  # fmt: skip
    """The definition, of what was gathered."""
    del exchange
    own = parts.astype(jnp.float32).sum(axis=0).astype(stream.dtype)
    gathered = own[None] if axis is None else jax.lax.all_gather(own, axis)
    return reduce_add_norm_reference(gathered[:, None], stream, weight, eps=eps, zero_centered=zero_centered)


def weighted_norm(
    rows: Float[Array, "M D"],
    weight: Float[Array, "D"],
    eps: float,
    *,
    zero_centered: bool = False,
    rounds_last: bool = False,
) -> Float[Array, "M D"]:
    """The RMS norm in float32, rounded to the rows' dtype before a weight, or with `rounds_last` after it, and after an offset from
    1 is applied."""
    wide = rows.astype(jnp.float32)
    factor = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    if zero_centered:
        return (wide * factor * (1.0 + weight.astype(jnp.float32))).astype(rows.dtype)
    if rounds_last:
        return (wide * factor * weight.astype(jnp.float32)).astype(rows.dtype)
    return weight * (wide * factor).astype(rows.dtype)
