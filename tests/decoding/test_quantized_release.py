"""`load` of a quantized release: the model that its dequantized weights make."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

import dflash_jax as dj

from ..quantized_folders import BLOCKS, is_projection, near_float8, put
from .test_load import PARAMS, TARGET, write


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
