"""Who may run Python while programs are traced: tracing keeps it busy for seconds, and several threads want it."""

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Condition, Event, Lock, local

TURN_S = 2e-4
PATIENCE_S = 1.0


@contextmanager
def short_turns() -> Iterator[None]:
    """Python changes threads more often inside. May be entered from several threads at a time.

    Whoever needs Python while others trace, to start a transfer or a program, would wait the usual 5 ms at each of its hundreds of
    steps.
    """
    with _TURNS.lock:
        if _TURNS.inside == 0:
            _TURNS.usual = sys.getswitchinterval()
            sys.setswitchinterval(min(_TURNS.usual, TURN_S))
        _TURNS.inside += 1
    try:
        yield
    finally:
        with _TURNS.lock:
            _TURNS.inside -= 1
            if _TURNS.inside == 0:
                sys.setswitchinterval(_TURNS.usual)


@contextmanager
def no_collection() -> Iterator[None]:
    """Python does not look for cycles of garbage inside. May be entered from several threads at a time.

    Tracing makes millions of objects and hardly any such cycles; looking for them takes a tenth of its time.
    """
    with _COLLECTION.lock:
        if _COLLECTION.inside == 0:
            _COLLECTION.on = gc.isenabled()
            gc.disable()
        _COLLECTION.inside += 1
    try:
        yield
    finally:
        with _COLLECTION.lock:
            _COLLECTION.inside -= 1
            if _COLLECTION.inside == 0 and _COLLECTION.on:
                gc.enable()


@dataclass
class _Collection:
    inside: int = 0
    on: bool = True
    lock: Lock = field(default_factory=Lock)


@dataclass
class _Turns:
    inside: int = 0
    usual: float = 0.0
    lock: Lock = field(default_factory=Lock)


_TURNS, _COLLECTION = _Turns(), _Collection()
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
        self._changed = Condition(Lock())
        self._waiting: list[tuple[int, int]] = []
        self._arrivals = 0
        self._taken = False

    def __enter__(self) -> None:
        with self._changed:
            self._arrivals += 1
            ours = getattr(_PLACE, "number", FIRST), self._arrivals
            self._waiting.append(ours)
        try:
            _wait_for_earlier()
            with self._changed:
                self._changed.wait_for(lambda: not self._taken and min(self._waiting) == ours)
                self._taken = True
        finally:
            with self._changed:
                self._waiting.remove(ours)
                self._changed.notify_all()  # the line may have got shorter by an interrupt

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._taken = False
            self._changed.notify_all()
