"""Acceptance by position: what counts as a draft that was refused, and when a drafter is said to be of no use."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.decoding.state import Emitted
from dflash_jax.engine.acceptance import DraftRecord, acceptance_by_position, low_acceptance
from dflash_jax.engine.requests import Request, Update
from dflash_jax.sampling_params import SamplingParams


def cycles_of(
    counts: list[int], accepted: list[int], verified: int, lengths: list[int] | None = None
) -> list[tuple[int, int]]:
    rows, nothing = (len(counts), 1, verified), jnp.zeros((len(counts), 1, verified, 0))
    gained, stood = jnp.array(counts)[:, None], jnp.array(accepted)[:, None]
    emitted = Emitted(jnp.zeros(rows, jnp.int32), gained, stood, jnp.ones(rows), nothing.astype(jnp.int32), nothing)
    if lengths is not None:
        emitted = replace(emitted, lengths=np.array(lengths)[:, None])
    return Update.collect(Request(0, (1,), SamplingParams()), emitted, 0, first=False, seconds=1.0).drafts


def test_neither_a_short_verification_nor_an_end_refuses_a_draft() -> None:
    assert cycles_of([3, 1, 5, 0], [2, 0, 4, 0], 5) == [(4, 2), (4, 0), (4, 4)]
    assert cycles_of([2], [1], 2) == [(1, 1)]
    # The text ended with the second of three accepted drafts; with the token after the only one that was accepted.
    assert cycles_of([2], [3], 5) == [(2, 2)]
    assert cycles_of([2], [1], 5) == [(4, 1)]
    assert cycles_of([1], [0], 1) == [(0, 0)]
    # Where lengths follow each request, by the cycle's own.
    assert cycles_of([2, 1, 3, 1], [1, 0, 2, 0], 5, [2, 1, 4, 3]) == [(1, 1), (0, 0), (3, 2), (2, 0)]


def test_shares_are_of_the_cycles_that_offered() -> None:
    assert acceptance_by_position({(4, 2): 1, (4, 0): 1, (2, 2): 1, (1, 1): 1, (0, 0): 9}) == (0.75, 2 / 3, 0.0, 0.0)
    assert acceptance_by_position({}) == acceptance_by_position({(0, 0): 3}) == ()


def test_a_drafter_of_no_use_is_told_of_once() -> None:
    record = DraftRecord()
    assert record.observe([(4, 0)] * 150) is None
    assert record.observe([(0, 0)] * 100) is None  # nothing was drafted
    assert record.observe([(4, 1)] * 20 + [(4, 0)] * 29) is None
    assert record.observe([(4, 0)]) == pytest.approx(1.1)
    assert record.observe([(4, 0)] * 400) is None
    assert "1.10 tokens a cycle over the last 200" in low_acceptance(1.1)


def test_a_drafter_that_helps_is_not_told_of() -> None:
    record = DraftRecord()
    assert [record.observe([(4, place % 4 == 0)]) for place in range(1000)] == [None] * 1000
    assert record.by_position == (0.25, 0.0, 0.0, 0.0)
