"""The definition in plain jnp."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def latent_expand_reference(
    latent_pages: Float[Array, "P 1 p C"],
    page_table: Int[Array, "B W"],
    starts: Int[Array, "B"],
    lens: Int[Array, "B"],
    w_uk: Float[Array, "N nope R"],
    w_uv: Float[Array, "N V R"],
    *,
    rows: int,
) -> tuple[Float[Array, "B rows N H"], Float[Array, "B rows N V"]]:
    """See `latent_expand`; rows past `lens` come out as 0."""
    pages, _, p, _ = latent_pages.shape
    place = jnp.arange(rows)
    position = starts[:, None] + place
    entry = jnp.clip(position // p, 0, page_table.shape[1] - 1)
    page = jnp.clip(jnp.take_along_axis(page_table, entry, axis=1), 0, pages - 1)
    # A row no sequence has may hold NaN in the page it would come from: it is replaced, not weighted.
    held = (place < lens[:, None])[:, :, None]
    latents = jnp.where(held, latent_pages[page, 0, position % p], jnp.zeros((), latent_pages.dtype))
    kv_c, k_pe = jnp.split(latents, [w_uk.shape[2]], axis=-1)
    precision = jax.lax.Precision.HIGHEST if latents.dtype == jnp.float32 else None
    k_nope = jnp.einsum("bsr,npr->bsnp", kv_c, w_uk.astype(latents.dtype), precision=precision)
    v = jnp.einsum("bsr,nvr->bsnv", kv_c, w_uv.astype(latents.dtype), precision=precision)
    k_pe = jnp.broadcast_to(k_pe[:, :, None], (*k_nope.shape[:3], k_pe.shape[-1]))
    return jnp.concatenate([k_nope, k_pe], axis=-1), v
