"""A quantized output and the product that reads it, against float64: bytes are those of tests/kernels/test_quantize.py's ops."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import (
    QuantizedOutput,
    column_scales,
    dequantize_output,
    interleave_columns,
    output_linear,
    quantize_groups,
    quantize_nvfp4,
    quantize_output,
    quantize_tensor,
    swizzle_scales,
)

from .test_quantize import E2M1

M, D, F = 70, 256, 24
E4M3 = jnp.float8_e4m3fn
shaped = jax.ShapeDtypeStruct
# Output, scale, scales of blocks, and whether those are in column order; M rows of D.
FORMATS: dict[str, tuple[Any, float | None, Any, bool]] = {
    "fp8": (shaped((M, D), E4M3), 0.03125, None, False),
    "groups 128": (shaped((M, D), E4M3), None, shaped((M, 2), jnp.float32), False),
    "groups 64, exponents": (shaped((M, D), E4M3), None, shaped((M, 4), jnp.uint8), False),
    "groups 64, columns": (shaped((M, D), E4M3), None, shaped((4, 72), jnp.float32), True),
    "groups 128, columns of exponents": (shaped((M, D), E4M3), None, shaped((2, 80), jnp.uint8), True),
    "nvfp4": (shaped((M, D // 2), jnp.uint8), 448 * 6 / 16, shaped((1, 4, 32, 4, 4), E4M3), False),
}
# Of a block's largest number: half a step of the numbers kept, and for nvfp4 a sixth of it and what the scale is rounded by.
CLOSE = dict.fromkeys(FORMATS, 2.0 ** (-4)) | {"nvfp4": 1 / 6 + 0.08}


def rows(dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    """Rows of sizes as attention's outputs have them, one of zeros."""
    x = np.random.default_rng(seed).standard_normal((M, D)) * np.logspace(-2, 0.5, M)[:, None]
    x[5] = 0
    return np.asarray(jnp.asarray(x, dtype))


def told(name: str, x: Any) -> Any:
    output, scale, blocks, columns = FORMATS[name]
    return quantize_output(jnp.asarray(x), output, scale=scale, block_scales=blocks, column_order=columns)


def read(name: str, x: Any) -> np.ndarray:
    """What they stand for, in float64, from their bytes."""
    kept, blocks = np.asarray(x.values), np.asarray(x.block_scales)
    if name == "fp8":
        return kept.astype(np.float64) * float(x.scale)
    if name == "nvfp4":
        scales = np.empty((M, D // 16))
        for i, j in np.ndindex(M, D // 16):
            scales[i, j] = blocks[i // 128, j // 4, i % 32, i % 128 // 32, j % 4].astype(np.float64)
        codes = np.stack([kept & 15, kept >> 4], -1).reshape(M, D)
        return E2M1[codes & 7] * np.where(codes & 8, -1, 1) * scales.repeat(16, 1) / float(x.scale)
    scales = blocks.T[:M] if FORMATS[name][3] else blocks
    scales = np.exp2(scales.astype(np.float64) - 127) if scales.dtype == np.uint8 else scales.astype(np.float64)
    return kept.astype(np.float64) * scales.repeat(D // scales.shape[1], 1)


@pytest.mark.parametrize("name", FORMATS)
def test_the_format_is_told_by_dtype_and_scales(name: str) -> None:
    output, scale, blocks, _ = FORMATS[name]
    x = rows()
    made = jax.jit(lambda x: told(name, x))(x)
    assert (made.values.shape, made.values.dtype) == (output.shape, output.dtype)
    assert (made.scale is None) == (scale is None)
    assert blocks is None or (made.block_scales.shape, made.block_scales.dtype) == (blocks.shape, blocks.dtype)
    group = 16 if name == "nvfp4" else 64
    tops = np.abs(x).reshape(M, -1, group).max(-1).repeat(group, 1)
    assert (np.abs(read(name, made) - x) <= CLOSE[name] * tops + 2.0**-14).all()


def test_bytes_are_those_of_the_operations() -> None:
    x = jnp.asarray(rows())
    values, scales = quantize_groups(x, group=64)
    wide, powers = quantize_groups(x, group=128, power_of_two=True)
    codes, blocks = quantize_nvfp4(x, 448 * 6 / 16)
    expected = {
        "fp8": (quantize_tensor(x, 0.03125), None), "groups 64, columns": (values, column_scales(scales)),
        "groups 128, columns of exponents": (wide, column_scales(jnp.asarray(np.frexp(powers)[1] + 126))),
        "nvfp4": (codes, swizzle_scales(blocks)),
    }  # fmt: skip
    for name, (values, scales) in expected.items():
        made = told(name, x)
        assert np.asarray(made.values).tobytes() == np.asarray(values).tobytes()
        if scales is not None:
            wanted = np.asarray(scales).astype(made.block_scales.dtype)
            # Rows that fill a column to 16 bytes are as many as the scales' own size says.
            np.testing.assert_array_equal(
                np.asarray(made.block_scales)[:, : wanted.shape[1]].view(np.uint8), wanted.view(np.uint8)
            )


@pytest.mark.few("plain-float32-*", "paired-bfloat16-*")
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("paired", [False, True], ids=["plain", "paired"])
def test_products_are_those_of_what_is_kept(name: str, dtype: Any, paired: bool) -> None:
    """In float64 of the numbers that bytes stand for; the product itself rounds once, to the result's dtype."""
    rng = np.random.default_rng(1)
    weight = jnp.asarray(rng.standard_normal((F, D)), E4M3)
    scales = jnp.asarray(rng.uniform(0.5, 2, F), jnp.float32)
    made, columns = told(name, rows(dtype)), FORMATS[name][3]
    stored = interleave_columns(weight) if paired else weight
    call = jax.jit(lambda x, w, s: output_linear(x, w, s, dtype, paired=paired, column_order=columns))
    found = call(made, stored, scales)
    kept = read(name, made)
    true = kept @ np.asarray(weight, np.float64).T * np.asarray(scales, np.float64)
    assert found.dtype == dtype
    # Sums of 256 in float32, of products as large as these.
    noise = np.abs(kept) @ np.abs(np.asarray(weight, np.float64)).T * 2.0**-20
    off = np.abs(np.asarray(found, np.float64) - true)
    assert (off <= 2 * float(jnp.finfo(dtype).eps) * np.abs(true) + noise).all()


def test_few_rows_and_many_on_one_scale() -> None:
    weight, scales = jnp.asarray(np.random.default_rng(2).standard_normal((F, D)), E4M3), jnp.ones(F)
    many = told("fp8", rows())
    few = QuantizedOutput(many.values[:3], many.scale)
    np.testing.assert_allclose(
        output_linear(few, weight, scales, jnp.float32),
        output_linear(many, weight, scales, jnp.float32)[:3],
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("garbage", [np.nan, np.inf])
def test_a_row_of_garbage_changes_no_other(name: str, garbage: float) -> None:
    x, spoilt = rows(), rows().copy()
    spoilt[9] = garbage
    clean, found = (
        np.asarray(dequantize_output(told(name, one), D, column_order=FORMATS[name][3])) for one in (x, spoilt)
    )
    keep = np.arange(M) != 9
    np.testing.assert_array_equal(clean[keep], found[keep])
    assert (name in ("fp8", "nvfp4") and np.isinf(garbage)) or np.isnan(found[9]).all()


def test_what_tells_no_format() -> None:
    x = jnp.ones((M, D))
    eight, four = shaped((M, D), E4M3), shaped((M, D // 2), jnp.uint8)
    wrong: list[tuple[str, Any, dict[str, Any]]] = [
        ("tells no format", eight, {}),
        ("tells no format", shaped((M, D), jnp.bfloat16), {"scale": 1.0}),
        ("without a scale", eight, {"scale": 1.0, "block_scales": shaped((M, 2), jnp.float32)}),
        ("groups of 64 or 128, .* are of 8", eight, {"block_scales": shaped((M, 8), jnp.float32)}),
        ("float32, or uint8 for bare exponents", eight, {"block_scales": shaped((M, 2), jnp.bfloat16)}),
        ("uint8 with a scale", four, {"block_scales": shaped((1, 4, 32, 4, 4), E4M3)}),
        (r"are \(70, 256\) with block_scales \(2, 80\), not .*\(2, 70\)", eight,
         {"block_scales": shaped((2, M), jnp.uint8), "column_order": True}),
        ("x must be an array", eight, {"x": [1.0]}),
    ]  # fmt: skip
    for message, output, options in wrong:
        given = {"x": x, "output": output} | options
        with pytest.raises(ValueError, match=message):
            inspect.unwrap(quantize_output)(**given)
