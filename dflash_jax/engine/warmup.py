"""Everything an engine can need, compiled ahead."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import jax
import numpy as np
from jaxtyping import Array

from dflash_jax.decoding.loop import loop
from dflash_jax.decoding.prefill import admit, prefill_chunk
from dflash_jax.decoding.state import DecodeState, Setup
from dflash_jax.engine.core import MAX_CYCLES, STOP_WIDTH, Core
from dflash_jax.programs import round_up
from dflash_jax.requests import Request, empty_state, request_row
from dflash_jax.sampling_params import SamplingParams


def admit_program(setup: Setup, _: None, state: DecodeState, slot: Array, row: DecodeState, logits: Array):
    """`admit` with the argument that programs keep for weights."""
    return admit(setup, state, slot, row, logits)


def warmup_jobs(core: Core, setups: Iterable[Setup], batch: Iterable[int] | None) -> Iterator[Callable[[], object]]:
    """See `Engine.warmup_jobs`."""
    yield core.take_pools
    buckets = core.buckets
    sizes = sorted({round_up(size, buckets.batch) for size in (buckets.batch if batch is None else batch)})
    for setup in setups:
        jobs = _Jobs(core, setup, STOP_WIDTH)
        for width, chunk in itertools.product(buckets.width, buckets.chunk):
            if chunk <= round_up(width * core.page_size, buckets.chunk):
                yield jobs.prefill(width, chunk)
        for size in sizes:
            yield jobs.admit(size)
            for width in buckets.width:
                yield jobs.loop(size, width)


def first_jobs(
    core: Core, setup: Setup, requests: Sequence[Request], *, slots: int, stop_width: int, cycles: Sequence[int]
) -> Iterator[Callable[[], None]]:
    """What a run of these requests calls first, in that order: every chunk, the first token, and the first cycles.

    Args:
      cycles: numbers of cycles that the first loops may run, in ascending order.
    """
    jobs, buckets, steps = _Jobs(core, setup, stop_width), core.buckets, dict[tuple[int, int], None]()
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


class _Jobs:
    """Makes jobs that compile for one setup. They need the shapes of weights and pools only."""

    def __init__(self, core: Core, setup: Setup, stop_width: int):
        self.core, self.setup, self.stop_width = core, setup, stop_width
        self.prepare, self.pools = core.programs.prepare, core.pool_shapes()
        self.scalar, self.flag = np.int32(0), np.bool_(False)

    def prefill(self, width: int, chunk: int) -> Callable[[], None]:
        ids = jax.ShapeDtypeStruct((1, chunk), np.int32)
        step = (self.core.weights, self._table(1, width), self.pools, ids, self.scalar, self.scalar)
        return partial(self.prepare, prefill_chunk, (self.setup.for_prefill(),), (2,), *step)

    def admit(self, slots: int) -> Callable[[], None]:
        row = request_row(self.setup, Request(0, (0,), SamplingParams()), self.stop_width, self.core.dtype)
        logits = jax.ShapeDtypeStruct((1, 1, self.core.target.vocab_size), np.float32)
        call = (None, self._state(slots), self.scalar, row, logits)
        return partial(self.prepare, admit_program, (self.setup,), (1,), *call)

    def loop(self, slots: int, width: int) -> Callable[[], None]:
        retired = np.zeros((slots,), bool)
        call = (self.core.weights, self._table(slots, width), self._state(slots), self.scalar, self.flag, retired)
        return partial(self.prepare, loop, (self.setup, MAX_CYCLES), (2,), *call)

    def _state(self, slots: int) -> DecodeState:
        make = partial(empty_state, self.setup, slots, self.stop_width, self.core.dtype)
        return jax.eval_shape(make, self.pools)

    def _table(self, rows: int, width: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, width), np.int32)
