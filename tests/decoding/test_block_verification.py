"""Block verification: its law by enumeration in float64, and what runs on the device against that."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.decoding.accept import accept_rejection
from dflash_jax.models.heads import Law

from .block_verification import mean_standing, one_by_one, outcomes, target_law, text_law
from .chi_square import p_value
from .test_sampling_law import BAD, GOOD, requests

VOCAB = 3


def random_laws(seed: int, vocab: int, *, refusing: bool = False, sharp: float = 1.2):
    """A law for every prefix, with tokens that it refuses or without."""

    @functools.cache
    def after(prefix: tuple[int, ...]) -> np.ndarray:
        rng = np.random.default_rng([seed, len(prefix), *prefix])
        law = np.exp(rng.normal(size=vocab) * sharp)
        if refusing:
            law[rng.integers(vocab)] = 0.0
        return law / law.sum()

    return after


def blurred(law, seed: int, vocab: int):
    """A drafter that knows something of the target."""
    other = random_laws(seed, vocab)
    return lambda prefix: 0.6 * law(prefix) + 0.4 * other(prefix)


def pair_of(seed: int, vocab: int, refusing: str):
    p = random_laws(seed, vocab, refusing=refusing in ("target", "both"))
    q = random_laws(seed + 100, vocab, refusing=True) if refusing == "both" else blurred(p, seed + 100, vocab)
    return p, q


def after_(places: int):
    return lambda prefix: len(prefix) == places


def at_likely_places(q):
    """Of so many places as `cut` lets through, by the laws of places and what was drawn before them."""

    def end(prefix: tuple[int, ...]) -> bool:
        return len(prefix) == 3 or q(prefix).max() < 0.5

    return end


@pytest.mark.few("none-3-3-0", "both-3-2-1")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("vocab", "places"), [(2, 4), (3, 3), (3, 1), (3, 2)])
@pytest.mark.parametrize("refusing", ["none", "target", "both"])
def test_a_block_and_what_follows_it_have_the_targets_law(seed: int, vocab: int, places: int, refusing: str) -> None:
    p, q = pair_of(seed, vocab, refusing)
    tokens = places + 2
    np.testing.assert_allclose(text_law(p, q, after_(places), tokens), target_law(p, tokens), atol=1e-12)
    assert mean_standing(p, q, after_(places)) >= mean_standing(p, q, after_(places), one_by_one) - 1e-12


@pytest.mark.parametrize("seed", range(3))
def test_a_block_that_ends_where_its_laws_say_so_has_the_targets_law(seed: int) -> None:
    p, q = pair_of(seed, VOCAB, "none")
    end = at_likely_places(q)
    np.testing.assert_allclose(text_law(p, q, end, 5), target_law(p, 5), atol=1e-12)


def test_the_papers_example() -> None:
    """Two tokens, laws without context: 10/9 proposals stand where each is judged by itself, 11/9 with the block's rule."""
    p, q = (lambda prefix: np.array([1 / 3, 2 / 3])), (lambda prefix: np.array([2 / 3, 1 / 3]))
    assert mean_standing(p, q, after_(2), one_by_one) == pytest.approx(10 / 9)
    assert mean_standing(p, q, after_(2)) == pytest.approx(11 / 9)


def test_wrong_rules_are_noticed() -> None:
    p, q = pair_of(0, VOCAB, "none")

    def unweighted(proposals, ours, theirs):
        """As if the residual were that of a single place."""
        right = outcomes(proposals, ours, theirs)
        left = np.maximum(ours[:-1] - theirs, 0)
        right[:-1] = right[:-1].sum(axis=1, keepdims=True) * left / left.sum(axis=1, keepdims=True)
        return right

    def by_weights_alone(proposals, ours, theirs):
        """As if every place were the block's end."""
        right = outcomes(proposals, ours, theirs)
        ratios = [ours[i, token] / theirs[i, token] for i, token in enumerate(proposals)]
        chances = np.ones(len(proposals) + 1)
        for place, ratio in enumerate(ratios):
            chances[place + 1] = min(1.0, chances[place] * ratio)
        later = np.append(np.cumprod(1 - chances[:0:-1])[::-1], 1.0)
        return (chances * later)[:, None] * right / np.maximum(right.sum(axis=1, keepdims=True), 1e-300)

    def cut_by_what_was_drawn(proposals, ours, theirs):
        """As if a place could be left out for what was drawn there."""
        kept = proposals.index(0) if 0 in proposals else len(proposals)
        right = np.zeros_like(ours)
        right[: kept + 1] = outcomes(proposals[:kept], ours[: kept + 1], theirs[:kept])
        return right

    expected = target_law(p, 4)
    np.testing.assert_allclose(text_law(p, q, after_(3), 4, one_by_one), expected, atol=1e-12)
    for rule in (unweighted, by_weights_alone, cut_by_what_was_drawn):
        assert np.abs(text_law(p, q, after_(3), 4, rule) - expected).max() > 1e-4


SAMPLES, DRAFTS, TOKENS = 30_000, 3, 5


def device_laws(case: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits along one block and its proposals."""
    rng = np.random.default_rng(case)
    target, drafted = rng.normal(size=(DRAFTS + 1, TOKENS)), rng.normal(size=(DRAFTS, TOKENS))
    drafted = 0.5 * drafted + 0.5 * target[:-1]
    target[1, 4] = drafted[2, 3] = -np.inf
    proposals = rng.integers(0, 3, DRAFTS)
    return target, drafted, proposals


def softmax(logits: np.ndarray) -> np.ndarray:
    law = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return law / law.sum(axis=-1, keepdims=True)


def judged(target: np.ndarray, law: Law, proposals: np.ndarray, lengths: int | None = None) -> np.ndarray:
    """Counts `[T, TOKENS]` of how many proposals stood and which token came after them."""

    def rows(values) -> jax.Array:
        values = jnp.asarray(values)
        return jnp.broadcast_to(values, (SAMPLES, *values.shape))

    positions = rows(np.arange(DRAFTS + 1, dtype=np.int32) + 11)
    of_rows = Law(rows(np.float32(law.logits)), None if law.tokens is None else rows(np.int32(law.tokens)))
    ends = None if lengths is None else jnp.full(SAMPLES, lengths, jnp.int32)
    run = jax.jit(accept_rejection)
    accepted, tokens = run(
        rows(np.int32(proposals)), of_rows, rows(np.float32(target)), positions, requests(SAMPLES), ends
    )
    after = jnp.take_along_axis(tokens, accepted[:, None], axis=1)[:, 0]
    flat = np.asarray(accepted) * TOKENS + np.asarray(after)
    return np.bincount(flat, minlength=(DRAFTS + 1) * TOKENS).reshape(DRAFTS + 1, TOKENS)


@pytest.mark.few("0-4")
@pytest.mark.parametrize("lengths", [4, 3, 1, None])
@pytest.mark.parametrize("case", range(3))
def test_what_runs_has_the_chances_of_the_reference(case: int, lengths: int | None) -> None:
    target, drafted, proposals = device_laws(case)
    counts = judged(target, Law(drafted), proposals, lengths)
    ends = DRAFTS if lengths is None else lengths - 1
    expected = np.zeros((DRAFTS + 1, TOKENS))
    expected[: ends + 1] = outcomes(tuple(proposals[:ends]), softmax(target)[: ends + 1], softmax(drafted)[:ends])
    assert p_value(counts, expected) > GOOD


def test_one_rule_is_not_the_other() -> None:
    target, drafted, proposals = device_laws(0)
    counts = judged(target, Law(drafted), proposals)
    assert p_value(counts, one_by_one(tuple(proposals), softmax(target), softmax(drafted))) < BAD


def test_a_law_over_some_tokens_alone_is_judged_as_one_of_all() -> None:
    target, drafted, proposals = device_laws(1)
    drafted[:, 3] = -np.inf
    tokens = np.array([[2, 4, 0, 1], [1, 0, 4, 2], [4, 1, 2, 0]])
    listed = Law(np.take_along_axis(drafted, tokens, axis=1), tokens)
    assert (
        p_value(judged(target, listed, proposals), outcomes(tuple(proposals), softmax(target), softmax(drafted))) > GOOD
    )
    differ = judged(target, listed, proposals) - judged(target, Law(drafted), proposals)
    assert np.abs(differ).sum() < 1e-3 * SAMPLES  # the same noise: but for what rounding turns
