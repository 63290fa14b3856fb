"""Products of a few rows with a bias: the definition, and the Hopper kernel interpreted, lowered for an H200, and for real."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import NoImplementationError, few_linear, few_linear_refusal
from dflash_kernels.matmul.few.mosaic_gpu import launch
from dflash_kernels.matmul.few_tiling import plan
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..devices import h200

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
SIZES = [(5120, 2880), (2880, 4096)]  # of gpt-oss


def make(rows: int, features: int, depth: int, *, biased: bool) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    keys = jax.random.split(jax.random.key(rows), 3)
    x, weight = (jax.random.normal(key, (count, depth)) for key, count in zip(keys, (rows, features), strict=False))
    bias = jax.random.normal(keys[2], (features,)).astype(jnp.bfloat16) if biased else None
    return x.astype(jnp.bfloat16), (weight * depth**-0.5).astype(jnp.bfloat16), bias


def check(call: tuple[jax.Array, jax.Array, jax.Array | None], found: jax.Array) -> None:
    x, weight = (np.asarray(one, np.float64) for one in call[:2])
    true = x @ weight.T + (0 if call[2] is None else np.asarray(call[2], np.float64))
    wide = np.asarray(found, np.float64)
    wide, far = (wide.sum(axis=0), 1e-5) if wide.ndim == 3 else (wide, 2**-8)
    assert np.abs(wide - true).max() <= far * np.abs(true).max()


@pytest.mark.parametrize(
    ("rows", "features", "depth", "biased", "parts"),
    [(1, 128, 192, True, False), (8, 64, 640, False, True), (11, 128, 128, True, True), (16, 64, 64, False, False)],
)
def test_kernel(rows: int, features: int, depth: int, biased: bool, parts: bool) -> None:
    """Rings that turn, parts, rows that are padded."""
    call = make(rows, features, depth, biased=biased)
    check(call, launch(*call, parts=parts, interpret=INTERPRET))
    check(call, few_linear(*call, parts=parts, implementation="xla"))


@pytest.mark.parametrize(("features", "depth"), SIZES)
@pytest.mark.parametrize("rows", [1, 16])
def test_lowers_for_an_h200(rows: int, features: int, depth: int) -> None:
    with h200():
        assert few_linear_refusal(rows, jnp.bfloat16, features, depth) is None
        for parts in (False, True):
            call = jax.eval_shape(lambda: make(rows, features, depth, biased=True))
            program = jax.jit(lambda *call, parts=parts: few_linear(*call, parts=parts, implementation="mosaic_gpu"))
            assert "@mosaic_gpu_v2" in program.trace(*call).lower(lowering_platforms=("cuda",)).as_text()


def test_parts_fill_the_multiprocessors() -> None:
    assert [plan(8, jnp.bfloat16, *sizes, parts=True).split for sizes in SIZES] == [1, 2]
    assert [plan(8, jnp.bfloat16, *sizes, parts=False).split for sizes in SIZES] == [1, 1]


def test_refusals_name_their_reason() -> None:
    for sizes, reason in (
        ((17, jnp.bfloat16, 64, 64), "1 to 16 rows, not 17"), ((1, jnp.float32, 64, 64), "takes bfloat16, not float32"),
        ((1, jnp.bfloat16, 80, 64), "in 64s, not 80 and 64"),
    ):  # fmt: skip
        with pytest.raises(NotImplementedError, match=reason):
            plan(*sizes, parts=False)
    x, weight, bias = make(1, 64, 64, biased=True)
    plain = inspect.unwrap(few_linear)  # annotations are checked before, in tests only
    with pytest.raises(ValueError, match=r"bias \(32,\) does not fit"):
        plain(x, weight, jnp.zeros(32, jnp.bfloat16))
    with pytest.raises(ValueError, match="as many columns"):
        plain(x[:, :32], weight, bias)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="for machines without a Hopper GPU")
def test_other_devices_are_refused() -> None:
    assert "needs a Hopper GPU" in str(few_linear_refusal(1, jnp.bfloat16, 64, 64))
    with pytest.raises(NoImplementationError, match="needs a Hopper GPU"):
        few_linear(*make(1, 64, 64, biased=False), implementation="mosaic_gpu")


@pytest.mark.gpu
@pytest.mark.parametrize(("features", "depth"), SIZES)
@pytest.mark.parametrize("rows", [1, 3, 8, 13, 16])
def test_full_size(rows: int, features: int, depth: int) -> None:
    call = make(rows, features, depth, biased=True)
    for parts in (False, True):
        first, second = (few_linear(*call, parts=parts, implementation="mosaic_gpu") for _ in range(2))
        check(call, first)
        assert np.asarray(first).tobytes() == np.asarray(second).tobytes()
