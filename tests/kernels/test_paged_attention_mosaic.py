"""The Hopper kernel of paged attention: in Pallas's interpreter, lowered for an H200, and for real (`-m gpu`)."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import NoImplementationError, paged_attention
from dflash_kernels.attention.paged.launch import Tuning, plan
from dflash_kernels.attention.paged.mosaic_gpu import tuned
from dflash_kernels.attention.paged.reference import paged_attention_reference
from dflash_kernels.attention.split_kv import best_splits
from dflash_kernels.core.device import HALF_SHARED_MEMORY
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..devices import h200
from .attention_oracle import Case, make_case, oracle

SINKS = np.linspace(-1.5, 2.5, 16, dtype=np.float32)
SLOPES = (2.0 ** -np.linspace(0.5, 8, 4)).astype(np.float32)
MASK = {"causal": True, "window": (None, None), "soft_cap": None, "scale": 0.1}


@pytest.fixture(params=["interpreted", pytest.param("gpu", marks=pytest.mark.gpu)])
def interpret(request: pytest.FixtureRequest) -> Any:
    return plgpu.InterpretGPUParams() if request.param == "interpreted" else None


STATIC = ("causal", "window", "soft_cap", "scale", "alibi_sqrt", "batch_invariant", "tuning", "interpret")


@functools.partial(jax.jit, static_argnames=STATIC)
def call(*arrays, sinks=None, **options):
    return tuned(*arrays, sinks=sinks, **options)


def run(case: Case, tuning: Tuning, interpret: Any, **more: Any) -> tuple[np.ndarray, np.ndarray]:
    options = MASK | case.options | {"scale": case.scale} | more
    options["window"] = options["window"] or (None, None)
    out, lse = call(*case.arrays(), **options, tuning=tuning, interpret=interpret)
    assert out.dtype == case.q.dtype
    assert lse.dtype == jnp.float32
    return np.asarray(out), np.asarray(lse)


def check(case: Case, tunings: Tuning | Sequence[Tuning], interpret: Any, **more: Any) -> None:
    """Against float64: the output is rounded once to its dtype, and so are the weights that multiply the values."""
    true_out, true_lse = oracle(case)
    eps = float(jnp.finfo(case.q.dtype).eps)
    # int8 keys meet queries of two bytes a number; a GPU's exponentials are approximate.
    near = 1e-4 if interpret is None else 3e-5 if case.k_pages.dtype == np.int8 else 1e-5
    for tuning in [tunings] if isinstance(tunings, Tuning) else tunings:
        out, lse = run(case, tuning, interpret, **more)
        np.testing.assert_allclose(out.astype(np.float64), true_out, rtol=0, atol=eps * max(np.abs(true_out).max(), 1))
        np.testing.assert_allclose(lse, true_lse, rtol=near, atol=near)
        assert (out[~np.isfinite(true_lse)] == 0).all()


# T, group, page size, head dim, sequence lengths, query lengths, mask, tuning. Idle rows, short rows and rows before the sequence.
CASES = {
    "q1": (1, 4, 64, 128, [150, 64, 0, 1], None, {}, Tuning(splits=1)),
    "q1-split": (1, 4, 64, 128, [330, 64, 0, 1], None, {}, Tuning(splits=5)),
    "q16-direct": (16, 4, 64, 128, [190, 70, 5, 0], [16, 3, 16, 16], {}, Tuning(splits=1)),
    "q16-split": (16, 4, 64, 128, [330, 70, 5, 0], [16, 0, 16, 16], {}, Tuning(splits=2)),
    "q16-apart": (16, 4, 64, 64, [230, 70, 0], [16, 3, 16], {}, Tuning(splits=2, together=False)),
    "q4-cluster": (4, 4, 64, 128, [330, 70, 0], None, {}, Tuning(splits=4, together=True)),
    "q16-full": (16, 4, 64, 128, [330, 64, 5, 0], [16, 3, 16, 16], {"causal": False}, Tuning(splits=2)),
    "page16": (4, 1, 16, 64, [150, 17], [4, 2], {}, Tuning(splits=2, merge="xla")),
    "page32": (3, 8, 32, 64, [150, 96], [3, 2], {"causal": False}, Tuning(splits=2)),
    "page128": (3, 5, 128, 128, [150, 129], None, {}, Tuning(splits=2, min_tiles=2)),
    "keys128": (5, 4, 64, 128, [290, 100], None, {}, Tuning(splits=2, keys=128)),
    "two-warpgroups": (17, 5, 64, 64, [230, 21], [17, 9], {}, Tuning(splits=1)),
    "two-warpgroups-whole": (17, 8, 64, 64, [200, 130], [17, 9], {"causal": False}, Tuning(splits=1)),
    "two-warpgroups-split": (16, 8, 64, 128, [230, 21], [16, 9], {}, Tuning(splits=3)),
    "row-blocks": (40, 4, 64, 64, [150, 21], [40, 9], {}, Tuning(splits=2)),
    "window": (8, 2, 16, 128, [290, 70], [8, 3], {"window": (70, 0)}, Tuning(splits=2)),
    "window-both": (8, 2, 64, 64, [290, 3], [8, 3], {"causal": False, "window": (9, 3)}, Tuning(splits=1)),
    "window-right": (8, 2, 64, 64, [90, 3], None, {"causal": False, "window": (None, 2)}, Tuning(splits=2)),
    "cap-sinks": (4, 4, 64, 128, [150, 2, 0], [4, 4, 2], {"soft_cap": 1.5, "sinks": SINKS[:8]}, Tuning(splits=2)),
    "sinks-one-part": (2, 4, 64, 64, [90, 1], [2, 2], {"sinks": SINKS[:8], "scale": 0.25}, Tuning(splits=1)),
    "head72": (5, 2, 16, 72, [150, 20], [5, 3], {}, Tuning(splits=2)),
    "head72-direct": (2, 8, 64, 72, [90], None, {"causal": False}, Tuning(splits=1)),
    "head96": (3, 3, 64, 96, [150, 2], None, {}, Tuning(splits=2)),
    "chosen": (4, 4, 64, 128, [150, 70], None, {}, Tuning()),
    "alibi": (4, 2, 64, 64, [150, 2, 0], [4, 4, 2], {"alibi_slopes": SLOPES}, Tuning(splits=2)),
    "alibi-sqrt": (
        3, 2, 16, 64, [90, 2], None, {"causal": False, "soft_cap": 2.0, "alibi_slopes": SLOPES, "alibi_sqrt": True},
        Tuning(splits=1),
    ),
}  # fmt: skip


@pytest.mark.few(
    "interpreted-two-warpgroups-split", "interpreted-window-both", "interpreted-q4-cluster", "interpreted-chosen"
)
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_float64(name: str, interpret: Any) -> None:
    t, group, page_size, head_dim, seq_lens, q_lens, mask, tuning = CASES[name]
    dtype = jnp.float16 if name in ("page32", "window") else jnp.bfloat16
    shape = {"t": t, "group": group, "page_size": page_size, "head_dim": head_dim, "dtype": dtype}
    check(make_case(seq_lens, q_lens, kv_heads=2, **shape, **mask), tuning, interpret)


@pytest.mark.few("interpreted-2")
@pytest.mark.parametrize("splits", [1, 2])
def test_nothing_unused_is_read(splits: int, interpret: Any) -> None:
    build = functools.partial(make_case, [33, 0, 7, 64], [6, 6, 2, 0], t=6, dtype=jnp.bfloat16, causal=False, seed=3)
    clean = build(garbage=0.0)
    clean.page_table = np.where(clean.page_table % len(clean.k_pages) == clean.page_table, clean.page_table, 0)
    expected = run(clean, Tuning(splits=splits), interpret)
    for garbage in (np.nan, np.inf, -np.inf):
        found = run(build(garbage=garbage), Tuning(splits=splits), interpret)
        assert all(a.tobytes() == b.tobytes() for a, b in zip(found, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("sinks", [None, SINKS[:8]], ids=["plain", "sinks"])
@pytest.mark.parametrize("splits", [1, 2, 3, 7, 8, 13, 32])
def test_any_number_of_parts(splits: int, sinks: np.ndarray | None) -> None:
    """Of sequences that fill all parts, some and none; a sink counts once."""
    case = make_case(
        [2100, 640, 64, 3, 0], t=4, kv_heads=2, group=4, head_dim=64, page_size=64, dtype=jnp.bfloat16, sinks=sinks
    )
    check(case, Tuning(splits=splits), None)


@pytest.mark.gpu
@pytest.mark.parametrize("merge", ["kernel", "xla"])
@pytest.mark.parametrize(("t", "group", "head_dim"), [(3, 3, 96), (16, 8, 128), (17, 5, 64), (40, 4, 128), (9, 1, 192)])
def test_parts_of_any_number_of_rows(t: int, group: int, head_dim: int, merge: str) -> None:
    """Of one warpgroup or two, of some CTAs, and such as end within eight rows."""
    shape = {"t": t, "group": group, "head_dim": head_dim, "page_size": 64, "dtype": jnp.bfloat16}
    check(make_case([900, 130, 0], [t, 2, t], kv_heads=2, **shape), Tuning(splits=9, merge=merge), None)


@pytest.mark.few
def test_longer_than_the_table() -> None:
    """The reference cuts such a sequence to its table, too; positions go on counting from its length."""
    case = make_case([128, 64], t=4, page_size=64, dtype=jnp.bfloat16, width=2)
    case = dataclasses.replace(case, seq_lens=case.seq_lens + np.array([2, 0], np.int32))
    out, lse = run(case, Tuning(splits=2), plgpu.InterpretGPUParams())
    true, true_lse = paged_attention_reference(*case.arrays(), sinks=None, **MASK | {"scale": case.scale})
    np.testing.assert_allclose(out.astype(np.float32), np.asarray(true, np.float32), atol=0.01)
    np.testing.assert_allclose(lse, np.asarray(true_lse), atol=1e-4)


def test_no_races(capfd: pytest.CaptureFixture[str]) -> None:
    """Among copies, loads and stores: what a matrix instruction reads, the interpreter does not watch."""
    case = make_case([330, 70], [4, 2], t=4, group=4, head_dim=64, page_size=32, dtype=jnp.bfloat16)
    check(case, Tuning(splits=2, stages=2), plgpu.InterpretGPUParams(detect_races=True))
    assert "race" not in capfd.readouterr().out.lower()


@pytest.mark.few
@pytest.mark.parametrize("t", [1, 16])
@pytest.mark.parametrize("b", [1, 8, 64])
def test_lowers_for_an_h200(b: int, t: int) -> None:
    q = jax.ShapeDtypeStruct((b, t, 32, 128), jnp.bfloat16)
    pages = jax.ShapeDtypeStruct((b * 64 + 1, 8, 64, 128), jnp.bfloat16)
    table, lens = jax.ShapeDtypeStruct((b, 64), jnp.int32), jax.ShapeDtypeStruct((b,), jnp.int32)
    launch = call.trace(q, pages, pages, table, lens, lens, **MASK, tuning=Tuning(), interpret=None)
    with h200():
        text = launch.lower(lowering_platforms=("cuda",)).as_text()
    # Many parts are put together by a second kernel, few by XLA.
    assert text.count("@mosaic_gpu_v2") == (2 if b == 1 else 1)


@pytest.mark.few("256-64")
@pytest.mark.parametrize(
    ("head_dim", "page_size"), [(64, 8), (72, 16), (80, 16), (96, 32), (128, 64), (192, 128), (256, 64)]
)
def test_every_head_dim_lowers_with_every_option(head_dim: int, page_size: int) -> None:
    q = jax.ShapeDtypeStruct((2, 33, 4, head_dim), jnp.float16)
    pages = jax.ShapeDtypeStruct((9, 2, page_size, head_dim), jnp.float16)
    table, lens = jax.ShapeDtypeStruct((2, 4), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32)
    sinks = jax.ShapeDtypeStruct((4,), jnp.float32)
    mask = {"causal": False, "window": (70, 3), "soft_cap": 30.0, "scale": 0.1}
    with h200():
        traced = call.trace(q, pages, pages, table, lens, lens, sinks=sinks, **mask, tuning=Tuning(), interpret=None)
        assert "@mosaic_gpu_v2" in traced.lower(lowering_platforms=("cuda",)).as_text()


def planned(b: int, t: int, tuning: Tuning | None = None, **changes: Any) -> Any:
    shape = {"group": 4, "head_dim": 128, "page_size": 64, "kv_heads": 8, "table_width": 64, "has_sinks": False}
    return plan(tuning or Tuning(), b=b, tokens=t, **shape | MASK | changes)


def test_schedule() -> None:
    """As many CTAs on each of 132 multiprocessors, and no more parts than that takes."""
    for t in (1, 16):
        assert [planned(b, t).splits for b in (64, 8, 1)] == [1, 2, 16]
        assert planned(64, t).direct
        assert [planned(b, t).evict_first for b in (64, 8, 1)] == [False, True, True]
        launch = planned(8, t)
        shared = 64 * 128 * (2 + 4) + launch.stages * launch.keys * 128 * 4
        assert shared + 512 <= HALF_SHARED_MEMORY
        assert launch.stages >= 2
    assert planned(1, 1, table_width=512).splits == 16
    # Two large parts are put together by their own CTAs.
    assert [planned(8, t).together for t in (1, 16)] == [False, True]
    assert not planned(8, 16, Tuning(together=False)).together
    assert planned(64, 16, has_sinks=True).direct
    # A short window is not worth a second launch, a longer one is.
    near, far = (planned(1, 16, window=(reach, 0), has_sinks=True) for reach in (127, 1023))
    assert (near.splits, near.direct, far.direct) == (1, True, False)
    # Tokens of 960 bytes do not start where a copy may.
    assert not planned(64, 2, group=6, head_dim=80).direct
    assert planned(64, 2, group=4, head_dim=80).direct
    assert planned(8, 32).warpgroups == 2
    assert planned(8, 1024).row_blocks == 32
    assert best_splits(8, 264, 64, 64, 4) == 1


@pytest.mark.parametrize(
    ("shape", "dtype", "changes", "reason"),
    [
        ({"head_dim": 88}, jnp.bfloat16, {}, "takes head dims .*, not 88"),
        ({"stored": jnp.int8}, np.float32, {}, "pages of one byte, both alike, with queries of two, not q float32"),
        ({"stored": jnp.float8_e4m3fn, "head_dim": 80}, jnp.bfloat16, {}, "pages of one byte, not 80"),
        ({"stored": jnp.int8}, jnp.bfloat16, {}, "int8 pages of 32 tokens and more, not 16"),
        ({"page_size": 5}, jnp.bfloat16, {}, "takes page sizes .*, not 5"),
        ({"page_size": 48}, jnp.bfloat16, {}, "takes page sizes .*, not 48"),
        ({}, np.float32, {}, "takes bfloat16 or float16 throughout, .* not q float32"),
        ({}, jnp.bfloat16, {"scale": -1.0}, "takes a positive scale"),
    ],
)
def test_refusals_name_their_reason(shape: dict[str, Any], dtype: Any, changes: dict[str, Any], reason: str) -> None:
    case = make_case([4], t=1, dtype=dtype, **shape)
    scales = {name: jnp.asarray(scale) for name, scale in case.options.items()}
    with pytest.raises(NotImplementedError, match=reason):
        tuned(*case.arrays(), sinks=None, **MASK | scales | changes)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="for machines without a Hopper GPU")
def test_other_devices_are_refused_and_served_by_xla() -> None:
    case = make_case([20], t=2, dtype=jnp.bfloat16)
    with pytest.raises(NoImplementationError, match=r"mosaic_gpu: needs a Hopper GPU \(compute capability 9\.0\)"):
        paged_attention(*case.arrays()[:5], implementation="mosaic_gpu")
    out = paged_attention(*case.arrays()[:5])
    np.testing.assert_allclose(np.asarray(out, np.float64), oracle(case)[0], atol=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("t", [1, 16])
@pytest.mark.parametrize("b", [1, 8, 64])
def test_full_size_agrees_with_xla(b: int, t: int, causal: bool) -> None:
    """Through the public function, ragged lengths up to 2048 keys in the shapes of Qwen3-8B."""
    keys = jax.random.split(jax.random.key(b + t), 4)
    q = jax.random.normal(keys[0], (b, t, 32, 128), jnp.bfloat16)
    k, v = (jax.random.normal(key, (b * 32 + 1, 8, 64, 128), jnp.bfloat16) for key in keys[1:3])
    table = jax.random.permutation(keys[3], b * 32).reshape(b, 32).astype(jnp.int32)
    lens = (jnp.arange(b, dtype=jnp.int32) * 331 + 2048) % 2049
    ours, theirs = (
        paged_attention(q, k, v, table, lens, causal=causal, return_lse=True, implementation=name)
        for name in ("mosaic_gpu", "xla")
    )
    live = np.isfinite(np.asarray(theirs[1]))
    np.testing.assert_allclose(np.asarray(ours[1])[live], np.asarray(theirs[1])[live], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(np.asarray(ours[0], np.float32), np.asarray(theirs[0], np.float32), atol=0.02)
