"""Who may run Python while programs are traced: tracing keeps it busy for seconds, and several threads want it."""

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Condition, Event, Lock, get_ident, local

TURN_S = 2e-4
PATIENCE_S = 1.0
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

_PLACE = local()
FIRST = -1


@contextmanager
def place(number: int, arrived: Sequence[Event] = ()) -> Iterator[None]:
    """What this thread waits for inside comes in this place of a `Line`; threads that have none come first.

    Args:
      arrived: one event for each place, set when its thread has come to a line or will not come any more. A line waits for those
        before this place, but not for long.
    """
    before = getattr(_PLACE, "number", FIRST), getattr(_PLACE, "arrived", ())
    _PLACE.number, _PLACE.arrived = number, arrived
    try:
        yield
    finally:
        _PLACE.number, _PLACE.arrived = before
        if arrived:
            arrived[number].set()


def _wait_for_earlier() -> None:
    """Until all with an earlier place are here as well: who comes to an empty line would be the first in it."""
    arrived = getattr(_PLACE, "arrived", ())
    if arrived:
        arrived[_PLACE.number].set()
        # One of them may wait for what this thread has begun.
        for event in arrived[: _PLACE.number]:
            event.wait(PATIENCE_S)


class Line:
    """A lock that the first in line gets next, not whoever happens to wake up.

    The program of the first token takes much less time than the cycles' program: behind it, by chance, the first token would come
    as late as the cycles.
    """

    def __init__(self):
        self._lock = Lock()
        self._changed = Condition(self._lock)
        self._waiting: list[tuple[int, int]] = []
        self._arrivals = 0
        self._taken: int | None = None  # by which thread

    def __enter__(self) -> None:
        # Here and below the lock itself, not the condition: interrupted as its own `__exit__` begins, that would stay locked.
        ours = None
        try:
            with self._lock:
                ours, self._arrivals = (getattr(_PLACE, "number", FIRST), self._arrivals), self._arrivals + 1
                self._waiting.append(ours)
            _wait_for_earlier()
            with self._lock:
                # A turn of its own that it did not end was interrupted as it was about to.
                self._changed.wait_for(lambda: self._taken in (None, get_ident()) and min(self._waiting) == ours)
                self._taken = get_ident()
                self._waiting.remove(ours)
        except BaseException:
            self._leave(ours)
            raise

    def __exit__(self, *_: object) -> None:
        self._leave()

    def _leave(self, ours: tuple[int, int] | None = None) -> None:
        """Ends this thread's turn, and its waiting in the place `ours`."""
        with self._lock:
            if ours in self._waiting:
                self._waiting.remove(ours)
            if self._taken == get_ident():
                self._taken = None
            self._changed.notify_all()
