"""Products that end in the residual stream, and what products of many rows have besides: results through shared memory.
The definition, and the Hopper kernels in Pallas's interpreter, lowered for an H200, and for real (`-m gpu`)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import dense_gated, dense_onto
from dflash_kernels.matmul import tiling
from dflash_kernels.matmul.dense.mosaic_gpu import launch_onto
from dflash_kernels.matmul.gemm_sm90 import gemm
from dflash_kernels.matmul.tiling import plan, tiled
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..devices import h200

EPS = 1e-6
INTERPRET = plgpu.InterpretGPUParams()
# Hidden, inner width.
QWEN3 = {"4b": (2560, 9728), "8b": (4096, 12288)}


def make(
    form: str, rows: int, features: int, depth: int, dtype: Any = jnp.bfloat16, mean: float = 1.0
) -> list[jax.Array]:
    """x, a weight, and for "onto" a stream and a norm of some mean."""
    keys = jax.random.split(jax.random.key(rows + features), 4)
    weight = jax.random.normal(keys[1], (features * (2 if form == "swiglu" else 1), depth)) * depth**-0.5
    made = [jax.random.normal(keys[0], (rows, depth)), weight]
    if form == "onto":
        made += [jax.random.normal(keys[2], (rows, features)), mean + 0.1 * jax.random.normal(keys[3], (features,))]
    return [array.astype(dtype) for array in made]


def close(found: jax.Array, true: np.ndarray, units: float) -> None:
    """An error of so many units in the last place of the largest."""
    error = np.abs(np.asarray(found, np.float64) - true).max()
    assert error <= units * float(jnp.finfo(found.dtype).eps) * np.abs(true).max()


def check(form: str, arrays: list[jax.Array], out: Any) -> None:
    x, weight, *rest = (np.asarray(array, np.float64) for array in arrays)
    true = x @ weight.T
    if form == "swiglu":
        gate, up = np.split(true, 2, axis=-1)
        close(out[0], gate / (1 + np.exp(-gate)) * up, 2)
    elif form == "onto":
        added = rest[0] + true
        close(out[0], added, 2)
        if len(out) > 1:
            close(out[1], added / np.sqrt((added**2).mean(-1, keepdims=True) + EPS) * rest[1], 3)
    else:
        close(out[0], true, 2)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_definition(dtype: Any) -> None:
    arrays = make("onto", 5, 24, 64, dtype)
    units = 8 if dtype == jnp.float32 else 3
    x, weight, stream, norm = (np.asarray(array, np.float64) for array in arrays)
    added = stream + x @ weight.T
    out = dense_onto(*arrays, eps=EPS, implementation="xla")
    for found, true in zip(out, (added, added / np.sqrt((added**2).mean(-1, keepdims=True) + EPS) * norm), strict=True):
        close(found, true, units)


@pytest.mark.few("swiglu-512-96-256-how3")
@pytest.mark.parametrize(
    ("form", "rows", "features", "depth", "how"),
    [
        # A last tile that overlaps, several turns of a CTA.
        ("swiglu", 256, 80, 128, {"tile_m": 128, "tile_n": 32}),
        ("store", 64, 96, 128, {"tile_m": 64, "tile_n": 32}),
        # Few instructions.
        ("swiglu", 128, 96, 1024, {"tile_m": 128, "tile_n": 32, "one_warp": True}),
        ("swiglu", 512, 96, 256, {"tile_m": 256, "tile_n": 96, "one_warp": True}),
    ],
)  # fmt: skip
def test_agrees_with_float64(form: Any, rows: int, features: int, depth: int, how: dict[str, Any]) -> None:
    arrays = make(form, rows, features, depth)
    schedule = tiled(rows, features, depth, form, multiprocessors=2, **how)
    check(form, arrays, gemm(schedule, *arrays, interpret=INTERPRET))


@pytest.mark.few("False-True", "True-*")
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("straight", [False, True])
def test_both_ways_into_the_stream(straight: bool, zero_centered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that are added and normed in one launch, and XLA's product with the stream added."""
    monkeypatch.setattr(tiling, "MANY_ROWS", 128 if straight else 512)
    arrays = make("onto", 128, 512, 128, mean=0.0 if zero_centered else 1.0)
    assert tiling.cublas_pays(128, 512, 128, multiprocessors=4) == straight
    how: Any = {"eps": EPS, "zero_centered": zero_centered}
    out = launch_onto(*arrays, **how, multiprocessors=4, interpret=INTERPRET)
    if zero_centered:
        theirs = dense_onto(*arrays, **how, implementation="xla")
        arrays[-1] = 1 + arrays[-1].astype(jnp.float32)
        check("onto", arrays, theirs)
    check("onto", arrays, out)


def test_where_xla_adds_the_stream() -> None:
    """8B's 512 rows: tiles of 128 features for 128 multiprocessors. 4B's have no tiles of whole swizzles for as many."""
    for model, (hidden, inner) in QWEN3.items():
        for depth in (4096, inner):
            assert tiling.cublas_pays(512, hidden, depth, multiprocessors=132) == (model == "8b")
            assert not tiling.cublas_pays(128, hidden, depth, multiprocessors=132)
    gates = plan(512, 12288, 4096, "swiglu", multiprocessors=132)
    assert (gates.tile_m, gates.tile_w, gates.staged, gates.one_warp) == (256, 192, 32, True)


@pytest.mark.parametrize("model", QWEN3)
def test_a_layer_lowers_for_an_h200(model: str) -> None:
    hidden, inner = QWEN3[model]
    calls = [jax.eval_shape(lambda form=form, size=size: make(form, 512, *size))
             for form, size in (("onto", (hidden, inner)), ("swiglu", (inner, hidden)))]  # fmt: skip

    def run(calls: Any) -> Any:
        stream, normed = dense_onto(*calls[0], eps=EPS)
        return stream, dense_gated(normed, calls[1][1])

    with h200():
        text = jax.jit(run).trace(calls).lower(lowering_platforms=("cuda",)).as_text()
    # Gate and up, and a norm; 4B's other product as well.
    assert text.count("stablehlo.custom_call @mosaic_gpu_v2") == (2 if model == "8b" else 3)


def test_refuses_a_stream_of_another_dtype() -> None:
    x, weight, stream, norm = make("onto", 512, 512, 64)
    assert tiling.cublas_pays(512, 512, 64, multiprocessors=16)
    with pytest.raises(NotImplementedError, match="in the stream's dtype, float32"):
        jax.eval_shape(
            lambda stream: launch_onto(x, weight, stream, norm, eps=EPS, multiprocessors=16), stream.astype(jnp.float32)
        )


@pytest.mark.gpu
@pytest.mark.parametrize("model", QWEN3)
def test_full_size(model: str) -> None:
    hidden, inner = QWEN3[model]
    for arrays, function in (
        (make("onto", 512, hidden, inner), dense_onto),
        (make("onto", 512, hidden, 4096), dense_onto),
        (make("swiglu", 512, inner, hidden), dense_gated),
    ):
        named = {"eps": EPS} if function is dense_onto else {}
        call = jax.jit(lambda *arrays, f=function, named=named: f(*arrays, implementation="mosaic_gpu", **named))
        out, again = (jax.tree.leaves(call(*arrays)) for _ in range(2))
        check("onto" if named else "swiglu", arrays, out)
        assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in zip(out, again, strict=True))
