"""The largest numbers of long rows and where they stand, without sorting whole rows."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

CHUNK = 64
LONG = 8192  # shorter rows are sorted as they are


def largest(rows: Float[Array, "*R V"], count: int) -> tuple[Float[Array, "*R C"], Int[Array, "*R C"]]:
    """As `jax.lax.top_k`: in descending order, of equal ones the first; no NaN.

    No number can be among them whose chunk is not among the `count` chunks of the largest maxima, the first of equal ones: each of
    those holds one that comes before it.
    """
    size = rows.shape[-1]
    if size < LONG or count > size // CHUNK:
        values, places = jax.lax.top_k(rows, count)
        return values, places
    ends = [(0, 0)] * (rows.ndim - 1) + [(0, -size % CHUNK)]
    chunks = jnp.pad(rows, ends, constant_values=-jnp.inf).reshape(*rows.shape[:-1], -1, CHUNK)
    best = jnp.sort(jax.lax.top_k(jnp.max(chunks, axis=-1), count)[1], axis=-1)  # chunks in their own order again
    inside = jnp.take_along_axis(chunks, best[..., None], axis=-2)
    values, places = jax.lax.top_k(inside.reshape(*rows.shape[:-1], -1), count)
    chosen = jnp.take_along_axis(best, places // CHUNK, axis=-1)
    return values, (chosen * CHUNK + places % CHUNK).astype(jnp.int32)
