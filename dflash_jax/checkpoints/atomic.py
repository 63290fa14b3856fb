"""Files that are there whole or not at all, and steps on the way that are not interrupted."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

# The alarm repeats an interrupt that Python has dropped.
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Defers interrupts to the end of the block; the first one that came is answered then.

    For steps that are quick and belong together. Only signals that Python code answers are held back: one that ends the process at
    once still does. In other threads than the main one, which no signal interrupts, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []

    def hold(number: int, _: FrameType | None) -> None:
        arrived.append(number)

    try:
        with ExitStack() as restored:  # which puts every handler back, also when one of them is called meanwhile
            for number in _INTERRUPTS:
                if callable(handler := signal.getsignal(number)):
                    restored.callback(signal.signal, number, handler)
                    signal.signal(number, hold)
            yield
    finally:
        if arrived:
            signal.raise_signal(signal.Signals(arrived[0]))


@contextmanager
def written_whole(path: str | Path) -> Iterator[Path]:
    """A path beside it, of the same suffix, for a file that takes its place when the block ends well and is gone otherwise."""
    path = Path(path)
    scratch = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        yield scratch
        os.replace(scratch, path)
    except BaseException:
        with uninterrupted():
            scratch.unlink(missing_ok=True)
        raise
