"""One pass over requests: who gets a slot, what the device does next, and what comes back."""

import inspect
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any, get_args

import jax
import numpy as np

from dflash_jax.decoding.loop import loop
from dflash_jax.decoding.resize import without_pools
from dflash_jax.decoding.sampling import Mode
from dflash_jax.decoding.state import DecodeState, Setup
from dflash_jax.engine import shutdown as leaving
from dflash_jax.engine.ahead import Ahead, Call, First
from dflash_jax.engine.buckets import round_up
from dflash_jax.engine.fitting import Fitting
from dflash_jax.engine.memory import named_memory_errors
from dflash_jax.engine.prompts import Prompts
from dflash_jax.engine.requests import Request, Update, empty_state, on_host
from dflash_jax.engine.resources import CYCLES_PER_CHUNK, MAX_CYCLES, STOP_WIDTH, Resources
from dflash_jax.engine.slots import Job, Slots
from dflash_jax.engine.warmup import first_jobs, resize_program
from dflash_jax.errors import DFlashError, ParameterError

MODES: tuple[Mode, ...] = get_args(Mode)  # each serves the ones before it too


class Run:
    """One pass over a list of requests. Iterating yields `Update`s; closing it gives every page back.

    Requests are admitted in order of arrival, each as soon as a slot is free and the pool has room for its prompt beside what the
    running ones need for their next few cycles. A pool that runs out is answered with fewer cycles for each look at the results,
    then by taking the pages of the youngest request, which is prefilled again later and goes on where it was.
    """

    def __init__(self, core: Resources, requests: Sequence[Request], *, draft: bool, cycles: int, slots: int | None):
        self.core, self.cycles = core, max(1, min(cycles, MAX_CYCLES))
        self.setup = core.setup(mode="greedy", draft=draft)
        self.waiting: deque[Job] = deque()
        self.arrivals = self.preemptions = 0
        self.cancelled: set[int] = set()
        stops = max((len(request.stop_ids) for request in requests), default=0)
        self.stop_width = max(STOP_WIDTH, 1 << (stops - 1).bit_length() if stops else 0)
        self.most_slots = count = round_up(max(1, len(requests) if slots is None else slots), core.buckets.batch)
        root = (b"with drafter" if draft else b"target alone") if core.share_prefixes else None
        self.slots = Slots(count, core.buckets.width[-1], core.allocator, core.page_size, root)
        self.retired = np.zeros((count,), bool)
        for request in requests:
            self._queue(request)
        self.prompts, self.fitting, self.ahead = Prompts(self), Fitting(self), Ahead(self)
        self._updates = self._serve()
        leaving.watch(self._updates)

    def __iter__(self) -> Iterator[Update]:
        return self._updates

    def add(self, request: Request) -> None:
        """Queues one more request, between two updates.

        Raises:
          PromptError, CapacityError: see `Resources.check`.
          ParameterError: it has more stop ids than the run was started for, or the index of one that was cancelled.
          DFlashError: the run has ended.
        """
        if inspect.getgeneratorstate(self._updates) == inspect.GEN_CLOSED:
            raise DFlashError("the run has ended, nobody would serve the request: start another run")
        if request.index in self.cancelled:
            raise ParameterError(f"index {request.index} was cancelled in this run: give the request another one")
        self.core.check(request)
        if len(request.stop_ids) > self.stop_width:
            raise ParameterError(
                f"{len(request.stop_ids)} stop ids, a run started without them takes {self.stop_width}"
            )
        self.ahead.open()
        self._queue(request)

    def cancel(self, index: int) -> None:
        """Ends the request with this index before its next cycle; no update of it follows."""
        self.cancelled.add(index)

    def close(self) -> None:
        """Ends the run; every page is free afterwards."""
        self._updates.close()

    def first_jobs(self) -> Iterator[Callable[[], None]]:
        """Functions that compile, one program each, what this run will call first. Weights may still be shapes."""
        yield from first_jobs(
            self.core, self.setup, [job.request for job in self.waiting], slots=len(self.slots.jobs),
            stop_width=self.stop_width, cycles=(min(self.cycles, CYCLES_PER_CHUNK), self.cycles),
            length=self.fitting.first_length([job.request for job in self.waiting]),
        )  # fmt: skip

    def _queue(self, request: Request) -> None:
        """Puts a request last, and makes the run's programs ones that serve it too."""
        mode: Mode = request.mode if MODES.index(request.mode) > MODES.index(self.setup.mode) else self.setup.mode
        logprobs = self.setup.logprobs or request.params.logprobs is not None
        self.setup: Setup = replace(self.setup, mode=mode, logprobs=logprobs)
        self.waiting.append(Job(request, self.arrivals))
        self.arrivals += 1

    def _serve(self) -> Generator[Update]:
        core, ours = self.core, False
        try:
            with core.taking:
                if core.busy:
                    raise DFlashError(
                        "this model is generating already: finish or close that stream first, or load the model twice"
                    )
                core.busy = ours = True
            if core.allocator.num_free < core.allocator.num_pages:
                # Nobody else runs: an interrupt came while a run that was interrupted gave its pages back.
                core.allocator.reclaim()
            with named_memory_errors("requests were served"):
                try:
                    yield from self._turns()
                except GeneratorExit:  # also when Python ends, with no name left of what is below
                    raise
                except jax.errors.JaxRuntimeError:
                    core.lose_pools()
                    raise
        except BaseException:
            # An interrupt can come at any point, also in the middle of a change of the account.
            if ours:
                core.allocator.reclaim()
            raise
        finally:
            if ours:
                core.busy = False

    def _turns(self) -> Iterator[Update]:
        core = self.core
        self.state = empty_state(self.setup, len(self.slots.jobs), self.stop_width, core.dtype, core.take_pools())
        while self.waiting or self.slots.taken:
            leaving.check()
            # Cycles go behind a prompt before its first token is read, also where nobody else runs: on an H200 a lone user's came
            # 2 ms earlier when it was read first (6.4 for 8.5), but the device stood still while cycles were called, and 64 tokens
            # took 1 ms longer, 2 to 3 %.
            while not self.ahead.full and self._start():
                pass
            if self.ahead.items:
                item = self.ahead.take()
                yield from self.prompts.first_tokens(item) if isinstance(item, First) else self._look(item)

    def _start(self) -> bool:
        """Gives the device the next part of a prompt, or cycles; False where there is nothing, or results have to be seen first."""
        self.drop_cancelled()
        return self.prompts.start() or self._start_cycles()

    def drop_cancelled(self) -> None:
        """Takes queue places and slots from requests that were cancelled since the last look."""
        if self.cancelled:
            self.waiting = deque(job for job in self.waiting if job.request.index not in self.cancelled)
            for job in self.slots.taken:
                if job.request.index in self.cancelled:
                    self._take_slot(job)

    def _take_slot(self, job: Job) -> None:
        """The device learns of it with the next cycles."""
        self.retired[job.slot] = True
        self.slots.leave(job)

    @property
    def wants_slots(self) -> bool:
        """Whether somebody waits who could have a slot if there were as many as there may be."""
        return bool(self.waiting) and None not in self.slots.jobs and len(self.slots.jobs) < self.most_slots

    def admit(self, most: int | None = None) -> bool:
        """Gives a slot to the request that has waited longest, if its pages lack at most so many tokens."""
        if not self.waiting:
            return False
        if self.wants_slots and not self.ahead.calls:
            self._fit_slots(self.most_slots)
        job, few = self.waiting[0], min(self.cycles, CYCLES_PER_CHUNK)
        growth = sum(
            max(0, self.pages_for(other, few, self.setup.offered) - len(other.pages)) for other in self.slots.taken
        )
        if not self.slots.enter(job, self.core.pages_for(job.length), spare=growth, most=most):
            return False
        self.waiting.popleft()
        job.started, job.compiled = time.perf_counter(), self.core.programs.compile_s
        return True

    def _start_cycles(self) -> bool:
        if not self.slots.decoding:
            return False
        started = time.perf_counter(), self.core.programs.compile_s
        if self.ahead.items:
            planned = self.ahead.plan(self._patience())
            if planned is None:
                return False
            setup, cycles = planned
        else:
            self._fit_slots()
            setup, cycles = self.fitting.lengths(self._patience())
            cycles = self._make_room(cycles, setup.width)
            if not self.slots.decoding:  # the youngest left, and older ones are at their prompts
                return True
        running, self.prompts.spent = self.slots.decoding, 0
        table = self.slots.table(self.core.width_of(max(len(job.pages) for job in running) * self.core.page_size))
        state, rows = self.core.programs.call(loop, (setup, MAX_CYCLES), (2,), *self.loop_arguments(table, cycles))
        self.keep(state)
        self.retired[:] = False
        self.ahead.add(Call([(job, job.slot) for job in running], rows, setup, cycles, table.shape[1], *started))
        return True

    def _look(self, call: Call) -> Iterator[Update]:
        """Waits for the results of cycles."""
        running = [(job, slot) for job, slot in call.running if job.slot == slot]
        if not running:  # all have left since they were started
            return
        asked = time.perf_counter()
        host = on_host(call.rows, logprobs=call.setup.logprobs)
        spent, updates = self.ahead.seconds(call, time.perf_counter() - asked), []
        self.fitting.learn([job for job, _ in running], call.setup.width, host)
        for job, slot in running:
            update = Update.collect(job.request, host, slot, first=False, seconds=spent)
            job.filled, job.fresh = job.filled + len(update.tokens), update.counts[-1]
            self.account(job, update)
            updates.append(update)
        yield from (update for update in updates if update.index not in self.cancelled)

    def _patience(self) -> int:
        """Cycles until the next look at most."""
        if not self.slots.filling:
            return self.cycles
        # A slot that stands empty costs as much as a busy one: it is filled before others go far.
        return 1 if self.waiting and None in self.slots.jobs else min(self.cycles, CYCLES_PER_CHUNK)

    def loop_arguments(self, table: Any, cycles: int) -> tuple:
        """What `loop` is called with after its static arguments; `table` may be a shape."""
        waits = np.bool_(bool(self.waiting))
        return self.core.weights, table, self.state, np.int32(cycles), waits, self.retired.copy()

    def _fit_slots(self, wanted: int | None = None) -> None:
        """Moves the sequences into fewer slots where that pays, or into `wanted`."""
        count = self.fitting.slots() if wanted is None else wanted
        if count != len(self.slots.jobs):
            rows = self.slots.compact(count)
            self.retired = np.where(rows < 0, False, self.retired[rows])
            pools = {"target_pages": self.state.target_pages, "draft_pages": self.state.draft_pages}
            moved = self.core.programs.call(resize_program, (), (), None, without_pools(self.state), rows)
            self.keep(replace(moved, **pools))

    def account(self, job: Job, update: Update) -> None:
        """Adds an update's tokens to its request, and takes its slot if they end it."""
        job.tokens += update.tokens
        job.request.produced = len(job.tokens)
        update.finish(job.request)
        if update.finish_reason is not None:
            self.slots.leave(job)

    def _make_room(self, cycles: int, length: int) -> int:
        """Gives each running request the pages that cycles may write, as many cycles as the pool allows, and returns how many.

        Where not even one is possible the youngest request leaves. The oldest always goes on: alone it fits (`Resources.check`).
        """
        while running := self.slots.decoding:
            available = self.core.allocator.num_free + sum(len(job.pages) for job in running)
            for count in range(cycles, 0, -1):
                wanted = {job: self.pages_for(job, count, length) for job in running}
                if sum(wanted.values()) <= available:
                    # What some give back is what others take.
                    for job in sorted(running, key=lambda job: wanted[job] - len(job.pages)):
                        self.slots.resize(job, wanted[job])
                    return count
            self._preempt(self.slots.youngest)
        return 0

    def _preempt(self, job: Job) -> None:
        self._take_slot(job)
        self.waiting.appendleft(job)
        self.preemptions += 1

    def pages_for(self, job: Job, cycles: int, length: int) -> int:
        """Pages of a running request before so many cycles of `length` tokens, behind those that were started: max_tokens limits
        its tokens too."""
        most = min(job.coming + (cycles - 1) * length, job.remaining - 1)
        return self.core.pages_for(job.length + most)

    def keep(self, state: DecodeState) -> None:
        """The state is the pools' only owner: the engine must know the newest one at every moment."""
        self.state = state
        self.core.keep_pools(state.target_pages, state.draft_pages)
