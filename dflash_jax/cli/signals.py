"""Ctrl-C that is never lost, for commands.

Python drops an exception that is raised inside a garbage collection callback or a destructor, and JAX registers such a callback.
An interrupt that arrives there is raised a moment later instead, and so is one that Python says it has dropped anywhere else. While
modules are imported it waits as well: extension modules print what is raised as they start, or say that they could not be imported.
Who asks twice is heard at once; `was_interrupted` then tells such an import from one that failed by itself.
"""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SWALLOWING = ("_xla_gc_callback", "__del__")
_IMPORTING = "_find_and_load"
_DELAY_SECONDS = 0.01
_arrived: signal.Signals | None = None  # the one that ended a block, not what only repeats it


@contextmanager
def interrupts(*others: signal.Signals) -> Iterator[None]:
    """While it lasts, SIGINT raises KeyboardInterrupt where it counts, and so do `others`.

    A signal that the process ignores or answers already stays as it is, and so do all in other threads than the main one, which
    are not interrupted.
    """
    usual = {signal.SIGINT: signal.default_int_handler, **dict.fromkeys(others, signal.SIG_DFL)}
    main = threading.current_thread() is threading.main_thread()
    taken = {number: handler for number, handler in usual.items() if main and signal.getsignal(number) is handler}
    global _arrived
    if main:
        _arrived = None
    if not taken:
        yield
        return
    before, hook = signal.signal(signal.SIGALRM, _interrupt), sys.unraisablehook

    def dropped(told: Any) -> None:
        if told.exc_type is KeyboardInterrupt:
            signal.setitimer(signal.ITIMER_REAL, _DELAY_SECONDS)
        else:
            hook(told)

    sys.unraisablehook = dropped
    for number in taken:
        signal.signal(number, _interrupt)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.unraisablehook = hook
        for number, handler in taken.items():
            signal.signal(number, handler)
        signal.signal(signal.SIGALRM, before)


def was_interrupted(error: BaseException) -> bool:
    """Whether `error`, which left the block of `interrupts`, is Ctrl-C or what an import made of it."""
    return isinstance(error, KeyboardInterrupt) or (_arrived is not None and isinstance(error, ImportError))


def arrived() -> bool:
    """Whether the last block of `interrupts` was interrupted, be it that this is still to be raised."""
    return _arrived is not None


def interruption() -> str:
    """The signal that ended the last block of `interrupts`, in words: Ctrl-C needs no name."""
    return "interrupted" if _arrived in (None, signal.SIGINT) else f"interrupted by {_arrived.name}"


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _arrived
    alarm = number == signal.SIGALRM  # repeats one that could not be raised
    swallowing = _SWALLOWING if _arrived is not None and not alarm else (*_SWALLOWING, _IMPORTING)
    if not alarm:
        _arrived = signal.Signals(number)
    while frame is not None:
        if frame.f_code.co_name in swallowing:
            signal.setitimer(signal.ITIMER_REAL, _DELAY_SECONDS)
            return
        frame = frame.f_back
    raise KeyboardInterrupt
