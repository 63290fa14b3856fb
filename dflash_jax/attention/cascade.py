"""Attention of sequences of which some begin with the same pages: shared keys are read once for all queries.

    parts = split_tables(page_table, shared, page_size)          # once for all layers
    out = cascade_attention(q, k_pages, v_pages, parts, seq_lens, q_lens=q_lens)

How many pages are shared, and by whom, is data: one program serves every beginning, and another one beginnings of several groups of
sequences, of which some may be empty. The two parts are joined through their lse. A learned sink belongs to the denominator once,
so only one part gets it. Windows and ALiBi count from a query's own position, which the shared part, one sequence for all queries
of a group, does not have: they are not taken.
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


class Members(NamedTuple):
    """Assignment of sequences to groups with a shared prefix.

    Attributes:
      of: of each sequence its group; the number of groups where it is of none.
      order: the sequences, those of a group side by side, the first group's first.
      place: where each stands in that order.
      counts: of each group.
    """

    of: Int[Array, "B"]
    order: Int[Array, "B"]
    place: Int[Array, "B"]
    counts: Int[Array, "*groups"]


class SharedPages(NamedTuple):
    """Page tables taken apart: what sequences share, and what each has for itself.

    Attributes:
      common: of each group of sequences the pages it shares first; what stands behind them is not looked at.
      length: tokens in them; 0 where nobody shares.
      rest: each sequence's own pages; those of a sequence that shares nothing are all of its.
      skipped: tokens of each that are not in `rest`.
      sees: whose queries see what is shared.
      members: of the groups; None where all that share are one.
    """

    common: Int[Array, "groups C"]
    length: Int[Array, "*groups"]
    rest: Int[Array, "B W"]
    skipped: Int[Array, "B"]
    sees: Bool[Array, "B"]
    members: Members | None = None


def split_tables(page_table: Int[Array, "B W"], shared: Int[Array, "*groups B"], page_size: int) -> SharedPages:
    """Tables for `cascade_attention`.

    Args:
      shared: pages that a sequence begins with and shares, the same number for all that do, 0 for the others; for several groups a
        row of such for each. A sequence is of one group at most, and a group may have none.
    """
    if shared.ndim == 2:
        return _of_groups(page_table, shared.astype(jnp.int32), page_size)
    width = page_table.shape[1]
    shared = shared.astype(jnp.int32)
    # Columns past a sequence's last page are not looked at, whatever they name.
    columns = jnp.minimum(jnp.arange(width) + shared[:, None], width - 1)
    rest = jnp.take_along_axis(page_table, columns, axis=1)
    tokens = shared * page_size
    return SharedPages(page_table[jnp.argmax(shared)][None], tokens.max()[None], rest, tokens, shared > 0)


def _of_groups(page_table: Int[Array, "B W"], shared: Int[Array, "groups B"], page_size: int) -> SharedPages:
    alone = split_tables(page_table, jnp.sum(shared, axis=0), page_size)
    of = jnp.where(alone.sees, jnp.argmax(shared, axis=0), shared.shape[0])
    # By counting who stands before whom: a CUDA graph holds no sort.
    rows = jnp.arange(of.shape[0])
    before = (of < of[:, None]) | ((of == of[:, None]) & (rows < rows[:, None]))
    place = jnp.sum(before, axis=1)
    order = jnp.argmax(place == rows[:, None], axis=1)
    members = Members(of, order, place, jnp.sum(shared > 0, axis=1))
    common = page_table[jnp.argmax(shared, axis=1)]
    return alone._replace(common=common, length=shared.max(axis=1) * page_size, members=members)


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
    if parts.members is None:
        first, first_lse = _over_common(q.reshape(b * t, n, -1), k_pages, v_pages, parts, options)
    else:
        first, first_lse = _over_each(q, k_pages, v_pages, parts, parts.members, options)
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


def _over_each(
    q: Float[Array, "B T N H"],
    k_pages: Array,
    v_pages: Array,
    parts: SharedPages,
    members: Members,
    options: dict[str, Any],
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """The queries of every group as one sequence's, over the pages that the group shares; what stands in rows of a sequence that is
    of none says nothing."""
    options = options | {"causal": False, "return_lse": True}
    (b, t, n, _), groups = q.shape, members.counts.shape[0]
    rows, counts = b * t, members.counts * t
    ends = jnp.cumsum(counts)
    if fills(1, rows, n) and k_pages.dtype == q.dtype:
        # Whoever is of no group is a sequence without keys.
        bounds = jnp.concatenate([jnp.zeros((1,), ends.dtype), ends, jnp.full((1,), rows, ends.dtype)]).astype(
            jnp.int32
        )
        tables = jnp.concatenate([parts.common, parts.common[:1]])
        try:
            out, lse = cast(
                tuple[Array, Array],
                ragged_paged_attention(
                    q[members.order].reshape(rows, n, -1), k_pages, v_pages, bounds, tables, jnp.append(parts.length, 0),
                    implementation="mosaic_gpu", **options,
                ),
            )  # fmt: skip
            return out.reshape(b, t, n, -1)[members.place], lse.reshape(b, t, n)[members.place]
        except NoImplementationError:
            pass
    starts = ends - counts
    taken = jnp.minimum(starts[:, None] + jnp.arange(rows), rows - 1)
    out, lse = cast(
        tuple[Array, Array],
        paged_attention(
            q[members.order[taken // t], taken % t], k_pages, v_pages, parts.common, parts.length,
            q_lens=counts.astype(jnp.int32), **options,
        ),
    )  # fmt: skip
    of = jnp.minimum(members.of, groups - 1)[:, None]
    row = members.place[:, None] * t + jnp.arange(t) - starts[of]
    return out[of, row], lse[of, row]
