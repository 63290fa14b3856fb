"""Prompts on their way into the pages, a bounded part of them between two calls for cycles."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import jax
import numpy as np

from dflash_jax.decoding.prefill import prefill_chunk
from dflash_jax.engine.ahead import First
from dflash_jax.engine.requests import Update, on_host, request_rows
from dflash_jax.engine.resources import LEAST_TOKENS
from dflash_jax.engine.slots import Job
from dflash_jax.engine.warmup import admit_program

if TYPE_CHECKING:
    from dflash_jax.engine.scheduler import Run


class Prompts:
    """Prefills what the requests of one run hold when they take their slots, and gives out their first tokens."""

    def __init__(self, run: "Run"):
        self.run, self.core = run, run.core
        self.spent = 0  # tokens of prompts since the last cycles

    def start(self) -> bool:
        """A part of a long prompt, or short ones together, as many as `max_chunk` tokens allow; False where these were spent since
        the last cycles, or nobody can enter."""
        run, core = self.run, self.core
        if run.ahead.calls and not run.ahead.allowed:
            return False
        jobs = self._gather()
        if not jobs:
            return False
        rows, size = core.buckets.prompts([job.length - job.filled for job in jobs])
        cost = max(rows * size, LEAST_TOKENS)
        if run.slots.decoding and self.spent and self.spent + cost > core.max_chunk:
            return False
        self.spent += cost
        self._prefill(jobs, rows, size)
        if run.slots.filling:
            self.spent = core.max_chunk
        return True

    def _gather(self) -> list[Job]:
        """Requests whose prompts are prefilled next: the first of those that are not in the pages, and all that fit beside it."""
        run, jobs = self.run, self.run.slots.filling
        if not jobs:
            run.admit()
        while jobs:
            room = self.core.buckets.room([job.length - job.filled for job in jobs])
            if room <= 0 or not run.admit(room):
                break
        return list(jobs)

    def _prefill(self, jobs: Sequence[Job], rows: int, size: int) -> None:
        """One call for the next chunk of a prompt, or for whole ones in pieces of `size`; with the last of each its first token."""
        run, core = self.run, self.core
        pieces = [(job, start) for job in jobs for start in range(job.filled, job.length, size)][:rows]
        ids, (starts, lengths) = np.zeros((rows, size), np.int32), np.zeros((2, rows), np.int32)
        width = core.width_of(max(min(start + size, job.length) for job, start in pieces))
        table, ends = np.full((rows, width), -1, np.int32), dict[Job, int]()
        contexts = {job: job.context for job in jobs}
        for row, (job, start) in enumerate(pieces):
            piece = contexts[job][start : start + size]
            ids[row, : len(piece)], starts[row], lengths[row] = piece, start, len(piece)
            table[row], ends[job] = run.slots.tables[job.slot, :width], row
        pages = (run.state.target_pages, run.state.draft_pages)
        step = (core.weights, table, pages, ids, starts, lengths)
        pages, logits = core.programs.call(prefill_chunk, (run.setup.for_prefill(),), (2,), *step)
        run.keep(replace(run.state, target_pages=pages[0], draft_pages=pages[1]))
        for job, row in ends.items():
            job.filled = int(starts[row] + lengths[row])
        self._admit({row: job for job, row in ends.items() if job.filled == job.length}, logits)

    def _admit(self, jobs: dict[int, Job], logits: jax.Array) -> None:
        """Puts requests into their slots on the device; their first tokens are emitted unless that was before a slot was lost.

        Args:
          jobs: by rows of `logits`.
        """
        run, core = self.run, self.core
        if not jobs:
            return
        slots = np.full((logits.shape[0],), len(run.slots.jobs), np.int32)
        slots[list(jobs)] = [job.slot for job in jobs.values()]
        named = [(job.request, job.tokens) if (job := jobs.get(row)) else None for row in range(len(slots))]
        arrays = request_rows(run.setup, named, run.stop_width, core.dtype)
        state, emitted = core.programs.call(admit_program, (run.setup,), (1,), None, run.state, slots, arrays, logits)
        run.keep(state)
        for job in jobs.values():
            run.retired[job.slot] = False
            run.slots.filled(job)
        if first := [(job, row) for row, job in jobs.items() if not job.tokens]:
            run.ahead.add(First(first, emitted))

    def first_tokens(self, item: First) -> Iterator[Update]:
        """The updates of prompts that are in the pages, but for requests that were cancelled since."""
        here = [(job, row) for job, row in item.rows if job.slot >= 0]
        if not here:
            return
        emitted = jax.tree.map(lambda leaf: leaf[None], on_host(item.emitted, logprobs=self.run.setup.logprobs))
        self.run.ahead.seen()
        now, updates = time.perf_counter(), []
        for job, row in here:
            spent = now - job.started - (self.core.programs.compile_s - job.compiled)
            update = Update.collect(job.request, emitted, row, first=True, seconds=spent)
            self.run.account(job, update)
            updates.append(update)
        yield from (update for update in updates if update.index not in self.run.cancelled)
