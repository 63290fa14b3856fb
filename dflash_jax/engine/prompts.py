"""Prompts on their way into the pages, a bounded part of them between two calls for cycles."""

import operator
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import jax
import numpy as np

from dflash_jax.decoding.prefill import prefill_chunk
from dflash_jax.decoding.state import Emitted
from dflash_jax.engine.ahead import First
from dflash_jax.engine.core import LEAST_TOKENS
from dflash_jax.engine.slots import Job
from dflash_jax.engine.warmup import admit_program
from dflash_jax.programs import round_up
from dflash_jax.requests import Update, on_host, request_row

if TYPE_CHECKING:
    from dflash_jax.engine.run import Run


class Prompts:
    """Prefills what the requests of one run hold when they take their slots, and gives out their first tokens."""

    def __init__(self, run: "Run"):
        self.run, self.core = run, run.core
        self.spent = 0  # tokens of prompts since the last cycles

    def start(self) -> bool:
        """A part of a long prompt, or one of several prompts that together cost no more than `max_chunk` tokens; False where that
        was spent since the last cycles, or nobody can enter."""
        run, core = self.run, self.core
        if run.ahead.calls and not run.ahead.allowed:
            return False
        run.admit()
        if (job := run.slots.prefilling) is None:
            return False
        size = round_up(len(job.context) - job.filled, core.buckets.chunk)
        cost = max(size, LEAST_TOKENS)
        if run.slots.decoding and self.spent and self.spent + cost > core.max_chunk:
            return False
        self.spent += cost
        emitted = self._chunk(job, size)
        if job is run.slots.prefilling:
            self.spent = core.max_chunk
        elif emitted is not None:
            run.ahead.add(First(job, emitted))
        return True

    def _chunk(self, job: Job, size: int) -> Emitted | None:
        """The next chunk of a prompt; with the last one the first token, unless it was emitted before the slot was lost."""
        run, core, context = self.run, self.core, job.context
        chunk = context[job.filled : job.filled + size]
        ids = np.zeros((1, size), np.int32)
        ids[0, : len(chunk)] = chunk
        table = run.slots.table(core.width_of(job.filled + len(chunk)), job.slot)
        pages = (run.state.target_pages, run.state.draft_pages)
        step = (core.weights, table, pages, ids, np.int32(job.filled), np.int32(len(chunk)))
        pages, logits = core.programs.call(prefill_chunk, (run.setup.for_prefill(),), (2,), *step)
        run.keep(replace(run.state, target_pages=pages[0], draft_pages=pages[1]))
        job.filled += len(chunk)
        if job.filled < len(context):
            return None
        row = request_row(run.setup, job.request, run.stop_width, core.dtype, job.tokens)
        state, emitted = core.programs.call(
            admit_program, (run.setup,), (1,), None, run.state, np.int32(job.slot), row, logits
        )
        run.keep(state)
        job.decoding, run.retired[job.slot] = True, False
        run.slots.publish(job)
        return None if job.tokens else emitted

    def first_token(self, item: First) -> Iterator[Update]:
        """The update of a prompt that is in the pages, unless its request was cancelled since."""
        job = item.job
        if job.slot >= 0:
            rows = jax.tree.map(operator.itemgetter(None), on_host(item.emitted, logprobs=self.run.setup.logprobs))
            self.run.ahead.seen()
            spent = time.perf_counter() - job.started - (self.core.programs.compile_s - job.compiled)
            update = Update.collect(job.request, rows, 0, first=True, seconds=spent)
            self.run.account(job, update)
            yield update
