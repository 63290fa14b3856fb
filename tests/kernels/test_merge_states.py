"""Merging partial attention against softmax over all keys at once, in float64, and what empty parts may hold."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import NoImplementationError, merge_states
from dflash_kernels.attention.merge_states.api import IMPLEMENTATIONS

EMPTY = (-np.inf, np.inf, np.nan)
GARBAGE = (0.0, 3.5, np.nan, np.inf)


@pytest.fixture(params=["xla", pytest.param("xla", id="xla-on-gpu", marks=pytest.mark.gpu)])
def implementation(request: pytest.FixtureRequest) -> str:
    assert request.param in IMPLEMENTATIONS
    return request.param


@pytest.fixture
def merge(implementation: str):
    return jax.jit(functools.partial(merge_states, implementation=implementation))


def attention(scores: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Output and lse of rows of scores in float64."""
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    return weights @ values / weights.sum(-1, keepdims=True), (top + np.log(weights.sum(-1, keepdims=True)))[..., 0]


@pytest.mark.parametrize("shift", [0.0, -1e5, 300.0])
def test_equals_softmax_over_both(merge, shift: float) -> None:
    rng = np.random.default_rng(0)
    scores, values = rng.standard_normal((5, 3, 40)) * 4 + shift, rng.standard_normal((40, 24))
    true_out, true_lse = attention(scores, values)
    for cut in (1, 17, 39):
        parts = [attention(scores[..., half], values[half]) for half in (slice(cut), slice(cut, None))]
        out, lse = merge(*(part.astype(np.float32) for pair in parts for part in pair))
        # float32 holds an lse of 1e5 to 1 in 128: that is the caller's rounding, not the merge's.
        allowed = 2e-6 if shift == 0 else 5e-5 if shift > 0 else 2e-2
        np.testing.assert_allclose(out, true_out, rtol=0, atol=allowed)
        np.testing.assert_allclose(lse, true_lse, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("mark", EMPTY)
def test_an_empty_part_changes_nothing(merge, mark: float, garbage: float) -> None:
    rng = np.random.default_rng(1)
    out, lse = rng.standard_normal((4, 6, 8)).astype(np.float32), rng.standard_normal((4, 6)).astype(np.float32)
    nothing = np.full_like(out, garbage), np.full_like(lse, mark)
    for merged in (merge(out, lse, *nothing), merge(*nothing, out, lse)):
        np.testing.assert_array_equal(merged[0], out)
        np.testing.assert_array_equal(merged[1], lse)


@pytest.mark.parametrize("second", EMPTY)
@pytest.mark.parametrize("first", EMPTY)
def test_two_empty_parts_are_zero_and_minus_infinity(merge, first: float, second: float) -> None:
    out = np.full((3, 2, 4), np.nan, np.float32)
    merged, lse = merge(out, np.full((3, 2), first, np.float32), out, np.full((3, 2), second, np.float32))
    assert (np.asarray(merged) == 0).all()
    assert (np.asarray(lse) == -np.inf).all()


def test_a_part_of_vanishing_weight_may_hold_nan(merge) -> None:
    one, nan = np.ones((1, 4), np.float32), np.full((1, 4), np.nan, np.float32)
    merged, lse = merge(one, np.zeros(1, np.float32), nan, np.full(1, -1e4, np.float32))
    np.testing.assert_array_equal(merged, one)
    np.testing.assert_array_equal(lse, np.zeros(1))


@pytest.mark.parametrize("count", [0, 3, 5])
@pytest.mark.parametrize("traced", [False, True])
def test_rows_without_a_prefix_are_the_suffix(count: int, traced: bool, implementation: str) -> None:
    """Bit for bit, and whatever the prefix holds there."""
    rng = np.random.default_rng(2)
    outs, lses = rng.standard_normal((2, 5, 3, 8)).astype(np.float32), rng.standard_normal((2, 5, 3)).astype(np.float32)
    lses[1, 4, 0] = np.inf
    merge = functools.partial(merge_states, implementation=implementation)
    whole = merge(*map(jnp.asarray, (outs[0], lses[0], outs[1], lses[1])))
    outs[0, count:], lses[0, count:] = np.nan, 7.0
    arrays = [jnp.asarray(x) for x in (outs[0], lses[0], outs[1], lses[1])]
    if traced:
        out, lse = jax.jit(lambda rows: merge(*arrays, prefix_rows=rows))(jnp.int32(count))
    else:
        out, lse = merge(*arrays, prefix_rows=count)
    np.testing.assert_allclose(out[:count], whole[0][:count], rtol=0, atol=1e-6)
    np.testing.assert_allclose(lse[:count], whole[1][:count], rtol=0, atol=1e-6)
    expected_out, expected_lse = outs[1, count:].copy(), lses[1, count:].copy()
    if count < 5:
        expected_out[-1, 0], expected_lse[-1, 0] = 0, -np.inf
    np.testing.assert_array_equal(out[count:], expected_out)
    np.testing.assert_array_equal(lse[count:], expected_lse)


def test_output_in_float8(implementation: str) -> None:
    """Within half a step of the merged values; what is past the range is cut, also in rows without a prefix."""
    rng = np.random.default_rng(3)
    outs, lses = rng.standard_normal((2, 6, 8)).astype(np.float32), rng.standard_normal((2, 6)).astype(np.float32)
    outs[:, 0], outs[1, 5] = 100.0, -100.0
    arrays, scale = [jnp.asarray(x) for x in (outs[0], lses[0], outs[1], lses[1])], jnp.float32(0.02)
    plain, plain_lse = merge_states(*arrays, prefix_rows=4, implementation=implementation)
    out, lse = merge_states(*arrays, prefix_rows=4, out_scale=scale, implementation=implementation)
    same, _ = merge_states(*arrays, prefix_rows=4, out_scale=float(scale), implementation=implementation)
    np.testing.assert_array_equal(np.asarray(same), np.asarray(out))
    assert out.dtype == jnp.float8_e4m3fn
    np.testing.assert_array_equal(lse, plain_lse)
    codes = np.asarray(out, np.float32)
    assert (codes[0] == 448).all()
    assert (codes[5] == -448).all()
    step = np.maximum(np.abs(codes[1:5]) / 16, 2.0**-10) * 1.001
    assert (np.abs(codes[1:5] - np.asarray(plain)[1:5] / 0.02) <= step).all()


def test_nan_with_weight_is_not_hidden(merge) -> None:
    nan, zero = np.full((1, 4), np.nan, np.float32), np.zeros(1, np.float32)
    assert np.isnan(merge(nan, zero, np.ones((1, 4), np.float32), zero)[0]).all()


def test_lse_is_a_natural_logarithm(merge) -> None:
    """Two parts of 3 and 5 equal keys of score 0: their sum has 8."""
    ones = np.ones((1, 2), np.float32)
    out, lse = merge(ones * 3, np.log(np.float32([3])), ones * 5, np.log(np.float32([5])))
    np.testing.assert_allclose(lse, np.log([8.0]), rtol=1e-6)
    np.testing.assert_allclose(out, ones * (9 + 25) / 8, rtol=1e-6)


def test_order_of_three_parts_does_not_matter(merge) -> None:
    rng = np.random.default_rng(2)
    parts = [
        (rng.standard_normal((7, 8)).astype(np.float32), (rng.standard_normal(7) * 9).astype(np.float32))
        for _ in range(3)
    ]
    forward, backward = (merge(*merge(*a, *b), *c) for a, b, c in (parts, parts[::-1]))
    for ours, theirs in zip(forward, backward, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6)


def test_half_precision_outputs_are_weighted_in_float32(merge) -> None:
    rng = np.random.default_rng(3)
    outs = [rng.standard_normal((9, 16)).astype(jnp.bfloat16) for _ in range(2)]
    lses = [rng.standard_normal(9).astype(np.float32) for _ in range(2)]
    merged, lse = merge(outs[0], lses[0], outs[1], lses[1])
    exact, _ = merge(outs[0].astype(np.float32), lses[0], outs[1].astype(np.float32), lses[1])
    assert merged.dtype == jnp.bfloat16
    assert lse.dtype == jnp.float32
    np.testing.assert_array_equal(merged, exact.astype(jnp.bfloat16))


def test_an_unknown_implementation_is_named() -> None:
    out, lse = jnp.zeros((1, 2)), jnp.zeros(1)
    with pytest.raises(NoImplementationError, match=r"merge_states: no implementation named \['cuda'\]"):
        merge_states(out, lse, out, lse, implementation="cuda")


@pytest.mark.parametrize(
    "shapes", [((2, 3), (2,), (2, 4), (2,)), ((2, 3), (3,), (2, 3), (3,)), ((2, 3), (2,), (2, 3), (1,))]
)
def test_shapes_that_do_not_agree(shapes: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match="same leading axes"):
        inspect.unwrap(merge_states)(*(jnp.zeros(shape) for shape in shapes))
