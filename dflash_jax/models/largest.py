"""The largest numbers of long rows and where they stand, without sorting: a sort, even of a few hundred numbers, takes a GPU longer
than to compare all of them with each other."""

import jax
import jax.numpy as jnp
from dflash_kernels.core.device import target
from jaxtyping import Array, Float, Int

CHUNK, LONG_CHUNK = 16, 64
FEW = 512  # that are compared with each other at most; more are sorted


def largest(rows: Float[Array, "*R V"], count: int) -> tuple[Float[Array, "*R C"], Int[Array, "*R C"]]:
    """As `jax.lax.top_k`: in descending order, of equal ones the first; no NaN. On a CPU it is `jax.lax.top_k`."""
    if (
        target().platform == "cpu"
    ):  # which compares every two of 512 numbers in longer than all else of a small model's cycle
        values, places = jax.lax.top_k(rows, count)
        return values, places
    return largest_of_chunks(rows, count)


def largest_of_chunks(rows: Float[Array, "*R V"], count: int) -> tuple[Float[Array, "*R C"], Int[Array, "*R C"]]:
    """What `largest` is on a GPU: no long row is sorted.

    No number can be among them whose chunk is not among the `count` chunks of the largest maxima, the first of equal ones: each of
    those holds one that comes before it.
    """
    size, chunk = rows.shape[-1], CHUNK if count * CHUNK <= FEW else LONG_CHUNK
    if size <= max(FEW, 2 * count * chunk if chunk == LONG_CHUNK else 0):
        return _ordered(rows, jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), rows.shape), count)
    ends = [(0, 0)] * (rows.ndim - 1) + [(0, -size % chunk)]
    chunks = jnp.pad(rows, ends, constant_values=-jnp.inf).reshape(*rows.shape[:-1], -1, chunk)
    _, best = largest_of_chunks(jnp.max(chunks, axis=-1), count)
    inside = jnp.take_along_axis(chunks, best[..., None], axis=-2).reshape(*rows.shape[:-1], -1)
    places = (best[..., None] * chunk + jnp.arange(chunk, dtype=jnp.int32)).reshape(inside.shape)
    return _ordered(inside, places, count)


def _ordered(
    values: Float[Array, "*R N"], places: Int[Array, "*R N"], count: int
) -> tuple[Float[Array, "*R C"], Int[Array, "*R C"]]:
    """The largest values and their places, of equal ones those with the lower place."""
    if values.shape[-1] > FEW:
        # In the order of places, for sorts keep it.
        order = jnp.argsort(places, axis=-1)
        values, chosen = jax.lax.top_k(jnp.take_along_axis(values, order, axis=-1), count)
        return values, jnp.take_along_axis(jnp.take_along_axis(places, order, axis=-1), chosen, axis=-1)
    other, its = values[..., None, :], places[..., None, :]
    ahead = (other > values[..., None]) | ((other == values[..., None]) & (its < places[..., None]))
    rank = jnp.sum(ahead, axis=-1, dtype=jnp.int32)
    taken = rank[..., None, :] == jnp.arange(count)[:, None]
    # Of columns, not of values: NaN would be in every sum.
    columns = jnp.max(jnp.where(taken, jnp.arange(values.shape[-1], dtype=jnp.int32), 0), axis=-1)
    return jnp.take_along_axis(values, columns, axis=-1), jnp.take_along_axis(places, columns, axis=-1)
