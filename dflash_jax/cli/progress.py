"""A word to somebody who waits at a terminal: a first run reads and compiles for some twenty seconds before it says anything."""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

SECONDS = 3.0
FIRST_RUN = "note: reading weights and compiling; the first run of a model here takes up to a minute, later ones load what it keeps"


@contextmanager
def told_if_slow(text: str = FIRST_RUN) -> Iterator[Callable[[], None]]:
    """Prints `text` on stderr once `SECONDS` are over, unless the block ends or calls the function it is given before that.

    Nothing is printed where stderr is no terminal.
    """
    timer = threading.Timer(SECONDS, print, (text,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    if sys.stderr.isatty():
        timer.start()
    try:
        yield timer.cancel
    finally:
        timer.cancel()


def announced[T](items: Iterable[T], call: Callable[[], None]) -> Iterator[T]:
    """The same items; `call` is called whenever one is there."""
    for item in items:
        call()
        yield item
