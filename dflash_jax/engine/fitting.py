"""Fits the next cycles to the requests that run: how many slots their program has, how many tokens it verifies in each.

Every combination is a program of its own. What would be best but is not compiled is compiled in the background once its lack has
cost as much time as compiling takes; until then the best of what is there runs. Nobody waits.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, get_args

import numpy as np

from dflash_jax.compile.programs import Status, start_compiling
from dflash_jax.decoding.state import Emitted, Setup
from dflash_jax.engine.buckets import round_up
from dflash_jax.engine.requests import Request
from dflash_jax.engine.slots import Job
from dflash_jax.engine.verify_policy import Kind, kind_of
from dflash_jax.engine.warmup import Jobs

if TYPE_CHECKING:
    from dflash_jax.engine.scheduler import Run


class Fitting:
    """Decides for one run; what it learns stays with the engine."""

    def __init__(self, run: "Run"):
        self.run, self.core = run, run.core

    def first_length(self, requests: Sequence[Request]) -> int:
        """What the first cycles of these requests will verify if nothing runs before them."""
        if self.run.setup.draft is None or not requests:
            return self.run.setup.offered
        slots = len(self.run.slots.jobs)
        first = requests[:1]  # decodes alone until the next one is prefilled
        kinds: Counter[Kind] = Counter(kind_of(request) for request in first)
        return self.core.lengths.choose(kinds, slots, float(len(first[0].prompt)), lambda _: "missing").length

    def lengths(self, cycles: int) -> tuple[Setup, int]:
        """What the next cycles verify, and how many of them there are to be, at most `cycles`."""
        run, lengths, running = self.run, self.core.lengths, self.run.slots.decoding
        if run.setup.draft is None or not running:
            return run.setup, cycles
        if lengths.cost is None:
            return run.setup.verifying(lengths.current), cycles
        slots = len(run.slots.jobs)
        kinds: Counter[Kind] = Counter(kind_of(job.request) for job in running)
        choice = lengths.choose(kinds, slots, self.context, partial(self._status, slots, cycles))
        cycles = lengths.patience(kinds, cycles)
        if lengths.worth_compiling((slots, choice.wanted), choice.loss_s * cycles):
            start_compiling([self._jobs(choice.wanted).loop(slots, self._width(choice.wanted, cycles))])
        return run.setup.verifying(choice.length), cycles

    def slots(self) -> int:
        """The number of slots for the next cycles: fewer than now where nobody waits and the programs for fewer are there."""
        run, now = self.run, len(self.run.slots.jobs)
        fewer = round_up(max(1, len(run.slots.taken)), self.core.buckets.batch)
        if fewer >= now or run.waiting or run.slots.filling:
            return now
        length = self.core.lengths.current
        moves = [(now, fewer), (fewer, run.most_slots)]
        there = {
            self._status_of(("resize", run.setup, *move), partial(self._jobs(length).resize, *move)) for move in moves
        }
        if {*there, self._status(fewer, run.cycles, length)} == {"compiled"}:
            return fewer
        cost = self.core.lengths.cost
        if cost is not None:
            saved = cost.ms(now, length, self.context) - cost.ms(fewer, length, self.context)
            if self.core.lengths.worth_compiling((now, fewer, length), saved / 1e3 * run.cycles):
                jobs = self._jobs(length)
                start_compiling(
                    [jobs.loop(fewer, self._width(length, run.cycles)), *(jobs.resize(*move) for move in moves)]
                )
        return now

    def learn(self, running: Sequence[Job], verified: int, rows: Emitted) -> None:
        """Tells who chooses lengths how many proposals stood in each cycle that ran."""
        if self.run.setup.draft is None:
            return
        counts, accepted = np.asarray(rows.counts), np.asarray(rows.accepted)
        stood: dict[Kind, np.ndarray] = {}
        if self.core.lengths.cost is not None:  # else nobody asks, and the device waits for this
            columns = {kind: [job.slot for job in running if kind_of(job.request) == kind] for kind in get_args(Kind)}
            stood = {kind: accepted[:, found][counts[:, found] > 0] for kind, found in columns.items()}
        self.core.lengths.observe(verified, stood, int(np.count_nonzero(counts.any(axis=1))))

    @property
    def context(self) -> float:
        """Mean tokens of a running sequence."""
        running = self.run.slots.decoding
        return sum(job.filled for job in running) / max(1, len(running))

    def _setup(self, length: int) -> Setup:
        return self.run.setup.verifying(length)

    def _jobs(self, length: int) -> Jobs:
        return Jobs(self.core, self._setup(length), self.run.stop_width)

    def _width(self, length: int, cycles: int) -> int:
        """Columns of the page table that so many cycles need."""
        pages = max((self.run.pages_for(job, cycles, length) for job in self.run.slots.decoding), default=1)
        return self.core.width_of(pages * self.core.page_size)

    def _status(self, slots: int, cycles: int, length: int) -> Status:
        sizes = slots, self._width(length, cycles)
        return self._status_of((self._setup(length), *sizes), partial(self._jobs(length).loop, *sizes))

    def _status_of(self, name: tuple, job: Callable[[], partial]) -> Status:
        """The status of what `job` makes a job of; its shapes, which take long to find out, are asked for once an engine."""
        keys, name = self.core.keys, (*name, self.run.stop_width)
        if name not in keys:
            keys[name] = self.core.programs.key(*job().args)
        return self.core.programs.status(keys[name])
