"""Coroutines over one model: texts, cancelling, closed loops, and threads beside them."""

import asyncio
import threading
import time
from contextlib import aclosing

import pytest

import dflash_jax as dj
from dflash_jax.serving.feed import AT_ONCE, YIELD_S, Bell, Feed, merged
from dflash_jax.text.completion import Piece

PROMPTS = ["def quicksort(", "import os\n", "class Node:", "for i in range("]
GREEDY = dj.SamplingParams(max_tokens=16, ignore_eos=True)
LONG = dj.SamplingParams(max_tokens=200, ignore_eos=True)


def assert_free(model: dj.Model, seconds: float = 10.0) -> None:
    """Every page comes back, nobody is left, and the thread that steps ends by itself."""
    engine, until = model.engine, time.monotonic() + seconds
    while engine.allocator.num_free < engine.num_pages or engine.scheduler._live or engine.scheduler._inbox:
        assert time.monotonic() < until, "pages were kept"
        time.sleep(0.01)
    assert engine.driver.join(seconds)


@pytest.fixture(scope="module")
def texts(model):
    return [row.text for row in dj.generate(model, PROMPTS, GREEDY)]


def test_many_tasks_and_threads_share_a_batch(model, texts):
    """12 tasks over 4 slots, one of `AsyncEngine` and one list among them, and a thread that generates meanwhile."""
    beside = []

    async def all_at_once():
        async with dj.AsyncEngine(model) as engine:
            singles = [dj.agenerate(model, PROMPTS[i % 4], GREEDY) for i in range(10)]
            return await asyncio.gather(engine.generate(PROMPTS[0], GREEDY), engine.generate(PROMPTS, GREEDY), *singles)

    thread = threading.Thread(target=lambda: beside.append(dj.generate(model, PROMPTS[1], GREEDY).text))
    thread.start()
    one, several, *rest = asyncio.run(all_at_once())
    thread.join()
    assert beside == [texts[1]]
    assert one.text == texts[0]
    assert [row.text for row in several] == texts
    assert [row.text for row in rest] == [texts[i % 4] for i in range(10)]
    assert_free(model)


def test_a_stream_is_its_text_in_pieces_and_a_slow_reader_gets_few(model, texts):
    async def read(*, slow: bool):
        pieces = []
        async for piece in dj.astream(model, PROMPTS[0], GREEDY, cycles=1):
            pieces.append(piece)
            while slow and model.engine.scheduler._live:
                await asyncio.sleep(0.01)
        return pieces

    quick, slow = asyncio.run(read(slow=False)), asyncio.run(read(slow=True))
    for pieces in quick, slow:
        assert "".join(piece.text for piece in pieces) == texts[0]
        assert [token for piece in pieces for token in piece.token_ids] == pieces[-1].completion.token_ids
        assert sum(sum(piece.accepted) for piece in pieces) == GREEDY.max_tokens - 1
    assert len(slow) < len(quick)
    assert merged(quick[0], quick[1]).text == quick[0].text + quick[1].text
    assert_free(model)


@pytest.mark.parametrize("cycles", [0, "4", None, 1.5])
def test_wrong_numbers_of_cycles_are_named(model, cycles):
    async def read():
        return [piece async for piece in dj.astream(model, PROMPTS[0], GREEDY, cycles=cycles)]

    with pytest.raises(dj.ParameterError, match="cycles must be an integer of at least 1"):
        asyncio.run(read())


def test_leaving_gives_pages_back(model):
    """By a time limit, by cancelling a task that waits for its slot or runs, by a loop left, by closing the engine."""

    async def leave():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(dj.agenerate(model, PROMPTS[0], LONG), 0.01)
        tasks = [asyncio.create_task(dj.agenerate(model, PROMPTS[i % 4], LONG)) for i in range(7)]
        await asyncio.sleep(0.2)
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError) for one in ended)
        async with aclosing(dj.astream(model, PROMPTS, LONG)) as pieces:
            async for _ in pieces:
                break
        await asyncio.to_thread(assert_free, model)
        engine = dj.AsyncEngine(model)
        waiting = asyncio.create_task(engine.generate(PROMPTS[0], LONG))
        await asyncio.sleep(0.05)
        engine.close()
        with pytest.raises(dj.DFlashError, match="engine was closed"):
            await waiting
        with pytest.raises(dj.DFlashError, match="engine was closed"):
            await engine.generate(PROMPTS[0], LONG)

    asyncio.run(leave())
    assert_free(model)


def test_a_closed_loop_ends_its_requests(model):
    """A loop that is closed with runs open: the thread that steps finds nobody to tell."""
    loop = asyncio.new_event_loop()

    async def begin():
        engine = dj.AsyncEngine(model)
        return engine.submit(await engine.prepare(PROMPTS, LONG))

    loop.run_until_complete(begin())
    loop.close()
    assert_free(model)


def test_wrong_arguments_are_the_callers_and_device_errors_everybodys(model, monkeypatch):
    async def ask(prompt, **options):
        return await dj.agenerate(model, prompt, GREEDY, **options)

    with pytest.raises(dj.ParameterError, match="chat_options are for"):
        asyncio.run(ask(PROMPTS[0], chat_options={"x": 1}))
    with pytest.raises(dj.CapacityError):
        asyncio.run(ask([1] * 300))
    call = model.engine.programs.call

    def broken(*_):
        raise OSError("the device is gone")

    monkeypatch.setattr(model.engine.programs, "call", broken)

    async def both():
        return await asyncio.gather(ask(PROMPTS[0]), ask(PROMPTS[1]), return_exceptions=True)

    assert [str(one) for one in asyncio.run(both())] == ["the device is gone"] * 2
    monkeypatch.setattr(model.engine.programs, "call", call)
    assert asyncio.run(ask(PROMPTS[0])).token_ids
    assert_free(model)


def test_an_impatient_reader_gets_nothing_and_loses_nothing():
    async def main():
        feed = Feed(Bell(asyncio.get_running_loop()))
        began = time.perf_counter()
        assert await feed.take(0.05) == []
        assert time.perf_counter() - began >= 0.05
        asyncio.get_running_loop().call_later(0.05, lambda: feed.put(Piece(0, "a", [1]))())
        assert [piece.text for piece in await feed.take(20.0)] == ["a"]
        feed.put(Piece(0, "b", [2]))
        assert [piece.text for piece in await feed.take(0.0)] == ["b"]

    asyncio.run(main())


def test_one_timer_serves_many_waits(monkeypatch):
    """A wait that ends before its patience leaves its timer to the next one, which has patience of its own all the same."""

    async def main():
        loop, made = asyncio.get_running_loop(), []
        monkeypatch.setattr(loop, "call_at", lambda *args, at=loop.call_at: made.append(args) or at(*args))
        feed, began = Feed(Bell(loop)), time.perf_counter()
        for _ in range(5):
            loop.call_soon(lambda: feed.put(Piece(0, "a", [1]))())
            assert [piece.text for piece in await feed.take(0.2)] == ["a"]
        assert len(made) == 1
        assert await feed.take(0.3) == []
        assert time.perf_counter() - began >= 0.3
        assert len(made) == 2  # the first one rang too early
        feed.put(Piece(0, "b", [2]))
        assert [piece.text for piece in await feed.take(0.2)] == ["b"]
        assert await feed.take(0.05) == []
        assert len(made) == 3

    asyncio.run(main())


def test_first_and_last_pieces_are_told_first(model, monkeypatch):
    """Their users wait longest, or may ask again; those who go on are woken behind them."""
    told = []

    def note(self, event, *, first=False):
        told.append(first)
        rung(self, event, first=first)

    rung = Bell.note
    monkeypatch.setattr(Bell, "note", note)

    async def ask():
        params = dj.SamplingParams(max_tokens=24, ignore_eos=True)
        return [piece async for piece in dj.AsyncEngine(model).stream(PROMPTS[0], params, cycles=1)]

    asyncio.run(ask())
    assert len(told) > 3
    assert told == [True, *[False] * (len(told) - 2), True]

    async def order():
        bell, events = Bell(asyncio.get_running_loop()), [asyncio.Event() for _ in range(AT_ONCE + 2)]
        for event in events:
            rung(bell, event, first=event is events[-1])
        bell.ring()
        await asyncio.sleep(0)
        return [event.is_set() for event in events]

    assert asyncio.run(order()) == [*[True] * (AT_ONCE - 1), False, False, True]


def test_readers_are_woken_together_and_let_the_loop_look_up(monkeypatch):
    """One call into the loop for all of them; between some and the next ones comes whatever else the loop has, and while calls are
    made a moment passes."""
    events = [asyncio.Event() for _ in range(2 * AT_ONCE + 1)]

    async def main():
        loop, calls = asyncio.get_running_loop(), []
        monkeypatch.setattr(loop, "call_soon_threadsafe", calls.append)
        bell = Bell(loop, lambda: True)
        for event in events:
            bell.note(event)
        assert not calls
        bell.ring()
        bell.ring()
        (wake,) = calls
        seen, began = set(), time.perf_counter()
        wake()
        while not events[-1].is_set():
            seen.add(sum(event.is_set() for event in events))
            await asyncio.sleep(0)
        assert seen == {AT_ONCE, 2 * AT_ONCE}
        assert time.perf_counter() - began >= 2 * YIELD_S
        bell.note(events[0])
        bell.ring()
        assert len(calls) == 2
        return bell

    bell = asyncio.run(main())
    with pytest.raises(RuntimeError, match="closed"):
        bell.note(events[0])
