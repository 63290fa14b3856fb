"""The long-lived scheduler: who submits, steps and aborts, from which thread, and what an error or an interrupt takes with it."""

import gc
import signal
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator

import jax
import pytest

import dflash_jax as dj
from dflash_jax.engine.requests import Request
from dflash_jax.engine.scheduler import Lead, Mailbox, Scheduler
from dflash_jax.errors import CapacityError, PromptError
from dflash_jax.sampling_params import SamplingParams

from .schedules import Interrupter

GREEDY = SamplingParams(max_tokens=24)
LENGTHS = (12, 30, 50, 9)


@pytest.fixture(scope="module")
def shared(make_pair):
    """Small pages and chunks, so that prompts take several steps."""
    return make_pair(page_size=8, max_chunk=16, num_pages=60)


@pytest.fixture(params=["look first", "ahead"])
def pair(shared, request) -> Iterator:
    shared.engine.goes_ahead = request.param == "ahead"
    yield shared
    shared.assert_free()


@pytest.fixture(scope="module")
def texts(shared, make_prompts) -> list[tuple[list[int], list[int]]]:
    """Prompts with what follows them when each is served alone."""
    prompts = make_prompts(LENGTHS)
    found = [(prompt, shared.run([prompt], GREEDY)[0][0]) for prompt in prompts]
    shared.engine.allocator.forget()
    return found


class Reader:
    """Submits requests and keeps what comes for them, by ticket."""

    def __init__(self, engine, **options):
        self.engine, self.options = engine, {"cycles": 2} | options
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.ended: dict[int, str | Exception] = {}

    def submit(self, prompt, params=GREEDY, **options) -> int:
        return self.engine.submit(Request(0, tuple(prompt), params), self.take, **self.options | options)

    def take(self, ticket, what) -> None:
        assert ticket not in self.ended
        if isinstance(what, Exception):
            self.ended[ticket] = what
            return
        if what.start < len(self.tokens[ticket]):  # sent again after an interrupt
            return
        assert what.start == len(self.tokens[ticket])
        self.tokens[ticket] += what.tokens
        if what.finish_reason is not None:
            self.ended[ticket] = what.finish_reason

    def drive(self, ended: int | None = None) -> None:
        """Steps until nothing is left, or so many have ended."""
        while (ended is None or len(self.ended) < ended) and self.engine.step():
            pass


def test_submitted_while_others_run_and_after_idling(pair, texts):
    reader = Reader(pair.engine)
    assert not pair.engine.step()
    assert not pair.engine.scheduler.wait(0.0)
    tickets = [reader.submit(texts[0][0])]
    assert pair.engine.scheduler.wait(0.0)
    for prompt, _ in texts[1:]:
        for _ in range(3):
            assert pair.engine.step()
        tickets.append(reader.submit(prompt))
    reader.drive()
    assert pair.engine.scheduler.stats.running == pair.engine.scheduler.stats.waiting == 0
    assert not pair.engine.scheduler.wait(0.0)
    for prompt, _ in texts:
        tickets.append(reader.submit(prompt))
        reader.drive()
    assert [reader.tokens[ticket] for ticket in tickets] == [text for _, text in texts] * 2
    assert set(reader.ended.values()) == {"length"}
    assert tickets == sorted(set(tickets))


def test_what_can_never_run_is_refused_by_the_thread_that_submits(pair, texts):
    reader = Reader(pair.engine)
    with pytest.raises(PromptError):
        reader.submit([])
    with pytest.raises(CapacityError):
        reader.submit(texts[0][0], SamplingParams(max_tokens=1000))
    assert not pair.engine.step()


def test_aborted_in_each_state(pair, texts):
    """Waiting for a slot, inside of its prompt, decoding, with results in flight, done; and what nobody has submitted."""
    engine, seen = pair.engine, set[str]()
    (long, _), (short, text) = texts[2], texts[3]
    for steps in range(14):
        engine.allocator.forget()
        reader = Reader(engine, slots=2)
        kept, victim = reader.submit(short), reader.submit(long)
        behind = reader.submit(short)
        for _ in range(steps):
            engine.step()
        job = engine.scheduler._live.get(victim)
        state = "done" if victim in reader.ended else "waiting"
        if job is not None and job.slot >= 0:
            state = "prompt" if not job.decoding else "in flight" if job.due else "decoding"
        seen.add(state)
        before = list(reader.tokens[victim])
        engine.abort(victim)
        engine.abort(victim)
        engine.abort(10**9)
        reader.drive()
        engine.step()
        assert reader.tokens[victim] == before
        assert reader.tokens[kept] == reader.tokens[behind] == text
        pair.assert_free()
    states = {"waiting", "prompt", "in flight" if engine.goes_ahead else "decoding"}
    assert states <= seen
    reader = Reader(engine)
    done = reader.submit(short)
    reader.drive(ended=1)
    again = reader.submit(short)  # takes the slot of the one that is done
    engine.step()
    engine.abort(done)
    reader.drive()
    assert (done, reader.tokens[done]) != (again, reader.tokens[again])
    assert reader.tokens[done] == reader.tokens[again] == text


@pytest.mark.parametrize("program", ["prefill_chunk", "admit_program", "loop"])
@pytest.mark.parametrize("error", [ValueError("no"), jax.errors.JaxRuntimeError("INTERNAL: no")])
def test_an_error_ends_the_requests_that_the_call_was_for(pair, texts, monkeypatch, program, error):
    """Others are prefilled again and go on where they were."""
    engine, call, readers = pair.engine, pair.engine.programs.call, [Reader(pair.engine), Reader(pair.engine)]
    engine.allocator.forget()
    first = readers[0].submit(texts[0][0])
    while len(readers[0].tokens[first]) < 5:
        engine.step()
    second = readers[1].submit(texts[2][0])
    left = [1]

    def failing(function, *args):
        if function.__name__ == program and left:
            left.clear()
            raise error
        return call(function, *args)

    monkeypatch.setattr(engine.programs, "call", failing)
    while left:
        engine.step()
    monkeypatch.undo()
    assert engine.allocator.num_free == engine.num_pages
    readers[0].drive()
    failed, other = (first, second) if program == "loop" else (second, first)
    got = readers[0].tokens | readers[1].tokens
    ended = readers[0].ended | readers[1].ended
    assert ended == {failed: error, other: "length"}
    assert got[other] == texts[0 if other == first else 2][1]
    assert readers[0].submit(texts[1][0]) == second + 1
    readers[0].drive()
    assert readers[0].tokens[second + 1] == texts[1][1]


def test_an_error_is_raised_where_its_request_is_waited_for(pair, texts, monkeypatch):
    """A thread that steps for others does not raise what is theirs."""
    engine, reader, look = pair.engine, Reader(pair.engine), Scheduler._admit
    theirs = reader.submit(texts[2][0])

    def failing(scheduler, batch, most=None):
        if scheduler._waiting and scheduler._waiting[0].ticket == theirs:
            scheduler._served = (scheduler._waiting[0],)
            raise RuntimeError("this prompt alone")
        return look(scheduler, batch, most)

    monkeypatch.setattr(Scheduler, "_admit", failing)
    assert pair.run([texts[0][0]], GREEDY)[0][0] == texts[0][1]
    assert str(reader.ended[theirs]) == "this prompt alone"
    mine = engine.run([Request(0, tuple(texts[2][0]), GREEDY)])
    theirs += 2
    with pytest.raises(RuntimeError, match="this prompt alone"):
        list(mine)


def test_a_sink_that_raises_ends_its_request_alone(pair, texts):
    reader, got = Reader(pair.engine), []

    def broken(ticket, what):
        got.append(what)
        if len(got) == 2:
            raise OSError("the pipe is closed")

    other = reader.submit(texts[0][0])
    pair.engine.submit(Request(0, tuple(texts[1][0]), GREEDY), broken, cycles=1)
    reader.drive()
    assert reader.tokens[other] == texts[0][1]
    assert [type(one).__name__ for one in got] == ["Update", "Update", "OSError"]


@pytest.mark.few("ahead")
def test_an_interrupt_of_the_thread_that_steps_for_others(pair, texts):
    """At any point: its own requests end, those of others lose their slots and have the same text."""
    engine, interrupted, resumed = pair.engine, 0, 0
    for at in range(0, 260, 7):
        reader = Reader(engine)
        theirs = [reader.submit(texts[i][0]) for i in (0, 2)]
        mine, tokens = engine.run([Request(0, tuple(texts[1][0]), GREEDY)], cycles=2), []
        with pytest.MonkeyPatch.context() as patch:
            Interrupter(patch, engine, at)
            try:
                for update in mine:
                    tokens += update.tokens
            except KeyboardInterrupt:
                interrupted += 1
        resumed += any(0 < len(reader.tokens[ticket]) < GREEDY.max_tokens for ticket in theirs)
        assert tokens == texts[1][1][: len(tokens)]
        reader.drive()
        assert [reader.tokens[ticket] for ticket in theirs] == [texts[0][1], texts[2][1]], f"interrupted at {at}"
        pair.assert_free()
    assert interrupted > 15
    assert resumed > 5


def test_ctrl_c_in_the_main_thread_leaves_other_threads_alone(pair, texts, monkeypatch):
    """Python's own interrupt, while the main thread is inside of the device's calls for everybody."""
    engine, call, long = pair.engine, pair.engine.programs.call, SamplingParams(max_tokens=90)
    begun, pressed = list[int](), list[int]()
    expected = {i: pair.run([texts[i][0]], long)[0][0] for i in (0, 2)}
    got: dict[int, list[int]] = {}

    threads = [threading.Thread(target=lambda i=i: serve(i)) for i in expected]

    def pressing(function, *args):
        """The main thread steps first, and the others submit while it is inside of its first cycles."""
        result = call(function, *args)
        if threading.current_thread() is threading.main_thread() and function.__name__ == "loop":
            if not begun:
                begun.append(1)
                for thread in threads:
                    thread.start()
                while len(engine.scheduler._inbox) < len(threads):
                    time.sleep(0.001)
            elif engine.scheduler.stats.running > 1 and not pressed:
                pressed.append(1)
                signal.raise_signal(signal.SIGINT)
        return result

    def serve(i: int) -> None:
        run = engine.run([Request(0, tuple(texts[i][0]), long)], cycles=1)
        got[i] = [token for update in run for token in update.tokens]

    monkeypatch.setattr(engine.programs, "call", pressing)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs ignore
    try:
        with pytest.raises(KeyboardInterrupt):
            list(engine.run([Request(0, tuple(texts[1][0]), long)], cycles=1))
    finally:
        signal.signal(signal.SIGINT, before)
    for thread in threads:
        thread.join()
    assert pressed
    assert got == expected


def test_an_interrupt_of_a_thread_that_waits(pair, texts, monkeypatch):
    """Its requests are aborted by whoever steps; the others have their texts."""
    engine, box = pair.engine, Mailbox()
    assert engine.scheduler._lead.claim(box)  # as a thread that is inside of a step
    waiting = engine.run([Request(0, tuple(texts[1][0]), GREEDY)])

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(waiting._box.bell, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        next(iter(waiting))
    engine.scheduler._lead.release(box)
    reader = Reader(engine)
    ticket = reader.submit(texts[0][0])
    reader.drive()
    assert reader.tokens[ticket] == texts[0][1]


def test_who_closes_while_another_thread_steps_leaves_nothing_behind(pair, texts):
    """A stream is closed in the middle of the other's step: the last one who steps sees to it."""
    engine = pair.engine
    stream = engine.run([Request(0, tuple(texts[1][0]), GREEDY)], cycles=1)
    next(iter(stream))
    other = Mailbox()
    assert engine.scheduler._lead.claim(other)
    stream.close()
    assert engine.allocator.num_free < engine.num_pages
    engine.scheduler._release(other)
    assert engine.allocator.num_free == engine.num_pages


def test_with_and_without_drafting_at_once(pair, texts):
    """Each kind waits for the end of the other; those of the first that wait already go before it."""
    reader, order = Reader(pair.engine), []
    tickets = [reader.submit(texts[i][0], draft=i % 2 == 0) for i in range(4)]
    while pair.engine.step():
        order += [ticket for ticket in reader.ended if ticket not in order]
    order += [ticket for ticket in reader.ended if ticket not in order]
    assert [reader.tokens[ticket] for ticket in tickets] == [text for _, text in texts]
    assert [{*order[:2]}, {*order[2:]}] == [{*tickets[::2]}, {*tickets[1::2]}]


def test_what_a_prompt_found_in_pages_is_told(pair, texts):
    firsts, prompt = [], texts[2][0]
    pair.engine.allocator.forget()
    for _ in range(2):
        updates = list(pair.engine.run([Request(0, tuple(prompt), GREEDY)]))
        firsts.append(updates[0].cached)
        assert not any(update.cached for update in updates[1:])
    assert firsts == [0, (len(prompt) - 1) // 8 * 8]


def test_one_thread_at_a_time_leads():
    lead, boxes, inside, most = Lead(), [Mailbox() for _ in range(4)], [0], [0]

    def lead_often(i: int) -> None:
        led = 0
        while led < 50:
            if lead.claim(boxes[i]):
                led, inside[0] = led + 1, inside[0] + 1
                time.sleep(1e-4)
                most[0], inside[0] = max(most[0], inside[0]), inside[0] - 1
                assert lead.claim(boxes[i])
                lead.release(boxes[(i + 1) % 4])  # not its to give
                assert lead.held
                lead.release(boxes[i])
            time.sleep(1e-5)

    threads = [threading.Thread(target=lead_often, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most[0], lead.held) == (1, False)


def test_an_engine_that_nobody_has_is_gone_at_once(make_pair, make_prompts):
    """Its weights are the device's memory: no cycle of references keeps them until Python looks for garbage."""
    pair = make_pair()
    pair.run(make_prompts((5,)), SamplingParams(max_tokens=2))
    stream = pair.engine.run([Request(0, (1, 2, 3), GREEDY)], cycles=1)
    next(iter(stream))
    engine = weakref.ref(pair.engine)
    gc.disable()
    try:
        del pair, stream
        assert engine() is None
    finally:
        gc.enable()


@pytest.mark.few
def test_generate_and_stream_from_three_threads():
    """With the pair that ships, and its texts."""
    model = dj.load(dtype="float32", max_batch=4, max_model_len=128)
    prompts, params = ["def quicksort(", "import os", "class Stack:\n"], dj.SamplingParams(max_tokens=24)
    expected = [dj.generate(model, prompt, params).text for prompt in prompts]
    got: dict[int, str] = {}

    def serve(i: int) -> None:
        if i:
            got[i] = dj.generate(model, prompts[i], params).text
        else:
            got[i] = "".join(piece.text for piece in dj.stream(model, prompts[i], params))

    for _ in range(3):
        threads = [threading.Thread(target=serve, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [got[i] for i in range(3)] == expected
    assert model.engine.allocator.num_free == model.engine.num_pages


def test_what_a_sink_gives_back_is_called_once_all_have_theirs(pair, texts):
    """Whoever wakes readers is called behind the updates that came together, and behind the last one of all."""
    heard = []

    def bell() -> None:
        heard.append("bell")

    def sink(ticket, what):
        heard.append(ticket)
        return bell

    for prompt, _ in texts:
        pair.engine.submit(Request(0, tuple(prompt), GREEDY), sink, draft=True, cycles=2)
    while pair.engine.step():
        pass
    pair.engine.scheduler.settle(Mailbox())
    assert heard[-1] == "bell"
    together = "".join("." if one == "bell" else "x" for one in heard).split(".")
    assert max(map(len, together)) > 1
    assert "bell" not in heard[: heard.index("bell")]
