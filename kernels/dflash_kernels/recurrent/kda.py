"""Delta rule with a decay for every channel of a key (Kimi delta attention, KDA): verification, its fold, plain steps, prompts.

Source: "Kimi Linear: An Expressive, Efficient Attention Architecture", arXiv 2510.26692, section 3. For each token and head, in
float32, with q and k of length 1 (q then times `d ** -0.5`), `beta = sigmoid(b)` and the log of the decay g of each channel:

    S = exp(g)[:, None] * S;  u = beta (v - k^T S);  S = S + k u^T;  out = q^T S

Many tokens at once are chunks as of the gated delta rule (`recurrent.delta_rule.xla`), in which the products of keys with keys and
queries weigh every channel by its own decay between both tokens. Such a decay is at most 1. Its two factors, the decay since the
chunk began and the inverse of the other token's, are never formed apart: the latter overflows where decays are strong. So chunks
are short.

Operations of XLA alone, which no GPU has timed. Letters: B slots, T tokens, N heads, d the width of a head.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dflash_kernels.recurrent.delta_rule.inputs import TAPS, einsum, unit, with_earlier
from dflash_kernels.recurrent.delta_rule.prompts import earlier_rows
from dflash_kernels.recurrent.delta_rule.reference import last_rows
from dflash_kernels.recurrent.delta_rule.xla import chunk_of, slot_by_slot, unit_lower_inverse

CHUNK = 16  # tokens of a prompt's chunk


@dataclass(frozen=True)
class KdaShape:
    """Sizes of a layer, and the form of its decay.

    Attributes:
      heads, dim: N and d, of queries, keys and values alike.
      lower_bound: a token's log decay is this times `sigmoid(exp(a_log) * (f + dt_bias))`; None takes
        `-exp(a_log) * softplus(f + dt_bias)`.
    """

    heads: int
    dim: int
    lower_bound: float | None = None

    @property
    def width(self) -> int:
        """Columns of the queries, and of the keys, values, decays and gates."""
        return self.heads * self.dim

    @property
    def channels(self) -> int:
        """C: columns that go through the convolution, q | k | v."""
        return 3 * self.width

    @property
    def columns(self) -> int:
        """W: all columns of a token, q | k | v | f | z | b."""
        return 5 * self.width + self.heads


class KdaWeights(NamedTuple):
    """Weights of one layer: `conv`, whose last column multiplies the newest token, `a_log` and `dt_bias` of the decay, float32, and
    `norm` of the gated norm, shared by all heads.
    """

    conv: Float[Array, "C 4"]
    a_log: Float[Array, "N"]
    dt_bias: Float[Array, "F"]
    norm: Float[Array, "H"]


class KdaState(NamedTuple):
    """Recurrent state of slots: `s`, float32, and the last three rows before the convolution, newest last."""

    s: Float[Array, "B N d d"]
    conv: Float[Array, "B 3 C"]


class KdaFactors(NamedTuple):
    """Verified tokens, from which the state after any number of them follows without a second pass.

    `k`, float32, is normed; `u`, float32, is what each token writes along its key, later ones already without what earlier ones
    wrote; `cum`, float32, is the log of each channel's decay since the state that was verified from; `rows` are the tokens' own
    rows before the convolution.
    """

    k: Float[Array, "B T N d"]
    u: Float[Array, "B T N d"]
    cum: Float[Array, "B T N d"]
    rows: Float[Array, "B T C"]


class _Tokens(NamedTuple):
    """Inputs of the recurrence, float32: q is scaled, `g` is the log of a channel's decay, at most 0."""

    q: Float[Array, "B T N d"]
    k: Float[Array, "B T N d"]
    v: Float[Array, "B T N d"]
    beta: Float[Array, "B T N"]
    g: Float[Array, "B T N d"]


class _Chunk(NamedTuple):
    """The state-independent part of a chunk of c tokens: three products with little between them are left."""

    entering: Float[Array, "B N 2c d"]  # what looks into the state: keys times beta and decay, queries times decay
    v: Float[Array, "B N c d"]  # times beta
    inverse: Float[Array, "B N c c"]
    leaving: Float[Array, "B N c+d c"]  # what becomes of writes: outputs, and the state at the end
    end: Float[Array, "B N d"]  # decay of the whole chunk


def kda_reference(
    columns: Float[Array, "B T W"], weights: KdaWeights, state: KdaState, shape: KdaShape, *, eps: float
) -> tuple[Float[Array, "B T O"], KdaFactors]:
    """The definition, token after token: see `kda_verify`."""
    tokens = _tokens_of(with_earlier(columns, state.conv), columns, weights, shape)

    def step(s: Array, token: _Tokens) -> tuple[Array, tuple[Array, Array]]:
        s = s * jnp.exp(token.g)[..., None]
        u = (token.v - einsum("bnd,bndv->bnv", token.k, s)) * token.beta[..., None]
        s = s + token.k[..., None] * u[..., None, :]
        return s, (einsum("bnd,bndv->bnv", token.q, s), u)

    each = jax.tree.map(lambda part: jnp.moveaxis(part, 1, 0), tokens)
    _, (out, u) = jax.lax.scan(step, state.s, each)
    factors = KdaFactors(tokens.k, jnp.moveaxis(u, 0, 1), jnp.cumsum(tokens.g, axis=1), columns[..., : shape.channels])
    return _gated_norm(jnp.moveaxis(out, 0, 1), columns, weights, shape, eps), factors


def kda_verify(
    columns: Float[Array, "B T W"], weights: KdaWeights, state: KdaState, shape: KdaShape, *, eps: float
) -> tuple[Float[Array, "B T O"], KdaFactors]:
    """T tokens of each slot from its state, which is read once and stays as it is. A token depends on none after it.

    Args:
      columns: of a token q | k | v, before the convolution, f of the decay, z of the output's gate, and b.
      state: of the B slots. One that nobody uses may hold anything.
      eps: of the gated norm.

    Returns:
      Normed outputs of all heads times the sigmoid of z, `O = N * d`, in the columns' dtype, and the tokens' factors.
    """
    verify = functools.partial(_verify, weights=weights, shape=shape, eps=eps)
    return slot_by_slot(verify, columns, state, dtype=columns.dtype)


def kda_fold(state: KdaState, factors: KdaFactors, counts: Int[Array, "B"]) -> KdaState:
    """The states after the first `counts[b]` of the tokens that `factors` are of; 0 leaves a slot as it is, bit for bit."""
    return slot_by_slot(_fold, state, factors, counts, dtype=state.conv.dtype)


def kda_step(
    columns: Float[Array, "B 1 W"],
    weights: KdaWeights,
    state: KdaState,
    live: Bool[Array, "B"],
    shape: KdaShape,
    *,
    eps: float,
) -> tuple[Float[Array, "B 1 O"], KdaState]:
    """One token of each slot, and the states after it; slots that are not live keep theirs, bit for bit."""
    step = functools.partial(_step, weights=weights, shape=shape, eps=eps)
    return slot_by_slot(step, columns, state, live, dtype=columns.dtype)


def kda_prefill(
    columns: Float[Array, "n L W"],
    weights: KdaWeights,
    state: KdaState,
    shape: KdaShape,
    *,
    eps: float,
    slots: Int[Array, "n"],
    follows: Bool[Array, "n"],
    fresh: Bool[Array, "n"],
    lengths: Int[Array, "n"],
) -> tuple[Float[Array, "n L O"], KdaState]:
    """Prompts: n rows of up to L tokens, some of them pieces of one prompt in order; arguments are those of `delta_prefill`."""
    (n, length, _), there = columns.shape, state.s.shape[0]
    inside = (slots >= 0) & (slots < there)
    known = inside & ~fresh
    sources = jnp.where(known, slots, 0)
    live = jnp.arange(length) < lengths[:, None]
    columns = jnp.where(live[..., None], columns, 0)  # NaN in a row's padding would spread through products
    held = jnp.where(known[:, None, None], state.conv[sources], 0).astype(state.conv.dtype)
    rows = with_earlier(columns, earlier_rows(columns[..., : shape.channels], held, follows))
    conv = last_rows(rows, lengths).astype(state.conv.dtype)
    size = chunk_of(min(length, CHUNK))
    padding = ((0, 0), (0, -length % size))
    padded, rows = (jnp.pad(x, (*padding, (0, 0))) for x in (columns, rows))
    tokens = _tokens_of(rows, padded, weights, shape, jnp.pad(live, padding))
    pieces = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[2:]), tokens)
    chunks = jax.tree.map(lambda x: x.reshape(n, -1, *x.shape[1:]), _chunk(pieces))

    def advance(s: Array, chunk: _Chunk) -> tuple[Array, Array]:
        found, u = _entered(chunk, s)
        left = einsum("nij,njv->niv", chunk.leaving, u)
        return s * chunk.end[..., None] + left[:, size:], found + left[:, :size]

    def row(s: Array, told: tuple[Array, Array, _Chunk]) -> tuple[Array, tuple[Array, Array]]:
        goes_on, mine, chunks = told
        s, out = jax.lax.scan(advance, jnp.where(goes_on, s, mine), chunks)
        return s, (out, s)

    starts = jnp.where(known[:, None, None, None], state.s[sources], 0.0)
    _, (out, ends) = jax.lax.scan(row, jnp.zeros_like(state.s[0]), (follows, starts, chunks))
    out = jnp.swapaxes(out, 2, 3).reshape(n, -1, shape.heads, shape.dim)[:, :length]
    last = ~jnp.append(follows[1:] & (lengths[1:] > 0), jnp.array([False]))
    targets = jnp.where(inside & (lengths > 0) & last, slots, there)
    after = KdaState(state.s.at[targets].set(ends, mode="drop"), state.conv.at[targets].set(conv, mode="drop"))
    return _gated_norm(out, columns, weights, shape, eps), after


def _verify(
    columns: Float[Array, "B T W"], state: KdaState, *, weights: KdaWeights, shape: KdaShape, eps: float
) -> tuple[Float[Array, "B T O"], KdaFactors]:
    t = columns.shape[1]
    padded = jnp.pad(columns, ((0, 0), (0, chunk_of(t) - t), (0, 0)))
    live = jnp.broadcast_to(jnp.arange(padded.shape[1]) < t, padded.shape[:2])
    tokens = _tokens_of(with_earlier(padded, state.conv), padded, weights, shape, live)
    chunk = _chunk(tokens)
    found, new = _entered(chunk, state.s)
    out = found + einsum("bnij,bnjv->bniv", chunk.leaving[:, :, : found.shape[2]], new)
    out, u = (jnp.swapaxes(x, 1, 2)[:, :t] for x in (out, new))
    factors = KdaFactors(tokens.k[:, :t], u, jnp.cumsum(tokens.g, axis=1)[:, :t], columns[..., : shape.channels])
    return _gated_norm(out, columns, weights, shape, eps), factors


def _fold(state: KdaState, factors: KdaFactors, counts: Int[Array, "B"]) -> KdaState:
    live = (jnp.arange(factors.k.shape[1]) < counts[:, None])[..., None, None]
    end = jnp.take_along_axis(factors.cum, jnp.maximum(counts - 1, 0)[:, None, None, None], axis=1)
    # Rows past the count may hold anything: they are replaced, not weighted. Their decay would be above 1.
    k = jnp.where(live, factors.k * jnp.exp(jnp.minimum(end - factors.cum, 0.0)), 0.0)
    u = jnp.where(live, factors.u, 0.0)
    new = state.s * jnp.exp(end[:, 0])[..., None] + einsum("btnd,btnv->bndv", k, u)
    s = jnp.where((counts > 0)[:, None, None, None], new, state.s)
    rows = jnp.concatenate([state.conv, factors.rows.astype(state.conv.dtype)], axis=1)
    return KdaState(s, last_rows(rows, counts))


def _step(
    columns: Float[Array, "B 1 W"],
    state: KdaState,
    live: Bool[Array, "B"],
    *,
    weights: KdaWeights,
    shape: KdaShape,
    eps: float,
) -> tuple[Float[Array, "B 1 O"], KdaState]:
    rows = with_earlier(columns, state.conv)
    q, k, v, beta, g = (part[:, 0] for part in _tokens_of(rows, columns, weights, shape))
    decay = jnp.exp(g)
    found = einsum("btnd,bndv->btnv", jnp.stack([k, q], axis=1) * decay[:, None], state.s)
    u = (v - found[:, 0]) * beta[..., None]
    out = found[:, 1] + jnp.sum(q * k, axis=-1, keepdims=True) * u
    new = state.s * decay[..., None] + k[..., None] * u[..., None, :]
    s = jnp.where(live[:, None, None, None], new, state.s)
    conv = jnp.where(live[:, None, None], rows[:, 1:].astype(state.conv.dtype), state.conv)
    return _gated_norm(out[:, None], columns, weights, shape, eps), KdaState(s, conv)


def _tokens_of(
    rows: Float[Array, "B R C"],
    columns: Float[Array, "B T W"],
    weights: KdaWeights,
    shape: KdaShape,
    live: Bool[Array, "B T"] | None = None,
) -> _Tokens:
    """Convolution, SiLU, norms of keys and queries, and gates. Tokens that are not `live` change no state: their gates and keys are
    0, whatever they hold."""
    b, t, _ = columns.shape
    rows, taps = rows.astype(jnp.float32), weights.conv.astype(jnp.float32)
    mixed = sum((rows[:, tap : tap + t] * taps[:, tap] for tap in range(TAPS)), start=jnp.zeros((), jnp.float32))
    heads = (b, t, shape.heads, shape.dim)
    q, k, v = (part.reshape(heads) for part in jnp.split(jax.nn.silu(mixed), 3, axis=-1))
    q, k = unit(q), unit(k)
    f = columns[..., shape.channels : shape.channels + shape.width].astype(jnp.float32)
    f = (f + weights.dt_bias.astype(jnp.float32)).reshape(heads)
    rate, bound = jnp.exp(weights.a_log.astype(jnp.float32))[:, None], shape.lower_bound
    g = -rate * jax.nn.softplus(f) if bound is None else bound * jax.nn.sigmoid(rate * f)
    beta = jax.nn.sigmoid(columns[..., -shape.heads :].astype(jnp.float32))
    if live is not None:
        beta = jnp.where(live[..., None], beta, 0.0)
        q, k, v, g = (jnp.where(live[..., None, None], part, 0.0) for part in (q, k, v, g))
    return _Tokens(q * shape.dim**-0.5, k, v, beta, g)


def _chunk(tokens: _Tokens) -> _Chunk:
    c = tokens.k.shape[1]
    q, k, v, g = (jnp.swapaxes(part, 1, 2) for part in (tokens.q, tokens.k, tokens.v, tokens.g))
    beta, cum = jnp.swapaxes(tokens.beta, 1, 2)[..., None], jnp.cumsum(g, axis=2)
    # Masked before the exponential, which overflows above the diagonal.
    lower, below = np.tri(c, dtype=bool), np.tri(c, k=-1, dtype=bool)
    decay = jnp.exp(jnp.where(lower[..., None], cum[:, :, :, None] - cum[:, :, None], -jnp.inf))
    of_keys, of_queries = (jnp.sum(x[:, :, :, None] * k[:, :, None] * decay, axis=-1) for x in (k, q))
    since = jnp.exp(cum)
    to_end = jnp.swapaxes(k * jnp.exp(cum[:, :, -1:] - cum), 2, 3)
    return _Chunk(
        entering=jnp.concatenate([k * beta * since, q * since], axis=2),
        v=beta * v,
        inverse=unit_lower_inverse(jnp.where(below, beta * of_keys, 0.0)),
        leaving=jnp.concatenate([of_queries, to_end], axis=2),
        end=since[:, :, -1],
    )


def _entered(chunk: _Chunk, s: Float[Array, "*B N d d"]) -> tuple[Array, Array]:
    """Reads of queries from the state `s`, which is loaded once, and the tokens' writes; both `[..., N, c, d]`."""
    found = einsum("...td,...dv->...tv", chunk.entering, s)
    of_keys, of_queries = jnp.split(found, 2, axis=-2)
    return of_queries, einsum("...ij,...jv->...iv", chunk.inverse, chunk.v - of_keys)


def _gated_norm(
    out: Float[Array, "B T N d"], columns: Float[Array, "B T W"], weights: KdaWeights, shape: KdaShape, eps: float
) -> Float[Array, "B T O"]:
    """RMS norm of each head, times the sigmoid of z, in float32; `out` is rounded to the columns' dtype before."""
    wide = out.astype(columns.dtype).astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    first = shape.channels + shape.width
    z = columns[..., first : first + shape.width].reshape(out.shape).astype(jnp.float32)
    gated = weights.norm.astype(jnp.float32) * normed * jax.nn.sigmoid(z)
    return gated.astype(columns.dtype).reshape(*out.shape[:2], shape.width)
