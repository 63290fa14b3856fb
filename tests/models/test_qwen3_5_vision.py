"""The vision tower of Qwen3.5: rows of pictures against transformers, its checkpoint in every form, and what is left out."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_convert.cli import main
from safetensors.numpy import load_file, save_file

from dflash_jax.attention.standalone.encoder import encoder_attention
from dflash_jax.checkpoints.huggingface import open_checkpoint
from dflash_jax.checkpoints.opening import open_checkpoint as open_any
from dflash_jax.errors import ConfigError
from dflash_jax.models import Patches, VisionConfig, bind, count
from dflash_jax.models.qwen3_5_vision import vision_parameters
from dflash_jax.vision.packing import packed

from .golden_files import GOLDEN, TOLERANCE, difference

FOLDER = GOLDEN / "qwen3_5_vision"
# As the published file of the 27B has it, and the weights of its tower by transformers' classes.
PUBLISHED: dict[str, Any] = {
    "deepstack_visual_indexes": [], "depth": 27, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1152, "in_channels": 3,
    "initializer_range": 0.02, "intermediate_size": 4304, "model_type": "qwen3_5", "num_heads": 16,
    "num_position_embeddings": 2304, "out_hidden_size": 5120, "patch_size": 16, "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}  # fmt: skip


@partial(jax.jit, static_argnums=0)
def rows_of(config: VisionConfig, params: Any, patches: Patches) -> jax.Array:
    return bind(config, params)(patches, encoder_attention)


def tower() -> Any:
    found = open_checkpoint(FOLDER).vision
    assert found is not None
    return found


def test_rows_of_pictures_of_unequal_sizes_are_those_of_transformers() -> None:
    """All pictures in one call, NaN in the rows past the last one; then a part of them, whose rows are the same."""
    checkpoint, expected = tower(), np.load(FOLDER / "expected.npz")
    params, grids = checkpoint.load("float32"), [tuple(grid) for grid in expected["grids"][:, 1:].tolist()]
    ends = np.cumsum([height * width for height, width in grids])
    pixels = np.split(expected["pixels"], ends[:-1])
    patches = packed(checkpoint.config, pixels, grids)
    assert len(patches.pixels) == 256
    patches.pixels[ends[-1] :] = np.nan
    found = np.asarray(rows_of(checkpoint.config, params, patches))
    assert difference(found[: ends[-1] // 4], expected["rows"]) < TOLERANCE
    some = packed(checkpoint.config, pixels[2:], grids[2:])
    again = np.asarray(rows_of(checkpoint.config, params, some))[: (ends[3] - ends[1]) // 4]
    np.testing.assert_allclose(again, expected["rows"][ends[1] // 4 :], atol=2e-5)


def test_no_picture_at_all() -> None:
    checkpoint = tower()
    nothing = packed(checkpoint.config, [], [])
    assert not nothing.cu_lens.any()
    assert np.isfinite(rows_of(checkpoint.config, checkpoint.load("float32"), nothing)).all()


def test_sizes_of_the_published_tower() -> None:
    config = VisionConfig.from_hf(PUBLISHED)
    assert (config.grid_side, config.head_dim, config.patch_width, config.merged) == (48, 72, 1536, 4)
    assert count(vision_parameters(config)) == 460_730_096


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "silu"}, "hidden_act"), ({"num_position_embeddings": 2305}, "square"), ({"num_heads": 7}, "multiple of 4"),
        ({"in_channels": 4}, "in_channels must be 3"), ({"deepstack_visual_indexes": [8]}, "deepstack_visual_indexes"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "axial"), ({"depth": 0}, "depth"), ({"window_size": 112}, "window_size"),
    ],
)  # fmt: skip
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        VisionConfig.from_hf(PUBLISHED | changes)


def test_a_tower_goes_through_a_conversion_and_back(tmp_path: Path) -> None:
    ours, back = tmp_path / "ours", tmp_path / "back"
    assert main([str(FOLDER), "--output", str(ours), "--quiet"]) == 0
    converted = open_any(ours)
    assert converted.vision is not None
    assert (ours / "preprocessor_config.json").is_file()
    params = tower().load("float32")
    for name, array in converted.vision.load("float32").items():
        assert jnp.array_equal(array, params[name]), name
    assert main([str(ours), "--output", str(back), "--reverse", "--quiet", "--verify", "hash"]) == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (FOLDER, back))
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_a_tower_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    """The text model loads as before, and a notice says why."""
    folder = tmp_path / "some"
    shutil.copytree(FOLDER, folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.visual.merger.norm.bias"]
    save_file(tensors, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.vision is None
    assert any("tower is left out" in notice and "model.visual.merger.norm.bias is missing" in notice for notice in checkpoint.notices)
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["hidden_act"] = "silu"
    (folder / "config.json").write_text(json.dumps(config))
    assert any("hidden_act must be" in notice for notice in open_checkpoint(folder).notices)
