"""What the device has been given before the host has looked at what came before it: the device does not wait for the host.

A call of some hundred arrays, the way back of its results and whoever reads them take the host about 3 ms, as long as a cycle. So
a prompt or cycles are queued behind those whose results are awaited, wherever nothing but these results could change what they do.
Requests that have ended meanwhile are done on the device and change nothing in it; where all have, cycles end at once. Their
pages may be given to others before the device is done with them: who gets them writes to them later on the same device.
"""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import jax

from dflash_jax.decoding.state import Emitted, Setup
from dflash_jax.engine.resources import CYCLES_PER_CHUNK, MAX_CYCLES
from dflash_jax.engine.slots import Job

if TYPE_CHECKING:
    from dflash_jax.engine.scheduler import Run

# Started and not looked at yet: one that runs, and one behind it.
MOST = 2
# Cycles of a call that stands before a prompt, or before one that may come: more where the host could not keep up.
FEW_CYCLES = 2


@dataclass
class First:
    """The first tokens of requests whose prompts are on their way to the pages.

    Attributes:
      rows: requests with their rows of `emitted`.
    """

    rows: list[tuple[Job, int]]
    emitted: Emitted


@dataclass
class Call:
    """Cycles on the device.

    Attributes:
      running: requests with their slots.
      rows: what the cycles give out.
      cycles: how many of them at most.
      width: columns of the page table.
      started, compiled: the clock, and seconds spent compiling until then.
      returned: the clock when the call was on its way.
    """

    running: list[tuple[Job, int]]
    rows: Emitted
    setup: Setup
    cycles: int
    width: int
    started: float
    compiled: float
    returned: float = field(default_factory=time.perf_counter)


class Ahead:
    """What a run has started and not looked at. While cycles are among it, sequences stay in their slots and none is preempted."""

    def __init__(self, run: "Run"):
        self.run, self.core = run, run.core
        self.items: deque[First | Call] = deque()
        self._open = False
        self._few = FEW_CYCLES
        self._read = 0.0, 0.0

    @property
    def calls(self) -> list[Call]:
        return [item for item in self.items if isinstance(item, Call)]

    @property
    def full(self) -> bool:
        return len(self.items) >= MOST

    @property
    def allowed(self) -> bool:
        """Whether anything may be started behind cycles, or cycles behind anything."""
        return self.core.returns_early if self.core.goes_ahead is None else self.core.goes_ahead

    def open(self) -> None:
        """For runs that are given requests while they run: one that comes waits for all that was started before."""
        self._open = True

    def add(self, item: First | Call) -> None:
        for job, cycles, width in self._parts(item):
            job.due += cycles
            job.coming += cycles * width
        self.items.append(item)

    def take(self) -> First | Call:
        """What was started first and is looked at now."""
        item = self.items.popleft()
        for job, cycles, width in self._parts(item):
            job.due -= cycles
            job.coming -= cycles * width
        return item

    def plan(self, patience: int) -> tuple[Setup, int] | None:
        """What cycles behind all that was started verify, and how many of them, at most `patience`; None where results come first.

        Gives the running requests the pages for it.
        """
        run, calls, jobs = self.run, self.calls, self.run.slots.decoding
        if not self.allowed or run.wants_slots or run.fitting.slots() != len(run.slots.jobs):
            return None
        if not any(job.remaining > job.due for job in jobs):
            return None
        cycles = min(patience, self._few) if self._open or run.waiting else patience
        # Stop strings are found on the host, which then cancels; a length is known before.
        if calls and cycles > CYCLES_PER_CHUNK and any(job.request.params.stop for job in jobs):
            return None
        setup, cycles = run.fitting.lengths(cycles)
        wanted = {job: max(len(job.pages), run.pages_for(job, cycles, setup.width)) for job in jobs}
        width = self.core.width_of(max(wanted.values()) * self.core.page_size)
        growth = sum(count - len(job.pages) for job, count in wanted.items())
        # Another width is another program, which nobody may have compiled.
        if growth > self.core.allocator.num_free or (calls and width != calls[-1].width):
            return None
        for job, count in wanted.items():
            run.slots.resize(job, count)
        return setup, cycles

    def seen(self) -> tuple[float, float]:
        """When results came before, and seconds spent compiling until then; those of now are remembered."""
        before, self._read = self._read, (time.perf_counter(), self.core.programs.compile_s)
        return before

    def seconds(self, call: Call, waited: float) -> float:
        """Time of a call whose results have just come, from the end of what was before it; compilation excluded.

        Args:
          waited: seconds that the host waited for them.
        """
        began, before = max((call.started, call.compiled), self.seen())
        now, compiled = self._read
        spent = now - began - (compiled - before)
        busy = call.returned - call.started - (compiled - call.compiled)
        if waited < 0.3 * spent:  # as long as copies take: the device may have waited for the host
            self._few = min(2 * self._few, MAX_CYCLES)
        elif waited > 0.7 * spent:
            self._few = max(self._few // 2, FEW_CYCLES)
        if self.core.goes_ahead is None and jax.default_backend() == "gpu":
            # Not where a call keeps the host busy: results would come later, and no sooner.
            self.core.returns_early = busy < 0.75 * spent
        return spent

    def _parts(self, item: First | Call) -> list[tuple[Job, int, int]]:
        """Jobs that still wait for `item`, with the tokens they gain at least, and those they may for each."""
        if isinstance(item, First):
            return [(job, 1, 0) for job, _ in item.rows]
        return [(job, item.cycles, item.setup.width) for job, slot in item.running if job.slot == slot]
