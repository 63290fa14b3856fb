"""The projection of a few rows to heads, rotated and written to pages in one launch: interpreted, lowered, and for real."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import AddNorm, NoImplementationError, few_qkv_write, few_qkv_write_refusal
from dflash_kernels.fused.few_qkv.mosaic_gpu import launch, refuse
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..devices import h200

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)


def make(rows: int, heads: int, kv_heads: int, depth: int, pages: int = 5, page_size: int = 64) -> dict[str, Any]:
    """A call whose second row writes nothing, of pages full of NaN."""
    keys = iter(jax.random.split(jax.random.key(rows), 6))

    def draw(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape)

    features, angles = (heads + 2 * kv_heads) * 64, 6 * jax.random.uniform(next(keys), (rows, 32))
    slots = jnp.arange(rows) * 17 % (pages * page_size)
    return {
        "k_pages": jnp.full((pages, kv_heads, page_size, 64), jnp.nan, jnp.bfloat16),
        "v_pages": jnp.full((pages, kv_heads, page_size, 64), jnp.nan, jnp.bfloat16),
        "x": draw(rows, depth).astype(jnp.bfloat16),
        "weight": (draw(features, depth) * depth**-0.5).astype(jnp.bfloat16), "bias": draw(features).astype(jnp.bfloat16),
        "slots": slots.at[1].set(-1) if rows > 1 else slots, "cos": 1.3 * jnp.cos(angles), "sin": 1.3 * jnp.sin(angles),
    }  # fmt: skip


def check(call: dict[str, Any], found: Any) -> None:
    """Float64's heads at their places, and nothing at any other."""
    x, weight, bias, cos, sin = (np.asarray(call[name], np.float64) for name in ("x", "weight", "bias", "cos", "sin"))
    (pages, kv_heads, page_size, _), rows = call["k_pages"].shape, len(x)
    heads = (x @ weight.T + bias).reshape(rows, -1, 64)
    first, second, c, s = heads[..., :32], heads[..., 32:], cos[:, None], sin[:, None]
    turned = np.concatenate([first * c - second * s, second * c + first * s], axis=-1)
    expected = turned[:, : -2 * kv_heads], turned[:, -2 * kv_heads : -kv_heads], heads[:, -kv_heads:]
    q, *pools = (np.asarray(one, np.float64) for one in found)

    def near(one: np.ndarray, true: np.ndarray) -> None:
        np.testing.assert_allclose(one, true, rtol=0, atol=2**-8 * np.abs(turned).max())

    near(q, expected[0])
    for pool, true in zip(pools, expected[1:], strict=True):
        lines = pool.swapaxes(1, 2).reshape(pages * page_size, kv_heads, 64)
        slots = np.asarray(call["slots"])
        near(lines[slots[slots >= 0]], true[slots >= 0])
        assert np.isnan(np.delete(lines, slots[slots >= 0], axis=0)).all()


@pytest.mark.few("5-3-2-64", "11-2-1-128")
@pytest.mark.parametrize(("rows", "heads", "kv_heads", "depth"), [(1, 2, 1, 192), (5, 3, 2, 64), (11, 2, 1, 128)])
def test_kernel(rows: int, heads: int, kv_heads: int, depth: int) -> None:
    call = make(rows, heads, kv_heads, depth)
    check(call, launch(*call.values(), interpret=INTERPRET))
    check(call, few_qkv_write(**call, implementation="xla"))


def normed_call(depth: int, heads: int, kv_heads: int, *, zero_centered: bool = False) -> dict[str, Any]:
    """A call of one row that is added to and normed."""
    call = make(1, heads, kv_heads, depth)
    keys = jax.random.split(jax.random.key(depth))
    parts, weight = jax.random.normal(keys[0], (5, 1, depth)), jax.random.normal(keys[1], (depth,))
    added = AddNorm(parts, weight.astype(jnp.bfloat16), 1e-5, zero_centered, rounds_last=not zero_centered)
    return call | {"added": added}


def check_normed(call: dict[str, Any], found: tuple[jax.Array, ...]) -> None:
    """The stream and the heads of its norm, in float64."""
    added, (*heads, stream) = call["added"], found
    parts, before, weight = (np.asarray(one, np.float64) for one in (added.parts, call["x"], added.weight))
    true = before + parts.sum(axis=0)
    np.testing.assert_allclose(np.asarray(stream, np.float64), true, rtol=2**-8, atol=1e-6)
    held = np.asarray(stream, np.float64)
    normed = held / np.sqrt((held**2).mean() + added.eps) * (weight + added.zero_centered)
    check(call | {"x": jnp.asarray(normed, jnp.bfloat16)}, tuple(heads))


@pytest.mark.few("3-2-64-*", "2-1-640-False")
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "depth"), [(2, 1, 192), (3, 2, 64), (2, 1, 640)])
def test_row_that_is_normed(heads: int, kv_heads: int, depth: int, zero_centered: bool) -> None:
    call = normed_call(depth, heads, kv_heads, zero_centered=zero_centered)
    check_normed(call, launch(**call, interpret=INTERPRET))
    stream, written = few_qkv_write(*list(call.values())[:8], added=call["added"], implementation="xla")
    check_normed(call, (*written, stream))


def test_norms_lower_for_an_h200() -> None:
    given = normed_call(64, 3, 2)["added"][2:]
    shapes = jax.eval_shape(lambda: {name: one for name, one in normed_call(2880, 64, 8).items() if name != "added"})
    parts, weight = jax.ShapeDtypeStruct((12, 1, 2880), jnp.float32), jax.ShapeDtypeStruct((2880,), jnp.bfloat16)
    with h200():
        program = jax.jit(
            lambda call, parts, weight: few_qkv_write(
                **call, added=AddNorm(parts, weight, *given), implementation="mosaic_gpu"
            )
        )
        text = program.trace(shapes, parts, weight).lower(lowering_platforms=("cuda",)).as_text()
        assert "@mosaic_gpu_v2" in text
        kept: Any = {"head_dim": 64, "turned": 64, "page_dtype": jnp.bfloat16, "norms": True}
        assert few_qkv_write_refusal(1, jnp.bfloat16, 2880, **kept) is None
        assert "norms one row, not 2" in str(few_qkv_write_refusal(2, jnp.bfloat16, 2880, **kept))


@pytest.mark.parametrize("rows", [1, 8, 16])
def test_lowers_for_an_h200(rows: int) -> None:
    call = jax.eval_shape(lambda: make(rows, 64, 8, 2880))
    with h200():
        program = jax.jit(lambda call: few_qkv_write(**call, implementation="mosaic_gpu"))
        assert "@mosaic_gpu_v2" in program.trace(call).lower(lowering_platforms=("cuda",)).as_text()
        sizes: Any = {"head_dim": 64, "turned": 64, "page_dtype": jnp.bfloat16}
        assert few_qkv_write_refusal(rows, jnp.bfloat16, 2880, **sizes) is None
        for changes, reason in (
            ({"head_dim": 128, "turned": 128}, "heads of 64, not 128 columns of 128"), ({"turned": 32}, "32 columns of 64"),
            ({"page_dtype": jnp.int8}, "pages in x's dtype, not int8"),
        ):  # fmt: skip
            with pytest.raises(NotImplementedError, match=reason):
                refuse(rows, jnp.bfloat16, 2880, **sizes | changes)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="for machines without a Hopper GPU")
def test_other_devices_are_refused() -> None:
    with pytest.raises(NoImplementationError, match="needs a Hopper GPU"):
        few_qkv_write(**make(1, 2, 1, 64), implementation="mosaic_gpu")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 13, 16])
def test_full_size(rows: int) -> None:
    call = make(rows, 64, 8, 2880)
    check(call, few_qkv_write(**call, implementation="mosaic_gpu"))


@pytest.mark.gpu
def test_full_size_that_is_normed() -> None:
    call = normed_call(2880, 64, 8)
    stream, written = few_qkv_write(*list(call.values())[:8], added=call["added"], implementation="mosaic_gpu")
    check_normed(call, (*written, stream))
