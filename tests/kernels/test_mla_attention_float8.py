"""The Hopper kernels of latent attention over float8 rows, few query rows and many, and scores that rise."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import mla_attention
from dflash_kernels.attention.mla.launch import NARROW_ROWS, Tuning

from .attention_oracle import Case
from .test_mla_attention_mosaic import RANK, WIDTH, call, h200, interpret, latent_case, run, true_values

__all__ = ["interpret"]
SCALE = 1 / 8


def quantized(case: Case) -> tuple[Case, Case]:
    """The same rows as e4m3 numbers, and as what those stand for under `SCALE`; garbage stays NaN."""
    stored = (jnp.asarray(case.k_pages, jnp.float32) / SCALE).astype(jnp.float8_e4m3fn)
    options = case.options | {"latent_scale": jnp.float32(SCALE)}
    exact = np.asarray(stored, np.float32) * SCALE
    return dataclasses.replace(case, k_pages=stored, options=options), dataclasses.replace(case, k_pages=exact)


def check(case: Case, tuning: Tuning, interpret: Any) -> None:
    """Widened exactly: as near to float64 of the numbers that the pages stand for as with 16-bit rows."""
    stored, exact = quantized(case)
    (out, lse), (true_out, true_lse) = run(stored, tuning, interpret), true_values(exact)
    np.testing.assert_allclose(out.astype(np.float64), true_out, rtol=0, atol=2**-8 * max(np.abs(true_out).max(), 1))
    np.testing.assert_allclose(lse, true_lse, rtol=1e-5, atol=1e-3)
    assert (out[~np.isfinite(true_lse)] == 0).all()


# Sequence lengths, query lengths, T, heads, page size, causal, parts. Up to 16 rows are the narrow kernel's.
CASES = {
    "one-head": ([70, 0, 1], None, 1, 1, 64, True, 1),
    "rows-past-the-live": ([390, 3], [2, 2], 2, 3, 32, True, 2),
    "full": ([0, 70, 130], [2, 1, 2], 2, 5, 128, False, 1),
    "empty-parts": ([200], None, 1, 16, 16, True, 3),
    "many-rows": ([150, 3], [2, 1], 2, 9, 64, True, 2),
}


@pytest.mark.few("interpreted-rows-past-the-live")
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_float64(name: str, interpret: Any) -> None:
    seq_lens, q_lens, t, heads, page_size, causal, splits = CASES[name]
    case = latent_case(seq_lens, q_lens, t=t, heads=heads, page_size=page_size, causal=causal)
    assert (t * heads <= NARROW_ROWS) == (name != "many-rows")
    check(case, Tuning(splits=splits), interpret)


@pytest.mark.few("interpreted-few rows")
@pytest.mark.parametrize("heads", [2, 9], ids=["few rows", "many rows"])
def test_scores_that_rise_and_fall(heads: int, interpret: Any) -> None:
    """From tile to tile by far more than weights are allowed to grow, so that the base follows and what came before vanishes."""
    case = latent_case([256, 130], t=2, heads=heads, page_size=64)
    case = dataclasses.replace(case, k_pages=np.array(case.k_pages))
    for page in range(len(case.k_pages)):
        case.k_pages[page] = (case.k_pages[page].astype(np.float32) * (0.1, 3, 0.4)[page % 3]).astype(
            case.k_pages.dtype
        )
    check(case, Tuning(splits=1), interpret)


@pytest.mark.few("interpreted-few rows")
@pytest.mark.parametrize("heads", [3, 9], ids=["few rows", "many rows"])
def test_nothing_unused_is_read(heads: int, interpret: Any) -> None:
    found = []
    for garbage in (0.0, np.nan):
        case = latent_case([0, 70], [2, 1], t=2, heads=heads, causal=False, seed=3, page_size=64, garbage=garbage)
        if garbage == 0:
            inside = case.page_table % len(case.k_pages) == case.page_table
            case.page_table = np.where(inside, case.page_table, 0)
        found.append(run(quantized(case)[0], Tuning(splits=2), interpret))
    assert all(a.tobytes() == b.tobytes() for a, b in zip(*found, strict=True))


@pytest.mark.few
def test_lowers_for_an_h200() -> None:
    """Few rows: the kernel that widens in registers, and the one that puts parts together."""
    q = jax.ShapeDtypeStruct((2, 3, 5, WIDTH), jnp.bfloat16)
    pages = jax.ShapeDtypeStruct((129, 1, 16, WIDTH), jnp.float8_e4m3fn)
    table, lens = jax.ShapeDtypeStruct((2, 64), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32)
    options = {"kv_lora_rank": RANK, "scale": 0.06, "causal": True, "latent_scale": jnp.float32(1)}
    launch = call.trace(q, pages, table, lens, lens, **options, tuning=Tuning(splits=2), interpret=None)
    with h200():
        text = launch.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == 2


@pytest.mark.gpu
@pytest.mark.parametrize(("b", "t", "heads"), [(128, 1, 16), (3, 2, 8), (8, 1, 128), (5, 16, 16)])
def test_full_size(b: int, t: int, heads: int) -> None:
    """Ragged lengths up to 2048 rows, inputs and limits as FlashMLA tests them, against the definition on the same numbers."""
    keys, width, scale = jax.random.split(jax.random.key(b + t), 3), 2048 // 64, jnp.float32(1 / 512)
    q = jax.random.normal(keys[0], (b, t, heads, WIDTH), jnp.bfloat16) / 10
    pages = (jax.random.normal(keys[1], (b * width + 1, 1, 64, WIDTH)) / 10 / scale).astype(jnp.float8_e4m3fn)
    table = jax.random.permutation(keys[2], b * width).reshape(b, width).astype(jnp.int32)
    lens = (jnp.arange(b, dtype=jnp.int32) * 331 + 2048) % 2049
    options = {"kv_lora_rank": RANK, "scale": 0.07, "return_lse": True}
    ours, again = (
        mla_attention(q, pages, table, lens, **options, latent_scale=scale, implementation="mosaic_gpu")
        for _ in range(2)
    )
    exact = mla_attention(
        q.astype(jnp.float32), pages.astype(jnp.float32) * scale, table, lens, **options, implementation="xla"
    )
    assert all((a == b).all() for a, b in zip(ours, again, strict=True))
    out, true = (np.asarray(x[0], np.float64) for x in (ours, exact))
    np.testing.assert_allclose(out, true, atol=8e-4)
    assert 1 - 2 * (out * true).sum() / ((out**2).sum() + (true**2).sum()) < 5e-6
    lse, true = np.asarray(ours[1]), np.asarray(exact[1])
    np.testing.assert_array_equal(np.isfinite(lse), np.isfinite(true))
    np.testing.assert_allclose(lse[np.isfinite(true)], true[np.isfinite(true)], rtol=1e-5, atol=1e-4)
