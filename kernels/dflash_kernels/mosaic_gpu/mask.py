"""Masks and biases of scores by position."""

import jax.numpy as jnp
from jax import lax


def spread(bound, shape):
    """A bound of each row over a tile; one bound for all rows stays a scalar."""
    return bound if bound.ndim == 0 else lax.broadcast_in_dim(bound, shape, [0])


def alibi_bias(ahead, sqrt: bool):
    """What ALiBi adds to the score of a key so many positions ahead of its query, before the slope."""
    ahead = ahead.astype(jnp.float32)
    return -jnp.sqrt(jnp.maximum(-ahead, 0.0)) if sqrt else ahead
