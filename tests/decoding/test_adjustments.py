"""Biases, penalties and refused words: what a block emits is what their definitions give, token after token."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.attention.dense import dense_attend
from dflash_jax.decoding import cycle
from dflash_jax.decoding.accept import accept_matching
from dflash_jax.decoding.adjustments import Adjustments, _greatest, adjusted_best, adjusted_logits, after, part_of
from dflash_jax.decoding.sampling import choose, filtered_logits
from dflash_jax.engine.requests import Request, adjustments
from dflash_jax.models.registry import bind
from dflash_jax.sampling_params import SamplingParams

from ..random_pair import VOCAB, of_one_shape
from .chi_square import count, p_value
from .test_sampling_law import BAD, GOOD, SAMPLES, START, TARGET, law_of, requests


def defined(logits: np.ndarray, request: Request, emitted: list[int]) -> np.ndarray:
    """One row of logits in float64 for the token after `emitted`, by the definitions of the parameters."""
    p, left = request.params, logits.astype(np.float64)
    for token, amount in p.logit_bias:
        left[token] += amount
    for token in range(len(left)):
        times = emitted.count(token)
        if times or token in request.prompt:
            left[token] *= 1 / p.repetition_penalty if left[token] > 0 else p.repetition_penalty
        left[token] -= p.frequency_penalty * times + (p.presence_penalty if times else 0.0)
        if p.allowed_token_ids is not None and token not in p.allowed_token_ids:
            left[token] = -np.inf
    for *begin, last in request.refused:
        if emitted[len(emitted) - len(begin) :] == begin:
            left[last] = -np.inf
    return left


def asked(index: int, prompt: Any, refused: Any = (), **params: Any) -> Request:
    return Request(index, tuple(prompt), SamplingParams(seed=index, **params), refused=tuple(map(tuple, refused)))


EVERYTHING = {"presence_penalty": 0.5, "frequency_penalty": -0.3, "repetition_penalty": 1.4}


def test_rows_of_a_block_are_defined_by_what_stands_before_them() -> None:
    """Few tokens, so that proposals come twice, come again, and end refused words of any length."""
    rng, rows, places, vocab = np.random.default_rng(0), 24, 6, 5
    logits = rng.normal(size=(rows, places, vocab)).astype(np.float32) * 2
    ids = rng.integers(0, vocab, (rows, places))
    known = []
    for row in range(rows):
        words = [rng.integers(0, vocab, rng.integers(1, 4)).tolist() for _ in range(row % 4)]
        bias = {int(token): float(rng.normal()) for token in rng.integers(0, vocab, row % 3)}
        request = asked(
            row, rng.integers(0, vocab, 2).tolist(), words, logit_bias=bias, **(EVERYTHING if row % 5 else {})
        )
        if row % 6 == 0:
            request = replace(request, params=replace(request.params, allowed_token_ids=[1, 3, 4]))
        known.append((request, [*rng.integers(0, vocab, row % 9).tolist(), int(ids[row, 0])]))
    given = adjustments(known, vocab)
    found = np.asarray(jax.jit(adjusted_logits)(logits, ids, given))
    expected = [
        [defined(logits[row, place], request, emitted + ids[row, 1 : place + 1].tolist()) for place in range(places)]
        for row, (request, emitted) in enumerate(known)
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    # The best of one pass, everything allowed and not; which row has what refused everywhere does not matter.
    bits = rng.integers(1, 2**vocab, (rows, places, 1), dtype=np.uint32)
    for masks in (None, bits):
        left = np.where(bits >> np.arange(vocab) & 1, expected, -np.inf) if masks is not None else np.array(expected)
        some = np.isfinite(left).any(axis=-1)
        assert some.sum() > rows
        best = np.asarray(jax.jit(adjusted_best)(logits, ids, given, masks))
        np.testing.assert_array_equal(best[some], left.argmax(axis=-1)[some])
    counts = rng.integers(0, places + 1, rows)
    later = jax.jit(after)(given, ids, counts)
    whole = adjustments(
        [(one, emitted + new[:n].tolist()) for (one, emitted), new, n in zip(known, ids, counts, strict=True)], vocab
    )
    changes = np.array([request.adjusts for request, _ in known])  # others have no history
    for one, other in ((later.seen, whole.seen), (later.tail, whole.tail)):
        np.testing.assert_array_equal(np.asarray(one)[changes], np.asarray(other)[changes])


@pytest.mark.parametrize(("vocab", "part"), [(4096, 2048), (2374, 1187), (1201, 1201), (5, 5), (7919, 7919)])
def test_the_greatest_of_a_row_is_the_first_of_equal_ones(vocab: int, part: int) -> None:
    rows = np.random.default_rng(vocab).integers(0, 9, (3, 2, vocab)).astype(np.float32)
    rows[1, 1] = -np.inf
    rows[2, 0, : vocab - 1] = -1.0
    assert part_of(vocab) == part
    best, place = jax.jit(_greatest)(rows)
    np.testing.assert_array_equal(np.asarray(best), rows.max(axis=-1))
    np.testing.assert_array_equal(np.asarray(place), rows.argmax(axis=-1))


# The law of sampled texts: every seed emits from START on, by cycles whose proposals stand now and then.

PENALTIES = {"presence_penalty": 0.4, "frequency_penalty": 0.7, "repetition_penalty": 1.3}
FILTERS = {"temperature": 0.9, "top_k": 5}
PLACES = 3


@functools.partial(jax.jit, static_argnums=1)
def emitted_texts(adjust: Adjustments, blind: bool) -> tuple[jax.Array, jax.Array]:
    """The first tokens of every seed, and how many proposals stood at once. `blind` leaves a block's own tokens uncounted."""
    request, rows = requests(SAMPLES, **FILTERS), SAMPLES
    places, each = jnp.arange(3), jnp.arange(rows)

    def cycle(carry: Any, _: Any) -> Any:
        pending, length, text, adjust = carry
        positions = length[:, None] + places
        first = jnp.argmax(jnp.asarray(TARGET)[pending], axis=-1)
        proposals = jnp.stack([first, jnp.where(each % 2, first, START)], axis=1).astype(jnp.int32)
        ids = jnp.concatenate([pending[:, None], proposals], axis=1)
        raw = jnp.asarray(TARGET)[ids]
        if blind:
            logits = jnp.concatenate(
                [adjusted_logits(raw[:, i : i + 1], ids[:, i : i + 1], adjust) for i in range(3)], axis=1
            )
        else:
            logits = adjusted_logits(raw, ids, adjust)
        chosen = choose(filtered_logits(logits, request, "adjusted"), positions, request, "adjusted")
        accepted, tokens = accept_matching(proposals, chosen)
        at = jnp.where(places <= accepted[:, None], jnp.minimum(positions, PLACES), PLACES)
        text = text.at[each[:, None], at].set(tokens, mode="drop")
        last = jnp.take_along_axis(tokens, accepted[:, None], axis=1)[:, 0]
        return (last, length + accepted + 1, text, after(adjust, tokens, accepted + 1)), accepted

    start = jnp.full(rows, START, jnp.int32), jnp.zeros(rows, jnp.int32), jnp.zeros((rows, PLACES), jnp.int32), adjust
    carry, accepted = jax.lax.scan(cycle, start, None, length=PLACES)
    return carry[2], accepted[0]


@pytest.mark.few
def test_sampled_blocks_have_the_law_of_the_definitions() -> None:
    request, vocab = asked(0, (2,), **PENALTIES, **FILTERS), len(TARGET)
    adjust = jax.tree.map(lambda leaf: jnp.repeat(leaf, SAMPLES, axis=0), adjustments([(request, [START])], vocab))
    law = np.ones(())
    for _ in range(PLACES):
        follows = np.zeros((*law.shape, vocab))
        for text in np.ndindex(law.shape):
            row = TARGET[text[-1] if text else START]
            follows[text] = law_of(defined(row, request, [START, *text]), **FILTERS)
        law = law[..., None] * follows
    text, accepted = emitted_texts(adjust, False)
    assert 0.2 < float(accepted.mean()) < 1.8
    assert p_value(count(text, vocab), law) > GOOD
    uncounted = emitted_texts(adjust, True)[0]
    assert p_value(count(uncounted, vocab), law) < BAD, "counts of a block's own tokens left out are not noticed"


# The engine: slots that change hands, pages that run out, cycles that end at every place of the block.

PROMPTS = ((5, 9, 9, 3, 41, 7), (17, 5, 80, 2), (60, 61, 62, 61, 60), (8, 8, 8), (5, 9, 9, 3, 41, 7), (30, 31))
TOKENS = 40


def texts_of(pair: Any, asks: list[Request], *, draft: bool) -> tuple[list[list[int]], list[int]]:
    tokens, counts = [[] for _ in asks], []
    for update in pair.engine.run(asks, draft=draft, cycles=6):
        tokens[update.index] += update.tokens
        counts += update.counts
    pair.assert_free()
    return tokens, counts


def test_texts_are_defined_and_drafting_changes_none(make_pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = make_pair(max_batch=2, num_pages=5, max_model_len=64)
    of_one_shape(pair.engine)
    base, _ = texts_of(
        pair, [asked(i, PROMPTS[i], max_tokens=TOKENS, logit_bias={96: -1}) for i in range(2)], draft=False
    )
    words = [base[1][:1], base[1][2:4], base[1][5:8], base[1][9:10]]
    common = {"max_tokens": TOKENS}
    asks = [
        asked(0, PROMPTS[0], repetition_penalty=1.3, **common),
        asked(1, PROMPTS[1], words, frequency_penalty=0.5, logit_bias={3: 4.0, 5: -2.0}, **common),
        asked(2, PROMPTS[2], presence_penalty=0.5, allowed_token_ids=range(0, VOCAB, 3), **common),
        asked(3, PROMPTS[3], **EVERYTHING, temperature=1.0, top_k=20, **common),
        asked(4, PROMPTS[4], **common),
        asked(5, PROMPTS[5], **EVERYTHING, min_tokens=9, stop_token_ids=[1, 2, 3], **common),
    ]
    plain, ones = texts_of(pair, asks, draft=False)
    assert set(ones) == {1}
    assert pair.engine.scheduler.stats.preemptions, "nobody came back: what is counted again was not tried"

    @jax.jit
    def raw_logits(weights: Any, ids: jax.Array) -> jax.Array:
        target = bind(pair.target, weights["target"])
        hidden, _, _ = target(ids, jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape), dense_attend(), ())
        return target.logits(hidden)

    ids = np.zeros((len(asks), 64), np.int32)
    for row, (request, text) in enumerate(zip(asks, plain, strict=True)):
        ids[row, : len(request.prompt) + len(text)] = (*request.prompt, *text)
    logits = np.asarray(raw_logits(pair.engine.weights, ids))
    for row, (request, text) in enumerate(zip(asks, plain, strict=True)):
        for place, token in enumerate(text if request.params.temperature == 0 else ()):
            left = defined(logits[row, len(request.prompt) + place - 1], request, text[:place])
            left[list(request.stop_ids) if place < request.params.min_tokens else []] = -np.inf
            assert left[token] >= left.max() - 1e-3, (row, place)
    assert plain[4] != plain[0], "slots hold what was another request's"

    # Proposals that are right for up to four places: cycles of every length.
    known = jnp.asarray(ids)

    def forced(setup: Any, logits: Any, positions: jax.Array, state: Any, noise: Any) -> jax.Array:
        request = state.request.seed[:, 1:].astype(jnp.int32)
        right = known[request, jnp.minimum(positions, 63)]
        return jnp.where((positions * 3 + request) % 7 == 0, (right + 1) % VOCAB, right)

    monkeypatch.setattr(cycle, "propose", forced)
    drafted, counts = texts_of(pair, asks, draft=True)
    assert drafted == plain
    assert {1, 2, 3, 5} <= set(counts)


def test_what_leaves_no_token_is_refused(pair: Any) -> None:
    for request, said in (
        (asked(0, (1,), [(4, 3)], allowed_token_ids=[3]), "no token that could come at every place"),
        (asked(0, (1,), allowed_token_ids=[3], min_tokens=1, stop_token_ids=[3]), "what min_tokens forbids"),
        (asked(0, (1,), logit_bias={VOCAB: 1}), f"vocabulary of {VOCAB} tokens, got {VOCAB}"),
        (asked(0, (1,), [range(9)]), "at most 32 sequences of several tokens, of 8"),
    ):
        with pytest.raises(Exception, match=said):
            pair.engine.check(request)
