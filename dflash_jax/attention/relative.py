"""Attention with a bias that follows from the query's hidden state and the distance to the key: what Inkling is called with.

Source: transformers' InklingRelativeLogits and InklingAttention. Each head of a query mixes a bank of profiles over distances into
one bias for each distance up to the bank's length; farther keys have none. No head rotates. Scores with their bias grow with the
logarithm of the query's position in layers that have such a factor.

No kernel for pages takes such a bias. Keys and values of some pages are gathered at a time, and sums over them are kept as flash
attention keeps them (arXiv 2205.14135). Layers with a window gather the pages that one of the queries sees.
"""

from typing import Any

import jax
import jax.numpy as jnp
from dflash_kernels import cache_write
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.attention.paged import PagedAttend
from dflash_jax.cache.groups import of_layer
from dflash_jax.cache.pages import Pages

WORKSPACE = 256 * 2**20  # bytes of gathered keys and values and their scores that are alive at a time

# The largest score so far, the sum of weights by it, and the weighted sum of values.
type _Sums = tuple[Float[Array, "B K g T"], Float[Array, "B K g T"], Float[Array, "B K g T h"]]


def relative_bias(
    mixes: Float[Array, "B T N r"], profiles: Float[Array, "r extent"], distance: Int[Array, "B T S"]
) -> Float[Array, "B N T S"]:
    """Bias of each head's score by how far the key is behind the query, in at least float32; 0 for keys beyond the profiles, or
    ahead."""
    wide, extent = jnp.promote_types(mixes.dtype, jnp.float32), profiles.shape[1]
    precision = jax.lax.Precision.HIGHEST if mixes.dtype == wide else None
    found = profiles.T[jnp.clip(distance, 0, extent - 1)].astype(mixes.dtype)
    found = jnp.where(((distance >= 0) & (distance < extent))[..., None], found, 0)
    return jnp.einsum("btnr,btsr->bnts", mixes, found, precision=precision, preferred_element_type=wide)


def relative_scores(
    layer: Any,
    q: Float[Array, "B T N H"],
    mixes: Float[Array, "B T N r"],
    k: Float[Array, "B S K H"],
    positions: Int[Array, "B T"],
    keys: Int[Array, "B S"],
) -> Float[Array, "B K g T S"]:
    """Scores with their bias, in at least float32, -inf for keys that a query does not see.

    Args:
      layer: see `RelativeAttend`.
      positions: of queries, negative for one that sees nothing; keys: of keys.
    """
    wide = jnp.promote_types(q.dtype, jnp.float32)
    precision = jax.lax.Precision.HIGHEST if q.dtype == wide else None
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, k, precision=precision, preferred_element_type=wide)
    distance = positions[:, :, None] - keys[:, None]
    scores = scores * layer.scale + relative_bias(mixes, layer.profiles[...], distance).reshape(scores.shape)
    if (growth := layer.growth(positions)) is not None:
        scores = scores * growth[:, None, None, :, None].astype(wide)
    visible = (distance >= 0) & (positions >= 0)[:, :, None]
    if layer.window is not None:
        visible &= distance <= layer.window[0]
    return jnp.where(visible[:, None, None], scores, -jnp.inf)


def relative_attention(
    paged: PagedAttend,
    layer: Any,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    mixes: Float[Array, "B T N r"],
    cache: Pages,
) -> tuple[Float[Array, "B T N H"], Pages]:
    """See `RelativeAttend`: attention over pages, which get the new tokens' keys and values first."""
    i = layer.index
    slots, table = of_layer(paged.slots, i), of_layer(paged.page_table, i)
    k, v = (x.reshape(-1, *x.shape[2:]).astype(pool.dtype) for x, pool in ((k, cache.k[i]), (v, cache.v[i])))
    k_pages, v_pages = cache_write(cache.k[i], cache.v[i], k, v, slots)
    out = _over_pages(layer, q, mixes, k_pages, v_pages, table, paged.seq_lens, paged.q_lens)
    return out, cache.with_layer(i, k=k_pages, v=v_pages)


def _over_pages(
    layer: Any,
    q: Float[Array, "B T N H"],
    mixes: Float[Array, "B T N r"],
    k_pages: Float[Array, "P K p H"],
    v_pages: Float[Array, "P K p h"],
    table: Int[Array, "B W"],
    seq_lens: Int[Array, "B"],
    q_lens: Int[Array, "B"],
) -> Float[Array, "B T N h"]:
    """Attention of the last `q_lens` tokens of each sequence; others give 0. Rows past a sequence, and pages before a window, may
    hold anything, NaN included."""
    (b, t, n, _), (_, kv_heads, page, width) = q.shape, k_pages.shape
    wide, starts, tokens = jnp.promote_types(q.dtype, jnp.float32), seq_lens - q_lens, jnp.arange(t)
    positions = jnp.where(tokens < q_lens[:, None], starts[:, None] + tokens, -1)
    columns, first = table.shape[1], jnp.zeros_like(starts)
    least = first  # the first key that any query of a sequence sees
    if layer.window is not None:
        least = jnp.maximum(starts - layer.window[0], 0)
        first, columns = least // page, min(columns, (layer.window[0] + t + page - 2) // page + 1)
    key_bytes = b * (
        3 * t * n * 4 + t * mixes.shape[3] * 4 + 2 * kv_heads * (width + v_pages.shape[3]) * q.dtype.itemsize
    )
    some = min(max(WORKSPACE // (key_bytes * page), 1), columns)

    def add(part: Any, sums: _Sums) -> _Sums:
        places = first[:, None] + part * some + jnp.arange(some)
        inside = (part * some + jnp.arange(some) < columns) & (places < table.shape[1])
        pages = jnp.take_along_axis(table, jnp.minimum(places, table.shape[1] - 1), axis=1)
        pages = jnp.clip(pages, 0, k_pages.shape[0] - 1)
        keys = (places[:, :, None] * page + jnp.arange(page)).reshape(b, -1)
        there = jnp.repeat(inside, page, axis=1) & (keys >= least[:, None]) & (keys < seq_lens[:, None])
        k, v = (_rows(pool, pages, there).astype(q.dtype) for pool in (k_pages, v_pages))
        scores = relative_scores(layer, q, mixes, k, positions, jnp.where(there, keys, jnp.iinfo(jnp.int32).max))
        return _summed(scores, v, sums)

    shape = (b, kv_heads, n // kv_heads, t)
    sums: _Sums = (
        jnp.full(shape, -jnp.inf, wide), jnp.zeros(shape, wide), jnp.zeros((*shape, v_pages.shape[3]), wide)
    )  # fmt: skip
    parts = -(-columns // some)
    sums = add(0, sums) if parts == 1 else jax.lax.fori_loop(0, parts, add, sums)
    out = sums[2] / jnp.maximum(sums[1], jnp.finfo(wide).tiny)[..., None]
    return jnp.moveaxis(out, 3, 1).reshape(b, t, n, -1).astype(q.dtype)


def _rows(
    pool: Float[Array, "P K p H"], pages: Int[Array, "B W"], there: Bool[Array, "B S"]
) -> Float[Array, "B S K H"]:
    """Rows of pages in order, 0 for those that are not there."""
    held = jnp.moveaxis(pool[pages], 2, 3).reshape(*there.shape, pool.shape[1], pool.shape[3])
    return jnp.where(there[:, :, None, None], held, 0)


def _summed(scores: Float[Array, "B K g T S"], v: Float[Array, "B S K h"], sums: _Sums) -> _Sums:
    """The sums with more keys."""
    most, total, weighted = sums
    precision = jax.lax.Precision.HIGHEST if v.dtype == scores.dtype else None
    higher = jnp.maximum(most, jnp.max(scores, axis=-1))
    finite = jnp.where(higher == -jnp.inf, 0, higher)
    weights, before = jnp.exp(scores - finite[..., None]), jnp.exp(most - finite)
    added = jnp.einsum(
        "bkgts,bskh->bkgth", weights.astype(v.dtype), v, precision=precision, preferred_element_type=scores.dtype
    )
    return higher, total * before + jnp.sum(weights, axis=-1), weighted * before[..., None] + added
