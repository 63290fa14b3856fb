"""Masks and biases of a tile of scores by the positions of its keys and query rows.

`keys_axis` is 1 where scores are `[rows, keys]`, 0 where they are transposed. A bound is one number for each query row, in the
layout that a reduction over the keys leaves it in, or a scalar for all rows.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.mosaic_gpu.thread_op import MATRIX


def spread(bound: Any, shape: tuple[int, ...], keys_axis: int = 1) -> Any:
    """A bound of each row over a tile of scores; one for all rows stays a scalar."""
    return bound if bound.ndim == 0 else lax.broadcast_in_dim(bound, shape, [1 - keys_axis])


def places(size: int, rows: int, keys_axis: int = 1) -> tuple[Any, tuple[int, int]]:
    """Number of each score's key in a tile of `size` keys, and the tile's shape."""
    shape = (rows, size) if keys_axis else (size, rows)
    return plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, shape, keys_axis), MATRIX), shape


def row_tokens(rows: int, first_row: Any, group: int, layout: Any) -> Any:
    """Query token of each row: row `t * group + g` of a KV head is one head of the group of token t."""
    return lax.div(plgpu.layout_cast(lax.iota(jnp.int32, rows), layout) + first_row, jnp.int32(group))


def alibi_bias(ahead: Any, sqrt: bool) -> Any:
    """ALiBi bias of a key so many positions ahead of its query, before the slope."""
    ahead = ahead.astype(jnp.float32)
    return -jnp.sqrt(jnp.maximum(-ahead, 0.0)) if sqrt else ahead
