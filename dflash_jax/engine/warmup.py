"""Everything an engine can need, compiled ahead."""

import itertools
from collections.abc import Callable, Iterable, Iterator
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


def warmup_jobs(core: Core, setups: Iterable[Setup], batch: Iterable[int] | None) -> Iterator[Callable[[], None]]:
    """See `Engine.warmup_jobs`."""
    prepare, pools, buckets = core.programs.prepare, core.take_pools(), core.buckets
    sizes = sorted({round_up(size, buckets.batch) for size in (buckets.batch if batch is None else batch)})
    scalar, flag = np.int32(0), np.bool_(False)

    def table(rows: int, width: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, width), np.int32)

    for setup in setups:
        for width, chunk in itertools.product(buckets.width, buckets.chunk):
            if chunk <= round_up(width * core.page_size, buckets.chunk):
                ids = jax.ShapeDtypeStruct((1, chunk), np.int32)
                step = (core.weights, table(1, width), pools, ids, scalar, scalar)
                yield partial(prepare, prefill_chunk, (setup.for_prefill(),), (2,), *step)
        row = request_row(setup, Request(0, (0,), SamplingParams()), STOP_WIDTH, core.dtype)
        logits = jax.ShapeDtypeStruct((1, 1, core.target.vocab_size), np.float32)
        for size in sizes:
            state = empty_state(setup, size, STOP_WIDTH, core.dtype, pools)
            yield partial(prepare, admit_program, (setup,), (1,), None, state, scalar, row, logits)
            for width in buckets.width:
                call = (core.weights, table(size, width), state, scalar, flag, np.zeros((size,), bool))
                yield partial(prepare, loop, (setup, MAX_CYCLES), (2,), *call)
