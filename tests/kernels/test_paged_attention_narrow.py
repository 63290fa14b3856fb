"""The Hopper kernel for pages of one byte an element: interpreted, lowered for an H200, and for real (`-m gpu`)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import paged_attention
from dflash_kernels.attention.paged.launch import Tuning, plan_narrow
from dflash_kernels.core.device import HALF_SHARED_MEMORY
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..devices import h200
from .attention_oracle import make_case
from .test_paged_attention_mosaic import MASK, SINKS, SLOPES, call, check, interpret, run

__all__ = ["interpret"]
FP8, INT8 = jnp.float8_e4m3fn, np.int8

# Stored as, T, group, page size, head dim, sequence lengths, query lengths, mask, tuning.
CASES = {
    "q1": (FP8, 1, 4, 64, 128, [70, 0, 1], None, {}, Tuning(splits=1)),
    "q16-row-blocks": (FP8, 17, 4, 32, 64, [90], [17], {}, Tuning(splits=2)),
    "window": (FP8, 3, 5, 32, 192, [290, 70], [3, 1], {"window": (70, 0), "sinks": SINKS[:10]}, Tuning(splits=1)),
    "left": (FP8, 3, 2, 64, 64, [150, 70], [3, 2], {"causal": False, "window": (40, None)}, Tuning(splits=1)),
    "everything": (FP8, 4, 3, 64, 128, [150, 0], [4, 4], {"causal": False, "sinks": SINKS[:6]}, Tuning(splits=2)),
    "cap-alibi": (FP8, 2, 2, 8, 64, [90, 3], [2, 2], {"soft_cap": 1.5, "alibi_slopes": SLOPES}, Tuning()),
    "int8": (INT8, 4, 4, 64, 128, [150, 64, 0, 1], None, {}, Tuning(splits=2, merge="xla")),
    "int8-full": (INT8, 11, 3, 128, 64, [150], [11], {"causal": False, "window": (90, 3)}, Tuning(splits=1)),
    "int8-wide": (INT8, 2, 2, 32, 256, [90], None, {"alibi_slopes": SLOPES, "alibi_sqrt": True}, Tuning()),
}


# One format takes minutes enough where it is interpreted.
ONCE_INTERPRETED = [
    pytest.param(FP8, "interpreted", id="interpreted-fp8"),
    *(
        pytest.param(stored, "gpu", id=f"gpu-{name}", marks=pytest.mark.gpu)
        for name, stored in (("fp8", FP8), ("int8", INT8))
    ),
]


def case_of(name: str):
    stored, t, group, page_size, head_dim, seq_lens, q_lens, mask, tuning = CASES[name]
    shape = {"t": t, "group": group, "page_size": page_size, "head_dim": head_dim, "dtype": jnp.bfloat16}
    return make_case(seq_lens, q_lens, kv_heads=2, stored=stored, **shape, **mask), tuning


@pytest.mark.few("interpreted-int8-full")
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_float64(name: str, interpret: Any) -> None:
    check(*case_of(name), interpret)


@pytest.mark.few("interpreted-left")
@pytest.mark.parametrize("name", [name for name in CASES if "alibi" not in name and name != "int8-wide"])
def test_rows_of_their_own_agree_with_float64(name: str, interpret: Any) -> None:
    """`batch_invariant`: splits that take turns, offsets and units of each row."""
    check(*case_of(name), interpret, batch_invariant=True)


@pytest.mark.parametrize("name", ["cap-alibi", "int8-wide"])
def test_rows_of_their_own_have_no_cap_or_alibi(name: str) -> None:
    with pytest.raises(NotImplementedError, match="batch_invariant over pages of one byte without a soft cap"):
        check(*case_of(name), plgpu.InterpretGPUParams(), batch_invariant=True)


@pytest.mark.parametrize(("stored", "interpret"), ONCE_INTERPRETED, indirect=["interpret"])
def test_float16_queries(stored: Any, interpret: Any) -> None:
    """Ten bits of fraction in queries and outputs, three more than bfloat16 has."""
    shape = {
        "t": 5,
        "group": 3,
        "page_size": 64,
        "head_dim": 128,
        "kv_heads": 1,
        "stored": stored,
        "dtype": jnp.float16,
    }
    check(make_case([100, 5], [5, 2], **shape), Tuning(splits=2), interpret)


@pytest.mark.few
@pytest.mark.parametrize(("stored", "interpret"), ONCE_INTERPRETED, indirect=["interpret"])
def test_scores_that_rise_and_fall(stored: Any, interpret: Any) -> None:
    """Scores of tile after tile differ by thousands, so that the base has to follow, and what came before has to vanish; for each
    row by itself, too."""
    case = make_case([256, 130], t=2, group=2, page_size=64, head_dim=64, stored=stored, dtype=jnp.bfloat16, scale=4.0)
    for page in range(len(case.k_pages)):
        case.k_pages[page] = (case.k_pages[page].astype(np.float32) * (0.1, 1, 0.4)[page % 3]).astype(stored)
    for alone in (False, True):
        check(case, Tuning(splits=1), interpret, batch_invariant=alone)


@pytest.mark.parametrize(("stored", "interpret"), ONCE_INTERPRETED, indirect=["interpret"])
def test_nothing_unused_is_read(stored: Any, interpret: Any) -> None:
    results = [
        run(
            make_case([33, 0, 7, 64], [6, 6, 2, 0], t=6, page_size=32, dtype=jnp.bfloat16, stored=stored, garbage=garbage),
            Tuning(splits=1), interpret,
        )
        for garbage in (0.0, np.nan, -np.inf)
    ]  # fmt: skip
    assert np.isfinite(results[0][0].astype(np.float32)).all()
    for found in results[1:]:
        assert all(a.tobytes() == b.tobytes() for a, b in zip(found, results[0], strict=True))


@pytest.mark.parametrize(
    ("length", "interpret"),
    [(65, "interpreted"), *(pytest.param(length, "gpu", marks=pytest.mark.gpu) for length in (1, 65))],
    indirect=["interpret"],
)
def test_every_float8_value_is_exact(length: int, interpret: Any) -> None:
    """Each finite one as a key and as a value, the subnormals and zeros too: all keys are the same, so the output is the value."""
    bits = np.arange(256, dtype=np.uint8)
    values = np.where((bits & 0x7F) == 0x7F, 0, bits).astype(np.uint8).view(FP8).reshape(4, 64)
    case = make_case([length] * 4, t=1, kv_heads=1, group=1, page_size=64, head_dim=64, dtype=jnp.bfloat16, stored=FP8)
    for row in range(4):
        for at in range(length):
            page = case.page_table[row, at // 64]
            case.k_pages[page, 0, at % 64] = case.v_pages[page, 0, at % 64] = values[row]
    case.options |= {"k_scale": np.ones(1, np.float32), "v_scale": np.ones(1, np.float32)}
    out, lse = run(case, Tuning(splits=1), interpret)
    np.testing.assert_array_equal(out[:, 0, 0].astype(np.float32), values.astype(np.float32))
    true = (case.q[:, 0, 0].astype(np.float64) * values.astype(np.float64)).sum(axis=1) * case.scale + np.log(length)
    np.testing.assert_allclose(lse[:, 0, 0], true, rtol=1e-5, atol=1e-5)


@pytest.mark.few
@pytest.mark.parametrize("stored", [pytest.param(FP8, id="fp8"), pytest.param(INT8, id="int8")])
def test_queries_of_any_size(stored: Any, interpret: Any) -> None:
    """Far outside of float16's range; what one row holds harms no other. Keys of int8 meet all rows in the largest one's unit."""
    case = make_case([100], t=4, kv_heads=1, group=2, page_size=64, head_dim=64, dtype=jnp.bfloat16, stored=stored)
    sizes = 2.0 ** np.array([[40, 0], [20, -60], [43, 39], [-120, 41]])
    case.q *= sizes[None, :, :, None].astype(jnp.bfloat16)
    case.options["scale"] = 2.0**-43
    check(case, Tuning(splits=1), interpret)
    expected, _ = run(case, Tuning(splits=1), interpret)
    case.q[0, 1, 1] = np.inf
    case.q[0, 2, 0] = np.nan
    found, _ = run(case, Tuning(splits=1), interpret)
    spared = np.array([[1, 1], [1, 0], [0, 1], [1, 1]], bool)
    found, expected = (each[0].astype(np.float32) for each in (found, expected))
    apart = 0 if stored == FP8 else 2**-8 * np.abs(expected).max()
    np.testing.assert_allclose(found[spared], expected[spared], rtol=0, atol=apart)
    assert np.isnan(found[~spared]).all()
    alone, _ = run(case, Tuning(splits=1), interpret, batch_invariant=True)
    alone = alone[0].astype(np.float32)
    assert np.isnan(alone[~spared]).all()
    case.q[~np.isfinite(case.q)] = 0
    theirs, _ = run(case, Tuning(splits=1), interpret, batch_invariant=True)
    assert (alone[spared] == theirs[0].astype(np.float32)[spared]).all()


@pytest.mark.few
@pytest.mark.parametrize(
    ("stored", "t", "head_dim", "page_size", "dtype"),
    [(FP8, 12, 192, 8, jnp.bfloat16), (INT8, 33, 64, 128, jnp.float16)],
)
def test_lowers_for_an_h200_with_every_option(stored: Any, t: int, head_dim: int, page_size: int, dtype: Any) -> None:
    shape = jax.ShapeDtypeStruct
    q, pages = shape((2, t, 8, head_dim), dtype), shape((9, 2, page_size, head_dim), stored)
    table, lens = shape((2, 4), jnp.int32), shape((2,), jnp.int32)
    k_scale, v_scale = ((9, 2, page_size), (2, head_dim)) if stored == jnp.int8 else ((2,), (2,))
    given = {"sinks": shape((8,), jnp.float32), "alibi_slopes": shape((8,), jnp.float32)}
    given |= {"k_scale": shape(k_scale, jnp.float32), "v_scale": shape(v_scale, jnp.float32)}
    mask: dict[str, Any] = {"causal": False, "window": (70, 3), "soft_cap": 30.0, "scale": 0.1, "alibi_sqrt": t == 1}
    how: Any = {"tuning": Tuning(splits=2), "interpret": None}
    with h200():
        traced = call.trace(q, pages, pages, table, lens, lens, **given, **mask, **how)
        assert "@mosaic_gpu_v2" in traced.lower(lowering_platforms=("cuda",)).as_text()
        given, mask = {**given, "alibi_slopes": None}, mask | {"soft_cap": None, "batch_invariant": True}
        traced = call.trace(q, pages, pages, table, lens, lens, **given, **mask, **how)
        assert "@mosaic_gpu_v2" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_schedule() -> None:
    shape = {"group": 4, "head_dim": 128, "page_size": 64, "kv_heads": 8, "table_width": 64, "has_sinks": False}
    for b, t in ((64, 1), (64, 16), (8, 16), (1, 1)):
        launch = plan_narrow(Tuning(), b=b, tokens=t, **shape, **MASK)
        used = launch.rows * (128 * 2 + 64 * 2) + launch.stages * 64 * (128 * 2 + 4) + 1024
        assert used <= HALF_SHARED_MEMORY
        assert launch.stages >= 4
        assert launch.direct == (b == 64)
        assert launch.evict_first
    assert plan_narrow(Tuning(), b=1, tokens=40, **shape, **MASK).row_blocks == 3
    assert plan_narrow(Tuning(), b=1, tokens=16, **shape | {"head_dim": 256}, **MASK).rows == 32


@pytest.mark.gpu
@pytest.mark.parametrize("stored", [jnp.float8_e4m3fn, jnp.int8])
@pytest.mark.parametrize("t", [1, 16])
@pytest.mark.parametrize("b", [1, 64])
def test_full_size_agrees_with_xla(b: int, t: int, stored: Any) -> None:
    """Through the public function, ragged lengths up to 2048 keys in the shapes of Qwen3-8B."""
    keys = jax.random.split(jax.random.key(b + t), 6)
    q = jax.random.normal(keys[0], (b, t, 32, 128), jnp.bfloat16)
    pools = [jax.random.normal(key, (b * 32 + 1, 8, 64, 128), jnp.bfloat16) for key in keys[1:3]]
    k, v = ((pool * 30 if stored == jnp.int8 else pool).astype(stored) for pool in pools)
    k_scale, v_scale = jnp.linspace(0.9, 1.2, 8), jnp.linspace(0.5, 2, 8)
    if stored == jnp.int8:
        k_scale = jax.random.uniform(keys[4], k.shape[:3], minval=0.02, maxval=0.04)
        v_scale = jax.random.uniform(keys[5], (8, 128), minval=0.02, maxval=0.04)
    table = jax.random.permutation(keys[3], b * 32).reshape(b, 32).astype(jnp.int32)
    lens = (jnp.arange(b, dtype=jnp.int32) * 331 + 2048) % 2049
    ours, theirs = (
        paged_attention(q, k, v, table, lens, k_scale=k_scale, v_scale=v_scale, return_lse=True, implementation=name)
        for name in ("mosaic_gpu", "xla")
    )
    live = np.isfinite(np.asarray(theirs[1]))
    np.testing.assert_allclose(np.asarray(ours[1])[live], np.asarray(theirs[1])[live], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(np.asarray(ours[0], np.float32), np.asarray(theirs[0], np.float32), atol=0.03)


def test_no_races(capfd: pytest.CaptureFixture[str]) -> None:
    """Among copies, loads and stores: what a matrix instruction reads, the interpreter does not watch."""
    case = make_case([200, 5], t=2, page_size=32, stored=INT8, dtype=jnp.bfloat16)
    check(case, Tuning(splits=1, stages=2), plgpu.InterpretGPUParams(detect_races=True))
    assert "race" not in capfd.readouterr().out.lower()
