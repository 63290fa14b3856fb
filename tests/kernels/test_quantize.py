"""Quantized outputs byte by byte against descriptions in float64 that share nothing with the ops, and their edges.

The descriptions round each step to float32 where the definition does, and find the nearest code by search over the few values there
are. What padding rows do to a layer's quantized output is looked at in tests/attention.
"""

import inspect
import math
from typing import Any

import dflash_kernels
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from dflash_kernels import column_scales, quantize_groups, quantize_nvfp4, quantize_tensor, swizzle_scales


@pytest.fixture(autouse=True, params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Bytes are the same on every device; the second round asks for a GPU as the default one."""
    return request.param


E4M3 = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def nearest(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Index of the nearest of `table` for each of `|values|`, a tie to the even index, beyond the last the last."""
    size = np.minimum(np.abs(values.astype(np.float64)), table[-1])
    above = np.clip(np.searchsorted(table, size), 1, len(table) - 1)
    low, high = size - table[above - 1], table[above] - size
    take_low = (low < high) | ((low == high) & ((above - 1) % 2 == 0))
    return np.where(take_low, above - 1, above)


def e4m3(values: np.ndarray) -> np.ndarray:
    """Codes; NaN is 0x7f with its sign."""
    codes = nearest(np.where(np.isnan(values), 0, values), E4M3)
    codes = np.where(np.isnan(values), 127, codes)
    return (codes | np.where(np.signbit(values), 128, 0)).astype(np.uint8)


def same_codes(found: np.ndarray, expected: np.ndarray) -> bool:
    """Equal bytes, but that a NaN's sign does not matter."""
    nan = expected & 127 == 127
    return bool(((found & 127 == 127) == nan).all() and (found == expected)[~nan].all())


def numbers(shape: tuple[int, ...], dtype=np.float32, seed: int = 0) -> np.ndarray:
    """Rows of very different sizes, with zeros of both signs."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-20, 12, (*shape[:-1], 1)))
    x[rng.random(shape) < 0.05] = -0.0
    return x.astype(dtype)


DTYPES = pytest.mark.parametrize(
    "dtype", [np.float32, ml_dtypes.bfloat16, np.float16], ids=lambda kind: np.dtype(kind).name
)


@DTYPES
@pytest.mark.parametrize("scale", [1.0, 0.25, 0.0371])
def test_one_scale(dtype, scale: float) -> None:
    with np.errstate(over="ignore"):
        x = numbers((40, 48), dtype)
    x[0, :6] = np.array([np.nan, np.inf, -np.inf, 448 * scale, -464.5 * scale, 3e4], dtype)
    found = np.asarray(jax.jit(quantize_tensor)(x, jnp.float32(scale)))
    inverse = np.float32(1) / np.float32(scale)
    with np.errstate(over="ignore"):
        expected = e4m3(x.astype(np.float32) * inverse)
    assert found.dtype == ml_dtypes.float8_e4m3fn
    assert same_codes(found.view(np.uint8), expected)
    assert math.isnan(found[0, 0])
    assert found[0, 1:3].astype(float).tolist() == [448, -448]


@DTYPES
@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize("power_of_two", [False, True], ids=["float", "exponent"])
def test_a_scale_for_each_group(dtype, group: int, power_of_two: bool) -> None:
    with np.errstate(over="ignore"):
        x = numbers((30, 256), dtype, seed=1)
    x[0] = 0
    x[1, 3] = np.nan
    x[2, 200] = np.inf if dtype != np.float16 else x[2, 200]
    x[3, :64] = np.linspace(-448, 448, 64).astype(dtype)
    x = np.where(np.isinf(x.astype(np.float32)) & (np.arange(30) != 2)[:, None], np.zeros((), dtype), x)
    values, scales = jax.jit(quantize_groups, static_argnames=("group", "power_of_two"))(
        x, group=group, power_of_two=power_of_two
    )
    wide = x.astype(np.float32).reshape(30, -1, group)
    with np.errstate(invalid="ignore"):
        expected = np.maximum(np.abs(wide).max(-1), np.float32(1e-10)) / np.float32(448)
    if power_of_two:
        raised = [[math.ceil(math.log2(v)) if np.isfinite(v) else 0 for v in row] for row in expected.tolist()]
        expected = np.where(np.isfinite(expected), np.exp2(np.array(raised)), expected).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(scales), expected)
    with np.errstate(invalid="ignore"):
        codes = e4m3(wide / expected[..., None]).reshape(x.shape)
    assert same_codes(np.asarray(values).view(np.uint8), codes)
    assert np.isnan(np.asarray(scales)[1, 0])
    assert not np.asarray(values, np.float32)[0].any()


def nvfp4_described(x: np.ndarray, global_scale: float) -> tuple[np.ndarray, np.ndarray]:
    blocks = x.astype(np.float32).reshape(*x.shape[:-1], -1, 16)
    top = np.abs(blocks).max(-1)
    scales = e4m3(np.float32(global_scale) * (top * np.float32(1 / 6)))
    read = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    inverse = np.where(read > 0, np.float32(global_scale) / np.where(read > 0, read, 1), np.float32(0)).astype(
        np.float32
    )
    product = np.clip(blocks, -3.4028235e38, 3.4028235e38).astype(np.float32) * inverse[..., None]
    codes = (nearest(np.nan_to_num(product), E2M1) | np.where(np.signbit(blocks), 8, 0)).reshape(*x.shape[:-1], -1, 2)
    return (codes[..., 0] | codes[..., 1] << 4).astype(np.uint8), scales


@DTYPES
def test_nvfp4(dtype) -> None:
    rng = np.random.default_rng(2)
    x = (rng.standard_normal((50, 64)) * np.exp2(rng.integers(-9, 4, (50, 1)))).astype(dtype)
    x[0] = 0
    x[1, 16:32] = -0.0
    x[2, :16] = np.repeat(np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6]), 2).astype(
        dtype
    )  # ties, where the scale is 1
    x[3, 5] = np.inf
    x[4, :16] = np.float32(1e-6) if dtype != np.float16 else 0  # the scale rounds to 0
    for global_scale in (1.0, 448 * 6 / float(np.abs(np.delete(x, 3, 0).astype(np.float32)).max()), 1e4):
        packed, scales = jax.jit(quantize_nvfp4)(x, jnp.float32(global_scale))
        with np.errstate(over="ignore"):
            expected = nvfp4_described(x, global_scale)
        np.testing.assert_array_equal(np.asarray(scales).view(np.uint8), expected[1])
        np.testing.assert_array_equal(np.asarray(packed), expected[0])
    assert packed.shape == (50, 32)
    assert scales.shape == (50, 4)


def test_a_nan_spoils_its_block_and_no_other() -> None:
    x = numbers((3, 64), seed=3).clip(-100, 100)
    clean = jax.tree.map(np.asarray, quantize_nvfp4(jnp.asarray(x), 1.0))
    x[1, 20] = np.nan
    packed, scales = jax.tree.map(np.asarray, quantize_nvfp4(jnp.asarray(x), 1.0))
    assert np.argwhere(np.isnan(scales.astype(np.float32))).tolist() == [[1, 1]]
    keep = np.ones((3, 4), bool)
    keep[1, 1] = False
    np.testing.assert_array_equal(scales.view(np.uint8)[keep], clean[1].view(np.uint8)[keep])
    np.testing.assert_array_equal(packed.reshape(3, 4, 8)[keep], clean[0].reshape(3, 4, 8)[keep])


def test_a_tie_of_nvfp4_scales_in_a_program() -> None:
    """168 lies between two e4m3 numbers and goes to the even one; a sixth of the tensor's scale, multiplied first, is not exact."""
    x, scale = jnp.full((1, 16), 0.017578125), jnp.float32(57344)
    _, eager = quantize_nvfp4(x, scale)
    _, compiled = jax.jit(quantize_nvfp4)(x, scale)
    assert float(eager[0, 0]) == float(compiled[0, 0]) == 160


def test_reading_nvfp4_back_is_close() -> None:
    x = np.random.default_rng(4).standard_normal((20, 64)).astype(np.float32)
    scale = 448 * 6 / float(np.abs(x).max())
    packed, scales = jax.tree.map(np.asarray, quantize_nvfp4(jnp.asarray(x), scale))
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(20, 64)
    read = E2M1[codes & 7] * np.where(codes & 8, -1, 1) * scales.astype(np.float64).repeat(16, 1) / scale
    tops = np.abs(x).reshape(20, 4, 16).max(-1).repeat(16, 1)
    assert (np.abs(read - x) <= tops * (1 / 6 + 0.08)).all()


@pytest.mark.parametrize("shape", [(1, 3), (128, 4), (129, 9)])
def test_the_order_of_swizzled_scales(shape: tuple[int, int]) -> None:
    scales = np.arange(1, math.prod(shape) + 1, dtype=np.int32).reshape(shape)
    found = np.asarray(swizzle_scales(jnp.asarray(scales)))
    assert found.shape == (-(-shape[0] // 128), -(-shape[1] // 4), 32, 4, 4)
    flat = found.reshape(-1)
    for i, j in np.ndindex(shape):
        tile = (i // 128) * found.shape[1] + j // 4
        assert flat[tile * 512 + i % 32 * 16 + i % 128 // 32 * 4 + j % 4] == scales[i, j]
    assert (flat > 0).sum() == scales.size


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("rows", [0, 1, 4, 30])
def test_scales_in_column_order(rows: int, dtype: Any) -> None:
    """Those of a group side by side, from 16 bytes to 16 bytes."""
    scales = np.arange(1, rows * 3 + 1).reshape(rows, 3).astype(dtype)
    found = np.asarray(column_scales(jnp.asarray(scales)))
    assert found.shape[0] == 3
    assert not found.size or found.strides[0] % 16 == 0
    assert 0 <= found.shape[1] - rows < 16 // found.itemsize
    np.testing.assert_array_equal(found[:, :rows], scales.T)
    assert not found[:, rows:].any()


def test_no_rows_at_all() -> None:
    assert quantize_tensor(jnp.zeros((0, 64)), 1.0).shape == (0, 64)
    assert quantize_groups(jnp.zeros((0, 64)), group=64)[1].shape == (0, 1)
    assert quantize_nvfp4(jnp.zeros((0, 64)), 1.0)[0].shape == (0, 32)


def test_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="groups of 64 do not divide rows of 96"):
        quantize_groups(jnp.zeros((2, 96)), group=64)
    with pytest.raises(ValueError, match="rows of 40 must be multiples of 16"):
        quantize_nvfp4(jnp.zeros((2, 40)), 1.0)
    with pytest.raises(ValueError, match=r"scale \(2,\) must be one number"):
        inspect.unwrap(quantize_tensor)(jnp.zeros((2, 4)), jnp.ones((2,)))


def test_names_of_earlier_releases_are_the_same_functions() -> None:
    for old in ("quantise_tensor", "quantise_groups", "quantise_nvfp4", "quantised_linear"):
        assert getattr(dflash_kernels, old) is getattr(dflash_kernels, old.replace("quantis", "quantiz"))
