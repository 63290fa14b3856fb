"""The definition in jnp."""

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped


def latent_gather_reference(
    latent_pages: Shaped[Array, "P 1 p stored"],
    page_table: Int[Array, "B W"],
    starts: Int[Array, "B"],
    lens: Int[Array, "B"],
    *,
    rows: int,
) -> Shaped[Array, "rows stored"]:
    """See `latent_gather`."""
    pages, _, p, _ = latent_pages.shape
    ends = jnp.cumsum(lens)
    row = jnp.arange(rows)
    sequence = jnp.minimum(jnp.searchsorted(ends, row, side="right"), lens.shape[0] - 1)
    position = starts[sequence] + row - (ends - lens)[sequence]
    page = page_table[sequence, jnp.clip(position // p, 0, page_table.shape[1] - 1)]
    held = (row < ends[-1])[:, None]
    # A row no sequence has may hold NaN in the page it would come from: it is replaced, not weighted.
    return jnp.where(
        held, latent_pages[jnp.clip(page, 0, pages - 1), 0, position % p], jnp.zeros((), latent_pages.dtype)
    )
