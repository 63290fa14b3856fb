"""Pools of more than 2^31 numbers, whose offsets do not fit 32 bits, on a GPU (`-m gpu`): the same bits as from small pools."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import cache_write, paged_attention, ragged_paged_attention

pytestmark = [pytest.mark.gpu, pytest.mark.large]
FP8 = jnp.float8_e4m3fn
PAGE = (8, 64, 128)
PAGES = 2**31 // (8 * 64 * 128) + 40
# The first pages and the last ones, and some on either side of where 2^30 and 2^31 numbers end.
HELD = np.array([PAGES - 1, 0, 16383, 16384, 32767, 32768, PAGES - 2, 1, 32769, PAGES - 20, 7, 20000], np.int32)
TABLE = np.arange(12, dtype=np.int32).reshape(2, 6)
LENS = np.array([370, 384], np.int32)


def pools(dtype: Any) -> tuple[jax.Array, jax.Array]:
    """A small pool, and a large one with the same pages at `HELD` and zeros elsewhere."""
    numbers = np.random.default_rng(0).standard_normal((len(HELD), *PAGE)) * (30 if dtype == jnp.int8 else 1)
    small = jnp.asarray(numbers.astype(np.float32)).astype(dtype)
    return small, jax.jit(lambda pages: jnp.zeros((PAGES, *PAGE), dtype).at[HELD].set(pages))(small)


def numbers(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).standard_normal(shape), jnp.bfloat16)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, FP8, jnp.int8], ids=["bf16", "fp8", "int8"])
@pytest.mark.parametrize("implementation", ["mosaic_gpu", "triton", "xla"])
def test_attention(implementation: str, dtype: Any) -> None:
    small, large = pools(dtype)
    assert large.size > 2**31
    call = functools.partial(paged_attention, numbers(2, 16, 32, 128), implementation=implementation)
    scales = {"v_scale": jnp.full((8, 128), 0.03)} if dtype == jnp.int8 else {}

    def attend(pool: jax.Array, table: np.ndarray) -> jax.Array:
        if dtype == jnp.int8:
            scales["k_scale"] = jnp.full(pool.shape[:3], 0.03)
        return call(pool, pool, jnp.asarray(table), jnp.asarray(LENS), **scales)

    found, expected = attend(large, HELD[TABLE]), attend(small, TABLE)
    assert float(jnp.abs(expected).max()) > 0
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


@pytest.mark.parametrize("implementation", ["mosaic_gpu", "xla"])
def test_attention_of_prompts(implementation: str) -> None:
    small, large = pools(jnp.bfloat16)
    starts = jnp.asarray([0, 100, 232], jnp.int32)
    call = functools.partial(ragged_paged_attention, numbers(232, 32, 128), implementation=implementation)
    found = call(large, large, starts, jnp.asarray(HELD[TABLE]), jnp.asarray(LENS))
    expected = call(small, small, starts, jnp.asarray(TABLE), jnp.asarray(LENS))
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


@pytest.mark.parametrize("implementation", ["mosaic_gpu", "xla"])
def test_writes(implementation: str) -> None:
    """Of finished rows; `test_cache_write_qkv.py` has the same for rows that are normed and turned on their way."""
    small, large = pools(FP8)
    places = np.array([3, 65, 130, 64 * 11 + 63, 64 * 5, 64 * 9 + 1], np.int32)

    @functools.partial(jax.jit, donate_argnums=0)
    def write(pool: jax.Array, other: jax.Array, slots: jax.Array) -> jax.Array:
        new = numbers(len(places), 8, 128).astype(FP8)
        return cache_write(pool, other, new, new, slots, implementation=implementation)[0]

    slots = HELD[places // 64] * 64 + places % 64
    found = write(large, jnp.zeros((PAGES, *PAGE), FP8), jnp.asarray(slots))
    expected = write(jnp.array(small), jnp.zeros_like(small), jnp.asarray(places))
    assert np.asarray(found[HELD]).tobytes() == np.asarray(expected).tobytes()
    assert int(jnp.count_nonzero(found, axis=(1, 2, 3)).sum()) == int(jnp.count_nonzero(expected))
