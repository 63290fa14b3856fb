"""Shared beginnings read once: the same result as without, whatever shares them, and the rule for when it pays."""

import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from dflash_kernels import paged_attention

from dflash_jax.attention.standalone.cascade import cascade_attention, cascade_pays, shared_pages

from ..devices import custom_calls
from ..kernels.attention_oracle import Case, make_case, oracle
from .dense_oracle import assert_as_good_as, paged_oracle

PAGE, SHARED, T = 8, 3, 4
# Long, idle, just past the shared pages, one query, two, none.
SEQ_LENS, Q_LENS = [40, 0, 28, 25, 61, 33], [4, 4, 4, 1, 2, 0]
SINKS = np.linspace(-1, 3, 6, dtype=np.float32)


def case_with_shared_pages(seq_lens=SEQ_LENS, q_lens=Q_LENS, **options: Any) -> Case:
    """Every live row's table begins with the first row's pages; the idle row comes first, with garbage in its table."""
    case = make_case(seq_lens, q_lens, t=T, group=3, page_size=PAGE, seed=3, **options)
    live = np.flatnonzero(np.array(seq_lens) > 0)
    case.page_table[live, :SHARED] = case.page_table[live[0], :SHARED]
    return case.rows([1, *(row for row in range(len(seq_lens)) if row != 1)])


def options_of(case: Case) -> dict[str, Any]:
    return {name: value if np.ndim(value) == 0 else jnp.asarray(value) for name, value in case.options.items()}


def cascaded(case: Case, shared: int = SHARED, **changes: Any) -> tuple[np.ndarray, np.ndarray]:
    q, k, v, table, lens, q_lens = case.arrays()
    given = {"shared": shared, "q_lens": q_lens, "return_lse": True} | options_of(case) | changes
    out, lse = jax.jit(lambda *arrays: cascade_attention(*arrays, **given))(q, k, v, table, lens)
    return np.asarray(out), np.asarray(lse)


@pytest.mark.parametrize(
    "options",
    [{}, {"sinks": SINKS}, {"soft_cap": 1.5}, {"scale": 0.3, "sinks": SINKS, "soft_cap": 2.0}],
    ids=["plain", "sinks", "cap", "all"],
)
def test_agrees_with_float64(options: dict[str, Any]) -> None:
    """Sinks count once; NaN in dead queries, unused slots and idle rows' pages reaches nothing."""
    case = case_with_shared_pages(**options)
    (out, lse), (true_out, true_lse) = cascaded(case), oracle(case)
    np.testing.assert_allclose(out, true_out, rtol=0, atol=4e-6)
    np.testing.assert_allclose(lse, true_lse, rtol=4e-6, atol=4e-6)


@pytest.mark.parametrize("shared", [1, 2])
def test_fewer_pages_than_are_shared(shared: int) -> None:
    case = case_with_shared_pages(sinks=SINKS)
    np.testing.assert_allclose(cascaded(case, shared)[0], oracle(case)[0], rtol=0, atol=4e-6)


@pytest.mark.parametrize("stored", [ml_dtypes.float8_e4m3fn, np.int8], ids=["fp8", "int8"])
def test_pages_in_eight_bits(stored: Any) -> None:
    case = case_with_shared_pages(stored=stored)
    np.testing.assert_allclose(cascaded(case)[0], oracle(case)[0], rtol=0, atol=2e-5)


def test_half_precision_costs_one_more_rounding_of_each_part() -> None:
    case = case_with_shared_pages(dtype=ml_dtypes.bfloat16)
    true, _ = oracle(case)
    q, k, v, table, lens, q_lens = case.arrays()
    whole = np.asarray(paged_attention(q, k, v, table, lens, q_lens=q_lens), np.float64)
    out = cascaded(case)[0].astype(np.float64)
    assert np.abs(out - true).max() <= np.abs(whole - true).max() + np.abs(true).max() * 2**-7


# What is stored and asked for, and the queries' dtype: Qwen3-8B's heads in pages of 64 tokens.
LARGE: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "float16": {"dtype": np.float16},
    "sinks-cap": {"sinks": np.linspace(-2, 4, 32, dtype=np.float32), "soft_cap": 20.0},
    "fp8": {"stored": ml_dtypes.float8_e4m3fn},
    "int8": {"stored": np.int8},
}


@pytest.mark.gpu
@pytest.mark.parametrize("t", [1, 16])
@pytest.mark.parametrize("name", LARGE)
def test_real_sizes_on_a_gpu(name: str, t: int) -> None:
    """1,024 shared keys; rows just past them, with fewer queries, without any and idle. NaN wherever nobody may look."""
    pages = 16
    lens, q_lens = [1600, 0, 1024 + t, 1100, 1025, 1911, 1500, 1024 + 64], [t, t, t, 1, 1, t, 0, min(t, 7)]
    made = {"dtype": ml_dtypes.bfloat16} | LARGE[name]
    case = make_case(lens, q_lens, t=t, kv_heads=8, group=4, head_dim=128, page_size=64, seed=t, **made)
    case.q *= np.asarray(4, case.q.dtype)  # weights that a few keys have for themselves: one too many or too few shows
    case.page_table[np.array(lens) > 0, :pages] = case.page_table[0, :pages]
    q, k, v, table, seq_lens, counts = case.arrays()
    whole = paged_attention(q, k, v, table, seq_lens, q_lens=counts, implementation="xla", **options_of(case))
    out, _ = cascaded(case, pages)
    true = paged_oracle(case)
    # The two parts are rounded once before they are joined; eight bits with their scale in them once more, to be multiplied.
    assert_as_good_as(out, whole, true, ulps=4 if "stored" in made else 2)
    assert not out[true == 0].any()


def test_both_parts_are_kernels_on_an_h200() -> None:
    q, pool = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8, 16, 32, 128), (99, 8, 64, 128)))
    table, lens = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((8, 64), (8,)))
    call = functools.partial(cascade_attention, shared=16)
    assert custom_calls(call, q, pool, pool, table, lens) == ["mosaic_gpu_v2"] * 2


def test_a_batch_without_a_live_row() -> None:
    case = case_with_shared_pages()
    idle = dataclasses.replace(case, seq_lens=np.zeros_like(case.seq_lens))
    out, lse = cascaded(idle)
    assert not out.any()
    assert (lse == -np.inf).all()


def test_the_output_alone() -> None:
    case = case_with_shared_pages()
    q, k, v, table, lens, q_lens = case.arrays()
    alone = cascade_attention(q, k, v, table, lens, shared=SHARED, q_lens=q_lens)
    np.testing.assert_allclose(alone, cascaded(case)[0], rtol=0, atol=2e-6)
    every = [40, 0, 28, 31, 61, 33]
    full = case_with_shared_pages(every, [T] * 6)
    q, k, v, table, lens, _ = full.arrays()
    np.testing.assert_allclose(cascade_attention(q, k, v, table, lens, shared=SHARED), oracle(full)[0], atol=4e-6)


@pytest.mark.parametrize("shared", [0, 9, -1])
def test_shared_pages_that_cannot_be(shared: int) -> None:
    case = case_with_shared_pages()
    assert case.page_table.shape[1] == 9
    with pytest.raises(ValueError, match=f"{shared} shared pages of a table with 9 columns"):
        inspect.unwrap(cascade_attention)(*case.arrays()[:5], shared=shared)


def test_pages_in_common_are_counted() -> None:
    table = np.array([[5, 2, 9, 4], [5, 2, 9, 7], [5, 2, 9, 4]])
    assert shared_pages(table, np.array([32, 40, 40]), 8) == 3
    assert shared_pages(table, np.array([32, 23, 40]), 8) == 2  # the third is not whole before the second one's queries
    assert shared_pages(table[::2], np.array([32, 31]), 8) == 3
    assert shared_pages(table[::2], np.array([32, 32]), 8) == 4
    assert shared_pages(table, np.array([7, 40, 40]), 8) == 0
    assert shared_pages(np.array([[1, 2], [3, 2]]), np.array([16, 16]), 8) == 0  # a later page in common is none
    assert shared_pages(table[:1], np.array([20]), 8) == 2


# Qwen3-8B's heads on an H200, but where the row says otherwise.
RULES = [
    (255, [1] * 64, {}, False),  # too few keys
    (256, [1] * 7, {}, False),  # too few sequences
    (4096, [16] * 64, {}, True),  # several queries each: every block of them would read all keys
    (4096, [1] * 63 + [2], {}, True),
    (4096, [1] * 64, {"kv_heads": 32}, True),  # heads that share no keys
    (4096, [16] * 64, {"positional": True}, False),
    (4096, [16] * 64, {"ranks": 2}, False),
    (4096, [1] * 64, {}, True),  # 32 tiles in one round against 64 * 8 * 32 in 125
    (4096, [1] * 8, {}, False),  # 32 against 8 * 8 * 32 in 16
    (4096, [1] * 8, {"heads": 128, "kv_heads": 2}, False),  # 32 tiles in one round against 8 * 2 * 32 in 4
]


@pytest.mark.parametrize(("shared", "q_lens", "changes", "pays"), RULES)
def test_when_it_pays(shared: int, q_lens: list[int], changes: dict[str, Any], pays: bool) -> None:
    options = {"heads": 32, "kv_heads": 8, "multiprocessors": 132} | changes
    assert cascade_pays(shared, np.array(q_lens), **options) == pays
