"""Kimi delta attention against float64: blocks from a state, their folds, single steps, and prompts in pieces of any length."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels.recurrent.kda import (
    KdaShape,
    KdaState,
    KdaWeights,
    kda_fold,
    kda_prefill,
    kda_reference,
    kda_step,
    kda_verify,
)

EPS = 1e-5
# Decays by both forms; the second has heads that forget nearly everything at once.
SHAPES = [KdaShape(3, 8, -5.0), KdaShape(2, 12)]


def drawn(shape: KdaShape, slots: int, tokens: int, seed: int = 0) -> tuple[np.ndarray, KdaWeights, KdaState]:
    """Columns, weights and a state. Rates reach from hardly any decay to one of 1e-2 a token and less."""
    rng = np.random.default_rng(seed)

    def normal(*size: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=size), jnp.float32)

    rates = jnp.linspace(-3, 2, shape.heads)
    weights = KdaWeights(normal(shape.channels, 4) * 0.5, rates, normal(shape.width) - 1, 1 + 0.2 * normal(shape.dim))
    state = KdaState(normal(slots, shape.heads, shape.dim, shape.dim), normal(slots, 3, shape.channels))
    return np.asarray(normal(slots, tokens, shape.columns)), weights, state


def oracle(columns: np.ndarray, weights: KdaWeights, state: KdaState, shape: KdaShape) -> tuple[np.ndarray, list]:
    """Outputs of one text's tokens and the states after each of them, the first one before all, in float64."""
    n, d, width = shape.heads, shape.dim, shape.width
    columns, (conv, a_log, dt_bias, norm) = columns.astype(np.float64), (np.asarray(w, np.float64) for w in weights)
    s, rows = np.asarray(state.s, np.float64), np.asarray(state.conv, np.float64)

    def sigmoid(x: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-x))

    states, outs = [(s, rows)], []
    for token in columns:
        window = np.concatenate([rows, token[None, : shape.channels]])
        mixed = (window * conv.T).sum(axis=0)
        q, k, v = (mixed * sigmoid(mixed)).reshape(3, n, d)
        q, k = (x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6) for x in (q, k))
        f, z = token[3 * width : 5 * width].reshape(2, n, d)
        f = f + dt_bias.reshape(n, d)
        rate = np.exp(a_log)[:, None]
        g = -rate * np.log1p(np.exp(f)) if shape.lower_bound is None else shape.lower_bound * sigmoid(rate * f)
        s = s * np.exp(g)[..., None]
        u = (v - np.einsum("nd,ndv->nv", k, s)) * sigmoid(token[-n:])[:, None]
        s, rows = s + k[..., None] * u[:, None], window[1:]
        out = np.einsum("nd,ndv->nv", q * d**-0.5, s)
        out = norm * out / np.sqrt((out * out).mean(axis=-1, keepdims=True) + EPS) * sigmoid(z)
        outs.append(out.reshape(-1))
        states.append((s, rows))
    return np.array(outs).reshape(len(columns), -1), states


def close(ours: jax.Array, true: np.ndarray) -> None:
    np.testing.assert_allclose(np.asarray(ours), true, rtol=0, atol=1e-5 * max(1.0, np.abs(true).max(initial=0)))


@pytest.mark.parametrize("shape", SHAPES, ids=["bounded", "softplus"])
def test_a_block_and_the_state_after_any_of_its_tokens(shape: KdaShape) -> None:
    """Of 17 tokens, which fill no chunk."""
    tokens, counts = 17, np.array([0, 1, 2, 9, 16, 17], np.int32)
    columns, weights, state = drawn(shape, len(counts), tokens)
    out, factors = jax.jit(partial(kda_verify, shape=shape, eps=EPS))(columns, weights, state)
    definition, same = jax.jit(partial(kda_reference, shape=shape, eps=EPS))(columns, weights, state)
    for ours, theirs in zip(jax.tree.leaves((out, factors)), jax.tree.leaves((definition, same)), strict=True):
        close(ours, np.asarray(theirs))
    # Tokens past the count may hold anything.
    live = np.arange(tokens) < counts[:, None]
    rubbish = jax.tree.map(lambda x: jnp.where(live.reshape(*live.shape, *[1] * (x.ndim - 2)), x, jnp.nan), factors)
    after = jax.jit(kda_fold)(state, rubbish, counts)
    for slot, count in enumerate(counts):
        true, states = oracle(columns[slot], weights, jax.tree.map(lambda x, i=slot: x[i], state), shape)
        close(out[slot], true)
        for ours, theirs in zip(after, states[count], strict=True):
            close(ours[slot], theirs)
    np.testing.assert_array_equal(after.s[0], state.s[0])
    np.testing.assert_array_equal(after.conv[0], state.conv[0])


def test_single_steps_of_slots_that_are_live() -> None:
    shape = SHAPES[0]
    columns, weights, state = drawn(shape, 2, 5)
    state = jax.tree.map(lambda x: jnp.asarray(x).at[1].set(jnp.nan), state)
    first, live, outs = jax.tree.map(lambda x: np.asarray(x[0]), state), jnp.array([True, False]), []
    step = jax.jit(partial(kda_step, shape=shape, eps=EPS))
    for token in range(5):
        out, state = step(columns[:, token : token + 1], weights, state, live)
        outs.append(out[0, 0])
    true, states = oracle(columns[0], weights, first, shape)
    close(jnp.stack(outs), true)
    for ours, theirs in zip(state, states[-1], strict=True):
        close(ours[0], theirs)


@pytest.mark.parametrize("shape", SHAPES, ids=["bounded", "softplus"])
def test_prompts_in_pieces(shape: KdaShape) -> None:
    """One of three pieces, the last of a single token; one that goes on from its slot; a short one; and a row that nobody needs.
    What stands behind a row's tokens is NaN, and so are slots that prompts begin in."""
    columns, weights, state = drawn(shape, 6, 19, seed=1)
    lengths, slots = np.array([19, 19, 1, 7, 2, 0], np.int32), np.array([2, 2, 2, 0, 1, 3], np.int32)
    follows, fresh = np.array([0, 1, 1, 0, 0, 0], bool), np.array([1, 0, 0, 0, 1, 1], bool)
    state = jax.tree.map(lambda x: jnp.asarray(x)[:3].at[1:].set(jnp.nan), state)
    given = np.where(np.arange(19)[None, :, None] < lengths[:, None, None], columns, np.nan)
    out, after = jax.jit(partial(kda_prefill, shape=shape, eps=EPS))(
        given, weights, state, slots=slots, follows=follows, fresh=fresh, lengths=lengths
    )
    zero = jax.tree.map(lambda x: np.zeros(x.shape[1:]), state)
    rows = {2: (0, 1, 2), 0: (3,), 1: (4,)}
    for slot, which in rows.items():
        text = np.concatenate([columns[row, : lengths[row]] for row in which])
        begins = jax.tree.map(lambda x: np.asarray(x[0]), state) if slot == 0 else zero
        true, states = oracle(text, weights, begins, shape)
        close(jnp.concatenate([out[row, : lengths[row]] for row in which]), true)
        for ours, theirs in zip(after, states[-1], strict=True):
            close(ours[slot], theirs)


def test_one_slot_has_the_same_bits_alone_and_among_others() -> None:
    shape = SHAPES[0]
    columns, weights, state = drawn(shape, 3, 9)
    verify = jax.jit(partial(kda_verify, shape=shape, eps=EPS))
    out, factors = verify(columns, weights, state)
    alone = verify(columns[1:2], weights, jax.tree.map(lambda x: x[1:2], state))
    for whole, one in zip(jax.tree.leaves((out, factors)), jax.tree.leaves(alone), strict=True):
        np.testing.assert_array_equal(whole[1], one[0])
