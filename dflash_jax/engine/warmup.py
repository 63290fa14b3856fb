"""Everything an engine can need, compiled ahead."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial

import jax
import numpy as np
from jaxtyping import Array

from dflash_jax.cache import Pages
from dflash_jax.decoding.loop import loop
from dflash_jax.decoding.prefill import admit, prefill_chunk
from dflash_jax.decoding.resize import resize, without_pools
from dflash_jax.decoding.state import DecodeState, Setup
from dflash_jax.engine.core import MAX_CYCLES, STOP_WIDTH, Core
from dflash_jax.programs import round_up
from dflash_jax.requests import Request, empty_state, request_row
from dflash_jax.sampling_params import SamplingParams


def admit_program(setup: Setup, _: None, state: DecodeState, slot: Array, row: DecodeState, logits: Array):
    """`admit` with the argument that programs keep for weights."""
    return admit(setup, state, slot, row, logits)


def resize_program(_: None, state: DecodeState, rows: Array) -> DecodeState:
    """`resize` with the argument that programs keep for weights."""
    return resize(state, rows)


def warmup_jobs(core: Core, setups: Iterable[Setup], batch: Iterable[int] | None) -> Iterator[Callable[[], object]]:
    """See `Engine.warmup_jobs`."""
    yield core.ready_pools
    buckets = core.buckets
    sizes = sorted({round_up(size, buckets.batch) for size in (buckets.batch if batch is None else batch)})
    for setup in setups:
        jobs = Jobs(core, setup, STOP_WIDTH)
        for old, new in itertools.permutations(sizes, 2):
            yield jobs.resize(old, new)
        for width, chunk in itertools.product(buckets.width, buckets.chunk):
            if chunk <= round_up(width * core.page_size, buckets.chunk):
                yield jobs.prefill(width, chunk)
        for size in sizes:
            yield jobs.admit(size)
            for length, width in itertools.product(core.verify_lengths(setup, size), buckets.width):
                yield Jobs(core, setup.verifying(length), STOP_WIDTH).loop(size, width)


def first_jobs(
    core: Core,
    setup: Setup,
    requests: Sequence[Request],
    *,
    slots: int,
    stop_width: int,
    cycles: Sequence[int],
    length: int,
) -> Iterator[Callable[[], None]]:
    """What a run of these requests calls first, in that order: every chunk, the first token, and the first cycles.

    Args:
      cycles: numbers of cycles that the first loops may run, in ascending order.
      length: what the first cycles will verify.
    """
    setup = setup.verifying(length)
    jobs, buckets, steps = Jobs(core, setup, stop_width), core.buckets, dict[tuple[int, int], None]()
    for request in requests:
        length = len(request.prompt)
        for start in range(0, length, buckets.chunk[-1]):
            end = min(length, start + buckets.chunk[-1])
            steps[core.width_of(end), round_up(end - start, buckets.chunk)] = None
    yield from (jobs.prefill(width, chunk) for width, chunk in steps)
    yield jobs.admit(slots)
    widths, longest = dict[int, None](), 0
    for request, count in itertools.product(requests, cycles):
        ahead = max(0, min((count - 1) * setup.width, request.params.max_tokens - 2))
        longest = max(longest, len(request.prompt) + ahead + core.lookahead)
        widths[core.width_of(longest)] = None
    yield from (jobs.loop(slots, width) for width in widths)


class Jobs:
    """Makes jobs that compile for one setup. They need the shapes of weights and pools only."""

    def __init__(self, core: Core, setup: Setup, stop_width: int):
        self.core, self.setup, self.stop_width = core, setup, stop_width
        self.prepare = core.programs.prepare
        self.scalar, self.flag = np.int32(0), np.bool_(False)

    @cached_property
    def pools(self) -> tuple[Pages, Pages]:
        return self.core.pool_shapes()

    def prefill(self, width: int, chunk: int) -> partial[None]:
        ids = jax.ShapeDtypeStruct((1, chunk), np.int32)
        step = (self.core.weights, self._table(1, width), self.pools, ids, self.scalar, self.scalar)
        return partial(self.prepare, prefill_chunk, (self.setup.for_prefill(),), (2,), *step)

    def admit(self, slots: int) -> partial[None]:
        setup = self.setup.verifying(self.setup.offered)  # one program whatever is verified
        row = request_row(setup, Request(0, (0,), SamplingParams()), self.stop_width, self.core.dtype)
        logits = jax.ShapeDtypeStruct((1, 1, self.core.target.vocab_size), np.float32)
        call = (None, self._state(slots), self.scalar, row, logits)
        return partial(self.prepare, admit_program, (setup,), (1,), *call)

    def loop(self, slots: int, width: int) -> partial[None]:
        retired = np.zeros((slots,), bool)
        call = (self.core.weights, self._table(slots, width), self._state(slots), self.scalar, self.flag, retired)
        return partial(self.prepare, loop, (self.setup, MAX_CYCLES), (2,), *call)

    def resize(self, old: int, new: int) -> partial[None]:
        rows = jax.ShapeDtypeStruct((new,), np.int32)
        return partial(self.prepare, resize_program, (), (), None, without_pools(self._state(old)), rows)

    def _state(self, slots: int) -> DecodeState:
        make = partial(empty_state, self.setup, slots, self.stop_width, self.core.dtype)
        return jax.eval_shape(make, self.pools)

    def _table(self, rows: int, width: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, width), np.int32)
