"""Checkpoints that mix the rows of several projections in one tensor, head by head, or keep a matrix under another shape."""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dflash_jax.checkpoints.huggingface import open_checkpoint
from dflash_jax.config import Qwen3Config
from dflash_jax.errors import CheckpointError
from dflash_jax.models import Parameter, registry
from dflash_jax.models.parameters import Source, grouped, init_params, to_huggingface
from dflash_jax.models.qwen3 import qwen3_parameters

NAME, KEYS, GROUP, DIM, WIDTH = "MixedRowsForCausalLM", 2, 2, 8, 32  # two queries to a key head


def mixed_parameters(config: Qwen3Config) -> tuple[Parameter, ...]:
    """Qwen3's, but for layer 0: queries, keys and values stand in one tensor by key head, and `o_proj` has an axis more."""
    theirs, table = "model.layers.0.self_attn.", []
    rows = (GROUP * DIM, DIM, DIM)
    qkv = grouped(f"{theirs}qkv.weight", (KEYS * sum(rows), WIDTH), KEYS, rows)
    o = Source(f"{theirs}o_proj.weight", (WIDTH, 1, 32), kept=(WIDTH, 32))
    special = {"layers.0.attn.qkv_proj.weight": qkv, "layers.0.attn.o_proj.weight": (o,)}
    for one in qwen3_parameters(config):
        table.append(replace(one, sources=special.get(one.name, one.sources)))
    return tuple(table)


@pytest.fixture
def folder(hf, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of a family that reads such tensors, added to the table for this test."""
    family = replace(
        registry.family_named("qwen3"), name="mixed_rows", architectures=(NAME,), parameters=mixed_parameters
    )
    monkeypatch.setattr(registry, "FAMILIES", (*registry.FAMILIES, family))
    return hf.qwen3(architectures=[NAME])


def test_each_projection_takes_its_rows(folder: Path) -> None:
    """Against rows picked by hand; in the source's dtype and in another."""
    stored = load_file(folder / "model.safetensors")
    tensor = stored["model.layers.0.self_attn.qkv.weight"].reshape(KEYS, GROUP + 2, DIM, WIDTH)
    parts = tensor[:, :GROUP], tensor[:, GROUP], tensor[:, GROUP + 1]
    expected = np.concatenate([part.reshape(-1, WIDTH) for part in parts])
    for dtype in (None, "float32"):
        params = open_checkpoint(folder).load(dtype)
        found = np.asarray(params["layers.0.attn.qkv_proj.weight"])
        np.testing.assert_array_equal(found, expected.astype(found.dtype))
        o = stored["model.layers.0.self_attn.o_proj.weight"].reshape(WIDTH, 32)
        np.testing.assert_array_equal(np.asarray(params["layers.0.attn.o_proj.weight"]), o.astype(found.dtype))


def test_there_and_back_bit_for_bit(hf, folder: Path, bits) -> None:
    """By the converter, which verifies what it wrote against the source, and in memory."""
    assert hf.convert(folder, "--output", hf.root / "out", "--verify", "hash") == 0
    assert hf.convert(hf.root / "out", "--reverse", "--output", hf.root / "back", "--verify", "none") == 0
    source, back = load_file(folder / "model.safetensors"), load_file(hf.root / "back" / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    again = to_huggingface(mixed_parameters(checkpoint.config), checkpoint.load())
    assert source.keys() == back.keys() == again.keys()
    for name, array in source.items():
        for other in (back[name], again[name]):
            assert (array.dtype, array.shape, bits(array)) == (other.dtype, other.shape, bits(other)), name


def test_a_tensor_of_another_shape_is_named_once(folder: Path) -> None:
    tensors, name = load_file(folder / "model.safetensors"), "model.layers.0.self_attn.qkv.weight"
    tensors[name] = tensors[name][:-1].copy()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as raised:
        open_checkpoint(folder)
    assert str(raised.value).count(f"tensor {name} has shape [63, 32], expected [64, 32]") == 1


def test_offsets_of_norms_begin_at_zero() -> None:
    """A norm whose weight is kept as its offset from 1 is random-initialised as others are: to the identity."""
    params = init_params([Parameter("norm.offset", (Source("norm.weight", (4,)),))], jax.random.key(0))
    assert not np.asarray(params["norm.offset"]).any()
