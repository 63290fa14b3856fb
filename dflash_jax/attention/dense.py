"""Attention over the tokens of one call, no cache: training and tests."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dflash_jax.models.layers import Attend, Attention


def dense_attend(
    mask: Bool[Array, "B T S"] | None = None,
    context: tuple[Float[Array, "L B C K H"], Float[Array, "L B C K H"]] | None = None,
) -> Attend:
    """An `attend` over the given tokens.

    Args:
      mask: which key each query sees; keys are the context's, then the tokens' own. None: the layer's causality and window with
        the context directly before the tokens.
      context: keys and values of all layers that come before the tokens' own.
    """

    def attend(layer: Attention, q: Array, k: Array, v: Array) -> Array:
        if context is not None:
            k = jnp.concatenate([context[0][layer.index].astype(k.dtype), k], axis=1)
            v = jnp.concatenate([context[1][layer.index].astype(v.dtype), v], axis=1)
        visible = layer_mask(layer, q.shape[1], k.shape[1])[None] if mask is None else mask
        return masked_attention(q, k, v, visible, layer.scale, None if layer.sinks is None else layer.sinks[...])

    return attend


def layer_mask(layer: Attention, queries: int, keys: int) -> Bool[Array, "T S"]:
    """Visibility of `keys` positions to the last `queries` of them."""
    ahead = jnp.arange(keys)[None, :] - (jnp.arange(queries) + keys - queries)[:, None]
    visible = ahead <= 0 if layer.causal else jnp.ones_like(ahead, bool)
    if layer.window is not None:
        visible &= (ahead >= -layer.window[0]) & (ahead <= layer.window[1])
    return visible


def masked_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    mask: Bool[Array, "b T S"],
    scale: float,
    sinks: Float[Array, "N"] | None = None,
) -> Float[Array, "B T N H"]:
    """Grouped-query attention with a float32 softmax; `sinks` add exp(sink) to each head's denominator."""
    b, t, n, h = q.shape
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    grouped = q.reshape(b, t, k.shape[2], -1, h)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, k, precision=precision).astype(jnp.float32) * scale
    scores = jnp.where(mask[:, None, None], scores, -jnp.inf)
    if sinks is not None:
        column = sinks.astype(jnp.float32).reshape(1, k.shape[2], -1, 1, 1)
        scores = jnp.concatenate([scores, jnp.broadcast_to(column, (*scores.shape[:-1], 1))], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : k.shape[1]].astype(q.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, v, precision=precision).reshape(b, t, n, h)
