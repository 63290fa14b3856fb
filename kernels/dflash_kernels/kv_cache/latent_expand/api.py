"""The expansion of latent rows: shapes, dtypes and errors; the first implementation that supports the call runs."""

from collections.abc import Sequence

import jax
from jaxtyping import Array, Float, Int

from dflash_kernels.core.dispatch import first_fitting
from dflash_kernels.core.validation import (
    check_axes,
    check_count,
    check_filled,
    check_latent_pages,
    check_sequences,
    check_wide,
)
from dflash_kernels.kv_cache.latent_expand.mosaic_gpu import latent_expand_mosaic_gpu
from dflash_kernels.kv_cache.latent_expand.reference import latent_expand_reference

IMPLEMENTATIONS = {"mosaic_gpu": latent_expand_mosaic_gpu, "xla": latent_expand_reference}


def latent_expand(
    latent_pages: Float[Array, "P 1 p C"],
    page_table: Int[Array, "B W"],
    starts: Int[Array, "B"],
    lens: Int[Array, "B"],
    w_uk: Float[Array, "N nope R"],
    w_uv: Float[Array, "N V R"],
    *,
    rows: int,
    implementation: str | Sequence[str] | None = None,
) -> tuple[Float[Array, "B rows N H"], Float[Array, "B rows N V"]]:
    """Up-projection of MLA's latent rows `starts[b] .. starts[b] + lens[b]` of every sequence b to keys and values of all heads.

    The key of a head is `w_uk @ kv_c` and, behind it, the row's rotary part, which all heads share; the value is `w_uv @ kv_c`.

    Args:
      latent_pages: rows `[kv_c (R) | k_pe]`, bfloat16, float16 or float32; rows of no sequence may hold anything.
      page_table: int32 page indices; entries past the page of a sequence's last row may hold anything.
      starts: int32 first position of each sequence, a multiple of the page size.
      lens: int32 rows of each sequence, 0 for none, at most `rows`.
      w_uk, w_uv: in the pages' dtype.
      rows: rows of a sequence in the result. Those past `lens` are undefined, NaN included, and cost nothing on a GPU.
      implementation: a name, names to try in order, or None for the best that takes the call.

    Returns:
      Keys, `H = nope + C - R` wide, and values, in the pages' dtype, summed in float32.

    Raises:
      ValueError: shapes do not agree, or an array or number is of another kind than said.
      NoImplementationError: nothing named takes these arguments.
    """
    check_axes(latent_pages=(latent_pages, "P 1 p C"), page_table=(page_table, "B W"))
    check_axes(starts=(starts, "B"), lens=(lens, "B"), w_uk=(w_uk, "N nope R"), w_uv=(w_uv, "N V R"))
    check_latent_pages(latent_pages)
    check_filled(latent_pages=latent_pages, page_table=page_table)
    check_wide("decode rows in eight bits first (latent_decode)", latent_pages=latent_pages, w_uk=w_uk, w_uv=w_uv)
    check_count(rows=rows)
    check_sequences(page_table.shape[0], page_table=page_table, starts=starts, lens=lens)
    if w_uk.shape[::2] != w_uv.shape[::2]:
        raise ValueError(f"w_uk {w_uk.shape} and w_uv {w_uv.shape} must be [N, nope, R] and [N, V, R]")
    if w_uk.shape[2] > latent_pages.shape[3]:
        raise ValueError(f"rows of {latent_pages.shape[3]} numbers hold no latent of {w_uk.shape[2]}")
    with jax.named_scope("latent_expand"):
        return first_fitting(
            "latent_expand", IMPLEMENTATIONS, implementation, latent_pages, page_table, starts, lens, w_uk, w_uv,
            rows=rows,
        )  # fmt: skip
