"""Reference of `routed_experts` and `mixture` in jnp."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_kernels.fused.experts.plan import Choice


def chosen(logits: Float[Array, "T E"], taken: int, choice: Choice) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
    """The experts with the largest logits, the first of equal ones, and their weights; then the shared one, if any."""
    if choice.shared:
        experts, weights = chosen(logits[:, :-1], taken, dataclasses.replace(choice, shared=False))
        shared = jnp.full_like(experts[:, :1], logits.shape[1] - 1), jax.nn.sigmoid(logits[:, -1:])
        return jnp.concatenate([experts, shared[0]], axis=1), jnp.concatenate([weights, shared[1]], axis=1)
    scores = jax.nn.softmax(logits, axis=-1)
    experts = jax.lax.top_k(scores, taken)[1]
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if choice.normed:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return experts, weights * choice.scale


def routed_experts_reference(
    x: Float[Array, "T D"],
    experts: Int[Array, "T k"],
    weights: Float[Array, "T k"],
    gate_up: Float[Array, "E twoF D"],
    down: Float[Array, "E D F"],
    exchange: Any = None,
) -> Float[Array, "k T D"]:
    """See `routed_experts`; each token's experts are gathered."""
    del exchange
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    wide = {"precision": precision, "preferred_element_type": jnp.float32}
    gate, up = jnp.split(jnp.einsum("td,tkfd->tkf", x, gate_up[experts], **wide), 2, axis=-1)
    inner = (jax.nn.silu(gate) * up).astype(x.dtype)
    out = jnp.einsum("tkf,tkdf->ktd", inner, down[experts], **wide)
    return out * weights.T[..., None]


def mixture_reference(
    logits: Float[Array, "T E"],
    x: Float[Array, "T D"],
    gate_up: Float[Array, "E twoF D"],
    down: Float[Array, "E D F"],
    *,
    taken: int,
    choice: Choice,
    exchange: Any = None,
) -> Float[Array, "k T D"]:
    """See `mixture`."""
    return routed_experts_reference(x, *chosen(logits, taken, choice), gate_up, down, exchange)
