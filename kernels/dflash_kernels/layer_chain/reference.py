"""The definition in jnp, each result rounded to the activations' dtype as separate operations round it."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def layer_chain_reference(
    x: Float[Array, "M A"],
    stream: Float[Array, "D n"],
    o: Float[Array, "D A"],
    post_norm: Float[Array, "D"],
    gate_up: Float[Array, "twoF D"],
    down: Float[Array, "D F"],
    next_norm: Float[Array, "D"] | None,
    following: Float[Array, "G D"] | None,
    ahead: Any,
    exchange: Any,
    *,
    eps: float,
) -> tuple[Float[Array, "D n"], Float[Array, "M G"] | None]:
    """See `layer_chain`."""
    del ahead, exchange
    rows, wide = x.shape[0], stream[:, : x.shape[0]].T
    wide = wide + _linear(x, o)
    gate, up = jnp.split(_linear(_norm(wide, post_norm, eps), gate_up), 2, axis=-1)
    wide = wide + _linear(jax.nn.silu(gate) * up, down)
    projected = None
    if next_norm is not None and following is not None:
        projected = _linear(_norm(wide, next_norm, eps), following)
    return jnp.pad(wide.T, ((0, 0), (0, stream.shape[1] - rows))), projected


def _linear(x: Array, weight: Array) -> Array:
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum("md,fd->mf", x, weight, precision=precision)


def _norm(wide: Array, weight: Array, eps: float) -> Array:
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return weight * normed.astype(weight.dtype)
