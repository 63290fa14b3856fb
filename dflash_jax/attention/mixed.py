"""Attention for rows of several kinds that lie side by side, a cycle's blocks and pieces of prompts: products and norms take all of
them at once, each kind attends by operations of its own."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dflash_jax.models.layers import Cache


def side_by_side(parts: Sequence[Array]) -> Array:
    """`[B, T, ...]` each to `[1, R, ...]`, the rows of the first one in front."""
    return jnp.concatenate([part.reshape(1, -1, *part.shape[2:]) for part in parts], axis=1)


def taken_apart(rows: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """The parts of these shapes that `side_by_side` made `rows` of."""
    parts, first = [], 0
    for shape in shapes:
        last = first + math.prod(shape)
        parts.append(rows[0, first:last].reshape(*shape, *rows.shape[2:]))
        first = last
    return parts


class MixedAttend:
    """An `Attend` and `LatentAttend` for `[1, R, ...]` over pages that all kinds of rows share.

    Args:
      parts: the same for each kind's `[B, T, ...]`, in order. No sequence is in two of them.
      shapes: B and T of each.
    """

    def __init__(self, parts: Sequence[Any], shapes: Sequence[tuple[int, ...]]):
        self.parts, self.shapes = parts, shapes

    def __call__(self, layer: Any, qkv: Array, rotary: Any, cache: Cache) -> tuple[Array, Cache]:
        return self._each(self.parts, layer, (qkv, rotary), cache)

    def latent(self, layer: Any, q: Array, row: Array, rotary: Any, cache: Cache) -> tuple[Array, Cache]:
        """See `LatentAttend`."""
        return self._each([part.latent for part in self.parts], layer, (q, row, rotary), cache)

    def _each(self, attends: Sequence[Any], layer: Any, rows: tuple[Any, ...], cache: Cache) -> tuple[Array, Cache]:
        leaves, tree = jax.tree.flatten(rows)
        apart, outs = zip(*(taken_apart(leaf, self.shapes) for leaf in leaves), strict=True), []
        for attend, own in zip(attends, apart, strict=True):
            out, cache = attend(layer, *jax.tree.unflatten(tree, own), cache)
            outs.append(out)
        return side_by_side(outs), cache
