"""Two rotations of heads in one model, that of layers with a window and that of the others, each computed once for all layers.

Their tables lie side by side, the former's first. A layer takes the columns that are its own.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Int

from dflash_jax.config import RopeConfig
from dflash_jax.models.decoder import Decoder
from dflash_jax.models.layers import Rotary, rope_frequencies, rotary_tables

type Rotations = Sequence[tuple[RopeConfig, int]]  # of both, with the size of the heads that turn by it
type Columns = tuple[int, int]


class TwoRotationsDecoder(Decoder):
    """A decoder whose configuration has two rotations."""

    def rotary(self, positions: Int[Array, "B T"]) -> Rotary:
        """Both rotations at `positions`, `[B, T, half of what turns]` of each, side by side in float32."""
        both = [rotary_tables(positions, rope, dim) for rope, dim in self.config.rotations]
        return Rotary(*(jnp.concatenate(sides, axis=-1) for sides in zip(*both, strict=True)))


def own_columns(rotations: Rotations, window: int | None) -> Columns:
    """The first column of a layer with such a window, or None for none, and the one after its last."""
    local, full = (rope_frequencies(rope, dim)[0].size for rope, dim in rotations)
    return (local, local + full) if window is None else (0, local)


def own_rotation(rotary: Rotary, columns: Columns) -> Rotary:
    """One layer's rotation, of both."""
    first, end = columns
    return Rotary(*(side[..., first:end] for side in rotary))
