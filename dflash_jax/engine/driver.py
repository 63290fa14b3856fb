"""A thread that steps a scheduler for callers that cannot wait in one of their own: event loops."""

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dflash_jax.engine.engine import Engine

# Seconds without a request after which the thread ends. Another one is begun in a tenth of a millisecond, and a thread that went on
# would keep the weights of a model that nobody has any more.
LINGER_S = 1.0


class Driver:
    """Steps while there is something to do. `wake` begins it, and it ends by itself.

    Threads that wait for a run of their own go on stepping beside it, one at a time: whose turn it is, the scheduler says.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def alive(self) -> bool:
        thread = self._thread
        return thread is not None and thread.is_alive()

    def wake(self, engine: "Engine") -> None:
        """Has what was submitted stepped."""
        with self._lock:
            if not self.alive:
                # A daemon: Python's end finds it between two calls of the device (`engine.shutdown`).
                self._thread = threading.Thread(
                    target=self._drive, args=(engine,), name="dflash-jax engine", daemon=True
                )
                self._thread.start()

    def join(self, timeout: float | None = None) -> bool:
        """Waits until the thread has ended, which it does once nothing is left to do; whether it has."""
        if (thread := self._thread) is not None:
            thread.join(timeout)
        return not self.alive

    def _drive(self, engine: "Engine") -> None:
        scheduler = engine.scheduler
        while True:
            while engine.step():
                pass
            if scheduler.wait(LINGER_S):
                continue
            with self._lock:
                # Whoever submits rings first and wakes then: what came since is seen here, or finds no thread.
                if not scheduler.wait(0.0):
                    self._thread = None
                    return
