"""Latent attention to whole pools of tokens that an indexer chooses: what GLM-5.3-Flash is called with.

Source: transformers' Glm5NextTextIndexer. A pool is `index_kpool` tokens that follow one another from the text's beginning on. Its
index key is the mean of its tokens', each channel weighted by a softmax over the tokens. A query sees the `index_topk` tokens of
the best pools that end before or at it, and the tokens behind the last whole pool, its own included. With no more tokens than that
it sees all of them.

Pages keep a token's index key with the logits of its weights. So a rejected token leaves a pool by being written over, and pools of
any length of text are made from what is there.
"""

from typing import Any

import jax
import jax.numpy as jnp
from dflash_kernels import index_select, latent_write, mla_selected_attention
from dflash_kernels.attention.index.reference import head_scores
from jaxtyping import Array, Float, Int

from dflash_jax.attention.paged import PagedAttend
from dflash_jax.cache.pages import Pages
from dflash_jax.models.layers import PooledRows


def pooled_keys(rows: Float[Array, "B S E2"], places: Float[Array, "p E"]) -> Float[Array, "B P E"]:
    """Index keys of whole pools of p tokens; rows past them are left out.

    Args:
      rows: of each token its key and the logits of its weights.
      places: logits of the places in a pool, which are added to these.
    """
    size, pools = places.shape[0], rows.shape[1] // places.shape[0]
    grouped = rows[:, : pools * size].reshape(rows.shape[0], pools, size, -1)
    keys, logits = jnp.split(grouped, 2, axis=-1)
    weights = jax.nn.softmax(logits.astype(jnp.float32) + places.astype(jnp.float32), axis=2)
    return jnp.sum(weights * keys.astype(jnp.float32), axis=2).astype(rows.dtype)


def chosen_tokens(
    q: Float[Array, "B T I E"],
    weights: Float[Array, "B T I"],
    keys: Float[Array, "B P E"],
    positions: Int[Array, "B T"],
    *,
    size: int,
    count: int,
) -> Int[Array, "B T K"]:
    """Positions of the tokens that each query sees, -1 where there are fewer.

    Args:
      q, weights: of the indexer's heads, see `IndexRows`.
      keys: of pools.
      positions: of the queries; -1 for one that sees nothing.
      size: tokens of a pool.
      count: tokens of chosen pools at most, a multiple of a pool's.
    """
    last = (jnp.arange(keys.shape[1]) + 1) * size - 1
    scores = head_scores(q, keys, weights)
    scores = jnp.where(last <= positions[..., None], scores, -jnp.inf)
    pools = index_select(scores, count=min(count // size, keys.shape[1]), implementation="xla")[..., None]
    within = jnp.where(pools < 0, -1, pools * size + jnp.arange(size)).reshape(*positions.shape, -1)
    behind = (positions[..., None] + 1) // size * size + jnp.arange(size - 1)
    return jnp.concatenate([within, jnp.where(behind <= positions[..., None], behind, -1)], axis=-1)


def pooled_attention(
    paged: PagedAttend, layer: Any, q: Array, row: Array, index: PooledRows, cache: Pages
) -> tuple[Array, Pages]:
    """See `PooledAttend`: attention over pages, which get the new tokens' rows first."""
    q_nope, q_pe, kv_c, k_pe = layer.parts(q, row, None)
    cache = paged.write_parts(layer, kv_c, k_pe, cache)
    rows = jnp.concatenate([index.k, index.logits], axis=-1)
    pool = cache.index[layer.index]
    pool = latent_write(pool, rows.reshape(-1, rows.shape[-1]).astype(pool.dtype), paged.slots)
    cache = cache.with_layer(layer.index, index=pool)
    table, size, count = paged.page_table, cache.page_size, layer.config.index_topk
    if table.shape[1] * size <= count:
        return paged.over_latents(layer, q_nope, q_pe, cache), cache
    held = pool[jnp.clip(table, 0, pool.shape[0] - 1)].reshape(table.shape[0], -1, pool.shape[3])
    tokens = jnp.arange(q.shape[1])
    positions = (paged.seq_lens - paged.q_lens)[:, None] + tokens
    positions = jnp.where(tokens < paged.q_lens[:, None], positions, -1)
    keys = pooled_keys(held, index.places)
    seen = chosen_tokens(index.q, index.weights, keys, positions, size=index.places.shape[0], count=count)
    pages = jnp.take_along_axis(table[:, None], jnp.maximum(seen, 0) // size, axis=2)
    o_latent = mla_selected_attention(
        layer.absorb(q_nope, q_pe), cache.k[layer.index], jnp.where(seen < 0, -1, pages * size + seen % size),
        kv_lora_rank=layer.config.kv_lora_rank, scale=layer.scale, implementation="xla",
    )  # fmt: skip
    return layer.up(o_latent), cache
