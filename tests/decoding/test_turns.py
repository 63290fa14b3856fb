"""Whose turn it is: how much of prompts is prefilled between the same two cycles, and how many cycles come before the next one."""

from dataclasses import replace

import pytest

from dflash_jax.engine.core import LEAST_TOKENS
from dflash_jax.requests import Request
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
    """Short calls count as LEAST_TOKENS; after so many, those that can do run, one cycle at a time while others could enter."""
    monkeypatch.setattr(pair.engine, "max_chunk", 2 * LEAST_TOKENS)
    monkeypatch.setattr(pair.engine, "buckets", replace(pair.engine.buckets, pieces=(2,)))
    prompts = make_prompts((33, 40, 37, 64))
    run = pair.engine.run(requests(prompts), cycles=16, slots=4)
    tokens = {i: [] for i in range(4)}
    for update in run:
        tokens[update.index] += update.tokens
    both = ["prefill_chunk", "admit_program"]
    assert calls[:9] == [*both * 2, ("loop", 1), *both * 2]
    assert calls[9][0] == "loop"
    assert calls[9][1] > 1
    monkeypatch.undo()
    pair.assert_free()
    assert list(tokens.values()) == pair.run(prompts, SamplingParams(max_tokens=24, ignore_eos=True))[0]


def test_a_request_cancelled_before_its_first_token_is_seen(pair, make_prompts):
    """The next prompt is on its way when the first token of the one before comes back; neither slot nor page is lost."""
    prompts = make_prompts((9, 20, 5))
    run, seen = pair.engine.run(requests(prompts), slots=4), []
    for update in run:
        if not seen:
            run.cancel(1)  # in the pages already
        seen.append(update.index)
    assert set(seen) == {0, 2}
    pair.assert_free()


def test_a_request_that_ends_with_its_first_token(pair, make_prompts):
    prompts = make_prompts((9, 20, 5))
    updates = list(pair.engine.run(requests(prompts, max_tokens=1), slots=4))
    assert [(update.index, len(update.tokens), update.finish_reason) for update in updates] == [
        (i, 1, "length") for i in range(3)
    ]
    pair.assert_free()
