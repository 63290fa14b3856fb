"""Pieces on their way from the thread that steps to an event loop."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from dflash_jax.text.completion import Piece


def merged(first: Piece, second: Piece) -> Piece:
    """Two pieces of one prompt, one after the other, as one."""
    return replace(
        second,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        from_draft=first.from_draft + second.from_draft,
        accepted=first.accepted + second.accepted,
        logprobs=first.logprobs + second.logprobs,
        prompt_logprobs=first.prompt_logprobs + second.prompt_logprobs,
    )


# Readers that are woken before the loop looks at its sockets again, for who was answered first may have asked anew; and seconds
# until the next of them while the thread that steps makes calls, which the device may be waiting for.
AT_ONCE, YIELD_S = 8, 1e-3


class Bell:
    """Wakes readers in one loop: once for all that have something since it woke them last, not once for each.

    Args:
      calling: whether the thread that steps makes calls at present.

    Raises:
      RuntimeError: by `note` and `ring`, where the loop is closed.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, calling: Callable[[], bool] = lambda: False):
        self._loop, self._calling = loop, calling
        self._rung: deque[asyncio.Event] = deque()
        self._coming = False

    def note(self, event: asyncio.Event, *, first: bool = False) -> None:
        """Has the next `ring` wake who waits for it; `first` before all others. From any thread."""
        if self._loop.is_closed():
            raise RuntimeError("Event loop is closed")
        (self._rung.appendleft if first else self._rung.append)(event)

    def ring(self) -> None:
        """From any thread."""
        if self._rung and not self._coming:
            self._coming = True
            try:
                self._loop.call_soon_threadsafe(self._wake)
            except RuntimeError:
                self._coming = False  # whoever rings next has to be told as well
                raise

    def _wake(self) -> None:
        self._coming = False  # first: what is noted from here on rings again
        for _ in range(AT_ONCE):
            if not self._rung:
                return
            self._rung.popleft().set()
        if self._rung and not self._coming:
            self._coming = True
            self._loop.call_later(YIELD_S if self._calling() else 0.0, self._wake)


class Feed:
    """Pieces of one caller's prompts, read in its loop. Those of a prompt that nobody has read yet are one piece: a slow reader
    costs the memory of its text once, and nobody waits for it."""

    def __init__(self, bell: Bell):
        self._bell, self._event, self._lock = bell, asyncio.Event(), threading.Lock()
        self._pieces: dict[int, Piece] = {}
        self._error: Exception | None = None
        self._timer: asyncio.TimerHandle | None = None

    def put(self, what: Piece | Exception, *, first: bool = False) -> Callable[[], None]:
        """From any thread.

        Args:
          first: its reader is woken before those who have waited longer.

        Returns:
          What wakes the reader.

        Raises:
          RuntimeError: its loop is closed.
        """
        with self._lock:
            if isinstance(what, Exception):
                self._error = what
            else:
                before = self._pieces.get(what.index)
                self._pieces[what.index] = what if before is None else merged(before, what)
        self._bell.note(self._event, first=first)
        return self._bell.ring

    async def take(self, patience: float | None = None) -> list[Piece]:
        """Waits for pieces and takes them: at most one of each prompt. Raises an error that was put, after the pieces.

        Args:
          patience: seconds after which it gives none; None waits for ever.
        """
        loop = asyncio.get_running_loop()
        until = None if patience is None else loop.time() + patience
        while True:
            self._event.clear()
            with self._lock:
                pieces, self._pieces = self._pieces, {}
                error = self._error
            if pieces:
                return list(pieces.values())
            if error is not None:
                raise error
            if until is not None:
                if loop.time() >= until:
                    return []
                self._wake_at(loop, until)
            await self._event.wait()

    def _wake_at(self, loop: asyncio.AbstractEventLoop, when: float) -> None:
        """Has the reader look at the clock by then. One timer serves many waits: most end long before it, and the next one goes on
        with it."""
        if self._timer is not None and loop.time() < self._timer.when() <= when:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(when, self._event.set)
