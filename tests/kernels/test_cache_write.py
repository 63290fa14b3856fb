"""Every implementation of the cache write: which slots change, and that the pool is never copied."""

import functools
import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import NoImplementationError, cache_write
from dflash_kernels.kv_cache.write.api import IMPLEMENTATIONS
from dflash_kernels.kv_cache.write.mosaic_gpu import launch_rows
from jax.experimental.pallas import mosaic_gpu as plgpu

from .qkv_cases import bits, random_bits

GPU = pytest.mark.gpu
CANDIDATES = ("xla", pytest.param("xla", id="xla-on-gpu", marks=GPU), pytest.param("mosaic_gpu", marks=GPU))
PAGES, KV_HEADS, PAGE_SIZE, HEAD_DIM = 7, 2, 16, 24
DTYPES = pytest.mark.parametrize(
    "dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=["float32", "bfloat16", "float16"]
)


@pytest.fixture(params=CANDIDATES)
def implementation(request: pytest.FixtureRequest) -> str:
    assert request.param in IMPLEMENTATIONS
    return request.param


@functools.partial(jax.jit, static_argnames="implementation", donate_argnums=(0, 1))
def write(k_pages, v_pages, k, v, slots, *, implementation):
    return cache_write(k_pages, v_pages, k, v, slots, implementation=implementation)


def expected(pool: np.ndarray, new: np.ndarray, slots: list[int]) -> np.ndarray:
    pool = pool.copy()
    for token, slot in enumerate(slots):
        if 0 <= slot < PAGES * PAGE_SIZE:
            pool[slot // PAGE_SIZE, :, slot % PAGE_SIZE] = new[token].astype(pool.dtype)
    return pool


@DTYPES
@pytest.mark.parametrize(
    "slots",
    [
        [5],
        [0, PAGES * PAGE_SIZE - 1, -1, 40, -5, 17, 16, -2_147_483_648],
        [-1, -1, -1],
        [PAGES * PAGE_SIZE, 5, 2_147_483_647, PAGES * PAGE_SIZE + 20],
    ],
    ids=["one", "mixed", "none", "past"],
)
def test_only_the_named_slots_change(slots: list[int], dtype: Any, implementation: str) -> None:
    rng = np.random.default_rng(len(slots))
    pools = [random_bits(rng, (PAGES, KV_HEADS, PAGE_SIZE, HEAD_DIM), dtype) for _ in range(2)]
    assert np.isnan(pools[0].astype(np.float32)).any()
    new = [rng.standard_normal((len(slots), KV_HEADS, HEAD_DIM)).astype(dtype) for _ in range(2)]
    written = write(*pools, *new, jnp.array(slots, jnp.int32), implementation=implementation)
    for pool, tokens, result in zip(pools, new, written, strict=True):
        assert result.dtype == dtype
        np.testing.assert_array_equal(bits(result), bits(expected(pool, tokens, slots)))


def test_tokens_are_cast_to_the_pools_dtype(implementation: str) -> None:
    rng = np.random.default_rng(0)
    pool = np.zeros((PAGES, KV_HEADS, PAGE_SIZE, HEAD_DIM), jnp.bfloat16)
    new = rng.standard_normal((3, KV_HEADS, HEAD_DIM)).astype(np.float32)
    written, _ = write(pool, pool, new, new, jnp.array([3, -1, 99], jnp.int32), implementation=implementation)
    np.testing.assert_array_equal(bits(written), bits(expected(pool, new, [3, -1, 99])))


@functools.partial(jax.jit, static_argnames="implementation", donate_argnums=(0, 1))
def write_often(k_pages, v_pages, k, v, slots, *, implementation):
    def body(i, pools):
        return cache_write(pools[0], pools[1], k + i.astype(k.dtype), v, slots + i, implementation=implementation)

    return jax.lax.fori_loop(0, 5, body, (k_pages, v_pages))


@DTYPES
@pytest.mark.parametrize("program", [write, write_often], ids=["once", "loop"])
def test_a_donated_pool_is_written_in_place(program: Any, dtype: Any, implementation: str) -> None:
    shape = (64, KV_HEADS, PAGE_SIZE, HEAD_DIM)
    pools = [jax.device_put(jnp.ones(shape, dtype)), jax.device_put(jnp.zeros(shape, dtype))]
    new = jnp.full((4, KV_HEADS, HEAD_DIM), 2, dtype)
    slots = jnp.array([40, -100, 90, 700], jnp.int32)
    text = program.lower(*pools, new, new, slots, implementation=implementation).compile().as_text()
    whole = ",".join(map(str, shape))
    copies = re.findall(rf"= \w+\[{whole}\]\S* (?:copy|copy-start|convert|transpose)\(.*", text)
    assert not copies
    addresses = [pool.unsafe_buffer_pointer() for pool in pools]
    written = program(*pools, new, new, slots, implementation=implementation)
    assert [pool.unsafe_buffer_pointer() for pool in written] == addresses
    assert all(pool.is_deleted() for pool in pools)


@pytest.mark.parametrize("where", ["interpreted", pytest.param("gpu", marks=GPU)])
@pytest.mark.parametrize(
    ("width", "dtype"), [(576, jnp.bfloat16), (656, jnp.uint8), (576, jnp.float8_e4m3fn), (24, jnp.float32)]
)
def test_rows_arrive_as_they_are(width: int, dtype: Any, where: str) -> None:
    """Latent rows of every kind, NaNs among them; rows past the last slot are padding, slots past the pool nobody's."""
    rng = np.random.default_rng(width)
    pool, rows = random_bits(rng, (5, 1, 8, width), dtype), random_bits(rng, (9, width), dtype)
    slots = np.array([3, -1, 39, -2_147_483_648, 0, 40, 2_147_483_647], np.int32)
    interpret = plgpu.InterpretGPUParams() if where == "interpreted" else None
    (written,) = jax.jit(functools.partial(launch_rows, interpret=interpret))((pool,), (rows[:, None],), slots)
    expected = pool.copy()
    for row, slot in zip(rows, slots, strict=False):
        if 0 <= slot < 40:
            expected[slot // 8, 0, slot % 8] = row
    np.testing.assert_array_equal(bits(written), bits(expected))


def test_keys_and_values_are_one_launch() -> None:
    rng = np.random.default_rng(0)
    pools = [random_bits(rng, (PAGES, KV_HEADS, PAGE_SIZE, HEAD_DIM), jnp.bfloat16) for _ in range(2)]
    new = [rng.standard_normal((66, KV_HEADS, HEAD_DIM)).astype(np.float32) for _ in range(2)]
    slots = [*range(40, 104), -1, -1]
    write = jax.jit(functools.partial(launch_rows, interpret=plgpu.InterpretGPUParams()))
    written = write(tuple(pools), tuple(new), np.array(slots, np.int32))
    for pool, tokens, result in zip(pools, new, written, strict=True):
        np.testing.assert_array_equal(bits(result), bits(expected(pool, tokens, slots)))


@pytest.mark.parametrize(
    ("pool", "rows", "reason"),
    [(np.zeros((2, 1, 4, 8), np.uint8), np.zeros((1, 1, 8), np.float32), "no rows of float32 for a pool of uint8"),
     (np.zeros((2, 1, 4, 12), np.float32), np.zeros((1, 1, 12), np.float32), "a multiple of 8 numbers, not 12")],
)  # fmt: skip
def test_refusals_name_their_reason(pool: np.ndarray, rows: np.ndarray, reason: str) -> None:
    with pytest.raises(NotImplementedError, match=reason):
        launch_rows((jnp.asarray(pool),), (jnp.asarray(rows),), jnp.zeros(1, jnp.int32))


def test_an_unknown_implementation_is_named() -> None:
    pool, new = jnp.zeros((2, 1, 4, 8)), jnp.zeros((1, 1, 8))
    with pytest.raises(
        NoImplementationError, match=r"cache_write: no implementation named \['cuda'\]; there are .*xla"
    ):
        cache_write(pool, pool, new, new, jnp.array([1], jnp.int32), implementation=["cuda"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": (3, 2, 8)}, r"k \(3, 2, 8\) \[T, K, H\] and v \(4, 2, 8\)"),
        ({"v_pages": (5, 2, 16, 8)}, "must agree in all but the head dim"),
        ({"v_pages": (6, 2, 16, 16)}, "do not fit pages"),
        ({"k": (4, 1, 8), "v": (4, 1, 8)}, "do not fit pages"),
        ({"slots": (5,)}, "one slot for each of 4 tokens"),
    ],
)
def test_shapes_that_do_not_agree(changes: dict[str, tuple[int, ...]], message: str) -> None:
    shapes = {
        "k_pages": (6, 2, 16, 8),
        "v_pages": (6, 2, 16, 8),
        "k": (4, 2, 8),
        "v": (4, 2, 8),
        "slots": (4,),
    } | changes
    arrays = {name: jnp.zeros(shape, jnp.int32 if name == "slots" else jnp.float32) for name, shape in shapes.items()}
    # The function itself: in test runs a shape checker around it would speak first.
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(cache_write)(**arrays)
