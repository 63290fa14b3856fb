"""An indexer's ops against loops: keys in eight bits, scores over pages, the choice among them, and attention to what is chosen."""

import inspect
from functools import partial
from typing import Any

import dflash_kernels
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from dflash_kernels import (
    index_encode,
    index_scores,
    index_select,
    latent_encode,
    mla_attention,
    mla_selected_attention,
)
from dflash_kernels.attention.index.xla import index_scores_xla
from dflash_kernels.attention.mla.selected_xla import mla_selected_xla

from .attention_oracle import make_case

LENS, Q_LENS, TOKENS, HEADS, WIDTH = np.array([30, 0, 17, 5]), np.array([3, 0, 2, 3]), 3, 5, 16


@pytest.fixture(autouse=True, params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> str:
    """Runs a test once more where it is told to run on a GPU."""
    return request.param


def paged(width: int, dtype: Any) -> Any:
    """Sequences of `LENS` rows in pages of 8, NaN in every row that is no sequence's."""
    return make_case(LENS.tolist(), t=TOKENS, kv_heads=1, head_dim=width, page_size=8, dtype=dtype, garbage=np.nan)


def rows_of(case: Any, sequence: int) -> np.ndarray:
    """A sequence's rows in float64."""
    places = np.arange(LENS[sequence])
    return case.k_pages[case.page_table[sequence, places // 8], 0, places % 8].astype(np.float64)


def encoded(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """By definition, one row at a time; `x` is such that float32 sums are exact."""
    signs = np.array([[(-1) ** bin(i & j).count("1") for j in range(x.shape[1])] for i in range(x.shape[1])])
    turned = (x.astype(np.float64) @ signs).astype(np.float32) * np.float32(x.shape[1] ** -0.5)
    scale = np.maximum(np.abs(turned).max(axis=1), np.float32(1e-4)) / np.float32(448)
    scale = np.exp2(np.ceil(np.log2(scale.astype(np.float64)))).astype(np.float32)
    return (turned / scale[:, None]).astype(ml_dtypes.float8_e4m3fn), scale


def test_keys_in_eight_bits_are_exact_bytes() -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(-128, 128, (64, 128)).astype(np.float32) * np.exp2(rng.integers(-20, 10, (64, 1))).astype(
        np.float32
    )
    x[3] = 0
    values, scales = encoded(x)
    ours = jax.jit(index_encode)(jnp.asarray(x, jnp.bfloat16))
    assert np.asarray(ours[0]).tobytes() == values.tobytes()
    assert np.asarray(ours[1]).tobytes() == scales.tobytes()


@pytest.mark.parametrize("eight", [False, True], ids=["float32", "float8"])
def test_scores_are_those_of_a_loop_whatever_the_work_is_cut_into(eight: bool) -> None:
    rng = np.random.default_rng(1)
    case = paged(WIDTH, jnp.float8_e4m3fn if eight else np.float32)
    q = rng.normal(size=(4, TOKENS, HEADS, WIDTH)).astype(case.k_pages.dtype)
    weights = rng.normal(size=q.shape[:3]).astype(np.float32)
    scale = jnp.asarray(rng.uniform(0.5, 2, case.k_pages.shape[:3]).astype(np.float32)) if eight else None
    expected = np.full((4, TOKENS, case.page_table.shape[1] * 8), -np.inf)
    for b, t in np.ndindex(4, TOKENS):
        if t < Q_LENS[b]:
            seen = LENS[b] - Q_LENS[b] + t + 1
            products = np.maximum(q[b, t].astype(np.float64) @ rows_of(case, b)[:seen].T, 0)
            factor = (
                1
                if scale is None
                else np.asarray(scale)[case.page_table[b, np.arange(seen) // 8], 0, np.arange(seen) % 8]
            )
            expected[b, t, :seen] = weights[b, t].astype(np.float64) @ products * factor
    arrays = [jnp.asarray(x) for x in (q, weights, case.k_pages, case.page_table, LENS)]
    whole = index_scores(*arrays, q_lens=jnp.asarray(Q_LENS), index_scale=scale)
    # Of two pages at a time, the last part of one page.
    some = jax.jit(partial(index_scores_xla, workspace=4 * TOKENS * HEADS * 16 * 4))
    parts = some(*arrays, jnp.asarray(Q_LENS), index_scale=scale)
    for ours in (whole, parts):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)
    assert not np.signbit(np.asarray(whole)[expected == 0]).any()


@pytest.mark.parametrize("implementation", ["xla", "sort"])
def test_ties_go_to_the_first_places(implementation: str) -> None:
    """Plateaus of zeros of either sign, rows that are all equal, and rows of fewer than are wanted."""
    rng = np.random.default_rng(2)
    scores = rng.integers(-1, 2, (200, 40)).astype(np.float32) * rng.choice(np.float32([1, -0.0, 0.5]), (200, 40))
    scores[:3] = [[0], [7], [-np.inf]]
    scores[3:100][rng.random((97, 40)) < 0.8] = -np.inf
    expected, choose = np.full((200, 12), -1), jax.jit(partial(index_select, count=12, implementation=implementation))
    for row, score in zip(expected, scores, strict=True):
        best = [place for place in np.argsort(-score, kind="stable") if score[place] > -np.inf][:12]
        row[: len(best)] = sorted(best)
    np.testing.assert_array_equal(choose(jnp.asarray(scores)), expected)
    np.testing.assert_array_equal(choose(jnp.asarray(scores[:, :5]))[:, 5:], -1)
    table = rng.permutation(10).astype(np.int32)[None]
    choose = jax.jit(partial(index_select, count=12, page_size=4, implementation=implementation))
    slots = choose(jnp.asarray(scores[None]), page_table=jnp.asarray(table))[0]
    np.testing.assert_array_equal(slots, np.where(expected < 0, -1, table[0, expected // 4] * 4 + expected % 4))


@pytest.mark.few("*packed", "*float8")
@pytest.mark.parametrize("kind", [np.float32, jnp.float8_e4m3fn, np.uint8], ids=["float32", "float8", "packed"])
def test_attention_to_all_rows_is_that_over_pages(kind: Any) -> None:
    """Rows are named in any order, those of no page by -1; whatever the work is cut into."""
    rank, rng = 128, np.random.default_rng(3)
    case = paged(rank + 8, np.float32)
    pages = latent_encode(jnp.asarray(case.k_pages), kind, kv_lora_rank=rank, scale=jnp.float32(0.5))
    options = {"kv_lora_rank": rank, "scale": 0.3}
    factor = {"latent_scale": jnp.float32(0.5)} if kind == jnp.float8_e4m3fn else {}
    q = jnp.asarray(rng.normal(size=(4, TOKENS, 2, rank + 8)).astype(np.float32))
    read = dflash_kernels.latent_decode(pages, np.float32, kv_lora_rank=rank, scale=jnp.float32(0.5))
    lengths = [jnp.asarray(x) for x in (case.page_table, LENS)]
    expected, lse = mla_attention(q, read, *lengths, q_lens=jnp.asarray(Q_LENS), return_lse=True, **options)
    place = np.arange(case.page_table.shape[1] * 8)
    own = (LENS - Q_LENS)[:, None] + np.arange(TOKENS)
    seen = (place <= own[..., None]) & (np.arange(TOKENS) < Q_LENS[:, None])[..., None]
    slots = np.where(seen, case.page_table[:, None, place // 8] * 8 + place % 8, -1)
    slots = jnp.asarray(rng.permuted(slots, axis=2))
    cut = partial(mla_selected_xla, workspace=1, **options)
    ours = mla_selected_attention(q, pages, slots, return_lse=True, **options, **factor)
    found = [ours] if factor else [ours, jax.jit(cut)(q, pages, slots, latent_scale=jnp.float32(0.5))]
    for out, sums in found:
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=2e-6)
        np.testing.assert_allclose(sums, lse, rtol=1e-5, atol=1e-6)


def test_what_is_refused() -> None:
    q, pages = jnp.ones((2, 3, 5, 16)), jnp.ones((4, 1, 8, 16))
    table, lens = jnp.zeros((2, 2), jnp.int32), jnp.ones(2, jnp.int32)
    scores, attend = inspect.unwrap(index_scores), inspect.unwrap(mla_selected_attention)
    with pytest.raises(ValueError, match="must be a power of two wide"):
        inspect.unwrap(index_encode)(jnp.ones((3, 12)))
    with pytest.raises(ValueError, match=r"not float32 and float8_e4m3fn"):
        scores(q, q[..., 0], pages.astype(jnp.float8_e4m3fn), table, lens)
    with pytest.raises(ValueError, match=r"weights \(2, 3, 4\) must be \(2, 3, 5\)"):
        scores(q, q[:, :, :4, 0], pages, table, lens)
    with pytest.raises(ValueError, match="each row of float8_e4m3fn pages; these are float32"):
        scores(q, q[..., 0], pages, table, lens, index_scale=pages[..., 0])
    choose = inspect.unwrap(index_select)
    with pytest.raises(ValueError, match="count must be 1 or more, not 0"):
        choose(q, count=0)
    with pytest.raises(ValueError, match="give both or neither"):
        choose(q[..., 0], count=1, page_table=table)
    with pytest.raises(ValueError, match=r"must have room for places of scores \(2, 3, 5\)"):
        choose(q[..., 0], count=1, page_table=table, page_size=2)
    with pytest.raises(ValueError, match=r"slots \(2, 2, 4\) must start with \(2, 3\)"):
        attend(q, pages, jnp.zeros((2, 2, 4), jnp.int32), kv_lora_rank=8, scale=1.0)
    with pytest.raises(ValueError, match=r"are not \[P, 1, p, 152\]"):
        attend(
            jnp.ones((2, 3, 5, 138)),
            pages.astype(jnp.uint8),
            jnp.zeros((2, 3, 4), jnp.int32),
            kv_lora_rank=128,
            scale=1.0,
        )
