"""The slots and the verified length that the next cycles get: they change with what runs, the texts do not."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.compile.programs import start_compiling
from dflash_jax.decoding.state import resize, without_pools
from dflash_jax.engine import STOP_WIDTH, Engine
from dflash_jax.engine.requests import Request, empty_state
from dflash_jax.engine.warmup import warmup_jobs
from dflash_jax.sampling_params import SamplingParams

from .schedules import alone


@pytest.fixture(scope="module")
def engine(make_pair) -> Engine:
    """A warm one: every program of drafting is there."""
    engine = make_pair(page_size=16, max_model_len=96, max_chunk=16, max_batch=4).engine
    for job in warmup_jobs(engine, [engine.setup(mode="sampled", draft=True)], None):
        job()
    return engine


@pytest.fixture(scope="module")
def texts(engine, make_prompts):
    each = [
        SamplingParams(max_tokens=n, temperature=t, seed=7)
        for n, t in ((6, 0.0), (9, 0.8), (60, 0.0), (8, 0.9), (50, 0.8))
    ]
    return [alone(engine, prompt, params) for prompt, params in zip(make_prompts((5, 9, 14, 7, 11)), each, strict=True)]


@pytest.mark.few
@pytest.mark.parametrize("length", [None, 2, 1])
def test_slots_become_fewer_and_more_again(engine, texts, length):
    compiled = engine.programs.shapes()
    engine.verify_length = length
    if length is not None:
        compiled = None  # only the whole block was compiled ahead
    requests = [Request(i, text.prompt, text.params) for i, text in enumerate(texts)]
    run, got, seen = engine.run(requests[:4], cycles=2, slots=4), {request.index: [] for request in requests}, []
    coming = requests[4:]
    for update in run:
        got[update.index] += update.tokens
        seen.append(engine.scheduler.batch.size)
        if len(got[2]) > 25 and coming:
            run.add(coming.pop())
    engine.verify_length = None
    assert list(got.values()) == [list(text.expected) for text in texts]
    if compiled is not None:
        assert seen[0] == 4
        first = seen.index(1)
        assert 4 in seen[first:]  # the fifth request found room again
        assert seen[-1] == 1
        assert engine.programs.shapes() == compiled
    assert engine.allocator.num_free == engine.num_pages


def test_rows_move_whole(engine):
    setup = engine.setup(mode="sampled", draft=True)
    state = empty_state(setup, 4, STOP_WIDTH, engine.dtype, engine.take_pools())
    numbers = np.arange(4, dtype=np.int32)
    state = replace(
        state, pending=jnp.array(numbers + 10), seq_lens=jnp.array(numbers + 20), done=jnp.array(numbers == 2)
    )
    moved = resize(without_pools(state), jnp.array([3, 0], jnp.int32))
    assert moved.pending.tolist() == [13, 10]
    assert moved.seq_lens.tolist() == [23, 20]
    assert moved.done.tolist() == [False, False]
    grown = resize(moved, jnp.array([0, 1, -1, -1], jnp.int32))
    assert grown.pending[:2].tolist() == [13, 10]
    assert grown.done.tolist() == [False, False, True, True]
    assert grown.request.stop_ids.shape == (4, STOP_WIDTH)


def test_what_pays_is_compiled_beside_the_run(make_pair, make_prompts, monkeypatch):
    """The run goes on with what is there; later cycles find the better program."""
    engine = make_pair(page_size=16, max_model_len=160, max_batch=4).engine
    prompts = make_prompts((5, 9, 14))
    params = SamplingParams(max_tokens=120)
    expected = [alone(engine, prompt, params) for prompt in prompts]
    started = []

    def beside(jobs):
        started.extend(jobs)
        for job in jobs:
            job()
        return start_compiling(())

    monkeypatch.setattr("dflash_jax.engine.program_choice.start_compiling", beside)
    monkeypatch.setattr("dflash_jax.engine.batch.start_compiling", beside)
    monkeypatch.setattr("dflash_jax.engine.verify_auto.WORTH_COMPILING_S", 1e-9)
    engine.verify_length = "auto"
    # Nothing that this drafter proposes stands, so nothing but plain cycles can pay in the end.
    monkeypatch.setattr("dflash_jax.engine.request_acceptance.FIRST_GUESS", 0.9)
    requests = [Request(i, text.prompt, text.params) for i, text in enumerate(expected)]
    got = {request.index: [] for request in requests}
    for update in engine.run(requests, cycles=4):
        got[update.index] += update.tokens
    assert list(got.values()) == [list(text.expected) for text in expected]
    assert started
    assert len(engine.verify_policy.cycles) > 1
