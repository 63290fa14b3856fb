"""The definitions in plain jnp."""

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


def weighted_norm(
    rows: Float[Array, "M D"], weight: Float[Array, "D"], eps: float, *, zero_centered: bool = False
) -> Float[Array, "M D"]:
    """The RMS norm in float32, rounded to the rows' dtype before a weight and after an offset from 1 is applied."""
    wide = rows.astype(jnp.float32)
    factor = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    if zero_centered:
        return (wide * factor * (1.0 + weight.astype(jnp.float32))).astype(rows.dtype)
    return weight * (wide * factor).astype(rows.dtype)
