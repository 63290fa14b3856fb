"""Ctrl-C that is never lost, for commands.

Python drops an exception that is raised inside a garbage collection callback or a destructor, and JAX registers such a callback.
An interrupt that arrives there is raised a moment later instead, and so is one that Python says it has dropped anywhere else. An
extension module that is interrupted while it starts says that it could not be imported; `was_interrupted` tells the two apart.
"""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SWALLOWING = ("_xla_gc_callback", "__del__")
_DELAY_SECONDS = 0.01
_arrived = False


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
        _arrived = False
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
    return isinstance(error, KeyboardInterrupt) or (_arrived and isinstance(error, ImportError))


def _interrupt(_: int, frame: FrameType | None) -> None:
    global _arrived
    _arrived = True
    while frame is not None:
        if frame.f_code.co_name in _SWALLOWING:
            signal.setitimer(signal.ITIMER_REAL, _DELAY_SECONDS)
            return
        frame = frame.f_back
    raise KeyboardInterrupt
