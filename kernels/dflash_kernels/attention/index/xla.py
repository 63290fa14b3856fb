"""Scores and choice over long contexts in XLA's operations.

Pages are scored a few at a time, as a number for each head and key takes much memory. The choice is made without sorting: two bits
of the least chosen score at a time are found by counting, so that all of it are fusions, which a CUDA graph may hold.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from dflash_kernels.attention.index.reference import index_scores_reference, slots_of

WORKSPACE = 128 * 2**20  # bytes of products that are alive at a time
_DIGIT = (
    2  # bits that one pass over the scores finds; where what is counted is written first, 4 take three times the memory
)


def index_scores_xla(
    q: Float[Array, "B T I E"],
    weights: Float[Array, "B T I"],
    index_pages: Float[Array, "P 1 p E"],
    page_table: Int[Array, "B W"],
    seq_lens: Int[Array, "B"],
    q_lens: Int[Array, "B"],
    *,
    index_scale: Float[Array, "P 1 p"] | None,
    workspace: int = WORKSPACE,
) -> Float[Array, "B T S"]:
    """See `index_scores`; no page after those of the longest sequence is read."""
    (b, t, heads), p, width = weights.shape, index_pages.shape[2], page_table.shape[1]
    wide = jnp.promote_types(weights.dtype, jnp.float32)
    columns = min(max(workspace // (b * t * heads * p * wide.itemsize), 1), width)
    if columns == width:
        return index_scores_reference(q, weights, index_pages, page_table, seq_lens, q_lens, index_scale=index_scale)
    parts = -(-width // columns)
    table = jnp.pad(page_table, ((0, 0), (0, parts * columns - width)))

    def add(index: Array, scores: Array) -> Array:
        named = jax.lax.dynamic_slice_in_dim(table, index * columns, columns, axis=1)
        part = index_scores_reference(
            q, weights, index_pages, named, seq_lens, q_lens, index_scale=index_scale, first=index * columns * p
        )
        return jax.lax.dynamic_update_slice_in_dim(scores, part, index * columns * p, axis=2)

    used = (jnp.max(seq_lens) + columns * p - 1) // (columns * p)
    scores = jnp.full((b, t, parts * columns * p), -jnp.inf, wide)
    return jax.lax.fori_loop(0, jnp.minimum(used, parts), add, scores)[..., : width * p]


def index_select_xla(
    scores: Float[Array, "*rows S"],
    *,
    count: int,
    page_table: Int[Array, "B W"] | None = None,
    page_size: int | None = None,
) -> Int[Array, "*rows count"]:
    """See `index_select`; float32 scores."""
    if scores.dtype != jnp.float32:
        raise NotImplementedError(f"takes float32 scores, not {scores.dtype}")
    keys, taken = scores.shape[-1], min(count, scores.shape[-1])
    order = _as_integers(scores)
    # The largest integer that at least so many are not below: the last one chosen.
    least, digits = jnp.zeros(scores.shape[:-1], jnp.uint32), jnp.arange(1, 1 << _DIGIT, dtype=jnp.uint32)
    for shift in range(32 - _DIGIT, -1, -_DIGIT):
        tried = least[..., None] | (digits << shift)
        enough = jnp.sum(order[..., None, :] >= tried[..., None], axis=-1, dtype=jnp.int32) >= taken
        least |= jnp.sum(enough, axis=-1, dtype=jnp.uint32) << shift
    above, ties = order > least[..., None], order == least[..., None]
    missing = taken - jnp.sum(above, axis=-1, keepdims=True, dtype=jnp.int32)
    chosen = above | (ties & (jnp.cumsum(ties, axis=-1, dtype=jnp.int32) <= missing))
    chosen &= scores > -jnp.inf
    place = jnp.where(chosen, jnp.cumsum(chosen, axis=-1, dtype=jnp.int32) - 1, count).reshape(-1, keys)
    found = jnp.full((place.shape[0], count), -1, jnp.int32)
    position = jnp.broadcast_to(jnp.arange(keys, dtype=jnp.int32), place.shape)
    found = found.at[jnp.arange(place.shape[0])[:, None], place].set(position, mode="drop")
    return slots_of(found.reshape(*scores.shape[:-1], count), page_table, page_size)


def _as_integers(scores: Float[Array, "*s"]) -> UInt32[Array, "*s"]:
    """Integers in the order of the scores, which are no NaN; -0 is 0."""
    bits = jax.lax.bitcast_convert_type(scores, jnp.uint32)
    # Of bits, as some devices take the smallest numbers for zeros when they compare.
    bits = jnp.where(bits == jnp.uint32(1 << 31), jnp.uint32(0), bits)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))
