"""Which proposals are verified where requests share rows, and where their tokens then lie."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.attention.ragged import packing
from dflash_jax.decoding.verify_budget import budget, log_odds, survivals

RNG = np.random.default_rng(0)


def lengths_of(survival: np.ndarray, live: np.ndarray, rows: int) -> list[int]:
    """By definition: pairs in the order of chance, place, slot, as long as there are rows."""
    pairs = [(-survival[slot, place], place, slot) for slot, place in np.ndindex(survival.shape) if live[slot]]
    taken = sorted(pair for pair in pairs if not np.isnan(pair[0]))[: rows - int(live.sum())]
    return [int(live[slot]) + sum(pair[2] == slot for pair in taken) for slot in range(len(live))]


def test_worked_example() -> None:
    """Two requests, three places, three proposals: two of the first request and one of the second."""
    chances = np.array([[0.9, 0.8, 0.5], [0.6, 0.5, 0.2]])
    survival = np.cumprod(chances, axis=1)
    np.testing.assert_allclose(survival, [[0.9, 0.72, 0.36], [0.6, 0.3, 0.06]])
    found = [budget(jnp.asarray(survival), jnp.full(2, True), 2 + more).tolist() for more in range(7)]
    assert found == [[1, 1], [2, 1], [3, 1], [3, 2], [4, 2], [4, 3], [4, 4]]
    odds = log_odds(jnp.array([[[2.0, 1.0, 0.0]]]))
    assert float(odds[0, 0]) == pytest.approx(0.687, abs=5e-4)
    assert float(survivals(odds, jnp.array([0.5, -0.2]))[0, 0]) == pytest.approx(0.536, abs=5e-4)


def test_the_best_pairs_of_live_slots_with_ties_and_no_numbers() -> None:
    compiled = jax.jit(jax.vmap(budget, in_axes=(0, 0, None)), static_argnums=2)
    chances = RNG.choice([0.25, 0.5, 1.0, 1.0], (200, 5, 4)).astype(np.float32)  # products are exact, and often equal
    chances[::7, 2, 1] = np.nan
    survival, live = np.cumprod(chances, axis=2), RNG.random((200, 5)) < 0.7
    for rows in (5, 6, 11, 25):
        found = np.asarray(compiled(survival, live, rows))
        assert found.tolist() == [lengths_of(*case, rows) for case in zip(survival, live, strict=True)]
        assert (found.sum(axis=1) <= rows).all()


def test_log_odds_are_of_the_law() -> None:
    """Against float64, up to where float32 laws end; refused tokens are none, and equal tops are others to each other."""
    logits = (RNG.normal(size=(2, 5, 300)) * np.array([0.1, 1, 5, 20, 60])[:, None]).astype(np.float32)
    logits[0, :, 7:90] = -np.inf
    logits[1, 2, :2] = logits[1, 2].max() + 1
    wide = np.sort(logits.astype(np.float64), axis=-1)
    expected = -np.log(np.exp(wide[..., :-1] - wide[..., -1:]).sum(axis=-1))
    np.testing.assert_allclose(log_odds(jnp.asarray(logits)), np.clip(expected, -40, 40), rtol=1e-4, atol=1e-5)
    assert float(log_odds(jnp.array([[[0.0, -jnp.inf]]]))[0, 0]) == 40.0


def test_tokens_lie_side_by_side() -> None:
    lengths, rows, width = np.array([3, 0, 1, 4, 2]), 12, 4
    packed = packing(jnp.asarray(lengths), rows, width)
    tokens = jnp.arange(20).reshape(5, 4, 1) * jnp.ones(2, jnp.int32)
    flat = packed.packed(tokens)
    assert flat.shape == (1, 12, 2)
    assert flat[0, :, 0].tolist() == [0, 1, 2, 8, 12, 13, 14, 15, 16, 17, 17, 17]
    back = packed.unpacked(flat)[..., 0]
    assert back[0].tolist() == [0, 1, 2, 2]
    assert back[2:].tolist() == [[8, 8, 8, 8], [12, 13, 14, 15], [16, 17, 17, 17]]
    # Nobody is live: nothing is read that is not there.
    none = packing(jnp.zeros(5, jnp.int32), rows, width)
    assert none.packed(tokens).shape == (1, 12, 2)
    assert int(none.rows.max()) < rows
