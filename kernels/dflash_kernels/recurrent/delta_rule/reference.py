"""The definition in jnp: token after token, the state after each. Every other implementation is judged against it."""

import jax
import jax.numpy as jnp
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


def delta_verify_reference(
    projected: Float[Array, "B T W"], weights: DeltaWeights, state: DeltaState, shape: DeltaShape, *, eps: float
) -> tuple[Float[Array, "B T O"], DeltaFactors]:
    """See `delta_verify`."""
    rows = with_earlier(projected, state.conv)
    tokens = tokens_of(rows, projected, weights, shape)
    out, u, _ = recurrence(tokens, state.s, shape)
    factors = DeltaFactors(tokens.k, u, jnp.cumsum(tokens.g, axis=1), projected[..., : shape.channels])
    return gated_norm(out, projected, weights, shape, eps), factors


def delta_fold_reference(state: DeltaState, factors: DeltaFactors, counts: Int[Array, "B"]) -> DeltaState:
    """See `delta_fold`."""
    per_key = factors.u.shape[2] // factors.k.shape[2]
    g = jnp.diff(factors.cum, axis=1, prepend=0.0)

    def write(s: Array, token: tuple[Array, ...]) -> tuple[Array, None]:
        k, u, g, live = token
        new = s * jnp.exp(g)[..., None, None] + jnp.repeat(k, per_key, axis=1)[..., None] * u[..., None, :]
        return jnp.where(live[:, None, None, None], new, s), None

    live = jnp.arange(g.shape[1]) < counts[:, None]
    each = (jnp.moveaxis(part, 1, 0) for part in (factors.k, factors.u, g, live))
    rows = jnp.concatenate([state.conv, factors.rows.astype(state.conv.dtype)], axis=1)
    return DeltaState(jax.lax.scan(write, state.s, tuple(each))[0], last_rows(rows, counts))


def delta_step_reference(
    projected: Float[Array, "B 1 W"],
    weights: DeltaWeights,
    state: DeltaState,
    live: Bool[Array, "B"],
    shape: DeltaShape,
    *,
    eps: float,
) -> tuple[Float[Array, "B 1 O"], DeltaState]:
    """See `delta_step`."""
    out, factors = delta_verify_reference(projected, weights, state, shape, eps=eps)
    return out, delta_fold_reference(state, factors, live.astype(jnp.int32))


def delta_prefill_reference(
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
    """See `delta_prefill`: row after row, each of which takes the state of the one before or of its slot."""
    slots_there = state.s.shape[0]
    inside = (slots >= 0) & (slots < slots_there)
    goes_on = jnp.append(follows[1:] & (lengths[1:] > 0), jnp.array([False]))
    where = jnp.where(inside & (lengths > 0) & ~goes_on, slots, slots_there)

    def row(before: DeltaState, told: tuple[Array, ...]) -> tuple[DeltaState, tuple[Array, DeltaState]]:
        projected, slot, from_before, from_zero, known, length = told
        mine = jax.tree.map(lambda x: jnp.where(from_zero | ~known, 0, x[slot]).astype(x.dtype), state)
        start = jax.tree.map(lambda carried, x: jnp.where(from_before, carried, x)[None], before, mine)
        live = (jnp.arange(projected.shape[0]) < length)[None]
        projected = jnp.where(live[..., None], projected, 0)
        rows = with_earlier(projected, start.conv)
        out, _, s = recurrence(tokens_of(rows, projected, weights, shape, live), start.s, shape)
        after = DeltaState(s[0], last_rows(rows, length[None])[0].astype(start.conv.dtype))
        return after, (gated_norm(out, projected, weights, shape, eps)[0], after)

    zero = jax.tree.map(lambda x: jnp.zeros_like(x[0]), state)
    _, (out, after) = jax.lax.scan(row, zero, (projected, slots, follows, fresh, inside, lengths))
    return out, jax.tree.map(lambda all, new: all.at[where].set(new, mode="drop"), state, after)


def recurrence(tokens: Tokens, s: Float[Array, "B Hv dk dv"], shape: DeltaShape) -> tuple[Array, Array, Array]:
    """Outputs and writes `[B, T, Hv, dv]`, and the state after the last token."""
    q, k = (jnp.repeat(part, shape.heads_per_key, axis=2) for part in (tokens.q, tokens.k))

    def step(s: Array, token: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        q, k, v, beta, g = token
        s = s * jnp.exp(g)[..., None, None]
        u = (v - einsum("bhd,bhdv->bhv", k, s)) * beta[..., None]
        s = s + k[..., None] * u[..., None, :]
        return s, (einsum("bhd,bhdv->bhv", q, s), u)

    each = (jnp.moveaxis(part, 1, 0) for part in (q, k, tokens.v, tokens.beta, tokens.g))
    s, (out, u) = jax.lax.scan(step, s, tuple(each))
    return jnp.moveaxis(out, 0, 1), jnp.moveaxis(u, 0, 1), s


def last_rows(rows: Float[Array, "B R C"], counts: Int[Array, "B"]) -> Float[Array, "B 3 C"]:
    """The three rows before token `counts[b]`, of rows that begin three tokens early."""
    return jnp.take_along_axis(rows, (counts[:, None] + jnp.arange(3))[..., None], axis=1)
