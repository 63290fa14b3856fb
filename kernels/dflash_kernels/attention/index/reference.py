"""The definitions in plain jnp."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def head_scores(
    q: Float[Array, "B T I E"], k: Float[Array, "B S E"], weights: Float[Array, "B T I"]
) -> Float[Array, "B T S"]:
    """`sum over heads of weight * relu(q . k)`, at least float32, with no zero that has a sign.

    The sum goes over heads in their order: a token's score must not depend on what it is computed with.
    """
    wide = jnp.promote_types(weights.dtype, jnp.float32)
    # Values of e4m3 are values of bfloat16, too; no device multiplies every pair of formats.
    q, k = (x.astype(jnp.bfloat16) if x.dtype == jnp.float8_e4m3fn else x for x in (q, k))
    precision = jax.lax.Precision.HIGHEST if q.dtype == wide else None
    products = jnp.einsum("btie,bse->btis", q, k, precision=precision, preferred_element_type=wide)
    scores = jnp.sum(jnp.maximum(products, 0) * weights[..., None], axis=2)
    return jnp.where(scores == 0, jnp.zeros((), wide), scores)


def index_scores_reference(
    q: Float[Array, "B T I E"],
    weights: Float[Array, "B T I"],
    index_pages: Float[Array, "P 1 p E"],
    page_table: Int[Array, "B W"],
    seq_lens: Int[Array, "B"],
    q_lens: Int[Array, "B"],
    *,
    index_scale: Float[Array, "P 1 p"] | None,
    first: int | Int[Array, ""] = 0,
) -> Float[Array, "B T S"]:
    """See `index_scores`; the table's first page holds positions from `first` on."""
    b, t = q.shape[:2]
    pages, _, p, width = index_pages.shape
    named = jnp.clip(page_table, 0, pages - 1)
    scores = head_scores(q, index_pages[named].reshape(b, -1, width), weights)
    if index_scale is not None:
        scores = scores * index_scale[named].reshape(b, 1, -1)
    position = first + jnp.arange(page_table.shape[1] * p)
    own = (seq_lens - q_lens)[:, None] + jnp.arange(t)
    live = jnp.arange(t) < q_lens[:, None]
    visible = live[:, :, None] & (position <= own[:, :, None]) & (position < seq_lens[:, None, None])
    # What a row holds that nobody may see, NaN included, is replaced.
    return jnp.where(visible, scores, -jnp.inf)


def slots_of(
    places: Int[Array, "*rows count"], page_table: Int[Array, "B W"] | None, page_size: int | None
) -> Int[Array, "*rows count"]:
    """Slots of places in the pages of a table, if there is one; -1 stays."""
    if page_table is None or page_size is None:
        return places
    b, t, count = places.shape
    at = jnp.maximum(places, 0).reshape(b, -1)
    pages = jnp.take_along_axis(page_table, at // page_size, axis=1)
    return jnp.where(places < 0, -1, (pages * page_size + at % page_size).reshape(b, t, count))


def index_select_reference(
    scores: Float[Array, "*rows S"],
    *,
    count: int,
    page_table: Int[Array, "B W"] | None = None,
    page_size: int | None = None,
) -> Int[Array, "*rows count"]:
    """See `index_select`."""
    keys = scores.shape[-1]
    taken = min(count, keys)
    # Of equal numbers the first ones are taken; -0 is smaller than 0 there.
    values, found = jax.lax.top_k(jnp.where(scores == 0, jnp.zeros((), scores.dtype), scores), taken)
    found = jnp.sort(jnp.where(values > -jnp.inf, found.astype(jnp.int32), keys), axis=-1)
    found = jnp.where(found < keys, found, -1)
    found = jnp.pad(found, ((0, 0),) * (found.ndim - 1) + ((0, count - taken),), constant_values=-1)
    return slots_of(found, page_table, page_size)
