"""The vision tower of Qwen3.5: rows of pictures against transformers, its checkpoint in every form, and what is left out."""

import json
import shutil
from dataclasses import replace
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
from dflash_jax.cache import make_pages
from dflash_jax.cache.recurrent import make_states
from dflash_jax.checkpoints.huggingface import open_checkpoint
from dflash_jax.checkpoints.opening import open_checkpoint as open_any
from dflash_jax.decoding.prefill import Caches, Pictured, prefill_scored
from dflash_jax.decoding.state import Setup
from dflash_jax.errors import ConfigError, PromptError
from dflash_jax.models import Patches, VisionConfig, bind, count
from dflash_jax.models.qwen3_5_vision import vision_parameters
from dflash_jax.text.pictures.packing import packed
from dflash_jax.text.pictures.placed import Picture, Pictures, expanded, three_axes

from .golden_files import GOLDEN, TOLERANCE, difference

FOLDER = GOLDEN / "qwen3_5_vision"
# As the published file of the 27B has it, and the weights of its tower by transformers' classes.
TOWER: dict[str, Any] = {
    "deepstack_visual_indexes": [], "depth": 27, "dtype": "bfloat16", "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1152,
    "in_channels": 3,
    "initializer_range": 0.02, "intermediate_size": 4304, "model_type": "qwen3_5", "num_heads": 16,
    "num_position_embeddings": 2304, "out_hidden_size": 5120, "patch_size": 16, "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}  # fmt: skip


PUBLISHED: dict[str, Any] = {"image_token_id": 248_056, "text_config": {"vocab_size": 248_320}, "vision_config": TOWER}


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
        VisionConfig.from_hf(PUBLISHED | {"vision_config": TOWER | changes})


def test_what_is_said_beside_the_tower() -> None:
    rope = {"rope_parameters": {"mrope_section": [24, 20, 20]}}
    ids = {"image_token_id": 5, "video_token_id": 4, "vision_start_token_id": 0, "vision_end_token_id": 1}
    config = VisionConfig.from_hf(PUBLISHED | ids | {"text_config": {"vocab_size": 6} | rope})
    assert (config.image_token_id, config.video_token_id, config.mrope_section) == (5, 4, (24, 20, 20))
    before = {name: value for name, value in config.to_dict().items() if name not in [*ids][1:]}
    assert VisionConfig.from_dict(before).video_token_id is None, (
        "of a folder that was converted before there were films"
    )
    with pytest.raises(ConfigError, match="mrope_section must list three"):
        VisionConfig.from_hf(PUBLISHED | {"text_config": {"rope_parameters": {"mrope_section": [24, 20]}}})
    with pytest.raises(ConfigError, match="outside the vocabulary of 6"):
        VisionConfig.from_hf(PUBLISHED | {"text_config": {"vocab_size": 6}})


def test_a_tower_goes_through_a_conversion_and_back(tmp_path: Path) -> None:
    ours, back = tmp_path / "ours", tmp_path / "back"
    assert main([str(FOLDER), "--output", str(ours), "--quiet"]) == 0
    converted = open_any(ours)
    assert converted.vision is not None
    assert (ours / "preprocessor_config.json").is_file()
    assert (ours / "video_preprocessor_config.json").is_file()
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
    assert any(
        "tower is left out" in notice and "model.visual.merger.norm.bias is missing" in notice
        for notice in checkpoint.notices
    )
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["hidden_act"] = "silu"
    (folder / "config.json").write_text(json.dumps(config))
    assert any("hidden_act must be" in notice for notice in open_checkpoint(folder).notices)


def test_places_and_positions_are_those_of_transformers() -> None:
    expected = np.load(FOLDER / "expected.npz")
    grids = [tuple(grid) for grid in expected["grids"][[0, 2], 1:].tolist()]
    ids = [*expected["ids"].tolist(), *expected["further"].tolist()]
    short = [one for place, one in enumerate(ids) if one != 100 or ids[place - 1] != 100]
    config, pictures = (
        tower().config,
        [Picture(np.zeros((height * width, 0)), (height, width)) for height, width in grids],
    )
    whole, starts, shown = expanded(short, config, pictures)
    assert whole == tuple(ids)
    assert shown == tuple(pictures)
    positions, shift = three_axes(len(expected["ids"]), starts, grids, 2)
    assert shift == expected["delta"]
    np.testing.assert_array_equal(positions, expected["positions"].T[: len(positions)])
    placed = Pictures(
        tuple((start, b"") for start in starts), (np.ones((6, 1)), np.full((15, 1), 2.0)), positions, shift
    )
    for start, stop in ((0, 50), (4, 20), (20, 50), (45, 50), (8, 9)):
        found, there = placed.piece(start, stop)
        np.testing.assert_array_equal(found, expected["positions"].T[start:stop])
        np.testing.assert_array_equal(there, np.array(ids[start:stop]) == 100)
        rows = np.zeros((stop - start, 1))
        placed.fill(rows, start, stop)
        assert rows[:, 0].tolist() == [(one == 100) * (1 + (place > 20)) for place, one in enumerate(ids)][start:stop]
    with pytest.raises(PromptError, match="2 places for pictures and 1 pictures"):
        expanded(short, config, pictures[:1])


def test_logits_of_a_prompt_with_pictures_are_those_of_transformers() -> None:
    """A prompt in pieces that cut through a picture, in pages that hold NaN; and what comes after it, at shifted positions."""
    checkpoint, expected = open_checkpoint(FOLDER), np.load(FOLDER / "expected.npz")
    config, params = replace(checkpoint.config, mrope_section=(2, 2, 2)), checkpoint.load("float32")
    grids = [tuple(grid) for grid in expected["grids"][[0, 2], 1:].tolist()]
    ids = np.concatenate([expected["ids"], expected["further"]])
    starts = [place for place, one in enumerate(ids) if one == 100 and ids[place - 1] != 100]
    positions, shift = three_axes(len(expected["ids"]), starts, grids, 2)
    own = tuple(expected["rows"][begin:end] for begin, end in ((0, 6), (12, 27)))
    placed = Pictures(tuple((start, b"") for start in starts), own, positions, shift)
    rows, lengths = np.full((4, 16), 109, np.int32), np.array([16, 16, 16, 2])
    rows.reshape(-1)[: len(ids)] = ids
    told = Pictured(np.zeros((4, 16, 3), np.int32), np.zeros((4, 16), bool), np.full((4, 16, 32), np.nan, np.float32))
    for row, length in enumerate(lengths):
        where = 16 * row, 16 * row + int(length)
        told.positions[row, :length], told.placed[row, :length] = placed.piece(*where)
        placed.fill(told.rows[row, :length], *where)
    assert (np.isnan(told.rows).any(axis=2) == ~told.placed).all()
    states = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), make_states(config, 1, jnp.dtype("float32")))
    pages = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), make_pages(config, 4, 16, jnp.dtype("float32")))
    table = np.broadcast_to(np.array([2, 0, 3, 1], np.int32), (4, 4))
    step = jax.jit(partial(prefill_scored, Setup(config, logprobs=True)))
    caches = Caches(pages, make_pages(config, 1, 16, jnp.dtype("float32")), states)
    following = np.full((4, 16), 1, np.int32)
    following.reshape(-1)[: len(ids) - 1] = ids[1:]
    call = (
        {"target": params},
        table,
        caches,
        rows,
        16 * np.arange(4),
        lengths,
        np.zeros((4,), np.int32),
        following,
        told,
    )
    _, logits, scores = step(*call)
    assert difference(logits[-1, 0], expected["logits"][-1]) < TOLERANCE
    theirs = expected["logits"] - np.log(np.exp(expected["logits"]).sum(axis=-1, keepdims=True))
    found = np.asarray(scores.logprobs).reshape(-1)[: len(ids) - 1]
    # Log-probabilities are smaller than logits, and as far off: 1.7e-5 of their largest on one kind of CPU.
    assert difference(found, theirs[np.arange(len(ids) - 1), ids[1:]]) < 2 * TOLERANCE
