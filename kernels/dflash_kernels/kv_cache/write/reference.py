"""The definition in jnp."""

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped


def cache_write_reference(
    k_pages: Shaped[Array, "P K p H"],
    v_pages: Shaped[Array, "P K p H"],
    k: Shaped[Array, "T K H"],
    v: Shaped[Array, "T K H"],
    slots: Int[Array, "T"],
) -> tuple[Shaped[Array, "P K p H"], Shaped[Array, "P K p H"]]:
    """See `cache_write`."""
    return write_rows(k_pages, k, slots), write_rows(v_pages, v, slots)


def latent_write_reference(
    latent_pages: Shaped[Array, "P 1 p C"], latents: Shaped[Array, "T C"], slots: Int[Array, "S"]
) -> Shaped[Array, "P 1 p C"]:
    """See `latent_write`."""
    return write_rows(latent_pages, latents[: slots.shape[0], None], slots)


def page_and_row(slots: Int[Array, "T"], pool: Array) -> tuple[Int[Array, "T"], Int[Array, "T"]]:
    """Indices of each slot in a pool `[P, K, p, ...]`; of a negative slot one that writes with mode "drop" leave out."""
    # jnp counts negative indices from the end; one past the end is what "drop" drops.
    return jnp.where(slots < 0, pool.shape[0], slots // pool.shape[2]), slots % pool.shape[2]


def write_rows(pool: Shaped[Array, "P K p H"], new: Shaped[Array, "T K H"], slots: Int[Array, "T"]) -> Array:
    """The pool with `new` at its slots, cast to the pool's dtype."""
    page, row = page_and_row(slots, pool)
    return pool.at[page, :, row].set(new.astype(pool.dtype), mode="drop", unique_indices=True)
