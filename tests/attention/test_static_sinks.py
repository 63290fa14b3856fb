"""Sink tokens ahead of every sequence: attention over both equals attention over one sequence that begins with them."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from dflash_kernels import paged_attention, ragged_paged_attention

from dflash_jax.attention.standalone.static_sinks import sink_attention, with_static_sinks, write_static_sinks

from ..kernels.attention_oracle import Case, make_case
from .dense_oracle import assert_as_good_as, dense_oracle

PAGE, T = 4, 3
SEQ_LENS, Q_LENS = [9, 0, 3, 14], [3, 3, 2, 1]


def dense(q: np.ndarray, k: Any, v: Any, q_lens: Any, window: int | None = None) -> np.ndarray:
    """Float64 over lists of whole sequences' keys and values, sinks included; the queries are their last tokens."""
    out = np.zeros((*q.shape[:3], v[0].shape[-1]))
    for row, count in enumerate(q_lens):
        distance = len(k[row]) - count + np.arange(count)[:, None] - np.arange(len(k[row]))
        seen = (distance >= 0) & (distance <= (len(k[row]) if window is None else window))
        out[row, :count] = dense_oracle(q[row, :count], k[row], v[row], seen, scale=q.shape[-1] ** -0.5)
    return out


class Setup:
    """Pools with NaN wherever nothing was written, two pages of sinks among them, and the same sequences as plain arrays."""

    def __init__(self, value_dim: int = 16, sink_dtype: Any = np.float32):
        rng = np.random.default_rng(value_dim)
        self.q = rng.standard_normal((4, T, 4, 16)).astype(np.float32)
        sinks = [rng.standard_normal((2 * PAGE, 2, dim)).astype(sink_dtype) for dim in (16, value_dim)]
        tokens = [rng.standard_normal((4, 14, 2, dim)).astype(np.float32) for dim in (16, value_dim)]
        self.table, order = np.full((4, 5), 2_147_480_000, np.int32), iter(rng.permutation(14))
        self.sink_pages = np.array([next(order), next(order)], np.int32)
        pools = [np.full((14, 2, PAGE, dim), np.nan, np.float32) for dim in (16, value_dim)]
        for row, length in enumerate(SEQ_LENS):
            for s in range(length):
                if s % PAGE == 0:
                    self.table[row, s // PAGE] = next(order)
                for pool, array in zip(pools, tokens, strict=True):
                    pool[self.table[row, s // PAGE], :, s % PAGE] = array[row, s]
        self.sinks, self.pools = sinks, pools
        self.whole = [
            [np.concatenate([sink, array[row, :length]]) if length else array[row, :0] for row, length in enumerate(SEQ_LENS)]
            for sink, array in zip(sinks, tokens, strict=True)
        ]  # fmt: skip

    def written(self) -> tuple[jax.Array, jax.Array]:
        return jax.jit(write_static_sinks)(*self.pools, *self.sinks, self.sink_pages)[:2]

    def sunk(self) -> tuple[jax.Array, jax.Array]:
        return with_static_sinks(
            jnp.asarray(self.table), jnp.asarray(SEQ_LENS, jnp.int32), jnp.asarray(self.sink_pages), PAGE
        )


@pytest.mark.parametrize("window", [None, 10])
def test_queries_see_the_sinks_ahead_of_their_sequence(window: int | None) -> None:
    """An idle row stays idle and does not become a row of sinks; a window counts sinks as the farthest keys."""
    setup = Setup()
    mask = None if window is None else (window, 0)
    q_lens = jnp.asarray(Q_LENS, jnp.int32)
    out = paged_attention(jnp.asarray(setup.q), *setup.written(), *setup.sunk(), q_lens=q_lens, window=mask)
    np.testing.assert_allclose(out, dense(setup.q, *setup.whole, Q_LENS, window), rtol=0, atol=4e-6)
    assert not np.asarray(out[1]).any()


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 1000])
@pytest.mark.parametrize("t", [1, 16])
def test_real_sizes_on_a_gpu(t: int, window: int | None) -> None:
    """128 sinks ahead of Qwen3-8B's heads, in bfloat16, and of values narrower than their keys, which packed queries have."""
    lens, q_lens = [1500, 0, t, 777, 64, 2000], [t, t, t, 1, min(t, 3), t]
    rng, longest, page, dtype = np.random.default_rng(t), 2000, 64, ml_dtypes.bfloat16
    needed = [-(-length // page) for length in lens]
    order = rng.permutation(sum(needed) + 4).astype(np.int32)
    sink_pages, table = order[:2], np.full((6, max(needed)), 2_147_480_000, np.int32)
    q = (4 * rng.standard_normal((6, t, 32, 128), np.float32)).astype(dtype)
    for row, count in enumerate(q_lens):
        q[row, count:] = np.nan
    mask = None if window is None else (window, 0)
    for value_dim in (128, 64):
        wide = [rng.standard_normal((6, longest, 8, dim), np.float32).astype(dtype) for dim in (128, value_dim)]
        sinks = [rng.standard_normal((2 * page, 8, dim), np.float32).astype(dtype) for dim in (128, value_dim)]
        pools = [np.full((len(order), 8, page, dim), np.nan, dtype) for dim in (128, value_dim)]
        for row, length in enumerate(lens):
            own = order[2 + sum(needed[:row]) :][: needed[row]]
            table[row, : len(own)] = own
            for pool, tokens in zip(pools, wide, strict=True):
                held = np.full((len(own) * page, *tokens.shape[2:]), np.nan, dtype)
                held[:length] = tokens[row, :length]
                pool[own] = np.swapaxes(held.reshape(-1, page, *held.shape[1:]), 1, 2)
        pages = jax.jit(write_static_sinks)(*pools, *sinks, sink_pages)[:2]
        seen = with_static_sinks(jnp.asarray(table), jnp.asarray(lens, jnp.int32), jnp.asarray(sink_pages), page)
        whole = [[np.concatenate([sink, x[row, :n]]) if n else x[row, :0] for row, n in enumerate(lens)]
                 for sink, x in zip(sinks, wide, strict=True)]  # fmt: skip
        true = dense(q, *whole, q_lens, window)
        found = {}
        for name in (None, "xla"):
            if value_dim == 128:
                given = {"q_lens": jnp.asarray(q_lens, jnp.int32), "window": mask, "implementation": name}
                found[name] = paged_attention(jnp.asarray(q), *pages, *seen, **given)
            else:
                live, bounds = np.arange(t) < np.array(q_lens)[:, None], jnp.asarray(np.cumsum([0, *q_lens]), jnp.int32)
                given = {"window": mask, "implementation": name}
                packed = ragged_paged_attention(jnp.asarray(q[live]), *pages, bounds, *seen, **given)
                found[name] = jnp.zeros(true.shape, packed.dtype).at[live].set(packed)
        assert_as_good_as(found[None], found["xla"], true)


def test_values_of_another_width() -> None:
    setup = Setup(value_dim=24)
    packed = np.concatenate([setup.q[row, :count] for row, count in enumerate(Q_LENS)])
    cu_lens = jnp.asarray(np.cumsum([0, *Q_LENS]), jnp.int32)
    table, lens = setup.sunk()
    out = np.asarray(ragged_paged_attention(jnp.asarray(packed), *setup.written(), cu_lens, table, lens))
    true = dense(setup.q, *setup.whole, Q_LENS)
    np.testing.assert_allclose(
        out, np.concatenate([true[row, :count] for row, count in enumerate(Q_LENS)]), rtol=0, atol=4e-6
    )


def test_only_the_sinks_pages_are_written() -> None:
    setup = Setup(sink_dtype=ml_dtypes.bfloat16)
    for pool, before, sink in zip(setup.written(), setup.pools, setup.sinks, strict=True):
        expected = before.copy()
        for s, row in enumerate(sink):
            expected[setup.sink_pages[s // PAGE], :, s % PAGE] = row
        np.testing.assert_array_equal(pool, expected)


def dequantized(pools: Any, k_scale: Any, v_scale: Any) -> list[np.ndarray]:
    """Pools in float64."""
    k, v = (np.asarray(pool).astype(np.float64) for pool in pools)
    if k_scale is not None:
        k_scale, v_scale = (np.asarray(scale, np.float64) for scale in (k_scale, v_scale))
        k *= k_scale[..., None] if k_scale.ndim == 3 else k_scale[:, None, None]
        v *= v_scale[:, None, :] if v_scale.ndim == 2 else v_scale[:, None, None]
    return [k, v]


def rows_of(pool: np.ndarray, pages: np.ndarray, count: int) -> np.ndarray:
    """`[count, K, H]`, the first tokens of some pages."""
    return np.swapaxes(pool[pages], 1, 2).reshape(-1, pool.shape[1], pool.shape[3])[:count]


@pytest.mark.few("5-fp8", "8-int8", "11-float32", "1-fp8")
@pytest.mark.parametrize("stored", [None, ml_dtypes.float8_e4m3fn, np.int8], ids=["float32", "fp8", "int8"])
@pytest.mark.parametrize("count", [1, 5, 8, 11])
def test_any_number_in_pages_of_any_format(count: int, stored: Any) -> None:
    """Numbers that fill no page, beside garbage, values of another width; queries of a sequence that is idle see no sink."""
    case: Case = make_case(
        [9, 0, 3, 14], [3, 3, 2, 1], t=3, group=2, head_dim=16, value_dim=24, page_size=PAGE, stored=stored, seed=count
    )
    q, k, v, table, lens, q_lens = case.arrays()
    used = {page for row, length in enumerate(case.seq_lens) for page in case.page_table[row, : -(-length // PAGE)]}
    pages = np.array([page for page in range(k.shape[0]) if page not in used], np.int32)[::-1]
    rng = np.random.default_rng(count)
    sinks = [0.4 * rng.standard_normal((count, 2, dim)).astype(np.float32) for dim in (16, 24)]
    scales: Any = {name: case.options[name] for name in ("k_scale", "v_scale") if name in case.options}
    kept = jax.jit(write_static_sinks)(k, v, *sinks, pages, **scales)
    given = scales | ({} if kept.k_scale is None else {"k_scale": kept.k_scale})
    call = jax.jit(sink_attention, static_argnames="sinks")
    out = call(q, *kept[:2], table, lens, pages, sinks=count, q_lens=q_lens, **given)
    pools = dequantized(kept[:2], given.get("k_scale"), given.get("v_scale"))
    held = [rows_of(pool, pages, count) for pool in pools]
    for written, sink in zip(held, sinks, strict=True):
        np.testing.assert_allclose(written, sink, rtol=0, atol=0 if stored is None else 0.07)
    whole = [
        [np.concatenate([sink, rows_of(pool, row, length)]) if length else sink[:0]
         for row, length in zip(case.page_table % len(pool), case.seq_lens, strict=True)]
        for pool, sink in zip(pools, held, strict=True)
    ]  # fmt: skip
    true = dense(case.q, *whole, case.q_lens)
    np.testing.assert_allclose(out, true, rtol=0, atol=4e-6 if stored is None else 2e-5)
    assert not np.asarray(out[1]).any()
    alone = dense(case.q, *([rows[count:] if len(rows) else rows for rows in side] for side in whole), case.q_lens)
    assert np.abs(alone - true).max() > 0.02, "the sinks change what is seen"


@pytest.mark.parametrize("count", [0, 9])
def test_more_sinks_than_their_pages_hold(count: int) -> None:
    q, pool, lens = jnp.zeros((1, 1, 2, 16)), jnp.zeros((6, 2, PAGE, 16)), jnp.ones(1, jnp.int32)
    with pytest.raises(ValueError, match=f"{count} sinks must be from 1 to the 8 tokens of 2 pages"):
        inspect.unwrap(sink_attention)(q, pool, pool, lens[None], lens, jnp.array([1, 4]), sinks=count)


def test_tables_are_made_anew_each_time() -> None:
    """Made twice from a sequence's own table and lengths, they have the sinks once: nothing is changed in place."""
    setup = Setup()
    table, lens = setup.table.copy(), np.array(SEQ_LENS, np.int32)
    first, second = (with_static_sinks(*map(jnp.asarray, (table, lens, setup.sink_pages)), PAGE) for _ in range(2))
    np.testing.assert_array_equal(table, setup.table)
    assert lens.tolist() == SEQ_LENS
    for ours, theirs in zip(first, second, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert first[1].tolist() == [17, 0, 11, 22]
    assert first[0].shape == (4, 7)
    np.testing.assert_array_equal(first[0][:, :2], np.broadcast_to(setup.sink_pages, (4, 2)))
    np.testing.assert_array_equal(first[0][:, 2:], setup.table)


@pytest.mark.parametrize(
    ("k", "v", "dtype", "message"),
    [
        (
            (7, 2, 16),
            (8, 2, 16),
            np.float32,
            "7 sink keys and 8 values must be equally many, from 1 to the 8 tokens of 2 pages",
        ),
        ((9, 2, 16), (9, 2, 16), np.float32, "9 sink keys and 9 values must be"),
        ((0, 2, 16), (0, 2, 16), np.float32, "0 sink keys and 0 values must be"),
        ((8, 3, 16), (8, 2, 16), np.float32, r"sinks of \(8, 3, 16\) \[S, K, H\] do not fit float32 pages"),
        ((8, 2, 16), (8, 2, 8), np.float32, r"sinks of \(8, 2, 8\)"),
        ((8, 2, 16), (8, 2, 16), np.int8, "int8 pools take k_scale"),
    ],
)
def test_sinks_that_do_not_fit(k: tuple[int, ...], v: tuple[int, ...], dtype: Any, message: str) -> None:
    pool = jnp.zeros((6, 2, PAGE, 16), dtype)
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(write_static_sinks)(pool, pool, jnp.zeros(k), jnp.zeros(v), jnp.array([1, 4]))
