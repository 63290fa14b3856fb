"""Attention dealt out by a schedule: the schedule itself, the kernel in Pallas's interpreter, lowered, and for real (`-m gpu`)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import paged_attention, paged_schedule, schedule_helps
from dflash_kernels.attention.paged.mosaic_gpu import tuned
from dflash_kernels.attention.paged.schedule import LEAST, MOST, MOST_OF_FEW_ROWS, SLOTS, TILE
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..devices import h200
from .attention_oracle import Case, make_case, oracle

MASK = {"causal": True, "window": (None, None), "soft_cap": None, "scale": 0.1}
STATIC = ("causal", "window", "soft_cap", "scale", "alibi_sqrt", "interpret", "heads", "kv_heads")


@pytest.fixture(params=["interpreted", pytest.param("gpu", marks=pytest.mark.gpu)])
def interpret(request: pytest.FixtureRequest) -> Any:
    return plgpu.InterpretGPUParams() if request.param == "interpreted" else None


@functools.partial(jax.jit, static_argnames=STATIC)
def call(q, k_pages, v_pages, table, lens, live, *, heads, kv_heads, **options):
    """Two calls that share a schedule, and what the counters hold afterwards."""
    narrow = k_pages.dtype.itemsize == 1
    schedule = paged_schedule(lens, heads=heads, kv_heads=kv_heads, tokens=q.shape[1], narrow=narrow, ctas=8)
    arrays = (q, k_pages, v_pages, table, lens, live)
    first, second = (tuned(*arrays, sinks=None, schedule=schedule, **options) for _ in range(2))
    return first, second, schedule.arrived[...]


def check(case: Case, interpret: Any) -> tuple[np.ndarray, np.ndarray]:
    """Against float64: the output is rounded once to its dtype, and so are the weights that multiply the values."""
    options = MASK | case.options | {"scale": case.scale}
    options["window"] = options["window"] or (None, None)
    heads = {"heads": case.q.shape[2], "kv_heads": case.k_pages.shape[1]}
    (out, lse), again, arrived = call(*case.arrays(), **options, **heads, interpret=interpret)
    assert out.dtype == case.q.dtype
    assert all(a.tobytes() == b.tobytes() for a, b in zip((out, lse), again, strict=True))
    assert not np.asarray(arrived).any()
    out, lse, (true_out, true_lse) = np.asarray(out), np.asarray(lse), oracle(case)
    eps = float(jnp.finfo(case.q.dtype).eps)
    np.testing.assert_allclose(out.astype(np.float64), true_out, rtol=0, atol=eps * max(np.abs(true_out).max(), 1))
    near = 1e-5 if interpret is not None else 1e-4  # a GPU's exponentials are approximate
    # int8 keys meet queries of two bytes in one unit for all rows.
    near = max(near, 2e-3) if case.k_pages.dtype == np.int8 else near
    np.testing.assert_allclose(lse, true_lse, rtol=near, atol=near)
    assert (out[~np.isfinite(true_lse)] == 0).all()
    return out, lse


SLOPES = (2.0 ** -np.linspace(0.5, 8, 8)).astype(np.float32)
# T, group, page size, head dim, sequence lengths, query lengths, mask. Idle rows, short rows, and one far longer than the others.
CASES = {
    "q1": (1, 4, 64, 128, [2000, 64, 0, 1], None, {}),
    "q16": (16, 4, 64, 128, [900, 70, 5, 0], [16, 3, 16, 16], {}),
    "q16-full": (16, 4, 64, 128, [70, 900, 64], [16, 9, 0], {"causal": False}),
    "head64": (5, 3, 16, 64, [700, 300, 17], [5, 5, 2], {}),
    "window": (4, 2, 64, 64, [900, 300], None, {"window": (70, 0)}),
    "cap-alibi": (4, 4, 32, 64, [600, 3], None, {"soft_cap": 2.0, "alibi_slopes": SLOPES}),
}  # fmt: skip


@pytest.mark.few("interpreted-cap-alibi")
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_float64(name: str, interpret: Any) -> None:
    t, group, page_size, head_dim, seq_lens, q_lens, mask = CASES[name]
    dtype = jnp.float16 if name == "head64" else jnp.bfloat16
    shape = {"t": t, "group": group, "page_size": page_size, "head_dim": head_dim, "dtype": dtype}
    check(make_case(seq_lens, q_lens, kv_heads=2, **shape, **mask), interpret)


# Stored as, T, group, page size, head dim, sequence lengths, query lengths, mask.
NARROW = {
    "fp8-q1": (jnp.float8_e4m3fn, 1, 4, 64, 128, [2000, 64, 0, 1], None, {}),
    "fp8-q6-window": (jnp.float8_e4m3fn, 6, 2, 32, 64, [500, 3], [6, 2], {"window": (300, 0)}),
    "fp8-wide-full": (jnp.float8_e4m3fn, 2, 2, 64, 256, [300, 70], None, {"causal": False, "soft_cap": 2.0}),
    "int8-q16": (np.int8, 16, 4, 64, 128, [500, 70, 5, 0], [16, 3, 5, 16], {}),
    "int8-q1": (np.int8, 1, 4, 64, 64, [500, 64, 0, 1], None, {"alibi_slopes": SLOPES}),
}  # fmt: skip


@pytest.mark.few("interpreted-int8-q1")
@pytest.mark.parametrize("name", NARROW)
def test_pages_in_eight_bits_agree_with_float64(name: str, interpret: Any) -> None:
    stored, t, group, page_size, head_dim, seq_lens, q_lens, mask = NARROW[name]
    shape = {"t": t, "group": group, "page_size": page_size, "head_dim": head_dim, "dtype": jnp.bfloat16}
    check(make_case(seq_lens, q_lens, kv_heads=2, stored=stored, **shape, **mask), interpret)


@pytest.mark.few
def test_a_row_that_is_no_number_harms_no_other_in_eight_bits(interpret: Any) -> None:
    """A sequence whose splits are combined lies among others' splits."""
    case = make_case([500, 64, 90], t=2, dtype=jnp.bfloat16, stored=jnp.float8_e4m3fn)
    options = MASK | case.options | {"scale": case.scale} | {"heads": case.q.shape[2], "kv_heads": 2}
    (expected, _), _, _ = call(*case.arrays(), **options, interpret=interpret)
    case.q[1, 1, 0] = np.nan
    (found, _), _, _ = call(*case.arrays(), **options, interpret=interpret)
    found, expected = np.asarray(found, np.float32), np.asarray(expected, np.float32)
    spared = np.ones(found.shape[:3], bool)
    spared[1, 1, 0] = False
    np.testing.assert_array_equal(found[spared], expected[spared])
    assert np.isnan(found[~spared]).all()


@pytest.mark.few
def test_nothing_unused_is_read(interpret: Any) -> None:
    build = functools.partial(make_case, [700, 0, 7, 64], [6, 6, 2, 0], t=6, dtype=jnp.bfloat16, seed=3)
    clean = build(garbage=0.0)
    clean.page_table = np.where(clean.page_table % len(clean.k_pages) == clean.page_table, clean.page_table, 0)
    expected = check(clean, interpret)
    found = check(build(garbage=np.nan), interpret)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("tokens", [1, 16])
@pytest.mark.parametrize(
    "lens", [[0], [1, 0, 0], [4096] * 64, [512] * 7 + [32768], [500] * 31 + [32768], [1000, 90, 7000]]
)
def test_every_part_is_dealt_once(lens: list[int], tokens: int) -> None:
    schedule = jax.jit(lambda lens: paged_schedule(lens, heads=32, kv_heads=8, tokens=tokens).items)
    items = np.asarray(schedule(jnp.array(lens, jnp.int32)))
    dealt = items[items[:, 2] > 0]
    assert len(items) == len(lens) + SLOTS // 8
    assert (dealt == items[: len(dealt)]).all()
    for sequence, length in enumerate(lens):
        _, part, parts = dealt[dealt[:, 0] == sequence].T
        assert part.tolist() == list(range(parts[0]))
        assert set(parts.tolist()) == {len(part)}
        assert len(part) <= (MOST_OF_FEW_ROWS if tokens == 1 else MOST)
        assert len(part) == 1 or length / len(part) > LEAST * TILE / 2
    divided = dealt[:, 2] > 1
    assert divided[: divided.sum()].all()


def test_long_ones_are_divided_until_the_gpu_is_full() -> None:
    def parts(lens: list[int]) -> list[int]:
        items = np.asarray(paged_schedule(jnp.array(lens, jnp.int32), heads=32, kv_heads=8, tokens=1).items)
        return [int(items[(items[:, 0] == i) & (items[:, 2] > 0), 2][0]) for i in range(len(lens))]

    assert parts([4096] * 64) == [1] * 64
    assert parts([4096] * 8) == [2] * 8
    assert parts([512] * 7 + [32768]) == [1] * 7 + [14]


def layers(q, k_pages, v_pages, table, lens, **scales):
    schedule = paged_schedule(lens, heads=32, kv_heads=8, tokens=q.shape[1], narrow=k_pages.dtype.itemsize == 1)
    return attended(q, k_pages, v_pages, table, lens, schedule, **scales)


def attended(q, k_pages, v_pages, table, lens, schedule, **scales):
    for _ in range(3):
        q = paged_attention(q, k_pages, v_pages, table, lens, schedule=schedule, **scales)
    return q


def helps(sequences: int, tokens: int, longest: int) -> bool:
    return schedule_helps(sequences, heads=32, kv_heads=8, tokens=tokens, longest=longest)


def test_one_launch_a_layer_on_an_h200(all_cases: bool) -> None:
    shape = jax.ShapeDtypeStruct
    q, pages = (shape(sizes, jnp.bfloat16) for sizes in ((8, 16, 32, 128), (99, 8, 64, 128)))
    table, lens = shape((8, 64), jnp.int32), shape((8,), jnp.int32)
    kinds = (jnp.float8_e4m3fn, ((8,), (8,))), (jnp.int8, ((99, 8, 64), (8, 128)))
    with h200():
        for stored, scales in kinds if all_cases else kinds[1:]:
            narrow, scaled = shape(pages.shape, stored), [shape(each, jnp.float32) for each in scales]
            given = dict(zip(("k_scale", "v_scale"), scaled, strict=True))
            text = (
                jax.jit(layers)
                .trace(q, narrow, narrow, table, lens, **given)
                .lower(lowering_platforms=("cuda",))
                .as_text()
            )
            assert text.count("call @_attend") == 3
            assert text.count("@mosaic_gpu_v2") == 2 * text.count("func.func private @_attend")  # and combine
        text = jax.jit(layers).trace(q, pages, pages, table, lens).lower(lowering_platforms=("cuda",)).as_text()
        assert helps(8, 16, 32768)
        assert not any([helps(1, 16, 32768), helps(8, 17, 32768), helps(64, 16, 32768), helps(8, 16, 4096)])
    assert text.count("call @_attend") == 3
    assert text.count("@mosaic_gpu_v2") == text.count("func.func private @_attend")
    assert not helps(8, 16, 32768)


@pytest.mark.gpu
@pytest.mark.parametrize("stored", [jnp.bfloat16, jnp.float8_e4m3fn])
def test_real_sizes_run_to_run(stored: Any) -> None:
    """Counters are shared by many launches in a row, and whoever finishes last gives the same bits."""
    lens = jnp.array([512] * 7 + [32768], jnp.int32)
    keys = jax.random.split(jax.random.key(0), 3)
    k, v = (jax.random.normal(key, (600, 8, 64, 128), jnp.bfloat16).astype(stored) for key in keys[:2])
    q = jax.random.normal(keys[2], (8, 16, 32, 128), jnp.bfloat16)
    table = jax.random.randint(keys[2], (8, 512), 0, 600)
    first = jax.jit(layers)(q, k, v, table, lens)
    for _ in range(20):
        assert (jax.jit(layers)(q, k, v, table, lens) == first).all()
    plain = attended(q, k, v, table, lens, None).astype(jnp.float32)
    assert float(jnp.abs(plain - first).max() / jnp.abs(plain).max()) < 0.02
