"""Products by group: the definition, and the Hopper kernel interpreted, lowered for an H200, and for real (`-m gpu`)."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import NoImplementationError, grouped_linear, grouped_linear_refusal
from dflash_kernels.matmul.grouped.mosaic_gpu import launch
from dflash_kernels.matmul.grouped.tiling import SHARED_MEMORY, plan
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..devices import h200


def make(rows: int, groups: list[int], features: int, depth: int, dtype: Any = jnp.bfloat16) -> dict[str, Any]:
    """A call: rows and group of the last block are what nobody may look at."""
    keys = jax.random.split(jax.random.key(depth + rows), 2)
    x = jax.random.normal(keys[0], ((len(groups) + 1) * rows, depth)).at[len(groups) * rows :].set(jnp.nan)
    weight = jax.random.normal(keys[1], (max(groups) + 1, features, depth)) * depth**-0.5
    table = jnp.asarray([*groups, 2147480000], jnp.int32)
    return {"x": x.astype(dtype), "weight": weight.astype(dtype), "groups": table, "count": jnp.int32(len(groups))}


def check(call: dict[str, Any], found: jax.Array, *, gated: bool) -> None:
    """At most twice as far from float64 as the definition in the same dtype, and 2 ulp."""
    used, blocks = int(call["count"]), len(call["groups"])
    rows = call["x"].shape[0] // blocks
    x, weight = (np.asarray(call[name], np.float64) for name in ("x", "weight"))
    groups = np.asarray(call["groups"])[:used]
    true = np.concatenate([x[b * rows : (b + 1) * rows] @ weight[group].T for b, group in enumerate(groups)])
    if gated:
        gate, up = np.split(true, 2, axis=-1)
        true = gate / (1 + np.exp(-gate)) * up
    assert found.shape == (x.shape[0], true.shape[1])
    assert found.dtype == call["x"].dtype
    cut = {**call, "x": call["x"][: used * rows], "groups": call["groups"][:used]}
    given = np.asarray(grouped_linear(**cut, gated=gated, implementation="xla"), np.float64)
    ulp = 2 * float(jnp.finfo(found.dtype).eps) * np.abs(true)
    worst = np.abs(given - true).max()
    assert (np.abs(np.asarray(found[: used * rows], np.float64) - true) <= 2 * worst + ulp).all()


@pytest.mark.few("128-False*", "128-True*")
@pytest.mark.parametrize(
    ("rows", "gated", "features", "depth", "dtype"),
    [
        (64, False, 256, 448, jnp.bfloat16), (128, False, 256, 320, jnp.bfloat16), (64, True, 512, 64, jnp.bfloat16),
        (128, True, 256, 128, jnp.float16),
    ],
)  # fmt: skip
def test_kernel(rows: int, gated: bool, features: int, depth: int, dtype: Any) -> None:
    """Groups in any order, one with two blocks and one with none, a ring that turns and one that does not."""
    call = make(rows, [2, 0, 0], features, depth, dtype)
    check(call, launch(**call, gated=gated, interpret=plgpu.InterpretGPUParams(detect_races=True)), gated=gated)


def test_no_block_in_use() -> None:
    call = make(64, [0], 256, 64) | {"count": jnp.int32(0)}
    assert launch(**call, gated=False, interpret=plgpu.InterpretGPUParams()).shape == (128, 256)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_definition(dtype: Any, gated: bool) -> None:
    call = make(3, [1, 0], 10, 24, dtype)
    check(call, grouped_linear(**call, gated=gated), gated=gated)


@pytest.mark.parametrize(("rows", "features", "depth", "gated"), [
    (64, 2816, 2048, True), (64, 2048, 1408, False), (128, 1536, 2048, True), (128, 2048, 768, False),
])  # fmt: skip
def test_lowers_for_an_h200(rows: int, features: int, depth: int, gated: bool) -> None:
    call = jax.eval_shape(lambda: make(rows, list(range(8)), features, depth))
    with h200():
        program = jax.jit(lambda call: launch(**call, gated=gated)).trace(call)
        assert "@mosaic_gpu_v2" in program.lower(lowering_platforms=("cuda",)).as_text()
    schedule = plan(rows, features // (1 + gated), depth, gated=gated)
    assert schedule.stages >= 3
    assert schedule.stages * (rows + 256) * 128 + 2 * 64 * schedule.wg_n * 2 <= SHARED_MEMORY


@pytest.mark.parametrize(("rows", "out", "depth", "reason"), [
    (32, 256, 64, "blocks of 64 or 128 rows, not 32"), (64, 192, 64, "results in 256s"), (64, 256, 72, "depths in 64s"),
])  # fmt: skip
def test_refusals_name_their_reason(rows: int, out: int, depth: int, reason: str) -> None:
    with pytest.raises(NotImplementedError, match=reason):
        plan(rows, out, depth, gated=False)


def test_other_dtypes_are_refused() -> None:
    call = make(64, [0], 256, 64, jnp.float32)
    with pytest.raises(NotImplementedError, match="takes bfloat16 or float16 throughout, not float32"):
        launch(**call, gated=False)


def test_shapes_that_do_not_fit_are_named() -> None:
    call = make(4, [0, 1], 8, 16)
    plain = inspect.unwrap(grouped_linear)  # annotations are checked before, in tests only
    with pytest.raises(ValueError, match="11 rows do not make 3 blocks"):
        plain(**call | {"x": call["x"][:11]})
    with pytest.raises(ValueError, match=r"weight \(2, 8, 12\) must be \[G, F, 16\]"):
        plain(**call | {"weight": call["weight"][..., :12]})


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="for machines without a Hopper GPU")
def test_other_devices_are_refused() -> None:
    assert "needs a Hopper GPU" in str(grouped_linear_refusal(jnp.bfloat16, hidden=2048, inner=768))
    with pytest.raises(NoImplementationError, match="mosaic_gpu: needs a Hopper GPU"):
        grouped_linear(**make(64, [0], 256, 64), implementation="mosaic_gpu")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize(("features", "depth", "gated"), [(2816, 2048, True), (2048, 1408, False), (1536, 2048, True)])
def test_full_size_agrees_with_float64(rows: int, features: int, depth: int, gated: bool) -> None:
    call = make(rows, [3, 0, 0, 1, 5, 5, 5, 2], features, depth)
    product = jax.jit(lambda call: grouped_linear(**call, gated=gated, implementation="mosaic_gpu"))
    found = product(call)
    check(call, found, gated=gated)
    used = int(call["count"]) * rows
    assert np.asarray(found[:used]).tobytes() == np.asarray(product(call)[:used]).tobytes()
