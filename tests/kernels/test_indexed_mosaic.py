"""The Hopper kernels behind an indexer: in Pallas' interpreter or run by NumPy, lowered for an H200, and for real (`-m gpu`)."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import (
    NoImplementationError,
    index_scores,
    index_select,
    latent_decode,
    latent_encode,
    mla_selected_attention,
)
from dflash_kernels.attention.index.launch import Tuning
from dflash_kernels.attention.index.mosaic_gpu import _ctas, launch_scores, launch_select
from dflash_kernels.attention.mla.launch import Tuning as AttendTuning
from dflash_kernels.attention.mla.mosaic_gpu import selected
from dflash_kernels.mosaic_gpu import radix_select
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..devices import custom_calls, on
from .attention_oracle import make_case
from .numpy_cluster import Cluster

FLOAT8 = jnp.float8_e4m3fn


@pytest.fixture(params=["interpreted", pytest.param("gpu", marks=pytest.mark.gpu)])
def interpret(request: pytest.FixtureRequest) -> Any:
    return plgpu.InterpretGPUParams() if request.param == "interpreted" else None


# Query tokens, heads, page size, sequence lengths, query lengths. Idle and short rows, one tile and several, tokens that fill no
# group, and rows before the sequence.
CASES = {
    "q1": (1, 64, 64, [200, 64, 0, 1, 63, 65, 130, 7], None, 64),
    "q5": (5, 8, 64, [130, 3], [5, 2], 16),
    "q4-page128": (4, 16, 128, [260, 1], [4, 3], 64),
}


@pytest.mark.few("*q5")
@pytest.mark.parametrize("name", CASES)
def test_scores_agree_with_float64(name: str, interpret: Any) -> None:
    t, heads, page_size, lens, q_lens, columns = CASES[name]
    case = make_case(lens, q_lens, t=t, kv_heads=1, head_dim=128, page_size=page_size, dtype=FLOAT8, garbage=np.nan)
    rng = np.random.default_rng(len(name))
    b, width = case.page_table.shape
    q = rng.normal(size=(b, t, heads, 128)).astype(FLOAT8)
    weights = rng.normal(size=q.shape[:3]).astype(np.float32)
    scale = np.exp2(rng.integers(-3, 3, case.k_pages.shape[:3])).astype(np.float32)
    held = np.zeros_like(scale, bool)
    expected = np.full((b, t, width * page_size), -np.inf)
    sizes, terms = np.zeros((2, *expected.shape))
    for row, (length, live) in enumerate(zip(case.seq_lens, case.q_lens, strict=True)):
        places = np.arange(length)
        page, at = case.page_table[row, places // page_size], places % page_size
        held[page, 0, at] = True
        keys = case.k_pages[page, 0, at].astype(np.float64)
        for token in range(live):
            seen = max(length - live + token + 1, 0)
            own_q, factors, own = (
                q[row, token].astype(np.float64),
                weights[row, token].astype(np.float64),
                scale[page, 0, at],
            )
            products = np.maximum(own_q @ keys[:seen].T, 0)
            expected[row, token, :seen] = factors @ products * own[:seen]
            sizes[row, token, :seen] = np.abs(factors) @ products * own[:seen]
            terms[row, token, :seen] = np.abs(factors) @ (np.abs(own_q) @ np.abs(keys[:seen]).T) * own[:seen]
    scale[~held] = np.nan
    arrays = [jnp.asarray(x) for x in (q, weights, case.k_pages, case.page_table, case.seq_lens, case.q_lens)]
    tuning = Tuning(columns=columns, warpgroups=2, stages=2, ctas=1)
    found = np.asarray(launch_scores(*arrays, index_scale=jnp.asarray(scale), tuning=tuning, interpret=interpret))
    np.testing.assert_array_equal(np.isneginf(found), np.isneginf(expected))
    off = np.abs(np.where(np.isneginf(expected), 0, found) - np.where(np.isneginf(expected), 0, expected))
    # Matrix instructions on float8 keep fourteen bits of the largest term, whatever the terms add up to.
    assert (off <= (2**-13 * terms if interpret is None else 1e-5 * sizes) + 1e-6).all()
    assert not np.signbit(found[expected == 0]).any()


# Sequences, query tokens, heads, rows that are named, splits.
ATTENDED = {
    "one": (1, 1, 8, 70, 1), "odd-splits": (2, 3, 3, 300, 2), "two-tiles-of-rows": (1, 2, 72, 128, 1),
    "empty-split": (1, 1, 8, 100, 2), "eight-splits": (1, 2, 40, 1000, 8),
}  # fmt: skip


@pytest.mark.few("*odd-splits", "*two-tiles*")
@pytest.mark.parametrize("name", ATTENDED)
def test_attention_to_named_rows_agrees_with_float64(name: str, interpret: Any) -> None:
    """Rows in any order, some named twice; negative ones and ones past the pool anywhere among them, and a token without any."""
    b, t, heads, count, splits = ATTENDED[name]
    rng = np.random.default_rng(count)
    pages = rng.normal(size=(9, 1, 64, 576)).astype(jnp.bfloat16)
    q = rng.normal(size=(b, t, heads, 576)).astype(jnp.bfloat16)
    slots = rng.integers(0, 9 * 64, (b, t, count)).astype(np.int32)
    slots[rng.random(slots.shape) < 0.3] = -1
    slots[..., 1::17] = 9 * 64 + 5
    if t > 1:
        slots[0, 1] = -7
    named = np.zeros(9 * 64, bool)
    named[slots[(slots >= 0) & (slots < 9 * 64)]] = True
    pages.reshape(-1, 576)[~named] = np.nan
    expected, sums = np.zeros((b, t, heads, 512)), np.full((b, t, heads), -np.inf)
    for row, token in np.ndindex(b, t):
        own = slots[row, token]
        keys = pages.reshape(-1, 576)[own[(own >= 0) & (own < 9 * 64)]].astype(np.float64)
        if len(keys):
            logits = q[row, token].astype(np.float64) @ keys.T * 0.06
            sums[row, token] = np.logaddexp.reduce(logits, axis=1)
            expected[row, token] = np.exp(logits - sums[row, token][:, None]) @ keys[:, :512]
    found, lse = attended(q, pages, slots, splits, interpret)
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=0, atol=2**-7 * np.abs(expected).max())
    np.testing.assert_allclose(lse, sums, rtol=1e-6, atol=1e-5)


def attended(
    q: Any, pages: Any, slots: Any, splits: int, interpret: Any, scale: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    options = {"kv_lora_rank": 512, "scale": 0.06, "latent_scale": jnp.float32(scale)}
    return selected(
        *map(jnp.asarray, (q, pages, slots)), tuning=AttendTuning(splits=splits), interpret=interpret, **options
    )


@pytest.mark.parametrize("stored", [jnp.uint8, FLOAT8], ids=["packed", "float8"])
def test_rows_in_eight_bits_are_unpacked_one_by_one(stored: Any, interpret: Any) -> None:
    """The same bits as of pages that hold what rows in eight bits stand for."""
    rng = np.random.default_rng(4)
    q = rng.normal(size=(1, 2, 3, 576)).astype(jnp.bfloat16)
    pages = latent_encode(
        jnp.asarray(rng.normal(size=(3, 1, 64, 576)), jnp.bfloat16), stored, kv_lora_rank=512, scale=jnp.float32(0.5)
    )
    slots = rng.integers(-40, 200, (1, 2, 100)).astype(np.int32)
    wide = latent_decode(pages, jnp.bfloat16, kv_lora_rank=512, scale=jnp.float32(0.5))
    expected = attended(q, wide, slots, 1, interpret)
    found = attended(q, pages, slots, 1, interpret, scale=0.5)
    assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in zip(found, expected, strict=True))


def best(scores: np.ndarray, count: int) -> np.ndarray:
    """Places of one row by the definition: a stable sort, of what is not -inf."""
    order = [place for place in np.argsort(-scores, kind="stable") if scores[place] > -np.inf][:count]
    return np.pad(np.sort(np.array(order, np.int64)), (0, count - len(order)), constant_values=-1)


def rows_to_choose_from(size: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(size)
    normal, few = rng.normal(size=size), rng.integers(-2, 3, size) * rng.choice([1.0, -0.0], size)
    return {
        "normal": normal, "large": normal * 1e37, "tiny": normal * 1e-44, "ties": few, "equal": np.full(size, -3.0),
        "zeros": np.where(rng.random(size) < 0.5, 0.0, -0.0), "none": np.full(size, -np.inf),
        "few": np.where(rng.random(size) < 300 / size, normal, -np.inf), "lowest": np.full(size, -3.4e38),
        "late": np.where(np.arange(size) > size - 700, 1.0, few - 3),
        "low": np.where(np.arange(size) < 400, -3e38 - normal, -np.inf),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("ctas", "size", "count"), [(1, 4000, 2048), (1, 1024, 2048), (2, 8192, 700), (4, 9004, 2048), (16, 70_000, 2048)]
)
def test_choice_is_that_of_a_sort(ctas: int, size: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row run by NumPy in place of a cluster's threads."""
    own = -(-size // (ctas * radix_select.STEP)) * radix_select.STEP
    table = np.random.default_rng(0).permutation(-(-size // 64)).astype(np.int32)[None]
    for name, row in rows_to_choose_from(size).items():
        row = row.astype(np.float32)
        for page_size in (0, 64):
            cluster = Cluster(ctas, radix_select.THREADS)
            monkeypatch.setattr(radix_select, "th", cluster)
            out = np.full(count, 12345, np.int32)
            buffers = [cluster.shared(words) for words in (own, *radix_select.scratch(ctas).values())]
            given = cluster.device(row), cluster.device(table), cluster.device(out)
            threads: Any = radix_select.select_row
            threads.__wrapped__(
                *given, cluster.number(0), *buffers, cluster.number(0), count=count, ctas=ctas, page_size=page_size
            )
            expected = best(row, count)
            if page_size:
                expected = np.where(expected < 0, -1, table[0, expected // 64] * 64 + expected % 64)
            np.testing.assert_array_equal(out, expected, err_msg=f"{name}, pages of {page_size}")


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "ctas"), [(131_072, None), (131_072, 16), (360_448, None), (9004, 4), (40_000, 2)])
def test_choice_of_a_cluster_is_that_of_a_sort(size: int, ctas: int | None) -> None:
    """All rows at once, so that clusters run beside one another."""
    rows = np.stack([*rows_to_choose_from(size).values()]).astype(np.float32)
    found = launch_select(jnp.asarray(rows), count=2048, ctas=ctas)
    np.testing.assert_array_equal(np.asarray(found), [best(row, 2048) for row in rows])


def test_rows_are_dealt_to_as_many_ctas_as_run_at_once() -> None:
    """Sixteen for a long row alone, where a GPU has all the multiprocessors that they were measured on; fewer for many rows."""
    with on("NVIDIA H200"):
        cases = [(1, 4096), (1, 16_384), (1, 65_536), (1, 131_072), (14, 131_072), (16, 131_072), (16, 360_448)]
        assert [_ctas(*case, radix_select.STEP) for case in cases] == [1, 4, 8, 16, 8, 4, 8]
    with on("NVIDIA GeForce"):
        assert _ctas(1, 131_072, radix_select.STEP) == 8


def of(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.few("163840-V3.2-q16")
@pytest.mark.parametrize("tokens", [1, 16], ids=["q1", "q16"])
@pytest.mark.parametrize(("heads", "index_heads"), [(128, 64), (64, 32)], ids=["V3.2", "GLM-5"])
@pytest.mark.parametrize("length", [4096, 163_840])
def test_steps_lower_in_the_shapes_of_models(heads: int, index_heads: int, tokens: int, length: int) -> None:
    """One launch for scores, one for the choice, and one or two for attention: splits are combined by another one."""
    width, whole = length // 64, (2, tokens)
    query, keys = of(*whole, index_heads, 128, dtype=FLOAT8), of(3000, 1, 64, 128, dtype=FLOAT8)
    weights, table, lens = (
        of(*whole, index_heads, dtype=jnp.float32),
        of(2, width, dtype=jnp.int32),
        of(2, dtype=jnp.int32),
    )

    def sparse(query, weights, keys, scale, table, lens, q, latents):
        named: Any = {"implementation": "mosaic_gpu"}
        scores = index_scores(query, weights, keys, table, lens, index_scale=scale, **named)
        slots = index_select(scores, count=2048, page_table=table, page_size=64, **named)
        return mla_selected_attention(q, latents, slots, kv_lora_rank=512, scale=0.1, **named)

    arrays = (
        query,
        weights,
        keys,
        of(3000, 1, 64, dtype=jnp.float32),
        table,
        lens,
        of(*whole, heads, 576),
        of(3000, 1, 64, 576),
    )
    assert custom_calls(sparse, *arrays) == ["mosaic_gpu_v2"] * 4


def test_what_kernels_refuse() -> None:
    q, pages, scale = jnp.ones((1, 2, 64, 128), FLOAT8), jnp.ones((4, 1, 64, 128), FLOAT8), jnp.ones((4, 1, 64))
    table, lens, weights = jnp.zeros((1, 2), jnp.int32), jnp.ones(1, jnp.int32), jnp.ones((1, 2, 64))
    latents, packed = jnp.ones((4, 1, 64, 576), jnp.bfloat16), jnp.ones((4, 1, 64, 656), jnp.uint8)
    many, slots = jnp.ones((1, 200, 2, 576), jnp.bfloat16), jnp.zeros((1, 200, 2048), jnp.int32)
    options = {"kv_lora_rank": 512, "latent_scale": jnp.float32(1)}
    calls = {
        "not float8_e4m3fn without scales under float32": partial(
            launch_scores, q, weights, pages, table, lens, lens, index_scale=None
        ),
        "pages of a multiple of 64 tokens, not 128, 64 and 32": partial(
            launch_scores, q, weights, pages[:, :, :32], table, lens, lens, index_scale=scale[:, :, :32]
        ),
        "not float32 of 30": partial(launch_select, jnp.ones((2, 30)), count=4),
        "that shared memories hold, not float32 of 400000": partial(launch_select, jnp.ones((1, 400_000)), count=4),
        "fewer than 65536 places, not 65536": partial(launch_select, jnp.ones((2, 32)), count=65536),
        "takes 113 query tokens that name 2048 rows in eight bits, not 200": partial(
            selected, many, packed, slots, scale=1.0, **options
        ),
        "takes a positive scale, not -1.0": partial(selected, many, latents, slots, scale=-1.0, **options),
    }
    for message, call in calls.items():
        with pytest.raises(NotImplementedError, match=message):
            call()
    for call in (
        partial(index_scores, q, weights, pages, table, lens, index_scale=scale),
        partial(index_select, weights, count=4),
        partial(mla_selected_attention, many, latents, slots, kv_lora_rank=512, scale=1.0),
    ):
        with pytest.raises(NoImplementationError, match="needs a Hopper GPU"):
            call(implementation="mosaic_gpu")
