"""The order of threads that trace programs: tracing holds Python's lock for seconds, and several threads need it."""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from threading import Condition, Lock, get_ident, local

TURN_S = 2e-4
FROZEN = 1000  # objects: Python freezes some hundred itself, and a server all that it has, which then stays frozen


class Setting[T]:
    """A setting of the process that is another one while anybody is inside. May be entered from several threads at a time.

    Args:
      usual: tells what it is.
      change, restore: set it for those inside, and back to what it was.
    """

    def __init__(self, usual: Callable[[], T], change: Callable[[T], object], restore: Callable[[T], object]):
        self._usual, self._change, self._restore = usual, change, restore
        self._inside, self._lock = 0, Lock()
        self._before: T | None = None  # none where it is as usual

    @contextmanager
    def __call__(self) -> Iterator[None]:
        entered = False
        # An interrupt may come after every call: whatever it finds done is undone.
        try:
            with self._lock:
                if self._before is None:
                    self._before = self._usual()
                self._inside, entered = self._inside + 1, True
                self._change(self._before)
            yield
        finally:
            if entered:
                with self._lock:
                    self._inside -= 1
                    if self._inside == 0 and self._before is not None:
                        self._restore(self._before)
                        self._before = None


def _shorten_turns(usual: float) -> None:
    sys.setswitchinterval(min(usual, TURN_S))


def _stop_collection(_: bool) -> None:
    gc.disable()


def _collect_again(usual: bool) -> None:
    if not usual:
        return
    try:
        if gc.get_freeze_count() < FROZEN:
            _to_the_oldest()
    finally:
        gc.enable()


def _to_the_oldest() -> None:
    """One look at what was made; what stays is not looked through again soon, as it would be twice, in tenths of a second."""
    try:
        gc.collect(0)
        gc.freeze()
    finally:
        gc.unfreeze()


# Python changes threads more often inside. Whoever needs Python while others trace, to start a transfer or a program, would wait
# the usual 5 ms at each of its hundreds of steps.
short_turns = Setting(sys.getswitchinterval, _shorten_turns, sys.setswitchinterval)
# Python does not look for cycles of garbage inside, but once at the end. Tracing makes millions of objects and hardly any such
# cycles; looking for them all the time takes a tenth of its own.
no_collection = Setting(gc.isenabled, _stop_collection, _collect_again)

_JOB = local()
TRACING, FIRST = -2, -1


@contextmanager
def job(place: int, arrived: Callable[[], object]) -> Iterator[None]:
    """This thread's job in the background: its programs are traced in this place; threads that have none come first.

    Args:
      arrived: called once, when the job has its place in a queue, or waits for another's program, or ends without.
    """
    _JOB.place, _JOB.arrived = place, arrived
    try:
        yield
    finally:
        arrive()
        _JOB.place = FIRST


def arrive() -> None:
    """This thread's job holds up no later one any more."""
    arrived, _JOB.arrived = getattr(_JOB, "arrived", None), None
    if arrived is not None:
        arrived()


class TracingQueue:
    """A lock that goes to the least (place, arrival) among the threads that have joined, not to whoever happens to wake up.

    The program of the first token takes much less time than the cycles' program: behind it, by chance, the first token would come
    as late as the cycles. A thread joins before it looks for its program on disk, so that who finds none has kept its place, and
    waits for nothing else until it leaves. It traces its program itself: JAX's settings are those of the thread that asks, and so
    are interrupts and errors. A thread for all tracing would need a copy of them by way of JAX's internals.
    """

    def __init__(self):
        self._lock = Lock()
        self._changed = Condition(self._lock)
        self._arrivals = count()
        self._joined: dict[int, tuple[int, int]] = {}  # by thread

    # Below the lock itself, not the condition: interrupted as its own `__exit__` begins, that would stay locked.
    def join(self) -> None:
        """Takes this thread's place, which `leave` gives up."""
        with self._lock:
            self._joined[get_ident()] = getattr(_JOB, "place", FIRST), next(self._arrivals)
        arrive()

    def leave(self) -> None:
        with self._lock:
            self._joined.pop(get_ident(), None)
            self._changed.notify_all()

    def __enter__(self) -> None:
        thread = get_ident()
        try:
            if thread not in self._joined:
                self.join()
            with self._lock:
                self._changed.wait_for(lambda: self._joined[thread] == min(self._joined.values()))
                self._joined[thread] = TRACING, 0  # before any that comes now
        except BaseException:
            self.leave()
            raise

    def __exit__(self, *_: object) -> None:
        self.leave()
