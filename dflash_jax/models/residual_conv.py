"""Short convolution that adds to what goes into it, beside attention and feed-forwards: it keeps the last few rows of a slot.

Source: transformers' InklingShortConvolution.
"""

from typing import Any, ClassVar

import jax.numpy as jnp
from dflash_kernels.recurrent.residual_conv import (
    ResidualConvShape,
    residual_prefill,
    residual_step,
    residual_verify,
)
from dflash_kernels.recurrent.short_conv import ConvFactors, ConvState
from flax import nnx
from jaxtyping import Array, Float

from dflash_jax.models.layers import Cache, DeltaAttend


class ResidualConv(nnx.Module):
    """A convolution that the caller's `attend.delta` runs on the states that it keeps.

    Attributes the caller reads: `index` among the model's states, `shape`, and what `prefill` takes to have gradients.
    """

    differentiable: ClassVar[dict[str, Any]] = {}

    def __init__(self, shape: ResidualConvShape, index: int):
        self.index, self.shape = index, shape
        self.taps = nnx.Param(jnp.zeros((shape.channels, shape.taps)))

    def __call__(self, x: Float[Array, "B T C"], attend: DeltaAttend, cache: Cache) -> tuple[Array, Cache]:
        return attend.delta(self, x, cache)

    def verify(self, x: Array, state: ConvState) -> tuple[Array, ConvFactors]:
        """See `residual_verify`."""
        return residual_verify(x, self.taps[...], state)

    def step(self, x: Array, state: ConvState, live: Array) -> tuple[Array, ConvState]:
        """See `residual_step`."""
        return residual_step(x, self.taps[...], state, live)

    def prefill(self, x: Array, state: ConvState, **rows: Any) -> tuple[Array, ConvState]:
        """See `residual_prefill`."""
        return residual_prefill(x, self.taps[...], state, **rows)
