"""The definition in jnp."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped


def cache_write_reference(
    k_pages: Float[Array, "P K p H"],
    v_pages: Float[Array, "P K p H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    slots: Int[Array, "T"],
) -> tuple[Float[Array, "P K p H"], Float[Array, "P K p H"]]:
    """See `cache_write`."""
    return _write(k_pages, k, slots), _write(v_pages, v, slots)


def latent_write_reference(
    latent_pages: Shaped[Array, "P 1 p C"], latents: Shaped[Array, "T C"], slots: Int[Array, "S"]
) -> Shaped[Array, "P 1 p C"]:
    """See `latent_write`."""
    return _write(latent_pages, latents[: slots.shape[0], None], slots)


def _write(pool: Shaped[Array, "P K p H"], new: Shaped[Array, "T K H"], slots: Int[Array, "T"]) -> Array:
    pages, _, p, _ = pool.shape
    # jnp counts negative indices from the end; one past the end is what "drop" drops.
    page = jnp.where(slots < 0, pages, slots // p)
    return pool.at[page, :, slots % p].set(new.astype(pool.dtype), mode="drop", unique_indices=True)
