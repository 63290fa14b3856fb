"""The engine that `generate` and `stream` use."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from dflash_jax.decoding.state import Setup
from dflash_jax.engine.requests import Request
from dflash_jax.engine.resources import MAX_CYCLES, Resources
from dflash_jax.engine.scheduler import Run
from dflash_jax.engine.warmup import warmup_jobs
from dflash_jax.errors import CapacityError, PromptError


class Engine(Resources):
    """Serves requests over one target and, where there is one, its drafter. Made with the attributes of `Resources`."""

    def run(
        self, requests: Sequence[Request], *, draft: bool = True, cycles: int = MAX_CYCLES, slots: int | None = None
    ) -> Run:
        """Starts serving `requests`; iterate the result for updates.

        Args:
          requests: all are checked before any work starts. `Run.add` brings more.
          draft: False decodes with the target alone.
          cycles: cycles between two looks at the results; small for streaming, at most 32.
          slots: how many run side by side; None for as many as there are requests, at most `max_batch` either way.

        Raises:
          PromptError, CapacityError: see `check`.
          DFlashError: another run of this engine is not finished (at the first update).
        """
        for request in requests:
            try:
                self.check(request)
            except (PromptError, CapacityError) as error:
                if len(requests) == 1:
                    raise
                raise type(error)(f"prompts[{request.index}]: {error}") from None
        return Run(self, requests, draft=draft and self.draft is not None, cycles=cycles, slots=slots)

    def warmup_jobs(
        self, setups: Iterable[Setup], batch: Iterable[int] | None = None
    ) -> Iterator[Callable[[], object]]:
        """Functions that make the pools and compile, one program each, everything requests of these setups can need.

        Args:
          batch: numbers of slots; None for every bucket.
        """
        return warmup_jobs(self, setups, batch)
