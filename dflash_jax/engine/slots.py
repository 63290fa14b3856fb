"""Which request sits in which slot, and which pages are whose. Host memory only: the device sees the page tables."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from dflash_jax.cache import PageAllocator, extend_keys
from dflash_jax.cache.snapshots import SnapshotAccount
from dflash_jax.decoding.grammar_masks import Follower
from dflash_jax.decoding.prefill import Scores
from dflash_jax.engine.requests import Needs, Request, Update

type Sink = Callable[[int, Update | Exception], None]
"""Takes what a ticket's request gains, or the error that ended it. Called by the thread that steps: it must not block."""


def no_sink(ticket: int, what: Update | Exception) -> None:
    """For requests whose updates nobody reads."""


@dataclass(eq=False)
class Job:
    """A request and how far it has come.

    Attributes:
      ticket: the scheduler's number for it, never given twice; tickets count in order of arrival.
      sink: takes its updates.
      draft: whether the drafter drafts for it.
      cycles: cycles between two looks at the results, at most.
      wanted_slots: how many requests are to run side by side at most; None for as many as there are.
      tokens: what it has emitted. They stay when its slot is lost.
      slot: -1 while it waits.
      stay: numbers its stays in slots: results of an earlier one are nobody's.
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
      follower: its place in its grammar while it has a slot; None without one.
    """

    request: Request
    ticket: int
    sink: Sink = no_sink
    draft: bool = True
    cycles: int = 1
    wanted_slots: int | None = None
    tokens: list[int] = field(default_factory=list)
    slot: int = -1
    stay: int = 0
    pages: list[int] = field(default_factory=list)
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

    def __post_init__(self):
        self.needs = self.request.needs

    @property
    def context(self) -> tuple[int, ...]:
        """What must be in the pages before it decodes: all but the pending token, where it has one."""
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

    def lose_slot(self) -> None:
        """As it is before it enters: what the account and the device know of it is nobody's."""
        self.pages, self.slot, self.decoding, self.stay = [], -1, False, self.stay + 1
        self.due = self.coming = 0
        self.stops, self.snapshot, self.parts, self.follower = [], -1, [], None


class Slots:
    """The slots of a batch.

    Args:
      count: slots.
      width: columns of the page tables.
      allocator: gives the pages.
      page_size: tokens of a page.
      root: names what the pages hold; None shares no page.
      snapshots: without whose states no page is found; None for a target without states.
      places: after which tokens of a prompt its state is kept, of those whose state it found, those that its pages have in common
        with others, and all.

    Attributes:
      filling: requests whose contexts are not in the pages yet, in the order in which they entered.
    """

    def __init__(
        self,
        count: int,
        width: int,
        allocator: PageAllocator,
        page_size: int,
        root: bytes | None,
        snapshots: SnapshotAccount | None = None,
        places: Callable[[int, int, int], list[int]] = lambda cached, shared, length: [],
    ):
        self.snapshots, self.places = snapshots, places
        self.allocator, self.page_size, self.root = allocator, page_size, root
        self.jobs: list[Job | None] = [None] * count
        self.filling: list[Job] = []
        # -1 is no page: a write there is dropped, a read is masked.
        self.tables = np.full((count, width), -1, np.int32)

    @property
    def taken(self) -> list[Job]:
        return [job for job in self.jobs if job is not None]

    @property
    def decoding(self) -> list[Job]:
        return [job for job in self.taken if job.decoding]

    @property
    def youngest(self) -> Job:
        return max(self.taken, key=lambda job: job.ticket)

    def enter(self, job: Job, pages: int, spare: int, most: int | None = None) -> bool:
        """Gives `job` a slot and `pages` pages, the first ones with what they hold already; False where there is no room, or where
        it would find more of them once those before it are prefilled.

        Args:
          spare: free pages that must be left over.
          most: tokens that its pages may lack.
        """
        if None not in self.jobs:
            return False
        shared, known, snapshot = self._find(job)
        lacks = job.length - len(shared) * self.page_size
        if (
            self._comes(job, len(shared))
            or pages - len(shared) + spare > self.allocator.num_free
            or (most is not None and lacks > most)
        ):
            self.allocator.free(shared)
            return False
        job.slot, job.decoding, job.pages = self.jobs.index(None), False, shared
        job.filled = job.cached = len(shared) * self.page_size
        job.fresh = job.due = job.coming = 0
        if self.snapshots is not None and self.root is not None:
            job.snapshot = snapshot
            job.stops = self.places(job.filled, known * self.page_size, job.length)
        self.jobs[job.slot] = job
        self.filling.append(job)
        self.resize(job, pages)
        return True

    def resize(self, job: Job, pages: int) -> None:
        """Gives pages to `job` or takes its last ones, so that it has `pages`."""
        if pages < len(job.pages):
            self.allocator.free(job.pages[pages:])
            del job.pages[pages:]
        else:
            job.pages += self.allocator.allocate(pages - len(job.pages))
        self.tables[job.slot] = -1
        self.tables[job.slot, : len(job.pages)] = job.pages

    def leave(self, job: Job) -> None:
        """Takes slot and pages from `job`. What full pages hold can be found until the pages are given to others."""
        self.publish(job)
        self.tables[job.slot] = -1
        self.jobs[job.slot] = None
        self.filling = [other for other in self.filling if other is not job]
        pages = job.pages
        job.lose_slot()
        self.allocator.free(pages)

    def filled(self, job: Job) -> None:
        """The context of `job` is in its pages."""
        job.decoding = True
        self.filling.remove(job)
        self.publish(job)

    def publish(self, job: Job) -> None:
        """Lets others find the full pages of `job`: those below the tokens that either model may still write."""
        if self.root is not None:
            known = (*job.request.prompt, *job.tokens)[: job.filled - job.fresh]
            extend_keys(job.keys, known, self.page_size, self.root)
            for page, key in zip(job.pages[: len(known) // self.page_size], job.keys, strict=False):
                self.allocator.publish(page, key)

    def _find(self, job: Job) -> tuple[list[int], int, int]:
        """Pages with the beginning of the context of `job`, at least one token of it left out: its logits are wanted. Where the
        target has states, as many as end with a snapshot. None of a prompt that is scored: pages hold no scores.

        Returns:
          The pages; how many there are that others have or are about to fill; and the row of the snapshot, or -1.
        """
        if self.root is None or job.scored:
            return [], 0, -1
        extend_keys(job.keys, job.context, self.page_size, self.root)
        keys = job.keys[: (len(job.context) - 1) // self.page_size]
        pages = self.allocator.find(keys)
        if self.snapshots is None:
            return pages, len(pages), -1
        alike = [sum(ours == theirs for ours, theirs in zip(keys, other.keys, strict=False)) for other in self.filling]
        number, row = self.snapshots.find(keys[: len(pages)])
        self.allocator.free(pages[number:])
        return pages[:number], max(len(pages), *alike, 0), row

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
        self.tables = np.full((count, old.shape[1]), -1, np.int32)
        self.jobs = [*jobs, *[None] * (count - len(jobs))]
        for slot, job in enumerate(jobs):
            rows[slot], self.tables[slot], job.slot = job.slot, old[job.slot], slot
        return rows

    def table(self, width: int) -> np.ndarray:
        """The first `width` columns of all slots' page tables as an array of its own.

        Programs run while the host goes on, and on a CPU they may read the very memory they were given: a table that changed
        under cycles would send their keys and values to other requests' pages.
        """
        return self.tables[:, :width].copy()
