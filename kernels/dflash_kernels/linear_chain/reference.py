"""The definition in jnp, each result rounded to the activations' dtype as separate operations round it."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def linear_chain_reference(
    x: Float[Array, "M A"],
    first: Float[Array, "D A"],
    norm: Float[Array, "D"],
    second: Float[Array, "G D"],
    exchange: Any,
    *,
    eps: float,
) -> Float[Array, "M G"]:
    """See `linear_chain`."""
    del exchange
    wide = _linear(x, first).astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return _linear(norm * wide.astype(x.dtype), second)


def _linear(x: Array, weight: Array) -> Array:
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum("md,fd->mf", x, weight, precision=precision)
