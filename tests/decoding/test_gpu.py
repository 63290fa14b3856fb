"""What only a GPU can show: `pytest -m gpu`."""

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflash_jax as dj
from dflash_jax.checkpoints.huggingface import assemble
from dflash_jax.checkpoints.pair import open_pair
from dflash_jax.checkpoints.weights import weight_shapes
from dflash_jax.decoding.prefill import Caches, prefill_chunk
from dflash_jax.engine import STOP_WIDTH, Engine
from dflash_jax.engine.warmup import Jobs
from dflash_jax.models import family_named, fuse_context_projection, init_params
from dflash_jax.models.presets import DRAFTERS, TARGETS

pytestmark = pytest.mark.gpu


def test_runs_on_a_gpu():
    assert jax.default_backend() == "gpu"


def published_shapes(cache_dtype: str | None) -> Engine:
    """Two layers of Qwen3-4B and of its drafter, whose kernels are what users get; weights are shapes."""
    few = {"num_layers": 2, "windows": (None, None), "vocab_size": 4096}
    target = replace(TARGETS["Qwen3-4B"], **few)
    reads = {"mask_token_id": 4095, "target_layer_ids": (0, 1), "num_target_layers": 2, "causal": (False, False)}
    draft, dtype = replace(DRAFTERS["Qwen3-4B-DFlash-b16"], **few, **reads), jnp.dtype(jnp.bfloat16)
    weights = weight_shapes([(target, family_named("qwen3")), (draft, family_named("dflash"))], dtype)
    return Engine(
        target=target,
        draft=draft,
        weights=weights,
        dtype=dtype,
        max_model_len=1024,
        num_pages=333,
        cache_dtype=cache_dtype,
    )


@pytest.mark.parametrize("draft", [True, False], ids=["drafting", "plain"])
@pytest.mark.parametrize("cache_dtype", [None, "fp8", "int8"])
@pytest.mark.parametrize("slots", [1, 4])
def test_pages_are_never_copied(slots, cache_dtype, draft):
    """The compiled loop holds no copy of a page pool: pools change in place for all cycles."""
    engine = published_shapes(cache_dtype)
    text = Jobs(engine, engine.setup(mode="greedy", draft=draft), STOP_WIDTH).loop(slots, 16)().as_text()
    assert "mosaic_gpu" in text or jax.devices()[0].compute_capability != "9.0"
    assert "[333,8,64,128]" in text, "the pools' shape changed: adapt the test"
    copies = [line.strip() for line in text.splitlines() if re.search(r"\[333,8,64(,128)?\]\S* copy", line)]
    assert copies == []


@pytest.mark.parametrize("cache_dtype", [None, "fp8", "int8"])
def test_pieces_of_prompts_are_what_whole_ones_are(cache_dtype):
    """Two prompts in the rows of one call, and each in a row of its own: the same logits, but for bfloat16's rounding."""
    engine, rng = published_shapes(cache_dtype), np.random.default_rng(0)
    tables = family_named("qwen3").parameters(engine.target), family_named("dflash").parameters(engine.draft)
    weights = {
        role: init_params(table, jax.random.key(seed), "bfloat16")
        for seed, (role, table) in enumerate(zip(("target", "draft"), tables, strict=True))
    }
    weights["draft"] = fuse_context_projection(engine.draft, weights["draft"])
    setup = engine.setup(mode="greedy", draft=True).for_prefill()

    def prefill(table, ids, starts, lengths):
        numbers = (np.asarray(x, np.int32) for x in (ids, starts, lengths))
        step = (
            weights,
            np.asarray(table, np.int32),
            Caches(*engine.take_pools()),
            *numbers,
            np.arange(len(ids), dtype=np.int32),
        )
        return engine.programs.call(prefill_chunk, (setup,), (2,), *step)[1]

    lengths, logits = (300, 190), []
    prompts = [rng.integers(0, 4096, length) for length in lengths]
    pages = rng.permutation(32).reshape(2, 16)
    ids, rows = np.zeros((2, 512), np.int32), np.zeros((16, 32), np.int32)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = prompt
        logits.append(prefill(pages[row : row + 1], ids[row : row + 1], [0], [len(prompt)])[0])
    pieces = [(row, start) for row, length in enumerate(lengths) for start in range(0, length, 32)]
    for place, (row, start) in enumerate(pieces):
        rows[place] = ids[row, start : start + 32]
    owners, starts = (np.array(numbers, np.int32) for numbers in zip(*pieces, strict=True))
    counts = np.minimum(32, np.array(lengths)[owners] - starts)
    together = prefill(pages[owners], rows, starts, counts)
    for place, expected in ((9, logits[0]), (15, logits[1])):
        error = jnp.linalg.norm(together[place] - expected) / jnp.linalg.norm(expected)
        assert error < 0.03


def test_bfloat16_drafting_follows_plain_decoding():
    """In bfloat16 one and sixteen tokens go through different kernels, so near-ties may turn; most texts still agree."""
    model = dj.load(dtype="bfloat16", max_batch=1, max_model_len=512)
    prompts = ["def quicksort(", "import os\n\n\ndef ", "class Stack:\n    def __init__(self"]
    for prompt in prompts:
        params = dj.SamplingParams(max_tokens=64, ignore_eos=True)
        drafted, plain = (dj.generate(model, prompt, params, draft=draft) for draft in (True, False))
        assert drafted.token_ids[:8] == plain.token_ids[:8]


def test_texts_drawn_with_filters_are_those_of_float32():
    """The kernel of filters draws what their definition draws in float32, without drafting, but for near-ties."""
    prompts = ["def quicksort(", "import os\n\n\ndef ", "class Stack:\n    def __init__(self", "for i in range("]
    law: Any = {"temperature": 0.8, "min_p": 0.02, "top_k": 20, "top_p": 0.9}

    def texts(dtype: str, draft: bool) -> list[list[list[int]]]:
        model = dj.load(dtype=dtype, max_batch=4, max_model_len=128)
        every = [dj.SamplingParams(max_tokens=32, ignore_eos=True, seed=seed, **law) for seed in range(4)]
        return [[one.token_ids for one in dj.generate(model, prompts, params, draft=draft)] for params in every]

    def together(ours: list[list[list[int]]], theirs: list[list[list[int]]]) -> float:
        """Mean length of what two lists of texts have in common at their beginnings."""
        pairs = [pair for each in zip(ours, theirs, strict=True) for pair in zip(*each, strict=True)]
        return float(np.mean([np.argmin([*map(int.__eq__, *pair), False]) for pair in pairs]))

    found, expected = texts("bfloat16", True), texts("float32", False)
    assert together(found, expected) > 14  # 23 on a CPU
    assert together(found, [*expected[1:], expected[0]]) < 5, "other seeds should draw other texts"


@pytest.mark.parametrize("slots", [1, 4])
def test_a_drafter_in_float8_leaves_texts_alone(slots):
    """Few rows and many go through different kernels of the drafter's; the target's own are the same."""
    size: Any = {"dtype": "bfloat16", "max_batch": slots, "max_model_len": 128}
    exact, ours = (dj.load(**size, draft_weight_dtype=one) for one in (None, "fp8_dynamic"))
    prompts = ["def quicksort(", "import os\n\n\ndef ", "class Stack:\n    def __init__(self", "for i in range("][
        :slots
    ]
    params = dj.SamplingParams(max_tokens=64, ignore_eos=True)
    before, found = (dj.generate(model, prompts, params) for model in (exact, ours))
    assert [one.token_ids[:8] for one in found] == [one.token_ids[:8] for one in before]
    means = [np.mean([n for one in each for n in one.acceptance_lengths]) for each in (before, found)]
    assert means[1] > 0.8 * means[0]


def test_weights_arrive_as_they_are_stored():
    """Arrays are read into memory that is used again: none may be overwritten before the GPU has it."""
    for checkpoint in open_pair():
        params = checkpoint.load("float32")
        for step in checkpoint.plan.steps:
            stored = assemble(step, "float32")
            assert np.array_equal(np.asarray(params[step.parameter.name]), stored), step.parameter.name
