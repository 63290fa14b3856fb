"""Prefill of a packed batch: requests one after the other without padding, their contexts through the plan of `mla_metadata`."""

from collections.abc import Iterable, Iterator

import jax.numpy as jnp
import numpy as np
from dflash_kernels import latent_gather, merge_states
from jaxtyping import Array, Float, Int, Shaped

from dflash_jax.attention.mla import LatentLayer, expanded_attention
from dflash_jax.attention.standalone.mla_metadata import ContextChunks


def paged_chunks(
    chunks: ContextChunks, latent_pages: Shaped[Array, "pages 1 p C"], page_table: Int[Array, "n W"]
) -> Iterator[tuple[Shaped[Array, "rows C"], Int[np.ndarray, "rows"]]]:
    """Latent rows of each chunk, as the pool keeps them, and the request each belongs to, -1 for rows that belong to none."""
    for i in range(len(chunks.totals)):
        starts, lens = jnp.asarray(chunks.starts[i]), jnp.asarray(chunks.lens[i])
        owner = np.where(np.arange(chunks.token_to_seq.shape[1]) < chunks.totals[i], chunks.token_to_seq[i], -1)
        yield latent_gather(latent_pages, page_table, starts, lens, rows=len(owner)), owner


def packed_prefill(
    layer: LatentLayer,
    q_nope: Float[Array, "T N P"],
    q_pe: Float[Array, "T N r"],
    latents: Float[Array, "T C"],
    query_lens: Int[np.ndarray, "n"],
    context: Iterable[tuple[Array, Int[np.ndarray, "rows"]]] = (),
    tokens_with_context: int = 0,
) -> Float[Array, "T N V"]:
    """New tokens of all requests over themselves and their contexts, expanded and joined chunk by chunk.

    Args:
      q_nope, q_pe, latents: of the new tokens, request after request; rows past the sum of `query_lens` are padding, give 0 and may
        hold anything.
      context: latent rows and their requests, one pair for each chunk, in any order within a request: the rotated part of a row
        knows its position, and every new token sees the whole context.
      tokens_with_context: the first tokens, which alone look at the context.

    The two defaults are for a batch without context, for which there is no plan.
    """
    tokens = q_nope.shape[0]
    owner = np.full(tokens, -1)
    owner[: sum(query_lens)] = np.repeat(np.arange(len(query_lens)), query_lens)
    live = jnp.asarray(owner >= 0)[:, None]
    itself = (owner == owner[:, None]) & (owner >= 0)
    if layer.causal:
        itself &= np.tri(tokens, dtype=bool)
    latents = jnp.where(live, latents, jnp.zeros((), latents.dtype))
    out, lse = expanded_attention(layer, q_nope[None], q_pe[None], latents[None], jnp.asarray(itself)[None])

    first = slice(None), slice(tokens_with_context)
    state = jnp.zeros_like(out[first]), jnp.full_like(lse[first], -jnp.inf)
    for rows, rows_owner in context:
        sees = jnp.asarray((rows_owner >= 0) & (owner[:tokens_with_context, None] == rows_owner))
        queries = q_nope[None, :tokens_with_context], q_pe[None, :tokens_with_context]
        state = merge_states(*state, *expanded_attention(layer, *queries, rows[None], sees[None]))
    merged, _ = merge_states(*state, out[first], lse[first])
    return jnp.concatenate([merged, out[:, tokens_with_context:]], axis=1)[0].astype(q_nope.dtype)
