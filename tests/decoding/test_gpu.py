"""What only a GPU can show: `pytest -m gpu`."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_convert.hf_reader import assemble

import dflash_jax as dj
from dflash_jax.checkpoint_pair import open_pair
from dflash_jax.decoding.loop import loop
from dflash_jax.engine import MAX_CYCLES, STOP_WIDTH
from dflash_jax.requests import empty_state

pytestmark = pytest.mark.gpu


def test_runs_on_a_gpu():
    assert jax.default_backend() == "gpu"


@pytest.mark.parametrize("draft", [True, False])
def test_pages_are_never_copied(make_pair, draft):
    """The compiled loop holds no copy of a page pool: pools change in place for all cycles."""
    pair = make_pair(num_pages=333, dtype=jnp.dtype(jnp.bfloat16))
    engine = pair.engine
    engine.weights = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), engine.weights)
    setup = engine.setup(mode="greedy", draft=draft)
    state = empty_state(setup, 2, STOP_WIDTH, engine.dtype, engine.take_pools())
    table = jax.ShapeDtypeStruct((2, 4), jnp.int32)
    call = (engine.weights, table, state, jnp.int32(4), jnp.bool_(False), jnp.zeros((2,), bool))
    text = engine.programs.prepare(loop, (setup, MAX_CYCLES), (2,), *call).as_text()
    assert "[333,1,16,16]" in text, "the pools' shape changed: adapt the test"
    copies = [line.strip() for line in text.splitlines() if re.search(r"= bf16\[333,1,16,16\]\S* copy", line)]
    assert copies == []


def test_bfloat16_drafting_follows_plain_decoding():
    """In bfloat16 one and sixteen tokens go through different kernels, so near-ties may turn; most texts still agree."""
    model = dj.load(dtype="bfloat16", max_batch=1, max_model_len=512)
    prompts = ["def quicksort(", "import os\n\n\ndef ", "class Stack:\n    def __init__(self"]
    for prompt in prompts:
        params = dj.SamplingParams(max_tokens=64, ignore_eos=True)
        drafted, plain = (dj.generate(model, prompt, params, draft=draft) for draft in (True, False))
        assert drafted.token_ids[:8] == plain.token_ids[:8]


def test_weights_arrive_as_they_are_stored():
    """Arrays are read into memory that is used again: none may be overwritten before the GPU has it."""
    for checkpoint in open_pair():
        params = checkpoint.load("float32")
        for step in checkpoint.plan.steps:
            stored = assemble(step, "float32")
            assert np.array_equal(np.asarray(params[step.parameter.name]), stored), step.parameter.name
