"""Reordering of a context gathered from several ranks' pages, for packed requests.

`dflash_jax.attention.context_parallel` says where a token lies. Nothing here communicates: what all ranks gathered comes in as one
array with a leading axis of ranks.
"""

import numpy as np
from jaxtyping import Array, Float, Int

from dflash_jax.attention.context_parallel import local_lens
from dflash_jax.attention.standalone.mla_metadata import ContextChunks


def padded_local_lens(chunks: ContextChunks, index: int, *, ranks: int, interleave: int) -> Int[np.ndarray, "n"]:
    """Rows each request takes of every rank's share of chunk `index`: the most that any rank holds, the same for all."""
    turn = ranks * interleave
    return -(-chunks.lens[index] // turn) * interleave


def reorder_gathered(
    gathered: Float[Array, "D rows C"], chunks: ContextChunks, index: int, *, interleave: int
) -> tuple[Float[Array, "tokens C"], Int[np.ndarray, "tokens"]]:
    """Rows of all ranks for chunk `index`, request after request, and the request of each.

    Within a request they come rank after rank, not in order of position: enough for context, which every new token sees whole and
    whose rotated part knows its position.

    Args:
      gathered: each rank's rows, requests one after the other at the width `padded_local_lens` gives them.
      chunks: planned with `align` a multiple of D I, so that a chunk begins at the same token on every rank's side.

    Raises:
      ValueError: the chunk size is no multiple of D I, or the rows are fewer than the plan says.
    """
    ranks = gathered.shape[0]
    if chunks.chunk_size % (ranks * interleave):
        raise ValueError(
            f"chunks of {chunks.chunk_size} tokens do not begin at the same token for {ranks} ranks with interleave {interleave}: "
            f"plan with align={ranks * interleave}"
        )
    widths = padded_local_lens(chunks, index, ranks=ranks, interleave=interleave)
    if gathered.shape[1] < widths.sum():
        raise ValueError(f"{gathered.shape[1]} rows of each rank were gathered, the plan has {widths.sum()}")
    begins = np.cumsum(widths) - widths
    places, owners = [], []
    for request, (begin, length) in enumerate(zip(begins, chunks.lens[index], strict=True)):
        for rank in range(ranks):
            count = int(local_lens(np.array(length), rank, ranks=ranks, interleave=interleave))
            places.append(rank * gathered.shape[1] + begin + np.arange(count))
            owners.append(np.full(count, request))
    flat = gathered.reshape(-1, gathered.shape[2])
    return flat[np.concatenate(places).astype(np.int32)], np.concatenate(owners)
