"""The vision tower on a GPU: the published one's rows in bfloat16 and in float8 attention, and texts of pictures."""

import time

import jax
import numpy as np
import pytest

import dflash_jax as dj
from dflash_jax.models import VisionConfig, init_params
from dflash_jax.models.qwen3_5_vision import vision_parameters
from dflash_jax.text.pictures.encoder import rows_in_float8, rows_of
from dflash_jax.text.pictures.packing import packed

from ..models.golden_files import difference
from ..models.test_qwen3_5_vision import PUBLISHED
from ..picture_pair import expected, golden_message, load_pictures

# Patches of 16 x 16 pixels, down and across: a large picture, two small ones and one of a single row of merged patches.
GRIDS = [(64, 62), (10, 14), (30, 30), (2, 40)]
# The largest difference over the largest number, after 27 blocks in bfloat16: a little above what rounding alone makes.
BFLOAT16, FLOAT8 = 0.05, 0.15

pytestmark = pytest.mark.gpu


def test_rows_of_the_published_tower_in_bfloat16_and_in_float8() -> None:
    """Random weights; float32 is of XLA. Rows past the last picture are NaN."""
    config, rng = VisionConfig.from_hf(PUBLISHED), np.random.default_rng(0)
    wide = init_params(vision_parameters(config), jax.random.key(0), "float32")
    narrow = {name: array.astype("bfloat16") for name, array in wide.items()}
    pixels = [rng.uniform(-1, 1, (height * width, config.patch_width)).astype(np.float32) for height, width in GRIDS]
    patches = packed(config, pixels, GRIDS)
    real = sum(map(len, pixels))
    patches.pixels[real:] = np.nan
    run = jax.jit(rows_of, static_argnums=0)
    reference = np.asarray(run(config, wide, patches), np.float64)[: real // config.merged]
    assert np.isfinite(reference).all()
    found = run(config, narrow, patches).block_until_ready()
    started = time.perf_counter()
    run(config, narrow, patches).block_until_ready()
    print(f"{real} patches in {1e3 * (time.perf_counter() - started):.1f} ms")
    away = difference(np.asarray(found, np.float64)[: real // config.merged], reference)
    rounded, largest = jax.jit(rows_in_float8, static_argnums=(0, 1))(
        config, True, narrow, patches, np.ones((config.depth, 3), np.float32)
    )
    further = difference(np.asarray(rounded, np.float64)[: real // config.merged], reference)
    print(f"of the largest number: bfloat16 {away:.4f}, float8 attention {further:.4f}")
    assert away < BFLOAT16
    assert further < FLOAT8
    assert np.isfinite(np.asarray(largest)).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_texts_of_pictures(dtype: str) -> None:
    """In float32 transformers' text, alone and beside another with pictures; in bfloat16 a text of some length."""
    model, found = load_pictures(dtype=dtype), expected()
    asked = [golden_message(), golden_message(second=255 - found["picture_2"])]
    ours = dj.generate(model, asked, dj.SamplingParams(max_tokens=24))
    assert len(ours[0].token_ids) == 24
    if dtype == "float32":
        assert ours[0].token_ids == found["greedy"][:24].tolist()
        assert ours[1].token_ids != ours[0].token_ids
