"""Shutdown while a daemon thread still serves requests: as Python ends, the thread is ended first, between two calls of the device.

A thread that comes back from JAX once Python is being taken apart ends the whole process with an abort.
"""

import atexit
import threading
import time
from typing import Protocol, runtime_checkable
from weakref import WeakSet, finalize

MOST_S = 10.0  # that Python waits for threads inside of a step: calls of the device take far less
BETWEEN_S = 0.25  # and after that for those that served, to come to their end or to what ends them
TICK_S = 0.01


@runtime_checkable
class Stepped(Protocol):
    """A scheduler."""

    @property
    def stepping(self) -> bool:
        """Whether a thread is inside of it."""
        ...


_schedulers: WeakSet[Stepped] = WeakSet()
_threads: WeakSet[threading.Thread] = WeakSet()
_listing = threading.Lock()
_ending = threading.Event()


def watch(scheduler: Stepped) -> None:
    """Has Python wait for a step of this scheduler where a thread is at it as Python ends."""
    with _listing:
        _schedulers.add(scheduler)


def check() -> None:
    """Ends the thread that calls it, without a word, once Python ends; but for the main thread, whose last functions may serve."""
    thread = threading.current_thread()
    if thread is threading.main_thread():
        return
    if _ending.is_set():
        raise SystemExit
    with _listing:
        _threads.add(thread)


# The first of a process registers what ends all of them, traces of JAX's that are under way among them.
finalize(_ending, int).atexit = False


# Before JAX takes itself apart: what is registered last runs first.
@atexit.register
def _end() -> None:
    _ending.set()
    began = outside = time.monotonic()
    while (now := time.monotonic()) - began < MOST_S:
        if _inside():
            outside = now
        elif now - outside > BETWEEN_S or not _left():
            break
        time.sleep(TICK_S)


def _inside() -> bool:
    with _listing:
        return any(scheduler.stepping for scheduler in _schedulers)


def _left() -> bool:
    with _listing:
        return any(thread.is_alive() for thread in _threads)
