"""Convolutions that add to what goes into them, against float64: blocks from a state, single steps, and prompts in pieces."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels.recurrent.residual_conv import residual_prefill, residual_step, residual_verify
from dflash_kernels.recurrent.short_conv import ConvFactors, ConvState, conv_fold

CHANNELS = 6


def oracle(x: np.ndarray, taps: np.ndarray, before: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Outputs of one text's tokens, and its rows behind those of `before`, in float64."""
    rows = np.concatenate([before, x]).astype(np.float64)
    summed = [(rows[i : i + taps.shape[1]] * taps.T).sum(axis=0) for i in range(len(x))]
    return x + np.array(summed).reshape(-1, CHANNELS), rows


def drawn(taps: int, *shape: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(taps)
    sizes = (*shape, CHANNELS), (CHANNELS, taps), (shape[0], taps - 1, CHANNELS)
    return tuple(rng.normal(size=size).astype(np.float32) for size in sizes)  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("taps", [2, 4])
def test_a_block_single_steps_and_the_state_after_any_token(taps: int) -> None:
    x, weights, before = drawn(taps, 7, 6)
    state, counts = ConvState(jnp.asarray(before)), np.arange(7, dtype=np.int32)
    out, factors = residual_verify(jnp.asarray(x), jnp.asarray(weights), state)
    # Tokens past the count may hold anything.
    rubbish = jnp.where((np.arange(6) < counts[:, None])[..., None], factors.rows, jnp.nan)
    after, live, outs = conv_fold(state, ConvFactors(rubbish), jnp.asarray(counts)), jnp.asarray(counts > 0), []
    for token in range(6):
        one, state = residual_step(jnp.asarray(x[:, token : token + 1]), jnp.asarray(weights), state, live)
        outs.append(one[:, 0])
    for slot in range(7):
        true, rows = oracle(x[slot], weights, before[slot])
        np.testing.assert_allclose(out[slot], true, atol=1e-5)
        np.testing.assert_allclose(after.rows[slot], rows[counts[slot] :][: taps - 1], atol=1e-6)
        if slot:
            np.testing.assert_allclose(jnp.stack(outs)[:, slot], true, atol=1e-5)
            np.testing.assert_allclose(state.rows[slot], rows[6:], atol=1e-6)
    np.testing.assert_array_equal(after.rows[0], before[0])
    np.testing.assert_array_equal(state.rows[0], before[0])


def test_prompts_in_pieces() -> None:
    """Three pieces of one prompt, the last one shorter than the state; a prompt that goes on from its slot; one of a token that
    begins anew; a row of no slot, and one of no tokens. What lies past a row's tokens, and in slots of nobody, is NaN."""
    x, weights, states = drawn(4, 7, 8)[0], drawn(4, 1, 1)[1], drawn(4, 4, 1)[2]
    lengths = np.array([8, 8, 1, 3, 1, 8, 0], np.int32)
    slots = np.array([2, 2, 2, 0, 3, 4, 1], np.int32)
    follows = np.array([False, True, True, False, False, False, False])
    fresh = np.array([True, False, False, False, True, True, False])
    x[np.arange(8) >= lengths[:, None]] = np.nan
    kept = states.copy()
    states[2:] = np.nan
    told = {"slots": slots, "follows": follows, "fresh": fresh, "lengths": lengths}
    out, after = jax.jit(residual_prefill)(x, weights, ConvState(jnp.asarray(states)), **told)
    zero = np.zeros_like(kept[0])
    texts = {2: ([0, 1, 2], zero), 0: ([3], kept[0]), 3: ([4], zero)}
    for slot, (rows, before) in texts.items():
        true, ends = oracle(np.concatenate([x[row, : lengths[row]] for row in rows]), weights, before)
        np.testing.assert_allclose(np.concatenate([out[row, : lengths[row]] for row in rows]), true, atol=1e-5)
        np.testing.assert_allclose(after.rows[slot], ends[len(true) :], atol=1e-6)
    np.testing.assert_array_equal(after.rows[1], states[1])


def test_sums_are_rounded_once() -> None:
    x, weights, before = drawn(3, 2, 4)
    low, rows = jnp.asarray(x, jnp.bfloat16), jnp.asarray(before, jnp.bfloat16)
    out, _ = residual_verify(low, jnp.asarray(weights), ConvState(rows))
    assert out.dtype == jnp.bfloat16
    wide, _ = residual_verify(low.astype(jnp.float32), jnp.asarray(weights), ConvState(rows.astype(jnp.float32)))
    np.testing.assert_array_equal(out, wide.astype(jnp.bfloat16))
