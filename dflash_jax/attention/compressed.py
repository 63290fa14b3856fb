"""Attention over pages to a window of tokens and to compressed rows: what DeepSeek V4 is called with.

Source: transformers' DeepseekV4Attention and its compressors. A compressed row stands for one stretch of tokens that follow one
another from the text's beginning on; where stretches overlap, it is made of the stretch before as well. A query sees the last
tokens, and the stretches that end before or at it, or the best of these by an indexer's scores.

Pages keep what a token gives to compressed rows beside its key, as long as a row to come may need it. A compressed row is made of
what the pages have when the last token of its stretch is written, and lies in the page of that token. So nothing is summed up from
call to call: a rejected token leaves its stretch by being written over, and a page that several sequences begin with holds the
stretches that end in it, which are the same for all of them.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from dflash_kernels import index_select, latent_write
from dflash_kernels.attention.index.reference import head_scores
from jaxtyping import Array, Float, Int

from dflash_jax.cache.groups import of_layer
from dflash_jax.cache.pages import Pages
from dflash_jax.models.layers import ChoiceRows

# Queries that attend at once, and bytes of an indexer's products of theirs: what is gathered and scored for them is held.
MOST_ROWS, MOST_PRODUCTS = 512, 1 << 30


def rows_at_once(heads: int, stretches: int) -> int:
    """Queries that attend at once where an indexer of so many heads scores so many stretches for each."""
    return max(1, min(MOST_ROWS, MOST_PRODUCTS // (4 * max(heads * stretches, 1))))


def compressed_attention(
    paged: Any, layer: Any, q: Array, row: Array, choice: ChoiceRows | None, cache: Pages
) -> tuple[Array, Pages]:
    """See `CompressedAttend`: attention over pages, which get the new tokens' rows and what is made of them first.

    Args:
      paged: an `attention.paged.PagedAttend`.
    """
    place, pool = layer.index, cache.k[layer.index]
    rows = row.reshape(-1, row.shape[-1]).astype(pool.dtype)
    tokens = _Rows(latent_write(pool, rows, of_layer(paged.slots, place)), of_layer(paged.page_table, place))
    cache, entries = cache.with_layer(place, k=tokens.pool), None
    if layer.rate:
        entries = _Rows(cache.k[layer.place], of_layer(paged.page_table, layer.place))
        entries = _with_entries(paged, layer, tokens, entries, q.shape[1], q.shape[3])
        cache = cache.with_layer(layer.place, k=entries.pool)
    starts = paged.seq_lens - paged.q_lens

    def attend(of: tuple[Any, ...]) -> Array:
        return _attend(layer, tokens.pool, None if entries is None else entries.pool, *of)

    each = q, choice, starts, paged.q_lens, tokens.table, None if entries is None else entries.table
    stretches = 0 if choice is None else tokens.table.shape[1] * cache.page_size // layer.rate
    together = max(1, rows_at_once(layer.config.index_heads, stretches) // q.shape[1])
    return jax.vmap(attend)(each) if q.shape[0] <= together else jax.lax.map(attend, each, batch_size=together), cache


class _Rows(NamedTuple):
    """A pool of rows `[P, 1, rows of a page, W]`, and the page table of its sequences or of one of them."""

    pool: Array
    table: Int[Array, "*B M"]


def _gathered(
    pool: Float[Array, "P 1 p W"], pages: Int[Array, "..."], places: Int[Array, "..."], columns: tuple[int, int]
) -> Float[Array, "... w"]:
    """Some columns of rows, by their pages and their places in these, which are clipped."""
    flat, (first, end) = pool.reshape(-1, pool.shape[-1]), columns
    slots = jnp.maximum(pages, 0) * pool.shape[2] + places
    numbers = jax.lax.GatherDimensionNumbers(
        offset_dims=(slots.ndim,), collapsed_slice_dims=(0,), start_index_map=(0, 1)
    )
    where = jnp.stack([slots, jnp.full_like(slots, first)], axis=-1)
    return jax.lax.gather(flat, where, numbers, (1, end - first), mode="clip")


def _token_rows(
    pool: Array, table: Int[Array, "M"], positions: Int[Array, "..."], columns: tuple[int, int]
) -> Float[Array, "... w"]:
    """Rows of one sequence's tokens; those of positions outside of the table may be anything."""
    size = pool.shape[2]
    pages = table[jnp.clip(positions // size, 0, table.shape[0] - 1)]
    return _gathered(pool, pages, positions % size, columns)


def _entry_slots(
    table: Int[Array, "M"], numbers: Int[Array, "..."], rate: int, page_size: int
) -> tuple[Int[Array, "..."], Int[Array, "..."]]:
    """Pages of compressed rows, counted from the text's beginning, and places in these."""
    ends = numbers * rate + rate - 1
    return table[jnp.clip(ends // page_size, 0, table.shape[0] - 1)], ends % page_size // rate


def _with_entries(paged: Any, layer: Any, tokens: _Rows, entries: _Rows, count: int, width: int) -> _Rows:
    """The compressed rows with those of stretches that end among the call's `count` tokens."""
    rate, size, ends = layer.rate, tokens.pool.shape[2], paged.seq_lens
    numbers = ((ends - paged.q_lens) // rate)[:, None] + jnp.arange(-1, -(-count // rate))
    positions = numbers[..., None] * rate + jnp.arange(rate)
    columns = width, tokens.pool.shape[3]
    held = jax.vmap(lambda table, places: _token_rows(tokens.pool, table, places, columns))(tokens.table, positions)
    before, own, numbers = held[:, :-1], held[:, 1:], numbers[:, 1:]
    made = layer.entries(before, own, numbers * rate).astype(entries.pool.dtype)
    pages, places = jax.vmap(lambda table, own: _entry_slots(table, own, rate, size))(entries.table, numbers)
    live = (numbers + 1) * rate <= ends[:, None]
    slots = jnp.where(live & (paged.q_lens > 0)[:, None], pages * entries.pool.shape[2] + places, -1)
    flat = entries.pool.reshape(-1, entries.pool.shape[3])
    flat = flat.at[slots.reshape(-1)].set(made.reshape(-1, made.shape[-1]), mode="drop", wrap_negative_indices=False)
    return entries._replace(pool=flat.reshape(entries.pool.shape))


def _attend(
    layer: Any,
    pool: Float[Array, "P 1 p W"],
    entry_pool: Float[Array, "P 1 e V"] | None,
    q: Float[Array, "T N H"],
    choice: ChoiceRows | None,
    start: Int[Array, ""],
    count: Int[Array, ""],
    table: Int[Array, "M"],
    entry_table: Int[Array, "M"] | None,
) -> Float[Array, "T N H"]:
    """One sequence's queries, the first of them at `start`; those from `count` on give anything finite."""
    tokens, width, window = q.shape[0], q.shape[2], layer.window
    positions = start + jnp.arange(tokens)
    span = start - (window - 1) + jnp.arange(tokens + window - 1)
    ahead = span - positions[:, None]
    seen = (span >= 0) & (span < start + count) & (ahead <= 0) & (ahead > -window)
    keys = _token_rows(pool, table, span, (0, width))
    parts = [(keys, seen)]
    if entry_pool is not None and entry_table is not None:
        rate, size = layer.rate, pool.shape[2]
        numbers = jnp.arange(entry_table.shape[0] * size // rate)
        where = _entry_slots(entry_table, numbers, rate, size)
        open_ = (numbers < (positions[:, None] + 1) // rate) & (numbers < (start + count) // rate)
        most = layer.config.index_topk
        if choice is None or len(numbers) <= most:
            parts.append((_gathered(entry_pool, *where, (0, width)), open_))
        else:
            index_keys = _gathered(entry_pool, *where, (width, entry_pool.shape[3]))
            scores = head_scores(choice.q[None], index_keys[None], choice.weights[None])[0]
            best = index_select(jnp.where(open_, scores, -jnp.inf), count=most, implementation="xla")
            where = _entry_slots(entry_table, jnp.maximum(best, 0), rate, size)
            parts.append((_gathered(entry_pool, *where, (0, width)), best >= 0))
    return _softmax(q, parts, layer.scale, layer.sinks[...])


def _softmax(
    q: Float[Array, "T N H"], parts: list[tuple[Array, Array]], scale: float, sinks: Float[Array, "N"]
) -> Float[Array, "T N H"]:
    """Attention to keys that are values, `[S,H]` of all queries or `[T,S,H]` of each, with a softmax in at least float32."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    options: Any = {
        "precision": jax.lax.Precision.HIGHEST if q.dtype == wide else None,
        "preferred_element_type": wide,
    }
    # What no query sees may be anything, and 0 times that is not 0.
    clean = [
        jnp.where((seen if keys.ndim == 3 else seen.any(axis=0))[..., None], keys, 0).astype(q.dtype)
        for keys, seen in parts
    ]
    letters = ["tsh" if keys.ndim == 3 else "sh" for keys in clean]
    scores = [
        jnp.where(seen[:, None], jnp.einsum(f"tnh,{each}->tns", q, keys, **options) * scale, -jnp.inf)
        for each, keys, (_, seen) in zip(letters, clean, parts, strict=True)
    ]
    column = jnp.broadcast_to(sinks.astype(wide)[:, None], (*q.shape[:2], 1))
    weights = jax.nn.softmax(jnp.concatenate([*scores, column], axis=-1), axis=-1).astype(q.dtype)
    out, first = jnp.zeros(q.shape, wide), 0
    for each, keys in zip(letters, clean, strict=True):
        own = weights[..., first : first + keys.shape[-2]]
        out, first = out + jnp.einsum(f"tns,{each}->tnh", own, keys, **options), first + keys.shape[-2]
    return out.astype(q.dtype)
