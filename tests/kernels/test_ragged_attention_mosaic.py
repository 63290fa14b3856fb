"""The Hopper kernel of ragged attention: in Pallas's interpreter, lowered for an H200, and for real (`-m gpu`)."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import NoImplementationError, ragged_attention
from dflash_kernels.attention.ragged.launch import BLOCK, SHARED_MEMORY, Tuning, block_table, plan
from dflash_kernels.attention.ragged.mosaic_gpu import tuned_dense, tuned_paged
from dflash_kernels.attention.ragged.reference import ragged_attention_reference
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..devices import h200
from .ragged_oracle import Case, in_eight_bits, make_case, oracle

SINKS = np.linspace(-1.5, 2.5, 4, dtype=np.float32)
SLOPES = np.linspace(0.02, 0.5, 4, dtype=np.float32)
STATIC = ("causal", "window", "soft_cap", "alibi_sqrt", "scale", "tuning", "interpret")
MASK: dict[str, Any] = {"causal": True, "window": (None, None), "soft_cap": None, "alibi_sqrt": False, "scale": 0.1}
ARRAYS: dict[str, Any] = {"sinks": None, "alibi_slopes": None}


@pytest.fixture(params=["interpreted", pytest.param("gpu", marks=pytest.mark.gpu)])
def interpret(request: pytest.FixtureRequest) -> Any:
    return plgpu.InterpretGPUParams() if request.param == "interpreted" else None


@functools.partial(jax.jit, static_argnames=STATIC)
def dense(*arrays, **options):
    return tuned_dense(*arrays, **options)


@functools.partial(jax.jit, static_argnames=STATIC)
def paged(*arrays, **options):
    return tuned_paged(*arrays, **options)


def run(case: Case, form: str, tuning: Tuning, interpret: Any) -> tuple[np.ndarray, np.ndarray]:
    options = MASK | ARRAYS | case.options | {"scale": case.scale}
    call = dense if form == "dense" else paged
    out, lse = call(*getattr(case, form)(), **options, tuning=tuning, interpret=interpret)
    assert out.dtype == case.q.dtype
    assert lse.dtype == jnp.float32
    return np.asarray(out), np.asarray(lse)


def check(case: Case, form: str, tuning: Tuning, interpret: Any) -> None:
    """Against float64: the output is rounded once to its dtype, and so are the weights that multiply the values."""
    (out, lse), (true_out, true_lse) = run(case, form, tuning, interpret), oracle(case)
    eps = float(jnp.finfo(case.q.dtype).eps)
    np.testing.assert_allclose(out.astype(np.float64), true_out, rtol=0, atol=eps * max(np.abs(true_out).max(), 1))
    near = 1e-5 if interpret is not None else 1e-3  # a GPU's exponentials are approximate
    np.testing.assert_allclose(lse, true_lse, rtol=1e-6, atol=near)
    assert (out[~np.isfinite(true_lse)] == 0).all()


# Form, queries and keys of each sequence, shapes and mask, tuning. Starts off multiples of 8, empty ones, queries without keys.
CASES: dict[str, tuple[str, list[int], list[int] | None, dict[str, Any], Tuning]] = {
    "prompts": ("dense", [70, 1, 130], None, {}, Tuning()),
    "rounds": ("dense", [200, 70], None, {"kv_heads": 2}, Tuning(kv_heads_at_once=1, ctas=2)),
    "chunks": ("paged", [70, 1, 0, 61], [200, 3, 9, 61], {"group": 2, "head_dim": 128, "page_size": 64}, Tuning()),
    "cross": ("dense", [70, 5, 3], [5, 140, 0], {"causal": False, "head_dim": 72}, Tuning(keys=64, kv_heads_at_once=1)),
    "latent": ("dense", [20], [140], {"head_dim": 192, "value_dim": 128}, Tuning()),
    "window": (
        "paged", [70, 3], [250, 2],
        {"window": (9, 30), "alibi_slopes": SLOPES[:1], "alibi_sqrt": True, "dtype": jnp.float16}, Tuning(keys=64, stages=3),
    ),
    "everything": (
        "dense", [6, 9], [20, 130],
        {"group": 2, "window": (70, 0), "soft_cap": 1.5, "sinks": SINKS[:2], "alibi_slopes": SLOPES[2:]}, Tuning(),
    ),
}  # fmt: skip
TOO_LARGE_FOR_THE_INTERPRETER: dict[str, Any] = {
    "many": ("dense", list(range(200)), None, {"kv_heads": 2, "group": 2, "head_dim": 128}, Tuning()),
    "encoder": ("dense", [300, 17, 256], None, {"kv_heads": 4, "causal": False, "head_dim": 80}, Tuning()),
    "page128": ("paged", [5, 600], [1500, 900], {"page_size": 128, "head_dim": 128, "group": 16}, Tuning()),
    "page8": ("paged", [5, 90], [150, 90], {"page_size": 8, "head_dim": 256}, Tuning()),
}


def agrees_with_float64(case: tuple[str, list[int], list[int] | None, dict[str, Any], Tuning], interpret: Any) -> None:
    form, q_lens, kv_lens, changes, tuning = case
    made = make_case(q_lens, kv_lens, **{"dtype": jnp.bfloat16, "kv_heads": 1, "group": 1} | changes)
    check(made, form, tuning, interpret)


@pytest.mark.few("interpreted-everything", "interpreted-latent")
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_float64(name: str, interpret: Any) -> None:
    agrees_with_float64(CASES[name], interpret)


@pytest.mark.gpu
@pytest.mark.parametrize("name", TOO_LARGE_FOR_THE_INTERPRETER)
def test_larger_calls_agree_with_float64(name: str) -> None:
    agrees_with_float64(TOO_LARGE_FOR_THE_INTERPRETER[name], None)


@pytest.mark.few("interpreted-int8-64-64")
@pytest.mark.parametrize(
    ("stored", "head_dim", "value_dim"),
    [
        (None, 72, 72),
        (None, 80, 96),
        (jnp.float8_e4m3fn, 96, 96),
        (jnp.float8_e4m3fn, 128, 64),
        (jnp.float8_e5m2, 64, 64),
        (np.int8, 64, 64),
    ],
)
def test_pages_that_are_copied_first(stored: Any, head_dim: int, value_dim: int, interpret: Any) -> None:
    """Numbers of eight bits with their scale in them are rounded to bfloat16: nothing to the output, a little to scores."""
    case = make_case([20, 0, 9], [90, 3, 40], kv_heads=1, head_dim=head_dim, value_dim=value_dim, dtype=jnp.bfloat16)
    case = case if stored is None else in_eight_bits(case, stored)
    (out, lse), (true_out, true_lse) = run(case, "paged", Tuning(), interpret), oracle(case)
    eps = float(jnp.finfo(jnp.bfloat16).eps)
    np.testing.assert_allclose(out.astype(np.float64), true_out, rtol=0, atol=2 * eps * max(np.abs(true_out).max(), 1))
    np.testing.assert_allclose(lse, true_lse, rtol=1e-6, atol=1e-3 if stored is None else 6e-3)


@pytest.mark.gpu
def test_nothing_unused_is_read() -> None:
    build = functools.partial(make_case, [13, 0, 7], [33, 4, 170], dtype=jnp.bfloat16, causal=False)
    clean = build(garbage=0.0)
    clean.page_table = np.where(clean.page_table % len(clean.k_pages) == clean.page_table, clean.page_table, 0)
    expected = run(clean, "paged", Tuning(), None)
    for garbage in (np.nan, np.inf):
        found = run(build(garbage=garbage), "paged", Tuning(), None)
        assert all(a.tobytes() == b.tobytes() for a, b in zip(found, expected, strict=True))


@pytest.mark.few
def test_neighbours_may_hold_nan(interpret: Any) -> None:
    """A sequence of NaN spoils itself and nothing else."""
    case = make_case([13, 9, 7], [33, 21, 70], kv_heads=1, group=1, dtype=jnp.bfloat16)
    expected = run(case, "dense", Tuning(), interpret)
    q, k, v = case.q.copy(), case.k.copy(), case.v.copy()
    q[13:22], k[33:54], v[33:54] = np.nan, np.nan, np.nan
    found = run(dataclasses.replace(case, q=q, k=k, v=v), "dense", Tuning(), interpret)
    for rows in (slice(0, 13), slice(22, None)):
        assert all(a[rows].tobytes() == b[rows].tobytes() for a, b in zip(found, expected, strict=True))


def test_no_races(capfd: pytest.CaptureFixture[str]) -> None:
    """Among copies, loads and stores: what a matrix instruction reads, the interpreter does not watch."""
    case = make_case([40], [230], kv_heads=1, group=1, page_size=32, dtype=jnp.bfloat16)
    check(case, "paged", Tuning(keys=64), plgpu.InterpretGPUParams(detect_races=True))
    assert "race" not in capfd.readouterr().out.lower()


def planned(tokens: int = 1000, sequences: int = 3, tuning: Tuning | None = None, **changes: Any) -> Any:
    shape = {"heads": 8, "kv_heads": 2, "head_dim": 128, "value_dim": 128, "kv_rows": tokens} | changes
    return plan(
        tuning or Tuning(), tokens=tokens, sequences=sequences, has_sinks=False, has_slopes=False, **shape, **MASK
    )


def test_blocks_cover_every_query_once() -> None:
    """Padding is one more sequence, without keys; the longest work comes first."""
    lens = [0, 7, 300, 1, 128, 0, 33]
    starts = np.cumsum([0, *lens])
    tokens = int(starts[-1]) + 40
    launch = planned(tokens, len(lens))
    kv = jnp.array([5, 7, 900, 3, 128, 0, 33], jnp.int32)
    table, order = block_table(launch, tokens, jnp.array(starts, jnp.int32), kv, None)
    assert sorted(np.asarray(order)) == list(range(launch.blocks))
    owner, work = np.full(tokens, -1), []
    for first, begin, end, position, keys, index, shift in np.asarray(table).tolist():
        assert (0 <= begin < end <= BLOCK) or begin == end == 0
        assert shift == 0
        rows = slice(first * 8 + begin, first * 8 + end)
        assert (owner[rows] == -1).all()
        owner[rows] = index if keys or rows.start < starts[-1] else len(lens)
        if end and keys:
            assert position + rows.start - first * 8 == keys - lens[index] + rows.start - starts[index]
            work.append(min(keys, position + end))
    assert (owner[: starts[-1]] == np.repeat(np.arange(len(lens)), lens)).all()
    assert (owner >= 0).all()
    assert work == sorted(work, reverse=True)


def test_sections() -> None:
    """As many key heads at once as the L2 holds, and enough blocks for every multiprocessor."""
    assert planned(16384, 2, kv_heads=8, heads=8).heads_at_once == 1
    assert planned(16384, 2, kv_heads=8, heads=32).heads_at_once == 4
    assert planned(1024, 1, kv_heads=8, heads=32).heads_at_once == 32
    assert planned(25600, 1, kv_heads=8, heads=8).heads_at_once == 8
    assert planned(512, 1, kv_heads=1, heads=2).ctas == 12


def test_launches_fit() -> None:
    assert planned().separate_out

    for dims in ((128, 128), (192, 128), (256, 256), (64, 64)):
        launch = planned(head_dim=dims[0], value_dim=dims[1])
        tiles = launch.stages * launch.keys * sum(dims) * 2
        held = BLOCK * (dims[0] + dims[1] if launch.separate_out else max(dims)) * 2
        assert tiles + held < SHARED_MEMORY


def lowered(
    form: str, head_dim: int, value_dim: int, page_size: int = 64, dtype: Any = jnp.bfloat16, **options: Any
) -> str:
    """Text of a call for an H200. Rows are no multiple of anything."""
    lens = jax.ShapeDtypeStruct((4,), jnp.int32)
    q = jax.ShapeDtypeStruct((1001, 4, head_dim), dtype)
    if form == "dense":
        k, v = (jax.ShapeDtypeStruct((1003, 2, dim), dtype) for dim in (head_dim, value_dim))
        arrays, call = (q, k, v, lens, lens), dense
    else:
        k, v = (jax.ShapeDtypeStruct((33, 2, page_size, dim), dtype) for dim in (head_dim, value_dim))
        table, seq_lens = jax.ShapeDtypeStruct((3, 20), jnp.int32), jax.ShapeDtypeStruct((3,), jnp.int32)
        arrays, call = (q, k, v, lens, table, seq_lens), paged
    with h200():
        traced = call.trace(*arrays, **MASK | ARRAYS | {"tuning": Tuning(), "interpret": None} | options)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.few
@pytest.mark.parametrize(
    ("form", "head_dim", "value_dim"),
    [
        ("dense", 128, 128),
        ("dense", 192, 128),
        ("dense", 80, 80),
        ("paged", 128, 128),
        ("paged", 256, 256),
        ("paged", 72, 96),
    ],
)
def test_lowers_for_an_h200(form: str, head_dim: int, value_dim: int) -> None:
    assert lowered(form, head_dim, value_dim).count("@mosaic_gpu_v2") == 1


@pytest.mark.few
@pytest.mark.parametrize("page_size", [8, 128])
def test_lowers_with_every_option(page_size: int) -> None:
    heads = jax.ShapeDtypeStruct((4,), jnp.float32)
    extra = {"sinks": heads, "alibi_slopes": heads, "alibi_sqrt": page_size == 8}
    mask = {"causal": False, "window": (70, 3), "soft_cap": 30.0}
    assert "@mosaic_gpu_v2" in lowered("paged", 64, 64, page_size, jnp.float16, **extra, **mask)


@pytest.mark.parametrize(
    ("shape", "changes", "reason"),
    [
        ({"head_dim": 264}, {}, "takes head dims to 256, not 264 and 264"),
        ({"page_size": 5}, {}, "takes page sizes .*, not 5"),
        ({"dtype": np.float32}, {}, "takes bfloat16 or float16 throughout, or pages in eight bits, not q float32"),
        ({}, {"scale": -1.0}, "takes a positive scale"),
    ],
)
def test_refusals_name_their_reason(shape: dict[str, Any], changes: dict[str, Any], reason: str) -> None:
    case = make_case([4], **{"dtype": jnp.bfloat16} | shape)
    with pytest.raises(NotImplementedError, match=reason):
        tuned_paged(*case.paged(), **MASK | ARRAYS | changes)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="for machines without a Hopper GPU")
def test_no_hopper_gpu() -> None:
    case = make_case([4], dtype=jnp.bfloat16)
    with pytest.raises(NoImplementationError, match="mosaic_gpu: needs a Hopper GPU"):
        ragged_attention(*case.dense(), implementation="mosaic_gpu")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("form", "head_dim", "value_dim", "causal"),
    [("paged", 128, 128, True), ("dense", 192, 128, True), ("dense", 256, 256, False), ("paged", 64, 64, False)],
)
def test_real_sizes(form: str, head_dim: int, value_dim: int, causal: bool) -> None:
    """Error against the definition in float32 at most twice that of the definition in the same dtype, plus two ulp."""
    case = make_case(
        [1000, 17, 515, 0, 900], [1000, 1300, 515, 6, 2100], kv_heads=2, group=3, head_dim=head_dim, value_dim=value_dim,
        page_size=64, dtype=jnp.bfloat16, causal=causal, padding=(0, 0), garbage=0.0,
    )  # fmt: skip
    out, lse = run(case, form, Tuning(), None)
    options = MASK | ARRAYS | case.options | {"scale": case.scale}
    arrays = case.dense()
    same, _ = ragged_attention_reference(*arrays, **options)
    true, true_lse = ragged_attention_reference(*(x.astype(jnp.float32) for x in arrays[:3]), *arrays[3:], **options)
    true = np.asarray(true, np.float64)
    allowed = (
        2 * np.abs(np.asarray(same, np.float64) - true).max()
        + 2 * float(jnp.finfo(jnp.bfloat16).eps) * np.abs(true).max()
    )
    assert np.abs(out.astype(np.float64) - true).max() <= allowed
    np.testing.assert_allclose(lse, true_lse, rtol=0, atol=1e-3)
