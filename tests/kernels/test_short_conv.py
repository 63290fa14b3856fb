"""Short convolutions against float64: blocks from a state, their folds, single steps, and prompts in pieces of any length."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels.recurrent.rows import prompt_rows
from dflash_kernels.recurrent.short_conv import (
    ConvFactors,
    ConvState,
    conv_fold,
    conv_prefill,
    conv_step,
    conv_verify,
)

CHANNELS = 6


def oracle(projected: np.ndarray, taps: np.ndarray, before: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Outputs of one text's tokens, and its gated rows behind those of `before`, in float64."""
    b, c, x = np.split(projected.astype(np.float64), 3, axis=-1)
    rows = np.concatenate([before.astype(np.float64), b * x])
    summed = [(rows[i : i + taps.shape[1]] * taps.T).sum(axis=0) for i in range(len(projected))]
    return c * np.array(summed).reshape(-1, CHANNELS), rows


def drawn(taps: int, *shape: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(taps)
    return tuple(
        rng.normal(size=size).astype(np.float32)
        for size in ((*shape, 3 * CHANNELS), (CHANNELS, taps), (shape[0], taps - 1, CHANNELS))
    )


@pytest.mark.parametrize("taps", [2, 3, 4])
def test_a_block_and_the_state_after_any_of_its_tokens(taps: int) -> None:
    projected, weights, before = drawn(taps, 7, 6)
    state = ConvState(jnp.asarray(before))
    out, factors = conv_verify(jnp.asarray(projected), jnp.asarray(weights), state)
    counts = np.arange(7, dtype=np.int32)
    # Tokens past the count may hold anything.
    rubbish = jnp.where((np.arange(6) < counts[:, None])[..., None], factors.rows, jnp.nan)
    after = conv_fold(state, ConvFactors(rubbish), jnp.asarray(counts))
    for slot in range(7):
        true, rows = oracle(projected[slot], weights, before[slot])
        np.testing.assert_allclose(out[slot], true, atol=1e-5)
        np.testing.assert_allclose(after.rows[slot], rows[counts[slot] :][: taps - 1], atol=1e-6)
    np.testing.assert_array_equal(after.rows[0], before[0])


def test_single_steps_of_slots_that_are_live() -> None:
    projected, weights, before = drawn(3, 2, 5)
    before[1] = np.nan
    live, state, outs = jnp.array([True, False]), ConvState(jnp.asarray(before)), []
    for token in range(5):
        out, state = conv_step(jnp.asarray(projected[:, token : token + 1]), jnp.asarray(weights), state, live)
        outs.append(out[0, 0])
    true, rows = oracle(projected[0], weights, before[0])
    np.testing.assert_allclose(jnp.stack(outs), true, atol=1e-5)
    np.testing.assert_allclose(state.rows[0], rows[-2:], atol=1e-6)
    np.testing.assert_array_equal(state.rows[1], before[1])


@pytest.mark.parametrize("taps", [2, 3, 5])
def test_prompts_in_pieces(taps: int) -> None:
    """Three pieces of one prompt, the last one shorter than the state; a prompt that goes on from its slot; one of a token that
    begins anew; a row of no slot, and one of no tokens. What lies past a row's tokens, and in slots of nobody, is NaN."""
    projected, weights, states = drawn(taps, 7, 8)[0], drawn(taps, 1, 1)[1], drawn(taps, 4, 1)[2]
    lengths = np.array([8, 8, 1, 3, 1, 8, 0], np.int32)
    slots = np.array([2, 2, 2, 0, 3, 4, 1], np.int32)
    follows = np.array([False, True, True, False, False, False, False])
    fresh = np.array([True, False, False, False, True, True, False])
    projected[np.arange(8) >= lengths[:, None]] = np.nan
    kept = states.copy()
    states[2:] = np.nan
    told = {"slots": slots, "follows": follows, "fresh": fresh, "lengths": lengths}
    out, after = jax.jit(conv_prefill)(projected, weights, ConvState(jnp.asarray(states)), **told)
    zero = np.zeros_like(kept[0])
    texts = {2: ([0, 1, 2], zero), 0: ([3], kept[0]), 3: ([4], zero)}
    for slot, (rows, before) in texts.items():
        true, ends = oracle(np.concatenate([projected[row, : lengths[row]] for row in rows]), weights, before)
        ours = np.concatenate([out[row, : lengths[row]] for row in rows])
        np.testing.assert_allclose(ours, true, atol=1e-5)
        np.testing.assert_allclose(after.rows[slot], ends[len(true) :], atol=1e-6)
    np.testing.assert_array_equal(after.rows[1], states[1])


def test_rows_are_rounded_as_the_model_computes() -> None:
    projected, weights, before = (jnp.asarray(one, jnp.bfloat16) for one in drawn(3, 2, 4))
    out, factors = conv_verify(projected, weights, ConvState(before))
    assert (out.dtype, factors.rows.dtype) == (jnp.bfloat16, jnp.bfloat16)
    true = oracle(*(np.asarray(one, np.float32) for one in (projected[0], weights, before[0])))[0]
    np.testing.assert_allclose(np.asarray(out[0], np.float32), true, atol=0.05)


def test_which_slots_the_ends_of_prompts_are_for() -> None:
    """Those of the last pieces with tokens. Pieces that another one goes on from, rows without tokens and rows of no slot are for
    slot 4, which there is not: two rows of one slot may be written in any order."""
    slots, lengths = jnp.array([2, 2, 1, 1, 3, -1, 4]), jnp.array([5, 2, 5, 0, 0, 3, 3])
    follows, fresh = jnp.array([0, 1, 0, 1, 0, 0, 0], bool), jnp.ones(7, bool)
    rows, kept = jnp.ones((7, 5, 3)), jnp.zeros((4, 2, 3))
    *_, targets = prompt_rows(rows, kept, slots=slots, follows=follows, fresh=fresh, lengths=lengths)
    np.testing.assert_array_equal(targets, [4, 2, 1, 4, 4, 4, 4])
