"""Norm, rotation and write in one operation: against float64, in Pallas's interpreter and for real (`-m gpu`)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import cache_write
from dflash_kernels.kv_cache.write.reference import qkv_write_reference

from dflash_jax.config import RopeConfig
from dflash_jax.models.layers import rms_norm, rotary_tables, rotate

from .qkv_cases import (
    BF16,
    CANDIDATES,
    CASES,
    E5M2,
    F32,
    FP8,
    INT8,
    SLOTS,
    Case,
    bits,
    check_pools,
    inputs,
    near,
    run,
    true_heads,
)  # fmt: skip


@pytest.fixture(params=CANDIDATES)
def candidate(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.few(
    "interpreted-odd-heads",
    "interpreted-int8-partial",
    "interpreted-fp8-by-head",
    "interpreted-gated",
    "interpreted-e5m2",
    "reference-int8-keys-values32",
    "reference-plain",
)
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_float64(name: str, candidate: str) -> None:
    case = CASES[name]
    given = inputs(case)
    if candidate != "reference" and (case.pages == E5M2 or case.value_dim):
        with pytest.raises(NotImplementedError, match=r"takes (no pools of float8_e5m2|values of the keys' head dim)"):
            run(given, candidate=candidate, **case.options)
        return
    q, k_pages, v_pages, k_scale = run(given, candidate=candidate, **case.options)
    true_q, *true = true_heads(case, given)
    assert q.dtype == case.dtype
    assert q.shape == true_q.shape
    near(q, true_q, case.dtype, case.half)
    check_pools(case, given, k_pages, v_pages, k_scale, true)


def test_a_key_of_zeros_has_a_scale_to_divide_by(candidate: str) -> None:
    """In int8 its codes are zeros, its scale is small but none, and other keys are not touched by it."""
    case = Case(pages=INT8, norm=False)
    given = inputs(case)
    expected = run(given, candidate=candidate)
    keys = slice(case.n * case.head_dim, (case.n + case.k) * case.head_dim)
    zeros = given | {"qkv": np.array(given["qkv"])}
    zeros["qkv"][0, keys] = 0
    _, k_pages, v_pages, k_scale = run(zeros, candidate=candidate)
    page, row = divmod(SLOTS[0], case.page_size)
    assert not np.asarray(k_pages)[page, :, row].any()
    np.testing.assert_allclose(np.asarray(k_scale)[page, :, row], 1e-12 / 127, rtol=1e-6)
    others = np.ones(case.pool[:3], bool)
    others[page, :, row] = False
    np.testing.assert_array_equal(np.asarray(k_pages)[others], np.asarray(expected[1])[others])
    np.testing.assert_array_equal(bits(v_pages), bits(expected[2]))
    np.testing.assert_array_equal(bits(np.asarray(k_scale)[others]), bits(np.asarray(expected[3])[others]))


@pytest.mark.few("interpreted-int8", "reference-values24-fp8")
@pytest.mark.parametrize(
    ("pages", "value_dim"), [(None, None), (INT8, None), (FP8, 24)], ids=["bfloat16", "int8", "values24-fp8"]
)
def test_several_layers_are_each_one_call(pages: Any, value_dim: int | None, candidate: str) -> None:
    case = Case(k=4, head_dim=64, half=32, layers=2, slots=SLOTS[:3], pages=pages, value_dim=value_dim)
    given = inputs(case)
    if value_dim and candidate != "reference":
        with pytest.raises(NotImplementedError, match="takes values of the keys' head dim"):
            run(given, candidate=candidate, several=True)
        return
    k_pages, v_pages, k_scale = run(given, candidate=candidate, several=True)
    columns = np.split(given["kv"], case.layers, axis=1)
    for i, column in enumerate(columns):
        alone = {name: value[i] if isinstance(value, tuple) else value for name, value in given.items() if name != "kv"}
        # The query heads are whatever: they have no say in the pools.
        alone |= {"qkv": np.concatenate([column[:, : case.head_dim], column], axis=1), "q_norm": None}
        expected = run(alone, candidate=candidate)
        for ours, theirs in zip((k_pages[i], v_pages[i]), expected[1:3], strict=True):
            np.testing.assert_array_equal(bits(ours), bits(theirs))
        if k_scale is not None and pages == INT8:
            np.testing.assert_array_equal(bits(k_scale[i]), bits(expected[3]))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [128, 257, 512])
def test_many_tokens_agree_with_the_definition(tokens: int) -> None:
    """In the shapes of Qwen3-8B; every fifth writes nothing."""
    slots = np.random.default_rng(1).permutation(20 * 64)[:tokens]
    slots[::5] = -1
    case = Case(n=32, k=8, slots=tuple(slots.tolist()), page_size=64, page_count=20)
    given = inputs(case)
    q, k_pages, v_pages, _ = run(given, candidate="mosaic_gpu")
    true_q, *true = true_heads(case, given)
    near(q, true_q, BF16, case.half)
    check_pools(case, given, k_pages, v_pages, None, true)


@pytest.mark.parametrize("name", ["plain", "int8"])
def test_the_same_call_twice_gives_the_same_bits(name: str, candidate: str) -> None:
    given = inputs(CASES[name])
    first, second = (jax.tree.leaves(run(given, candidate=candidate)) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(bits(one), bits(other))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
def test_the_definition_is_what_the_layers_compute(dtype: Any) -> None:
    """Bit for bit: norm, rotation and write one after the other."""
    case = Case(dtype=dtype, half=32)
    given = jax.tree.map(jnp.asarray, inputs(case))
    rope, positions = RopeConfig(theta=1e4, partial=0.5), jnp.arange(len(case.slots)) * 977
    rotary = rotary_tables(positions, rope, case.head_dim)
    given |= rotary._asdict()
    q, k, v = jnp.split(given["qkv"].reshape(len(case.slots), -1, case.head_dim), [case.n, case.n + case.k], axis=1)
    q = rotate(rms_norm(q, given["q_norm"], 1e-6), rotary)
    k = rotate(rms_norm(k, given["k_norm"], 1e-6), rotary)
    expected = (q, *cache_write(given["k_pages"], given["v_pages"], k, v, given["slots"]))
    for ours, theirs in zip(qkv_write_reference(**given, eps=1e-6), expected, strict=False):
        np.testing.assert_array_equal(bits(ours), bits(theirs))


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("candidate", ["reference", "mosaic_gpu"])
def test_a_pool_of_more_than_two_to_the_31_elements(candidate: str) -> None:
    """4.3 GB a pool; first and last rows, and one on each side of 2**31 elements."""
    shape = (2**31 // (8 * 64 * 128) + 100, 8, 64, 128)
    edge = 2**31 // (8 * 128)
    slots = (0, edge - 1, edge, shape[0] * 64 - 1, -1)
    small = Case(n=32, k=8, slots=slots, page_size=64)
    given = {name: value for name, value in inputs(small).items() if not name.endswith("pages")}
    make = jax.jit(lambda: jnp.full(shape, 0.5, jnp.bfloat16))

    @functools.partial(jax.jit, donate_argnums=0)
    def write(pools, rest):
        return run(pools | rest, candidate=candidate)

    q, k_pages, v_pages, _ = write({"k_pages": make(), "v_pages": make()}, given)
    near(q, true_heads(small, given)[0], BF16, small.half)
    true = true_heads(small, given)[1:]
    for pool, expected in zip((k_pages, v_pages), true, strict=True):
        assert int(jax.jit(lambda x: jnp.sum(jnp.any(x != 0.5, axis=-1), dtype=jnp.int32))(pool)) == 4 * 8
        live = np.array(slots[:4])
        near(pool[live // 64, :, live % 64], expected[:4], BF16, small.half)
