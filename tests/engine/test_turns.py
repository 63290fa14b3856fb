"""Whose turn it is: how much of prompts is prefilled between the same two cycles, and how many cycles come before the next one."""

from dataclasses import replace

import pytest

from dflash_jax.engine.requests import Request
from dflash_jax.engine.resources import LEAST_TOKENS
from dflash_jax.sampling_params import SamplingParams


@pytest.fixture
def calls(pair, monkeypatch):
    """Names of the programs that `pair` calls, and for cycles how many they may be."""
    seen, call = [], pair.engine.programs.call

    def counted(function, static, donate, *args):
        seen.append((function.__name__, int(args[3])) if function.__name__ == "loop" else function.__name__)
        return call(function, static, donate, *args)

    monkeypatch.setattr(pair.engine.programs, "call", counted)
    return seen


def requests(prompts, max_tokens=24):
    return [
        Request(i, tuple(prompt), SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        for i, prompt in enumerate(prompts)
    ]


def test_prompts_share_a_chunk_until_it_is_full(pair, make_prompts, calls, monkeypatch):
    """Short calls count as LEAST_TOKENS; after so many, those that can do run, one cycle at a time while others could enter.

    Here nothing may be started behind cycles: their results are seen before the next prompts are on their way.
    """
    monkeypatch.setattr(pair.engine, "max_chunk", 2 * LEAST_TOKENS)
    monkeypatch.setattr(pair.engine, "buckets", replace(pair.engine.buckets, pieces=(2,)))
    prompts = make_prompts((33, 40, 37, 64))
    run = pair.engine.run(requests(prompts), cycles=16, slots=4)
    tokens = {i: [] for i in range(4)}
    for update in run:
        tokens[update.index] += update.tokens
        if not update.first:
            calls.append(update.index)
    both = ["prefill_chunk", "admit_program"]
    assert calls[:11] == [*both * 2, ("loop", 1), 0, 1, *both * 2]
    assert calls[11][0] == "loop"
    assert calls[11][1] > 1
    monkeypatch.undo()
    pair.assert_free()
    assert list(tokens.values()) == pair.run(prompts, SamplingParams(max_tokens=24, ignore_eos=True))[0]


def test_one_part_of_a_long_prompt_at_a_time(pair, make_prompts, calls, monkeypatch):
    """Also where as many tokens as short prompts may have together are those of several parts."""
    monkeypatch.setattr(pair.engine, "max_chunk", 4 * LEAST_TOKENS)
    monkeypatch.setattr(pair.engine, "buckets", replace(pair.engine.buckets, pieces=(2,)))
    pair.engine.allocator.forget()
    for _ in pair.engine.run(requests(make_prompts((9, 130))), cycles=1, slots=4):
        pass
    both = ["prefill_chunk", "admit_program"]
    assert calls[:8] == [*both, "prefill_chunk", ("loop", 1), "prefill_chunk", ("loop", 1), *both]
    pair.assert_free()


def test_a_request_cancelled_between_two_parts_of_its_prompt(pair, make_prompts, calls, monkeypatch):
    """No other part follows."""
    monkeypatch.setattr(pair.engine, "buckets", replace(pair.engine.buckets, pieces=(2,)))
    pair.engine.allocator.forget()
    prompts = make_prompts((9, 130))
    run, tokens = pair.engine.run(requests(prompts), cycles=1, slots=4), []
    for update in run:
        tokens += update.tokens
        if pair.engine.scheduler.batch.slots.filling:
            run.cancel(1)
    assert calls.count("prefill_chunk") == 2
    assert calls.count("admit_program") == 1
    pair.assert_free()
    assert tokens == pair.run(prompts[:1], SamplingParams(max_tokens=24, ignore_eos=True))[0][0]


@pytest.mark.parametrize("most", [1, 24])
def test_a_request_cancelled_before_its_first_token_is_seen(pair, make_prompts, monkeypatch, most):
    """Its prompt is on its way when the first token of the one before comes back; neither slot nor page is lost, also where that
    token would have been its last and somebody else has its slot."""
    monkeypatch.setattr(pair.engine, "buckets", replace(pair.engine.buckets, pieces=(2,)))
    prompts = make_prompts((40, 50, 35))
    expected, coming = pair.run(prompts, SamplingParams(max_tokens=24, ignore_eos=True))[0], requests(prompts)
    pair.engine.allocator.forget()
    coming[1] = replace(coming[1], params=SamplingParams(max_tokens=most, ignore_eos=True))
    run, tokens = pair.engine.run(coming, slots=2), {i: [] for i in range(3)}
    for update in run:
        if not tokens[0]:
            assert not pair.engine.scheduler.inflight.full
            assert [row.job.request.index for row in pair.engine.scheduler.inflight.items[0].rows] == [1]
            run.cancel(1)
        tokens[update.index] += update.tokens
    assert tokens == {0: expected[0], 1: [], 2: expected[2]}
    pair.assert_free()


def test_a_request_that_ends_with_its_first_token(pair, make_prompts):
    prompts = make_prompts((9, 20, 5))
    updates = list(pair.engine.run(requests(prompts, max_tokens=1), slots=4))
    assert [(update.index, len(update.tokens), update.finish_reason) for update in updates] == [
        (i, 1, "length") for i in range(3)
    ]
    pair.assert_free()
