"""Short convolutions that add to what goes into them, with a few rows as each slot's state.

Each channel of x is summed over the last few tokens with weights of its own and added to x, in float32, and rounded then. States
and their fold are those of `short_conv`. Operations of XLA alone, which no GPU has timed.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflash_kernels.recurrent.rows import prompt_rows, summed_taps
from dflash_kernels.recurrent.short_conv import ConvFactors, ConvState, conv_fold


@dataclass(frozen=True)
class ResidualConvShape:
    """Sizes of such a convolution: its channels, and the tokens that it reaches over, the newest included."""

    channels: int
    taps: int


def residual_verify(
    x: Float[Array, "B T C"], taps: Float[Array, "C taps"], state: ConvState
) -> tuple[Float[Array, "B T C"], ConvFactors]:
    """T tokens of each slot from its state, which stays as it is. A token depends on none after it.

    Args:
      taps: of every channel, weights of the tokens from the farthest to the newest.
      state: of the B slots, rows of x. One that nobody uses may hold anything.
    """
    return _added(x, jnp.concatenate([state.rows.astype(x.dtype), x], axis=1), taps), ConvFactors(x)


def residual_step(
    x: Float[Array, "B 1 C"], taps: Float[Array, "C taps"], state: ConvState, live: Bool[Array, "B"]
) -> tuple[Float[Array, "B 1 C"], ConvState]:
    """One token of each slot, and the states after it; slots that are not live keep theirs, bit for bit."""
    out, factors = residual_verify(x, taps, state)
    return out, conv_fold(state, factors, live.astype(jnp.int32))


def residual_prefill(
    x: Float[Array, "n L C"],
    taps: Float[Array, "C taps"],
    state: ConvState,
    *,
    slots: Int[Array, "n"],
    follows: Bool[Array, "n"],
    fresh: Bool[Array, "n"],
    lengths: Int[Array, "n"],
) -> tuple[Float[Array, "n L C"], ConvState]:
    """Prompts: n rows of up to L tokens, some of them pieces of one prompt in order; arguments are those of `delta_prefill`."""
    rows, after, targets = prompt_rows(x, state.rows, slots=slots, follows=follows, fresh=fresh, lengths=lengths)
    return _added(x, rows, taps), ConvState(state.rows.at[targets].set(after, mode="drop"))


def _added(
    x: Float[Array, "B T C"], rows: Float[Array, "B R C"], taps: Float[Array, "C taps"]
) -> Float[Array, "B T C"]:
    return (summed_taps(rows, taps) + x.astype(jnp.float32)).astype(x.dtype)
