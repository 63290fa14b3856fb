"""Mamba 2 along tokens, with a state of constant size for each slot: verification, its fold, plain steps, prompts in pieces.

Source: "Transformers are SSMs", arXiv 2405.21060, section 7, in the form of transformers' NemotronHMamba2Mixer. A token's columns
are `z | x | B | C | dt`; x, B and C go through a convolution along tokens with silu. For each head, with B and C of its group,
`dt = clamp(softplus(dt + dt_bias))` and `A = -exp(a_log)`, all in float32:

    S = exp(dt A) S + dt x B^T;  y = S C + d x;  out = norm_of_groups(y silu(z))

`mamba2_reference` says so token after token; the others sum a chunk of tokens at once. Operations of XLA alone, which no GPU has
timed.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflash_kernels.recurrent.rows import before_prompts, folded_rows, prompt_rows, summed_taps

_EXACT = jax.lax.Precision.HIGHEST


@dataclass(frozen=True)
class Mamba2Shape:
    """Sizes of a Mamba 2 mixer.

    Attributes:
      heads, head_dim: H and P.
      groups: G, heads of which share B and C.
      state_dim: N.
      taps: tokens that the convolution reaches over, the newest included.
      chunk: tokens of a prompt that are summed at once.
      limits: the least and the greatest dt.
    """

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    taps: int
    chunk: int
    limits: tuple[float, float]

    @property
    def inner(self) -> int:
        """Columns of x, of z and of the output."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Columns that are convolved: x, B and C."""
        return self.inner + 2 * self.groups * self.state_dim

    @property
    def columns(self) -> int:
        """Of a token's projection."""
        return self.inner + self.channels + self.heads


class Mamba2Weights(NamedTuple):
    """Weights of a mixer beside its projections; the first two and `norm` in the model's dtype, the others float32."""

    conv: Float[Array, "C taps"]
    conv_bias: Float[Array, "C"]
    a_log: Float[Array, "H"]
    dt_bias: Float[Array, "H"]
    d: Float[Array, "H"]
    norm: Float[Array, "D"]


class Mamba2State(NamedTuple):
    """Of each slot S `[B, H, P, N]` in float32 and the rows `[B, taps - 1, C]` before its next token, as projected, in the model's
    dtype; zeros at first."""

    s: Array
    rows: Array


class Mamba2Factors(NamedTuple):
    """What the state after any of T verified tokens is made from: `dt x` `[B, T, H, P]`, B `[B, T, G, N]` and the sums of `dt A`
    up to each token `[B, T, H]` in float32, and the rows `[B, T, C]` as projected."""

    x: Array
    b: Array
    decay: Array
    rows: Array


class _Tokens(NamedTuple):
    """Tokens after the convolution, in float32; heads are `[G, H / G]`, r of each group."""

    z: Float[Array, "*n D"]
    x: Float[Array, "*n G r P"]
    b: Float[Array, "*n G N"]
    c: Float[Array, "*n G N"]
    dt: Float[Array, "*n G r"]
    log_decay: Float[Array, "*n G r"]


def mamba2_verify(
    projected: Float[Array, "B T W"], weights: Mamba2Weights, state: Mamba2State, shape: Mamba2Shape, *, eps: float
) -> tuple[Float[Array, "B T D"], Mamba2Factors]:
    """T tokens of each slot from its state, which is read once and stays as it is. A token depends on none after it.

    Args:
      state: of the B slots. One that nobody uses may hold anything.
      eps: of the norm.
    """
    raw = projected[..., shape.inner : shape.inner + shape.channels]
    tokens = _tokens(projected, jnp.concatenate([state.rows, raw], axis=1), weights, shape)
    cum = jnp.cumsum(tokens.log_decay, axis=1)
    x = tokens.x * tokens.dt[..., None]
    s = _grouped(state.s, shape)
    carried = jnp.einsum("btgn,bgrpn->btgrp", tokens.c, s, precision=_EXACT) * jnp.exp(cum)[..., None]
    y = carried + _within(tokens.b, tokens.c, x, cum)
    return _out(y, tokens, weights, shape, eps, projected.dtype), Mamba2Factors(
        x.reshape(*x.shape[:2], shape.heads, -1), tokens.b, cum.reshape(*cum.shape[:2], -1), raw
    )


def mamba2_fold(state: Mamba2State, factors: Mamba2Factors, counts: Int[Array, "B"]) -> Mamba2State:
    """The states after the first `counts[b]` of the tokens that `factors` are of; 0 leaves a slot as it is, bit for bit."""
    groups = factors.b.shape[2]
    kept = (jnp.arange(factors.x.shape[1]) < counts[:, None])[..., None]
    last = jnp.take_along_axis(factors.decay, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)
    # What does not stand may be NaN.
    weight = jnp.exp(jnp.where(kept, last - factors.decay, -jnp.inf))
    x = jnp.where(kept[..., None], factors.x * weight[..., None], 0)
    x = x.reshape(*x.shape[:2], groups, -1, x.shape[-1])
    b = jnp.where(kept[..., None], factors.b, 0)
    added = jnp.einsum("btgrp,btgn->bgrpn", x, b, precision=_EXACT).reshape(state.s.shape)
    s = jnp.exp(last[:, 0])[..., None, None] * state.s + added
    s = jnp.where((counts > 0)[:, None, None, None], s, state.s)
    return Mamba2State(s, folded_rows(state.rows, factors.rows, counts))


def mamba2_step(
    projected: Float[Array, "B 1 W"],
    weights: Mamba2Weights,
    state: Mamba2State,
    live: Bool[Array, "B"],
    shape: Mamba2Shape,
    *,
    eps: float,
) -> tuple[Float[Array, "B 1 D"], Mamba2State]:
    """One token of each slot, and the states after it; slots that are not live keep theirs, bit for bit."""
    out, factors = mamba2_verify(projected, weights, state, shape, eps=eps)
    return out, mamba2_fold(state, factors, live.astype(jnp.int32))


def mamba2_prefill(
    projected: Float[Array, "n L W"],
    weights: Mamba2Weights,
    state: Mamba2State,
    shape: Mamba2Shape,
    *,
    eps: float,
    slots: Int[Array, "n"],
    follows: Bool[Array, "n"],
    fresh: Bool[Array, "n"],
    lengths: Int[Array, "n"],
) -> tuple[Float[Array, "n L D"], Mamba2State]:
    """Prompts: n rows of up to L tokens, some of them pieces of one prompt in order; arguments are those of `delta_prefill`."""
    length = projected.shape[1]
    of_rows = {"slots": slots, "follows": follows, "fresh": fresh, "lengths": lengths}
    live = jnp.arange(length) < lengths[:, None]
    projected = jnp.where(live[..., None], projected, 0)  # NaN past a row's tokens would spread through products
    raw = projected[..., shape.inner : shape.inner + shape.channels]
    rows, after_rows, targets = prompt_rows(raw, state.rows, **of_rows)
    tokens = _tokens(projected, rows, weights, shape, live)
    chunk = min(shape.chunk, length)
    b, c, x, log_decay = (
        _chunks(one, chunk) for one in (tokens.b, tokens.c, tokens.x * tokens.dt[..., None], tokens.log_decay)
    )
    cum = jnp.cumsum(log_decay, axis=2)
    ends = jnp.exp(cum[:, :, -1])
    to_end = x * jnp.exp(cum[:, :, -1:] - cum)[..., None]
    added = jnp.einsum("nktgrp,nktgs->nkgrps", to_end, b, precision=_EXACT)

    own = _grouped(before_prompts(state.s, slots, fresh), shape)

    def of_chunk(s: Array, told: tuple[Array, Array]) -> tuple[Array, Array]:
        end, added = told
        return end[..., None, None] * s + added, s

    def of_row(before: Array, told: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        own, goes_on, ends, added = told
        after, entering = jax.lax.scan(of_chunk, jnp.where(goes_on, before, own), (ends, added))
        return after, (after, entering)

    _, (after, entering) = jax.lax.scan(of_row, jnp.zeros_like(own[0]), (own, follows, ends, added))
    carried = jnp.einsum("nktgs,nkgrps->nktgrp", c, entering, precision=_EXACT) * jnp.exp(cum)[..., None]
    y = carried + jax.vmap(_within)(b, c, x, cum)
    y = y.reshape(len(slots), -1, *y.shape[3:])[:, :length]
    s = state.s.at[targets].set(after.reshape(len(slots), *state.s.shape[1:]), mode="drop")
    kept = Mamba2State(s, state.rows.at[targets].set(after_rows, mode="drop"))
    return _out(y, tokens, weights, shape, eps, projected.dtype), kept


def mamba2_reference(
    projected: Float[Array, "B T W"], weights: Mamba2Weights, state: Mamba2State, shape: Mamba2Shape, *, eps: float
) -> tuple[Float[Array, "B T D"], Mamba2State]:
    """The definition, token after token: outputs, and the states after the last one."""
    raw = projected[..., shape.inner : shape.inner + shape.channels]
    rows = jnp.concatenate([state.rows, raw], axis=1)
    tokens = _tokens(projected, rows, weights, shape)

    def token(s: Array, told: tuple[Array, ...]) -> tuple[Array, Array]:
        x, b, c, dt, log_decay = told
        added = jnp.einsum("bgrp,bgn->bgrpn", x * dt[..., None], b, precision=_EXACT)
        s = jnp.exp(log_decay)[..., None, None] * s + added
        return s, jnp.einsum("bgrpn,bgn->bgrp", s, c, precision=_EXACT)

    in_order = tuple(jnp.moveaxis(one, 1, 0) for one in tokens[1:])
    s, y = jax.lax.scan(token, _grouped(state.s, shape), in_order)
    out = _out(jnp.moveaxis(y, 0, 1), tokens, weights, shape, eps, projected.dtype)
    return out, Mamba2State(s.reshape(state.s.shape), rows[:, raw.shape[1] :])


def _tokens(
    projected: Array, rows: Array, weights: Mamba2Weights, shape: Mamba2Shape, live: Array | None = None
) -> _Tokens:
    """Tokens of a projection `[n, T, W]` whose convolved columns, behind the rows before them, are `rows`.

    `live`: which tokens there are; others leave the state as it is.
    """
    z, dt = projected[..., : shape.inner], projected[..., shape.inner + shape.channels :]
    convolved = summed_taps(rows, weights.conv) + weights.conv_bias.astype(jnp.float32)
    convolved = jax.nn.silu(convolved).astype(projected.dtype).astype(jnp.float32)
    x, b, c = jnp.split(convolved, [shape.inner, shape.inner + shape.groups * shape.state_dim], axis=-1)
    dt = jnp.clip(jax.nn.softplus(dt.astype(jnp.float32) + weights.dt_bias), *shape.limits)
    dt = dt if live is None else jnp.where(live[..., None], dt, 0)
    of_groups = (*projected.shape[:2], shape.groups, -1)
    dt = dt.reshape(of_groups)
    rate = -jnp.exp(weights.a_log.astype(jnp.float32)).reshape(shape.groups, -1)
    return _Tokens(
        z.astype(jnp.float32),
        x.reshape(*dt.shape, shape.head_dim),
        b.reshape(of_groups),
        c.reshape(of_groups),
        dt,
        dt * rate,
    )


def _within(b: Array, c: Array, x: Array, cum: Array) -> Array:
    """What tokens `[n, T, ..]` give each other and themselves, those before to those after, without a state."""
    tokens = cum.shape[1]
    seen = jnp.tril(jnp.ones((tokens, tokens), bool))[:, :, None, None]
    # Masked first: above the diagonal the exponent is positive and may overflow.
    decay = jnp.exp(jnp.where(seen, cum[:, :, None] - cum[:, None], -jnp.inf))
    products = jnp.einsum("ntgs,nugs->ntug", c, b, precision=_EXACT)
    return jnp.einsum("ntugr,nugrp->ntgrp", products[..., None] * decay, x, precision=_EXACT)


def _out(
    y: Array, tokens: _Tokens, weights: Mamba2Weights, shape: Mamba2Shape, eps: float, dtype: jnp.dtype
) -> Float[Array, "n T D"]:
    """Outputs: the skip, the gate, then the norm of each group's columns."""
    y = y + tokens.x * weights.d.astype(jnp.float32).reshape(shape.groups, -1, 1)
    gated = y.reshape(tokens.z.shape) * jax.nn.silu(tokens.z)
    groups = gated.reshape(*gated.shape[:-1], shape.groups, -1)
    groups = groups * jax.lax.rsqrt(jnp.mean(groups * groups, axis=-1, keepdims=True) + eps)
    return (weights.norm.astype(jnp.float32) * groups.reshape(gated.shape)).astype(dtype)


def _grouped(s: Float[Array, "B H P N"], shape: Mamba2Shape) -> Float[Array, "B G r P N"]:
    return s.reshape(s.shape[0], shape.groups, -1, *s.shape[2:])


def _chunks(rows: Float[Array, "n L *of"], chunk: int) -> Float[Array, "n k c *of"]:
    """Rows in chunks, filled up with zeros, which change no state."""
    n, length = rows.shape[:2]
    rows = jnp.pad(rows, ((0, 0), (0, -length % chunk), *(((0, 0),) * (rows.ndim - 2))))
    return rows.reshape(n, -1, chunk, *rows.shape[2:])
