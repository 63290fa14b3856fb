"""Short convolutions along tokens, with a few rows as each slot's state: verification, its fold, plain steps, prompts in pieces.

A token's columns are `b | c | x`. Each channel of `b * x` is summed over the last few tokens with weights of its own, in float32,
rounded then, and `c` times that sum is the output. Operations of XLA alone, which no GPU has timed.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflash_kernels.recurrent.rows import folded_rows, prompt_rows, summed_taps


@dataclass(frozen=True)
class ConvShape:
    """Sizes of a short convolution: its channels, and the tokens that it reaches over, the newest included."""

    channels: int
    taps: int

    @property
    def columns(self) -> int:
        """Of a token's projection: b, c and x."""
        return 3 * self.channels


class ConvState(NamedTuple):
    """Of each slot the gated rows `b * x` before its next token, `[B, taps - 1, C]` in the model's dtype; zeros at first."""

    rows: Array


class ConvFactors(NamedTuple):
    """Gated rows of verified tokens, `[B, T, C]`."""

    rows: Array


def conv_verify(
    projected: Float[Array, "B T W"], taps: Float[Array, "C taps"], state: ConvState
) -> tuple[Float[Array, "B T C"], ConvFactors]:
    """T tokens of each slot from its state, which stays as it is. A token depends on none after it.

    Args:
      taps: of every channel, weights of the tokens from the farthest to the newest.
      state: of the B slots. One that nobody uses may hold anything.
    """
    gated, c = _gated(projected)
    return c * summed_taps(jnp.concatenate([state.rows, gated], axis=1), taps).astype(c.dtype), ConvFactors(gated)


def conv_fold(state: ConvState, factors: ConvFactors, counts: Int[Array, "B"]) -> ConvState:
    """The states after the first `counts[b]` of the tokens that `factors` are of; 0 leaves a slot as it is, bit for bit."""
    return ConvState(folded_rows(state.rows, factors.rows, counts))


def conv_step(
    projected: Float[Array, "B 1 W"], taps: Float[Array, "C taps"], state: ConvState, live: Bool[Array, "B"]
) -> tuple[Float[Array, "B 1 C"], ConvState]:
    """One token of each slot, and the states after it; slots that are not live keep theirs, bit for bit."""
    out, factors = conv_verify(projected, taps, state)
    return out, conv_fold(state, factors, live.astype(jnp.int32))


def conv_prefill(
    projected: Float[Array, "n L W"],
    taps: Float[Array, "C taps"],
    state: ConvState,
    *,
    slots: Int[Array, "n"],
    follows: Bool[Array, "n"],
    fresh: Bool[Array, "n"],
    lengths: Int[Array, "n"],
) -> tuple[Float[Array, "n L C"], ConvState]:
    """Prompts: n rows of up to L tokens, some of them pieces of one prompt in order; arguments are those of `delta_prefill`."""
    gated, c = _gated(projected)
    rows, after, targets = prompt_rows(gated, state.rows, slots=slots, follows=follows, fresh=fresh, lengths=lengths)
    return c * summed_taps(rows, taps).astype(c.dtype), ConvState(state.rows.at[targets].set(after, mode="drop"))


def _gated(projected: Float[Array, "B T W"]) -> tuple[Float[Array, "B T C"], Float[Array, "B T C"]]:
    """`b * x`, and c."""
    b, c, x = jnp.split(projected, 3, axis=-1)
    return b * x, c
