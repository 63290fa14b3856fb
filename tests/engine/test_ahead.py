"""Cycles that are started before the results of the ones before are looked at: the same tokens, and no page is lost."""

import itertools
import sys
import threading
import time
from dataclasses import replace

import pytest

from dflash_jax.decoding.loop import no_rows
from dflash_jax.engine import in_flight, scheduler
from dflash_jax.engine.requests import Request, on_host
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


def inflight(pair):
    return pair.engine.scheduler.inflight


def finish(pair, run, tokens=None):
    """Tokens and the reason of its end for each request, and how many updates came with a call behind them."""
    tokens, reasons, behind = {} if tokens is None else tokens, {}, 0
    for update in run:
        behind += bool(inflight(pair).calls)
        tokens[update.index] = tokens.get(update.index, []) + update.tokens
        reasons[update.index] = update.finish_reason
    return tokens, reasons, behind


def expected(pair, prompts, **options):
    pair.engine.goes_ahead = False
    tokens, reasons, behind = finish(pair, start(pair, prompts, **options))
    pair.engine.goes_ahead = True
    assert not behind
    return tokens, reasons


@pytest.mark.parametrize("draft", [True, False])
@pytest.mark.parametrize("count", [1, 3])
def test_the_same_tokens(eager, make_prompts, draft, count):
    prompts = make_prompts([5, 9, 20][:count])
    *found, behind = finish(eager, start(eager, prompts, draft=draft))
    assert tuple(found) == expected(eager, prompts, draft=draft)
    assert behind
    eager.assert_free()


def test_a_stop_id_ends_it(eager, make_prompts):
    prompts = make_prompts([5])
    tokens, _ = expected(eager, prompts)
    stop = tokens[0][20]
    tokens, reasons, _ = finish(eager, start(eager, prompts, stop_token_ids=[stop]))
    assert reasons == {0: "stop"}
    assert tokens[0].index(stop) == len(tokens[0]) - 1
    eager.assert_free()


def test_cancelled_while_a_call_is_behind(eager, make_prompts):
    prompts = make_prompts([5, 9])
    whole, _ = expected(eager, prompts)
    run, tokens = start(eager, prompts), {}
    for update in run:
        tokens[update.index] = tokens.get(update.index, []) + update.tokens
        if inflight(eager).calls:
            break
    else:
        pytest.fail("no call was started ahead")
    run.cancel(0)
    seen = list(tokens[0])
    finish(eager, run, tokens)
    assert tokens == {0: seen, 1: whole[1]}
    eager.assert_free()


def test_closed_while_a_call_is_behind(eager, make_prompts):
    prompts = make_prompts([5])
    whole, _ = expected(eager, prompts)
    run = start(eager, prompts)
    for _ in run:
        if inflight(eager).calls:
            break
    run.close()
    eager.assert_free()
    tokens, _, _ = finish(eager, start(eager, prompts))
    assert tokens == whole


def test_looks_first_where_much_would_be_in_vain(eager, make_prompts):
    """A stop string may end a request long before the end of many cycles; of a few it may be worth none."""
    prompts = make_prompts([5])
    assert finish(eager, start(eager, prompts, stop="x", cycles=5))[2] == 1  # behind the prompt
    assert finish(eager, start(eager, prompts, stop="x", cycles=4))[2] > 1
    eager.assert_free()


def watched(pair, monkeypatch):
    """What the programs that `pair` calls next are: "prompt", or the number of cycles."""
    seen, call = [], pair.engine.programs.call

    def counted(function, static, donate, *args):
        names = {"prefill_chunk": "prompt", "loop": int(args[3]) if function.__name__ == "loop" else None}
        seen.extend([names[function.__name__]] if function.__name__ in names else [])
        return call(function, static, donate, *args)

    monkeypatch.setattr(pair.engine.programs, "call", counted)
    return seen


@pytest.mark.parametrize("cycles", [4, 32])
def test_requests_that_come_meanwhile(eager, make_prompts, cycles):
    """Each user sends the next request when the last is answered."""
    prompts = make_prompts([5, 9, 20, 13, 7, 30])
    whole = [expected(eager, [prompt])[0][0] for prompt in prompts]
    behind, tokens = 0, {}
    coming = [Request(i, tuple(prompt), SamplingParams(max_tokens=LENGTHS[0])) for i, prompt in enumerate(prompts)]
    run, later = eager.engine.run(coming[:2], cycles=cycles, slots=2), coming[2:]
    for update in run:
        tokens[update.index] = tokens.get(update.index, []) + update.tokens
        behind += bool(inflight(eager).calls)
        if update.finish_reason is not None and later:
            run.add(later.pop(0))
    assert [tokens[i] for i in range(6)] == whole
    assert behind
    eager.assert_free()


def test_a_prompt_is_started_behind_cycles(eager, make_prompts, monkeypatch):
    """One that came during the last look does not wait for the cycles that run already."""
    prompts, slots = make_prompts([5, 9]), 2
    run = eager.engine.run([Request(0, tuple(prompts[0]), SamplingParams(max_tokens=50))], cycles=4, slots=slots)
    tokens = {0: [], 1: []}
    for update in run:
        tokens[update.index] += update.tokens
        if not update.first:
            break
    assert inflight(eager).calls
    seen = watched(eager, monkeypatch)
    run.add(Request(1, tuple(prompts[1]), SamplingParams(max_tokens=21)))
    update = next(iter(run))
    assert (seen[0], update.index) == ("prompt", 0)
    finish(eager, run, tokens := {0: tokens[0] + update.tokens, 1: []})
    monkeypatch.undo()
    eager.engine.goes_ahead = True
    whole = [expected(eager, [prompt])[0][0] for prompt in prompts]
    assert tokens[0][: len(whole[0])] == whole[0]
    assert tokens[1] == whole[1][:21]
    eager.assert_free()


def finished_call(pair, **times):
    """A call for cycles whose results are there."""
    setup = pair.engine.setup(mode="greedy", draft=True)
    return in_flight.DecodeCall([], no_rows(setup, 4, 1), setup, 4, 4, **times)


def test_cycles_behind_are_as_many_as_keep_the_device_busy(pair, monkeypatch):
    """Where the host finds results waiting for it, calls are made longer; where it waits for most of a call, shorter again."""
    queued, few = in_flight.InFlight(pair.engine), []
    call = finished_call(pair, started=0.0, compiled=0.0, returned=0.1)
    monkeypatch.setattr(pair.engine.programs, "waited_s", 0.0)
    times = itertools.count(1.0)
    monkeypatch.setattr(scheduler.time, "perf_counter", lambda: next(times))
    short = in_flight.READY_S / 2
    for waited in (0.5, short, 0.2, *[0.9] * 4, *[short] * 3):
        queued.seconds(replace(call, cycles=queued.few), waited)
        few.append(queued.few)
    assert few == [2, 4, 4, 2, 1, 1, 1, 2, 4, 8]
    for _ in range(4):
        queued.seconds(replace(call, cycles=32), short)
    assert queued.few == 32


def test_fewer_cycles_tell_nothing_of_more(pair, monkeypatch):
    """A call of one cycle behind a prompt takes the host as long as one of many, and the device less."""
    queued = in_flight.InFlight(pair.engine)
    call = finished_call(pair, started=0.0, compiled=0.0, returned=0.9)
    monkeypatch.setattr(pair.engine.programs, "waited_s", 0.0)
    times = itertools.count(1.0)
    monkeypatch.setattr(scheduler.time, "perf_counter", lambda: next(times))
    monkeypatch.setattr(scheduler.jax, "default_backend", lambda: "gpu")
    queued.returns_early, queued.few = True, 4
    queued.seconds(replace(call, cycles=1), 0.0)
    assert (queued.few, queued.returns_early) == (4, True)
    queued.seconds(replace(call, cycles=4), 0.0)
    assert (queued.few, queued.returns_early) == (8, False)


@pytest.mark.parametrize(("busy", "cycles"), [(0.1, 1), (0.4, 1), (0.5, 2), (0.6, 3), (0.95, 4), (2.0, 4)])
def test_short_cycles_are_several_a_call(pair, monkeypatch, busy, cycles):
    """As many as take the device as long as a prompt and they take the host; one alone where that is long."""
    queued = in_flight.InFlight(pair.engine)
    monkeypatch.setattr(pair.engine.programs, "waited_s", 0.0)
    call = replace(finished_call(pair, started=0.0, compiled=0.0, returned=busy), cycles=1)
    times = itertools.count(1.0)
    monkeypatch.setattr(scheduler.time, "perf_counter", lambda: next(times))
    for _ in range(4):
        queued.seconds(call, 0.99)
    assert queued.few == cycles
    assert queued.long == (busy < 0.5)


def test_first_tokens_have_cycles_behind_them(pair, monkeypatch):
    """Two calls are in flight; behind the first tokens of prompts, and behind cycles before these, there are cycles too where these
    are long, or shorter than their call is for the host."""
    queued = in_flight.InFlight(pair.engine)
    monkeypatch.setattr(pair.engine.programs, "waited_s", 0.0)
    monkeypatch.setattr(scheduler.time, "perf_counter", lambda: 1.0)
    calls = {busy: finished_call(pair, started=0.0, compiled=0.0, returned=busy) for busy in (0.1, 0.2, 0.4)}
    first = in_flight.PrefillResult([], calls[0.1].emitted, logprobs=False)
    for busy, full in ((0.1, False), (0.2, True), (0.4, False)):  # a cycle takes a quarter
        queued.clear()
        queued.seconds(calls[busy], 0.5)  # of 4 cycles
        assert not queued.full
        queued.add(calls[busy])
        queued.add(first)
        assert queued.full == full
        queued.add(first)
        assert queued.full == full
        queued.add(calls[busy])
        assert queued.full


def test_calls_are_short_again_once_long_cycles_are_behind(pair, monkeypatch):
    """However late the host looks."""
    queued = in_flight.InFlight(pair.engine)
    monkeypatch.setattr(pair.engine.programs, "waited_s", 0.0)
    times = itertools.count(1.0)
    monkeypatch.setattr(scheduler.time, "perf_counter", lambda: next(times))
    call = replace(finished_call(pair, started=0.0, compiled=0.0, returned=0.1), cycles=2)
    queued.seconds(call, 0.0)
    assert queued.few == 4
    queued.add(call)
    for few in (2, 1, 1):
        queued.seconds(call, 0.0)
        assert queued.few == few


def test_no_second_is_counted_twice(eager, make_prompts, monkeypatch):
    """Cycles that were started behind a prompt begin when its first token is there."""

    def slowly(*args, **options):
        time.sleep(0.3)
        return on_host(*args, **options)

    finish(eager, start(eager, make_prompts([5])))  # compiles
    monkeypatch.setattr("dflash_jax.engine.scheduler.on_host", slowly)
    began = time.perf_counter()
    spent = sum(update.seconds for update in start(eager, make_prompts([5])))
    assert 0.3 < spent <= time.perf_counter() - began


def test_what_was_compiled_for_a_prompt_does_not_count(pair, make_prompts, monkeypatch):
    """As if each of its two programs had taken 50 seconds to compile."""
    programs, call = pair.engine.programs, pair.engine.programs.call

    def compiling(*args):
        programs.waited_s += 50.0
        return call(*args)

    pair.run(make_prompts([5]))  # compiles
    monkeypatch.setattr(programs, "waited_s", 0.0)
    monkeypatch.setattr(programs, "call", compiling)
    first, *_ = start(pair, make_prompts([5]))
    assert -100 < first.seconds < -50


def test_nothing_is_started_behind_a_last_token(eager, make_prompts, monkeypatch):
    seen = watched(eager, monkeypatch)
    (update,) = eager.engine.run([Request(0, tuple(make_prompts([5])[0]), SamplingParams(max_tokens=1))])
    assert (len(update.tokens), seen) == (1, ["prompt"])


@pytest.mark.parametrize("compiling", [0.0, 5.0])
def test_calls_that_keep_the_host_busy_are_not_started_ahead(pair, monkeypatch, compiling):
    """On a GPU, whether calls return early is seen; what was compiled for one does not count."""
    monkeypatch.setattr(scheduler.jax, "default_backend", lambda: "gpu")
    went, before = [], pair.engine.programs.compile_s
    for busy in (0.9, 0.1):
        queued = in_flight.InFlight(pair.engine)
        monkeypatch.setattr(pair.engine.programs, "waited_s", before + compiling)
        call = finished_call(pair, started=0.0, compiled=before, returned=busy + compiling)
        monkeypatch.setattr(scheduler.time, "perf_counter", lambda: 1.0 + compiling)
        assert queued.seconds(call, waited=0.5) == pytest.approx(1.0)
        went.append(queued.returns_early)
        assert not queued.seconds(call, waited=0.5, watch=False)  # the same moment: no second more
        assert queued.returns_early == went[-1]
    assert went == [False, True]


def test_the_latest_next_call(pair, monkeypatch):
    """At 0.7 of a call's guessed time, or with room for two calls of the host; unknown behind a prompt, or with a call queued."""
    queued, now = in_flight.InFlight(pair.engine), [0.0]
    monkeypatch.setattr(pair.engine.programs, "waited_s", 0.0)
    monkeypatch.setattr(scheduler.time, "perf_counter", lambda: now[0])
    assert queued.latest == 0
    call = finished_call(pair, started=10.0, compiled=0.0, returned=10.1)
    queued.items.append(call)
    now[0] = 14.0
    queued.seconds(queued.items.popleft(), 3.0)
    queued.add(finished_call(pair, started=12.0, compiled=0.0, returned=12.1))
    assert queued.latest == pytest.approx(14 + 0.7 * 4)
    queued.items.append(call)
    assert queued.latest == 0
    queued.items.clear()
    queued.seconds(finished_call(pair, started=14.0, compiled=0.0, returned=15.9), 3.0)
    queued.add(finished_call(pair, started=20.0, compiled=0.0, returned=20.1))
    assert queued.latest < 20 + 4 - 2 * 1.9 + 1e-6
    queued.items[0] = in_flight.PrefillResult([], call.emitted, logprobs=False)
    assert queued.latest == 0


def test_prompts_and_cycles_between_two_looks_last_alike(pair, monkeypatch):
    """What a token of a prompt takes is known from the last ones: so many go between two calls for cycles, and these are fewer."""
    queued, now = in_flight.InFlight(pair.engine), [0.0]
    monkeypatch.setattr(pair.engine.programs, "waited_s", 0.0)
    monkeypatch.setattr(scheduler.time, "perf_counter", lambda: now[0])
    assert (queued.cycles_behind(10_000, 4), queued.tokens_between(4)) == (2, sys.maxsize)
    call = finished_call(pair, started=10.0, compiled=0.0, returned=10.1)
    queued.compute(400)
    queued.compute(600)
    queued.add(in_flight.PrefillResult([], call.emitted, logprobs=False, started=8.0))
    queued.add(call)
    now[0] = 10.0
    queued.first_seconds(queued.take())  # 1,000 tokens in 2 seconds
    now[0] = 14.0
    assert queued.seconds(queued.take(), 2.0) == 4.0  # of 4 cycles
    assert [queued.tokens_between(cycles) for cycles in (1, 2, 4)] == [850, 850, 850]  # few are 2
    assert [queued.cycles_behind(tokens, 4) for tokens in (0, 300, 500, 3000)] == [2, 2, 1, 1]
    queued.few = 8
    assert queued.tokens_between(4) == 2200
    assert [queued.cycles_behind(tokens, 4) for tokens in (0, 690, 900, 1900, 3000)] == [4, 4, 3, 1, 1]
    queued.few = 1
    assert (queued.tokens_between(4), queued.cycles_behind(0, 4)) == (850, 1)
    queued.few = 2
    queued.compute(1000)
    queued.add(in_flight.PrefillResult([], call.emitted, logprobs=False, started=14.0))
    assert queued.latest == pytest.approx(14 + 0.7 * 2)
    queued.take()
    queued.compute(500)
    queued.add(call)
    assert queued.latest == pytest.approx(14 + 0.7 * (1 + 4))
    now[0] = 19.0  # the prompts' second is none of the cycles
    queued.seconds(queued.take(), 2.0)
    queued.add(call)
    assert queued.latest == pytest.approx(19 + 0.7 * 4)


@pytest.mark.parametrize(("there", "goes"), [("compiled", True), ("missing", False)])
def test_a_wider_table_goes_behind_where_its_program_is_there(eager, make_prompts, monkeypatch, there, goes):
    """Else what is in flight is looked at first."""
    seen, add = [], in_flight.InFlight.add

    def added(self, item):
        if isinstance(item, in_flight.DecodeCall):
            seen.append((item.width, bool(self.calls)))
        add(self, item)

    monkeypatch.setattr(eager.engine, "program_status", lambda *_: there)
    monkeypatch.setattr(eager.engine, "buckets", replace(eager.engine.buckets, width=(6, 12)))
    monkeypatch.setattr(in_flight.InFlight, "add", added)
    request = Request(0, tuple(make_prompts([40])[0]), SamplingParams(max_tokens=90, ignore_eos=True))
    for _ in eager.engine.run([request], cycles=2):
        pass
    (behind,) = [ahead for (before, _), (width, ahead) in itertools.pairwise(seen) if width > before]
    assert behind is goes
    eager.assert_free()


@pytest.mark.parametrize("late", [False, True])
def test_who_has_ended_is_told_first(eager, make_prompts, monkeypatch, late):
    """With `late_dispatch`, where nothing long is in flight, the others are told once the device has its next call."""
    told, call = [], eager.engine.programs.call
    monkeypatch.setattr(eager.engine, "late_dispatch", late)
    monkeypatch.setattr(scheduler.Scheduler, "_hurries", lambda self, batch: batch.core.late_dispatch)

    def called(function, *args):
        told.append(function.__name__)
        return call(function, *args)

    monkeypatch.setattr(eager.engine.programs, "call", called)
    engine = eager.engine.scheduler
    tickets = engine.tickets(2)
    requests = [
        Request(i, tuple(prompt), SamplingParams(max_tokens=most, ignore_eos=True))
        for i, (prompt, most) in enumerate(zip(make_prompts([5, 9]), (40, 20), strict=True))
    ]
    sink = lambda ticket, update: told.append((tickets.index(ticket), update.finish_reason, len(update.tokens)))  # noqa: E731
    engine.submit_all(dict(zip(tickets, requests, strict=True)), sink, draft=True, cycles=2, slots=2)
    while engine.step():
        pass
    engine.step()  # gives up the batch
    end = next(i for i, one in enumerate(told) if one[:2] == (1, "length"))
    assert told[end + 1] == "loop" if late else told[end + 1][0] == 0
    assert [sum(one[2] for one in told if one[0] == i) for i in (0, 1)] == [40, 20]
    eager.assert_free()


@pytest.mark.parametrize("few", [0, 1])
def test_few_readers_are_woken_before_the_next_call(eager, make_prompts, monkeypatch, few):
    """And many once it is made; an end wakes its reader at once in any case."""
    order, call = [], eager.engine.programs.call
    monkeypatch.setattr(scheduler, "FEW_READERS", few)

    def called(function, *args):
        order.append(function.__name__)
        return call(function, *args)

    def looked(*args, **options):
        order.append("look")
        return on_host(*args, **options)

    monkeypatch.setattr(eager.engine.programs, "call", called)
    monkeypatch.setattr(scheduler, "on_host", looked)
    bell, engine = lambda: order.append("bell"), eager.engine.scheduler
    request = Request(0, tuple(make_prompts([5])[0]), SamplingParams(max_tokens=60, ignore_eos=True))
    engine.submit(request, lambda ticket, update: bell, draft=True, cycles=1)
    while engine.step():
        pass
    engine.step()  # gives up the batch
    behind = [order[place + 1] for place, what in enumerate(order[:-1]) if what == "look"]
    assert order.count("bell") == order.count("look")
    assert set(behind) == {"bell"} if few else behind.count("loop") > len(behind) / 2
    assert behind[-1] == "bell"
    eager.assert_free()


def test_who_follows_a_request_that_ended_is_in_the_next_call(eager, make_prompts, monkeypatch):
    """With `late_dispatch` the next call is made once the follower is there."""
    prompts, lengths = make_prompts([5, 9, 7]), (9, 21, 21)
    whole = [expected(eager, [prompt])[0][0][:length] for prompt, length in zip(prompts, lengths, strict=True)]
    monkeypatch.setattr(eager.engine, "late_dispatch", True)
    monkeypatch.setattr(in_flight.InFlight, "latest", property(lambda self: deadline if self.items else 0.0))
    requests = [
        Request(i, tuple(prompt), SamplingParams(max_tokens=length))
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    deadline, tokens, seen = 0.0, {0: [], 1: [], 2: []}, []
    timer = threading.Timer(0.1, lambda: submit(2))

    def sink(ticket, update):
        nonlocal deadline
        index = tickets[ticket]
        tokens[index] += update.tokens
        inflight(eager).online = True
        if index == 2:
            deadline = 0.0
        if index == 0 and update.finish_reason:
            deadline = began + 60
            seen.append(watched(eager, monkeypatch))
            timer.start()

    def submit(index):
        (ticket,) = engine.tickets(1)
        tickets[ticket] = index
        engine.submit_all({ticket: requests[index]}, sink, draft=True, cycles=2, slots=2)

    engine, tickets, began = eager.engine.scheduler, {}, time.perf_counter()
    for index in (0, 1):
        submit(index)
    while engine.step():
        pass
    engine.step()  # gives up the batch
    assert seen[0][0] == "prompt"
    assert time.perf_counter() < began + 60
    assert list(tokens.values()) == whole
    eager.assert_free()
