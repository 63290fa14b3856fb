"""The rows of a float8 weight among which the best is: the definition, the Hopper kernel interpreted and for real (`-m gpu`)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import Float8Rows, float8_candidates, float8_dense
from dflash_kernels.matmul.float8.mosaic_gpu import launch_candidates

from .test_float8_dense import INTERPRET, QWEN3_4B, make


def check_candidates(found: jax.Array, products: np.ndarray, count: int) -> None:
    """The best is among them, and bests of other groups: of two at most where a row is dealt twice, or 0."""
    places = np.arange(len(products))
    assert found.shape == (len(products), count)
    assert found.dtype == jnp.int32
    assert (np.asarray(found) == products.argmax(axis=1)[:, None]).any(axis=1).all()
    values = products[places[:, None], np.asarray(found)]
    assert ((values > np.median(products, axis=1, keepdims=True)) | (np.asarray(found) == 0)).all()
    assert all(len(np.unique(row)) >= count - 1 for row in np.asarray(found))


@pytest.mark.few("40-4")
@pytest.mark.parametrize("count", [1, 3, 4])
@pytest.mark.parametrize("rows", [1, 3, 40, 130])
def test_candidates_hold_the_best(rows: int, count: int) -> None:
    """Fewer rows than a tile has, too, and equal largest ones: the first of them."""
    x, weight, scales = make(rows, 608, 128)
    products = np.asarray(float8_dense(x, weight, scales, jnp.float32))
    out = launch_candidates(x, weight, scales, count, multiprocessors=8, interpret=INTERPRET)
    for found in (out, float8_candidates(x, weight, scales, count)):
        check_candidates(found, products, count)


@pytest.mark.few("5")
@pytest.mark.parametrize("rows", [5, 70])
def test_the_first_of_equal_candidates(rows: int) -> None:
    x, weight, scales = make(rows, 608, 128)
    places = jnp.array([17, 300, 599])
    weight, scales = weight.at[places].set(weight[17]), scales.at[places].set(scales[17] * 8)
    largest = np.asarray(float8_dense(x, weight, scales, jnp.float32)).argmax(axis=1) == 17
    assert largest.any()
    for found in (
        launch_candidates(x, weight, scales, 1, multiprocessors=3, interpret=INTERPRET),
        float8_candidates(x, weight, scales, 1),
    ):
        assert (np.asarray(found)[largest, 0] == 17).all()


def test_groups_that_are_missing() -> None:
    """Two multiprocessors make four bests of a row and eight features five groups: row 0 stands for the others."""
    x, weight, scales = make(4, 128, 128)
    out = np.asarray(launch_candidates(x, weight, scales, 16, multiprocessors=2, interpret=INTERPRET))
    products = np.asarray(float8_dense(x, weight, scales, jnp.float32))
    assert (out == products.argmax(axis=1)[:, None]).any(axis=1).all()
    assert ((out == 0).sum(axis=1) >= 12).all()
    few = np.asarray(float8_candidates(x, weight[:5], scales[:5], 8))
    np.testing.assert_array_equal(few, [[0, 1, 2, 3, 4, 0, 0, 0]] * 4)


def test_what_is_refused() -> None:
    x, weight, scales = make(4, 64, 128)
    with pytest.raises(ValueError, match="count must be at least 1, not 0"):
        float8_candidates(x, weight, scales, 0)
    many = Float8Rows(jnp.zeros((2112, 128), jnp.float8_e4m3fn), jnp.ones(2112))
    with pytest.raises(NotImplementedError, match="at most 2048 rows, not 2112"):
        launch_candidates(many, weight, scales, 4, multiprocessors=132)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [3, 16, 40, 128, 512, 2048])
def test_full_size_candidates(rows: int) -> None:
    """Sums of matrix units decide what the best is: it may be off by what they lose."""
    x, weight, scales = make(rows, *QWEN3_4B["argmax"])
    found = np.asarray(float8_candidates(x, weight, scales, 16, implementation="mosaic_gpu"))
    definition = jax.jit(lambda x, w, s: float8_dense(x, w, s, jnp.float32, implementation="xla"))
    # Of all rows together they take a gigabyte, several times.
    some = [Float8Rows(x.values[first : first + 512], x.scales[first : first + 512]) for first in range(0, rows, 512)]
    products = np.concatenate([definition(each, weight, scales) for each in some])
    of_found, largest = np.take_along_axis(products, found, axis=1), products.max(axis=1)
    assert (of_found.max(axis=1) >= largest - 2**-6 * np.abs(largest)).all()
    assert (of_found.max(axis=1) == largest).mean() > 0.9
    # Bests of 9,500 rows each, or of 19,000: 132 CTAs, of which each has tiles of 128 rows, make no more of so many.
    groups = min(16, 132 // -(-rows // 128))
    assert (np.sort(of_found, axis=1)[:, -groups] > 0.5 * largest).all()
    assert all(len(np.unique(row)) >= groups - 1 for row in found)
