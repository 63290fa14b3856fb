"""Devices that share a pair emit what one device emits, with the same proposals accepted."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

import dflash_jax as dj
from dflash_jax.engine.requests import Request

# Pages for one request of full length and one more.
OPTIONS: Any = {"dtype": "float32", "max_batch": 2, "max_model_len": 64, "page_size": 16, "num_pages": 6}
PROMPTS = [[7, 3, 60, 5], [90, 11, 12, 13, 14, 15, 2, 5, 60]]
GREEDY = dj.SamplingParams(max_tokens=20, ignore_eos=True)
SAMPLED = dj.SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.9, top_p=0.9, seed=3, logprobs=2)


def served(model: Any, params: Any, *, draft: bool = True) -> list[tuple]:
    """Tokens of both prompts, and what each cycle gained."""
    done = dj.generate(model, PROMPTS, params, draft=draft)
    return [(one.token_ids, one.acceptance_lengths) for one in done]


def check_ranks_agree(model: Any, ranks: int) -> None:
    """What is the same on all ranks is so to the last bit, in the middle of two texts."""
    pieces = dj.stream(model, PROMPTS, GREEDY, cycles=2)
    for _, _ in zip(range(4), pieces, strict=False):
        pass
    state = model.engine.scheduler.batch.state
    for name in ("pending", "seq_lens", "fresh", "features", "produced", "done"):
        shards = getattr(state, name).addressable_shards
        assert len(shards) == ranks
        assert len({np.asarray(shard.data).tobytes() for shard in shards}) == 1, name
    pieces.close()  # which cancels both


@pytest.fixture(scope="module")
def single(folder) -> Any:
    return dj.load(folder, **OPTIONS)


@pytest.fixture(scope="module")
def greedy(single) -> list[tuple]:
    return served(single, GREEDY)


@pytest.fixture(scope="module")
def double(folder) -> Any:
    return dj.load(folder, tp=2, **OPTIONS)


def test_drafts_are_accepted_now_and_then(greedy):
    assert {length for _, lengths in greedy for length in lengths} >= {1, 2, 3}


@pytest.mark.few("2")
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_greedy(request, folder, greedy, ranks):
    model = request.getfixturevalue("double") if ranks == 2 else dj.load(folder, tp=ranks, **OPTIONS)
    assert served(model, GREEDY) == greedy
    pool = model.engine.take_pools()[0].k[0]
    own = max(4 // ranks, 1)
    assert pool.shape[1] == own * ranks
    assert {shard.data.shape[1] for shard in pool.addressable_shards} == {own}
    check_ranks_agree(model, ranks)


def test_alone(double, greedy):
    assert [tokens for tokens, _ in served(double, GREEDY, draft=False)] == [tokens for tokens, _ in greedy]


@pytest.mark.few
def test_pages_in_common_are_read_once(single, double, monkeypatch):
    """Every rank is told who shares which pages."""
    prompts = [[*range(3, 19), 7], [*range(3, 19), 60, 5]]
    params, told, call = dj.SamplingParams(max_tokens=8, ignore_eos=True), [], double.engine.programs.call
    alone = [dj.generate(single, prompt, params).token_ids for prompt in prompts]

    def called(function, static, donate, weights, table, state, *rest):
        told.extend(one.tolist() for one in rest[4:5] if function.__name__ == "loop" and one is not None)
        return call(function, static, donate, weights, table, state, *rest)

    monkeypatch.setattr(double.engine.programs, "call", called)
    monkeypatch.setattr(double.engine, "cascade", True)
    assert [one.token_ids for one in dj.generate(double, prompts, params)] == alone
    assert [1, 1] in told


def test_sampled_with_log_probabilities(single, double):
    ours, theirs = (dj.generate(model, PROMPTS, SAMPLED) for model in (double, single))
    for one, other in zip(ours, theirs, strict=True):
        assert (one.token_ids, one.acceptance_lengths) == (other.token_ids, other.acceptance_lengths)
        assert one.logprobs is not None
        assert other.logprobs is not None
        pairs = [(a.logprob, b.logprob) for a, b in zip(one.logprobs, other.logprobs, strict=True)]
        np.testing.assert_allclose(*zip(*pairs, strict=True), atol=1e-5)


def test_pools_stay(double):
    """Donated pools are written where they are, shard by shard."""

    def places():
        pools = jax.tree.leaves(double.engine.take_pools())
        return [shard.data.unsafe_buffer_pointer() for pool in pools for shard in pool.addressable_shards]

    before = places()
    check_ranks_agree(double, 2)
    assert double.engine.allocator.num_free == double.engine.num_pages
    assert places() == before


def test_stops_prefixes_and_resizing(single, double, greedy):
    """A prompt whose beginning is in pages, one that ends early, and a batch that grows and shrinks."""
    long = [int(token) for token in np.random.default_rng(1).integers(5, 90, 20)]
    stop = greedy[0][0][6]
    ends = dj.SamplingParams(max_tokens=20, stop_token_ids=[stop])
    word = dj.SamplingParams(max_tokens=20, ignore_eos=True, stop=f"w{stop}")
    found = []
    for model in (single, double):
        texts = [dj.generate(model, [long + tail], GREEDY)[0] for tail in ([3], [4])]
        texts += dj.generate(model, [*PROMPTS, long], [ends, GREEDY, word])
        found.append([(one.text, one.token_ids, one.finish_reason, one.stats.cached_tokens) for one in texts])
    assert found[0] == found[1]
    assert found[1][1][3] == 16
    assert [text[2] for text in found[1]] == ["length", "length", "stop", "length", "stop"]


@pytest.mark.filterwarnings("ignore:the drafter's tokens are hardly ever accepted")
def test_who_loses_its_pages_comes_back(single, double):
    """Both requests fit as they begin, and only one of them as it ends."""
    prompts = [[int(token) for token in np.random.default_rng(seed).integers(5, 90, 20)] for seed in (2, 3)]
    long, found = dj.SamplingParams(max_tokens=28, ignore_eos=True), []
    for model in (single, double):
        done = dj.generate(model, prompts, long)
        found.append([(one.token_ids, one.acceptance_lengths) for one in done])
        assert model.engine.scheduler.stats.preemptions == 1
        assert model.engine.allocator.num_free == 6
    assert found[0] == found[1]


@pytest.mark.few
def test_grammars_as_tables(single, double):
    """Every rank walks along the same table; one that the host has to be asked for is refused."""
    pytest.importorskip("llguidance")
    from ..decoding.test_grammar_masks import FIRST, grammar_of, with_table

    pattern, end = "([!-@][A-`]){3,}", 95
    grammar = with_table(grammar_of(pattern, 96, end), pattern, 96, end, FIRST)
    ways = dj.SamplingParams(max_tokens=16), dj.SamplingParams(max_tokens=16, temperature=0.9, top_k=30, seed=3)
    asks = [Request(i, tuple(PROMPTS[i]), ways[i], (end,), grammar=grammar) for i in range(2)]
    found = []
    for model in (single, double):
        texts = [list[int](), list[int]()]
        for update in model.engine.run(asks, draft=True, cycles=6):
            texts[update.index] += update.tokens
        found.append(texts)
    assert found[0] == found[1]
    for text in found[1]:
        assert grammar.matcher.validate_tokens(text) == len(text) > 6
    with pytest.raises(dj.ParameterError, match=r"asks the host in every cycle \(nobody made one\), which tp=2"):
        double.engine.check(replace(asks[0], grammar=grammar_of(pattern, 96, end)))
