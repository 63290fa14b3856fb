"""Shared beginnings read once: the same result as without, whatever shares them."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from dflash_kernels import paged_attention, paged_schedule, ragged_paged_attention

from dflash_jax.attention.cascade import cascade_attention, split_tables

from ..devices import custom_calls
from ..kernels.attention_oracle import Case, make_case, oracle
from .dense_oracle import assert_as_good_as, paged_oracle

PAGE, SHARED, T = 8, 3, 4
# Long, idle, just past the shared pages, one query, two, none.
SEQ_LENS, Q_LENS = [40, 0, 28, 25, 61, 33], [4, 4, 4, 1, 2, 0]
SINKS = np.linspace(-1, 3, 6, dtype=np.float32)


def case_with_shared_pages(seq_lens=SEQ_LENS, q_lens=Q_LENS, alone: Sequence[int] = (), **options: Any) -> Case:
    """The table of every live row but those in `alone` begins with the first row's pages; the idle row comes first, with garbage in
    its table."""
    case = make_case(seq_lens, q_lens, t=T, group=3, page_size=PAGE, seed=3, **options)
    live = [row for row in np.flatnonzero(np.array(seq_lens) > 0) if row not in alone]
    case.page_table[live, :SHARED] = case.page_table[live[0], :SHARED]
    return case.rows([1, *(row for row in range(len(seq_lens)) if row != 1)])


def options_of(case: Case) -> dict[str, Any]:
    return {name: value if np.ndim(value) == 0 else jnp.asarray(value) for name, value in case.options.items()}


def cascaded(
    case: Case, shared: int | Sequence[int] | np.ndarray = SHARED, **changes: Any
) -> tuple[np.ndarray, np.ndarray]:
    """`shared`: of each row, or by group of each; one number for all rows that are not idle."""
    q, k, v, table, lens, q_lens = case.arrays()
    given = {"q_lens": q_lens, "return_lse": True} | options_of(case) | changes
    pages = np.where(case.seq_lens > 0, shared, 0) if np.ndim(shared) == 0 else np.array(shared)

    def call(q, k, v, table, lens, pages):
        return cascade_attention(q, k, v, split_tables(table, pages, k.shape[2]), lens, **given)

    out, lse = jax.jit(call)(q, k, v, table, lens, pages)
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


@pytest.mark.parametrize("shared", [0, 1, 2])
def test_fewer_pages_than_are_shared(shared: int) -> None:
    case = case_with_shared_pages(sinks=SINKS)
    np.testing.assert_allclose(cascaded(case, shared)[0], oracle(case)[0], rtol=0, atol=4e-6)


def test_some_share_nothing() -> None:
    """Theirs is the whole of their table; the last row's queries stand within what would be the shared pages."""
    case = case_with_shared_pages([40, 0, 28, 25, 61, 9], alone=[3, 5], sinks=SINKS)
    shared = [0, SHARED, SHARED, 0, SHARED, 0]
    (out, lse), (true_out, true_lse) = cascaded(case, shared), oracle(case)
    np.testing.assert_allclose(out, true_out, rtol=0, atol=4e-6)
    np.testing.assert_allclose(lse, true_lse, rtol=4e-6, atol=4e-6)
    everyone = np.where(case.seq_lens > 0, SHARED, 0)
    assert np.abs(cascaded(case, everyone)[0] - true_out).max() > 0.1, "whoever shares nothing reads its own pages"


GROUPED_LENS, GROUPED_QUERIES = [40, 0, 28, 25, 61, 33, 44, 30, 12], [4, 4, 4, 1, 2, 4, 0, 4, 4]


def case_of_groups(**options: Any) -> tuple[Case, np.ndarray]:
    """Three rows share three pages, two share two, the others nothing; a row is idle, one has no query. What each shares, by group:
    the second of four is of nobody, and so is the last."""
    case = make_case(GROUPED_LENS, GROUPED_QUERIES, t=T, group=3, page_size=PAGE, seed=4, **options)
    shared = np.zeros((4, len(GROUPED_LENS)), np.int32)
    for group, rows, pages in ((0, [4, 0, 2], 3), (2, [7, 5], 2)):
        case.page_table[rows, :pages] = case.page_table[rows[0], :pages]
        shared[group, rows] = pages
    return case, shared


@pytest.mark.parametrize(
    "options", [{}, {"sinks": SINKS}, {"soft_cap": 1.5, "scale": 0.3}, {"causal": False}], ids=["plain", "sinks", "cap", "block"]
)  # fmt: skip
def test_several_groups_agree_with_float64(options: dict[str, Any]) -> None:
    case, shared = case_of_groups(**options)
    (out, lse), (true_out, true_lse) = cascaded(case, shared), oracle(case)
    np.testing.assert_allclose(out, true_out, rtol=0, atol=4e-6)
    np.testing.assert_allclose(lse, true_lse, rtol=4e-6, atol=4e-6)
    swapped = shared[[0, 1, 2, 3]][:, [2, 1, 0, 3, 5, 4, 6, 7, 8]]  # a row of each group in the other one
    assert np.abs(cascaded(case, swapped)[0] - true_out).max() > 0.1


@pytest.mark.few("4")
@pytest.mark.parametrize("groups", [1, 2, 4, 9])
def test_groups_of_any_number_and_size(groups: int) -> None:
    """Drawn members and pages, ragged sizes, groups of one sequence and of none, NaN wherever nobody may look."""
    rng = np.random.default_rng(groups)
    for _ in range(3):
        case = make_case(GROUPED_LENS, GROUPED_QUERIES, t=T, group=3, page_size=PAGE, seed=groups)
        shared = np.zeros((groups, len(GROUPED_LENS)), np.int32)
        of = rng.integers(-1, groups, len(GROUPED_LENS))
        for group in range(groups):
            rows = np.flatnonzero((of == group) & (case.seq_lens > T + PAGE))
            if rows.size:
                pages = int(rng.integers(1, (case.seq_lens[rows].min() - T) // PAGE + 1))
                case.page_table[rows, :pages] = case.page_table[rows[0], :pages]
                shared[group, rows] = pages
        (out, lse), (true_out, true_lse) = cascaded(case, shared), oracle(case)
        np.testing.assert_allclose(out, true_out, rtol=0, atol=4e-6)
        np.testing.assert_allclose(lse, true_lse, rtol=4e-6, atol=4e-6)


@pytest.mark.few("int8")
@pytest.mark.parametrize("stored", [ml_dtypes.float8_e4m3fn, np.int8], ids=["fp8", "int8"])
def test_several_groups_in_eight_bits(stored: Any) -> None:
    case, shared = case_of_groups(stored=stored)
    np.testing.assert_allclose(cascaded(case, shared)[0], oracle(case)[0], rtol=0, atol=2e-5)


def test_several_groups_over_packed_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel for prompts takes the queries of every group side by side; its definition stands for it here."""
    packed = functools.partial(ragged_paged_attention, implementation="xla")
    seen: list[tuple[int, ...]] = []

    def called(q: Any, *rest: Any, implementation: str, **options: Any) -> Any:
        seen.append(q.shape)
        return packed(q, *rest, **options)

    monkeypatch.setattr("dflash_jax.attention.cascade.fills", lambda *_: True)
    monkeypatch.setattr("dflash_jax.attention.cascade.ragged_paged_attention", called)
    case, shared = case_of_groups(sinks=SINKS)
    (out, lse), (true_out, true_lse) = cascaded(case, shared), oracle(case)
    assert seen == [(len(GROUPED_LENS) * T, 6, case.q.shape[-1])]
    np.testing.assert_allclose(out, true_out, rtol=0, atol=4e-6)
    np.testing.assert_allclose(lse, true_lse, rtol=4e-6, atol=4e-6)


def test_a_block_sees_all_of_itself() -> None:
    """As a drafter's does: no key is hidden from a query of the same sequence."""
    case = case_with_shared_pages(causal=False)
    np.testing.assert_allclose(cascaded(case)[0], oracle(case)[0], rtol=0, atol=4e-6)


def test_a_schedule_of_what_is_left() -> None:
    case = case_with_shared_pages()
    lens = jnp.asarray(case.seq_lens)

    def scheduled(shared):
        parts = split_tables(jnp.asarray(case.page_table), shared, PAGE)
        schedule = paged_schedule(lens - parts.skipped, heads=6, kv_heads=2, tokens=T)
        q, k, v, _, _, q_lens = case.arrays()
        return cascade_attention(q, k, v, parts, lens, q_lens=q_lens, schedule=schedule)

    out = jax.jit(scheduled)(jnp.where(lens > 0, SHARED, 0))
    np.testing.assert_allclose(out, oracle(case)[0], rtol=0, atol=4e-6)


@pytest.mark.parametrize("stored", [ml_dtypes.float8_e4m3fn, np.int8], ids=["fp8", "int8"])
def test_pages_in_eight_bits(stored: Any) -> None:
    case = case_with_shared_pages(stored=stored)
    np.testing.assert_allclose(cascaded(case)[0], oracle(case)[0], rtol=0, atol=2e-5)


@pytest.mark.few
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
    made: dict[str, Any] = {"dtype": ml_dtypes.bfloat16} | LARGE[name]
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


@pytest.mark.few
def test_both_parts_are_kernels_on_an_h200() -> None:
    pool = jax.ShapeDtypeStruct((99, 8, 64, 128), jnp.bfloat16)
    table, numbers = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((8, 64), (8,)))

    def call(q, k, v, table, lens, shared):
        return cascade_attention(q, k, v, split_tables(table, shared, 64), lens)

    for tokens in (1, 16, 64):  # the last ones fill the kernel for prompts
        q = jax.ShapeDtypeStruct((8, tokens, 32, 128), jnp.bfloat16)
        names = custom_calls(call, q, pool, pool, table, numbers, numbers)
        assert {*names} == {"mosaic_gpu_v2"}
        assert len(names) >= 2


def test_a_batch_without_a_live_row() -> None:
    case = case_with_shared_pages()
    idle = dataclasses.replace(case, seq_lens=np.zeros_like(case.seq_lens))
    out, lse = cascaded(idle)
    assert not out.any()
    assert (lse == -np.inf).all()


def test_the_output_alone() -> None:
    case = case_with_shared_pages()
    np.testing.assert_array_equal(cascaded(case)[0], alone_of(case))
    every = [40, 0, 28, 31, 61, 33]
    full = case_with_shared_pages(every, [T] * 6)
    np.testing.assert_allclose(alone_of(full, all_live=True), oracle(full)[0], atol=4e-6)


def alone_of(case: Case, *, all_live: bool = False) -> np.ndarray:
    q, k, v, table, lens, q_lens = case.arrays()
    parts = split_tables(table, jnp.where(lens > 0, SHARED, 0), PAGE)
    call = functools.partial(cascade_attention, q_lens=None if all_live else q_lens)
    return np.asarray(jax.jit(call)(q, k, v, parts, lens))
