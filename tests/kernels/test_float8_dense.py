"""Rows rounded to float8 and their products with float8 weights: the definitions, and the Hopper kernels in Pallas's interpreter,
lowered for an H200, and for real (`-m gpu`)."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import (
    Float8Rows,
    NoImplementationError,
    float8_best,
    float8_dense,
    float8_gated,
    float8_onto,
    float8_refusal,
    float8_rows,
)
from dflash_kernels.core.layouts import interleave_columns
from dflash_kernels.matmul.float8.mosaic_gpu import launch, launch_best, launch_onto, launch_rows
from dflash_kernels.matmul.tiling import SHARED_MEMORY, candidates, plan
from jax.experimental.pallas import mosaic_gpu as plgpu

INTERPRET = plgpu.InterpretGPUParams()
FORMS = {"store": float8_dense, "swiglu": float8_gated}
QWEN3_4B = {"store": (6144, 2560), "swiglu": (9728, 2560), "split_k": (2560, 9728), "argmax": (151936, 2560)}
QWEN3_8B = {"store": (6144, 4096), "swiglu": (12288, 4096), "split_k": (4096, 12288), "argmax": (151936, 4096)}


def numbers(rows: int, width: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    """Rows of very different sizes."""
    x = jax.random.normal(jax.random.key(rows + width), (rows, width))
    return (x * jnp.logspace(-4, 3, rows)[:, None]).astype(dtype)


def make(rows: int, features: int, depth: int) -> tuple[Float8Rows, jax.Array, jax.Array]:
    """Rows, a weight, and the scales of its rows."""
    x = float8_rows(numbers(rows, depth).clip(-8, 8), implementation="xla")
    keys = jax.random.split(jax.random.key(features + depth), 2)
    # Past 448 there is nothing but NaN.
    weight = (jax.random.normal(keys[0], (features, depth)) * 90).clip(-448, 448).astype(jnp.float8_e4m3fn)
    return x, weight, jax.random.uniform(keys[1], (features,), minval=0.5, maxval=2.0) * depth**-0.5 / 90


def truth(form: str, x: Float8Rows, weight: jax.Array, scales: jax.Array) -> np.ndarray:
    wide, scale, by = (np.asarray(array, np.float64) for array in (x.values, x.scales, scales))
    product = (wide * scale[:, None]) @ (np.asarray(weight, np.float64) * by[:, None]).T
    if form != "swiglu":
        return product
    gate, up = np.split(product, 2, axis=-1)
    return gate / (1 + np.exp(-gate)) * up


def check(form: str, call: tuple[Float8Rows, jax.Array, jax.Array], out: jax.Array, *, sums: float = 1e-6) -> None:
    """Of every row: a rounding of its largest number, and what `sums` of the depth may be off by."""
    true = truth(form, *call)
    bound = (2.0**-7 + sums) * np.abs(true).max(axis=1, keepdims=True)
    assert (np.abs(np.asarray(out, np.float64) - true) <= bound).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.float16])
@pytest.mark.parametrize("width", [16, 24, 512])
def test_every_number_is_the_nearest_one(dtype: Any, width: int) -> None:
    x = numbers(5, width, dtype).at[2].set(0)
    rows = float8_rows(x)
    assert rows.values.dtype == jnp.float8_e4m3fn
    assert rows.scales.dtype == jnp.float32
    wide, values, scales = (np.asarray(array, np.float64) for array in (x, rows.values, rows.scales))
    top = np.abs(wide).max(axis=1, keepdims=True)
    # Three bits after the first, steps of 2^-9 near zero.
    bound = np.maximum(np.abs(wide) / 16, top / 448 * 2.0**-10)
    assert (np.abs(values * scales[:, None] - wide) <= bound * 1.0001).all()
    assert (np.abs(values).max(axis=1)[[0, 1, 3, 4]] == 448).all()
    assert (values[2] == 0).all()
    assert np.isfinite(scales).all()


def test_columns_in_pairs() -> None:
    x = numbers(3, 48)
    plain, paired = float8_rows(x), float8_rows(x, paired=True)
    np.testing.assert_array_equal(
        np.asarray(interleave_columns(plain.values), np.float32), np.asarray(paired.values, np.float32)
    )
    np.testing.assert_array_equal(plain.scales, paired.scales)
    with pytest.raises(ValueError, match="a multiple of 16, not 24"):
        float8_rows(x[:, :24], paired=True)


def test_the_kernel_rounds_as_defined() -> None:
    x = numbers(4, 512).at[1].set(0)
    for ours, theirs in zip(launch_rows(x, interpret=INTERPRET), float8_rows(x, paired=True), strict=True):
        np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(theirs, np.float32))


@pytest.mark.parametrize("implementation", ["xla", "interpreted"])
def test_numbers_that_are_none_stay_in_their_row(implementation: str) -> None:
    x = numbers(64, 512).at[3, 7].set(jnp.nan).at[5, 0].set(jnp.inf).at[9].set(0)
    _, weight, scales = make(1, 32, 512)
    if implementation == "xla":
        out = float8_dense(float8_rows(x, paired=True), weight, scales)
    else:
        rows = launch_rows(x, interpret=INTERPRET)
        (out,) = launch("store", rows, weight, scales, jnp.bfloat16, multiprocessors=2, interpret=INTERPRET)
    wide = np.asarray(out, np.float32)
    assert np.isnan(wide[[3, 5]]).all()
    assert (wide[9] == 0).all()
    assert np.isfinite(np.delete(wide, [3, 5], axis=0)).all()


@pytest.mark.parametrize("form", FORMS)
def test_the_definitions(form: str) -> None:
    call = make(5, 48, 64)
    assert FORMS[form](*call).dtype == jnp.bfloat16
    check(form, call, FORMS[form](*call), sums=2.0**-6)  # gate and up are rounded before they are multiplied
    wide = FORMS[form](*call, jnp.float32)
    assert wide.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(wide), truth(form, *call), rtol=1e-4, atol=1e-6)


@pytest.mark.few("swiglu-33-64-128", "split_k-100-64-512")
@pytest.mark.parametrize(
    ("form", "rows", "features", "depth"),
    [
        ("store", 16, 48, 128),
        ("store", 64, 48, 128),
        ("swiglu", 128, 96, 384),
        ("split_k", 100, 64, 512),
        ("store", 320, 144, 256),
        ("swiglu", 33, 64, 128),
    ],
)
def test_the_kernel_agrees_with_float64(form: Any, rows: int, features: int, depth: int) -> None:
    """Rows that fill no tile, too."""
    call = make(rows, features, depth)
    (out,) = launch(form, *call, jnp.bfloat16, multiprocessors=4, interpret=INTERPRET)
    check(form, call, out.sum(axis=0) if form == "split_k" else out)


def test_first_rows_are_those_of_all() -> None:
    """Tiles of other rows are left out: the interpreter fills what nobody writes with NaN."""
    call, how = make(384, 64, 256), {"multiprocessors": 3, "interpret": INTERPRET}
    out, every = (launch("store", *call, jnp.bfloat16, live=jnp.int32(live), **how)[0] for live in (130, 384))
    np.testing.assert_array_equal(np.asarray(out[:130], np.float32), np.asarray(every[:130], np.float32))
    assert np.isnan(np.asarray(out[256:], np.float32)).all()
    check("store", call, every)


@pytest.mark.few("True")
@pytest.mark.parametrize("zero_centered", [False, True])
def test_onto_the_stream(zero_centered: bool) -> None:
    x, weight, scales = make(70, 512, 256)
    stream, offset = numbers(70, 512).clip(-4, 4), 0.1 * jnp.sin(jnp.arange(512.0))
    norm = (offset + (not zero_centered)).astype(jnp.bfloat16)
    how: Any = {"eps": 1e-6, "zero_centered": zero_centered}
    ours = launch_onto(x, weight, scales, stream, norm, **how, multiprocessors=4, interpret=INTERPRET)
    added, rows = float8_onto(x, weight, scales, stream, norm, **how, paired=True)
    true = np.asarray(stream, np.float64) + truth("split_k", x, weight, scales)
    for found, _ in (ours, (added, rows)):
        assert found.dtype == stream.dtype
        assert np.abs(np.asarray(found, np.float64) - true).max() <= 2.0**-8 * np.abs(true).max()
    normed = true / np.sqrt((true**2).mean(-1, keepdims=True) + 1e-6) * (np.asarray(norm, np.float64) + zero_centered)
    expected = np.asarray(interleave_columns(jnp.asarray(normed)), np.float64)
    for _, found in (ours, (added, rows)):
        wide = np.asarray(found.values, np.float64) * np.asarray(found.scales, np.float64)[:, None]
        assert np.abs(wide - expected).max() <= np.abs(normed).max() / 14


@pytest.mark.few("130")
@pytest.mark.parametrize("rows", [40, 130])
def test_best_is_the_first_of_the_largest(rows: int) -> None:
    """Equal products in one tile and in several."""
    x, weight, scales = make(rows, 608, 128)
    places = jnp.array([17, 300, 599])
    weight, scales = weight.at[places].set(weight[17]), scales.at[places].set(scales[17] * 8)
    expected = np.asarray(jnp.argmax(float8_dense(x, weight, scales), axis=-1))
    assert 17 in expected
    out = launch_best(x, weight, scales, jnp.bfloat16, multiprocessors=2, interpret=INTERPRET)
    np.testing.assert_array_equal(np.asarray(out), expected)
    np.testing.assert_array_equal(np.asarray(float8_best(x, weight, scales)), expected)


@pytest.mark.parametrize("rows", [64, 128, 256, 512, 2048])
@pytest.mark.parametrize("sizes", [QWEN3_4B, QWEN3_8B])
def test_schedule(rows: int, sizes: dict[str, tuple[int, int]]) -> None:
    """Every plan covers its product and keeps the multiprocessors busy."""
    for form, (features, depth) in sizes.items():
        made: Any = plan(rows, features, depth, form, multiprocessors=132, itemsize=1)  # type: ignore[arg-type]
        assert made.tile_n * made.n_tiles >= features
        assert made.split_k * made.k_tiles * 128 == depth
        assert made.m_tiles * made.tile_m == rows
        results = 2 * made.tile_m * made.tile_n * (made.staged > 0)
        assert 128 * made.stages * (made.tile_m + made.tile_w) + results <= SHARED_MEMORY
        assert made.tiles / (-(-made.tiles // made.ctas) * 132) > 0.8


def test_parts_are_whole_blocks() -> None:
    """Of a depth of three, no two parts are equal."""
    made = candidates(64, 512, 384, "split_k", 132, jnp.bfloat16, (64, 128), 1)
    assert {(plan.split_k, plan.k_tiles) for plan in made} == {(1, 3)}


def test_refusals_name_their_reason() -> None:
    x, weight, scales = make(64, 64, 128)
    how: Any = {"multiprocessors": 132}
    for rows, columns, dtype, reason in (
        (31, 128, jnp.bfloat16, "takes more than 32 and at most 2048 rows, not 31"),
        (64, 64, jnp.bfloat16, "whole blocks of 128, not 64"), (64, 128, jnp.dtype("float32"), "gives bfloat16, not float32"),
    ):  # fmt: skip
        part = Float8Rows(x.values[:rows, :columns], x.scales[:rows])
        with pytest.raises(NotImplementedError, match=reason):
            launch("store", part, weight[:, :columns], scales, dtype, **how)
    with pytest.raises(NotImplementedError, match="a multiple of 16 features, not 56"):
        launch("store", x, weight[:56], scales[:56], jnp.bfloat16, **how)
    with pytest.raises(NotImplementedError, match="bfloat16 rows of a multiple of 512, not bfloat16 of 256"):
        launch_rows(numbers(4, 256))


def test_shapes_that_do_not_fit_are_named() -> None:
    x, weight, scales = make(4, 64, 64)
    with pytest.raises(ValueError, match="as many rows each, not 63 together"):
        float8_gated(x, weight[:63], scales[:63])
    call = inspect.unwrap(float8_dense)  # in test runs a shape checker around it would speak first
    with pytest.raises(ValueError, match=r"x .* and a weight .* must be \[M, D\], \[M\], \[F, D\] and \[F\]"):
        call(x, weight, scales[:3])
    with pytest.raises(ValueError, match="values must be float8_e4m3fn, not bfloat16"):
        call(Float8Rows(x.values.astype(jnp.bfloat16), x.scales), weight, scales)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="for machines without a Hopper GPU")
def test_other_devices_are_refused() -> None:
    assert "needs a Hopper GPU" in str(float8_refusal(128, jnp.bfloat16, 2560))
    with pytest.raises(NoImplementationError, match="mosaic_gpu: needs a Hopper GPU"):
        float8_rows(numbers(64, 512), paired=True, implementation="mosaic_gpu")


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "sizes"), [(64, QWEN3_4B), (100, QWEN3_4B), (512, QWEN3_8B), (2048, QWEN3_4B)])
@pytest.mark.parametrize("form", FORMS)
def test_full_size_agrees_with_float64(form: str, rows: int, sizes: dict[str, tuple[int, int]]) -> None:
    """Matrix units add a depth with some fourteen bits."""
    features, depth = sizes[form]
    x, weight, scales = make(rows, features * (2 if form == "swiglu" else 1), depth)
    call = jax.jit(lambda *call: FORMS[form](*call, implementation="mosaic_gpu"))
    out, places = call(x, weight, scales), np.array([0, 7, rows // 2, rows - 1])
    some = Float8Rows(x.values[places], x.scales[places])
    check(form, (some, weight, scales), out[places], sums=2.0**-6)
    assert np.asarray(out).tobytes() == np.asarray(call(x, weight, scales)).tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "width"), [(512, 2560), (33, 9728), (128, 12800)])
def test_full_size_rounds_as_defined(rows: int, width: int) -> None:
    """A scale may be off in its last place, and a number between two float8 ones go to the other."""
    x = numbers(rows, width).at[3].set(0).at[5, 9].set(jnp.nan)
    ours, theirs = (float8_rows(x, paired=True, implementation=name) for name in ("mosaic_gpu", "xla"))
    sound = np.arange(rows) != 5
    np.testing.assert_allclose(np.asarray(ours.scales)[sound], np.asarray(theirs.scales)[sound], rtol=1e-6)
    values = [np.asarray(one.values, np.float32)[sound] for one in (ours, theirs)]
    assert (values[0] == values[1]).mean() > 0.9999
    np.testing.assert_allclose(*values, rtol=2.0**-3, atol=2.0**-9)
    assert np.isnan(np.asarray(ours.values, np.float32)[5] * np.asarray(ours.scales)[5]).any()


@pytest.mark.gpu
@pytest.mark.parametrize("zero_centered", [False, True])
def test_full_size_onto(zero_centered: bool) -> None:
    x, weight, scales = make(512, 2560, 9728)
    norm = (0.1 * jnp.sin(jnp.arange(2560.0)) + (not zero_centered)).astype(jnp.bfloat16)
    stream, how = numbers(512, 2560).clip(-4, 4), {"eps": 1e-6, "zero_centered": zero_centered}
    ours, theirs = (
        float8_onto(x, weight, scales, stream, norm, **how, paired=True, implementation=name)
        for name in ("mosaic_gpu", "xla")
    )
    streams: Any
    rows: Any
    streams, rows = zip(ours, theirs, strict=True)
    wide = [np.asarray(one.values, np.float32) * np.asarray(one.scales)[:, None] for one in rows]
    for found, expected in (np.asarray(streams, np.float32), wide):
        assert (
            np.abs(found - expected).max() <= np.abs(expected).max() / 12
        )  # a step of the largest numbers, and a little


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [64, 120, 512])
def test_full_size_best(rows: int) -> None:
    x, weight, scales = make(rows, *QWEN3_4B["argmax"])
    out = np.asarray(float8_best(x, weight, scales, implementation="mosaic_gpu"))
    products = np.asarray(float8_dense(x, weight, scales, jnp.float32, implementation="xla"))
    chosen, largest = products[np.arange(rows), out], products.max(axis=1)
    assert (chosen >= largest - 2**-6 * np.abs(largest)).all()
    assert (out == products.argmax(axis=1)).mean() > 0.75  # products are compared in bfloat16
