"""Programs are traced in the order in which they are needed."""

import gc
import itertools
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import wait
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.compile.programs import THREADS, Programs, start_compiling
from dflash_jax.compile.tracing import TracingQueue, job, no_collection, short_turns


def joined(queue: TracingQueue, count: int) -> None:
    deadline = time.monotonic() + 10
    while len(queue._joined) < count:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("order", [[2, 0, 1], [0, 1, 2], [1, 1, 0]])
def test_the_least_place_is_next_whoever_came_first(order):
    queue, seen, threads = TracingQueue(), [], []

    def enter(number):
        with job(number, lambda: None), queue:
            seen.append(number)

    with queue:
        for number in order:
            threads.append(threading.Thread(target=enter, args=(number,)))
            threads[-1].start()
            joined(queue, len(threads) + 1)
        anybody = threading.Thread(target=lambda: [queue.__enter__(), seen.append(-1), queue.__exit__()])
        anybody.start()
        joined(queue, len(threads) + 2)
        assert seen == []
    for thread in (*threads, anybody):
        thread.join(10)
    assert seen == [-1, *sorted(order)]


def test_the_queue_is_left_when_tracing_fails():
    queue = TracingQueue()
    with pytest.raises(ValueError, match="inside"), queue:
        raise ValueError("inside")
    assert queue._joined == {}
    with queue:
        pass


def test_one_at_a_time():
    queue, inside, most = TracingQueue(), [], []

    def enter():
        for _ in range(50):
            with queue:
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


def tracing_job(programs: Programs, traced: list[str], name: str, seconds: float = 0.0):
    def function(x):
        time.sleep(seconds)
        traced.append(name)
        return x

    return lambda: programs.prepare(function, (), (), jax.ShapeDtypeStruct((3,), jnp.float32))


def test_what_the_first_token_needs_is_traced_before_the_cycles():
    """The cycles' program takes longest; by chance it was traced before a small one that came earlier."""
    programs, traced = Programs(), []
    names = ["prompt", "first token", "cycles", "more cycles"]
    queue = programs._tracing
    with queue:
        futures = start_compiling([tracing_job(programs, traced, name, 0.05) for name in names])
        joined(queue, len(names) + 1)
    wait(futures)
    assert traced == names


@pytest.mark.parametrize("comes", [True, False])
def test_who_comes_first_to_an_empty_queue_is_no_earlier_than_its_place(comes):
    """By chance the cycles' program was the first to come, and the first token came as late as the cycles."""
    programs, traced = Programs(), []

    def after(seconds, name, comes=True):
        time.sleep(seconds)
        if comes:
            tracing_job(programs, traced, name)()

    jobs = [partial(after, 0.2, "0", comes), partial(after, 0.0, "1"), partial(after, 0.1, "2")]
    for future in start_compiling(jobs):
        future.result(10)
    assert traced == (["0", "1", "2"] if comes else ["1", "2"])


@pytest.mark.parametrize("there", [True, False])
def test_who_looks_on_disk_keeps_its_place(monkeypatch, there):
    """The later one waits for what an earlier one finds, at most; both look at the same time."""
    programs, traced, looking = Programs(), [], threading.Barrier(2)

    class Stored:
        def program(self, function, static, donate, args, lower):
            looking.wait(10)
            if static == ("first",):
                time.sleep(0.2)
                if there:
                    return "found", lambda: None
            return lower().compile(), lambda: None

    monkeypatch.setattr(Programs, "stored", Stored())

    def function(name, x):
        traced.append(name)
        return x

    shape = jax.ShapeDtypeStruct((3,), jnp.float32)
    jobs = [partial(programs.prepare, function, (name,), (), shape) for name in ("first", "second")]
    for future in start_compiling(jobs):
        future.result(10)
    assert traced == (["second"] if there else ["first", "second"])


def test_a_job_that_waits_for_another_s_program_holds_up_nobody():
    """It waits for a program whose own tracing comes after that of a later job."""
    programs, traced, begun = Programs(), [], threading.Event()
    shared = tracing_job(programs, traced, "shared")

    def first():
        begun.wait(10)
        shared()

    with programs._tracing:
        others = start_compiling([lambda: None] * 5 + [shared])
        joined(programs._tracing, 2)
        begun.set()
        futures = start_compiling([first, tracing_job(programs, traced, "later")])
        joined(programs._tracing, 3)
    for future in (*others, *futures):
        future.result(10)
    assert traced == ["later", "shared"]


def test_jobs_without_programs_run_side_by_side_where_order_does_not_matter():
    together = threading.Barrier(4)
    for future in start_compiling([partial(together.wait, 10)] * 8, in_order=False):
        future.result(20)


@pytest.mark.parametrize("in_order", [True, False])
def test_no_more_jobs_at_once_than_threads(in_order):
    programs, inside, most = Programs(), [], []

    def one(number):
        tracing_job(programs, [], str(number))()
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.02)
        inside.pop()

    for future in start_compiling([partial(one, number) for number in range(12)], in_order=in_order):
        future.result(30)
    assert len(most) == 12
    assert max(most) <= THREADS


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


UNLOOKED = """
import gc, weakref

from dflash_jax.compile.tracing import FROZEN, no_collection


class Part:
    def __init__(self):
        self.itself = self


gc.collect()
with no_collection():
    made = [[number] for number in range(50_000)]
    garbage = weakref.ref(Part())
    assert garbage() is not None
young = len(gc.get_objects(generation=0)) + len(gc.get_objects(generation=1))
assert young < len(made) / 2, young
assert gc.get_freeze_count() < FROZEN
assert garbage() is None
"""


def test_what_was_made_while_nobody_looked_is_not_looked_through_afterwards():
    """Requests waited for a tenth of a second, three times after every compilation. In a process of its own: another test's
    threads may still trace in this one."""
    subprocess.run([sys.executable, "-c", UNLOOKED], check=True, timeout=60)


def test_what_somebody_has_frozen_stays_frozen():
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with no_collection():
            pass
        # A frozen object still goes with its last reference; unfrozen, none would be left.
        assert gc.get_freeze_count() > frozen // 2
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
    """The next call had waited for ever for a program that nobody compiled any more, or behind a thread that had gone."""

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
