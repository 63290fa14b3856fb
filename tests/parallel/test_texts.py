"""Devices that share a pair emit what one device emits, with the same proposals accepted."""

from typing import Any

import jax
import numpy as np
import pytest

import dflash_jax as dj

OPTIONS: Any = {"dtype": "float32", "max_batch": 2, "max_model_len": 64, "page_size": 16}
PROMPTS = [[7, 3, 60, 5], [90, 11, 12, 13, 14, 15, 2, 5, 60]]
GREEDY = dj.SamplingParams(max_tokens=20, ignore_eos=True)
SAMPLED = dj.SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.9, top_p=0.9, seed=3, logprobs=2)


def served(model: Any, params: Any, *, draft: bool = True) -> list[tuple]:
    """Tokens of both prompts, and what each cycle gained."""
    done = dj.generate(model, PROMPTS, params, draft=draft)
    return [(one.token_ids, one.acceptance_lengths) for one in done]


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


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_greedy(request, folder, greedy, ranks):
    model = request.getfixturevalue("double") if ranks == 2 else dj.load(folder, tp=ranks, **OPTIONS)
    assert served(model, GREEDY) == greedy
    pool = model.engine.take_pools()[0].k[0]
    own = max(4 // ranks, 1)
    assert pool.shape[1] == own * ranks
    assert {shard.data.shape[1] for shard in pool.addressable_shards} == {own}


def test_alone(double, greedy):
    assert [tokens for tokens, _ in served(double, GREEDY, draft=False)] == [tokens for tokens, _ in greedy]


def test_sampled_with_log_probabilities(single, double):
    ours, theirs = (dj.generate(model, PROMPTS, SAMPLED) for model in (double, single))
    for one, other in zip(ours, theirs, strict=True):
        assert (one.token_ids, one.acceptance_lengths) == (other.token_ids, other.acceptance_lengths)
        assert one.logprobs is not None
        assert other.logprobs is not None
        pairs = [(a.logprob, b.logprob) for a, b in zip(one.logprobs, other.logprobs, strict=True)]
        np.testing.assert_allclose(*zip(*pairs, strict=True), atol=1e-5)


def test_pools_stay_and_ranks_agree(double):
    """Donated pools are written where they are, shard by shard, and what is the same on all ranks is so to the last bit."""

    def places():
        pools = jax.tree.leaves(double.engine.take_pools())
        return [shard.data.unsafe_buffer_pointer() for pool in pools for shard in pool.addressable_shards]

    before = places()
    pieces = dj.stream(double, PROMPTS, GREEDY, cycles=2)
    for _, _ in zip(range(4), pieces, strict=False):
        pass
    state = double.engine.scheduler.batch.state
    for name in ("pending", "seq_lens", "fresh", "features", "produced", "done"):
        shards = getattr(state, name).addressable_shards
        assert len(shards) == 2
        assert len({np.asarray(shard.data).tobytes() for shard in shards}) == 1, name
    pieces.close()  # which cancels both
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
