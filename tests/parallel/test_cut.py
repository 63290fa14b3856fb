"""What goes to which rank, and what cannot be shared is refused with the sizes."""

import jax
import numpy as np
import pytest

import dflash_jax as dj
from dflash_jax.engine.sharing import sharing_refusals
from dflash_jax.errors import ParameterError
from dflash_jax.models.presets import DEEPSEEK_TARGETS, DRAFTERS, HYBRID_TARGETS, MOE_TARGETS, TARGETS
from dflash_jax.parallel import ranks as module
from dflash_jax.parallel.cut import by_columns, by_rows


@pytest.mark.parametrize(
    ("count", "rows"),
    [
        (2, [[0, 1, 2, 3, 8, 9, 12, 13], [4, 5, 6, 7, 10, 11, 14, 15]]),
        # Two key heads for four ranks: each is held twice.
        (4, [[0, 1, 8, 9, 12, 13], [2, 3, 8, 9, 12, 13], [4, 5, 10, 11, 14, 15], [6, 7, 10, 11, 14, 15]]),
    ],
)
def test_ranks_have_their_rows_of_every_part(count, rows):
    """Four query heads of two rows, and two key and value heads."""
    cut, matrix = by_rows((8, 4), (4, 2), (4, 2)), np.arange(48).reshape(16, 3)
    assert cut.divides(count)
    assert not cut.divides(3)
    for rank, expected in enumerate(rows):
        np.testing.assert_array_equal(cut.share(matrix, rank, count), matrix[expected])
    assert cut.width(count) == len(rows[0])


def test_columns():
    matrix = np.arange(24).reshape(3, 8)
    shares = [by_columns((8, 4)).share(matrix, rank, 4) for rank in range(4)]
    np.testing.assert_array_equal(np.concatenate(shares, axis=1), matrix)


def test_the_shipped_pair_cannot_be_shared():
    with pytest.raises(ParameterError, match="tp=2 cannot be: the target: 5 query heads are no multiple of 2"):
        dj.load(tp=2)
    with pytest.raises(ParameterError, match="tp must be an integer from 1 to 64, got 65"):
        dj.load(tp=65)


def test_what_can_be_shared():
    drafter = DRAFTERS["Qwen3-8B-DFlash-b16"]
    assert not sharing_refusals(TARGETS["Qwen3-8B"], drafter, 8)
    assert not sharing_refusals(MOE_TARGETS["Qwen3-30B-A3B"], None, 8)
    assert not sharing_refusals(DEEPSEEK_TARGETS["DeepSeek-V2-Lite"], None, 4)
    assert sharing_refusals(TARGETS["Qwen3-8B"], None, 3) == [
        "the target: 32 query heads are no multiple of 3",
        "the target: 8 key heads neither divide 3 nor are a multiple of it",
    ]
    assert not sharing_refusals(HYBRID_TARGETS["Qwen3.5-4B"], None, 8)
    assert not sharing_refusals(HYBRID_TARGETS["Qwen3.5-35B-A3B"], None, 8)


def test_missing_devices(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: jax.devices()[:1])
    with pytest.raises(ParameterError, match="tp=2 needs as many devices, JAX sees 1 of kind cpu"):
        module.local_ranks(2)
