"""The Hopper kernel for heads of 512: in Pallas's interpreter, lowered for an H200, and for real (`-m gpu`)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import paged_attention
from dflash_kernels.attention.paged.launch import Tuning, plan_wide
from dflash_kernels.attention.paged.mosaic_gpu import tuned
from dflash_kernels.core.device import SHARED_MEMORY
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..devices import h200
from .attention_oracle import make_case
from .test_paged_attention_mosaic import MASK, call, check, run

SINKS = np.linspace(-1.5, 2.5, 16, dtype=np.float32)
SLOPES = (2.0 ** -np.linspace(0.5, 8, 16)).astype(np.float32)


@pytest.fixture(params=["interpreted", pytest.param("gpu", marks=pytest.mark.gpu)])
def interpret(request: pytest.FixtureRequest) -> Any:
    return plgpu.InterpretGPUParams() if request.param == "interpreted" else None


# T, group, page size, sequence lengths, query lengths, options of the call, tuning. Groups are those of Gemma 4's sizes and others.
CASES: dict[str, Any] = {
    "q1": (1, 8, 64, [70, 0], None, {}, Tuning(splits=2)),
    "q16": (16, 2, 64, [70, 5], [16, 3], {}, Tuning(splits=1)),
    "q16-blocks": (16, 8, 64, [41], [13], {}, Tuning(splits=1)),
    "q16-blocks-split": (9, 16, 64, [135], [9], {}, Tuning(splits=2)),
    "keys32": (3, 4, 64, [140], [2], {}, Tuning(splits=1, keys=32)),
    "paired": (16, 8, 64, [330], [13], {}, Tuning(splits=1, paired=True)),
    "paired-few": (2, 4, 64, [70, 0, 5], [2, 2, 1], {}, Tuning(splits=2, paired=True)),
    "paired-window": (16, 8, 16, [290], None, {"window": (70, 0)}, Tuning(splits=1, paired=True)),
    "page16": (4, 4, 16, [85], [4], {"causal": False}, Tuning(splits=2)),
    "cap-sinks": (2, 4, 32, [50, 2], [2, 1], {"soft_cap": 1.5, "sinks": SINKS[:4]}, Tuning(splits=1)),
    "window": (4, 2, 128, [150], None, {"window": (30, 0)}, Tuning(splits=2)),
    "window-both": (4, 2, 8, [90], None, {"causal": False, "window": (9, 3)}, Tuning(splits=1)),
    "alibi": (2, 2, 64, [70], None, {"alibi_slopes": SLOPES[:2]}, Tuning(splits=1)),
    "chosen": (1, 16, 64, [70], None, {}, Tuning()),
}


@pytest.mark.few(
    "interpreted-q1", "interpreted-q16-blocks", "interpreted-cap-sinks", "interpreted-window", "interpreted-paired-few"
)
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_float64(name: str, interpret: Any) -> None:
    t, group, page_size, seq_lens, q_lens, options, tuning = CASES[name]
    dtype = jnp.float16 if name in ("page16", "window") else jnp.bfloat16
    shape = {"t": t, "group": group, "page_size": page_size, "kv_heads": 1, "head_dim": 512, "dtype": dtype}
    check(make_case(seq_lens, q_lens, **shape, **options), tuning, interpret)


PAGE_SIZES, SPLITS = (8, 16, 32, 64, 128), (None, 1, 2, 5)
GROUPS = (1, 2), (1, 8), (4, 4), (8, 16), (16, 2), (16, 8), (16, 16), (70, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize(("t", "group"), GROUPS)
def test_every_group_and_page_size(t: int, group: int, page_size: int) -> None:
    """Long sequences and short ones, idle ones, and such as have fewer queries than others.

    Numbers of splits are dealt out, as each is compiled: every group and every page size meets all of them, alone and paired.
    """
    lens, live = [900, 130, 64, 1, 0], [t, max(t - 2, 1), 1, 1, t]
    shape = {"t": t, "group": group, "page_size": page_size, "kv_heads": 2, "head_dim": 512, "dtype": jnp.bfloat16}
    place = PAGE_SIZES.index(page_size) + GROUPS.index((t, group))
    tunings = [Tuning(splits=SPLITS[(place + 2 * paired) % len(SPLITS)], paired=paired) for paired in (False, True)]
    check(make_case(lens, live, **shape), tunings, None)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(32, 4), (16, 1)])
@pytest.mark.parametrize("t", [1, 16])
def test_a_batch_in_gemmas_shapes_agrees_with_xla(t: int, heads: tuple[int, int]) -> None:
    keys = jax.random.split(jax.random.key(t), 4)
    q = jax.random.normal(keys[0], (8, t, heads[0], 512), jnp.bfloat16)
    k, v = (jax.random.normal(key, (8 * 64, heads[1], 64, 512), jnp.bfloat16) for key in keys[1:3])
    table = jax.random.permutation(keys[3], 8 * 64).reshape(8, 64).astype(jnp.int32)
    lens = (jnp.arange(8, dtype=jnp.int32) * 731 + 4096) % 4097
    ours, theirs = (
        paged_attention(q, k, v, table, lens, return_lse=True, implementation=name) for name in ("mosaic_gpu", "xla")
    )
    live = np.isfinite(np.asarray(theirs[1]))
    np.testing.assert_allclose(np.asarray(ours[1])[live], np.asarray(theirs[1])[live], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(np.asarray(ours[0], np.float32), np.asarray(theirs[0], np.float32), atol=0.02)


def test_nothing_unused_is_read(interpret: Any) -> None:
    build = functools.partial(
        make_case, [33, 7], [2, 1], t=2, group=2, kv_heads=1, head_dim=512, dtype=jnp.bfloat16, causal=False, seed=3
    )
    clean = build(garbage=0.0)
    clean.page_table = np.where(clean.page_table % len(clean.k_pages) == clean.page_table, clean.page_table, 0)
    expected = run(clean, Tuning(splits=1), interpret)
    found = run(build(garbage=np.nan), Tuning(splits=1), interpret)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(found, expected, strict=True))


def shapes(t: int, page_size: int = 64, dtype: Any = jnp.bfloat16) -> tuple[jax.ShapeDtypeStruct, ...]:
    q, pages = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((8, t, 32, 512), (513, 4, page_size, 512)))
    return q, pages, pages, *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((8, 64), (8,), (8,)))


@pytest.mark.few("1-None-False", "16-None-False", "256-None-False", "16-1-True")
@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize(("t", "splits"), [(1, None), (16, None), (16, 1), (256, None)])
def test_lowers_for_an_h200(t: int, splits: int | None, paired: bool) -> None:
    launch = call.trace(*shapes(t), **MASK, tuning=Tuning(splits=splits, paired=paired), interpret=None)
    with h200():
        assert "@mosaic_gpu_v2" in launch.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.few("16")
@pytest.mark.parametrize("page_size", [8, 16, 32, 128])
def test_every_page_size_lowers_with_every_option(page_size: int) -> None:
    mask = {"causal": False, "window": (70, 3), "soft_cap": 30.0, "scale": 0.1}
    given = {"sinks": jax.ShapeDtypeStruct((32,), jnp.float32)}
    launch = call.trace(*shapes(3, page_size, jnp.float16), **given, **mask, tuning=Tuning(), interpret=None)
    with h200():
        assert "@mosaic_gpu_v2" in launch.lower(lowering_platforms=("cuda",)).as_text()


def planned(t: int, tuning: Tuning | None = None, **changes: Any) -> Any:
    shape = {"b": 8, "group": 8, "page_size": 64, "kv_heads": 4, "table_width": 64, "has_sinks": False}
    return plan_wide(tuning or Tuning(), tokens=t, head_dim=512, **shape | changes, **MASK)


def test_schedule() -> None:
    """One CTA on each of 132 multiprocessors, and as much shared memory as it has."""
    assert [planned(t).splits for t in (1, 16)] == [4, 2]
    assert (planned(1, b=64).splits, planned(1, b=64).direct) == (1, True)
    assert [planned(t).row_blocks for t in (1, 16, 256)] == [1, 2, 32]
    assert [planned(t, Tuning(paired=True)).row_blocks for t in (1, 16, 256)] == [1, 1, 16]
    for launch in (planned(16), planned(16, Tuning(keys=32)), planned(16, Tuning(paired=True))):
        tiles = launch.stages * launch.keys * 512 * (2 if launch.paired else 4)
        assert tiles + 64 * 512 * 2 + 2 * 64 * launch.keys * 4 + 512 <= SHARED_MEMORY
    assert not planned(64, b=64, has_sinks=True).direct
    assert not planned(64, b=64, group=3).direct


def test_a_tuning_for_other_heads_is_refused() -> None:
    with pytest.raises(ValueError, match="tiles of 32 or 64 keys with heads of 512"):
        planned(1, Tuning(keys=128))
    case = make_case([4], t=1, head_dim=64, page_size=64, dtype=jnp.bfloat16)
    for tuning in (Tuning(keys=32), Tuning(stages=1)):
        with pytest.raises(ValueError, match="tiles of 64 or 128 keys and two stages or more with heads of 64"):
            run(case, tuning, plgpu.InterpretGPUParams())


@pytest.mark.parametrize("stored", [jnp.float8_e4m3fn, np.int8])
def test_pages_of_one_byte_are_refused(stored: Any) -> None:
    case = make_case([4], t=1, head_dim=512, page_size=64, dtype=jnp.bfloat16, stored=stored)
    scales = {name: jnp.asarray(case.options.pop(name)) for name in ("k_scale", "v_scale")}
    with pytest.raises(NotImplementedError, match=r"takes head dims .* with pages of one byte, not 512"):
        tuned(*case.arrays(), sinks=None, **MASK, **scales)
