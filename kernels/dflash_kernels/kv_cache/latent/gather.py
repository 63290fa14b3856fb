"""The gather of latent rows: shapes, dtypes and errors; the first implementation that supports the call runs."""

from collections.abc import Sequence

import jax
from jaxtyping import Array, Int, Shaped

from dflash_kernels.core.dispatch import first_fitting
from dflash_kernels.core.validation import check_axes, check_count, check_filled, check_latent_pages, check_sequences
from dflash_kernels.kv_cache.latent.reference import latent_gather_reference

IMPLEMENTATIONS = {"xla": latent_gather_reference}


def latent_gather(
    latent_pages: Shaped[Array, "P 1 p stored"],
    page_table: Int[Array, "B W"],
    starts: Int[Array, "B"],
    lens: Int[Array, "B"],
    *,
    rows: int,
    implementation: str | Sequence[str] | None = None,
) -> Shaped[Array, "rows stored"]:
    """Gathers latent rows `starts[b] .. starts[b] + lens[b]` of every sequence b, one after the other, as the pool keeps them.

    Args:
      latent_pages: page pool of any dtype; rows of no sequence may hold anything.
      page_table: int32 page indices; entries past a sequence's last page may hold anything.
      starts: int32 first position of each sequence; it need not begin a page.
      lens: int32 rows of each sequence, 0 for none.
      rows: rows of the result. Those past the sum of `lens` are 0; where the sum is larger, the last rows are left out.
      implementation: a name, names to try in order, or None for the best that takes the call.

    Raises:
      ValueError: shapes do not agree, or an array or number is of another kind than said.
      NoImplementationError: nothing named takes these arguments.
    """
    check_axes(latent_pages=(latent_pages, "P 1 p stored"), page_table=(page_table, "B W"))
    check_axes(starts=(starts, "B"), lens=(lens, "B"))
    check_latent_pages(latent_pages)
    check_filled(latent_pages=latent_pages, page_table=page_table)
    check_count(rows=rows)
    check_sequences(page_table.shape[0], page_table=page_table, starts=starts, lens=lens)
    with jax.named_scope("latent_gather"):
        return first_fitting(
            "latent_gather", IMPLEMENTATIONS, implementation, latent_pages, page_table, starts, lens, rows=rows
        )
