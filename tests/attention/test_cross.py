"""A decoder's queries over an encoder's tokens: written once, seen whole in every step."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dflash_jax.attention.standalone.cross import cross_attention, write_encoded

from ..devices import custom_calls
from ..kernels.attention_oracle import make_case, oracle
from .dense_oracle import assert_as_good_as, dense_oracle

PAGE = 4
LENS = [9, 0, 5, 12]


def pools_and_table(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    order = np.random.default_rng(seed).permutation(16)
    table = np.full((4, 4), 2_147_480_000, np.int32)
    for row, length in enumerate(LENS):
        for column in range(-(-length // PAGE)):
            table[row, column], order = order[0], order[1:]
    pools = np.full((2, 16, 2, PAGE, 16), np.nan, np.float32)
    return pools[0], pools[1], table


def write(k_pages, v_pages, table, k, v, fresh):
    lens = jnp.asarray(LENS, jnp.int32)
    out = jax.jit(write_encoded)(k_pages, v_pages, k, v, table, lens, jnp.asarray(fresh))
    return tuple(np.asarray(pool) for pool in out)


def expected(pool: np.ndarray, rows: np.ndarray, table: np.ndarray, fresh: list[bool]) -> np.ndarray:
    pool, taken = pool.copy(), 0
    for row, length in enumerate(LENS):
        for s in range(length if fresh[row] else 0):
            pool[table[row, s // PAGE], :, s % PAGE] = rows[taken]
            taken += 1
    return pool


@pytest.mark.parametrize(
    "fresh", [[True] * 4, [False] * 4, [False, True, True, False], [True, False, False, True]], ids=str
)
def test_what_is_fresh_is_written_and_nothing_else(fresh: list[bool]) -> None:
    """Requests whose tokens are in the pages already keep them; padding rows, NaN, are written nowhere."""
    k_pages, v_pages, table = pools_and_table()
    rng = np.random.default_rng(1)
    count = sum(length for length, new in zip(LENS, fresh, strict=True) if new)
    rows = np.full((2, 30, 2, 16), np.nan, np.float32)
    rows[:, :count] = rng.standard_normal((2, count, 2, 16))
    k_pages[:], v_pages[:] = 7.0, 8.0
    out = write(k_pages, v_pages, table, *rows, fresh)
    for pool, before, new in zip(out, (k_pages, v_pages), rows, strict=True):
        np.testing.assert_array_equal(pool, expected(before, new, table, fresh))


def test_every_step_sees_the_whole_encoder() -> None:
    """The first step writes three requests, a later one a fourth; both attend to all there is, with queries of any number."""
    k_pages, v_pages, table = pools_and_table()
    rng = np.random.default_rng(2)
    tokens = rng.standard_normal((2, 4, 12, 2, 16)).astype(np.float32)
    for fresh in ([True, True, False, True], [False, False, True, False]):
        rows = np.zeros((2, 30, 2, 16), np.float32)
        packed = [tokens[:, row, :length] for row, length in enumerate(LENS) if fresh[row]]
        rows[:, : sum(part.shape[1] for part in packed)] = np.concatenate(packed, axis=1)
        k_pages, v_pages = write(k_pages, v_pages, table, *rows, fresh)
    for t, q_lens in ((1, [1, 1, 1, 1]), (6, [6, 2, 1, 0])):
        q = rng.standard_normal((4, t, 4, 16)).astype(np.float32)
        arrays = (jnp.asarray(x) for x in (q, k_pages, v_pages, table, np.array(LENS, np.int32)))
        out = np.asarray(cross_attention(*arrays, q_lens=jnp.asarray(q_lens, jnp.int32), scale=0.2))
        true = np.zeros((4, t, 4, 16))
        for row, count in enumerate(q_lens):
            true[row, :count] = dense_oracle(q[row, :count], *tokens[:, row, : LENS[row]], scale=0.2)
        np.testing.assert_allclose(out, true, rtol=0, atol=4e-6)
        assert not out[1].any()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size", "dtype"),
    [(20, 20, 64, 64, ml_dtypes.bfloat16), (32, 8, 128, 16, np.float16)],  # Whisper large's; grouped
    ids=["one-to-one", "grouped"],
)
@pytest.mark.parametrize("t", [1, 16])
def test_real_sizes_on_a_gpu(heads: int, kv_heads: int, head_dim: int, page_size: int, dtype: Any, t: int) -> None:
    """Half a minute of sound, less, and none; written in two steps, NaN wherever nothing was written."""
    lens, q_lens = [1500, 0, 448, 1, 1499, 777, 64, 1500], [t, t, t, t, 1, 0, t, min(t, 5)]
    rng, shape = np.random.default_rng(heads), (8, 1500, kv_heads, head_dim)
    k, v = (rng.standard_normal(shape, np.float32).astype(dtype) for _ in range(2))
    q = (4 * rng.standard_normal((8, t, heads, head_dim), np.float32)).astype(dtype)
    needed = [-(-length // page_size) for length in lens]
    order, width = rng.permutation(sum(needed) + 3), max(needed) + 1
    table = np.full((8, width), 2_147_480_000, np.int32)
    for row, count in enumerate(needed):
        table[row, :count], order = order[:count], order[count:]
    pools = [jnp.full((sum(needed) + 3, kv_heads, page_size, head_dim), jnp.nan, dtype) for _ in range(2)]
    encoder_lens = jnp.asarray(lens, jnp.int32)
    for fresh in (np.arange(8) % 2 == 0, np.arange(8) % 2 == 1):
        packed = [np.concatenate([x[row, : lens[row]] for row in np.flatnonzero(fresh)]) for x in (k, v)]
        rows = [np.concatenate([part, np.full((9, *part.shape[1:]), np.nan, dtype)]) for part in packed]
        pools = jax.jit(write_encoded)(*pools, *rows, table, encoder_lens, fresh)
    for row, count in enumerate(q_lens):
        q[row, count:] = np.nan
    given = (jnp.asarray(q), *pools, jnp.asarray(table), encoder_lens)
    counts = jnp.asarray(q_lens, jnp.int32)
    out, reference = (cross_attention(*given, q_lens=counts, implementation=name) for name in (None, "xla"))
    true = np.zeros(q.shape)
    for row, count in enumerate(q_lens):
        keys, values = k[row, : lens[row]], v[row, : lens[row]]
        true[row, :count] = dense_oracle(q[row, :count], keys, values, scale=head_dim**-0.5)
    assert_as_good_as(out, reference, true)
    assert not np.asarray(out)[1].any()


def test_writing_and_attending_are_kernels_on_an_h200() -> None:
    pool, rows = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((99, 20, 64, 64), (3000, 20, 64)))
    table, lens, fresh = (
        jax.ShapeDtypeStruct(*array) for array in (((8, 24), jnp.int32), ((8,), jnp.int32), ((8,), bool))
    )
    assert custom_calls(write_encoded, pool, pool, rows, rows, table, lens, fresh) == ["mosaic_gpu_v2"]
    q = jax.ShapeDtypeStruct((8, 1, 20, 64), jnp.bfloat16)
    assert set(custom_calls(cross_attention, q, pool, pool, table, lens)) == {"mosaic_gpu_v2"}


def test_more_queries_than_encoder_tokens() -> None:
    """Bottom-right alignment would put the first of them before the sequence: they see all of it none the less."""
    case = make_case([3, 1, 0], [7, 7, 7], t=7, causal=False, sinks=np.linspace(-1, 1, 4, dtype=np.float32))
    q, k, v, table, lens, q_lens = case.arrays()
    out = cross_attention(q, k, v, table, lens, q_lens=q_lens, sinks=jnp.asarray(case.options["sinks"]))
    np.testing.assert_allclose(out, oracle(case)[0], rtol=0, atol=4e-6)


@pytest.mark.parametrize("option", ["causal", "window", "alibi_slopes", "alibi_sqrt"])
def test_options_of_positions_are_refused(option: str) -> None:
    arrays = make_case([3], t=1).arrays()[:5]
    with pytest.raises(ValueError, match=f"cross attention has no {option}"):
        cross_attention(*arrays, **{option: None})
