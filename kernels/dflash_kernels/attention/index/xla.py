"""The scores over long contexts in XLA's operations: pages a few at a time, as a number for each head and key takes much memory."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_kernels.attention.index.reference import index_scores_reference

WORKSPACE = 128 * 2**20  # bytes of products that are alive at a time


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
