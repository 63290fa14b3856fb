"""Programs are traced in the order in which they are needed."""

import gc
import itertools
import signal
import sys
import threading
import time
import weakref
from concurrent.futures import wait
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.compile.programs import Programs, start_compiling
from dflash_jax.compile.tracing import Line, no_collection, place, short_turns


def waiting(line: Line, count: int) -> None:
    deadline = time.monotonic() + 10
    while len(line._waiting) < count:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("order", [[2, 0, 1], [0, 1, 2], [1, 1, 0]])
def test_the_first_in_line_is_next_whoever_came_first(order):
    line, seen, threads = Line(), [], []

    def enter(number):
        with place(number), line:
            seen.append(number)

    with line:
        for number in order:
            threads.append(threading.Thread(target=enter, args=(number,)))
            threads[-1].start()
            waiting(line, len(threads))
        anybody = threading.Thread(target=lambda: [line.__enter__(), seen.append(-1), line.__exit__()])
        anybody.start()
        waiting(line, len(threads) + 1)
    for thread in (*threads, anybody):
        thread.join(10)
    assert seen == [-1, *sorted(order)]


def test_a_line_is_left_when_what_it_guards_fails():
    line = Line()
    with pytest.raises(ValueError, match="inside"), line:
        raise ValueError("inside")
    with line:
        pass


def test_one_at_a_time():
    line, inside, most = Line(), [], []

    def enter():
        for _ in range(50):
            with line:
                inside.append(1)
                most.append(len(inside))
                time.sleep(0)
                inside.pop()

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(most) == 200
    assert max(most) == 1


def test_what_the_first_token_needs_is_traced_before_the_cycles():
    """The cycles' program takes longest; by chance it was traced before a small one that came earlier."""
    programs, traced = Programs(), []

    def job(name: str, seconds: float):
        def function(x):
            time.sleep(seconds)
            traced.append(name)
            return x

        return lambda: programs.prepare(function, (), (), jax.ShapeDtypeStruct((3,), jnp.float32))

    names = ["prompt", "first token", "cycles", "more cycles"]
    line = programs._tracing
    with line:
        futures = start_compiling([job(name, 0.05) for name in names])
        waiting(line, len(names))
    wait(futures)
    assert traced == names


@pytest.mark.parametrize("comes", [True, False])
def test_who_comes_first_to_an_empty_line_waits_for_earlier_places(comes):
    """By chance the cycles' program was the first in line, and the first token came as late as the cycles."""
    line, seen = Line(), []

    def job(number, seconds, comes=True):
        time.sleep(seconds)
        if comes:
            with line:
                seen.append(number)

    jobs = [partial(job, 0, 0.2, comes), partial(job, 1, 0.0), partial(job, 2, 0.1)]
    for future in start_compiling(jobs):
        future.result(10)
    assert seen == [0, 1, 2] if comes else [1, 2]


def test_nobody_waits_long_for_an_earlier_place_that_waits_for_a_later_one(monkeypatch):
    monkeypatch.setattr("dflash_jax.compile.tracing.PATIENCE_S", 0.05)
    line, made = Line(), threading.Event()

    def later():
        with line:
            made.set()

    for future in start_compiling([lambda: made.wait(10), later]):
        future.result(10)
    assert made.is_set()


def test_garbage_is_looked_for_again_when_the_last_is_out():
    assert gc.isenabled()
    with no_collection():
        with no_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with no_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_was_made_while_nobody_looked_is_not_looked_through_afterwards():
    """Requests waited for a tenth of a second, three times after every compilation."""

    class Part:
        """Holds itself."""

        def __init__(self):
            self.itself = self

    gc.collect()
    with no_collection():
        made = [[number] for number in range(50_000)]
        garbage = weakref.ref(Part())
        assert garbage() is not None
    young = len(gc.get_objects(generation=0)) + len(gc.get_objects(generation=1))
    assert young < len(made) / 2
    assert gc.get_freeze_count() == 0
    assert garbage() is None


def test_what_somebody_has_frozen_stays_frozen():
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with no_collection():
            pass
        assert gc.get_freeze_count() >= frozen
    finally:
        gc.unfreeze()


def test_short_turns_end_with_the_last_who_is_inside():
    usual = sys.getswitchinterval()
    with short_turns():
        with short_turns():
            assert sys.getswitchinterval() < usual
        assert sys.getswitchinterval() < usual
    assert sys.getswitchinterval() == usual


class Interrupt:
    """A profiler that raises KeyboardInterrupt the n-th time that the interpreter looks for signals: as a function of Python
    begins, and after a call of one in C."""

    def __init__(self, at: int):
        self.left, self.where = at, ""

    def __call__(self, frame, event: str, _):
        file = frame.f_code.co_filename
        if event in ("call", "c_return") and file.endswith(
            ("tracing.py", "programs.py", "threading.py", "_base.py", "contextlib.py")
        ):
            self.left -= 1
            if self.left == 0:
                self.where = f"{file}:{frame.f_lineno}"
                raise KeyboardInterrupt


def test_an_interrupt_at_any_moment_of_compiling_leaves_nothing_taken():
    """The next call had waited for ever for a program that nobody compiled any more, or for a line that nobody was in."""

    def late(*_):
        raise TimeoutError

    before, usual, at = signal.signal(signal.SIGALRM, late), sys.getswitchinterval(), 0
    try:
        for at in itertools.count(1):
            programs, interrupt = Programs(), Interrupt(at)
            call = partial(programs.call, lambda _, x, at=at: x + at, (), (), None, np.float32(1))
            sys.setprofile(interrupt)
            try:
                call()
            except KeyboardInterrupt:
                sys.setprofile(None)
            sys.setprofile(None)
            signal.setitimer(signal.ITIMER_REAL, 10)
            assert call() == 1 + at, interrupt.where
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert (gc.isenabled(), sys.getswitchinterval()) == (True, usual), interrupt.where
            if not interrupt.where:
                break
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert at > 60


def test_shapes_are_told_while_others_compile():
    programs = Programs()

    class Meanwhile:
        """What is asked whether it has a mode, in the middle of the list."""

        def __getattr__(self, name):
            programs._compiled[name, (), (None, ())] = None
            raise AttributeError(name)

    programs._compiled[test_one_at_a_time, (Meanwhile(),), (None, ())] = None
    assert programs.shapes() == ["test_one_at_a_time"]
