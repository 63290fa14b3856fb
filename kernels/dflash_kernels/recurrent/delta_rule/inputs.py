"""Inputs and outputs of the gated delta rule: sizes, weights, states and factors, and the arithmetic around the recurrence.

Letters: B slots, T tokens, Hk key heads, Hv value heads, dk and dv their widths, C channels of the convolution, W columns. All that
touches the recurrence is float32 at full precision: XLA would take tf32 on GPUs.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

TAPS = 4  # of the convolution: a token and the three before it
KEPT = TAPS - 1

einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


@dataclass(frozen=True)
class DeltaShape:
    """Sizes of a gated delta net. Value head j uses key head `j // (value_heads // key_heads)`.

    `gate` is the activation of z, "silu" or "sigmoid"; kernels of verification and of steps have the former.

    Raises:
      ValueError: a size is no whole number from 1 on, the value heads are no multiple of the key heads, or the gate is another one.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    gate: str = "silu"

    def __post_init__(self) -> None:
        for name in ("key_heads", "value_heads", "key_dim", "value_dim"):
            number = getattr(self, name)
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise ValueError(f"{name} must be a whole number, 1 or more, not {number!r}")
        if self.gate not in ("silu", "sigmoid"):
            raise ValueError(f"gate must be silu or sigmoid, not {self.gate!r}")
        if self.value_heads % self.key_heads:
            raise ValueError(f"value_heads {self.value_heads} must be a multiple of key_heads {self.key_heads}")

    @property
    def heads_per_key(self) -> int:
        """Value heads that share a key head."""
        return self.value_heads // self.key_heads

    @property
    def channels(self) -> int:
        """C: columns that go through the convolution, q | k | v."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def columns(self) -> int:
        """W: all columns of a projected token, q | k | v | z | b | a."""
        return self.channels + self.value_heads * (self.value_dim + 2)


class DeltaWeights(NamedTuple):
    """Weights of one layer: `conv`, whose last column multiplies the newest token, `a_log` and `dt_bias` of the decay, float32, and
    `norm` of the gated norm, plain and shared by all heads.
    """

    conv: Float[Array, "C 4"]
    a_log: Float[Array, "Hv"]
    dt_bias: Float[Array, "Hv"]
    norm: Float[Array, "dv"]


class DeltaState(NamedTuple):
    """Recurrent state of slots: `s`, float32, and the last three rows before the convolution, newest last."""

    s: Float[Array, "B Hv dk dv"]
    conv: Float[Array, "B 3 C"]


class DeltaFactors(NamedTuple):
    """Verified tokens, from which the state after any number of them follows without a second pass.

    `k`, float32, is normed; `u`, float32, is what each token writes along its key, later ones already without what earlier ones
    wrote; `cum`, float32, is the log of the decay since the state that was verified from; `rows` are the tokens' own rows before
    the convolution.
    """

    k: Float[Array, "B T Hk dk"]
    u: Float[Array, "B T Hv dv"]
    cum: Float[Array, "B T Hv"]
    rows: Float[Array, "B T C"]


class Tokens(NamedTuple):
    """Inputs of the recurrence, in float32: q is scaled, `g` is the log of a token's decay, at most 0."""

    q: Float[Array, "B T Hk dk"]
    k: Float[Array, "B T Hk dk"]
    v: Float[Array, "B T Hv dv"]
    beta: Float[Array, "B T Hv"]
    g: Float[Array, "B T Hv"]


def with_earlier(projected: Float[Array, "B T W"], earlier: Float[Array, "B 3 C"]) -> Float[Array, "B R C"]:
    """Rows before the convolution: those of `earlier` tokens, then the tokens' own."""
    return jnp.concatenate([earlier.astype(projected.dtype), projected[..., : earlier.shape[-1]]], axis=1)


def tokens_of(
    rows: Float[Array, "B R C"],
    projected: Float[Array, "B T W"],
    weights: DeltaWeights,
    shape: DeltaShape,
    live: Bool[Array, "B T"] | None = None,
) -> Tokens:
    """Convolution, SiLU, norms of keys and queries, and gates. Tokens that are not `live` change no state: their gates and keys are
    0, whatever they hold.
    """
    b, t, _ = projected.shape
    rows, weight = rows.astype(jnp.float32), weights.conv.astype(jnp.float32)
    mixed = sum((rows[:, tap : tap + t] * weight[:, tap] for tap in range(TAPS)), start=jnp.zeros((), jnp.float32))
    width = shape.key_heads * shape.key_dim
    q, k, v = jnp.split(jax.nn.silu(mixed), [width, 2 * width], axis=-1)
    q, k = (unit(part.reshape(b, t, shape.key_heads, shape.key_dim)) for part in (q, k))
    v = v.reshape(b, t, shape.value_heads, shape.value_dim)
    gates = projected[..., shape.channels + shape.value_heads * shape.value_dim :].astype(jnp.float32)
    of_beta, of_decay = jnp.split(gates, 2, axis=-1)
    beta = jax.nn.sigmoid(of_beta)
    decay = jax.nn.softplus(of_decay + weights.dt_bias.astype(jnp.float32))
    g = -jnp.exp(weights.a_log.astype(jnp.float32)) * decay
    if live is not None:
        beta, g = jnp.where(live[..., None], beta, 0.0), jnp.where(live[..., None], g, 0.0)
        q, k, v = (jnp.where(live[..., None, None], part, 0.0) for part in (q, k, v))
    return Tokens(q * shape.key_dim**-0.5, k, v, beta, g)


def unit(x: Float[Array, "... dk"]) -> Float[Array, "... dk"]:
    """Divided by its length; the small number is added to the sum of squares, not to their mean."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def gated_norm(
    out: Float[Array, "B T Hv dv"],
    projected: Float[Array, "B T W"],
    weights: DeltaWeights,
    shape: DeltaShape,
    eps: float,
) -> Float[Array, "B T O"]:
    """RMS norm of each head, times the activation of z: `Hv * dv` numbers in the dtype of `projected`, to which `out` is rounded
    first."""
    dtype, width = projected.dtype, shape.value_heads * shape.value_dim
    wide = out.astype(dtype).astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    z = projected[..., shape.channels : shape.channels + width].reshape(out.shape).astype(jnp.float32)
    common = jnp.promote_types(weights.norm.dtype, dtype)
    weighted = weights.norm.astype(common) * normed.astype(dtype).astype(common)
    gated = weighted.astype(jnp.float32) * (jax.nn.silu(z) if shape.gate == "silu" else jax.nn.sigmoid(z))
    return gated.astype(dtype).reshape(*out.shape[:2], width)
