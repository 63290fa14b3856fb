"""Products with matrices in eight bits: the definition, and the Hopper kernel in Pallas's interpreter, lowered for an H200, and for
real (`-m gpu`)."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import NoImplementationError, quantized_linear
from dflash_kernels.core.layouts import deinterleave_columns, interleave_columns
from dflash_kernels.matmul.weight_only.mosaic_gpu import launch
from dflash_kernels.matmul.weight_only.tiling import TILE_N, plan
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..devices import h200

DTYPES = [jnp.int8, jnp.float8_e4m3fn]


def make(rows: int, features: int, depth: int, kind: Any, dtype: Any = jnp.bfloat16) -> tuple[jax.Array, ...]:
    """Activations, values with the extremes of their type and subnormals among them, scales."""
    keys = jax.random.split(jax.random.key(rows + features), 3)
    x = jax.random.normal(keys[0], (rows, depth)).astype(dtype)
    if kind == jnp.int8:
        values = jax.random.randint(keys[1], (features, depth), -128, 128, jnp.int8)
    else:
        finite = jnp.asarray([code for code in range(256) if code & 127 != 127], jnp.uint8)
        values = jax.lax.bitcast_convert_type(jax.random.choice(keys[1], finite, (features, depth)), kind)
    return x, values, jax.random.uniform(keys[2], (features,), minval=0.5, maxval=2.0)


def check(call: tuple[jax.Array, ...], found: jax.Array) -> None:
    """At most twice as far from float64 as the definition in the same dtype, and 2 ulp."""
    x, values, scales = (np.asarray(array, np.float64) for array in call)
    true = x @ values.T * scales
    assert found.shape == true.shape
    assert found.dtype == call[0].dtype
    given = np.asarray(quantized_linear(*call, implementation="xla"), np.float64)
    ulp = float(jnp.finfo(call[0].dtype).eps) * np.abs(true)
    sums = 2.0**-20 * (np.abs(x) @ np.abs(values).T * scales)  # float32 sums in another order
    assert (np.abs(np.asarray(found, np.float64) - true) <= 2 * np.abs(given - true) + 2 * ulp + sums).all()


@pytest.mark.few("33-384-640-2-int8", "3-200-1280-4-float8_e4m3fn")
@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize(
    ("rows", "features", "depth", "multiprocessors"), [(1, 128, 128, 4), (3, 200, 1280, 4), (16, 264, 1152, 8), (33, 384, 640, 2)]
)  # fmt: skip
def test_kernel(rows: int, features: int, depth: int, multiprocessors: int, kind: Any) -> None:
    """One block and many, whole and shifted tiles, shared depth that does not divide, few tokens and a ring that turns."""
    call = make(rows, features, depth, kind)
    check(call, launch(*call, multiprocessors=multiprocessors, interpret=plgpu.InterpretGPUParams()))


@pytest.mark.parametrize("kind", DTYPES)
def test_columns_stored_in_pairs(kind: Any) -> None:
    """The same product whichever way the columns lie, in the kernel and in the definition."""
    x, values, scales = call = make(3, 136, 256, kind)
    places = [16 * block + 8 * half + i for block in range(16) for i in range(8) for half in range(2)]
    stored = interleave_columns(values)
    assert (np.asarray(stored, np.float32) == np.asarray(values, np.float32)[:, places]).all()
    assert (np.asarray(deinterleave_columns(stored), np.float32) == np.asarray(values, np.float32)).all()
    check(call, quantized_linear(x, stored, scales, paired=True, implementation="xla"))
    check(call, launch(x, stored, scales, paired=True, multiprocessors=4, interpret=plgpu.InterpretGPUParams()))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_the_definition(dtype: Any) -> None:
    x, values, scales = make(5, 24, 96, jnp.int8, dtype)
    found = quantized_linear(x, values, scales / 128)
    true = np.asarray(x, np.float64) @ np.asarray(values, np.float64).T * np.asarray(scales / 128, np.float64)
    bound = 4 * float(jnp.finfo(dtype).eps) * np.abs(true).max()  # sums in other orders on other processors
    np.testing.assert_allclose(np.asarray(found, np.float64), true, rtol=0, atol=bound)


def test_no_rows() -> None:
    x, values, scales = make(1, 128, 128, jnp.int8)
    assert quantized_linear(x[:0], values, scales).shape == (0, 128)


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize(("rows", "features", "depth"), [(1, 151936, 2560), (16, 2560, 9728), (64, 6144, 2560)])
def test_lowers_for_an_h200(rows: int, features: int, depth: int, kind: Any) -> None:
    call = jax.eval_shape(lambda: make(rows, features, depth, kind))
    with h200():
        lowered = (
            jax.jit(lambda *call: launch(*call, multiprocessors=132)).trace(*call).lower(lowering_platforms=("cuda",))
        )
    assert "@mosaic_gpu_v2" in lowered.as_text()


@pytest.mark.parametrize(
    ("features", "depth", "splits"), [(19456, 2560, 1), (6144, 2560, 5), (2560, 4096, 8), (2560, 9728, 8), (151936, 2560, 1)]
)  # fmt: skip
def test_schedule(features: int, depth: int, splits: int) -> None:
    """Small matrices are shared along their depth; two CTAs fit on a multiprocessor."""
    schedule = plan(16, features, depth, 132)
    assert schedule.split_k == splits
    assert schedule.n_tiles * TILE_N >= features
    assert schedule.stages * (TILE_N * 128 + schedule.tile_m * 256) <= 100 * 1024


@pytest.mark.parametrize(
    ("rows", "features", "depth", "reason"),
    [(65, 128, 128, "takes 1 to 64 rows, not 65"), (1, 128, 100, "128 | depth"), (1, 120, 128, "at least 128 features")],
)  # fmt: skip
def test_refusals_name_their_reason(rows: int, features: int, depth: int, reason: str) -> None:
    with pytest.raises(NotImplementedError, match=reason.replace("|", r"\|")):
        plan(rows, features, depth, 132)


def test_other_dtypes_are_refused() -> None:
    x, values, scales = make(2, 128, 128, jnp.int8)
    with pytest.raises(NotImplementedError, match="takes bfloat16 and weights in int8 or float8_e4m3fn, not float16"):
        launch(x.astype(jnp.float16), values, scales, multiprocessors=4)


def test_shapes_that_do_not_fit_are_named() -> None:
    x, values, scales = make(2, 128, 128, jnp.int8)
    with pytest.raises(ValueError, match=r"x \(2, 120\), values \(128, 128\)"):
        inspect.unwrap(quantized_linear)(x[:, :120], values, scales)  # annotations are checked before, in tests only


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="for machines without a Hopper GPU")
def test_other_devices_are_refused() -> None:
    with pytest.raises(NoImplementationError, match="mosaic_gpu: needs a Hopper GPU"):
        quantized_linear(*make(2, 128, 128, jnp.int8), implementation="mosaic_gpu")


@pytest.mark.gpu
@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize(
    ("rows", "features", "depth"), [(1, 19456, 2560), (16, 2560, 9728), (9, 6144, 2560), (64, 2560, 4096), (2, 136, 128)]
)  # fmt: skip
def test_full_size_agrees_with_float64(rows: int, features: int, depth: int, kind: Any, paired: bool) -> None:
    call = x, values, scales = make(rows, features, depth, kind)
    product = jax.jit(lambda *call: quantized_linear(*call, paired=paired, implementation="mosaic_gpu"))
    stored = interleave_columns(values) if paired else values
    found = product(x, stored, scales)
    check(call, found)
    assert np.asarray(found).tobytes() == np.asarray(product(x, stored, scales)).tobytes()


@pytest.mark.gpu
def test_a_row_alone_has_the_bits_it_has_among_others() -> None:
    x, values, scales = make(8, 6144, 2560, jnp.int8)
    product = jax.jit(lambda *call: quantized_linear(*call, implementation="mosaic_gpu"))
    assert (
        np.asarray(product(x, values, scales)[3]).tobytes() == np.asarray(product(x[3:4], values, scales)[0]).tobytes()
    )
