"""Attention of sequences that begin with the same pages: the shared keys are read once for all queries, the others by their own.

    shared = shared_pages(page_table, context_lens, page_size)                  # on the host, where the tables are made
    if cascade_pays(shared * page_size, q_lens, heads=..., kv_heads=..., multiprocessors=132):
        out = cascade_attention(q, k_pages, v_pages, page_table, seq_lens, shared=shared, q_lens=q_lens)

The two parts are joined through their lse. A learned sink belongs to the denominator once, so only one part gets it. Windows and
ALiBi count from a query's own position, which the shared part, one sequence for all queries, does not have: they are not taken.
The engine does not use this: it has no programs whose shape follows from what its requests happen to share.
"""

from typing import cast

import jax.numpy as jnp
import numpy as np
from dflash_kernels import merge_states, paged_attention, ragged_paged_attention
from jaxtyping import Array, Float, Int, Int8

# Below these a second pass and a merge cost more than they save.
LEAST_KEYS, LEAST_SEQUENCES = 256, 8
_TILE = 128  # rows and keys of the model's tiles


def shared_pages(page_table: Int[np.ndarray, "B W"], context_lens: Int[np.ndarray, "B"], page_size: int) -> int:
    """How many pages all sequences have in common at their beginning, whole and before any of their queries.

    Args:
      page_table: the rows of sequences that have queries; rows that pad a batch are the caller's to leave out.
      context_lens: tokens of each sequence before its queries.
    """
    whole = int(np.min(context_lens, initial=page_table.shape[1] * page_size)) // page_size
    same = (page_table[:, :whole] == page_table[:1, :whole]).all(axis=0)
    return int(np.argmin(same)) if not same.all() else whole


def cascade_pays(
    shared: int,
    q_lens: Int[np.ndarray, "B"],
    *,
    heads: int,
    kv_heads: int,
    multiprocessors: int,
    positional: bool = False,
    ranks: int = 1,
) -> bool:
    """Whether to read `shared` common keys apart, by a count of tiles and of the rounds in which they fit a GPU.

    The rule of vLLM's FlashAttention backend (`use_cascade_attention`), which counts 128 by 128 tiles; its constants are not
    measured here.

    Args:
      q_lens: queries of each sequence.
      positional: the layer has a window or ALiBi, which `cascade_attention` does not take.
      ranks: over which pages are spread; only pages of one rank are read so.
    """
    if shared < LEAST_KEYS or positional or len(q_lens) < LEAST_SEQUENCES or ranks > 1:
        return False
    group = heads // kv_heads
    if group == 1 or (np.asarray(q_lens) != 1).any():
        return True  # without the shared part every block of queries reads all keys by itself
    keys = -(-shared // _TILE)
    together = -(-heads * -(-len(q_lens) // _TILE) // multiprocessors) * keys
    apart = -(-len(q_lens) * kv_heads * -(-group // _TILE) * keys // multiprocessors)
    return together < apart


def cascade_attention(
    q: Float[Array, "B T N H"],
    k_pages: Float[Array, "P K p H"] | Int8[Array, "P K p H"],
    v_pages: Float[Array, "P K p H"] | Int8[Array, "P K p H"],
    page_table: Int[Array, "B W"],
    seq_lens: Int[Array, "B"],
    *,
    shared: int,
    q_lens: Int[Array, "B"] | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "N"] | None = None,
    k_scale: float | Float[Array, "..."] | None = None,
    v_scale: float | Float[Array, "..."] | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> Float[Array, "B T N H"] | tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Causal `paged_attention` of sequences whose first `shared` pages are the same.

    Args:
      shared: as `shared_pages` counts them, at least 1. Part of the program: another number compiles another one.
      seq_lens: 0 for an idle row, whose table may hold anything; otherwise `shared` whole pages and the row's queries at least.
      others: as `paged_attention`.

    Raises:
      ValueError: `shared` leaves the queries' own tokens no column of the table, or shapes do not agree.
      NoImplementationError: no implementation takes these arguments.
    """
    b, t, _, _ = q.shape
    prefix = shared * k_pages.shape[2]
    if not 0 < shared < page_table.shape[1]:
        raise ValueError(
            f"{shared} shared pages of a table with {page_table.shape[1]} columns: there must be one at least, and one for the "
            "queries' own tokens"
        )
    q_lens = jnp.full((b,), t, jnp.int32) if q_lens is None else q_lens
    options = {"soft_cap": soft_cap, "k_scale": k_scale, "v_scale": v_scale, "scale": scale, "return_lse": True}
    # Of the longest row: an idle one's table holds anything.
    common = page_table[jnp.argmax(seq_lens)][None, :shared]
    length = jnp.where(jnp.max(seq_lens) > 0, prefix, 0)[None].astype(jnp.int32)
    bounds = jnp.array([0, b * t], jnp.int32)
    first = ragged_paged_attention(
        q.reshape(b * t, *q.shape[2:]), k_pages, v_pages, bounds, common, length, causal=False, **options
    )
    first_out, first_lse = (cast(Array, part).reshape(b, t, *part.shape[1:]) for part in first)
    live = (jnp.arange(t) < q_lens[:, None]) & (seq_lens > 0)[:, None]
    first_lse = jnp.where(live[:, :, None], first_lse, -jnp.inf)
    rest = paged_attention(
        q, k_pages, v_pages, page_table[:, shared:], jnp.maximum(seq_lens - prefix, 0), q_lens=q_lens, sinks=sinks, **options
    )  # fmt: skip
    out, lse = merge_states(first_out, first_lse, *rest)
    return (out, lse) if return_lse else out
