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


def share_of_choices(
    experts: Int[Array, "T k"], weights: Float[Array, "T k"], first: Int[Array, ""], count: int, *, shared: bool = False
) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
    """Choices of a device that has `count` experts, from number `first` on: by its own numbers, with a weight of 0 for those that
    others have.

    Such a choice stands at an expert that the token takes here anyway, for which nothing more is read, or, where it takes none, at
    any, so that tokens do not crowd at one.

    Args:
      shared: the last choice is the expert that all tokens take, the last one of every device. The device with the first experts
        does so for all: which one adds it may not depend on a token's place among others.
    """
    routed = count - shared
    local = experts - first
    own = (local >= 0) & (local < routed)
    if shared:
        local, own = local.at[:, -1].set(routed), own.at[:, -1].set(first == 0)
    taken = jnp.take_along_axis(local, jnp.argmax(own, axis=-1, keepdims=True), axis=-1)
    elsewhere = jnp.where(own.any(axis=-1, keepdims=True), taken, experts % count)
    return jnp.where(own, local, elsewhere), jnp.where(own, weights, 0.0)


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
    logits: Float[Array, "T A"],
    x: Float[Array, "T D"],
    gate_up: Float[Array, "E twoF D"],
    down: Float[Array, "E D F"],
    *,
    taken: int,
    choice: Choice,
    first: Int[Array, ""] | None = None,
    exchange: Any = None,
) -> Float[Array, "k T D"]:
    """See `mixture`."""
    experts, weights = chosen(logits, taken, choice)
    if first is not None:
        experts, weights = share_of_choices(experts, weights, first, gate_up.shape[0], shared=choice.shared)
    return routed_experts_reference(x, experts, weights, gate_up, down, exchange)
