"""Cycles that are started before the results of the ones before are looked at: the same tokens, and no page is lost."""

import pytest

from dflash_jax.decoding.loop import no_rows
from dflash_jax.engine import ahead
from dflash_jax.requests import Request
from dflash_jax.sampling_params import SamplingParams

LENGTHS = (33, 50, 21)


@pytest.fixture
def eager(pair):
    """The shared pair, started ahead wherever that may be."""
    pair.engine.goes_ahead = True
    yield pair
    pair.engine.goes_ahead = None


def start(pair, prompts, *, draft=True, cycles=4, **params):
    requests = [
        Request(i, tuple(prompt), SamplingParams(max_tokens=length, **params))
        for i, (prompt, length) in enumerate(zip(prompts, LENGTHS, strict=False))
    ]
    return pair.engine.run(requests, draft=draft, cycles=cycles)


def finish(run, tokens=None):
    """Tokens and the reason of its end for each request, and how many updates came with a call behind them."""
    tokens, reasons, behind = {} if tokens is None else tokens, {}, 0
    for update in run:
        behind += run.ahead.call is not None
        tokens[update.index] = tokens.get(update.index, []) + update.tokens
        reasons[update.index] = update.finish_reason
    return tokens, reasons, behind


def expected(pair, prompts, **options):
    pair.engine.goes_ahead = False
    tokens, reasons, behind = finish(start(pair, prompts, **options))
    pair.engine.goes_ahead = True
    assert not behind
    return tokens, reasons


@pytest.mark.parametrize("draft", [True, False])
@pytest.mark.parametrize("count", [1, 3])
def test_the_same_tokens(eager, make_prompts, draft, count):
    prompts = make_prompts([5, 9, 20][:count])
    *found, behind = finish(start(eager, prompts, draft=draft))
    assert tuple(found) == expected(eager, prompts, draft=draft)
    assert behind
    eager.assert_free()


def test_a_stop_id_ends_it(eager, make_prompts):
    prompts = make_prompts([5])
    tokens, _ = expected(eager, prompts)
    stop = tokens[0][20]
    tokens, reasons, _ = finish(start(eager, prompts, stop_token_ids=[stop]))
    assert reasons == {0: "stop"}
    assert tokens[0].index(stop) == len(tokens[0]) - 1
    eager.assert_free()


def test_cancelled_while_a_call_is_behind(eager, make_prompts):
    prompts = make_prompts([5, 9])
    whole, _ = expected(eager, prompts)
    run, tokens = start(eager, prompts), {}
    for update in run:
        tokens[update.index] = tokens.get(update.index, []) + update.tokens
        if run.ahead.call is not None:
            break
    else:
        pytest.fail("no call was started ahead")
    run.cancel(0)
    seen = list(tokens[0])
    finish(run, tokens)
    assert tokens == {0: seen, 1: whole[1]}
    eager.assert_free()


def test_closed_while_a_call_is_behind(eager, make_prompts):
    prompts = make_prompts([5])
    whole, _ = expected(eager, prompts)
    run = start(eager, prompts)
    for _ in run:
        if run.ahead.call is not None:
            break
    run.close()
    eager.assert_free()
    tokens, _, _ = finish(start(eager, prompts))
    assert tokens == whole


def test_looks_first_where_results_may_change_what_is_next(eager, make_prompts):
    prompts = make_prompts([5, 9])
    assert not finish(start(eager, prompts[:1], stop="x"))[2]
    run = start(eager, prompts[:1])
    run.add(Request(1, tuple(prompts[1]), SamplingParams(max_tokens=9)))
    assert not finish(run)[2]
    eager.assert_free()


@pytest.mark.parametrize("compiling", [0.0, 5.0])
def test_calls_that_keep_the_host_busy_are_not_started_ahead(pair, make_prompts, monkeypatch, compiling):
    """On a GPU, whether calls return early is seen; what was compiled for one does not count."""
    monkeypatch.setattr(ahead.jax, "default_backend", lambda: "gpu")
    went, before = [], pair.engine.programs.compile_s
    for busy in (0.9, 0.1):
        run = start(pair, make_prompts([5]))
        monkeypatch.setattr(pair.engine.programs, "compile_s", before + compiling)
        rows, returned = no_rows(run.setup, 4, 1), busy + compiling
        call = ahead.Call([], rows, run.setup, 4, 4, started=0.0, compiled=before, returned=returned)
        monkeypatch.setattr(ahead.time, "perf_counter", lambda: 1.0 + compiling)
        assert run.ahead.seconds(call) == pytest.approx(1.0)
        went.append(pair.engine.returns_early)
        run.close()
    pair.engine.returns_early = False
    assert went == [False, True]
