"""The chunk form in XLA's operations: many tokens at once from products of matrices, the same numbers as token after token.

For tokens of one chunk with the state S before them, `cum` the summed logs of decays and `D[i, j]` the decay from token j to
token i >= j (https://arxiv.org/abs/2412.06464):

    A = strictly lower part of  beta K K^T * D
    u = (I + A)^-1 beta (V - exp(cum) K S)
    out = exp(cum) Q S + (Q K^T * D) u
    S' = exp(cum[-1]) S + (exp(cum[-1] - cum) K)^T u

A chunk's products with the state are by value heads, with key heads repeated and gates multiplied in beforehand, for all chunks at
once: what is left for one after the other are three products without a transpose between them.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dflash_kernels.recurrent.delta_rule.inputs import (
    DeltaFactors,
    DeltaShape,
    DeltaState,
    DeltaWeights,
    Tokens,
    einsum,
    gated_norm,
    tokens_of,
    with_earlier,
)
from dflash_kernels.recurrent.delta_rule.prompts import CHUNK, prompts_of
from dflash_kernels.recurrent.delta_rule.reference import last_rows


class _Chunk(NamedTuple):
    """The state-independent part of a chunk of c tokens, by value heads: three products with little between them are left."""

    entering: Float[Array, "B Hv 2c dk"]  # what looks into the state: keys times beta and decay, queries times decay
    v: Float[Array, "B Hv c dv"]  # times beta
    inverse: Float[Array, "B Hv c c"]
    leaving: Float[Array, "B Hv c+dk c"]  # what becomes of writes: outputs, and the state at the end
    end: Float[Array, "B Hv"]  # decay of the whole chunk


def delta_verify_xla(
    projected: Float[Array, "B T W"], weights: DeltaWeights, state: DeltaState, shape: DeltaShape, *, eps: float
) -> tuple[Float[Array, "B T O"], DeltaFactors]:
    """See `delta_verify`: one chunk of any length."""
    verify = functools.partial(_verify, weights=weights, shape=shape, eps=eps)
    return slot_by_slot(verify, projected, state, dtype=projected.dtype)


def _verify(
    projected: Float[Array, "B T W"], state: DeltaState, *, weights: DeltaWeights, shape: DeltaShape, eps: float
) -> tuple[Float[Array, "B T O"], DeltaFactors]:
    t = projected.shape[1]
    padded = _padded(projected, chunk_of(t))
    rows = with_earlier(padded, state.conv)
    live = jnp.broadcast_to(jnp.arange(padded.shape[1]) < t, padded.shape[:2])
    tokens = tokens_of(rows, padded, weights, shape, live if padded.shape[1] > t else None)
    chunk = _chunk(tokens, shape)
    found, new = _entered(chunk, state.s)
    leaving = chunk.leaving[:, :, : found.shape[2]]
    out, u = (jnp.swapaxes(x, 1, 2)[:, :t] for x in (found + einsum("bhij,bhjv->bhiv", leaving, new), new))
    factors = DeltaFactors(tokens.k[:, :t], u, jnp.cumsum(tokens.g, axis=1)[:, :t], projected[..., : shape.channels])
    return gated_norm(out, projected, weights, shape, eps), factors


def delta_fold_xla(state: DeltaState, factors: DeltaFactors, counts: Int[Array, "B"]) -> DeltaState:
    """See `delta_fold`."""
    return slot_by_slot(_fold, state, factors, counts, dtype=state.conv.dtype)


def _fold(state: DeltaState, factors: DeltaFactors, counts: Int[Array, "B"]) -> DeltaState:
    b, t, key_heads, _ = factors.k.shape
    per_key = factors.u.shape[2] // key_heads
    cum = factors.cum.reshape(b, t, key_heads, per_key)
    live = (jnp.arange(t) < counts[:, None])[..., None, None]
    end = jnp.take_along_axis(cum, jnp.maximum(counts - 1, 0)[:, None, None, None], axis=1)
    # Rows past the count may hold anything: they are replaced, not weighted. Their decay would be above 1.
    decay = jnp.where(live, jnp.exp(jnp.minimum(end - cum, 0.0)), 0.0)
    k = jnp.where(live, factors.k, 0.0)
    u = jnp.where(live[..., None], factors.u.reshape(b, t, key_heads, per_key, -1), 0.0) * decay[..., None]
    s = state.s.reshape(b, key_heads, per_key, *state.s.shape[2:])
    new = s * jnp.exp(jnp.moveaxis(end, 1, 3))[..., None] + einsum("bthd,bthrv->bhrdv", k, u)
    s = jnp.where((counts > 0)[:, None, None, None], new.reshape(state.s.shape), state.s)
    rows = jnp.concatenate([state.conv, factors.rows.astype(state.conv.dtype)], axis=1)
    return DeltaState(s, last_rows(rows, counts))


def delta_step_xla(
    projected: Float[Array, "B 1 W"],
    weights: DeltaWeights,
    state: DeltaState,
    live: Bool[Array, "B"],
    shape: DeltaShape,
    *,
    eps: float,
) -> tuple[Float[Array, "B 1 O"], DeltaState]:
    """See `delta_step`: what key and query find in the state comes from one read of it."""
    step = functools.partial(_step, weights=weights, shape=shape, eps=eps)
    return slot_by_slot(step, projected, state, live, dtype=projected.dtype)


def _step(
    projected: Float[Array, "B 1 W"],
    state: DeltaState,
    live: Bool[Array, "B"],
    *,
    weights: DeltaWeights,
    shape: DeltaShape,
    eps: float,
) -> tuple[Float[Array, "B 1 O"], DeltaState]:
    b = projected.shape[0]
    rows = with_earlier(projected, state.conv)
    tokens = tokens_of(rows, projected, weights, shape)
    q, k = tokens.q[:, 0], tokens.k[:, 0]
    v, beta, g = (part[:, 0].reshape(b, shape.key_heads, shape.heads_per_key, -1) for part in tokens[2:])
    s = _grouped(state.s, shape)
    found = einsum("bhtd,bhrdv->bhrtv", jnp.stack([k, q], axis=2), s) * jnp.exp(g)[..., None]
    u = (v - found[..., 0, :]) * beta
    out = found[..., 1, :] + einsum("bhd,bhd->bh", q, k)[..., None, None] * u
    new = s * jnp.exp(g)[..., None] + k[:, :, None, :, None] * u[..., None, :]
    s = jnp.where(live[:, None, None, None], new.reshape(state.s.shape), state.s)
    conv = jnp.where(live[:, None, None], rows[:, 1:].astype(state.conv.dtype), state.conv)
    out = out.reshape(b, 1, shape.value_heads, shape.value_dim)
    return gated_norm(out, projected, weights, shape, eps), DeltaState(s, conv)


def delta_prefill_xla(
    projected: Float[Array, "n L W"],
    weights: DeltaWeights,
    state: DeltaState,
    shape: DeltaShape,
    *,
    eps: float,
    slots: Int[Array, "n"],
    follows: Bool[Array, "n"],
    fresh: Bool[Array, "n"],
    lengths: Int[Array, "n"],
) -> tuple[Float[Array, "n L O"], DeltaState]:
    """See `delta_prefill`: all that needs no state comes for all chunks at once, the rest chunk after chunk."""
    n, length, _ = projected.shape
    size = chunk_of(min(length, CHUNK))
    prompts = prompts_of(
        projected, weights, state, shape, size, slots=slots, follows=follows, fresh=fresh, lengths=lengths
    )
    held = jnp.where(_along(prompts.known, state.s), state.s[prompts.sources], 0.0)
    pieces = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[2:]), prompts.tokens)
    chunks = jax.tree.map(lambda x: x.reshape(n, -1, *x.shape[1:]), _chunk(pieces, shape))

    def advance(s: Array, chunk: _Chunk) -> tuple[Array, Array]:
        found, u = _entered(chunk, s)
        left = einsum("hij,hjv->hiv", chunk.leaving, u)
        return s * chunk.end[:, None, None] + left[:, size:], found + left[:, :size]

    def row(s: Array, told: tuple[Array, Array, _Chunk]) -> tuple[Array, tuple[Array, Array]]:
        goes_on, mine, chunks = told
        s, out = jax.lax.scan(advance, jnp.where(goes_on, s, mine), chunks)
        return s, (out, s)

    _, (out, ends) = jax.lax.scan(row, jnp.zeros_like(state.s[0]), (follows, held, chunks))
    out = jnp.swapaxes(out, 2, 3).reshape(n, -1, shape.value_heads, shape.value_dim)[:, :length]
    s = state.s.at[prompts.targets].set(ends, mode="drop")
    conv = state.conv.at[prompts.targets].set(prompts.conv, mode="drop")
    return gated_norm(out, prompts.projected, weights, shape, eps), DeltaState(s, conv)


def _chunk(tokens: Tokens, shape: DeltaShape) -> _Chunk:
    c, repeats = tokens.k.shape[1], shape.heads_per_key
    q, k, v = (jnp.swapaxes(part, 1, 2) for part in tokens[:3])
    beta, g, cum = (jnp.swapaxes(part, 1, 2) for part in (tokens.beta, tokens.g, jnp.cumsum(tokens.g, axis=1)))
    # A decay between two tokens is the sum of the logs between them: the difference of two sums from the chunk's beginning
    # loses as many digits as these have before the point. Masked before the exponential, which overflows above the diagonal.
    lower, below = np.tri(c, dtype=bool), np.tri(c, k=-1, dtype=bool)
    logs = einsum("il,bhlj->bhij", np.tri(c, dtype=np.float32), jnp.where(below, g[..., None], 0.0))
    decay = jnp.exp(jnp.where(lower, logs, -jnp.inf))
    of_keys, of_queries = (jnp.repeat(einsum("bhid,bhjd->bhij", x, k), repeats, axis=1) for x in (k, q))
    inverse = unit_lower_inverse(jnp.where(below, beta[..., None] * of_keys * decay, 0.0))
    q, k, since = jnp.repeat(q, repeats, axis=1), jnp.repeat(k, repeats, axis=1), jnp.exp(cum)
    entering = jnp.concatenate([k * (beta * since)[..., None], q * since[..., None]], axis=2)
    to_end = jnp.swapaxes(k * decay[:, :, -1, :, None], 2, 3)
    leaving = jnp.concatenate([of_queries * decay, to_end], axis=2)
    return _Chunk(entering, beta[..., None] * v, inverse, leaving, since[..., -1])


def _entered(chunk: _Chunk, s: Float[Array, "*B Hv dk dv"]) -> tuple[Array, Array]:
    """Reads of queries from the state `s`, which is loaded once, and the tokens' writes; both `[..., Hv, c, dv]`."""
    found = einsum("...td,...dv->...tv", chunk.entering, s)
    of_keys, of_queries = jnp.split(found, 2, axis=-2)
    return of_queries, einsum("...ij,...jv->...iv", chunk.inverse, chunk.v - of_keys)


def slot_by_slot(call: Callable[..., Any], *of_slots: Any, dtype: Any) -> Any:
    """In float32 one slot goes after the other: XLA picks code by sizes, and a request has the same bits alone and in a batch."""
    if dtype != jnp.float32 or jax.tree.leaves(of_slots)[0].shape[0] == 1:
        return call(*of_slots)
    found = jax.lax.map(lambda one: call(*jax.tree.map(lambda x: x[None], one)), of_slots)
    return jax.tree.map(lambda x: x[:, 0], found)


def unit_lower_inverse(lower: Float[Array, "... c c"]) -> Float[Array, "... c c"]:
    """`(I + lower)^-1` of strictly lower matrices, c a power of two, by blocks of 1, 2, 4, ... numbers that are put together.

    Every number in between is one of the result or of `lower`. The product `(I - A)(I + A^2)(I + A^4) ...`, which is shorter, has
    powers in between that grow until nothing is left of the result: where keys are alike it is off by 200 % at c = 64.
    """
    *batch, c, _ = lower.shape
    blocks = jnp.ones((*batch, c, 1, 1), lower.dtype)  # inverses of the blocks on the diagonal
    size = 1
    while size < c:
        pairs = jnp.arange(c // (2 * size))
        given = lower.reshape(*batch, len(pairs), 2, size, len(pairs), 2, size)
        given = jnp.moveaxis(given[..., pairs, 1, :, pairs, 0, :], 0, -3)  # indices apart from each other come first
        first, second = blocks[..., 0::2, :, :], blocks[..., 1::2, :, :]
        below = -einsum("...ab,...bc,...cd->...ad", second, given, first)
        upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        blocks = jnp.concatenate([upper, jnp.concatenate([below, second], axis=-1)], axis=-2)
        size *= 2
    return blocks[..., 0, :, :]


def chunk_of(tokens: int) -> int:
    """The power of two that holds so many."""
    return 1 << (tokens - 1).bit_length()


def _padded(x: Float[Array, "n L W"], size: int) -> Float[Array, "n P W"]:
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % size), (0, 0)))


def _grouped(s: Float[Array, "B Hv dk dv"], shape: DeltaShape) -> Float[Array, "B Hk r dk dv"]:
    return s.reshape(s.shape[0], shape.key_heads, shape.heads_per_key, *s.shape[2:])


def _along(flags: Bool[Array, "n"], x: Array) -> Array:
    return flags.reshape(-1, *[1] * (x.ndim - 1))
