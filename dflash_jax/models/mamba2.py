"""Mamba 2: the mixer whose state decays by head and token, and is read by what the token says.

Source: "Transformers are SSMs", arXiv 2405.21060, section 7, in the form of transformers' NemotronHMamba2Mixer.
"""

from typing import Any, ClassVar

import jax.numpy as jnp
from dflash_kernels.recurrent.mamba2 import (
    Mamba2Factors,
    Mamba2Shape,
    Mamba2State,
    Mamba2Weights,
    mamba2_prefill,
    mamba2_step,
    mamba2_verify,
)
from flax import nnx
from jaxtyping import Array

from dflash_jax.models.layers import Linear, RecurrentMixer, RMSNorm
from dflash_jax.models.parameters import Parameter, Source, single


class Mamba2(RecurrentMixer):
    """Projections around the caller's `attend.delta`, which has convolution, recurrence, gate and norm.

    Attributes the caller reads: `index` among the model's layers of Mamba 2, `shape`, and what `prefill` takes to have gradients.
    """

    differentiable: ClassVar[dict[str, Any]] = {}

    def __init__(self, hidden: int, shape: Mamba2Shape, index: int, eps: float):
        self.index, self.shape, self.eps = index, shape, eps
        self.in_proj = Linear(shape.columns, hidden)
        self.conv, self.conv_bias = (nnx.Param(jnp.zeros((shape.channels, *more))) for more in ((shape.taps,), ()))
        self.a_log, self.dt_bias, self.d = (nnx.Param(jnp.zeros((shape.heads,), jnp.float32)) for _ in range(3))
        self.norm = RMSNorm(shape.inner, eps)
        self.out_proj = Linear(hidden, shape.inner)

    @property
    def weights(self) -> Mamba2Weights:
        """Weights beside the projections."""
        of_heads = self.a_log[...], self.dt_bias[...], self.d[...]
        return Mamba2Weights(self.conv[...], self.conv_bias[...], *of_heads, self.norm.weight[...])

    def verify(self, projected: Array, state: Mamba2State) -> tuple[Array, Mamba2Factors]:
        """See `mamba2_verify`."""
        return mamba2_verify(projected, self.weights, state, self.shape, eps=self.eps)

    def step(self, projected: Array, state: Mamba2State, live: Array) -> tuple[Array, Mamba2State]:
        """See `mamba2_step`."""
        return mamba2_step(projected, self.weights, state, live, self.shape, eps=self.eps)

    def prefill(self, projected: Array, state: Mamba2State, **rows: Any) -> tuple[Array, Mamba2State]:
        """See `mamba2_prefill`."""
        return mamba2_prefill(projected, self.weights, state, self.shape, eps=self.eps, **rows)


def mamba2_parameters(shape: Mamba2Shape, hidden: int, ours: str, theirs: str) -> list[Parameter]:
    """Parameters of one mixer whose checkpoint names start with `theirs`."""
    c, taps = shape.channels, shape.taps
    # Rounded, the decay would be wrong by a factor to the power of the context's length.
    of_heads = {"a_log": "A_log", "dt_bias": "dt_bias", "d": "D"}
    return [
        single(f"{ours}in_proj.weight", f"{theirs}in_proj.weight", (shape.columns, hidden)),
        Parameter(f"{ours}conv", (Source(f"{theirs}conv1d.weight", (c, 1, taps), kept=(c, taps)),)),
        single(f"{ours}conv_bias", f"{theirs}conv1d.bias", (c,)),
        *(single(f"{ours}{own}", f"{theirs}{name}", (shape.heads,), "float32") for own, name in of_heads.items()),
        single(f"{ours}norm.weight", f"{theirs}norm.weight", (shape.inner,)),
        single(f"{ours}out_proj.weight", f"{theirs}out_proj.weight", (hidden, shape.inner)),
    ]
