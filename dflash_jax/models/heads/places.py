"""Places one after the other: for heads whose bias on a place's logits needs the token before it."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.models.heads.base import Block, Law, Pick
from dflash_jax.models.layers import linear


def one_by_one(
    block: Block,
    top_k: int,
    bias: Callable[[int, Array, Array | None, Array], tuple[Array | float, Array]],
    state: Float[Array, "B r"],
    pick: Pick,
) -> tuple[Int[Array, "B g"], Law]:
    """Proposals of `base logits + bias`, and their law.

    Args:
      top_k: candidates of a place, the best by its base logits; 0 for all rows of the LM head.
      bias: of a place, given the token before it, the rows that are candidates (None for all) and the state that it gave last.
      state: the first one.
    """
    unary, columns, named = block.best(top_k) if top_k else (block.logits, None, None)
    before, path, laws, tokens = block.anchor, [], [], []
    for place in range(unary.shape[1]):
        rows = None if columns is None else columns[:, place]
        added, state = bias(place, before, rows, state)
        scores = unary[:, place] + added
        seen = None if named is None else named[:, place]
        if block.tokens is not None and rows is None:
            seen = jnp.broadcast_to(block.tokens, scores.shape)
        picked, law = pick(place, scores[:, None, None], None if seen is None else seen[:, None])
        column = picked[:, 0]
        before = column[:, 0] if seen is None else jnp.take_along_axis(seen, column, axis=1)[:, 0]
        path.append(before)
        laws.append(law[:, 0, 0])
        tokens += [] if seen is None else [seen]
    return jnp.stack(path, axis=1), Law(jnp.stack(laws, axis=1), jnp.stack(tokens, axis=1) if tokens else None)


def products_of(
    x: Float[Array, "*B r"], table: Float[Array, "V r"], rows: Int[Array, "*B C"] | None
) -> Float[Array, "*B C"]:
    """float32 products with these rows of a table, or with all of them."""
    if rows is None:
        return linear(x, table).astype(jnp.float32)
    return jnp.sum(table[rows].astype(jnp.float32) * x.astype(jnp.float32)[..., None, :], axis=-1)
