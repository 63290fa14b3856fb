"""Short convolution: the mixer of LFM2's layers that keep the last few rows in place of keys and values.

Source: transformers' Lfm2ShortConv.
"""

from typing import Any, ClassVar

import jax.numpy as jnp
from dflash_kernels.recurrent.short_conv import (
    ConvFactors,
    ConvShape,
    ConvState,
    conv_prefill,
    conv_step,
    conv_verify,
)
from flax import nnx
from jaxtyping import Array

from dflash_jax.models.layers import Linear, RecurrentMixer


class ShortConv(RecurrentMixer):
    """Projections around the caller's `attend.delta`, which keeps states and calls this mixer with them.

    Attributes the caller reads: `index` among the model's short convolutions, `shape`, and what `prefill` takes to have gradients.
    """

    differentiable: ClassVar[dict[str, Any]] = {}

    def __init__(self, hidden: int, shape: ConvShape, index: int):
        self.index, self.shape = index, shape
        self.in_proj = Linear(shape.columns, hidden)
        self.taps = nnx.Param(jnp.zeros((shape.channels, shape.taps)))
        self.out_proj = Linear(hidden, shape.channels)

    def verify(self, projected: Array, state: ConvState) -> tuple[Array, ConvFactors]:
        """See `conv_verify`."""
        return conv_verify(projected, self.taps[...], state)

    def step(self, projected: Array, state: ConvState, live: Array) -> tuple[Array, ConvState]:
        """See `conv_step`."""
        return conv_step(projected, self.taps[...], state, live)

    def prefill(self, projected: Array, state: ConvState, **rows: Any) -> tuple[Array, ConvState]:
        """See `conv_prefill`."""
        return conv_prefill(projected, self.taps[...], state, **rows)
