"""Cycles that are started before the results of the ones before are looked at: the device does not wait for the host.

A call of some hundred arrays and the way back of its results take the host about 3 ms, as long as a cycle. Where nothing but those
results could change what runs next, the next call is queued behind the one that runs. Requests that have ended meanwhile are done
on the device and change nothing in it; where all have, it ends at once.
"""

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import jax

from dflash_jax.decoding.state import Emitted, Setup
from dflash_jax.engine.slots import Job

if TYPE_CHECKING:
    from dflash_jax.engine.run import Run


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
    """At most one call of a run behind the one whose results are awaited. While it is there, nothing but cancelling happens to the
    run's requests: nobody is admitted, and slots stay where they are."""

    def __init__(self, run: "Run"):
        self.run, self.core = run, run.core
        self.call: Call | None = None
        self._alone = True
        self._read = 0.0, 0.0

    def stop(self) -> None:
        """For runs that are given requests while they run: one that comes would wait for two calls."""
        self._alone = False

    def take(self) -> Call | None:
        """The call that was started ahead."""
        call, self.call = self.call, None
        return call

    def follow(self, call: Call) -> None:
        """Starts the call after `call`, whose results are awaited, if it is certain what it has to do."""
        if not (self._allowed and self._worth(call)):
            return
        setup, cycles = self.run.fitting.lengths(self.run.cycles)
        if setup == call.setup and self._make_room(call, cycles):
            started = time.perf_counter(), self.core.programs.compile_s
            self.call = self.run.start(setup, cycles, started)

    def seconds(self, call: Call) -> float:
        """Time of a call whose results have just come, from the end of the one before; compilation excluded."""
        now, compiled = time.perf_counter(), self.core.programs.compile_s
        began, before = max((call.started, call.compiled), self._read)
        self._read = now, compiled
        spent = now - began - (compiled - before)
        if self.core.goes_ahead is None and jax.default_backend() == "gpu":
            # Not where a call keeps the host busy: results would come later, and no sooner.
            busy = call.returned - call.started - (compiled - call.compiled)
            self.core.returns_early = busy < 0.5 * spent
        return spent

    @property
    def _allowed(self) -> bool:
        return self.core.returns_early if self.core.goes_ahead is None else self.core.goes_ahead

    def _worth(self, call: Call) -> bool:
        run = self.run
        jobs = [job for job, slot in call.running if job.slot == slot]
        if not self._alone or run.waiting or run.slots.prefilling is not None or run.retired.any():
            return False
        if run.fitting.slots() != len(run.slots.jobs):
            return False
        # Stop strings are found on the host, which then cancels; a length is known before.
        return not any(job.request.params.stop for job in jobs) and any(job.remaining > call.cycles for job in jobs)

    def _make_room(self, call: Call, cycles: int) -> bool:
        """Gives the running requests pages for both calls, unless there are too few or the program would be another one."""
        run, core = self.run, self.core
        wanted = {job: run.pages_for(job, call.cycles + cycles, call.setup.width) for job in run.slots.decoding}
        more = {job: count for job, count in wanted.items() if count > len(job.pages)}
        growth = sum(count - len(job.pages) for job, count in more.items())
        width = core.width_of(max(wanted.values(), default=1) * core.page_size)
        if not wanted or growth > core.allocator.num_free or width != call.width:
            return False
        for job, count in more.items():
            run.slots.resize(job, count)
        return True
