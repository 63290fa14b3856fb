"""Attention of sequences of which some begin with the same pages: shared keys are read once for all queries.

    parts = split_tables(page_table, shared, page_size)          # once for all layers
    out = cascade_attention(q, k_pages, v_pages, parts, seq_lens, q_lens=q_lens)

How many pages are shared, and by whom, is data: one program serves every beginning. The two parts are joined through their lse. A
learned sink belongs to the denominator once, so only one part gets it. Windows and ALiBi count from a query's own position, which
the shared part, one sequence for all queries, does not have: they are not taken.
"""

from typing import Any, NamedTuple, cast

import jax.numpy as jnp
from dflash_kernels import (
    NoImplementationError,
    PagedSchedule,
    merge_states,
    paged_attention,
    ragged_paged_attention,
)
from jaxtyping import Array, Bool, Float, Int, Int8

from dflash_jax.attention.prefill import fills


class SharedPages(NamedTuple):
    """Page tables taken apart: what sequences share, and what each has for itself.

    Attributes:
      common: the shared pages first; what stands behind them is not looked at.
      length: tokens in them; 0 where nobody shares.
      rest: each sequence's own pages; those of a sequence that shares nothing are all of its.
      skipped: tokens of each that are not in `rest`.
      sees: whose queries see what is shared.
    """

    common: Int[Array, "1 C"]
    length: Int[Array, "1"]
    rest: Int[Array, "B W"]
    skipped: Int[Array, "B"]
    sees: Bool[Array, "B"]


def split_tables(page_table: Int[Array, "B W"], shared: Int[Array, "B"], page_size: int) -> SharedPages:
    """Tables for `cascade_attention`.

    Args:
      shared: pages that a sequence begins with and shares, the same number for all that do, 0 for the others.
    """
    width = page_table.shape[1]
    shared = shared.astype(jnp.int32)
    # Columns past a sequence's last page are not looked at, whatever they name.
    columns = jnp.minimum(jnp.arange(width) + shared[:, None], width - 1)
    rest = jnp.take_along_axis(page_table, columns, axis=1)
    tokens = shared * page_size
    return SharedPages(page_table[jnp.argmax(shared)][None], tokens.max()[None], rest, tokens, shared > 0)


def cascade_attention(
    q: Float[Array, "B T N H"],
    k_pages: Float[Array, "P K p H"] | Int8[Array, "P K p H"],
    v_pages: Float[Array, "P K p V"] | Int8[Array, "P K p V"],
    parts: SharedPages,
    seq_lens: Int[Array, "B"],
    *,
    q_lens: Int[Array, "B"] | None = None,
    causal: bool = True,
    soft_cap: float | None = None,
    sinks: Float[Array, "N"] | None = None,
    k_scale: float | Float[Array, "..."] | None = None,
    v_scale: float | Float[Array, "..."] | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    schedule: PagedSchedule | None = None,
) -> Float[Array, "B T N V"] | tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """`paged_attention` of sequences of which some begin with the same pages.

    Args:
      parts: from `split_tables`.
      seq_lens: of whole sequences. One that shares pages has all of them before its first query; 0 for an idle row.
      schedule: from `paged_schedule` of `seq_lens - parts.skipped`.
      others: as `paged_attention`.

    Raises:
      ValueError: shapes do not agree.
      NoImplementationError: no implementation takes these arguments.
    """
    b, t, n, _ = q.shape
    options: dict[str, Any] = {"soft_cap": soft_cap, "k_scale": k_scale, "v_scale": v_scale, "scale": scale}
    q_lens = jnp.full((b,), t, jnp.int32) if q_lens is None else q_lens
    first, first_lse = _over_common(q.reshape(b * t, n, -1), k_pages, v_pages, parts, options)
    live = (jnp.arange(t) < q_lens[:, None]) & (parts.sees & (seq_lens > 0))[:, None]
    first_lse = jnp.where(live[:, :, None], first_lse.reshape(b, t, n), -jnp.inf)
    own = jnp.maximum(seq_lens - parts.skipped, 0)
    rest = paged_attention(
        q, k_pages, v_pages, parts.rest, own, q_lens=q_lens, causal=causal, sinks=sinks, schedule=schedule, return_lse=True,
        **options,
    )  # fmt: skip
    out, lse = merge_states(first.reshape(*q.shape[:3], -1), first_lse, *rest)
    return (out, lse) if return_lse else out


def _over_common(
    q: Float[Array, "R N H"], k_pages: Array, v_pages: Array, parts: SharedPages, options: dict[str, Any]
) -> tuple[Float[Array, "R N V"], Float[Array, "R N"]]:
    """All queries as one sequence's, over the shared pages; all of these lie before every query."""
    options = options | {"causal": False, "return_lse": True}
    rows = q.shape[0]
    if fills(1, rows, q.shape[1]) and k_pages.dtype == q.dtype:
        bounds = jnp.array([0, rows], jnp.int32)
        try:
            found = ragged_paged_attention(
                q, k_pages, v_pages, bounds, parts.common, parts.length, implementation="mosaic_gpu", **options
            )
            return cast(tuple[Array, Array], found)
        except NoImplementationError:
            pass
    out, lse = cast(
        tuple[Array, Array], paged_attention(q[None], k_pages, v_pages, parts.common, parts.length, **options)
    )
    return out[0], lse[0]
