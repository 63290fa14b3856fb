"""Everything an engine can need, compiled ahead."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from dflash_jax.cache import Pages
from dflash_jax.cache.groups import join_tables
from dflash_jax.cache.recurrent import State, copy_state, make_states
from dflash_jax.decoding.grammar_masks import BITS
from dflash_jax.decoding.grammar_tables import GrammarTables
from dflash_jax.decoding.loop import loop
from dflash_jax.decoding.masked_cycle import draft_block, judge_block, verify_block
from dflash_jax.decoding.prefill import Caches, Pictured, admit, prefill_chunk
from dflash_jax.decoding.state import DecodeState, Setup, resize, without_pools
from dflash_jax.engine.buckets import PIECES_OF_ONE, round_up
from dflash_jax.engine.cascade import GROUPS, Sharers, Sharing
from dflash_jax.engine.masked_cycles import DRAFT_DONATES, JUDGE_DONATES, VERIFY_DONATES
from dflash_jax.engine.requests import STOP_WIDTH, Needs, Request, empty_state, request_rows
from dflash_jax.engine.resources import MAX_CYCLES, Resources
from dflash_jax.engine.verify_policy import Length, kind_of


def admit_program(
    setup: Setup, _: None, state: DecodeState, slots: Array, rows: DecodeState, logits: Array, masks: Array | None,
    tables: GrammarTables | None = None,
):  # fmt: skip
    """`admit` with the argument that programs keep for weights."""
    return admit(setup, state, slots, rows, logits, masks, tables)


def resize_program(_: None, state: DecodeState, rows: Array) -> DecodeState:
    """`resize` with the argument that programs keep for weights."""
    return resize(state, rows)


def copy_program(
    _: None, into: tuple[State, ...], source: tuple[State, ...], row: Array, of: Array
) -> tuple[State, ...]:
    """`copy_state` with the argument that programs keep for weights."""
    return copy_state(into, source, row, of)


def warmup_jobs(
    core: Resources, setups: Iterable[Setup], batch: Iterable[int] | None
) -> Iterator[Callable[[], object]]:
    """See `Engine.warmup_jobs`."""
    yield core.ready_pools
    buckets = core.buckets
    sizes = sorted({round_up(size, buckets.batch) for size in (buckets.batch if batch is None else batch)})
    if core.snapshots.count:
        yield from itertools.chain.from_iterable(snapshot_jobs(core, size) for size in sizes)
    for setup in setups:
        jobs = Jobs(core, setup, STOP_WIDTH)
        for old, new in itertools.permutations(sizes, 2):
            yield jobs.resize(old, new)
        # States are written by slot: for a target that has such the program of a prompt is of a number of slots.
        for width, slots in itertools.product(buckets.width, sizes if core.state_bytes else sizes[:1]):
            calls = [(rows, buckets.piece) for rows in buckets.pieces]
            if buckets.whole is not None and width * core.page_size > PIECES_OF_ONE * buckets.piece:
                calls.append(buckets.whole)
            for call, pictured in itertools.product(calls, (False, True) if core.pictures else (False,)):
                yield jobs.prefill(width, *call, slots, pictured=pictured)
        for size in sizes:
            yield from (jobs.admit(size, rows) for rows in (*buckets.pieces, *([] if buckets.whole is None else [1])))
            for length, width in itertools.product(core.verify_lengths(setup, size), buckets.width):
                jobs = Jobs(core, core.verifying(setup, length, size), STOP_WIDTH)
                yield jobs.loop(size, width)
                yield from (
                    jobs.loop(size, width, shared=form) for form in forms_that_pay(core, size, length.tokens, width)
                )


def forms_that_pay(core: Resources, slots: int, length: int, width: int) -> Iterator[Sharing]:
    """Forms in which cycles of such a program may read shared pages once: it pays if all slots share all of a table's columns.

    Few engines have requests for the program of several groups: it is compiled when they come, unless it was asked for.
    """
    policy = core.cascade_policy
    whole = Sharers(slots, width * core.page_size)
    if policy is not None and slots > 1 and policy.saved_s([whole], slots, length) > 0:
        yield "group"
        if policy.asked and slots > 3:
            yield "groups"


def snapshot_jobs(core: Resources, slots: int) -> Iterator[partial[None]]:
    """Jobs that compile the copies between the states of so many slots and the pool of snapshots."""
    number = np.int32(0)
    ours, kept = (
        jax.eval_shape(partial(make_states, core.target, rows, core.dtype)) for rows in (slots, core.snapshots.count)
    )
    for into, source in ((kept, ours), (ours, kept)):
        yield partial(core.programs.prepare, copy_program, (), (1,), None, into, source, number, number)


def first_jobs(
    core: Resources, requests: Sequence[Request], *, draft: bool, slots: int | None, cycles: Sequence[int]
) -> Iterator[Callable[[], None]]:
    """The first calls of a batch of these requests, in order: every chunk, the first token, and the first cycles.

    Args:
      slots: how many run side by side; None for as many as there are.
      cycles: numbers of cycles that the first loops may run, in ascending order.
    """
    slots = round_up(max(1, len(requests) if slots is None else slots), core.buckets.batch)
    needs = Needs.of(request.needs for request in requests[:slots])
    setup = core.setup(mode=needs.mode, draft=draft, logprobs=needs.logprobs, sampling=needs.sampling)
    setup = core.verifying(setup, first_length(core, setup, requests, slots), slots)
    jobs, calls = Jobs(core, setup, needs.stop_width), dict.fromkeys(prompt_calls(core, requests, slots))
    pictured = any(request.pictures is not None for request in requests)
    yield from (jobs.prefill(*call, slots, pictured=pictured) for call in calls)
    if any(core.snapshot_places(0, 0, len(request.prompt)) for request in requests):
        yield from snapshot_jobs(core, slots)
    yield from (jobs.admit(slots, rows) for rows in dict.fromkeys(rows for _, rows, _ in calls))
    widths, longest = dict[int, None](), 0
    for request, count in itertools.product(requests, cycles):
        ahead = max(0, min((count - 1) * setup.width, request.params.max_tokens - 2))
        longest = max(longest, len(request.prompt) + ahead + core.lookahead)
        widths[core.width_of(longest)] = None
    yield from (jobs.loop(slots, width) for width in widths)


def first_length(core: Resources, setup: Setup, requests: Sequence[Request], slots: int) -> Length:
    """Verified length of the first cycles of these requests if nothing runs before them."""
    if setup.draft is None or not requests:
        return Length(setup.offered)
    first = requests[0]  # decodes alone until the next one is prefilled
    return core.verify_policy.first(kind_of(first), slots, float(len(first.prompt)))


def prompt_calls(core: Resources, requests: Sequence[Request], slots: int) -> Iterator[tuple[int, int, int]]:
    """Width of the page table, rows, and tokens of each for every call that prefills these requests, where none finds pages and
    those that have no slot at first come one by one."""
    buckets, coming, taken = core.buckets, [len(request.prompt) for request in requests], 0
    filling: list[tuple[int, int, list[int]]] = []  # what is in the pages, all, and where pieces end before that
    while coming or filling:
        while coming and (
            not filling or (taken < slots and coming[0] <= buckets.room([length - end for end, length, _ in filling]))
        ):
            length, taken = coming.pop(0), taken + 1
            filling.append((0, length, core.snapshot_places(0, 0, length)))
        stops = [(stops or [length])[0] for _, length, stops in filling]
        rows, size = buckets.prompts([stop - end for stop, (end, _, _) in zip(stops, filling, strict=True)])
        left, longest, after = rows, 0, []
        for stop, (end, length, places) in zip(stops, filling, strict=True):
            pieces = min(left, -(-(stop - end) // size))
            end, left = min(stop, end + pieces * size), left - pieces
            longest = max(longest, end if pieces else 0)
            after.append((end, length, [place for place in places if place > end]))
        yield core.width_of(longest), rows, size
        filling = [one for one in after if one[0] < one[1]]


class Jobs:
    """Makes jobs that compile for one setup. They need the shapes of weights and pools only."""

    def __init__(self, core: Resources, setup: Setup, stop_width: int):
        self.core, self.setup, self.stop_width = core, setup, stop_width
        self.prepare = core.programs.prepare
        self.scalar, self.flag = np.int32(0), np.bool_(False)

    @cached_property
    def pools(self) -> tuple[Pages, Pages]:
        return self.core.pool_shapes()

    def prefill(self, width: int, rows: int, size: int, slots: int, *, pictured: bool = False) -> partial[None]:
        """The job that compiles the program of prompt chunks of this shape; `pictured`: of prompts with pictures."""
        ids, numbers = jax.ShapeDtypeStruct((rows, size), np.int32), jax.ShapeDtypeStruct((rows,), np.int32)
        states = jax.eval_shape(partial(make_states, self.core.target, slots, self.core.dtype))
        caches = Caches(*self.pools, states)
        step = (self.core.weights, self._table(rows, width), caches, ids, numbers, numbers, numbers)
        if pictured:
            shapes = (rows, size, 3), (rows, size), (rows, size, self.core.target.hidden_size)
            kinds = np.int32, np.bool_, self.core.dtype
            told: Any = map(jax.ShapeDtypeStruct, shapes, kinds)
            step = (*step, Pictured(*told))
        return partial(self.prepare, prefill_chunk, (self.setup.for_prefill(),), (2,), *step)

    def admit(self, slots: int, rows: int) -> partial[None]:
        setup = self.setup.verifying(self.setup.offered)  # one program whatever is verified
        arrays = request_rows(setup, [None] * rows, self.stop_width, self.core.dtype)
        numbers = jax.ShapeDtypeStruct((rows,), np.int32)
        logits = jax.ShapeDtypeStruct((rows, 1, self.core.target.vocab_size), np.float32)
        masks = self._masks(rows, 1) if setup.mode == "structured" else None
        call = (None, without_pools(self._state(slots)), numbers, arrays, logits, masks, *self._tables())
        return partial(self.prepare, admit_program, (setup,), (1,), *call)

    def loop(self, slots: int, width: int, *, shared: Sharing | None = None) -> partial[None]:
        """`shared`: one that reads the pages that a group shares once, or those of several groups."""
        retired, more = np.zeros((slots,), bool), self._more(slots, shared=shared)
        if self.setup.mode == "structured":
            return self._masked_cycle(slots, width, retired, *more)
        call = (self.core.weights, self._table(slots, width), self._state(slots), self.scalar, self.flag, retired)
        tables = self._tables()
        told = (
            (retired if self.setup.exact else None, *tables) if tables or self.setup.exact else ()
        )  # which of them draft
        return partial(self.prepare, loop, (self.setup, MAX_CYCLES), (2,), *call, *more, *told)

    def _more(self, slots: int, *, shared: Sharing | None) -> tuple[Any, Any]:
        """Estimate and shared pages, as `loop` takes them."""
        numbers = self.setup.signs + self.setup.width - 1
        estimate = jax.ShapeDtypeStruct((numbers,), np.float32) if self.setup.per_request else None
        shape = (slots,) if shared == "group" else (GROUPS, slots)
        return estimate, None if shared is None else np.zeros(shape, np.int32)

    def _masked_cycle(self, slots: int, width: int, retired: np.ndarray, estimate: Any, shared: Any) -> partial[None]:
        """Named by the first of a cycle's programs; compiles all of them."""
        weights, table = self.core.weights, self._table(slots, width)
        call = (weights, table, self._state(slots), retired, estimate, shared)

        def prepare(function: Callable, static: tuple, donate: tuple[int, ...], *args: Any) -> None:
            self.prepare(function, static, donate, *args)
            state, _, block = jax.eval_shape(partial(function, *static), *args)
            self.prepare(verify_block, static, VERIFY_DONATES, weights, table, state, block, shared)
            state, rows = jax.eval_shape(partial(verify_block, *static), weights, table, state, block, shared)
            masks = self._masks(slots, self.setup.width)
            drafts = retired if self.setup.exact else None
            self.prepare(judge_block, static, JUDGE_DONATES, weights, state, block, rows, masks, drafts)

        return partial(prepare, draft_block, (self.setup,), DRAFT_DONATES, *call)

    def _tables(self) -> tuple[GrammarTables, ...]:
        return (self.core.shelf.shapes(),) if self.setup.mode == "regular" else ()

    def _masks(self, rows: int, places: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, places, -(-self.core.target.vocab_size // BITS)), np.uint32)

    def resize(self, old: int, new: int) -> partial[None]:
        rows = jax.ShapeDtypeStruct((new,), np.int32)
        return partial(self.prepare, resize_program, (), (), None, without_pools(self._state(old)), rows)

    def _state(self, slots: int) -> DecodeState:
        make = partial(empty_state, self.setup, slots, self.stop_width, self.core.dtype)
        return jax.eval_shape(make, self.pools)

    def _table(self, rows: int, width: int) -> Any:
        groups = [pool.group for pool in self.core.groups]
        return join_tables(groups, [jax.ShapeDtypeStruct((rows, width), np.int32)] * len(groups))
