"""The running batch: slots and pages on the host, the decode state on the device, and the calls that change them."""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from dflash_jax.cache.groups import table_width
from dflash_jax.compile.programs import start_compiling
from dflash_jax.decoding.grammar_masks import NO_GRAMMAR, Follower, masks_of
from dflash_jax.decoding.grammar_tables import GrammarTables
from dflash_jax.decoding.loop import loop
from dflash_jax.decoding.prefill import Caches, Pictured, prefill_chunk, prefill_scored
from dflash_jax.decoding.state import DecodeState, Setup, without_pools
from dflash_jax.engine.cascade import Sharers, Sharing, common_pages, shared_argument
from dflash_jax.engine.in_flight import DecodeCall, PrefillResult, Row
from dflash_jax.engine.masked_cycles import masked_cycles
from dflash_jax.engine.requests import (
    ADJUSTING,
    Needs,
    adjustments,
    begin_copies,
    empty_state,
    request_arrays,
    request_rows,
)
from dflash_jax.engine.resources import MAX_CYCLES, Company, Resources
from dflash_jax.engine.slots import Job, Slots
from dflash_jax.engine.verify_policy import Length
from dflash_jax.engine.warmup import Jobs, admit_program, copy_program, resize_program


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
