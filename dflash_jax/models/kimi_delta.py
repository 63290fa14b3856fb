"""Kimi delta attention: the mixer that keeps a state in place of keys and values, and forgets by channel.

Source: "Kimi Linear", arXiv 2510.26692, section 3, in the form of GLM-5.3-Flash's layers.
"""

from typing import Any, ClassVar

import jax.numpy as jnp
from dflash_kernels.recurrent.kda import (
    KdaFactors,
    KdaShape,
    KdaState,
    KdaWeights,
    kda_prefill,
    kda_step,
    kda_verify,
)
from flax import nnx
from jaxtyping import Array

from dflash_jax.models.layers import Linear, RecurrentMixer, RMSNorm


class KimiDelta(RecurrentMixer):
    """Projections around the caller's `attend.delta`, which keeps states and calls this mixer with them.

    The first projection's rows are those of queries, keys and values, of the latents of decays and of output gates, as wide as a
    head, and of write strengths. Attributes the caller reads: `index` among the model's layers of this kind, `shape`, and what
    `prefill` takes to have gradients.
    """

    differentiable: ClassVar[dict[str, Any]] = {}

    def __init__(self, hidden: int, shape: KdaShape, index: int, eps: float):
        self.index, self.shape, self.eps = index, shape, eps
        self.in_proj = Linear(shape.channels + 2 * shape.dim + shape.heads, hidden)
        self.decay_proj, self.gate_proj = (Linear(shape.width, shape.dim) for _ in range(2))
        self.conv = nnx.Param(jnp.zeros((shape.channels, 4), jnp.float32))
        self.a_log = nnx.Param(jnp.zeros((shape.heads,), jnp.float32))
        self.dt_bias = nnx.Param(jnp.zeros((shape.width,), jnp.float32))
        self.norm = RMSNorm(shape.dim, eps)
        self.out_proj = Linear(hidden, shape.width)

    @property
    def weights(self) -> KdaWeights:
        """Weights of the delta rule beside the projections."""
        return KdaWeights(self.conv[...], self.a_log[...], self.dt_bias[...], self.norm.weight[...])

    def columns(self, projected: Array) -> Array:
        """A token's columns as `kda_verify` takes them."""
        first, dim = self.shape.channels, self.shape.dim
        own, decay, gate, strength = jnp.split(projected, [first, first + dim, first + 2 * dim], axis=-1)
        return jnp.concatenate([own, self.decay_proj(decay), self.gate_proj(gate), strength], axis=-1)

    def verify(self, projected: Array, state: KdaState) -> tuple[Array, KdaFactors]:
        """See `kda_verify`."""
        return kda_verify(self.columns(projected), self.weights, state, self.shape, eps=self.eps)

    def step(self, projected: Array, state: KdaState, live: Array) -> tuple[Array, KdaState]:
        """See `kda_step`."""
        return kda_step(self.columns(projected), self.weights, state, live, self.shape, eps=self.eps)

    def prefill(self, projected: Array, state: KdaState, **rows: Any) -> tuple[Array, KdaState]:
        """See `kda_prefill`."""
        return kda_prefill(self.columns(projected), self.weights, state, self.shape, eps=self.eps, **rows)
