"""Norm, rotations and write of latent rows, against float64 and against the definition bit for bit."""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import NoImplementationError, mla_write
from dflash_kernels.kv_cache.write.mosaic_gpu import launch_mla
from dflash_kernels.kv_cache.write.reference import mla_write_reference
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..devices import h200

RANK, ROTATED, NOPE, EPS = 128, 32, 24, 1e-5


def make_case(
    tokens: int, heads: int, *, rank=RANK, rotated=ROTATED, nope=NOPE, dtype: Any = jnp.bfloat16, pool: Any = None
):
    """A pool, rows, queries, slots (one of them negative, one past the pool), cos, sin, norm and scale."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), dtype)

    slots = rng.permutation(8 * 16)[:tokens].astype(np.int32)
    slots[tokens // 2] = -3
    slots[0] = 8 * 16 + 2 if tokens > 2 else slots[0]
    angles = rng.uniform(-np.pi, np.pi, (tokens, rotated // 2))
    cos, sin = jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)
    width = rank + rotated if pool != np.uint8 else rank + rank // 32 + 2 * rotated
    pages = jnp.asarray(np.full((8, 1, 16, width), 5), dtype if pool is None else pool)
    return (
        pages, normal(tokens, rank + rotated), normal(tokens, heads, nope + rotated), jnp.asarray(slots), cos, sin, normal(rank),
        jnp.float32(0.03),
    )  # fmt: skip


@pytest.mark.parametrize("interleaved", [True, False])
def test_definition(interleaved: bool) -> None:
    case = make_case(7, 3, dtype=np.float32)
    pages, rows, q, slots, cos, sin, norm, _ = case
    found = mla_write(pages, rows, q, slots, cos, sin, norm=norm, eps=EPS, interleaved=interleaved)
    rows, q, norm = (np.asarray(x, np.float64) for x in (rows, q, norm))
    turn = np.asarray(cos, np.float64) + 1j * np.asarray(sin, np.float64)

    def turned(x: np.ndarray, turn: np.ndarray) -> np.ndarray:
        first, second = (x[..., ::2], x[..., 1::2]) if interleaved else np.split(x, 2, axis=-1)
        product = (first + 1j * second) * turn
        both = np.stack([product.real, product.imag], axis=-1)
        return (both if interleaved else both.swapaxes(-1, -2)).reshape(x.shape)

    expected = np.asarray(pages, np.float64).copy()
    kv_c = rows[:, :RANK] / np.sqrt((rows[:, :RANK] ** 2).mean(-1, keepdims=True) + EPS) * norm
    latents = np.concatenate([kv_c, turned(rows[:, RANK:], turn)], axis=-1)
    for row, slot in zip(latents, np.asarray(slots), strict=True):
        if 0 <= slot < 8 * 16:
            expected[slot // 16, 0, slot % 16] = row
    np.testing.assert_allclose(found.latent_pages, expected, rtol=0, atol=1e-5)
    expected_q = np.concatenate([q[..., :NOPE], turned(q[..., NOPE:], turn[:, None])], axis=-1)
    np.testing.assert_allclose(found.q, expected_q, rtol=0, atol=1e-5)


def same(found: tuple[jax.Array, ...], expected: tuple[jax.Array, ...], ulp: float) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        assert (np.abs(one - other) <= ulp * np.abs(other) + 1e-6).all()


DTYPES = pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16], ids=["bf16", "f16"])
POOLS = pytest.mark.parametrize("pool", [None, jnp.float8_e4m3fn], ids=["plain", "f8"])


@pytest.mark.few("5-16-f16-plain", "3-6-f16-f8")
@POOLS
@DTYPES
@pytest.mark.parametrize(("tokens", "heads"), [(1, 1), (5, 16), (3, 6)])
def test_kernel_interpreted(tokens: int, heads: int, dtype: Any, pool: Any) -> None:
    case = make_case(tokens, heads, dtype=dtype, pool=pool)
    options = {"eps": EPS, "interleaved": True}
    found = launch_mla(*case, **options, interpret=plgpu.InterpretGPUParams())
    expected = jax.jit(functools.partial(mla_write_reference, **options))(*case)
    same(
        found, expected, 0.126 if pool else 2 * float(jnp.finfo(dtype).eps)
    )  # a quotient may round to the next e4m3 number


@pytest.mark.gpu
@POOLS
@DTYPES
@pytest.mark.parametrize(("tokens", "heads"), [(1, 16), (100, 128), (33, 5)])
def test_kernel_on_a_gpu(tokens: int, heads: int, dtype: Any, pool: Any) -> None:
    case = make_case(tokens, heads, rank=512, rotated=64, nope=128, dtype=dtype, pool=pool)
    options = {"eps": EPS, "interleaved": True}
    found, expected = (jax.jit(functools.partial(f, **options))(*case) for f in (launch_mla, mla_write_reference))
    same(found, expected, 0.126 if pool else 4 * float(jnp.finfo(dtype).eps))


def test_packed_rows_and_other_rotations_take_the_definition() -> None:
    case = make_case(4, 2, pool=np.uint8)
    mla_write(*case[:6], norm=case[6])
    plain = make_case(4, 2)
    refused = [
        (case, {}, "no pool of uint8"),
        (plain, {"interleaved": False}, "interleaved"),
        (make_case(4, 2, rank=96), {}, "96"),
        (make_case(4, 2, rotated=48), {}, "not 128 and 48"),
        (make_case(4, 2, dtype=np.float32), {}, "not rows of float32"),
    ]
    for arrays, options, reason in refused:
        call = functools.partial(mla_write, norm=arrays[6], implementation="mosaic_gpu", **options)
        with (
            h200(),
            pytest.raises(NoImplementationError, match=reason),
        ):
            jax.eval_shape(call, *arrays[:6])


def test_arguments_that_do_not_agree() -> None:
    pages, rows, q, slots, cos, sin, norm, _ = make_case(4, 2)
    call = inspect.unwrap(mla_write)
    with pytest.raises(ValueError, match=r"must be an array \[P, 1, p, stored\]"):
        call(pages[:, 0], rows, q, slots, cos, sin, norm=norm)
    with pytest.raises(ValueError, match=r"are not \[P, 1, p, 160\]"):
        call(pages[..., 1:], rows, q, slots, cos, sin, norm=norm)
    with pytest.raises(ValueError, match="must start with 4 tokens"):
        call(pages, rows, q[:3], slots, cos, sin, norm=norm)
    with pytest.raises(ValueError, match="do not end in"):
        call(pages, rows, q, slots, cos[:, 1:], sin[:, 1:], norm=norm)
