"""Gated delta net: the mixer that keeps a state in place of keys and values.

Source: "Gated Delta Networks: Improving Mamba2 with Delta Rule", arXiv 2412.06464, section 3, in the form of Qwen3-Next's layers.
"""

from typing import Any, ClassVar

import jax.numpy as jnp
from dflash_kernels import (
    DeltaFactors,
    DeltaShape,
    DeltaState,
    DeltaWeights,
    delta_prefill,
    delta_step,
    delta_verify,
)
from flax import nnx
from jaxtyping import Array

from dflash_jax.models.layers import Linear, RecurrentMixer, RMSNorm, SummedLinear


class DeltaNet(RecurrentMixer):
    """Projections around the caller's `attend.delta`, which has convolution, delta rule, norm and output gate.

    Attributes the caller reads: `index` among the model's gated delta nets, `shape`, `weights`, `eps`, and what `prefill` takes to
    have gradients.
    """

    differentiable: ClassVar[dict[str, Any]] = {"implementation": "xla"}  # kernels have none

    def __init__(self, hidden: int, shape: DeltaShape, index: int, eps: float):
        self.index, self.shape, self.eps = index, shape, eps
        self.in_proj = Linear(shape.columns, hidden)
        self.conv = nnx.Param(jnp.zeros((shape.channels, 4)))
        self.a_log, self.dt_bias = (nnx.Param(jnp.zeros((shape.value_heads,), jnp.float32)) for _ in range(2))
        self.norm = RMSNorm(shape.value_dim, eps)
        self.out_proj = SummedLinear(hidden, shape.value_heads * shape.value_dim)

    @property
    def weights(self) -> DeltaWeights:
        """Weights of the delta rule beside the projection."""
        return DeltaWeights(self.conv[...], self.a_log[...], self.dt_bias[...], self.norm.weight[...])

    def verify(self, projected: Array, state: DeltaState) -> tuple[Array, DeltaFactors]:
        """See `dflash_kernels.delta_verify`."""
        return delta_verify(projected, self.weights, state, self.shape, eps=self.eps)

    def step(self, projected: Array, state: DeltaState, live: Array) -> tuple[Array, DeltaState]:
        """See `dflash_kernels.delta_step`."""
        return delta_step(projected, self.weights, state, live, self.shape, eps=self.eps)

    def prefill(self, projected: Array, state: DeltaState, **rows: Any) -> tuple[Array, DeltaState]:
        """See `dflash_kernels.delta_prefill`."""
        return delta_prefill(projected, self.weights, state, self.shape, eps=self.eps, **rows)
