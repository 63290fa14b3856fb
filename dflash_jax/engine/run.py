"""Requests of one caller: `generate` and `stream` wait for them, in their own thread."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from dflash_jax.engine.requests import Request, Update
from dflash_jax.engine.resources import CYCLES_PER_CHUNK
from dflash_jax.engine.scheduler import Mailbox
from dflash_jax.engine.warmup import first_jobs
from dflash_jax.errors import DFlashError

if TYPE_CHECKING:
    from dflash_jax.engine.engine import Engine


class Run(Iterator[Update]):
    """A caller's requests among all that an engine serves. Iterating yields their `Update`s; closing it ends those that go on.

    Nothing is submitted before the first update is asked for. Between two updates requests go on while another thread steps, else
    with the next update. It is stepped and closed by one thread at a time.
    """

    def __init__(self, engine: "Engine", requests: Sequence[Request], *, draft: bool, cycles: int, slots: int | None):
        self._engine, self._scheduler = engine, engine.scheduler
        self.draft, self.cycles, self.slots = draft, cycles, slots
        self._coming = list(requests)
        self._open: dict[int, tuple[Request, int]] = {}  # tickets, with the tokens that were seen
        self._box, self._ended = Mailbox(), False

    def __next__(self) -> Update:
        try:
            while not self._ended and (self._coming or self._open):
                if self._coming:
                    self._submit()
                if (update := self._received()) is not None:
                    return update
                if self._open:
                    self._scheduler.advance(self._box)
        except BaseException:
            self.close()
            raise
        self.close()
        raise StopIteration

    def __del__(self):
        if self._open:
            self.close()

    def add(self, request: Request) -> None:
        """Queues one more request, between two updates.

        Raises:
          PromptError, ParameterError, CapacityError: see `Resources.check`.
          DFlashError: all requests have been answered, or the run was closed.
        """
        if self._ended:
            raise DFlashError("the run has ended, nobody would read the updates: start another run")
        self._engine.check(request)
        self._coming.append(request)

    def cancel(self, index: int) -> None:
        """Ends the request with this index before its next cycle; no update of it follows. The index may be given again."""
        self._coming = [request for request in self._coming if request.index != index]
        for ticket in [ticket for ticket, (request, _) in self._open.items() if request.index == index]:
            del self._open[ticket]
            self._scheduler.abort(ticket)

    def close(self) -> None:
        """Ends the run; pages that its requests had are free afterwards, or with the next step where another thread steps."""
        self._ended = True
        for ticket in self._open:
            self._scheduler.abort(ticket)
        self._open = {}
        self._scheduler.settle(self._box)

    def first_jobs(self) -> Iterator[Callable[[], None]]:
        """Functions that compile, one program each, what this run will call first where no other one runs. Weights may still be
        shapes."""
        cycles = min(self.cycles, CYCLES_PER_CHUNK), self.cycles
        yield from first_jobs(self._engine, self._coming, draft=self.draft, slots=self.slots, cycles=cycles)

    def _received(self) -> Update | None:
        items = self._box.items
        while items:
            ticket, what = items.popleft()
            if ticket not in self._open:  # cancelled
                continue
            if isinstance(what, Exception):
                raise what
            request, seen = self._open[ticket]
            if what.start < seen:  # sent again after an interrupt
                continue
            self._open[ticket] = request, seen + len(what.tokens)
            if what.finish_reason is not None:
                del self._open[ticket]
            return what
        return None

    def _submit(self) -> None:
        tickets = self._scheduler.tickets(len(self._coming))
        coming, self._coming = dict(zip(tickets, self._coming, strict=True)), []
        # Known before they are queued: an interrupt leaves none behind that nobody aborts.
        self._open |= {ticket: (request, 0) for ticket, request in coming.items()}
        options = {"draft": self.draft, "cycles": self.cycles, "slots": self.slots}
        self._scheduler.submit_all(coming, self._box.put, **options)
