"""Mamba 2 against a float64 loop over tokens: blocks from a state, their folds, single steps, prompts in pieces of any length."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels.recurrent.mamba2 import (
    Mamba2Factors,
    Mamba2Shape,
    Mamba2State,
    Mamba2Weights,
    mamba2_fold,
    mamba2_prefill,
    mamba2_reference,
    mamba2_step,
    mamba2_verify,
)

EPS = 1e-5
SHAPES = [
    Mamba2Shape(4, 3, 2, 5, taps=4, chunk=4, limits=(0.0, math.inf)),
    Mamba2Shape(3, 4, 1, 2, taps=3, chunk=3, limits=(0.3, 0.9)),
]


def oracle(
    projected: np.ndarray, weights: Mamba2Weights, before: Mamba2State, shape: Mamba2Shape
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Outputs of one text's tokens in float64, S after each of them and before all, and the rows behind those of `before`."""
    conv, conv_bias, a_log, dt_bias, d, norm = (np.asarray(one, np.float64) for one in weights)
    projected, s = np.asarray(projected, np.float64), np.asarray(before.s, np.float64)
    z, raw, dt = np.split(projected, [shape.inner, shape.inner + shape.channels], axis=-1)
    rows, outs, states = np.concatenate([np.asarray(before.rows, np.float64), raw]), [], [s]
    for i in range(len(projected)):
        convolved = (rows[i : i + shape.taps] * conv.T).sum(axis=0) + conv_bias
        convolved = convolved / (1 + np.exp(-convolved))
        x, b, c = np.split(convolved, [shape.inner, shape.inner + shape.groups * shape.state_dim])
        step = np.clip(np.log1p(np.exp(dt[i] + dt_bias)), *shape.limits)
        y = np.zeros((shape.heads, shape.head_dim))
        s = s.copy()
        for head in range(shape.heads):
            group = head * shape.groups // shape.heads
            of_group = slice(group * shape.state_dim, (group + 1) * shape.state_dim)
            own = x[head * shape.head_dim : (head + 1) * shape.head_dim]
            s[head] = np.exp(-step[head] * np.exp(a_log[head])) * s[head] + step[head] * np.outer(own, b[of_group])
            y[head] = s[head] @ c[of_group] + d[head] * own
        gated = (y.reshape(-1) * z[i] / (1 + np.exp(-z[i]))).reshape(shape.groups, -1)
        gated = gated / np.sqrt((gated**2).mean(axis=-1, keepdims=True) + EPS)
        outs.append(gated.reshape(-1) * norm)
        states.append(s)
    return np.array(outs), np.array(states), rows


def drawn(shape: Mamba2Shape, slots: int, tokens: int) -> tuple[np.ndarray, Mamba2Weights, Mamba2State]:
    rng = np.random.default_rng(shape.heads)

    def normal(*size: int) -> np.ndarray:
        return rng.normal(size=size).astype(np.float32)

    of_heads = (normal(shape.heads) for _ in range(3))
    weights = Mamba2Weights(normal(shape.channels, shape.taps), normal(shape.channels), *of_heads, normal(shape.inner))
    state = Mamba2State(
        normal(slots, shape.heads, shape.head_dim, shape.state_dim), normal(slots, shape.taps - 1, shape.channels)
    )
    return normal(slots, tokens, shape.columns), weights, state


def slot_of(state: Mamba2State, slot: int) -> Mamba2State:
    return Mamba2State(*(np.asarray(one)[slot] for one in state))


def close(ours, true: np.ndarray) -> None:
    np.testing.assert_allclose(ours, true, atol=2e-5, rtol=2e-5)


@pytest.mark.few("groups")
@pytest.mark.parametrize("shape", SHAPES, ids=["groups", "limits"])
def test_a_block_and_the_state_after_any_of_its_tokens(shape: Mamba2Shape) -> None:
    projected, weights, before = jax.tree.map(jnp.asarray, drawn(shape, 7, 6))
    out, factors = jax.jit(mamba2_verify, static_argnames=("shape", "eps"))(
        projected, weights, before, shape=shape, eps=EPS
    )
    counts = np.arange(7, dtype=np.int32)
    # Tokens past the count may hold anything.
    dead = np.arange(6) >= counts[:, None]
    rubbish = Mamba2Factors(*(jnp.where(dead.reshape(7, 6, *[1] * (one.ndim - 2)), jnp.nan, one) for one in factors))
    after = mamba2_fold(before, rubbish, jnp.asarray(counts))
    token_by_token, _ = mamba2_reference(projected, weights, before, shape, eps=EPS)
    for slot in range(7):
        true, states, rows = oracle(projected[slot], weights, slot_of(before, slot), shape)
        close(out[slot], true)
        close(token_by_token[slot], true)
        close(after.s[slot], states[counts[slot]])
        close(after.rows[slot], rows[counts[slot] :][: shape.taps - 1])
    for kept, was in zip(after, before, strict=True):
        np.testing.assert_array_equal(kept[0], was[0])


def test_single_steps_of_slots_that_are_live() -> None:
    shape = SHAPES[0]
    projected, weights, state = drawn(shape, 2, 5)
    state.s[1], state.rows[1] = np.nan, np.nan
    first, live, outs, before = slot_of(state, 0), jnp.array([True, False]), [], state
    step = jax.jit(mamba2_step, static_argnames=("shape", "eps"))
    for token in range(5):
        out, state = step(projected[:, token : token + 1], weights, state, live, shape=shape, eps=EPS)
        outs.append(out[0, 0])
    true, states, rows = oracle(projected[0], weights, first, shape)
    close(jnp.stack(outs), true)
    close(state.s[0], states[-1])
    close(state.rows[0], rows[-3:])
    for kept, was in zip(state, before, strict=True):
        np.testing.assert_array_equal(kept[1], was[1])


@pytest.mark.few("limits")
@pytest.mark.parametrize("shape", SHAPES, ids=["groups", "limits"])
def test_prompts_in_pieces(shape: Mamba2Shape) -> None:
    """Three pieces of one prompt, the last one shorter than the convolution; a prompt that goes on from its slot; one of a token
    that begins anew; a row of no slot, and one of no tokens. What lies past a row's tokens, and in slots of nobody, is NaN.
    """
    projected, weights, states = drawn(shape, 7, 11)
    lengths = np.array([11, 11, 1, 5, 1, 11, 0], np.int32)
    slots = np.array([2, 2, 2, 0, 3, 4, 1], np.int32)
    follows = np.array([False, True, True, False, False, False, False])
    fresh = np.array([True, False, False, False, True, True, False])
    projected[np.arange(11) >= lengths[:, None]] = np.nan
    kept = slot_of(states, 0)
    states = Mamba2State(*(one[:4].copy() for one in states))
    for one in states:
        one[2:] = np.nan
    told = {"slots": slots, "follows": follows, "fresh": fresh, "lengths": lengths}
    prefill = jax.jit(mamba2_prefill, static_argnames=("shape", "eps"))
    out, after = prefill(projected, weights, states, shape=shape, eps=EPS, **told)
    zero = Mamba2State(*(np.zeros_like(one) for one in kept))
    texts = {2: ([0, 1, 2], zero), 0: ([3], kept), 3: ([4], zero)}
    for slot, (rows, before) in texts.items():
        text = np.concatenate([projected[row, : lengths[row]] for row in rows])
        true, ends, behind = oracle(text, weights, before, shape)
        close(np.concatenate([out[row, : lengths[row]] for row in rows]), true)
        close(after.s[slot], ends[-1])
        close(after.rows[slot], behind[len(true) :])
    for ours, was in zip(after, states, strict=True):
        np.testing.assert_array_equal(ours[1], was[1])


def test_the_model_s_dtype() -> None:
    """Rows, x, B, C and outputs are rounded as the model computes; the state and the decay are not."""
    shape = SHAPES[0]
    projected, weights, state = drawn(shape, 2, 6)
    small = jnp.bfloat16
    weights = jax.tree.map(jnp.asarray, weights)
    weights = weights._replace(conv=weights.conv.astype(small), conv_bias=weights.conv_bias.astype(small))
    state = Mamba2State(jnp.asarray(state.s), jnp.asarray(state.rows, small))
    verify = jax.jit(mamba2_verify, static_argnames=("shape", "eps"))
    out, factors = verify(jnp.asarray(projected, small), weights, state, shape=shape, eps=EPS)
    assert (out.dtype, factors.rows.dtype, factors.x.dtype, factors.decay.dtype) == (
        small,
        small,
        jnp.float32,
        jnp.float32,
    )
    true, states, _ = oracle(jnp.asarray(projected, small)[0], weights, slot_of(state, 0), shape)
    np.testing.assert_allclose(np.asarray(out[0], np.float32), true, atol=0.05)
    after = mamba2_fold(state, factors, jnp.array([6, 0]))
    assert (after.s.dtype, after.rows.dtype) == (jnp.float32, small)
    np.testing.assert_allclose(after.s[0], states[-1], atol=0.05, rtol=0.01)
