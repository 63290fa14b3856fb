"""The public functions: check shapes, then hand over to the first implementation that takes the call."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_kernels.attention.index.mosaic_gpu import index_scores_mosaic_gpu, index_select_mosaic_gpu
from dflash_kernels.attention.index.reference import index_select_reference
from dflash_kernels.attention.index.xla import index_scores_xla, index_select_xla
from dflash_kernels.core.dispatch import first_fitting
from dflash_kernels.core.validation import (
    check_axes,
    check_count,
    check_filled,
    check_floats,
    check_integers,
    check_latent_pages,
    check_rows,
    check_sequences,
    check_wide,
    is_wide,
)

IMPLEMENTATIONS = {"mosaic_gpu": index_scores_mosaic_gpu, "xla": index_scores_xla}
SELECT_IMPLEMENTATIONS = {
    "mosaic_gpu": index_select_mosaic_gpu,
    "xla": index_select_xla,
    "sort": index_select_reference,
}


def index_scores(
    q: Float[Array, "B T I E"],
    weights: Float[Array, "B T I"],
    index_pages: Float[Array, "P 1 p E"],
    page_table: Int[Array, "B W"],
    seq_lens: Int[Array, "B"],
    *,
    q_lens: Int[Array, "B"] | None = None,
    index_scale: Float[Array, "P 1 p"] | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Float[Array, "B T S"]:
    """Scores of an indexer's keys for T query tokens of each sequence: `sum over heads of weight * relu(q . k)`, in float32.

    Pages are as those of `mla_attention`, and so is where queries stand: live row i at position `seq_lens[b] - q_lens[b] + i`. S is
    `W * p`, the positions that the table has room for. What a query does not see scores -inf: later positions, and all of them for
    rows past `q_lens`. A score of zero has no sign.

    Args:
      q: queries in the pages' dtype; of float8_e4m3fn ones their scales belong into `weights`.
      weights: float32 factors of the heads, of any sign, with every factor on the whole in them.
      index_pages: pool of keys, one head. Rows at or past `seq_lens` may hold anything, NaN included.
      page_table: int32 page indices; entries past a sequence's last page may hold anything.
      seq_lens: int32 rows of each sequence, the query tokens' own included; 0 for an idle one.
      q_lens: int32 live query rows of each sequence, T where None.
      index_scale: float32 factors of float8_e4m3fn keys, one a row; 1 where None.
      implementation: a name, names to try in order, or None for the best that takes the call.

    Raises:
      ValueError: shapes do not agree, scales are given for keys that have none, or an array is of another kind than said.
      NoImplementationError: nothing named takes these arguments.
    """
    check_axes(q=(q, "B T I E"), weights=(weights, "B T I"), index_pages=(index_pages, "P 1 p E"))
    check_floats(q=q, index_pages=index_pages)
    check_wide("they are sums' factors", weights=weights)
    b, t, _, width = q.shape
    check_latent_pages(index_pages, width)
    check_sequences(b, page_table=page_table, seq_lens=seq_lens, q_lens=q_lens)
    check_filled(q=q, index_pages=index_pages, page_table=page_table)
    eight = index_pages.dtype == jnp.float8_e4m3fn
    if q.dtype != index_pages.dtype or not (eight or is_wide(index_pages)):
        raise ValueError(
            f"queries and index pages are both bfloat16, float16, float32 or float8_e4m3fn, not {q.dtype} and {index_pages.dtype}"
        )
    if weights.shape != q.shape[:3]:
        raise ValueError(f"weights {weights.shape} must be {q.shape[:3]}, one for each head of q {q.shape}")
    if index_scale is not None:
        check_axes(index_scale=(index_scale, "P 1 p"))
        check_floats(index_scale=index_scale)
        if not eight or index_scale.shape != index_pages.shape[:3]:
            raise ValueError(
                f"index_scale {index_scale.shape} is one number for each row of float8_e4m3fn pages; these are "
                f"{index_pages.dtype} {index_pages.shape}"
            )
    if q_lens is None:
        q_lens = jnp.full((b,), t, jnp.int32)
    with jax.named_scope("index_scores"):
        return first_fitting(
            "index_scores", IMPLEMENTATIONS, implementation, q, weights, index_pages, page_table, seq_lens, q_lens,
            index_scale=index_scale,
        )  # fmt: skip


def index_select(
    scores: Float[Array, "*rows S"],
    *,
    count: int,
    page_table: Int[Array, "B W"] | None = None,
    page_size: int | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Int[Array, "*rows count"]:
    """Chooses the places of the `count` largest scores of each row, in ascending order: of equal scores the first ones.

    Exactly so many, but for what scores -inf: that is never chosen, and -1 stands behind the last place. -0 equals 0.

    Args:
      scores: without NaN; `[B, T, S]` where there is a table.
      page_table: int32 page indices. Where given, slots come out in place of places: `page * page_size + row`, of which S must not
        have more than the table.
      page_size: tokens of a page.
      implementation: a name, names to try in order, or None for the best that takes the call.

    Raises:
      ValueError: scores are no floating-point numbers, or `count` is not 1 or more.
      NoImplementationError: nothing named takes these arguments.
    """
    check_rows(scores=scores)
    check_wide("scores in eight bits are nearly all equal", scores=scores)
    check_count(count=count)
    check_filled(scores=scores)
    if count < 1:
        raise ValueError(f"count must be 1 or more, not {count}")
    if (page_table is None) != (page_size is None):
        raise ValueError("page_table and page_size make slots together: give both or neither")
    if page_table is not None and page_size is not None:
        check_axes(scores=(scores, "B T S"), page_table=(page_table, "B W"))
        check_integers(page_table=page_table)
        if page_size < 1 or scores.shape[-1] > page_table.shape[1] * page_size:
            raise ValueError(
                f"page_table {page_table.shape} of pages of {page_size} tokens must have room for places of scores {scores.shape}"
            )
    with jax.named_scope("index_select"):
        return first_fitting(
            "index_select", SELECT_IMPLEMENTATIONS, implementation, scores, count=count, page_table=page_table,
            page_size=page_size,
        )  # fmt: skip
