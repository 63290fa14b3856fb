"""Context parallelism: the tokens of every sequence spread over the pages of several ranks. The parts that are arithmetic.

With D ranks and an interleave of I, the token at position s lies on rank `s // I % D`, there at `s // (I D) I + s % I`. Ranks
attend to what they hold, for all heads, and the results are joined through their lse. Nothing here communicates: what all ranks
gathered comes in as one array with a leading axis of ranks.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dflash_jax.attention.standalone.mla_metadata import ContextChunks


def local_lens(
    lens: Int[Array, "..."] | Int[np.ndarray, "..."], rank: int | Array, *, ranks: int, interleave: int
) -> Int[Array, "..."]:
    """How many of the first `lens` tokens lie on `rank`."""
    turn = ranks * interleave
    rest = lens % turn
    return jnp.asarray(lens // turn * interleave + jnp.clip(rest - rank * interleave, 0, interleave))


def local_slot(
    positions: Int[np.ndarray, "..."], *, ranks: int, interleave: int
) -> tuple[Int[np.ndarray, "..."], Int[np.ndarray, "..."]]:
    """Rank of each position, and its place among that rank's tokens."""
    turn = ranks * interleave
    return positions // interleave % ranks, positions // turn * interleave + positions % interleave


def visible_on_rank(
    seq_lens: Int[Array, "B"], q_lens: Int[Array, "B"], t: int, rank: int | Array, *, ranks: int, interleave: int
) -> Int[Array, "B t"]:
    """How many of a rank's tokens each of t query rows may see, the last `q_lens` of `seq_lens` tokens being the queries.

    A causal query at global position s sees the rank's share of s + 1 tokens: with several queries this is no longer the local
    length less a constant, which is why the rank's mask is made from global positions. Rows past `q_lens` see nothing.
    """
    rows = jnp.arange(t)
    seen = jnp.maximum((seq_lens - q_lens)[:, None] + rows + 1, 0)
    return jnp.where(rows < q_lens[:, None], local_lens(seen, rank, ranks=ranks, interleave=interleave), 0)


def combine_ranks(
    outs: Float[Array, "D *rows H"], lses: Float[Array, "D *rows"]
) -> tuple[Float[Array, "*rows H"], Float[Array, "*rows"]]:
    """Attention over all ranks' keys from each rank's normalised output and natural-log lse.

    A rank without a visible key has lse -inf, +inf or NaN and may hold anything; rows without one on any rank give 0 and -inf.
    """
    wide = jnp.promote_types(outs.dtype, jnp.float32)
    lses = jnp.where(jnp.isnan(lses) | (lses == jnp.inf), -jnp.inf, lses.astype(wide))
    top = jnp.max(lses, axis=0)
    top = jnp.where(top == -jnp.inf, 0.0, top)
    weights = jnp.exp(lses - top)
    total = jnp.sum(weights, axis=0)
    share = (weights / jnp.where(total > 0, total, 1.0))[..., None]
    # Chosen, not multiplied: 0 * NaN is NaN.
    out = jnp.sum(jnp.where(share > 0, outs.astype(wide) * share, 0.0), axis=0)
    return out.astype(outs.dtype), top + jnp.log(total)


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
