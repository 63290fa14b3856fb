"""Attention over the tokens of one call, no cache: training and tests."""

from typing import Any

import jax
import jax.numpy as jnp
from dflash_kernels import index_select
from dflash_kernels.attention.index.reference import head_scores
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.attention.blocks import visible_keys
from dflash_jax.attention.mla import LatentLayer
from dflash_jax.attention.pooled import chosen_tokens, pooled_keys
from dflash_jax.attention.relative import relative_scores
from dflash_jax.attention.whole_blocks import seen_tokens
from dflash_jax.cache.recurrent import zero_state
from dflash_jax.models.layers import Attention, BlockRows, Cache, ChoiceRows, IndexRows, PooledRows, Rotary


class DenseAttend:
    """An `Attend`, and one with choice of any kind, over the tokens of one call; see `dense_attend`.

    It gives a cache back as it is, but for `indexed` and for layers whose keys and values later ones attend to as well, which are
    its cache by layer.
    """

    def __init__(self, mask: Array | None, context: tuple[Array, Array] | None):
        self.mask, self.context = mask, context

    def __call__(self, layer: Attention, qkv: Array, rotary: Rotary, cache: Cache = None) -> tuple[Array, Cache]:
        if layer.keeps:
            q, k, v = layer.heads(qkv, rotary)
            cache = {**(cache or {}), layer.index: (k, v)} if layer.reused else cache
        else:
            q, (k, v) = layer.queries(qkv, rotary), cache[layer.index]
        if self.context is not None:
            k = jnp.concatenate([self.context[0][layer.index].astype(k.dtype), k], axis=1)
            v = jnp.concatenate([self.context[1][layer.index].astype(v.dtype), v], axis=1)
        visible = layer_mask(layer, q.shape[1], k.shape[1])[None] if self.mask is None else self.mask
        sinks = None if layer.sinks is None else layer.sinks[...]
        return masked_attention(q, k, v, visible, layer.scale, sinks, layer.soft_cap), cache

    def delta(self, layer: Any, projected: Array, cache: Cache = None) -> tuple[Array, Cache]:
        """Mixers that keep states, which begin with the tokens: `projected [B,T,W]` to `[B,T,O]`."""
        rows, tokens = projected.shape[:2]
        every = jnp.ones(rows, bool)
        out, _ = layer.prefill(
            projected, zero_state(rows, layer.shape, projected.dtype), slots=jnp.arange(rows), follows=~every, fresh=every,
            lengths=jnp.full(rows, tokens), **layer.differentiable,
        )  # fmt: skip
        return out, cache

    def latent(self, layer: Any, q: Array, row: Array, rotary: Rotary, cache: Cache = None) -> tuple[Array, Cache]:
        """Latent attention of what the layer projects; see `latent_parts`."""
        return self.latent_parts(layer, *layer.parts(q, row, rotary)), cache

    def indexed(
        self, layer: Any, q: Array, row: Array, index: IndexRows | None, rotary: Rotary, cache: Any = None
    ) -> tuple[Array, Any]:
        """Latent attention to what an indexer chooses. The cache is which keys each query sees, for layers without an indexer."""
        visible = cache if index is None else self.chosen(index, layer.config.index_topk)
        return DenseAttend(visible, None).latent_parts(layer, *layer.parts(q, row, rotary)), visible

    def pooled(self, layer: Any, q: Array, row: Array, index: PooledRows, cache: Cache = None) -> tuple[Array, Cache]:
        """Latent attention to the pools that an indexer chooses. Pools begin with the call's tokens, so there is no mask.

        Raises:
          NotImplementedError: there is one.
        """
        self._require_one_text("pools of tokens")
        rows, tokens = q.shape[:2]
        positions = jnp.broadcast_to(jnp.arange(tokens), (rows, tokens))
        keys = pooled_keys(jnp.concatenate([index.k, index.logits], axis=-1), index.places)
        size, count = index.places.shape[0], layer.config.index_topk
        seen = chosen_tokens(index.q, index.weights, keys, positions, size=size, count=count)
        visible = _named(seen, tokens)
        return DenseAttend(visible, None).latent_parts(layer, *layer.parts(q, row, None)), cache

    def blocks(
        self, layer: Any, qkv: Array, index: BlockRows, rotary: Rotary, cache: Cache = None
    ) -> tuple[Array, Cache]:
        """Attention to the blocks that an indexer chooses. Blocks begin with the call's tokens, so there is no mask.

        Raises:
          NotImplementedError: there is one.
        """
        self._require_one_text("blocks of keys")
        positions = jnp.broadcast_to(jnp.arange(qkv.shape[1]), qkv.shape[:2])
        options = {
            "block": layer.config.index_block,
            "count": layer.config.index_blocks,
            "local": layer.config.index_local,
        }
        return DenseAttend(visible_keys(index, positions, **options), None)(layer, qkv, rotary, cache)

    def compressed(
        self, layer: Any, q: Array, row: Array, choice: ChoiceRows | None, cache: Cache = None
    ) -> tuple[Array, Cache]:
        """Attention to a window and to compressed rows. Stretches begin with the call's tokens, so there is no mask.

        Raises:
          NotImplementedError: there is one.
        """
        self._require_one_text("stretches of tokens")
        (rows, tokens), rate, width = q.shape[:2], layer.rate, q.shape[3]
        ahead = jnp.arange(tokens) - jnp.arange(tokens)[:, None]
        keys, visible = row[..., :width], ((ahead <= 0) & (ahead > -layer.window))[None]
        if rate:
            count = tokens // rate
            own = row[:, : count * rate, width:].reshape(rows, count, rate, row.shape[2] - width)
            before = jnp.concatenate([jnp.zeros_like(own[:, :1]), own], axis=1)[:, :count]
            entries = layer.entries(before, own, jnp.broadcast_to(jnp.arange(count) * rate, (rows, count)))
            seen = (jnp.arange(count) < (jnp.arange(tokens)[:, None] + 1) // rate)[None]
            if choice is not None and count > (most := layer.config.index_topk):
                scores = jnp.where(seen, head_scores(choice.q, entries[..., width:], choice.weights), -jnp.inf)
                seen = _named(index_select(scores, count=most), count)
            keys = jnp.concatenate([keys, entries[..., :width]], axis=1)
            visible = jnp.concatenate([jnp.broadcast_to(visible, (len(seen), tokens, tokens)), seen], axis=-1)
        keys = keys[:, :, None]
        return masked_attention(q, keys, keys, visible, layer.scale, layer.sinks[...]), cache

    def whole_blocks(
        self, layer: Any, qkv: Array, index: BlockRows, rotary: Rotary, cache: Cache = None
    ) -> tuple[Array, Cache]:
        """Attention to the whole blocks that an indexer chooses. Blocks begin with the call's tokens, so there is no mask.

        Raises:
          NotImplementedError: there is one.
        """
        self._require_one_text("blocks of keys")
        positions = jnp.broadcast_to(jnp.arange(qkv.shape[1]), qkv.shape[:2])
        seen = seen_tokens(layer, index.q, index.k, positions)
        return DenseAttend(_named(seen, qkv.shape[1]), None)(layer, qkv, rotary, cache)

    def relative(
        self, layer: Any, q: Array, k: Array, v: Array, mixes: Array, cache: Cache = None
    ) -> tuple[Array, Cache]:
        """Attention with a bias by distance. Positions begin with the call's tokens, so there is no mask.

        Raises:
          NotImplementedError: there is one.
        """
        self._require_one_text("distances")
        positions = jnp.broadcast_to(jnp.arange(q.shape[1]), q.shape[:2])
        weights = jax.nn.softmax(relative_scores(layer, q, mixes, k, positions, positions), axis=-1).astype(q.dtype)
        precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.promote_types(q.dtype, jnp.float32) else None
        return jnp.einsum("bkgts,bskh->btkgh", weights, v, precision=precision).reshape(q.shape), cache

    def _require_one_text(self, counted: str) -> None:
        """Raises NotImplementedError under a mask: what is counted begins where a text does."""
        if self.mask is not None:
            raise NotImplementedError(f"{counted} begin where a text does: give one text in a row, and no mask")

    def chosen(self, index: IndexRows, count: int) -> Bool[Array, "B T T"]:
        """The `count` keys with the best scores of those that each query sees."""
        scores = head_scores(index.q, index.k, index.weights)
        visible = jnp.tril(jnp.ones((1, *scores.shape[1:]), bool)) if self.mask is None else self.mask
        places = index_select(jnp.where(visible, scores, -jnp.inf), count=min(count, scores.shape[2]))
        rows = (*jnp.indices(places.shape, sparse=True)[:2], places)
        return jnp.zeros(scores.shape, bool).at[rows].set(True, mode="drop", wrap_negative_indices=False)

    def latent_parts(self, layer: LatentLayer, q_nope: Array, q_pe: Array, kv_c: Array, k_pe: Array) -> Array:
        """Latent attention with keys and values of every head written out: `q_nope [B,T,N,P]`, `q_pe [B,T,N,r]`,
        `kv_c [B,T,R]` and `k_pe [B,T,r]` to `[B,T,N,V_h]`. The plainest form: others are judged against it.
        """
        k_nope, v = layer.expand(kv_c)
        k_pe = jnp.broadcast_to(k_pe[:, :, None], (*k_nope.shape[:-1], k_pe.shape[-1]))
        q, k = jnp.concatenate([q_nope, q_pe], axis=-1), jnp.concatenate([k_nope, k_pe], axis=-1)
        ones = jnp.ones((1, q.shape[1], k.shape[1]), bool)
        visible = self.mask if self.mask is not None else jnp.tril(ones) if layer.causal else ones
        return masked_attention(q, k, v, visible, layer.scale)


def _named(places: Int[Array, "B T K"], keys: int) -> Bool[Array, "B T S"]:
    """Which keys queries see that name places, negative ones for none."""
    rows = (*jnp.indices(places.shape, sparse=True)[:2], places)
    visible = jnp.zeros((*places.shape[:2], keys), bool)
    return visible.at[rows].set(True, mode="drop", wrap_negative_indices=False)


def dense_attend(
    mask: Bool[Array, "B T S"] | None = None,
    context: tuple[Float[Array, "L B C K H"], Float[Array, "L B C K H"]] | None = None,
) -> DenseAttend:
    """An `attend` over the given tokens.

    Args:
      mask: which key each query sees; keys are the context's, then the tokens' own. None: the layer's causality and window with
        the context directly before the tokens.
      context: keys and values of all layers that come before the tokens' own.
    """
    return DenseAttend(mask, context)


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
    v: Float[Array, "B S K h"],
    mask: Bool[Array, "b *K T S"],
    scale: float,
    sinks: Float[Array, "N"] | None = None,
    soft_cap: float | None = None,
) -> Float[Array, "B T N h"]:
    """Grouped-query attention with a softmax in at least float32; `sinks` add exp(sink) to each head's denominator.

    `mask`: one for all heads, or one for each key head. `soft_cap`: c of `c * tanh(score / c)`.
    """
    wide = jnp.promote_types(q.dtype, jnp.float32)
    b, t, n, h = q.shape
    precision = jax.lax.Precision.HIGHEST if q.dtype == wide else None
    grouped = q.reshape(b, t, k.shape[2], -1, h)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, k, precision=precision).astype(wide) * scale
    scores = scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(mask[:, None, None] if mask.ndim == 3 else mask[:, :, None], scores, -jnp.inf)
    if sinks is not None:
        column = sinks.astype(wide).reshape(1, k.shape[2], -1, 1, 1)
        scores = jnp.concatenate([scores, jnp.broadcast_to(column, (*scores.shape[:-1], 1))], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : k.shape[1]].astype(q.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, v, precision=precision).reshape(b, t, n, -1)
