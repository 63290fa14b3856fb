"""The definition in jnp."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def cache_write_reference(
    k_pages: Float[Array, "P K p H"],
    v_pages: Float[Array, "P K p H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    slots: Int[Array, "T"],
) -> tuple[Float[Array, "P K p H"], Float[Array, "P K p H"]]:
    """See `cache_write`."""
    pages, _, p, _ = k_pages.shape
    # jnp counts negative indices from the end; one past the end is what "drop" drops.
    page = jnp.where(slots < 0, pages, slots // p)
    row = slots % p

    def write(pool: Array, new: Array) -> Array:
        return pool.at[page, :, row].set(new.astype(pool.dtype), mode="drop", unique_indices=True)

    return write(k_pages, k), write(v_pages, v)
