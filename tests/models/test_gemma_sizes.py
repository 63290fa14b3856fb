"""Drawn Gemma targets against float64: logits and taps after every one of 100 tokens, and prompts in pages.

`FAMILY_SIZES` of each kind; few in the suite, as every one is compiled.
"""

import os
from pathlib import Path

import numpy as np
import pytest

from .gemma_reference import FULL, SLIDING, forward, random_file, random_tensors
from .golden_files import TOLERANCE, difference
from .test_gemma4 import TOLERANCE as WIDER
from .test_llama_sizes import in_pages
from .test_parity_llama import logits_and_taps, opened

COUNT = int(os.environ.get("FAMILY_SIZES", "1"))
LENGTH = 100
KINDS = ("gemma3", "gemma4", "gemma4_moe", "gemma4_small")


@pytest.mark.few("gemma4_moe-1", "gemma3-1", "gemma4-1")
@pytest.mark.parametrize("number", range(1, COUNT + 1))
@pytest.mark.parametrize("kind", KINDS)
def test_a_drawn_model_is_that_of_float64(kind: str, number: int, tmp_path: Path) -> None:
    """Every other one fills pages in pieces, and those whose layers share keys all do."""
    rng = np.random.default_rng(number)
    two = {} if kind == "gemma4_small" else {"num_hidden_layers": 2, "layer_types": [SLIDING, FULL]}
    file = random_file(kind, number, **two)
    tensors = random_tensors(file, number)
    checkpoint = opened(tmp_path, file, tensors)
    config, params = checkpoint.config, checkpoint.load("float32")
    ids = rng.integers(0, config.vocab_size, LENGTH)
    logits, taps = forward(file, tensors, ids.tolist())
    ours = logits_and_taps(config, params, ids.tolist())
    errors = [difference(ours[0], logits), difference(ours[1], taps)]
    if number % 2 == 0 or kind == "gemma4_small":
        counts = (1, int(rng.integers(2, LENGTH)), LENGTH)
        errors += [difference(last, logits[len(prompt) - 1]) for prompt, last in in_pages(config, params, ids, counts)]
    assert max(errors) < (TOLERANCE if kind == "gemma3" else WIDER), errors


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_drawn(kind: str) -> None:
    files = [random_file(kind, number) for number in range(8)]
    assert {file["final_logit_softcapping"] for file in files} == {None, 5.0}
    assert any(file["num_attention_heads"] % 2 for file in files)
    own = {
        "gemma3": {"attn_logit_softcapping": {None, 3.0}}, "gemma4": {"attention_k_eq_v": {False, True}},
        "gemma4_moe": {"top_k_experts": {1, 2, 3}}, "gemma4_small": {"use_double_wide_mlp": {False, True}},
    }  # fmt: skip
    for key, values in own[kind].items():
        assert {file[key] for file in files} == values
