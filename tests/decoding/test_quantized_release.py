"""`load` of a quantized release: the model that its dequantized weights make."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

import dflash_jax as dj

from ..quantized_folders import BLOCKS, RELEASES, is_projection, near_float8, put, released
from .test_load import PARAMS, TARGET, write

# Sizes that words of three bits fill; the head is the embedding.
SIZES = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
LOGPROBS = dj.SamplingParams(max_tokens=9, logprobs=2)


def test_a_release_in_float8_is_the_model_that_its_numbers_make(tmp_path: Path) -> None:
    """Rounded anew by rows, which is done to the dequantized weights; a notice says where they come from."""
    stored, plain = {}, load_file(write(tmp_path / "plain", TARGET) / "model.safetensors")
    for name, tensor in list(plain.items()):
        stored[name] = tensor
        if is_projection(name, tensor):
            stored[name], stored[f"{name}_scale_inv"], exact = near_float8(tensor, (128, 128))
            plain[name] = exact.astype(np.float32)
    folders = [tmp_path / name for name in ("released", "dequantized")]
    for folder, tensors, more in zip(folders, (stored, plain), ({"quantization_config": BLOCKS}, {}), strict=True):
        folder.mkdir()
        put(folder, tensors)
        (folder / "config.json").write_text(json.dumps(TARGET | more))
    ours, theirs = (dj.load(folder, draft=False, weight_dtype="fp8", max_batch=1) for folder in folders)
    assert any("weights were released in float8 in blocks of 128 x 128" in notice for notice in ours.notices)
    assert not any("released" in notice for notice in theirs.notices)
    assert dj.generate(ours, [5, 6, 7], PARAMS).token_ids == dj.generate(theirs, [5, 6, 7], PARAMS).token_ids


@pytest.mark.few(
    "modelopt nvfp4", "modelopt w4a8", "modelopt blocks", "mxfp4", "gptq int3 v2", "nf4", "bitsandbytes int8"
)
@pytest.mark.parametrize("kind", RELEASES)
def test_a_release_says_what_its_numbers_say(kind: str, tmp_path: Path) -> None:
    """In shards, loaded in float32, with the same probabilities; a second model of other numbers has others."""
    make, said, _ = RELEASES[kind]
    config = TARGET | SIZES
    tensors = load_file(write(tmp_path / "plain", config) / "model.safetensors")
    narrow = {name: one.astype(ml_dtypes.bfloat16) for name, one in tensors.items()}
    texts = []
    for seed in (0, 1):
        stored, exact = released(narrow, make, seed=seed)
        wide = {name: one.astype(np.float32) for name, one in exact.items()}
        for name, held, about in (("released", stored, {"quantization_config": said}), ("plain", wide, {})):
            folder = tmp_path / f"{name}-{seed}"
            folder.mkdir()
            put(folder, held, shards=3)
            (folder / "config.json").write_text(json.dumps(config | about))
            out = dj.generate(dj.load(folder, draft=False, dtype="float32", max_batch=1), [5, 6, 7], LOGPROBS)
            texts.append((out.token_ids, out.logprobs))
    assert texts[0] == texts[1]
    assert texts[2] == texts[3]
    assert texts[0] != texts[2]
