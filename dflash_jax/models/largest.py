"""The largest numbers of long rows and where they stand, without sorting: a sort, even of a few hundred numbers, takes a GPU longer
than to compare all of them with each other."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

CHUNK = 32
LONG = 1024  # shorter rows are compared as they are; so many candidates at most are compared, more are sorted


def largest(rows: Float[Array, "*R V"], count: int) -> tuple[Float[Array, "*R C"], Int[Array, "*R C"]]:
    """As `jax.lax.top_k`: in descending order, of equal ones the first; no NaN.

    No number can be among them whose chunk is not among the `count` chunks of the largest maxima, the first of equal ones: each of
    those holds one that comes before it.
    """
    size = rows.shape[-1]
    if count * CHUNK > LONG:
        values, places = jax.lax.top_k(rows, count) if size <= count * CHUNK else _among_chunks(rows, count)
        return values, places
    if size <= LONG:
        return _by_rank(rows, jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), rows.shape), count)
    return _among_chunks(rows, count)


def _among_chunks(rows: Float[Array, "*R V"], count: int) -> tuple[Float[Array, "*R C"], Int[Array, "*R C"]]:
    ends = [(0, 0)] * (rows.ndim - 1) + [(0, -rows.shape[-1] % CHUNK)]
    chunks = jnp.pad(rows, ends, constant_values=-jnp.inf).reshape(*rows.shape[:-1], -1, CHUNK)
    _, best = largest(jnp.max(chunks, axis=-1), count)
    inside = jnp.take_along_axis(chunks, best[..., None], axis=-2).reshape(*rows.shape[:-1], -1)
    places = (best[..., None] * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32)).reshape(inside.shape)
    return _by_rank(inside, places, count)


def _by_rank(
    values: Float[Array, "*R N"], places: Int[Array, "*R N"], count: int
) -> tuple[Float[Array, "*R C"], Int[Array, "*R C"]]:
    """The largest values and their places, of equal ones those with the lower place."""
    if values.shape[-1] > LONG:
        # In the order of places, for sorts keep it.
        order = jnp.argsort(places, axis=-1)
        values, places = (jnp.take_along_axis(each, order, axis=-1) for each in (values, places))
        values, chosen = jax.lax.top_k(values, count)
        return values, jnp.take_along_axis(places, chosen, axis=-1)
    other, its = values[..., None, :], places[..., None, :]
    ahead = (other > values[..., None]) | ((other == values[..., None]) & (its < places[..., None]))
    rank = jnp.sum(ahead, axis=-1, dtype=jnp.int32)
    taken = rank[..., None, :] == jnp.arange(count)[:, None]
    # Of columns, not of values: NaN would be in every sum.
    columns = jnp.max(jnp.where(taken, jnp.arange(values.shape[-1], dtype=jnp.int32), 0), axis=-1)
    return tuple(jnp.take_along_axis(each, columns, axis=-1) for each in (values, places))  # type: ignore[return-value]
