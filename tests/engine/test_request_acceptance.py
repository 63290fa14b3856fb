"""What is learnt of single requests: that levels are told apart where they differ, and only there."""

import numpy as np
import pytest

from dflash_jax.engine.request_acceptance import LEAST_SPREAD, REMEMBERED, RequestAcceptance

PLACES = 15


def told(acceptance: RequestAcceptance, tickets: range, chances: np.ndarray, cycles: int, rng: np.random.Generator):
    """So many cycles of whole blocks, and a fit."""
    stands = rng.random((cycles, len(tickets), PLACES)) < chances[:, None] * np.ones(PLACES)
    stood = np.cumprod(stands, axis=2)
    before = np.concatenate([np.ones((cycles, len(tickets), 1)), stood[:, :, :-1]], axis=2)
    acceptance.fade(cycles)
    acceptance.observe(tickets, before.sum(axis=0), stood.sum(axis=0).astype(float))
    acceptance.survivals(tickets)


def truth(chances: np.ndarray) -> np.ndarray:
    return np.cumprod(chances[:, None] * np.ones(PLACES), axis=1)


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.86, 0.95])
def test_equal_requests_are_reckoned_alike(chance):
    """What chance makes of a few cycles is no difference: survivals of 64 requests vary by little."""
    acceptance, rng, chances = RequestAcceptance(PLACES), np.random.default_rng(0), np.full(64, chance)
    for _ in range(6):
        told(acceptance, range(64), chances, 4, rng)
    survivals = acceptance.survivals(range(64))
    assert acceptance.spread < 0.1
    np.testing.assert_allclose(survivals.sum(axis=1).mean(), truth(chances).sum(axis=1).mean(), rtol=0.06)
    assert survivals.sum(axis=1).std() < 0.08 * (1 + survivals.sum(axis=1).mean())
    for _ in range(20):
        told(acceptance, range(64), chances, 8, rng)
    assert acceptance.spread < 0.02


def test_unlike_requests_are_told_apart_in_a_few_cycles():
    """And one of which nothing is known is reckoned to be like all of them, some good and some bad."""
    acceptance, rng = RequestAcceptance(PLACES), np.random.default_rng(1)
    chances = np.where(np.arange(64) % 2, 0.93, 0.5)
    for _ in range(3):
        told(acceptance, range(64), chances, 4, rng)
    survivals = acceptance.survivals(range(64))
    gains, true = survivals.sum(axis=1), truth(chances).sum(axis=1)
    assert np.corrcoef(gains, true)[0, 1] > 0.9
    np.testing.assert_allclose(gains[1::2].mean(), true[1], rtol=0.15)
    np.testing.assert_allclose(gains[::2].mean(), true[0], rtol=0.25)
    fresh = acceptance.survivals([999])[0]
    np.testing.assert_allclose(fresh[:8], truth(chances).mean(axis=0)[:8], atol=0.12)
    assert acceptance.known([0, 999]) == 1


def test_the_typical_request_is_one_of_many_requests():
    """Half of them stay ten times as long. Who comes next is not expected to be one of these."""
    acceptance, rng = RequestAcceptance(PLACES), np.random.default_rng(2)
    chances = np.where(np.arange(32) % 2, 0.93, 0.5)
    told(acceptance, range(32), chances, 10, rng)
    before = acceptance.survivals([999])[0].sum()
    for _ in range(9):
        acceptance.fade(10)
        stood = np.cumprod(rng.random((10, 16, PLACES)) < 0.5, axis=2)
        tried = np.concatenate([np.ones((10, 16, 1)), stood[:, :, :-1]], axis=2)
        acceptance.observe(range(0, 32, 2), tried.sum(axis=0), stood.sum(axis=0).astype(float))
        acceptance.survivals(range(0, 32, 2))
    assert acceptance.survivals([999])[0].sum() > 0.6 * before
    assert acceptance.survivals([0])[0].sum() < 1.3


def test_evidence_fades_and_few_requests_are_remembered():
    acceptance, rng = RequestAcceptance(PLACES), np.random.default_rng(3)
    at_first = acceptance.survivals([0])[0]
    for first in range(0, 4000, 8):
        told(acceptance, range(first, first + 8), np.full(8, 0.05), 1, rng)
    assert len(acceptance.rows) <= 8 + 2 * REMEMBERED
    assert acceptance.known(range(3992, 4000)) == 8
    assert acceptance.survivals([3999])[0].sum() < 0.2
    assert acceptance.spread >= LEAST_SPREAD
    for _ in range(60):
        acceptance.fade(100)
        acceptance.survivals([3999])
    assert acceptance.evidence < 1e-9
    assert acceptance.survivals([3999])[0].sum() > 0.7 * at_first.sum()


def test_data_that_a_line_parts_break_nothing():
    """Some requests' proposals all stand and some's all fall."""
    acceptance, rng = RequestAcceptance(PLACES), np.random.default_rng(4)
    chances = np.where(np.arange(8) % 2, 1.0, 0.0)
    for _ in range(100):
        told(acceptance, range(8), chances, 8, rng)
    survivals = acceptance.survivals(range(8))
    assert np.isfinite(survivals).all()
    assert survivals[1::2, 7].min() > 0.8
    assert survivals[::2, 0].max() < 0.1
