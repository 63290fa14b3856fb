"""Continuous-batching scheduler: `submit`, `step`, `abort`.

A step starts what can be started (a part of a prompt, cycles) and looks at what came back first. It is long-lived and owns no
thread: whoever waits for results steps it, for everybody (`Scheduler.advance`). `Scheduler` decides who gets a slot, pages and the
next call; `Batch` makes the calls; `InFlight` keeps what was started and not looked at; `program_choice` says which program runs.
"""

import itertools
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Event
from typing import Any

import jax

from dflash_jax.decoding.state import Setup
from dflash_jax.engine import shutdown
from dflash_jax.engine.batch import Batch
from dflash_jax.engine.buckets import round_up
from dflash_jax.engine.in_flight import DecodeCall, InFlight, PrefillResult, Row
from dflash_jax.engine.memory import named_memory_errors
from dflash_jax.engine.program_choice import choose_cycles, choose_needs, choose_slots, learn, status_of
from dflash_jax.engine.requests import Needs, Request, Update, on_host
from dflash_jax.engine.resources import CYCLES_PER_CHUNK, LEAST_TOKENS, MAX_CYCLES, Company, Resources
from dflash_jax.engine.slots import Job, Sink
from dflash_jax.errors import DFlashError

# Seconds after which a thread that waits for another one's steps looks by itself.
PATIENCE_S = 0.05
# Readers that are woken before the next calls are made: more of them would take Python from the thread that makes these.
FEW_READERS = 8


class Mailbox:
    """Updates of one caller's requests, and a bell for the thread that waits for them."""

    def __init__(self):
        self.items: deque[tuple[int, Update | Exception]] = deque()
        self.bell = Event()

    def put(self, ticket: int, what: Update | Exception) -> None:
        self.items.append((ticket, what))
        if not self.bell.is_set():
            self.bell.set()


class Lead:
    """Ownership of the scheduler's steps: one caller at a time, or nobody.

    Not a lock: an interrupt may come between the instruction that takes a lock and the one that remembers it. Who leads here is
    found in one place, whenever it asks again.
    """

    def __init__(self):
        self._leader: dict[str, object] = {}

    def claim(self, who: object) -> bool:
        """Takes the lead if nobody has it; whether `who` has it now."""
        return self._leader.setdefault("leader", who) is who

    def release(self, who: object) -> None:
        if self._leader.get("leader") is who:
            self._leader.clear()

    @property
    def held(self) -> bool:
        return bool(self._leader)


@dataclass(frozen=True)
class SchedulerStats:
    """Counters of a scheduler, as of its last step.

    Attributes:
      running: requests with a slot.
      waiting: requests without one.
      preemptions: times that a request lost its slot for want of pages.
      cached_tokens: tokens of contexts that were found in pages.
    """

    running: int = 0
    waiting: int = 0
    preemptions: int = 0
    cached_tokens: int = 0


class Scheduler:
    """Serves requests of any number of callers, from any number of threads, in one batch.

    Requests are admitted in order of arrival, each as soon as a slot is free and the pool has room for its prompt beside what the
    running ones need for their next few cycles. A pool that runs out is answered with fewer cycles for each look at the results,
    then by taking the pages of the youngest request, which is prefilled again later and goes on where it was.

    An error ends the requests that the failed call was for. An interrupt ends none: it leaves the step in the thread that took it.
    After both, the batch is given up, every page is free, and the other requests are prefilled again and go on where they were.

    Args:
      core: kept alive by whoever calls, and by the batch while there is one.

    Attributes:
      batch: None while nothing runs.
      inflight: what was started and not looked at.
      stats: replaced after each step; may be read by any thread.
      calling: whether the thread that steps has results and has not made the calls behind them: others leave Python to it. May be
        read by any thread.
    """

    def __init__(self, core: Resources):
        self._core = weakref.ref(core)
        self.inflight = InFlight(core)
        self.batch: Batch | None = None
        self.stats = SchedulerStats()
        self.calling = False
        self._tickets = itertools.count()
        # `deque` and `dict` change in one step that no thread sees half of.
        self._inbox: deque[Job | int] = deque()  # requests, and tickets that are aborted
        self._news = Event()
        self._live: dict[int, Job] = {}
        self._waiting: deque[Job] = deque()
        self._unsent: deque[tuple[Job, Update]] = deque()
        self._bells: dict[Callable[[], None], None] = {}  # of sinks that have got something
        self._served: Sequence[Job] = ()  # whom the call in hand is for
        self._most_slots = 0
        self._spent = 0  # tokens of prompts since the last cycles
        self._ended = 0  # requests that the last cycles ended, and which none has followed yet
        self._preemptions = self._cached = 0
        self._torn = False  # a step has begun and not ended
        self._lead = Lead()
        self._followers: dict[Mailbox, None] = {}
        shutdown.watch(self)

    # Any thread.

    def submit(
        self, request: Request, sink: Sink, *, draft: bool, cycles: int = MAX_CYCLES, slots: int | None = None
    ) -> int:
        """Queues a request that `Resources.check` has passed, and returns its ticket.

        Args:
          sink: gets every update, or an error, with the ticket; nothing after the last update, an error, or `abort`.
          draft: False decodes with the target alone. Requests of both kinds do not run side by side: each kind waits for the end
            of the other where that came first.
          cycles: between two looks at the results, at most; small for streaming. Where several run, the smallest counts.
          slots: how many requests are to run side by side; None for as many as there are, at most `max_batch` either way.
        """
        (ticket,) = tickets = self.tickets(1)
        self.submit_all(dict.fromkeys(tickets, request), sink, draft=draft, cycles=cycles, slots=slots)
        return ticket

    def tickets(self, count: int) -> list[int]:
        """Tickets for `submit_all`."""
        return [next(self._tickets) for _ in range(count)]

    def submit_all(
        self,
        requests: Mapping[int, Request],
        sink: Sink,
        *,
        draft: bool,
        cycles: int = MAX_CYCLES,
        slots: int | None = None,
    ) -> None:
        """Queues several at once, by tickets drawn before: none starts before all are there. See `submit`."""
        cycles = max(1, min(cycles, MAX_CYCLES))
        self._inbox.extend([Job(request, ticket, sink, draft, cycles, slots) for ticket, request in requests.items()])
        self._news.set()

    def abort(self, ticket: int) -> None:
        """Ends a request with the next step; does nothing where it has ended. Its sink may still get what was in flight."""
        self._inbox.append(ticket)
        self._news.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until something is submitted or aborted. For a thread that steps all the time, where `step` has nothing to do."""
        return self._news.wait(timeout)

    @property
    def stepping(self) -> bool:
        """Whether a thread is inside of a step."""
        return self._lead.held

    # The thread that steps.

    def step(self) -> bool:
        """One step, by this thread or by the one that is at it; False when there is nothing left to do."""
        self.advance(Mailbox())
        return bool(self._live or self._inbox)

    def advance(self, box: Mailbox) -> None:
        """Brings the requests whose sink is `box` nearer to their end: by one step, or by waiting while another thread steps.

        A thread that waits is woken by what comes for it and by the end of the other's step: then it may be the next to step.
        """
        box.bell.clear()
        self._followers[box] = None
        try:
            if box.items:
                return
            # With the lead already: as Python ends it waits for who has it, and here the others end.
            leads = self._lead.claim(box)
            shutdown.check()
            if leads:
                self._whole(self._turn)
            else:
                box.bell.wait(PATIENCE_S)
        finally:
            self._followers.pop(box, None)
            self._release(box)

    def settle(self, box: Mailbox) -> None:
        """Has aborted requests give back slots and pages now, unless a thread that steps will."""
        try:
            if self._lead.claim(box):
                self._whole(self._tidy)
        finally:
            self._release(box)

    def _release(self, box: Mailbox) -> None:
        """Leaves the lead to another thread. What was aborted meanwhile is seen to: perhaps nobody steps any more."""
        self._lead.release(box)
        if not self._lead.held:
            for other in list(self._followers)[:1]:
                other.bell.set()
        while self._inbox and self._lead.claim(box):
            try:
                self._whole(self._tidy)
            finally:
                self._lead.release(box)

    def _whole(self, work: Callable[[], None]) -> None:
        """Does `work`, and makes the scheduler whole again where it does not end."""
        if self._torn:
            self._recover()
        self._torn, self._served = True, ()
        try:
            work()
        except Exception as error:
            self._fail(error)
        except BaseException:  # an interrupt can come at any point, also in the middle of a change of the account
            self._recover()
            raise
        self._torn = False

    def _tidy(self) -> None:
        self._drain()
        if not self._live:
            self._ring()
            self._rest()
            self.calling = False
        self._count()

    def _turn(self) -> None:
        """Starts what can be started, and looks at what came back first."""
        self._tidy()
        if not self._live:
            return
        core = self._engine()
        with named_memory_errors("requests were served"):
            try:
                batch = self._ready_batch(core)
                # Cycles go behind a prompt before its first token is read, also where nobody else runs: on an H200 a lone user's
                # came 2 ms earlier when it was read first (6.4 for 8.5), but the device stood still while cycles were called, and
                # 64 tokens took 1 ms longer, 2 to 3 %.
                if core.late_dispatch:
                    self._await_company(batch)
                while not self.inflight.full and (self._start_prompts(batch) or self._start_cycles(batch)):
                    pass
                self._send()
                # Readers have Python while this thread waits for the device, not while it makes calls.
                self._ring()
                self.calling = False
                if self.inflight.items:
                    self._look(batch, self.inflight.take())
                self._count()
            except jax.errors.JaxRuntimeError:
                core.lose_pools()
                raise

    def _await_company(self, batch: Batch) -> None:
        """Waits for those who may follow requests that have just ended, as long as the device does not wait for the next call.

        A user who is answered asks again a moment later. In a call made at once they would have no part, and wait for its end.
        """
        began, empty = time.perf_counter(), batch.slots.jobs.count(None)
        if self.inflight.online:
            while (
                self._ended and len(self._waiting) < empty and (left := self.inflight.latest - time.perf_counter()) > 0
            ):
                if self._news.wait(left):
                    self._drain()
        self.inflight.held += time.perf_counter() - began

    def _engine(self) -> Resources:
        core = self._core()
        assert core is not None, "whoever steps keeps the engine"
        return core

    # Who is there.

    def _drain(self) -> None:
        """Takes in what was submitted and aborted. Each is looked at before it is taken: an interrupt loses none."""
        self._news.clear()
        while self._inbox:
            what = self._inbox[0]
            if type(what) is int:
                self._drop(what)
            else:
                self._queue(what)
            self._inbox.popleft()

    def _queue(self, job: Any) -> None:
        if job.ticket in self._live:
            return
        if self.batch is not None:
            self.inflight.online = True
        self._live[job.ticket] = job
        self._waiting.append(job)
        self._ended = max(0, self._ended - 1)
        core = self._engine()
        present = len(self._live) if job.wanted_slots is None else job.wanted_slots
        self._most_slots = max(self._most_slots, round_up(max(1, present), core.buckets.batch))

    def _drop(self, ticket: int) -> None:
        """Takes queue place and slot from a request that was aborted."""
        job = self._live.get(ticket)
        if job is None:
            return
        if job.slot < 0:
            self._waiting = deque(other for other in self._waiting if other is not job)
        elif self.batch is not None:
            self.batch.retire(job)
        self._live.pop(ticket, None)

    def _ready_batch(self, core: Resources) -> Batch:
        """The batch, a new one where none runs or where all that run have left it to requests of the other kind."""
        batch = self.batch
        if batch is not None and (batch.slots.taken or not self._waiting or self._fits(self._waiting[0], batch)):
            return batch
        self._rest(still=True)
        for pool in core.groups:
            if pool.allocator.num_free < pool.allocator.num_pages:
                # Nobody runs: an interrupt came while pages were given back after another one.
                pool.allocator.reclaim()
        core.find_scales(job.request.prompt for job in self._waiting)
        with core.taking:
            core.busy = True
        company, most = _company(core, self._waiting[0]), self._most_slots
        # All who wait and are of its kind go first, or requests whose kinds take turns would run one by one. Who comes later stands
        # behind the others, so no kind waits for ever.
        kinds = [_company(core, job) == company for job in self._waiting]
        self._waiting = deque(
            job for fits in (True, False) for job, same in zip(self._waiting, kinds, strict=True) if same is fits
        )
        coming = itertools.islice(self._waiting, most)
        needs = Needs.of(job.needs for job in coming if _company(core, job) == company)
        self.batch = Batch(core, company=company, slots=most, needs=needs)
        return self.batch

    def _fits(self, job: Job, batch: Batch) -> bool:
        """Whether a request may run beside those of a batch."""
        return _company(batch.core, job) == batch.company

    def _rest(self, *, still: bool = False) -> None:
        """Gives up a batch that nobody is in any more, and what was started for those who have left.

        Args:
          still: others wait.
        """
        core, self.batch = self._core(), None
        if core is not None:
            core.busy = False
        self.inflight.clear()
        self._spent = 0
        if not still:
            self._most_slots = 0

    def _recover(self) -> None:
        """After a step that did not end: gives every page back; all live requests wait, in order of arrival."""
        self._torn = True
        self._send(left=True)
        self._ring()
        core = self._core()
        if core is not None:
            for pool in core.groups:
                pool.allocator.reclaim()
        self._rest(still=True)
        for job in self._live.values():
            job.lose_slot()
            if core is not None and core.exact:
                job.begin_again()
        self._waiting = deque(sorted(self._live.values(), key=lambda job: job.ticket))
        self._torn = False

    def _fail(self, error: Exception) -> None:
        """Ends the requests that the failed call was for; all where it was for none in particular."""
        served = [job for job in self._served if job.ticket in self._live] or list(self._live.values())
        for job in served:
            self._live.pop(job.ticket, None)
        self._recover()
        for job in served:
            with suppress(Exception):
                job.sink(job.ticket, error)

    def _count(self) -> None:
        running = 0 if self.batch is None else len(self.batch.slots.taken)
        self.stats = SchedulerStats(running, len(self._live) - running, self._preemptions, self._cached)

    # Prompts, a bounded part of them between two calls for cycles.

    def _start_prompts(self, batch: Batch) -> bool:
        """A part of a long prompt, or short ones together, as many as `max_chunk` tokens allow; False where these were spent since
        the last cycles, or nobody can enter."""
        if self.inflight.calls and not self._goes_ahead(batch):
            return False
        jobs = self._gather(batch)
        if not jobs:
            return False
        core = batch.core
        rows, size = core.buckets.prompts([job.stop - job.filled for job in jobs])
        cost = max(rows * size, LEAST_TOKENS)
        if batch.slots.decoding and self._spent and self._spent + cost > self._prompt_tokens(batch):
            return False
        self._spent += cost
        self.inflight.compute(cost)
        self._served = jobs
        ready, logits = batch.prefill(jobs, rows, size)
        if ready:
            batch.serve(choose_needs(batch, [*batch.slots.decoding, *ready.values()]))
            if (first := batch.admit(ready, logits)) is not None:
                self.inflight.add(first)
        if batch.slots.filling:
            self._spent = core.max_chunk
        return True

    def _prompt_tokens(self, batch: Batch) -> int:
        """Tokens of prompts between two calls for cycles at most."""
        most = batch.core.max_chunk
        comes = self.inflight.online and self._goes_ahead(batch)
        return min(most, self.inflight.tokens_between(batch.cycles)) if comes else most

    def _gather(self, batch: Batch) -> list[Job]:
        """Requests whose prompts are prefilled next: the first of those that are not in the pages, and all that fit beside it in a
        call, and in the time that others wait for it."""
        jobs, most = batch.slots.filling, self._prompt_tokens(batch) if batch.slots.decoding else None
        if not jobs:
            self._admit(batch)
        while jobs := batch.slots.filling:
            room = batch.core.buckets.room([job.length - job.filled for job in jobs], most)
            if room <= 0 or not self._admit(batch, room):
                break
        return list(jobs)

    def _admit(self, batch: Batch, most: int | None = None) -> bool:
        """Gives a slot to the request that has waited longest, if its pages lack at most so many tokens."""
        if not self._waiting or not self._fits(self._waiting[0], batch) or not batch.place(self._waiting[0]):
            return False
        self._served = (self._waiting[0],)
        if self._wants_slots(batch) and not self.inflight.calls:
            batch.move(self._most_slots)
        core, job, few = batch.core, self._waiting[0], min(batch.cycles, CYCLES_PER_CHUNK)
        growth = sum(
            max(0, batch.pages_for(other, few, batch.setup.offered) - other.columns) for other in batch.slots.taken
        )
        longest = core.pages_for(len(job.request.prompt) + job.request.params.max_tokens)
        if not batch.slots.enter(job, core.pages_for(job.length), spare=growth, most=most, longest=longest):
            return False
        self._waiting.popleft()
        batch.begin(job)
        self._cached += job.cached
        job.started, job.compiled = time.perf_counter(), core.programs.compile_s
        return True

    def _wants_slots(self, batch: Batch) -> bool:
        """Whether somebody waits who could have a slot if there were as many as there may be."""
        waits = bool(self._waiting) and self._fits(self._waiting[0], batch)
        return waits and None not in batch.slots.jobs and batch.size < self._most_slots

    # Cycles.

    def _start_cycles(self, batch: Batch) -> bool:
        """Gives the device cycles; False where nobody decodes, or results have to be seen first."""
        if not batch.slots.decoding:
            return False
        self._served = batch.slots.decoding
        if self.inflight.items:
            planned = self._plan_behind(batch)
            if planned is None:
                return False
            setup, cycles = planned
        else:
            batch.move(self._fewest_slots(batch))
            batch.serve(choose_needs(batch, batch.slots.decoding))
            setup, cycles = choose_cycles(batch, self._few_at_most(batch, self._patience(batch)))
            cycles = self._make_room(batch, cycles, setup.width)
            if not batch.slots.decoding:  # the youngest left, and older ones are at their prompts
                return True
        self._spent = 0
        self.inflight.add(batch.decode(setup, cycles, until_any=bool(self._waiting)))
        return True

    def _plan_behind(self, batch: Batch) -> tuple[Setup, int] | None:
        """Setup and number of cycles that may be queued behind everything in flight; None if results have to be read first.

        Gives the running requests the pages for it.
        """
        core, inflight, jobs = batch.core, self.inflight, batch.slots.decoding
        if not self._goes_ahead(batch) or self._wants_slots(batch) or self._fewest_slots(batch) != batch.size:
            return None
        if not any(job.remaining > job.due for job in jobs):
            return None
        cycles = self._few_at_most(batch, self._patience(batch))
        # Stop strings are found on the host, which then aborts; a length is known before.
        if inflight.calls and cycles > CYCLES_PER_CHUNK and any(job.request.params.stop for job in jobs):
            return None
        batch.serve(choose_needs(batch, jobs))
        setup, cycles = choose_cycles(batch, cycles)
        wanted = {job: max(job.columns, batch.pages_for(job, cycles, setup.width)) for job in jobs}
        width = core.width_of(max(wanted.values()) * core.page_size)
        growth = sum(count - job.columns for job, count in wanted.items())
        if growth > batch.slots.free:
            return None
        # Another width is another program, which nobody may have compiled.
        if inflight.calls and width != inflight.calls[-1].width and status_of(batch, setup, width) != "compiled":
            return None
        for job, count in wanted.items():
            batch.slots.resize(job, count)
        return setup, cycles

    def _goes_ahead(self, batch: Batch) -> bool:
        """Whether anything may be started behind cycles, or cycles behind anything.

        Cycles that ask the host return with their results: whatever was started behind them would only delay these.
        """
        if batch.needs.mode == "structured":
            return False
        return self.inflight.returns_early if batch.core.goes_ahead is None else batch.core.goes_ahead

    def _fewest_slots(self, batch: Batch) -> int:
        waits = self._waiting or batch.slots.filling
        return batch.size if waits else choose_slots(batch, self._most_slots)

    def _patience(self, batch: Batch) -> int:
        """Cycles until the next look at most."""
        if not batch.slots.filling:
            return batch.cycles
        # A slot that stands empty costs as much as a busy one: it is filled before others go far.
        return 1 if self._waiting and None in batch.slots.jobs else min(batch.cycles, CYCLES_PER_CHUNK)

    def _few_at_most(self, batch: Batch, cycles: int) -> int:
        """Fewer where requests come while others run: then little is started before the next one."""
        comes = self._goes_ahead(batch) and (self.inflight.online or self._waiting)
        return self.inflight.cycles_behind(self._spent, cycles) if comes else cycles

    def _make_room(self, batch: Batch, cycles: int, length: int) -> int:
        """Gives each running request the pages that cycles may write, as many cycles as the pool allows, and returns how many.

        Where not even one is possible the youngest request leaves. The oldest always goes on: alone it fits (`Resources.check`).
        """
        while running := batch.slots.decoding:
            available = batch.slots.free + sum(job.columns for job in running)
            for count in range(cycles, 0, -1):
                wanted = {job: batch.pages_for(job, count, length) for job in running}
                if sum(wanted.values()) <= available:
                    # What some give back is what others take.
                    for job in sorted(running, key=lambda job: wanted[job] - job.columns):
                        batch.slots.resize(job, wanted[job])
                    return count
            self._preempt(batch, batch.slots.youngest)
        return 0

    def _preempt(self, batch: Batch, job: Job) -> None:
        self._send()  # what was not sent yet is of its tokens as they are
        batch.retire(job)
        if batch.core.exact:
            job.begin_again()
        self._waiting.appendleft(job)
        self._preemptions += 1

    # Results.

    def _look(self, batch: Batch, item: PrefillResult | DecodeCall) -> None:
        """Waits for the results of a call, and sends them."""
        if isinstance(item, DecodeCall):
            self._ended = 0  # who has not followed by now
        rows = [row for row in item.rows if row.here]
        if not rows:  # all have left since it was started
            return
        self._served = [row.job for row in rows]
        read = self._first_tokens if isinstance(item, PrefillResult) else self._decoded
        found = read(batch.core, item, rows)
        ended = [one for one in found if one[1].finish_reason is not None]
        # Who may ask again is told first.
        self._unsent = deque([*ended, *(one for one in found if one[1].finish_reason is None)])
        hurries = ended and self._hurries(batch)
        if hurries:
            for job, update in self._unsent:
                job.take(update)
        self._send(len(ended))  # from here on an interrupt loses none of them
        self._ring()
        if not hurries:
            self._send()
        if len(rows) <= FEW_READERS:
            self._ring()

    def _hurries(self, batch: Batch) -> bool:
        """Whether the device has nothing behind it that takes long: then nobody is told anything before its next call but those who
        may follow, and be in it."""
        online = batch.core.late_dispatch and self.inflight.online and batch.needs.mode != "structured"
        return online and not self.inflight.calls

    def _first_tokens(self, core: Resources, item: Any, rows: Sequence[Row]) -> list[tuple[Job, Update]]:
        emitted = jax.tree.map(lambda leaf: leaf[None], on_host(item.emitted, logprobs=item.logprobs))
        self.inflight.first_seconds(item)
        self.calling = True
        now, updates = time.perf_counter(), []
        for row in rows:
            job = row.job
            spent = now - job.started - (core.programs.compile_s - job.compiled)
            update = Update.collect(job.request, emitted, row.column, first=True, seconds=spent)
            if job.scored:
                update.score(job.request, jax.device_get(job.parts))
                job.parts = []
            update.finish(job.request)
            update.cached = job.cached
            updates.append((job, update))
        return updates

    def _decoded(self, core: Resources, item: Any, rows: Sequence[Row]) -> list[tuple[Job, Update]]:
        asked = time.perf_counter()
        host = on_host(item.emitted, logprobs=item.setup.logprobs)
        waited, self.calling = time.perf_counter() - asked, True
        watch = core.goes_ahead is None and item.setup.mode != "structured"  # whose calls return with their results
        spent, updates = self.inflight.seconds(item, waited, watch=watch), []
        if item.setup.draft is not None:
            learn(core, rows, item.setup, host)
        for row in rows:
            job = row.job
            update = Update.collect(
                job.request, host, row.column, first=False, seconds=spent, start=len(job.tokens), drafts=job.draft
            )
            update.finish(job.request)
            job.filled, job.fresh = job.filled + len(update.tokens), update.counts[-1]
            updates.append((job, update))
        return updates

    def _send(self, count: int | None = None, *, left: bool = False) -> None:
        """Accounts for updates and sends them. What an interrupt leaves is sent again: sinks know it by `Update.start`.

        Args:
          count: the first of them alone; None for all.
          left: slots and pages are nobody's any more.
        """
        keep = 0 if count is None else len(self._unsent) - count
        while len(self._unsent) > keep:
            job, update = self._unsent[0]
            if job.ticket in self._live:
                self._account(job, update, left=left)
            self._unsent.popleft()

    def _ring(self) -> None:
        """Wakes who reads what was sent."""
        while self._bells:
            bell = next(iter(self._bells))
            with suppress(Exception):  # its loop has been closed: the next update says so to its sink
                bell()
            self._bells.pop(bell, None)  # last: an interrupt loses none

    def _account(self, job: Job, update: Update, *, left: bool) -> None:
        """Adds an update's tokens to its request, takes its slot if they end it, and sends it."""
        if job.follower is not None and job.follower.error:
            self._give_up(job, job.follower.error)
            return
        job.take(update)
        ends = update.finish_reason is not None
        if ends and job.slot >= 0 and not left and self.batch is not None:
            self.batch.slots.leave(job)
        try:
            if (new := update.behind(job.given)) is not None and (bell := job.sink(job.ticket, new)) is not None:
                self._bells[bell] = None
        except Exception as error:  # it can take no more
            self.abort(job.ticket)
            with suppress(Exception):
                job.sink(job.ticket, error)
        if ends:
            self._live.pop(job.ticket, None)
            self._ended += 1

    def _give_up(self, job: Job, reason: str) -> None:
        """Ends a request whose grammar cannot be followed any further: it passed a bound of llguidance's."""
        if job.slot >= 0 and self.batch is not None:
            self.batch.retire(job)
        self._live.pop(job.ticket, None)
        with suppress(Exception):
            job.sink(job.ticket, DFlashError(f"the text cannot be kept to its structure any further: {reason:.200}"))


def _company(core: Resources, job: Job) -> Company:
    return core.company(job.draft, job.needs)
