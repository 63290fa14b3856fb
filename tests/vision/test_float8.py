"""Float8 attention of the vision tower: float64 with the rounding applied, where scales come from, and through `load`."""

import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflash_jax as dj
from dflash_jax.models import Patches, VisionConfig
from dflash_jax.text.pictures.encoder import attended, rows_in_float8
from dflash_jax.text.pictures.float8 import HISTORY, Float8Mixing, VisionScales, read_vision_scales
from dflash_jax.text.pictures.packing import packed

from ..kernels.test_quantize import E4M3, nearest
from ..models.golden_files import difference
from ..models.test_qwen3_5_vision import FOLDER, tower
from ..picture_pair import expected, golden_message, load_pictures, picture_folder

CU_LENS = np.array([0, 5, 5, 17, 17], np.int32)
PATCHES, HEADS, WIDTH = 20, 2, 8


def numbers(seed: int = 0) -> list[np.ndarray]:
    """Queries, keys and values of unlike sizes; what is past the last picture is not a number."""
    rng = np.random.default_rng(seed)
    sides = [rng.standard_normal((PATCHES, HEADS, WIDTH)).astype(np.float32) * size for size in (3, 0.1, 40)]
    for x in sides:
        x[CU_LENS[-1] :] = np.nan
    return sides


def mixed(sides: list[np.ndarray], given: Any, *, found: bool) -> tuple[np.ndarray, np.ndarray]:
    @jax.jit
    def run(q: Any, k: Any, v: Any, given: Any) -> Any:
        mixing = Float8Mixing(attended, given, found=found)
        return mixing(q, k, v, jnp.asarray(CU_LENS)), mixing.largest[0]

    out, largest = run(*sides, jnp.asarray(given, jnp.float32)[None])
    return np.asarray(out), np.asarray(largest)


def described(sides: list[np.ndarray], scales: np.ndarray) -> np.ndarray:
    """In float64: numbers to the nearest float8 times its scale, then attention of each picture to itself."""
    q, k, v = (
        np.sign(x) * E4M3[nearest(x.astype(np.float64) / scale, E4M3)] * scale
        for x, scale in zip([np.nan_to_num(x) for x in sides], scales.astype(np.float64), strict=True)
    )
    out = np.zeros((PATCHES, HEADS, WIDTH))
    for start, end in itertools.pairwise(CU_LENS):
        scores = np.einsum("qhd,khd->hqk", q[start:end], k[start:end]) * WIDTH**-0.5
        weights = np.exp(scores - scores.max(-1, keepdims=True, initial=-np.inf))
        out[start:end] = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v[start:end])
    return out


@pytest.mark.parametrize("found", [True, False], ids=["found", "given"])
def test_attention_is_that_of_the_rounded_numbers(found: bool) -> None:
    """Scales of largest numbers that were seen before, or in this call where it has larger ones; what pads it counts nowhere."""
    sides = numbers()
    top = np.array([np.nanmax(np.abs(x)) for x in sides])
    before = np.array([2 * top[0], top[1] / 2, 0])
    scales = np.maximum(before, top) / 448 if found else np.array([0.01, 0.001, 0.25])
    out, largest = mixed(sides, before if found else scales, found=found)
    np.testing.assert_array_equal(largest, top)
    true = described(sides, scales.astype(np.float32))
    # A number on the border between two codes may go to either.
    off = np.abs(out - true) / np.abs(true).max()
    assert (off <= 2e-6).mean() > 0.9
    assert off.max() < 0.02
    assert np.abs(true - described(sides, np.full(3, 2.0**-40))).max() / np.abs(true).max() > 1e-3 or not found


def test_nothing_but_zeros_has_a_scale() -> None:
    out, largest = mixed([np.zeros((PATCHES, HEADS, WIDTH), np.float32)] * 3, [0, 0, 0], found=True)
    assert not out.any()
    assert not largest.any()


def test_the_history_forgets_the_oldest_call() -> None:
    """The ring holds so many calls; the next one takes the place of the oldest, which counts no more."""
    scales = VisionScales(2)
    assert not scales.numbers.any()
    loud = np.array([[8, 1, 1], [1, 1, 9]], np.float32)
    scales.record(loud)
    for call in range(1, HISTORY):
        np.testing.assert_array_equal(scales.numbers, loud)
        scales.record(np.full((2, 3), call / 16, np.float32))
    assert scales.calls == HISTORY
    # The next call's own largest numbers stand in the loud one's place.
    np.testing.assert_array_equal(scales.numbers, np.full((2, 3), 15 / 16))
    scales.record(np.array([[np.nan, np.inf, 2], [0, 0, 0]], np.float32))
    np.testing.assert_array_equal(scales.numbers[0], [15 / 16, 15 / 16, 2])


@partial(jax.jit, static_argnums=(0, 1))
def rows(config: VisionConfig, found: bool, params: Any, patches: Patches, given: Any) -> Any:
    return rows_in_float8(config, found, params, patches, given)


def test_scales_that_were_saved_give_the_same_rows(tmp_path: Path) -> None:
    """Rows of the tower near transformers' own; scales of a history as wide as the ring, saved with a margin and without."""
    checkpoint, golden = tower(), np.load(FOLDER / "expected.npz")
    config, params = checkpoint.config, checkpoint.load("float32")
    grids = [tuple(grid) for grid in golden["grids"][:, 1:].tolist()]
    ends = np.cumsum([height * width for height, width in grids])
    pixels = np.split(golden["pixels"], ends[:-1])
    scales = VisionScales(config.depth)
    found: Any = None
    for call in range(HISTORY + 2):
        some = slice(None) if call % 3 == 2 else slice(call % 3, call % 3 + 1)
        patches = packed(config, pixels[some], grids[some])
        found, largest = rows(config, True, params, patches, scales.numbers)
        scales.record(np.asarray(largest))
    assert scales.calls > HISTORY
    whole = packed(config, pixels, grids)
    found, _ = rows(config, True, params, whole, scales.numbers)
    off = difference(np.asarray(found)[: ends[-1] // 4], golden["rows"])
    assert 1e-4 < off < 0.05
    for margin in (1.0, 1.5):
        scales.save(tmp_path / "scales.json", margin)
        given = read_vision_scales(tmp_path / "scales.json", config.depth)
        np.testing.assert_allclose(given, scales._seen.max(axis=0) / 448 * margin, rtol=1e-6)
        again, _ = rows(config, False, params, whole, given)
        near = difference(np.asarray(again), np.asarray(found))
        assert near < (2e-3 if margin == 1 else 0.05)


def test_a_file_of_another_program(tmp_path: Path) -> None:
    """Rows by the number behind `blocks`, whatever else their names have; what is no such file is refused."""
    path = tmp_path / "scales.json"
    row = {"q": 0.5, "k": 1, "v": 2.0}
    path.write_text(json.dumps({"visual.blocks.1.attn.attn": row | {"q": 4.0}, "model.visual.blocks.0.attn": row}))
    assert read_vision_scales(path, 2).tolist() == [[0.5, 1, 2], [4, 1, 2]]
    with pytest.raises(dj.ParameterError, match="has scales of 2 blocks, this tower has 1"):
        read_vision_scales(path, 1)
    for wrong in ({"blocks.0.attn": row}, {"blocks.0.attn": row, "blocks.1.attn": {"q": 1}}, [], "x"):
        path.write_text(json.dumps(wrong))
        with pytest.raises(dj.ParameterError, match="no scales q, k and v of each of 2 blocks"):
            read_vision_scales(path, 2)
    path.write_text(json.dumps({f"blocks.{i}": row | {"v": -1} for i in range(2)}))
    with pytest.raises(dj.ParameterError, match="each must be a positive number"):
        read_vision_scales(path, 2)
    with pytest.raises(dj.ParameterError, match="no scales q, k and v"):
        read_vision_scales(tmp_path / "none.json", 2)


@pytest.mark.few
def test_a_model_that_is_loaded_so(tmp_path: Path) -> None:
    """Rows of its pictures move a little; scales that it found are those of a model that is loaded with them."""
    model = load_pictures(vision_attention_dtype="fp8", max_batch=1, draft=False)
    assert model.vision is not None
    with pytest.raises(dj.ParameterError, match="no scales were found"):
        model.save_vision_scales(tmp_path / "scales.json")
    text = dj.generate(model, golden_message(), dj.SamplingParams(max_tokens=4))
    assert len(text.token_ids) == 4
    model.save_vision_scales(tmp_path / "scales.json", margin=1.0)
    with pytest.raises(dj.ParameterError, match="margin must be a number from 1 on"):
        model.save_vision_scales(tmp_path / "scales.json", margin=0.5)
    other = load_pictures(
        vision_attention_dtype="fp8", vision_scales=tmp_path / "scales.json", max_batch=1, draft=False
    )
    assert other.vision is not None
    assert model.vision.float8 is not None
    assert model.vision.float8.calls == 1
    picture = other.vision.processor.picture(expected()["picture_0"])
    (ours,), (theirs,) = model.vision.rows([picture]), other.vision.rows([picture])
    assert difference(theirs, ours) < 0.05
    with pytest.raises(dj.ParameterError, match="no scales were found"):
        other.save_vision_scales(tmp_path / "scales.json")


def test_what_is_refused() -> None:
    with pytest.raises(dj.ParameterError, match="vision_attention_dtype is for a vision tower, and none is loaded"):
        dj.plan(vision_attention_dtype="fp8")
    with pytest.raises(dj.ParameterError, match="vision_attention_dtype is for a vision tower, and none is loaded"):
        dj.plan(picture_folder(), vision=False, vision_attention_dtype="fp8")
