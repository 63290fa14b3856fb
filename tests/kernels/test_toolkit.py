"""The device toolkit's arithmetic against what it stands for, and how thread-level operations find their interpreter form."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels.mosaic_gpu import softmax
from dflash_kernels.mosaic_gpu.combine import combine_halves
from dflash_kernels.mosaic_gpu.pipeline import Ring
from dflash_kernels.mosaic_gpu.thread_op import GLOBAL, SCALAR, interpreted, interpreting, kernel, thread_op
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS, HEAD_DIM, SCALE = 8, 16, 0.3


def attended(scores: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Output and natural lse of whole rows, in float64; 0 and -inf where a row sees nothing."""
    weights = np.exp(scores.astype(np.float64) * SCALE)
    total = weights.sum(axis=1)
    with np.errstate(divide="ignore"):
        return weights @ values / np.where(total == 0, 1, total)[:, None], np.log(total)


def by_tiles(scores: np.ndarray, values: np.ndarray, tile: int) -> tuple[Any, Any, Any]:
    acc, row_max, row_sum = jnp.zeros((ROWS, HEAD_DIM)), jnp.full((ROWS,), -jnp.inf), jnp.zeros((ROWS,))
    for start in range(0, scores.shape[1], tile):
        held = jnp.asarray(scores[:, start : start + tile])
        weights, alpha, row_max, row_sum = softmax.online_step(held, row_max, row_sum, SCALE * softmax.LOG2E)
        acc = softmax.rescaled(acc, alpha) + weights @ values[start : start + tile]
    return acc, row_max, row_sum


@pytest.fixture
def attention() -> tuple[np.ndarray, np.ndarray]:
    """Scores whose maximum rises from tile to tile, a row that sees nothing and one that sees the last tile only."""
    draw = np.random.default_rng(0)
    scores = (draw.normal(size=(ROWS, 64)) * 20 + np.arange(64)).astype(np.float32)
    scores[2], scores[3, :48] = -np.inf, -np.inf
    return scores, draw.normal(size=(64, HEAD_DIM)).astype(np.float32)


@pytest.mark.parametrize("tile", [16, 64])
def test_the_online_softmax_is_the_softmax(attention: tuple[np.ndarray, np.ndarray], tile: int) -> None:
    acc, row_max, row_sum = by_tiles(*attention, tile)
    out, lse = softmax.finalize(acc, row_max, row_sum, row_sum != 0)
    expected_out, expected_lse = attended(*attention)
    np.testing.assert_allclose(out, expected_out, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5)
    assert np.isneginf(lse[2])
    assert not np.asarray(out[2]).any()


def test_rows_that_are_not_live_are_empty_whatever_they_hold() -> None:
    out, lse = softmax.finalize(jnp.full((2, 4), jnp.nan), jnp.zeros(2), jnp.ones(2), jnp.asarray([False, True]))
    assert not np.asarray(out[0]).any()
    assert np.isnan(out[1]).all()
    assert np.isneginf(lse[0])


def test_two_halves_combine_to_the_whole(attention: tuple[np.ndarray, np.ndarray]) -> None:
    scores, values = attention
    first, second = by_tiles(scores[:, :48], values[:48], 16), by_tiles(scores[:, 48:], values[48:], 16)
    out = combine_halves(first, second, lambda row_sum: row_sum != 0)
    np.testing.assert_allclose(out, attended(scores, values)[0], rtol=1e-4, atol=1e-5)


def test_a_ring_gives_stages_in_turn() -> None:
    ring = Ring(3, None)
    assert [int(ring.stage(jnp.int32(step))) for step in range(7)] == [0, 1, 2, 0, 1, 2, 0]


@thread_op(
    args=(GLOBAL, SCALAR), interpret=lambda ref, number, *, times: ref.__setitem__(..., ref[...] + number * times)
)
def add(ref: Any, number: Any, *, times: int) -> None:
    raise AssertionError("thread-level code is not for the interpreter")


@thread_op()
def without_interpreter_form() -> None:
    raise AssertionError("thread-level code is not for the interpreter")


def run(task: Any) -> jax.Array:
    def body(out_ref: Any) -> None:
        out_ref[...] = jnp.zeros((8,), jnp.int32)
        task(out_ref)

    out = jax.ShapeDtypeStruct((8,), jnp.int32)
    return kernel(body, out_type=out, grid=(1,), grid_names=("x",), interpret=plgpu.InterpretGPUParams())()


def test_operations_take_their_interpreter_form_inside_an_interpreted_kernel() -> None:
    seen = []

    def task(ref: Any) -> None:
        seen.append(interpreting())
        add(ref, jnp.int32(2), times=3)

    assert np.asarray(run(task)).tolist() == [6] * 8
    assert all(seen)
    assert seen
    assert not interpreting()


def test_an_operation_without_one_says_so() -> None:
    with pytest.raises(NotImplementedError, match="without_interpreter_form"), interpreted():
        without_interpreter_form()
    assert not interpreting()
