"""Ctrl-C that is never lost, for commands.

Python drops an exception that is raised inside a garbage collection callback or a destructor, and JAX registers such a callback.
An interrupt that arrives there is raised a moment later instead. An extension module that is interrupted while it starts says that
it could not be imported; `was_interrupted` tells the two apart.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SWALLOWING = ("_xla_gc_callback", "__del__")
_DELAY_SECONDS = 0.01
_arrived = False


@contextmanager
def interrupts() -> Iterator[None]:
    """While it lasts, SIGINT raises KeyboardInterrupt where it counts.

    Does nothing in a process that ignores SIGINT, and in other threads than the main one, which are not interrupted.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    before = signal.signal(signal.SIGALRM, _interrupt)
    signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
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
