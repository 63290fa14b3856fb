"""Attention for sequences of different lengths whose tokens lie side by side: products and norms take no row that is not verified,
attention over pages and states stays that of so many tokens in each slot."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from dflash_jax.models.layers import Cache, ChoiceRows, IndexRows


class Packing(NamedTuple):
    """Tokens of sequences side by side.

    Attributes:
      slots, places: of each row; rows behind the last token are copies of a token of the last slot.
      rows: of each slot's tokens; those behind a slot's last one name that.
    """

    slots: Int[Array, "R"]
    places: Int[Array, "R"]
    rows: Int[Array, "B T"]

    def packed(self, tokens: Array) -> Array:
        """`[B, T, ...]` to `[1, R, ...]`."""
        return tokens[self.slots, self.places][None]

    def unpacked(self, rows: Array) -> Array:
        """`[1, R, ...]` to `[B, T, ...]`. What stands behind a slot's last token is a copy."""
        return rows[0][self.rows]


def packing(lengths: Int[Array, "B"], rows: int, width: int) -> Packing:
    """Packing of slots' tokens: rows of slots that have so many tokens, at most `width` each and `rows` together."""
    ends, index = jnp.cumsum(lengths), jnp.arange(rows)
    starts, last = ends - lengths, jnp.maximum(lengths - 1, 0)
    slots = jnp.minimum(jnp.sum(index[:, None] >= ends, axis=1, dtype=jnp.int32), lengths.shape[0] - 1)
    places = jnp.clip(index - starts[slots], 0, last[slots])
    of_slots = starts[:, None] + jnp.minimum(jnp.arange(width), last[:, None])
    return Packing(slots, places, jnp.minimum(of_slots, rows - 1))


class RaggedAttend:
    """An `Attend`, `LatentAttend`, `IndexedAttend`, `CompressedAttend` and `DeltaAttend` for `[1, R, ...]`.

    Args:
      inner: the same for `[B, T, ...]`, which knows how many tokens of each slot are real.
      packing: where they lie.
    """

    def __init__(self, inner: Any, packing: Packing):
        self.inner, self.packing = inner, packing

    def __call__(self, layer: Any, qkv: Array, rotary: Any, cache: Cache) -> tuple[Array, Cache]:
        return self._around(self.inner, layer, (qkv, rotary), cache)

    def delta(self, layer: Any, projected: Array, cache: Cache) -> tuple[Array, Cache]:
        """See `DeltaAttend`."""
        return self._around(self.inner.delta, layer, (projected,), cache)

    def latent(self, layer: Any, q: Array, row: Array, rotary: Any, cache: Cache) -> tuple[Array, Cache]:
        """See `LatentAttend`."""
        return self._around(self.inner.latent, layer, (q, row, rotary), cache)

    def indexed(
        self, layer: Any, q: Array, row: Array, index: IndexRows | None, rotary: Any, cache: Cache
    ) -> tuple[Array, Cache]:
        """See `IndexedAttend`."""
        return self._around(self.inner.indexed, layer, (q, row, index, rotary), cache)

    def compressed(
        self, layer: Any, q: Array, row: Array, choice: ChoiceRows | None, cache: Cache
    ) -> tuple[Array, Cache]:
        """See `CompressedAttend`."""
        return self._around(self.inner.compressed, layer, (q, row, choice), cache)

    def _around(self, attend: Any, layer: Any, rows: tuple[Any, ...], cache: Cache) -> tuple[Array, Cache]:
        out, cache = attend(layer, *jax.tree.map(self.packing.unpacked, rows), cache)
        return self.packing.packed(out), cache
