"""Weights that are no numbers are refused while they are read, by both readers, and named."""

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dflash_jax.checkpoints.converted import open_converted
from dflash_jax.checkpoints.finite import BLOCK_BYTES, all_finite
from dflash_jax.checkpoints.huggingface import open_checkpoint
from dflash_jax.errors import CheckpointError

DTYPES = (ml_dtypes.bfloat16, np.float16, np.float32)


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_every_pattern_of_16_bits(dtype):
    patterns = np.arange(2**16, dtype=np.uint16).view(dtype)
    finite = np.isfinite(patterns)
    assert all_finite(patterns[finite])
    assert not any(all_finite(patterns[i : i + 1]) for i in np.flatnonzero(~finite))


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_value_anywhere(dtype):
    limits = ml_dtypes.finfo(dtype)
    ordinary = np.array([0.0, -0.0, limits.max, limits.min, limits.smallest_subnormal, -1.0], dtype)
    values = np.resize(ordinary, BLOCK_BYTES // ordinary.itemsize * 2 + 3)
    assert all_finite(values.reshape(1, -1))
    for place in (0, values.size // 2, values.size - 1):
        for bad in (np.nan, -np.nan, np.inf, -np.inf):
            changed = values.copy()
            changed[place] = bad
            assert not all_finite(changed)
    assert all_finite(values[:0])


def spoil(folder, name, value):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[name].reshape(-1)[-1] = value
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("dtype", [None, "float32"])
def test_a_damaged_folder_is_not_loaded(hf, value, dtype):
    folder, name = hf.qwen3(), "model.layers.1.mlp.up_proj.weight"
    spoil(folder, name, value)
    with pytest.raises(CheckpointError, match=rf"tensor {name} holds values that are not finite"):
        open_checkpoint(folder).load(dtype)
    assert hf.convert(folder, "--output", hf.root / "out", "--verify", "none") == 0
    with pytest.raises(
        CheckpointError, match=r"parameter layers\.1\.mlp\.gate_up_proj\.weight holds values that are not"
    ):
        open_converted(hf.root / "out").load(dtype)


def test_values_that_a_smaller_type_cannot_hold(hf):
    folder, name = hf.qwen3(dtype="float32"), "lm_head.weight"
    spoil(folder, name, 1e6)
    assert hf.convert(folder, "--output", hf.root / "out") == 0
    for opened, named in ((open_checkpoint(folder), "tensor"), (open_converted(hf.root / "out"), "parameter")):
        with pytest.raises(CheckpointError, match=f"{named} {name} holds values that are too large for float16"):
            opened.load("float16")
        assert np.isfinite(np.asarray(opened.load("bfloat16")[name], np.float32)).all()
