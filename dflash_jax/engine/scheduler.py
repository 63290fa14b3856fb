"""Continuous-batching scheduler: `submit`, `step`, `abort`.

A step starts what can be started (a part of a prompt, cycles) and looks at what came back first. It is long-lived and owns no
thread: whoever waits for results steps it, for everybody (`Scheduler.advance`). `Scheduler` decides who gets a slot, pages and the
next call; `Batch` makes the calls; `InFlight` keeps what was started and not looked at.
"""

import itertools
import math
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Event
from typing import Any, NamedTuple

import jax
import numpy as np

from dflash_jax.cache.groups import table_width
from dflash_jax.compile.programs import Status, start_compiling
from dflash_jax.decoding.grammar_masks import NO_GRAMMAR, Follower, masks_of
from dflash_jax.decoding.grammar_tables import GrammarTables
from dflash_jax.decoding.loop import loop
from dflash_jax.decoding.prefill import Caches, Pictured, prefill_chunk, prefill_scored
from dflash_jax.decoding.state import DecodeState, Emitted, Setup, without_pools
from dflash_jax.engine import shutdown
from dflash_jax.engine.buckets import round_up
from dflash_jax.engine.cascade import Sharers, Sharing, common_pages, shared_argument
from dflash_jax.engine.masked_cycles import masked_cycles
from dflash_jax.engine.memory import named_memory_errors
from dflash_jax.engine.requests import (
    ADJUSTING,
    Needs,
    Request,
    Update,
    adjustments,
    begin_copies,
    empty_state,
    on_host,
    request_arrays,
    request_rows,
)
from dflash_jax.engine.resources import (
    CYCLES_PER_CHUNK,
    LEAST_TOKENS,
    MAX_CYCLES,
    MOST_IN_FLIGHT,
    Company,
    Resources,
)
from dflash_jax.engine.slots import Job, Sink, Slots
from dflash_jax.engine.verify_policy import Kind, Length, Served, kind_of
from dflash_jax.engine.warmup import Jobs, admit_program, copy_program, resize_program
from dflash_jax.errors import DFlashError

# Cycles of a call that stands before a prompt, or before one that may come, at first. Prompts have the time beside so many at
# least.
FEW_CYCLES = 2
# One cycle is a call where it takes the device so many times as long as the call the host. Elsewhere the cycles of a call take
# about as long as the host for a prompt, its first token, the next cycles and what these gave: so many calls for cycles.
LONG_CYCLE, HOST_CALLS = 2.0, 3.5
# Seconds that results take to the host at most which are there when they are asked for and were copied ahead.
READY_S = 1e-3
# Seconds after which a thread that waits for another one's steps looks by itself.
PATIENCE_S = 0.05
# Of a call on the device, the part behind which the next one is made at the latest: how long it takes is only guessed.
LATEST = 0.7
# Readers that are woken before the next calls are made: more of them would take Python from the thread that makes these.
FEW_READERS = 8
# Where requests come while others run: prompts and the cycles behind them together, of the time that those cycles take alone, about
# at most.
STRETCH = 1.35


class Row(NamedTuple):
    """Where a request's results are among those of a call.

    Attributes:
      stay: the request's stay in a slot that they belong to.
      column: of the call's rows.
    """

    job: Job
    stay: int
    column: int

    @property
    def here(self) -> bool:
        """Whether somebody waits for them: the request has kept its slot since."""
        return self.job.stay == self.stay


@dataclass(frozen=True)
class PrefillResult:
    """First tokens of requests whose prompts are on their way to the pages.

    Attributes:
      logprobs: whether `emitted` holds log-probabilities.
      started: the clock then.
      tokens: of prompts, in this call and those that were started behind the call before; 0 where nobody counted them.
    """

    rows: list[Row]
    emitted: Emitted
    logprobs: bool
    started: float = field(default_factory=time.perf_counter)
    tokens: int = 0

    def gains(self) -> list[tuple[Job, int, int]]:
        """Requests that wait for it, with the tokens that each gains at least, and those that cycles may give it."""
        return [(row.job, 1, 0) for row in self.rows if row.here]


@dataclass(frozen=True)
class DecodeCall:
    """Cycles on the device.

    Attributes:
      emitted: what the cycles give out.
      cycles: how many of them at most.
      width: columns of the page table.
      started, compiled: the clock, and seconds spent compiling until then.
      returned: the clock when the call was on its way.
      tokens: of prompts that were started behind the call before.
    """

    rows: list[Row]
    emitted: Emitted
    setup: Setup
    cycles: int
    width: int
    started: float
    compiled: float
    returned: float = field(default_factory=time.perf_counter)
    tokens: int = 0

    def gains(self) -> list[tuple[Job, int, int]]:
        """See `PrefillResult.gains`."""
        return [(row.job, self.cycles, self.cycles * self.setup.width) for row in self.rows if row.here]


class InFlight:
    """Overlap scheduling: calls that were started before the results of those ahead of them were looked at.

    A call of some hundred arrays, the way back of its results and whoever reads them take the host about 3 ms, as long as a cycle.
    So a prompt or cycles are queued behind those whose results are awaited, wherever nothing but these results could change what
    they do. Requests that have ended meanwhile are done on the device and change nothing in it; where all have, cycles end at once.
    Their pages may be given to others before the device is done with them: who gets them writes to them later on the same device.
    While cycles are in flight, sequences stay in their slots and none is preempted.

    Attributes:
      online: whether requests come while others run; then little is queued before the next one.
      returns_early: whether calls have been seen to return while the device works.
      held: seconds that the host spent in `Scheduler._await_company` since results came last.
    """

    def __init__(self, core: Resources):
        self.programs = core.programs
        self.returns_early = False
        self.clear()

    def clear(self) -> None:
        """Nothing is in flight, and no call has been timed."""
        self.items: deque[PrefillResult | DecodeCall] = deque()
        self.online = False
        self.few = FEW_CYCLES
        self.held = 0.0
        self._read = 0.0, 0.0
        self._tokens = 0  # of prompts, behind the last of the items
        # Seconds of a cycle at least, of a token of a prompt, and of the host for a call.
        self._pace = self._prompt_pace = self._busy = 0.0
        self._rate = (
            0.0  # a cycle's time by that of its call, over the last calls: one alone may have waited for Python
        )

    @property
    def calls(self) -> list[DecodeCall]:
        return [item for item in self.items if isinstance(item, DecodeCall)]

    @property
    def long(self) -> bool:
        """Whether a cycle takes the device far longer than its call the host."""
        return self._rate > LONG_CYCLE

    @property
    def full(self) -> bool:
        """One call runs and one is behind it. First tokens have cycles behind them beside that where cycles are long: prompts take
        the device less time than the host to see to the results of many and to call again. So they have where a call takes the host
        longer than a cycle the device, which would stand still. Between the two nothing is gained: who follows a request that has
        ended would wait for more cycles."""
        fast = 1 <= self._rate <= LONG_CYCLE or not self._rate
        behind = bool(self.items) and isinstance(self.items[-1], PrefillResult) and not fast
        return len(self.items) >= MOST_IN_FLIGHT and not behind

    @property
    def _least(self) -> int:
        """Cycles of a call behind which the next one comes in time; not more than streams have."""
        if self.long or not self._rate:
            return 1
        return min(CYCLES_PER_CHUNK, math.ceil(HOST_CALLS / self._rate))

    def compute(self, tokens: int) -> None:
        """Counts tokens of prompts that were started."""
        self._tokens += tokens

    def add(self, item: PrefillResult | DecodeCall) -> None:
        item, self._tokens = replace(item, tokens=self._tokens), 0
        for job, due, coming in item.gains():
            job.due += due
            job.coming += coming
        self.items.append(item)

    def take(self) -> PrefillResult | DecodeCall:
        """Removes and returns the item that was started first."""
        item = self.items.popleft()
        for job, due, coming in item.gains():
            job.due -= due
            job.coming -= coming
        return item

    def seen(self) -> tuple[float, float]:
        """When results came before, and seconds spent compiling until then; those of now are remembered."""
        before, self._read = self._read, (time.perf_counter(), self.programs.compile_s)
        return before

    def seconds(self, call: DecodeCall, waited: float, *, watch: bool = True) -> float:
        """Time of a call whose results have just come, from the end of what was before it; compilation excluded.

        Args:
          waited: seconds that the host waited for them.
          watch: find out whether calls return early.
        """
        began, before = max((call.started, call.compiled), self.seen())
        now, compiled = self._read
        spent = now - began - (compiled - before)
        busy = call.returned - call.started - (compiled - call.compiled)
        self._pace, self._busy = max(0.0, spent - call.tokens * self._prompt_pace) / call.cycles, busy
        rate = min(self._pace / max(busy, 1e-6), 4 * LONG_CYCLE)
        self._rate = 0.75 * self._rate + 0.25 * rate if self._rate else rate
        waited, self.held = waited + self.held, 0.0
        if self.long and self.calls:  # the device has enough to do: the host keeps up
            self.few = max(self.few // 2, 1)
        elif waited < min(READY_S, 0.3 * spent):  # as long as copies take: the device may have waited for the host
            if call.cycles >= self.few:  # fewer, behind a prompt say, tell nothing of so many
                self.few = min(2 * self.few, MAX_CYCLES)
        elif spent - waited < 0.3 * self._pace * call.cycles:  # what half of them take is more than the host does
            self.few = max(self.few // 2, 1)
        self.few = max(self.few, self._least)
        if watch and jax.default_backend() == "gpu" and call.cycles >= min(self.few, FEW_CYCLES):
            # Not where a call keeps the host busy: results would come later, and no sooner. One cycle alone may take the device
            # less time than its call the host, which tells nothing.
            self.returns_early = busy < 0.75 * spent
        return spent

    def first_seconds(self, item: PrefillResult) -> None:
        """Remembers how long the prompts took whose first tokens have just come."""
        before, _ = self.seen()
        if item.tokens:
            self._prompt_pace = (self._read[0] - max(item.started, before)) / item.tokens

    @property
    def latest(self) -> float:
        """The clock at which the call behind the one that runs has to be made, for the device not to wait; 0 where nobody knows."""
        if len(self.items) != 1:
            return 0.0
        (item,) = self.items
        takes = item.tokens * self._prompt_pace + (item.cycles * self._pace if isinstance(item, DecodeCall) else 0.0)
        began = max(self._read[0], item.started)
        return 0.0 if not takes else began + min(LATEST * takes, takes - 2 * self._busy)

    def tokens_between(self, cycles: int) -> int:
        """Tokens of prompts between two calls for cycles, at most so many and `few`, that leave time for one cycle within the
        `STRETCH` of what the cycles take; those of one call at least, and any number where nobody knows.

        A single cycle leaves time as `FEW_CYCLES` do: slots that stand empty would wait for it too long.
        """
        if not (self._pace and self._prompt_pace):
            return sys.maxsize
        few = max(FEW_CYCLES, min(cycles, self.few))
        return max(LEAST_TOKENS, int((STRETCH * few - 1) * self._pace / self._prompt_pace))

    def cycles_behind(self, tokens: int, cycles: int) -> int:
        """Cycles behind so many tokens of prompts, at most so many and `few`: who decodes waits for both, `STRETCH` times as long
        as for the cycles without a prompt."""
        few = min(cycles, self.few)
        taken = tokens * self._prompt_pace / self._pace if self._pace else 0.0
        return max(1, min(few, int(STRETCH * few - taken)))


class Batch:
    """The sequences that run side by side: slots and pages on the host, the decode state on the device.

    It lives from the first request that starts to the last one that ends. What it does to the state is started, not waited for.

    Attributes:
      company: what its requests have in common; others wait for the next batch.
      draft: whether the drafter drafts; where texts are exact, for some of them.
      needs: what its programs serve; at least what those that decode need.
      retired: slots whose requests left since the last cycles were started. The device learns of it with the next ones.
    """

    def __init__(self, core: Resources, *, company: Company, slots: int, needs: Needs):
        self.core, self.company, self.draft, self.needs = core, company, company.draft, needs
        root = (b"with drafter" if self.draft else b"target alone") if core.shares else None
        snapshots = core.snapshots if core.state_bytes else None
        self.slots = Slots(
            slots, core.buckets.width[-1], core.groups, core.page_size, root, snapshots, core.snapshot_places,
            prompts_only=core.exact,
        )  # fmt: skip
        self.retired = np.zeros((slots,), bool)
        self._setups: dict[Needs, Setup] = {}
        # Who ran when pages in common were looked for, and those of each slot.
        self._common: tuple[tuple, list[tuple[tuple[Sharers, ...], np.ndarray]]] | None = None
        self.state = empty_state(self.setup, slots, needs.stop_width, core.dtype, core.take_pools())

    @property
    def setup(self) -> Setup:
        return self.setup_for(self.needs)

    def setup_for(self, needs: Needs) -> Setup:
        """Setup of the programs for such needs."""
        if needs not in self._setups:
            self._setups[needs] = self.core.setup(
                mode=needs.mode, draft=self.draft, logprobs=needs.logprobs, sampling=needs.sampling
            )
        return self._setups[needs]

    @property
    def size(self) -> int:
        """Slots."""
        return len(self.slots.jobs)

    @property
    def context(self) -> float:
        """Mean tokens of a running sequence."""
        running = self.slots.decoding
        return sum(job.filled for job in running) / max(1, len(running))

    @property
    def verified(self) -> Length:
        """Verified length of the current cycles."""
        return self.core.verify_policy.current if self.draft else Length(1)

    @property
    def cycles(self) -> int:
        """Cycles between two looks at the results: the fewest that one of those that decode asks for."""
        return min((job.cycles for job in self.slots.decoding), default=MAX_CYCLES)

    def pages_for(self, job: Job, cycles: int, length: int) -> int:
        """Pages of a running request before so many cycles of `length` tokens, behind those that were started: max_tokens limits
        its tokens too."""
        most = min(job.coming + (cycles - 1) * length, job.remaining - 1)
        return self.core.pages_for(job.length + most)

    def width_for(self, cycles: int, length: int) -> int:
        """Columns of the page table that so many cycles need."""
        pages = max((self.pages_for(job, cycles, length) for job in self.slots.decoding), default=1)
        return self.core.width_of(pages * self.core.page_size)

    def serve(self, needs: Needs) -> None:
        """Has the next programs serve `needs`. Stop ids are written from the host, and what changes logits, of slots where nothing
        does, is too: nothing is called or compiled."""
        if needs.stop_width != self.needs.stop_width:
            requests = [job and job.request for job in self.slots.jobs]
            ids = [one if one and len(one.stop_ids) <= needs.stop_width else None for one in requests]
            stops = jax.device_put(request_arrays(ids, needs.stop_width).stop_ids)
            self.keep(replace(self.state, request=replace(self.state.request, stop_ids=stops)))
        adjusted = needs.mode in ADJUSTING
        if adjusted != (self.state.adjust is not None):
            none = adjustments([None] * self.size, self.core.target.vocab_size) if adjusted else None
            self.keep(replace(self.state, adjust=jax.device_put(none)))
        if {needs.mode, self.needs.mode} == {"regular", "structured"}:
            self._follow_anew(needs)
        self.needs = needs

    def retire(self, job: Job) -> None:
        """Takes slot and pages from a request that has not ended by itself."""
        self.retired[job.slot] = True
        self.slots.leave(job)

    def prefill(self, jobs: Sequence[Job], rows: int, size: int) -> tuple[dict[int, Job], jax.Array]:
        """One call for the next chunk of a prompt, or for whole ones in pieces of `size`.

        Returns:
          By rows of the logits, the requests whose contexts are in the pages then; and the logits.
        """
        core = self.core
        pieces = [(job, start) for job in jobs for start in range(job.filled, job.stop, size)][:rows]
        ids, (starts, lengths) = np.zeros((rows, size), np.int32), np.zeros((2, rows), np.int32)
        slots = np.full((rows,), self.size, np.int32)
        width = core.width_of(max(min(start + size, job.stop) for job, start in pieces))
        ends = dict[Job, int]()
        contexts = {job: job.context for job in jobs}
        for row, (job, start) in enumerate(pieces):
            piece = contexts[job][start : min(start + size, job.stop)]
            ids[row, : len(piece)], starts[row], lengths[row] = piece, start, len(piece)
            slots[row], ends[job] = job.slot, row
        for job, row in ends.items():
            self.slots.cover(job, int(starts[row] + lengths[row]))
        table = self.slots.table(width, slots)
        caches = Caches(self.state.target_pages, self.state.draft_pages, self.state.recurrent)
        step = (core.weights, table, caches, ids, starts, lengths, slots)
        pictured = self._pictured(pieces, rows, size)
        scored = any(job.scored for job in jobs)
        setup, scores = self.setup.for_prefill(scored=scored), None
        if scored:
            following = np.zeros_like(ids)
            for row, (job, start) in enumerate(pieces):
                after = contexts[job][start + 1 : start + 1 + lengths[row]]
                following[row, : len(after)] = after
            found = core.programs.call(prefill_scored, (setup,), (2,), *step, following, *pictured)
            (target, draft, states), logits, scores = found
        else:
            (target, draft, states), logits = core.programs.call(prefill_chunk, (setup,), (2,), *step, *pictured)
        self.keep(replace(self.state, target_pages=target, draft_pages=draft, recurrent=states))
        for row, (job, _) in enumerate(pieces):
            if scores is not None and job.scored:
                job.parts.append((scores, row, int(lengths[row])))
        for job, row in ends.items():
            job.filled = int(starts[row] + lengths[row])
            if job.filled in job.stops:
                self.take_snapshot(job)
        return {row: job for job, row in ends.items() if job.filled == job.length}, logits

    def _pictured(self, pieces: Sequence[tuple[Job, int]], rows: int, size: int) -> tuple[Pictured, ...]:
        """Picture arguments of a call for these pieces; () if no prompt has pictures, which is another program."""
        if all(job.request.pictures is None for job, _ in pieces):
            return ()
        positions = np.zeros((rows, size, 3), np.int32)
        placed, given = (
            np.zeros((rows, size), bool),
            np.zeros((rows, size, self.core.target.hidden_size), self.core.dtype),
        )
        for row, (job, start) in enumerate(pieces):
            stop, pictures = min(start + size, job.stop), job.request.pictures
            if pictures is None:
                positions[row, : stop - start] = np.arange(start, stop)[:, None]
            else:
                positions[row, : stop - start], placed[row, : stop - start] = pictures.piece(start, stop)
                pictures.fill(given[row], start, stop)
        host: dict[str, Any] = {"positions": positions, "placed": placed, "rows": given}
        return (Pictured(**host),)

    def take_snapshot(self, job: Job) -> None:
        """Keeps the state of `job`, whose pieces have just come to the end of a page, for prompts that begin alike. The pages below
        are never written to again: others may find them from now on."""
        core = self.core
        job.stops.remove(job.filled)
        self.slots.publish(job)
        key = job.keys[job.filled // core.page_size - 1]
        if key in core.snapshots:
            return
        row = core.snapshots.free_row(core.allocator.knows)
        core.keep_states(self._copied(core.kept_states, self.state.recurrent, row, job.slot))
        core.snapshots.publish(row, key)

    def begin(self, job: Job) -> None:
        """Gives a request that has just entered the state that belongs to the end of the pages it found."""
        if job.snapshot >= 0:
            states = self._copied(self.state.recurrent, self.core.kept_states, job.slot, job.snapshot)
            self.keep(replace(self.state, recurrent=states))

    def _copied(self, into: Any, source: Any, row: int, of: int) -> Any:
        return self.core.programs.call(copy_program, (), (1,), None, into, source, np.int32(row), np.int32(of))

    def admit(self, jobs: dict[int, Job], logits: jax.Array) -> PrefillResult | None:
        """Puts requests into their slots on the device, and gives out first tokens but for those that were given out before a slot
        was lost.

        Args:
          jobs: by rows of `logits`.
        """
        slots = np.full((logits.shape[0],), self.size, np.int32)
        slots[list(jobs)] = [job.slot for job in jobs.values()]
        named = [(job.request, job.tokens) if (job := jobs.get(row)) else None for row in range(len(slots))]
        grammars = [NO_GRAMMAR] * len(slots)
        for row, job in jobs.items():
            grammars[row] = self._grammar(job, job.tokens)
        arrays = request_rows(self.setup, named, self.needs.stop_width, self.core.dtype, grammars)
        masks = None
        if self.setup.mode == "structured":
            told = [grammars, arrays.produced, arrays.pending]
            masks = masks_of(np.stack([np.asarray(one, np.int32) for one in told], axis=1), self.core.target.vocab_size)
        # Without pools, which would pass through: each array costs the host some of the call.
        call = (None, without_pools(self.state), slots, arrays, logits, masks, *self._tables(self.setup))
        state, emitted = self.core.programs.call(admit_program, (self.setup,), (1,), *call)
        self.keep(replace(state, **self._pools))
        begin_copies(emitted, logprobs=self.needs.logprobs)
        for job in jobs.values():
            self.retired[job.slot] = False
            self.slots.filled(job)
        first = [Row(job, job.stay, row) for row, job in jobs.items() if not job.tokens]
        return PrefillResult(first, emitted, self.needs.logprobs) if first else None

    def decode(self, setup: Setup, cycles: int, *, until_any: bool) -> DecodeCall:
        """Starts cycles of all that decode.

        Args:
          until_any: they end as soon as one of these does.
        """
        started = time.perf_counter(), self.core.programs.compile_s
        running = self.slots.decoding
        table = self.slots.table(self.core.width_of(max(job.columns for job in running) * self.core.page_size))
        shared = self.shared_pages(setup, table_width(table), cycles)
        if setup.mode == "structured":
            state, emitted = masked_cycles(
                self.core,
                setup,
                table,
                self.state,
                cycles,
                until_any=until_any,
                retired=self.retired.copy(),
                shared=shared,
                drafts=self.drafts if setup.exact else None,
            )
        else:
            call = self.loop_arguments(setup, table, cycles, until_any=until_any, shared=shared)
            state, emitted = self.core.programs.call(loop, (setup, MAX_CYCLES), (2,), *call)
            begin_copies(emitted, logprobs=setup.logprobs)
        self.keep(state)
        self.retired[:] = False
        rows = [Row(job, job.stay, job.slot) for job in running]
        return DecodeCall(rows, emitted, setup, cycles, table_width(table), *started)

    def loop_arguments(
        self, setup: Setup, table: Any, cycles: int, *, until_any: bool, shared: np.ndarray | None = None
    ) -> tuple:
        """Arguments of `loop` after its static ones; `table` may be a shape."""
        call = self.core.weights, table, self.state, np.int32(cycles), np.bool_(until_any), self.retired.copy()
        more = self.core.estimate if setup.per_request else None, shared
        tables = self._tables(setup)
        drafts = (self.drafts if setup.exact else None,) if tables or setup.exact else ()
        return (*call, *more, *drafts, *tables)

    def _tables(self, setup: Setup) -> tuple[GrammarTables, ...]:
        return (self.core.shelf.tables,) if setup.mode == "regular" else ()

    def place(self, job: Job) -> bool:
        """Finds room for the table of a request's grammar beside those of the requests in slots; False where there is none yet."""
        used = {other.automaton for other in self.slots.taken if other.automaton is not None}
        return job.automaton is None or self.core.shelf.place(job.automaton, used)

    def _grammar(self, job: Job, tokens: Sequence[int], known: int | None = None) -> int:
        """The device's number for the state of a request's grammar behind `tokens`; `known` as of `Follower`."""
        job.follower, grammar = None, job.request.grammar
        if grammar is None:
            return NO_GRAMMAR
        if self.needs.mode == "regular" and job.automaton is not None:
            return self.core.shelf.state(job.automaton, job.automaton.walk(tokens))
        job.follower = Follower(grammar, tokens, known)
        return job.follower.number

    def _follow_anew(self, needs: Needs) -> None:
        """Has grammars followed by the host, or by tables again, from where their texts are; waits for what is in flight."""
        assert self.state.adjust is not None, "modes with grammars have adjustments"
        told, was = self.state.adjust.grammar, self.needs.mode
        numbers, produced, pending = (np.array(one) for one in (told, self.state.produced, self.state.pending))
        self.needs = needs
        for job in self.slots.decoding:
            slot, automaton = job.slot, job.automaton
            if job.request.grammar is None:
                continue
            if was == "regular" and automaton is not None:
                # Texts may be ahead of what the host has seen. Any other that leads to the same state will do.
                own = self.core.shelf.own(automaton, int(numbers[slot]))
                numbers[slot] = self._grammar(job, automaton.prefix(own), int(produced[slot]))
            else:
                # But for a first token the host has seen everything: cycles that ask it return with their results.
                first = [int(pending[slot])] if produced[slot] > len(job.tokens) else []
                numbers[slot] = self._grammar(job, [*job.tokens, *first])
        self.keep(replace(self.state, adjust=replace(self.state.adjust, grammar=jax.device_put(numbers))))

    def shared_pages(self, setup: Setup, width: int, cycles: int) -> np.ndarray | None:
        """The argument `shared` of `cycle`; None if pages are not to be read once, or if that program is not compiled yet."""
        policy = self.core.cascade_policy
        if policy is None:
            return None
        running = self.slots.decoding
        # Pages in common are those that requests found when they entered.
        who = (self.size, *((job.ticket, job.stay, job.slot) for job in running))
        if self._common is None or self._common[0] != who:
            place = next((i for i, pool in enumerate(self.slots.pools) if pool.group.reach is None), None)
            slots, whole = (np.array([getattr(job, name) for job in running], np.int64) for name in ("slot", "filled"))
            size, choices = self.core.page_size, []
            if place is not None:
                for groups in common_pages(self.slots.tables[place][slots], whole // size):
                    sharers = tuple(Sharers(len(members), pages * size) for members, pages in groups)
                    choices.append((sharers, shared_argument(groups, slots, self.size)))
            self._common = who, choices
        choices = self._common[1]
        if policy.asked and choices:
            return choices[-1][1]
        savings = [(policy.saved_s(sharers, self.size, setup.width), pages) for sharers, pages in choices]
        best = sorted((one for one in savings if one[0] > 0), key=lambda one: -one[0])
        jobs, sizes = Jobs(self.core, setup, self.needs.stop_width), (self.size, width)
        asked: set[int] = set()
        for place, (saved, pages) in enumerate(best):
            if pages.ndim in asked:
                continue  # its program is not there
            asked.add(pages.ndim)
            form: Sharing = "group" if pages.ndim == 1 else "groups"
            name, job = (setup, *sizes, self.needs.stop_width, form), partial(jobs.loop, *sizes, shared=form)
            if self.core.program_status(name, lambda job=job: job().args) == "compiled":
                return pages
            # What it saves beyond what another program would.
            missed = saved - next((less for less, other in best[place + 1 :] if other.ndim not in asked), 0.0)
            if policy.worth_compiling(name, missed * cycles):
                start_compiling([job()])
        return None

    @property
    def drafts(self) -> np.ndarray:
        """Slots whose requests draft."""
        return np.array([job is not None and job.draft for job in self.slots.jobs])

    def move(self, count: int) -> None:
        """Moves the sequences into `count` slots."""
        if count == self.size:
            return
        rows = self.slots.compact(count)
        self.retired = np.where(rows < 0, False, self.retired[rows])
        moved = self.core.programs.call(resize_program, (), (), None, without_pools(self.state), rows)
        self.keep(replace(moved, **self._pools))

    @property
    def _pools(self) -> dict[str, Any]:
        return {"target_pages": self.state.target_pages, "draft_pages": self.state.draft_pages}

    def keep(self, state: DecodeState) -> None:
        """The state is the pools' only owner: the engine must know the newest one at every moment."""
        self.state = state
        self.core.keep_pools(state.target_pages, state.draft_pages)


# The program of the next cycles: what it serves, its slots, the tokens it verifies in each. Every combination is a program of its
# own. What would be best but is not compiled is compiled in the background once its lack has cost as much time as compiling takes;
# until then the best of what is there runs. Nobody waits.


def choose_needs(batch: Batch, jobs: Iterable[Job]) -> Needs:
    """Needs that the next programs serve: those of these requests, or more if the program for less is not compiled."""
    exact = Needs.of({job.needs for job in jobs})
    if exact == batch.needs or not batch.needs.covers(exact):
        return exact
    return exact if _loop_status(batch, exact, batch.size, batch.cycles, batch.verified) == "compiled" else batch.needs


def choose_cycles(batch: Batch, cycles: int) -> tuple[Setup, int]:
    """Setup of the next cycles, and their number, at most `cycles`."""
    policy, running = batch.core.verify_policy, batch.slots.decoding
    if not batch.draft or not running:
        return batch.setup, cycles
    kinds: dict[int, Kind] = {job.ticket: kind_of(job.request) for job in running}
    status = partial(_loop_status, batch, batch.needs, batch.size, cycles)
    decision = policy.next(kinds, batch.size, batch.context, cycles, status)
    if decision.compile is not None:
        jobs = _jobs(batch, batch.needs, batch.size, decision.compile)
        start_compiling([jobs.loop(batch.size, batch.width_for(decision.cycles, jobs.setup.width))])
    return batch.core.verifying(batch.setup, decision.length, batch.size), decision.cycles


def choose_slots(batch: Batch, most: int) -> int:
    """The number of slots for the next cycles where nobody waits or is prefilled: fewer than now where the programs for fewer are
    there, and those that lead back to `most`."""
    core, now = batch.core, batch.size
    fewer = round_up(max(1, len(batch.slots.taken)), core.buckets.batch)
    if fewer >= now:
        return now
    cycles, moves = batch.cycles, [(now, fewer), (fewer, most)]
    length = core.verify_policy.with_slots(fewer, batch.context) if batch.draft else Length(1)
    there = {_resize_status(batch, *move) for move in moves}
    if {*there, _loop_status(batch, batch.needs, fewer, cycles, length)} == {"compiled"}:
        return fewer
    if core.verify_policy.fewer_slots_pay(now, fewer, batch.context, cycles):
        jobs = _jobs(batch, batch.needs, fewer, length)
        start_compiling(
            [jobs.loop(fewer, batch.width_for(cycles, jobs.setup.width)), *(jobs.resize(*move) for move in moves)]
        )
    return now


def learn(core: Resources, rows: Sequence[Row], setup: Setup, emitted: Emitted) -> None:
    """Tells the verify-length policy what came of cycles of `setup`."""
    served = [Served(row.job.ticket, row.column, kind_of(row.job.request)) for row in rows]
    core.verify_policy.look(Length(setup.length, setup.per_request), served, emitted)


def _company(core: Resources, job: Job) -> Company:
    return core.company(job.draft, job.needs)


def _jobs(batch: Batch, needs: Needs, slots: int, length: Length) -> Jobs:
    return Jobs(batch.core, batch.core.verifying(batch.setup_for(needs), length, slots), needs.stop_width)


def _loop_status(batch: Batch, needs: Needs, slots: int, cycles: int, length: Length) -> Status:
    setup = _jobs(batch, needs, slots, length).setup
    return _status(batch, setup, batch.width_for(cycles, setup.width), slots, needs.stop_width)


def _status(batch: Batch, setup: Setup, width: int, slots: int | None = None, stop_width: int | None = None) -> Status:
    """Of a program for cycles; of the batch's slots and stop ids where none are named."""
    jobs = Jobs(batch.core, setup, stop_width or batch.needs.stop_width)
    sizes = slots or batch.size, width
    return batch.core.program_status((jobs.setup, *sizes, jobs.stop_width), lambda: jobs.loop(*sizes).args)


def _resize_status(batch: Batch, old: int, new: int) -> Status:
    jobs = _jobs(batch, batch.needs, batch.size, batch.verified)
    name = ("resize", batch.draft, batch.needs.mode in ADJUSTING, old, new, jobs.stop_width)
    return batch.core.program_status(name, lambda: jobs.resize(old, new).args)


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
        if inflight.calls and width != inflight.calls[-1].width and _status(batch, setup, width) != "compiled":
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
