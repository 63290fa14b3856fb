"""Reference of `linear_chain` in jnp: each result rounded to the activations' dtype as separate operations round it."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dflash_kernels.matmul.dense.reference import dense_reference


def linear_chain_reference(
    x: Float[Array, "M nD"],
    first: Float[Array, "D nD"],
    norm: Float[Array, "D"],
    second: Float[Array, "F D"],
    exchange: Any,
    *,
    eps: float,
) -> Float[Array, "M F"]:
    """See `linear_chain`."""
    del exchange
    wide = dense_reference(x, first).astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return dense_reference(norm * wide.astype(x.dtype), second)
