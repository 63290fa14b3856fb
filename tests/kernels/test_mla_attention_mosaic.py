"""The Hopper kernel of latent attention: in Pallas's interpreter, lowered for an H200, and for real (`-m gpu`)."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import NoImplementationError, mla_attention
from dflash_kernels.attention.mla import launch as schedule
from dflash_kernels.attention.mla.launch import Tuning, best_splits, longest_first, plan
from dflash_kernels.attention.mla.mosaic_gpu import tuned
from dflash_kernels.attention.mla.mosaic_gpu_sm90 import Tiles
from dflash_kernels.attention.mla.reference import mla_attention_reference
from dflash_kernels.mosaic_gpu import combine as merging
from dflash_kernels.mosaic_gpu.thread_op import interpreted
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..devices import h200
from .attention_oracle import Case, make_case

RANK, WIDTH = 512, 576
OPTIONS = {"kv_lora_rank": RANK, "scale": 0.06, "causal": True}


@pytest.fixture(params=["interpreted", pytest.param("gpu", marks=pytest.mark.gpu)])
def interpret(request: pytest.FixtureRequest) -> Any:
    return plgpu.InterpretGPUParams() if request.param == "interpreted" else None


def latent_case(
    seq_lens, q_lens=None, *, heads: int, causal: bool = True, dtype: Any = jnp.bfloat16, **options
) -> Case:
    shape = {"kv_heads": 1, "group": heads, "head_dim": WIDTH, "dtype": dtype, "scale": OPTIONS["scale"]}
    return make_case(seq_lens, q_lens, causal=causal, **shape, **options)


@functools.partial(jax.jit, static_argnames=("kv_lora_rank", "scale", "causal", "tuning", "interpret"))
def call(*arrays, **options):
    return tuned(*arrays, **options)


def run(case: Case, tuning: Tuning, interpret: Any) -> tuple[np.ndarray, np.ndarray]:
    q, pages, _, *rest = case.arrays()
    out, lse = call(q, pages, *rest, **OPTIONS | case.options, tuning=tuning, interpret=interpret)
    assert out.dtype == case.q.dtype
    assert lse.dtype == jnp.float32
    return np.asarray(out), np.asarray(lse)


def true_values(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """float64, one sequence's heads and tokens at a time; reads nothing but what a query may see."""
    b, t, n, _ = case.q.shape
    out, lse, page_size = np.zeros((b, t, n, RANK)), np.full((b, t, n), -np.inf), case.k_pages.shape[2]
    for row, (length, live) in enumerate(zip(case.seq_lens, case.q_lens, strict=True)):
        places = np.arange(length)
        keys = case.k_pages[case.page_table[row, places // page_size], 0, places % page_size].astype(np.float64)
        for i in range(live):
            seen = keys[: max(length - live + i + 1, 0)] if case.options["causal"] else keys
            if len(seen):
                scores = case.q[row, i].astype(np.float64) @ seen.T * case.scale
                top = scores.max(1, keepdims=True)
                weights = np.exp(scores - top)
                lse[row, i] = (top + np.log(weights.sum(1, keepdims=True)))[:, 0]
                out[row, i] = weights / weights.sum(1, keepdims=True) @ seen[:, :RANK]
    return out, lse


def check(case: Case, tuning: Tuning, interpret: Any) -> None:
    """Against float64: the output is rounded once to its dtype, and so are the weights that multiply the values."""
    (out, lse), (true_out, true_lse) = run(case, tuning, interpret), true_values(case)
    eps = float(jnp.finfo(case.q.dtype).eps)
    np.testing.assert_allclose(out.astype(np.float64), true_out, rtol=0, atol=eps * max(np.abs(true_out).max(), 1))
    np.testing.assert_allclose(lse, true_lse, rtol=1e-6, atol=1e-5)
    assert (out[~np.isfinite(true_lse)] == 0).all()


# T, heads, page size, sequence lengths, query lengths, causal, splits. Idle rows, short rows and rows before the sequence; one
# tile, odd and even numbers of them, whole and cut ones.
CASES = {
    "one-head": (1, 1, 64, [260, 64, 0], None, True, 1),
    "q1-split": (1, 4, 64, [330, 1], None, True, 2),
    "q16": (16, 3, 64, [190, 5, 0], [16, 16, 3], True, 1),
    "q16-two-tiles-of-rows": (16, 5, 64, [140], [13], True, 2),
    "full": (4, 7, 64, [128, 200], [4, 2], False, 1),
    "page16": (3, 3, 16, [150, 3], [3, 3], True, 2),
    "page128": (2, 2, 128, [260], None, True, 2),
}
# Compiling takes longest there, and the larger cases below do most of this.
ON_GPU = ("q16-two-tiles-of-rows", "full", "page16")


@pytest.mark.few("page16-interpreted")
@pytest.mark.parametrize(
    ("name", "interpret"),
    [
        *((name, "interpreted") for name in CASES),
        *(pytest.param(name, "gpu", marks=pytest.mark.gpu) for name in ON_GPU),
    ],
    indirect=["interpret"],
)
def test_agrees_with_float64(name: str, interpret: Any) -> None:
    t, heads, page_size, seq_lens, q_lens, causal, splits = CASES[name]
    dtype = jnp.float16 if name == "page128" else jnp.bfloat16
    case = latent_case(seq_lens, q_lens, t=t, heads=heads, page_size=page_size, causal=causal, dtype=dtype)
    check(case, Tuning(splits=splits), interpret)


@pytest.mark.few
def test_longest_sequences_begin_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where CTAs wait for each other, as on a GPU of one multiprocessor."""
    monkeypatch.setattr(schedule, "MULTIPROCESSORS", 1)
    case = latent_case([64, 5, 190, 0, 64], t=1, heads=3, page_size=64)
    assert longest_first(jnp.asarray(case.seq_lens)).tolist() == [2, 0, 4, 1, 3]
    check(case, Tuning(splits=1), plgpu.InterpretGPUParams())


@pytest.mark.few("interpreted-40")
@pytest.mark.parametrize("power", [-70, 40])
def test_parts_hold_numbers_of_any_size(power: int, interpret: Any) -> None:
    """They leave in float16, each row under a factor of its own: what the rows are multiplied with, the output is, too."""
    case = latent_case([190], t=2, heads=3, page_size=64)
    plain, lse = run(case, Tuning(splits=2), interpret)
    factor = np.float32(2.0**power)
    pages = (case.k_pages.astype(np.float32) * factor).astype(case.k_pages.dtype)
    q = (case.q.astype(np.float32) / factor).astype(case.q.dtype)
    out, scaled_lse = run(dataclasses.replace(case, k_pages=pages, q=q), Tuning(splits=2), interpret)
    np.testing.assert_allclose(out.astype(np.float64) / factor, plain.astype(np.float64), rtol=2**-7, atol=1e-9)
    np.testing.assert_allclose(scaled_lse, lse, rtol=1e-6)


def test_nothing_unused_is_read(interpret: Any) -> None:
    build = functools.partial(latent_case, [0, 70], [2, 1], t=2, heads=3, causal=False, seed=3, page_size=64)
    clean = build(garbage=0.0)
    clean.page_table = np.where(clean.page_table % len(clean.k_pages) == clean.page_table, clean.page_table, 0)
    expected = run(clean, Tuning(splits=2), interpret)
    found = run(build(garbage=np.nan), Tuning(splits=2), interpret)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(found, expected, strict=True))


@pytest.mark.few
def test_longer_than_the_table() -> None:
    """The reference cuts such a sequence to its table, too; positions go on counting from its length."""
    case = latent_case([128], t=2, heads=2, page_size=64, width=2)
    case = dataclasses.replace(case, seq_lens=case.seq_lens + np.array([1], np.int32))
    out, lse = run(case, Tuning(splits=1), plgpu.InterpretGPUParams())
    q, pages, _, *rest = case.arrays()
    true, true_lse = mla_attention_reference(q, pages, *rest, **OPTIONS)
    np.testing.assert_allclose(out.astype(np.float32), np.asarray(true, np.float32), atol=0.01)
    np.testing.assert_allclose(lse, np.asarray(true_lse), atol=1e-4)


@pytest.mark.few
def test_limits(interpret: Any) -> None:
    """A part of a sequence's rows that is before the queries, and parts that end and begin among them; against the reference."""
    case = latent_case([70, 130], [3, 3], t=3, heads=3, page_size=64)
    q, pages, _, table, _, q_lens = case.arrays()
    stand, limits = jnp.array([200, 131]), (jnp.array([70, 128]), jnp.asarray(case.seq_lens))
    arrays = (q, pages, table, stand, q_lens)
    out, lse = call(*arrays, **OPTIONS, limits=limits, tuning=Tuning(splits=1), interpret=interpret)
    true, true_lse = mla_attention_reference(*arrays, **OPTIONS, limits=limits)
    np.testing.assert_allclose(out.astype(np.float32), np.asarray(true, np.float32), rtol=2**-7, atol=0.01)
    np.testing.assert_allclose(lse, np.asarray(true_lse), atol=1e-4)


def test_no_races(capfd: pytest.CaptureFixture[str]) -> None:
    """Among copies, loads and stores: what a matrix instruction reads, the interpreter does not watch."""
    case = latent_case([290], [2], t=2, heads=2, page_size=64)
    check(case, Tuning(splits=1), plgpu.InterpretGPUParams(detect_races=True))
    assert "race" not in capfd.readouterr().out.lower()


@pytest.mark.few
def test_lowers_for_an_h200() -> None:
    """With splits, so that both kernels are in it, and rows that fill no whole tiles."""
    q = jax.ShapeDtypeStruct((2, 3, 37, WIDTH), jnp.bfloat16)
    pages = jax.ShapeDtypeStruct((129, 1, 16, WIDTH), jnp.bfloat16)
    table, lens = jax.ShapeDtypeStruct((2, 64), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32)
    launch = call.trace(q, pages, table, lens, lens, **OPTIONS, tuning=Tuning(), interpret=None)
    with h200():
        text = launch.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == 2


def test_rows_of_two_tiles_are_dealt_alike() -> None:
    """Rows 16 to 63 of 80 are in both tiles, whose last tokens see 128 and 131 keys: parts begin where the other tile's do."""
    launch = plan(
        Tuning(splits=2, min_tiles=1), b=1, tokens=16, heads=5, page_size=64, table_width=4, quantized=False, causal=True,
        scale=1.0,
    )  # fmt: skip
    seq_lens, q_lens, order = (jnp.asarray([value], jnp.int32) for value in (131, 16, 0))
    table, sizes = jnp.zeros((1, 4), jnp.int32), {"b": 1, "wg": 1, "rows": 2, "split": 2}

    def begin(*_: Any) -> jax.Array:
        with interpreted():
            return Tiles(launch, None, None, table, seq_lens, q_lens, order, {}).begin

    for name, size in reversed(sizes.items()):
        begin = jax.vmap(begin, axis_name=name, axis_size=size, in_axes=None)
    assert begin(0)[0, 0].tolist() == [[0, 2], [0, 2]]


@pytest.mark.parametrize("splits", [3, 9])
def test_rows_are_merged_several_at_once(splits: int, monkeypatch: pytest.MonkeyPatch, interpret: Any) -> None:
    """As large batches are: each row of each half under its own factor, empty parts NaN, one row without any keys."""
    monkeypatch.setattr(merging, "RESIDENT", 1)
    assert merging.rows_at_once(2, splits, 12) == (2 if splits == 9 else 4)
    random = np.random.default_rng(splits)
    parts = random.normal(size=(2, splits, 16, RANK)).astype(np.float16)
    stats = random.normal(size=(2, splits, 3, 64)).astype(np.float32)
    stats[1, :, 0, 5] = stats[0, 1, 0] = -np.inf
    parts[0, 1], parts[1, :, 5], stats[0, 1, 1:] = np.nan, np.nan, np.nan
    out, lse = merging.combine_latent(jnp.asarray(parts), jnp.asarray(stats), 12, jnp.float16, interpret)
    logits = stats[:, :, 0, :12].astype(np.float64)
    total = np.exp(logits).sum(1)
    factors = (
        np.exp(logits)[..., None]
        * np.moveaxis(stats[:, :, 1:, :12], 2, 3)
        / np.where(total > 0, total, 1)[:, None, :, None]
    )
    wide = np.where(
        np.isfinite(logits)[..., None], np.repeat(factors, RANK // 2, -1) * parts[:, :, :12].astype(np.float64), 0
    )
    np.testing.assert_allclose(np.asarray(out, np.float64), wide.sum(1), atol=2e-3)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(np.asarray(lse), np.log(total), rtol=1e-5, atol=1e-6)


def planned(b: int, t: int, heads: int, length: int = 4096) -> Any:
    return plan(
        Tuning(),
        b=b,
        tokens=t,
        heads=heads,
        page_size=64,
        table_width=length // 64,
        quantized=False,
        causal=True,
        scale=1.0,
    )


def test_schedule() -> None:
    """One CTA for each of 132 multiprocessors, and no more parts than that takes."""
    assert [planned(128, 1, heads).splits for heads in (16, 128)] == [1, 1]
    assert planned(128, 1, 16).rows == 16
    assert [planned(2, 1, heads).rows for heads in (5, 111)] == [8, 112]
    assert planned(16, 16, 128).row_tiles == 32
    assert planned(8, 16, 16).splits * 8 * 4 <= 132
    assert planned(1, 1, 128, 32768).splits > 30
    assert planned(1, 1, 128).splits < 64
    assert best_splits(8, 64) == 1
    assert [planned(128, 1, heads).ordered for heads in (16, 128)] == [False, True]


@pytest.mark.parametrize(
    ("shape", "dtype", "changes", "reason"),
    [
        ({"head_dim": 320}, jnp.bfloat16, {"kv_lora_rank": 256}, r"takes rows of 512 \+ 64 entries, not 256 \+ 64"),
        ({"page_size": 5}, jnp.bfloat16, {}, "takes page sizes .*, not 5"),
        ({}, np.float32, {}, "takes bfloat16 or float16, .*, not q float32"),
        ({}, jnp.bfloat16, {"scale": -1.0}, "takes a positive scale"),
    ],
)
def test_refusals_name_their_reason(shape: dict[str, int], dtype: Any, changes: dict[str, Any], reason: str) -> None:
    options: dict[str, Any] = {"kv_heads": 1, "head_dim": WIDTH} | shape
    q, pages, _, *rest = make_case([4], t=1, dtype=dtype, **options).arrays()
    with pytest.raises(NotImplementedError, match=reason):
        tuned(q, pages, *rest, **OPTIONS | changes)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="for machines without a Hopper GPU")
def test_other_devices_are_refused_and_served_by_xla() -> None:
    case = latent_case([20], t=2, heads=2)
    q, pages, _, table, lens, _ = case.arrays()
    options = {name: value for name, value in OPTIONS.items() if name != "causal"}
    with pytest.raises(NoImplementationError, match=r"mosaic_gpu: needs a Hopper GPU \(compute capability 9\.0\)"):
        mla_attention(q, pages, table, lens, **options, implementation="mosaic_gpu")
    out = mla_attention(q, pages, table, lens, **options)
    np.testing.assert_allclose(np.asarray(out, np.float64), true_values(case)[0], atol=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("b", "t", "heads", "page_size"),
    [(1, 1, 128, 64), (8, 16, 16, 16), (64, 1, 16, 64), (9, 3, 37, 64), (64, 2, 128, 64)],
)
def test_full_size(b: int, t: int, heads: int, page_size: int) -> None:
    """Through the public function, ragged lengths up to 2048 rows, inputs and limits as FlashMLA tests them."""
    keys = jax.random.split(jax.random.key(b + t), 3)
    width = 2048 // page_size
    q = jax.random.normal(keys[0], (b, t, heads, WIDTH), jnp.bfloat16) / 10
    pages = jax.random.normal(keys[1], (b * width + 1, 1, page_size, WIDTH), jnp.bfloat16) / 10
    table = jax.random.permutation(keys[2], b * width).reshape(b, width).astype(jnp.int32)
    lens = (jnp.arange(b, dtype=jnp.int32) * 331 + 2048) % 2049
    live = jnp.minimum(jnp.arange(b, dtype=jnp.int32) % 3 + max(t - 2, 1), t)
    ours, again, exact = (
        mla_attention(
            q.astype(dtype), pages.astype(dtype), table, lens, q_lens=live, kv_lora_rank=RANK, scale=0.07, return_lse=True,
            implementation=name,
        )
        for name, dtype in (("mosaic_gpu", q.dtype), ("mosaic_gpu", q.dtype), ("xla", jnp.float32))
    )  # fmt: skip
    assert all((a == b).all() for a, b in zip(ours, again, strict=True))
    out, true = (np.asarray(x[0], np.float64) for x in (ours, exact))
    np.testing.assert_allclose(out, true, atol=8e-4)
    assert 1 - 2 * (out * true).sum() / ((out**2).sum() + (true**2).sum()) < 5e-6
    lse, true = np.asarray(ours[1]), np.asarray(exact[1])
    np.testing.assert_array_equal(np.isfinite(lse), np.isfinite(true))
    np.testing.assert_allclose(lse[np.isfinite(true)], true[np.isfinite(true)], rtol=2e-6, atol=1e-6)
