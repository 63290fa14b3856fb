"""A golden folder's model: its numbers against transformers', its way through our format, and its texts, in pages and under a
drafter, against the same model without a cache."""

from pathlib import Path
from typing import Any

import numpy as np
from dflash_convert.cli import main as dflash_convert
from safetensors.numpy import load_file

import dflash_jax as dj
from dflash_jax.checkpoints.huggingface import open_checkpoint
from dflash_jax.checkpoints.opening import open_checkpoint as open_any

from ..random_pair import Pair, draft_config, random_prompts
from .golden_files import difference
from .test_parity_llama import logits_and_taps


def check_logits_and_taps(folder: Path, tolerance: float) -> None:
    """Against those that transformers wrote beside it, `expected.npz`."""
    checkpoint = open_checkpoint(folder)
    with np.load(folder / "expected.npz") as file:
        ids, logits, taps = file["ids"], file["logits"], file["taps"]
    ours = logits_and_taps(checkpoint.config, checkpoint.load("float32"), ids.tolist())
    assert difference(ours[0][..., : logits.shape[-1]], logits) <= tolerance  # rows that fill up are left out
    assert difference(ours[1], taps) <= tolerance


def check_conversion(folder: Path, scratch: Path, *, left_out: str | tuple[str, ...] = ()) -> None:
    """There and back: the same configuration, and every tensor's name and bits but of names that contain one of `left_out`."""
    out, back = scratch / "out", scratch / "back"
    assert dflash_convert([str(folder), "--output", str(out), "--verify", "logits", "--quiet"]) == 0
    assert open_any(out).config == open_checkpoint(folder).config
    assert dflash_convert([str(out), "--reverse", "--output", str(back), "--quiet"]) == 0
    first, last = (load_file(one / "model.safetensors") for one in (folder, back))
    parts = (left_out,) if isinstance(left_out, str) else left_out
    kept = {name: one for name, one in first.items() if not any(part in name for part in parts)}
    assert kept.keys() == last.keys()
    assert all(kept[name].tobytes() == last[name].tobytes() for name in kept)


def check_texts(folder: Path, taps: tuple[int, ...]) -> None:
    """Prompts in several calls, alone and together, beyond a window; every token is the choice of one call without a cache."""
    checkpoint = open_checkpoint(folder)
    config: Any = checkpoint.config
    params = checkpoint.load("float32")
    sizes = {"vocab_size": 61, "hidden_size": 24, "target_hidden_size": config.feature_width, "mask_token_id": 60}
    draft = draft_config(**sizes, target_layer_ids=taps)
    pair = Pair(config, draft, edit=lambda weights: weights.update(target=params), max_chunk=32)
    prompts = [[token % 60 for token in one] for one in random_prompts([3, 50])]
    texts = pair.run(prompts, dj.SamplingParams(max_tokens=12))[0]
    assert texts == pair.run(prompts, dj.SamplingParams(max_tokens=12), draft=False)[0]
    for prompt, text in zip(prompts, texts, strict=True):
        logits = logits_and_taps(config, params, [*prompt, *text])[0]
        assert text == np.argmax(logits, axis=-1)[len(prompt) - 1 : -1].tolist()
