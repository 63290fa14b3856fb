"""Attention of heads to whole blocks of keys that an indexer chooses: what Qwen3.8-Flash-Next is called with.

Source: transformers' Qwen4ExpTextQSAIndexer. A block is `index_block` tokens that follow one another from the text's beginning on.
Its index key is the mean of its tokens', normed then and rotated to where the block begins. All heads of a query see the
`index_topk` tokens of the blocks with the best scores among those that end before or at it, and the tokens behind the last whole
block. With no more tokens than that it sees all of them.

Pages keep tokens' index keys as they are projected, so a rejected token leaves a block by being written over. Keys and values of
what is chosen are gathered, some queries at a time.
"""

from typing import Any

import jax
import jax.numpy as jnp
from dflash_kernels import latent_write, qkv_write
from jaxtyping import Array, Float, Int

from dflash_jax.attention.paged import PagedAttend
from dflash_jax.attention.pooled import chosen_tokens
from dflash_jax.cache.groups import of_layer
from dflash_jax.cache.pages import Pages
from dflash_jax.models.layers import BlockRows, Rotary

WORKSPACE = 256 * 2**20  # bytes of gathered keys and values that are alive at a time


def seen_tokens(
    layer: Any, q: Float[Array, "B T I E"], keys: Float[Array, "B S E"], positions: Int[Array, "B T"]
) -> Int[Array, "B T C"]:
    """Positions of the tokens that each query sees, -1 where there are fewer.

    Args:
      layer: see `WholeBlockAttend`.
      q: of its indexer.
      keys: of the whole text, from its beginning on; those past a query's position may be anything.
      positions: of the queries; -1 for one that sees nothing.
    """
    config = layer.config
    ones = jnp.ones(q.shape[:-1], jnp.float32)
    return chosen_tokens(
        q, ones, layer.block_keys(keys), positions, size=config.index_block, count=config.index_topk
    )  # fmt: skip


def whole_block_attention(
    paged: PagedAttend, layer: Any, qkv: Array, index: BlockRows, rotary: Rotary, cache: Pages
) -> tuple[Array, Pages]:
    """See `WholeBlockAttend`: attention over pages, which get the new tokens' keys, values and index keys first."""
    i, size = layer.index, cache.page_size
    slots, table = of_layer(paged.slots, i), of_layer(paged.page_table, i)
    rows = index.k.reshape(-1, index.k.shape[-1])
    pool = latent_write(cache.index[i], rows.astype(cache.index[i].dtype), slots)
    cache = cache.with_layer(i, index=pool)
    if table.shape[1] * size <= layer.config.index_topk:
        return paged(layer, qkv, rotary, cache)
    rows, cos, sin = (x.reshape(-1, x.shape[-1]) for x in (qkv, *rotary))
    norms: Any = dict(zip(("q_norm", "k_norm"), layer.norms, strict=True))
    q, k, v, _ = qkv_write(
        cache.k[i], cache.v[i], rows, slots, cos, sin, eps=layer.config.norm_eps, zero_centered=layer.zero_centered,
        beside=layer.beside, **norms,
    )  # fmt: skip
    cache, q = cache.with_layer(i, k=k, v=v), q.reshape(*qkv.shape[:2], *q.shape[1:])
    tokens = jnp.arange(q.shape[1])
    positions = (paged.seq_lens - paged.q_lens)[:, None] + tokens
    positions = jnp.where(tokens < paged.q_lens[:, None], positions, -1)
    held = pool[jnp.clip(table, 0, pool.shape[0] - 1)].reshape(table.shape[0], -1, pool.shape[3])
    seen = seen_tokens(layer, index.q, held, positions)
    pages = jnp.take_along_axis(table[:, None], jnp.maximum(seen, 0) // size, axis=2)
    return over_named(q, k, v, jnp.where(seen < 0, -1, pages * size + seen % size), scale=layer.scale), cache


def over_named(
    q: Float[Array, "B T N H"],
    k_pages: Float[Array, "P K p H"],
    v_pages: Float[Array, "P K p h"],
    slots: Int[Array, "B T C"],
    *,
    scale: float,
) -> Float[Array, "B T N h"]:
    """Attention of every query to the keys that it names, the same ones for all heads, with a softmax in at least float32.

    Args:
      slots: `page * p + row`, negative for none; rows that are not named may hold anything, NaN included. A query that names none
        gives 0.
    """
    (b, t, *heads), count = q.shape, slots.shape[2]
    flat, named = q.reshape(b * t, *heads), slots.reshape(b * t, count)
    _, kv_heads, _, width = k_pages.shape
    one = count * kv_heads * (width + v_pages.shape[3]) * q.dtype.itemsize
    some = max(WORKSPACE // one, 1)
    if b * t <= some:
        return _over_named(flat, k_pages, v_pages, named, scale).reshape(b, t, heads[0], -1)
    missing = -(b * t) % some
    flat, named = (
        jnp.pad(flat, ((0, missing), (0, 0), (0, 0))),
        jnp.pad(named, ((0, missing), (0, 0)), constant_values=-1),
    )
    parts = flat.reshape(-1, some, *heads), named.reshape(-1, some, count)
    out = jax.lax.map(lambda part: _over_named(part[0], k_pages, v_pages, part[1], scale), parts)
    return out.reshape(-1, *out.shape[2:])[: b * t].reshape(b, t, heads[0], -1)


def _over_named(
    q: Float[Array, "R N H"], k_pages: Array, v_pages: Array, slots: Int[Array, "R C"], scale: float
) -> Float[Array, "R N h"]:
    wide = jnp.promote_types(q.dtype, jnp.float32)
    precision = jax.lax.Precision.HIGHEST if q.dtype == wide else None
    page = k_pages.shape[2]
    named = slots >= 0
    at = jnp.maximum(slots, 0)
    k, v = (
        jnp.where(named[:, :, None, None], pool[at // page, :, at % page].astype(q.dtype), 0)
        for pool in (k_pages, v_pages)
    )  # [R, C, K, H]
    grouped = q.reshape(q.shape[0], k.shape[2], -1, q.shape[2])
    options: Any = {"precision": precision, "preferred_element_type": wide}
    scores = jnp.einsum("rkgh,rckh->rkgc", grouped, k, **options) * scale
    scores = jnp.where(named[:, None, None], scores, -jnp.inf)
    most = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(most == -jnp.inf, 0, most))
    weights = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), jnp.finfo(wide).tiny)
    out = jnp.einsum("rkgc,rckh->rkgh", weights.astype(q.dtype), v, **options)
    return out.astype(q.dtype).reshape(*q.shape[:2], -1)
