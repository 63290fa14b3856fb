"""The engine's face: `submit`, `step`, `abort`, and `run` for callers that wait."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence

from dflash_jax.decoding.state import Setup
from dflash_jax.engine.driver import Driver
from dflash_jax.engine.requests import Request
from dflash_jax.engine.resources import MAX_CYCLES, Resources
from dflash_jax.engine.run import Run
from dflash_jax.engine.scheduler import Scheduler
from dflash_jax.engine.slots import Sink
from dflash_jax.engine.warmup import warmup_jobs
from dflash_jax.errors import CapacityError, DFlashError, ParameterError, PromptError


class Engine(Resources):
    """Serves requests over one target and, where there is one, its drafter. Made with the attributes of `Resources`.

    Attributes:
      scheduler: serves all requests, whichever thread they come from.
      driver: the thread that steps for event loops, where there are such.
    """

    def __post_init__(self):
        super().__post_init__()
        self.scheduler, self.driver = Scheduler(self), Driver()
        self._process = os.getpid()

    def submit(
        self,
        request: Request,
        sink: Sink,
        *,
        draft: bool = True,
        cycles: int = MAX_CYCLES,
        slots: int | None = None,
    ) -> int:
        """Queues a request from any thread and returns its ticket. It gets on while some thread calls `step`, or waits for a `run`.

        Args:
          sink: called with the ticket and an `Update`, or the error that ended the request, by the thread that steps: it must not
            block.
          draft, cycles, slots: see `Scheduler.submit`.

        Raises:
          PromptError, ParameterError, CapacityError: see `check`; nothing is queued.
        """
        self._check_process()
        self.check(request)
        return self.scheduler.submit(request, sink, draft=self._drafts(draft), cycles=cycles, slots=slots)

    def step(self) -> bool:
        """One step for all requests; False when there is none left. See `Scheduler.step`."""
        return self.scheduler.step()

    def abort(self, ticket: int) -> None:
        """Ends a request from any thread; does nothing where it has ended. See `Scheduler.abort`."""
        self.scheduler.abort(ticket)

    def run(
        self, requests: Sequence[Request], *, draft: bool = True, cycles: int = MAX_CYCLES, slots: int | None = None
    ) -> Run:
        """Serves `requests` beside those of others; iterate the result for updates.

        Args:
          requests: all are checked before any work starts. `Run.add` brings more.
          draft: False decodes with the target alone.
          cycles: cycles between two looks at the results; small for streaming, at most 32.
          slots: how many run side by side; None for as many as there are requests, at most `max_batch` either way.

        Raises:
          PromptError, ParameterError, CapacityError: see `check`.
        """
        self._check_process()
        for request in requests:
            try:
                self.check(request)
            except (PromptError, ParameterError, CapacityError) as error:
                if len(requests) == 1:
                    raise
                raise type(error)(f"prompts[{request.index}]: {error}") from None
        return Run(self, requests, draft=self._drafts(draft), cycles=max(1, min(cycles, MAX_CYCLES)), slots=slots)

    def warmup_jobs(
        self, setups: Iterable[Setup], batch: Iterable[int] | None = None
    ) -> Iterator[Callable[[], object]]:
        """Functions that make the pools and compile, one program each, everything requests of these setups can need.

        Args:
          batch: numbers of slots; None for every bucket.
        """
        return warmup_jobs(self, setups, batch)

    def _check_process(self) -> None:
        """Raises DFlashError in a fork, where a call of the device would wait for threads that did not come along."""
        if (here := os.getpid()) != self._process:
            raise DFlashError(
                f"the model was loaded by process {self._process}, of which this one, {here}, is a fork, without its threads and "
                'devices: load it here, or start processes by "spawn" (multiprocessing.set_start_method)'
            )

    def _drafts(self, draft: bool) -> bool:
        return draft and self.draft is not None
