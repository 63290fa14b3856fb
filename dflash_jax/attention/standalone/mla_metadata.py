"""The host's plan of a packed prefill: which context tokens of which request are expanded in which chunk. numpy only.

Requests of a batch are laid one after the other without padding. Their contexts are read through a workspace of fixed size: chunk i
holds positions `i C .. (i + 1) C` of every request that has so many, so that memory depends on neither the longest context nor the
number of requests.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from dflash_jax.errors import CapacityError


@dataclass(frozen=True)
class ContextChunks:
    """Chunks of the contexts of n requests.

    Attributes:
      chunk_size: tokens of one request in one chunk (C).
      starts: `[chunks, n]` int32, first position of each request in each chunk.
      lens: `[chunks, n]` int32, how many from there; 0 for a request whose context has ended, or that has none.
      cu_seq_lens: `[chunks, n + 1]` int32, where each request begins in a chunk's workspace.
      totals: `[chunks]` int32, tokens of each chunk.
      max_seq_lens: `[chunks]` int32, the longest request of each chunk.
      token_to_seq: `[chunks, max(totals)]` int32, the request of each workspace row; 0 past a chunk's total.
      tokens_with_context: new tokens up to the end of the last request that has context. Those after it attend to nothing but
        themselves; those before it that have no context meet empty chunks, so requests may come in any order.
    """

    chunk_size: int
    starts: Int[np.ndarray, "chunks n"]
    lens: Int[np.ndarray, "chunks n"]
    cu_seq_lens: Int[np.ndarray, "chunks n+1"]
    totals: Int[np.ndarray, "chunks"]
    max_seq_lens: Int[np.ndarray, "chunks"]
    token_to_seq: Int[np.ndarray, "chunks rows"]
    tokens_with_context: int


def workspace_tokens(*, max_model_len: int, max_batch: int, page_size: int) -> int:
    """Rows of the workspace: a few full contexts, at most 65536, but a page for each request whatever that takes."""
    wanted = max(8 * max_model_len, 4 * max_batch * page_size)
    return max(min(wanted, 65536), max_batch * page_size)


def plan_context(
    query_lens: Int[np.ndarray, "n"],
    seq_lens: Int[np.ndarray, "n"],
    *,
    workspace: int,
    page_size: int,
    align: int = 1,
) -> ContextChunks | None:
    """Chunks for requests with `query_lens` new tokens at the end of `seq_lens` tokens; None where no request has context.

    Args:
      workspace: rows there are for one chunk.
      page_size: chunks begin at page boundaries.
      align: chunks also begin at multiples of this; the tokens that take one turn over all ranks when pages are spread over ranks.

    Raises:
      ValueError: a request has fewer tokens than new ones, or a negative number of new ones.
      CapacityError: the workspace is too small for one page (or `align`) of each request that has context.
    """
    query_lens, seq_lens = np.asarray(query_lens, np.int64), np.asarray(seq_lens, np.int64)
    context = seq_lens - query_lens
    if query_lens.shape != seq_lens.shape or (query_lens < 0).any() or (context < 0).any():
        raise ValueError(f"query_lens {query_lens.tolist()} do not fit seq_lens {seq_lens.tolist()}")
    longest = int(context.max(initial=0))
    if longest == 0:
        return None
    with_context = np.flatnonzero(context > 0)
    unit = int(np.lcm(page_size, align))
    chunk_size = workspace // len(with_context) // unit * unit
    if chunk_size == 0:
        raise CapacityError(
            f"a workspace of {workspace} tokens holds no {unit} for each of {len(with_context)} requests with context: make it at "
            f"least {unit * len(with_context)} tokens, or prefill fewer requests together"
        )
    starts = np.arange(0, longest, chunk_size)[:, None] + np.zeros_like(context)
    lens = np.clip(context - starts, 0, chunk_size)
    cu_seq_lens = np.concatenate([np.zeros((len(lens), 1), np.int64), np.cumsum(lens, axis=1)], axis=1)
    totals = cu_seq_lens[:, -1]
    token_to_seq = np.zeros((len(lens), totals.max()), np.int32)
    for row, counts in zip(token_to_seq, lens, strict=True):
        row[: counts.sum()] = np.repeat(np.arange(len(counts)), counts)
    return ContextChunks(
        chunk_size=chunk_size, starts=starts.astype(np.int32), lens=lens.astype(np.int32),
        cu_seq_lens=cu_seq_lens.astype(np.int32), totals=totals.astype(np.int32),
        max_seq_lens=lens.max(axis=1).astype(np.int32), token_to_seq=token_to_seq,
        tokens_with_context=int(query_lens[: with_context[-1] + 1].sum()),
    )  # fmt: skip
