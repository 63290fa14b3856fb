"""Drawn gpt-oss targets against float64: logits and taps after every one of 100 tokens, and prompts in pages.

`FAMILY_SIZES` of them; a few in the suite, as every one is compiled.
"""

import os
from pathlib import Path

import numpy as np
import pytest

from .golden_files import TOLERANCE, difference
from .gpt_oss_reference import forward, packed, random_file, random_tensors
from .test_llama_sizes import in_pages
from .test_parity_llama import logits_and_taps, opened

COUNT = int(os.environ.get("FAMILY_SIZES", "2"))
LENGTH = 100


@pytest.mark.few("0")
@pytest.mark.parametrize("number", range(COUNT))
def test_a_drawn_model_is_that_of_float64(number: int, tmp_path: Path) -> None:
    """Every other one has its experts in MXFP4 and fills pages in pieces."""
    file, rng = random_file(number, num_hidden_layers=2, layer_types=KINDS), np.random.default_rng(number)
    tensors = random_tensors(file, number)
    tensors = packed(tensors, number) if number % 2 else tensors
    checkpoint = opened(tmp_path, file, tensors)
    config, params = checkpoint.config, checkpoint.family.derived(checkpoint.config, checkpoint.load("float32"))
    ids = rng.integers(0, config.vocab_size, LENGTH)
    logits, taps = forward(file, tensors, ids.tolist())
    ours = logits_and_taps(config, params, ids.tolist())
    errors = [difference(ours[0], logits), difference(ours[1], taps)]
    if number % 2:
        counts = (1, int(rng.integers(2, LENGTH)), LENGTH)
        errors += [difference(last, logits[len(prompt) - 1]) for prompt, last in in_pages(config, params, ids, counts)]
    assert max(errors) < TOLERANCE, errors


KINDS = ["sliding_attention", "full_attention"]


def test_what_is_drawn() -> None:
    files = [random_file(number) for number in range(8)]
    assert {file["num_experts_per_tok"] for file in files} == {1, 2, 3}
    assert {file["rope_scaling"]["truncate"] for file in files} == {False, True}
    assert {file["swiglu_limit"] for file in files} == {2.0, 7.0}
    assert any(file["num_attention_heads"] % 2 for file in files)
