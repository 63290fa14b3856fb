"""Texts of a golden folder's model, in pages and under a drafter, against the same model without a cache."""

from pathlib import Path
from typing import Any

import numpy as np

import dflash_jax as dj
from dflash_jax.checkpoints.huggingface import open_checkpoint

from ..random_pair import Pair, draft_config, random_prompts
from .test_parity_llama import logits_and_taps


def check_texts(folder: Path, taps: tuple[int, ...]) -> None:
    """Prompts in several calls, alone and together, beyond a window; every token is the choice of one call without a cache."""
    checkpoint = open_checkpoint(folder)
    config: Any = checkpoint.config
    params = checkpoint.load("float32")
    draft = draft_config(vocab_size=61, hidden_size=24, target_hidden_size=24, mask_token_id=60, target_layer_ids=taps)
    pair = Pair(config, draft, edit=lambda weights: weights.update(target=params), max_chunk=32)
    prompts = [[token % 60 for token in one] for one in random_prompts([3, 50])]
    texts = pair.run(prompts, dj.SamplingParams(max_tokens=12))[0]
    assert texts == pair.run(prompts, dj.SamplingParams(max_tokens=12), draft=False)[0]
    for prompt, text in zip(prompts, texts, strict=True):
        logits = logits_and_taps(config, params, [*prompt, *text])[0]
        assert text == np.argmax(logits, axis=-1)[len(prompt) - 1 : -1].tolist()
