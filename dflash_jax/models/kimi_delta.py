"""Kimi delta attention: the mixer that keeps a state in place of keys and values, and forgets by channel.

Source: "Kimi Linear", arXiv 2510.26692, section 3, in the form of Kimi-Linear's and GLM-5.3-Flash's layers.
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

from dflash_jax.config import KeyReader, shown
from dflash_jax.errors import ConfigError
from dflash_jax.models.layers import Linear, RecurrentMixer, RMSNorm
from dflash_jax.models.parameters import Parameter, Source, single
from dflash_jax.models.traits import DeltaTraits

# Keys of a file, and those inside of its `linear_attn_config`.
_SIZES = {
    "linear_num_heads": "num_heads", "linear_head_dim": "head_dim", "linear_conv_kernel_dim": "short_conv_kernel_size",
}  # fmt: skip


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


def delta_keys(
    keys: KeyReader, full: tuple[int, ...], layers: int, *, heads: int, bound: float | None, first: int = 0
) -> dict[str, Any]:
    """Heads of layers with this mixer, their size, and the bound of decays where the family has one.

    A file has keys of its own for them, or `linear_attn_config`.

    Args:
      full: the other layers.
      heads: what absent keys mean.
      bound: what an absent bound means; None where the family has no key for one.
      first: number of the first layer in the lists of `linear_attn_config`.

    Raises:
      ConfigError: a value that cannot be, both say different things, or the lists of layers are others.
    """
    inner = KeyReader(f"{keys.subject}, linear_attn_config", keys.get("linear_attn_config", {}))
    for outer, name in _SIZES.items():
        both = keys.values.get(outer), inner.values.get(name)
        if None not in both and both[0] != both[1]:
            raise ConfigError(f"{keys.subject}: {outer} and {name} of linear_attn_config say two things; keep one")
    absent = {"linear_num_heads": heads, "linear_head_dim": 128, "linear_conv_kernel_dim": 4}
    count, dim, taps = (inner.integer(name, keys.integer(outer, absent[outer])) for outer, name in _SIZES.items())
    if taps != 4:
        raise ConfigError(f"{inner.subject}: short_conv_kernel_size must be 4, got {taps}")
    found: dict[str, Any] = {"linear_heads": count, "linear_head_dim": dim}
    if bound is not None:
        found["linear_lower_bound"] = _bound(keys, inner, bound)
    listed = {
        "kda_layers": [i + first for i in range(layers) if i not in full],
        "full_attn_layers": [i + first for i in full],
    }
    inner.refuse_rest((), {name: (None, places) for name, places in listed.items()})
    return found


def _bound(keys: KeyReader, inner: KeyReader, absent: float) -> float | None:
    """The bound of decays. null says that there is none, unless gates of `linear_attn_config` are safe, which they are where it
    does not say so."""
    own = keys.values.get("linear_lower_bound", absent)
    keys.read.add("linear_lower_bound")
    bound = inner.values.get("gate_lower_bound", own)
    inner.read.add("gate_lower_bound")
    if inner.flag("safe_gate", default=True) and bound is None and inner.values:
        bound = absent
    if bound is None:
        return None
    said = KeyReader(inner.subject, {"gate_lower_bound": bound}).number("gate_lower_bound")
    if said >= 0:
        raise ConfigError(f"{inner.subject}: gate_lower_bound must be a negative number or null, got {shown(bound)}")
    return said


def kda_traits(shape: KdaShape) -> DeltaTraits:
    """Traits of layers with this mixer."""
    return DeltaTraits(shape.channels + 2 * shape.dim + shape.heads, shape.width)


def kda_parameters(
    hidden: int, shape: KdaShape, ours: str, theirs: str, *, rates: tuple[int, ...] | None = None
) -> list[Parameter]:
    """Parameters of one `KimiDelta`. Rows of its projection and of its convolution are apart in a checkpoint.

    Args:
      rates: shape of the rates of decay in a checkpoint; None for one number a head.
    """
    width, dim, heads = shape.width, shape.dim, shape.heads
    rates = (heads,) if rates is None else rates
    rows = {"q": width, "k": width, "v": width, "f_a": dim, "g_a": dim, "b": heads}
    convs = (Source(f"{theirs}{name}_conv1d.weight", (width, 1, 4), kept=(width, 4)) for name in "qkv")
    return [
        Parameter(
            f"{ours}in_proj.weight",
            tuple(Source(f"{theirs}{name}_proj.weight", (count, hidden)) for name, count in rows.items()),
        ),
        single(f"{ours}decay_proj.weight", f"{theirs}f_b_proj.weight", (width, dim)),
        single(f"{ours}gate_proj.weight", f"{theirs}g_b_proj.weight", (width, dim)),
        Parameter(f"{ours}conv", tuple(convs), dtype="float32"),
        # Rounded, the decay would be wrong by a factor to the power of the context's length.
        Parameter(f"{ours}a_log", (Source(f"{theirs}A_log", rates, kept=(heads,)),), dtype="float32"),
        single(f"{ours}dt_bias", f"{theirs}dt_bias", (width,), "float32"),
        single(f"{ours}norm.weight", f"{theirs}o_norm.weight", (dim,)),
        single(f"{ours}out_proj.weight", f"{theirs}o_proj.weight", (hidden, width)),
    ]
