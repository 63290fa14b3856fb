"""Attention of heads to blocks of keys that an indexer chooses: what MiniMax-M3 is called with.

Source: transformers' MiniMaxM3VLIndexer. There is an index query for each key head, and one index key for all of them. A block's
score is the largest product of a query with keys of the block that it sees. A query's heads of one key head attend to the blocks
with the best scores, and always to the last ones, its own included.

Chosen blocks become page tables: one for each query and key head, over a view of the pools in which a page has one head. So the ops
for pages attend, and what was not chosen is not read.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from dflash_kernels import latent_write, paged_attention, qkv_write
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.cache.groups import of_layer
from dflash_jax.cache.pages import Pages
from dflash_jax.models.layers import BlockRows, Rotary


def best_blocks(
    q: Float[Array, "B T K E"],
    keys: Float[Array, "B S E"],
    positions: Int[Array, "B T"],
    *,
    block: int,
    count: int,
    local: int,
) -> Int[Array, "B T K C"]:
    """Blocks that each query sees, in ascending order, then the number of blocks in place of those that are missing.

    Args:
      keys: of the whole text, from its beginning on; rows past a query's position may be anything.
      positions: of the queries; -1 for one that sees nothing.
      block: keys of one; count: of blocks; local: of blocks that are always seen, the query's own the last of them.
    """
    blocks = -(-keys.shape[1] // block)
    padded = jnp.pad(keys, ((0, 0), (0, blocks * block - keys.shape[1]), (0, 0)))
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    scores = jnp.einsum(
        "btke,bse->btks", q, padded.astype(q.dtype), precision=precision, preferred_element_type=jnp.float32
    )
    seen = jnp.arange(blocks * block) <= positions[..., None]
    scores = jnp.where(seen[:, :, None], scores, -jnp.inf).reshape(*scores.shape[:3], blocks, block).max(axis=-1)
    own, places = (positions // block)[..., None], jnp.arange(blocks)
    last = (places <= own) & (places > own - local) & (positions >= 0)[..., None]
    best, chosen = jax.lax.top_k(jnp.where(last[:, :, None], jnp.inf, scores), min(count, blocks))
    return jnp.sort(jnp.where(best == -jnp.inf, blocks, chosen), axis=-1)


def visible_keys(
    index: BlockRows, positions: Int[Array, "B T"], *, block: int, count: int, local: int
) -> Bool[Array, "B K T T"]:
    """Which of a text's tokens each of them sees, for every key head."""
    tokens = positions.shape[1]
    chosen = best_blocks(index.q, index.k, positions, block=block, count=count, local=local)
    open_blocks = jax.nn.one_hot(chosen, -(-tokens // block), dtype=bool).any(axis=3)
    keys = jnp.repeat(open_blocks, block, axis=-1)[..., :tokens]
    return jnp.moveaxis(keys & (jnp.arange(tokens) <= positions[..., None])[:, :, None], 1, 2)


def block_attention(
    paged: Any, layer: Any, qkv: Array, index: BlockRows, rotary: Rotary, cache: Pages
) -> tuple[Array, Pages]:
    """See `BlockAttend`: attention over pages, which get the new tokens' keys, values and index keys first.

    Args:
      paged: an `attention.paged.PagedAttend`.
    """
    i, place, config = layer.index, layer.index_place, layer.config
    slots, table = of_layer(paged.slots, i), of_layer(paged.page_table, i)
    pool = latent_write(
        cache.index[place], index.k.reshape(-1, index.k.shape[-1]).astype(cache.index[place].dtype), slots
    )
    cache = cache.with_layer(place, index=pool)
    if table.shape[1] * cache.page_size <= config.index_topk:
        return paged(layer, qkv, rotary, cache)
    rows, cos, sin = (x.reshape(-1, x.shape[-1]) for x in (qkv, *rotary))
    norms: Any = dict(zip(("q_norm", "k_norm"), layer.norms, strict=True))
    q, k, v, _ = qkv_write(
        cache.k[i], cache.v[i], rows, slots, cos, sin, eps=config.norm_eps, zero_centered=layer.zero_centered, **norms
    )
    cache, q = cache.with_layer(i, k=k, v=v), q.reshape(*qkv.shape[:2], *q.shape[1:])
    tokens = jnp.arange(q.shape[1])
    positions = (paged.seq_lens - paged.q_lens)[:, None] + tokens
    positions = jnp.where(tokens < paged.q_lens[:, None], positions, -1)
    held = pool[jnp.clip(table, 0, pool.shape[0] - 1)].reshape(table.shape[0], -1, pool.shape[3])
    options = {"block": config.index_block, "count": config.index_blocks, "local": config.index_local}
    chosen = best_blocks(index.q, held, positions, **options)
    return _over_chosen(q, k, v, table, chosen, positions, block=config.index_block, scale=layer.scale), cache


def _over_chosen(
    q: Float[Array, "B T N H"],
    k_pages: Float[Array, "P K p H"],
    v_pages: Float[Array, "P K p H"],
    table: Int[Array, "B W"],
    chosen: Int[Array, "B T K C"],
    positions: Int[Array, "B T"],
    *,
    block: int,
    scale: float,
) -> Float[Array, "B T N H"]:
    """The queries over their blocks: one sequence of one head for each query and key head.

    A unit is the largest piece that makes up whole pages and whole blocks.
    """
    heads, page = k_pages.shape[1:3]
    (b, t, n, h), unit = q.shape, math.gcd(page, block)
    in_page, in_block = page // unit, block // unit
    places = chosen[..., None] * in_block + jnp.arange(in_block)
    pages = jnp.take_along_axis(
        table[:, None, None], jnp.minimum(places // in_page, table.shape[1] - 1).reshape(b, t, heads, -1), axis=3
    )
    within = places.reshape(pages.shape) % in_page
    units = (pages * heads + jnp.arange(heads)[:, None]) * in_page + within
    # Blocks are in order, so the one that is not full, a query's own, is the last.
    lens = jnp.clip(positions[..., None, None] + 1 - chosen * block, 0, block).sum(axis=-1)
    rows = b * t * heads
    out: Any = paged_attention(
        q.reshape(rows, 1, n // heads, h), k_pages.reshape(-1, 1, unit, h), v_pages.reshape(-1, 1, unit, v_pages.shape[3]),
        units.reshape(rows, -1), lens.reshape(rows).astype(jnp.int32), q_lens=(lens > 0).reshape(rows).astype(jnp.int32),
        causal=True, scale=scale,
    )  # fmt: skip
    return out.reshape(b, t, n, -1)
