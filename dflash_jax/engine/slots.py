"""Batch slots and block tables: which request sits where, and its pages. Host memory only: the device sees the page tables."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dflash_jax.cache import extend_keys
from dflash_jax.cache.groups import GroupPool, first_column, join_tables
from dflash_jax.cache.snapshots import SnapshotAccount
from dflash_jax.decoding.grammar_masks import Follower
from dflash_jax.decoding.prefill import Scores
from dflash_jax.decoding.token_automata import TokenAutomaton
from dflash_jax.engine.requests import Needs, Request, Update

type Sink = Callable[[int, Update | Exception], Callable[[], None] | None]
"""Takes what a ticket's request gains, or the error that ended it. Called by the thread that steps: it must not block.

What it gives back is called once, when all that came together has been sent: to wake a reader at each update would hand Python from
thread to thread as often.
"""


def no_sink(ticket: int, what: Update | Exception) -> None:
    """Sink for requests whose updates nobody reads."""


@dataclass(eq=False)
class Job:
    """A request and how far it has come.

    Attributes:
      ticket: the scheduler's number for it, never given twice; tickets count in order of arrival.
      sink: takes its updates.
      draft: whether the drafter drafts for it.
      cycles: cycles between two looks at the results, at most.
      wanted_slots: how many requests are to run side by side at most; None for as many as there are.
      tokens: what it has emitted. They stay when its slot is lost, but where it begins again.
      given: tokens that were given out, before it began again.
      slot: -1 while it waits.
      stay: numbers its stays in slots: results of an earlier one are nobody's.
      columns: of page tables, from the first on, for which it has pages, unless they have fallen out of a group's window.
      held: its pages of each group.
      longest: columns for which it may have pages at its end.
      filled: tokens in the target's pages; the device's `seq_lens` once it decodes.
      fresh: how many of them the drafter's pages may lack.
      due: tokens it gains at least by what was started and not looked at yet.
      coming: tokens that cycles among it may give it.
      stops: after which tokens of its context the pieces of it end and its state is kept, as far as it has not come.
      snapshot: row of the pool whose state its slot begins with; -1 for none.
      decoding: whether its context is in the pages and the device runs it.
      keys: of the full pages of its text, as far as they were asked for.
      cached: tokens of its context that it found in pages when it took its slot.
      parts: scores of its prompt, with the row and the number of tokens in each, as far as calls were started.
      started, compiled: clock and compile time when it took its slot.
      needs: what it asks of programs.
      follower: its place in its grammar while it has a slot and the host is asked; None without one.
      automaton: its grammar as a table; None without one.
    """

    request: Request
    ticket: int
    sink: Sink = no_sink
    draft: bool = True
    cycles: int = 1
    wanted_slots: int | None = None
    tokens: list[int] = field(default_factory=list)
    given: int = 0
    slot: int = -1
    stay: int = 0
    columns: int = 0
    held: list["Held"] = field(default_factory=list)
    longest: int = 0
    filled: int = 0
    fresh: int = 0
    due: int = 0
    coming: int = 0
    stops: list[int] = field(default_factory=list)
    snapshot: int = -1
    decoding: bool = False
    keys: list[bytes] = field(default_factory=list)
    cached: int = 0
    parts: list[tuple[Scores, int, int]] = field(default_factory=list)
    started: float = 0.0
    compiled: float = 0.0
    follower: Follower | None = None
    needs: Needs = field(init=False)
    automaton: TokenAutomaton | None = field(init=False)

    def __post_init__(self):
        self.needs, grammar = self.request.needs, self.request.grammar
        self.automaton = None if grammar is None else grammar.automaton

    @property
    def context(self) -> tuple[int, ...]:
        """Tokens that must be in the pages before it decodes: all but the pending token, if it has one."""
        return (*self.request.prompt, *self.tokens[:-1])

    @property
    def length(self) -> int:
        """Tokens of `context`."""
        return len(self.request.prompt) + max(0, len(self.tokens) - 1)

    @property
    def scored(self) -> bool:
        """Whether its prompt is to be scored: nothing of it was given out yet."""
        return self.request.params.prompt_logprobs is not None and not self.tokens

    @property
    def stop(self) -> int:
        """Tokens of its context that may be in the pages after the next call for prompts, at most."""
        return self.stops[0] if self.stops else self.length

    @property
    def remaining(self) -> int:
        return self.request.params.max_tokens - len(self.tokens)

    def take(self, update: Update) -> None:
        """Counts what it gained; once more changes nothing."""
        self.tokens[update.start :] = update.tokens

    def begin_again(self) -> None:
        """Forgets what it has emitted, which comes again with the same bits and is not given out twice."""
        self.given, self.tokens = max(self.given, len(self.tokens)), []

    def lose_slot(self) -> None:
        """As it is before it enters: what the account and the device know of it is nobody's."""
        self.columns, self.held, self.slot, self.decoding, self.stay = 0, [], -1, False, self.stay + 1
        self.due = self.coming = 0
        self.stops, self.snapshot, self.parts, self.follower = [], -1, [], None


@dataclass(eq=False)
class Held:
    """Pages of one group that a request holds: those of the columns from `first` on."""

    first: int = 0
    pages: list[int] = field(default_factory=list)


class Slots:
    """The slots of a batch.

    Args:
      count: slots.
      width: columns of the page tables.
      pools: accounts of the groups' pages, which give them.
      page_size: tokens of a page.
      root: names what the pages hold; None shares no page.
      snapshots: without whose states no page is found; None for a target without states.
      places: after which tokens of a prompt its state is kept, of those whose state it found, those that its pages have in common
        with others, and all.
      prompts_only: pages with any token that was emitted are not found again.

    Attributes:
      filling: requests whose contexts are not in the pages yet, in the order in which they entered.
    """

    def __init__(
        self,
        count: int,
        width: int,
        pools: Sequence[GroupPool],
        page_size: int,
        root: bytes | None,
        snapshots: SnapshotAccount | None = None,
        places: Callable[[int, int, int], list[int]] = lambda cached, shared, length: [],
        *,
        prompts_only: bool = False,
    ):
        self.snapshots, self.places, self.prompts_only = snapshots, places, prompts_only
        self.pools, self.page_size, self.root = pools, page_size, root
        self.jobs: list[Job | None] = [None] * count
        self.filling: list[Job] = []
        # -1 is no page: a write there is dropped, a read is masked.
        self.tables = [np.full((count, width), -1, np.int32) for _ in pools]

    @property
    def taken(self) -> list[Job]:
        return [job for job in self.jobs if job is not None]

    @property
    def decoding(self) -> list[Job]:
        return [job for job in self.taken if job.decoding]

    @property
    def youngest(self) -> Job:
        return max(self.taken, key=lambda job: job.ticket)

    @property
    def free(self) -> int:
        """Pages that are free where layers keep all of theirs: what may run short while requests run. Of other groups each request
        has as many kept for it from its first moment in a slot as it will ever hold."""
        pool = self.pools[0]
        return pool.allocator.num_free if pool.group.reach is None else sys.maxsize

    def enter(self, job: Job, pages: int, spare: int, most: int | None = None, *, longest: int | None = None) -> bool:
        """Gives `job` a slot and `pages` pages, the first ones with what they hold already; False where there is no room, or where
        it would find more of them once those before it are prefilled. Groups with windows give theirs piece by piece (`cover`).

        Args:
          spare: free pages that must be left over.
          most: tokens that its pages may lack.
          longest: pages that it may have at its end; None for no more than now.
        """
        longest = pages if longest is None else longest
        if None not in self.jobs or not self._keeps(longest):
            return False
        held, found, known, snapshot = self._find(job)
        lacks = job.length - found * self.page_size
        if self._comes(job, found) or pages - found + spare > self.free or (most is not None and lacks > most):
            self._give_back(held)
            return False
        job.slot, job.decoding, job.held, job.columns = self.jobs.index(None), False, held, found
        job.filled = job.cached = found * self.page_size
        job.fresh = job.due = job.coming = 0
        if self.snapshots is not None and self.root is not None:
            job.snapshot = snapshot
            job.stops = self.places(job.filled, known * self.page_size, job.length)
        self.jobs[job.slot] = job
        self.filling.append(job)
        job.longest = longest
        for place, pool in enumerate(self.pools):
            self._hold(job, place, pages if pool.group.reach is None else found)
        job.columns = pages
        return True

    def resize(self, job: Job, pages: int) -> None:
        """Gives pages to `job` or takes its last ones, so that it has `pages`, but for those that its windows have left behind."""
        for place in range(len(self.pools)):
            self._hold(job, place, pages)
        job.columns = pages

    def cover(self, job: Job, tokens: int) -> None:
        """Gives `job` pages of groups with windows for the next piece of its context, which ends after so many tokens."""
        for place, pool in enumerate(self.pools):
            if pool.group.reach is not None:
                self._hold(job, place, -(-tokens // self.page_size))

    def _hold(self, job: Job, place: int, end: int) -> None:
        """Lets `job` hold a group's pages up to column `end`, from the first one that a query to come may see."""
        pool, held = self.pools[place], job.held[place]
        first = first_column(pool.group.reach, job.filled, job.fresh, self.page_size)
        if (gone := first - held.first) > 0:
            if self.root is not None:
                # As far as they are full: whoever begins alike may go on from them.
                self._publish(job, place, first)
            pool.allocator.free(held.pages[:gone])
            held.first, held.pages = first, held.pages[gone:]
        count = end - held.first
        if count < len(held.pages):
            pool.allocator.free(held.pages[count:])
            del held.pages[count:]
        else:
            held.pages += pool.allocator.allocate(count - len(held.pages))
        row = self.tables[place][job.slot]
        row[:] = -1
        row[held.first : held.first + len(held.pages)] = held.pages

    def leave(self, job: Job) -> None:
        """Takes slot and pages from `job`. What full pages hold can be found until the pages are given to others."""
        self.publish(job)
        for table in self.tables:
            table[job.slot] = -1
        self.jobs[job.slot] = None
        self.filling = [other for other in self.filling if other is not job]
        held = job.held
        job.lose_slot()
        self._give_back(held)

    def _keeps(self, longest: int) -> bool:
        """Whether groups with windows have enough pages for a request of at most so many, whatever those in slots come to hold."""
        wanted = [longest, *(job.longest for job in self.taken)]
        return all(
            sum(min(pages, pool.group.columns) for pages in wanted) <= pool.allocator.num_pages
            for pool in self.pools
            if pool.group.reach is not None
        )

    def _give_back(self, held: Sequence[Held]) -> None:
        for pool, own in zip(self.pools, held, strict=True):
            pool.allocator.free(own.pages)

    def filled(self, job: Job) -> None:
        """The context of `job` is in its pages."""
        job.decoding = True
        self.filling.remove(job)
        self.publish(job)

    def publish(self, job: Job) -> None:
        """Lets others find the full pages of `job`: those below the tokens that either model may still write."""
        if self.root is not None:
            for place in range(len(self.pools)):
                self._publish(job, place, (job.filled - job.fresh) // self.page_size)

    def _publish(self, job: Job, place: int, end: int) -> None:
        """Lets others find pages of a group that are before column `end`."""
        if self.prompts_only:
            end = min(end, len(job.request.prompt) // self.page_size)
        if len(job.keys) < end:
            known = (*job.request.prompt, *job.tokens)[: end * self.page_size]
            extend_keys(job.keys, known, self.page_size, self.root or b"", job.request.marks)
        held = job.held[place]
        for page, key in zip(held.pages, job.keys[held.first : end], strict=False):
            self.pools[place].allocator.publish(page, key)

    def _find(self, job: Job) -> tuple[list[Held], int, int, int]:
        """Pages with the beginning of the context of `job`, at least one token of it left out: its logits are wanted. Where the
        target has states, as many as end with a snapshot; where layers have windows, as many as end with the pages that these need.
        None of a prompt that is scored: pages hold no scores.

        Returns:
          The pages of each group; of how many columns; how many there are that others have or are about to fill; and the row of the
          snapshot, or -1.
        """
        nothing = [Held() for _ in self.pools]
        if self.root is None:
            return nothing, 0, 0, -1
        # Those behind it ask for the keys of a prompt that is scored, too.
        extend_keys(job.keys, job.context, self.page_size, self.root, job.request.marks)
        if job.scored:
            return nothing, 0, 0, -1
        keys = job.keys[: (len(job.context) - 1) // self.page_size]
        number = known = min(pool.leading(keys) for pool in self.pools)
        row, alike = -1, 0
        while True:
            fits = self._with_windows(keys, number)
            if self.snapshots is None or fits == 0:
                number = fits
                break
            number, row = self.snapshots.find(keys[:fits])
            if number == fits:
                break
        if self.snapshots is not None:
            alike = max(
                (sum(ours == theirs for ours, theirs in zip(keys, other.keys, strict=False)) for other in self.filling),
                default=0,
            )
        held = []
        for pool in self.pools:
            first = first_column(pool.group.reach, number * self.page_size, 0, self.page_size)
            held.append(Held(first, pool.allocator.find(keys[first:number])))
        return held, number, max(known, alike), row if number else -1

    def _with_windows(self, keys: Sequence[bytes], number: int) -> int:
        """The largest number of columns, at most `number`, before whose end every group with a window knows what it needs."""
        groups: list[tuple[int, list[int]]] = []
        for pool in self.pools:
            if pool.group.reach is not None:
                runs = [0]  # known pages in a row before each column
                for key in keys[:number]:
                    runs.append(runs[-1] + 1 if pool.allocator.knows(key) else 0)
                groups.append((pool.group.reach, runs))

        def lacks(reach: int, runs: list[int]) -> bool:
            return number - runs[number] > first_column(reach, number * self.page_size, 0, self.page_size)

        while any(lacks(*group) for group in groups):
            number -= 1
        return number

    def _comes(self, job: Job, found: int) -> bool:
        """Whether the first page that `job` does not find is one that a prompt before it is about to fill; where the target has
        states, whether that prompt is about to leave one that `job` can go on from."""
        most = (job.length - 1) // self.page_size
        if self.root is None or job.scored or found >= most:
            return False
        if self.snapshots is not None:
            ends = [(other, stop // self.page_size) for other in self.filling for stop in other.stops]
            return any(found < end <= most and job.keys[end - 1] == other.keys[end - 1] for other, end in ends)
        return any(job.keys[found : found + 1] == other.keys[found : found + 1] for other in self.filling)

    def compact(self, count: int) -> np.ndarray:
        """Moves all requests into the first of `count` slots, in the order of their old ones, and returns which those were; -1
        stands for a slot that stays empty."""
        rows, old, jobs = np.full((count,), -1, np.int32), self.tables, self.taken
        self.tables = [np.full((count, table.shape[1]), -1, np.int32) for table in old]
        self.jobs = [*jobs, *[None] * (count - len(jobs))]
        for slot, job in enumerate(jobs):
            for table, before in zip(self.tables, old, strict=True):
                table[slot] = before[job.slot]
            rows[slot], job.slot = job.slot, slot
        return rows

    def table(self, width: int, rows: np.ndarray | None = None) -> Any:
        """The first `width` columns of slots' page tables, as programs take them, in arrays of their own.

        Programs run while the host goes on, and on a CPU they may read the very memory they were given: a table that changed
        under cycles would send their keys and values to other requests' pages.

        Args:
          rows: the slots; None for all in order. One past the last has no pages.
        """
        nobody, chosen = np.full((1, width), -1, np.int32), slice(len(self.jobs)) if rows is None else rows
        tables = [np.concatenate([table[:, :width], nobody])[chosen] for table in self.tables]
        return join_tables([pool.group for pool in self.pools], tables)
