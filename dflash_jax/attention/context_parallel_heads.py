"""Decode context parallelism where a model has fewer key heads than there are ranks: those that have the same one spread its pages.

Each has the queries of all of them attend to what lies in its own parts of the pages before the new tokens, and gives each rank
what that one's heads found. Every one of them has the new tokens' keys, so these are attended to without a collective, and no rank
has to know which of its tokens a query of a verified block may see. Where tokens lie, and how parts are joined, is
`attention.context_parallel`'s.
"""

from typing import cast

import jax
import jax.numpy as jnp
from dflash_kernels import merge_states, paged_attention
from jaxtyping import Array, Float, Int

from dflash_jax.attention.context_parallel import combine_ranks, given_back, local_lens, neighbours
from dflash_jax.attention.mla_prefill import attention_and_lse
from dflash_jax.parallel.collectives import own_rank
from dflash_jax.parallel.ranks import AXIS


def heads_over_ranks(
    q: Float[Array, "B T n H"],
    k: Float[Array, "B T 1 H"],
    v: Float[Array, "B T 1 V"],
    k_pages: Float[Array, "P 1 p H"],
    v_pages: Float[Array, "P 1 p V"],
    page_table: Int[Array, "B W"],
    seq_lens: Int[Array, "B"],
    q_lens: Int[Array, "B"],
    ranks: int,
    *,
    interleave: int,
    scale: float,
) -> Float[Array, "B T n V"]:
    """Causal attention of a rank's n heads to its one key head, whose pages lie on `ranks` neighbours, a part of each page on each.

    Two collectives: of queries, and of what they found with their lse.

    Args:
      q, k, v: of the new tokens, as attention takes them.
      k_pages, v_pages: the rank's parts, which hold the new tokens that are theirs.
      page_table: of pages with `ranks * p` tokens.
      seq_lens, q_lens: of whole sequences; rows past `q_lens` give 0.
      interleave: tokens on one of them before the next one's begin.
    """
    queries = jax.lax.all_gather(q, AXIS, axis=2, tiled=True, axis_index_groups=neighbours(ranks))
    held = local_lens(seq_lens - q_lens, own_rank() % ranks, ranks=ranks, interleave=interleave)
    found = paged_attention(
        queries, k_pages, v_pages, page_table, held, q_lens=q_lens, causal=False, scale=scale, return_lse=True
    )
    context = combine_ranks(*given_back(*cast(tuple[Array, Array], found), ranks))
    keys, values = (jnp.broadcast_to(x, (*q.shape[:3], x.shape[-1])) for x in (k, v))
    new = attention_and_lse(q, q_lens, scale, keys, values, q_lens, causal=True)
    out, _ = merge_states(*context, *new)
    live = jnp.arange(q.shape[1]) < q_lens[:, None]
    return jnp.where(live[:, :, None, None], out, jnp.zeros((), out.dtype)).astype(q.dtype)
