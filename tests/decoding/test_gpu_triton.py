"""Decoding with the kernels of GPUs older than Hopper, compiled by jax-triton: on any GPU that has it."""

import importlib
import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

import dflash_jax as dj
from dflash_jax.decoding.loop import loop
from dflash_jax.engine import MAX_CYCLES, STOP_WIDTH
from dflash_jax.engine.requests import empty_state

pytestmark = pytest.mark.gpu


@pytest.fixture
def no_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No GPU counts as a Hopper, so that ops choose as they do on others."""
    pytest.importorskip("jax_triton")
    for module in ("core.dispatch", "core.device", "attention.paged.schedule"):
        monkeypatch.setattr(importlib.import_module(f"dflash_kernels.{module}"), "HOPPER", -1)
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.usefixtures("no_hopper")
@pytest.mark.parametrize("draft", [True, False])
def test_pages_are_never_copied(make_pair, draft):
    """The compiled loop holds the kernels, and no copy of a page pool."""
    pair = make_pair(num_pages=333, dtype=jnp.dtype(jnp.bfloat16))
    engine = pair.engine
    engine.weights = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), engine.weights)
    setup = engine.setup(mode="greedy", draft=draft)
    state = empty_state(setup, 2, STOP_WIDTH, engine.dtype, engine.take_pools())
    table = jax.ShapeDtypeStruct((2, 4), jnp.int32)
    call = (engine.weights, table, state, jnp.int32(4), jnp.bool_(False), jnp.zeros((2,), bool))
    text = engine.programs.prepare(loop, (setup, MAX_CYCLES), (2,), *call).as_text()
    assert "triton_kernel_call" in text
    assert "mosaic_gpu" not in text
    assert "[333,1,16,16]" in text, "the pools' shape changed: adapt the test"
    copies = [line.strip() for line in text.splitlines() if re.search(r"= bf16\[333,1,16,16\]\S* copy", line)]
    assert copies == []


@pytest.mark.usefixtures("no_hopper")
def test_bfloat16_drafting_follows_plain_decoding():
    """One and sixteen tokens go through different shapes, so near-ties may turn; most texts still agree."""
    model = dj.load(dtype="bfloat16", max_batch=1, max_model_len=512)
    prompts = ["def quicksort(", "import os\n\n\ndef ", "class Stack:\n    def __init__(self"]
    for prompt in prompts:
        params = dj.SamplingParams(max_tokens=64, ignore_eos=True)
        drafted, plain = (dj.generate(model, prompt, params, draft=draft) for draft in (True, False))
        assert drafted.token_ids[:8] == plain.token_ids[:8]
