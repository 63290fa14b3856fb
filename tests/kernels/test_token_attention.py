"""Attention of one token with its projections in one launch: interpreted, lowered, and for real."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import (
    AddNorm,
    NoImplementationError,
    token_attention,
    token_attention_exchange,
    token_attention_refusal,
)
from dflash_kernels.fused.token_attention.mosaic_gpu import launch
from dflash_kernels.fused.token_attention.plan import plan
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..devices import h200

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
REAL: Any = {"heads": 64, "kv_heads": 8, "hidden": 2880, "page_size": 64}


def make(
    length: int, *, heads: int, kv_heads: int, hidden: int, page_size: int, pages_per_seq: int, live: bool = True,
    biased: bool = True, sunk: bool = True, window: int | None = None, wide_sinks: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """A call whose pools are NaN wherever the sequence has no key yet, and whose table is wrong past its end."""
    keys = iter(jax.random.split(jax.random.key(length + heads), 16))

    def draw(*shape: int, size: float = 1.0) -> jax.Array:
        return (size * jax.random.normal(next(keys), shape)).astype(jnp.bfloat16)

    pages, width, features = pages_per_seq + 3, heads * 64, (heads + 2 * kv_heads) * 64
    used = -(-length // page_size)
    random = np.random.default_rng(length)
    table = random.permutation(pages)[:pages_per_seq].astype(np.int32)
    pools = []
    for _ in "kv":
        pool = np.full((pages, kv_heads, page_size, 64), np.nan, np.float32)
        for position in range(length - 1):
            pool[table[position // page_size], :, position % page_size] = random.standard_normal((kv_heads, 64))
        pools.append(jnp.asarray(pool, jnp.bfloat16))
    slot = table[(length - 1) // page_size] * page_size + (length - 1) % page_size
    table[used:] = 2**30
    angles = 6 * jax.random.uniform(next(keys), (1, 32))
    parts, norm = jax.random.normal(next(keys), (4, 1, hidden)), 1 + draw(hidden, size=0.2)
    qkv, o = draw(features, hidden, size=hidden**-0.5), draw(hidden, width, size=width**-0.5)
    biases = (draw(features), draw(hidden)) if biased else (None, None)
    q_lens = jnp.asarray([int(live)], jnp.int32)
    return {
        "k_pages": pools[0], "v_pages": pools[1], "x": draw(1, hidden), "qkv": (qkv, biases[0]), "output": (o, biases[1]),
        "page_table": jnp.asarray(table)[None], "seq_lens": jnp.asarray([length], jnp.int32) * q_lens, "q_lens": q_lens,
        "slots": jnp.asarray([slot if live else -1], jnp.int32), "cos": 1.3 * jnp.cos(angles), "sin": 1.3 * jnp.sin(angles),
        "added": AddNorm(parts, norm.astype(jnp.bfloat16), 1e-5, rounds_last=True),
        "sinks": draw(heads, size=2.0).astype(jnp.float32 if wide_sinks else jnp.bfloat16) if sunk else None,
        "window": None if window is None else (window - 1, 0),
    }  # fmt: skip


def interpreted(call: dict[str, Any], ctas: int) -> tuple[jax.Array, ...]:
    given: Any = [one for name, one in call.items() if name != "window"]
    window = call["window"] or (None, None)
    return launch(*given, exchange=None, window=window, scale=0.125, ctas=ctas, interpret=INTERPRET)


def check(call: dict[str, Any], found: Any) -> None:
    """The definition's sum of parts, its stream and its pools, within what rounding to bfloat16 on the way leaves."""
    out, stream, k_pages, v_pages = token_attention(**call, scale=0.125, implementation="xla")
    sums, true = (np.asarray(one.sum(axis=0), np.float64) for one in (found[0], out))
    assert np.isfinite(true).all()
    np.testing.assert_allclose(sums, true, rtol=0, atol=2e-2 * np.abs(true).max())
    np.testing.assert_allclose(np.float64(found[1]), np.float64(stream), rtol=2**-7, atol=1e-6)
    for one, other, before in zip(found[2:], (k_pages, v_pages), (call["k_pages"], call["v_pages"]), strict=True):
        np.testing.assert_allclose(np.float64(one), np.float64(other), rtol=2**-6, atol=2**-6)
        changed = ~np.isnan(np.asarray(one, np.float32)) & np.isnan(np.asarray(before, np.float32))
        assert changed.sum() == call["k_pages"].shape[1] * 64 * int(call["q_lens"][0])


SMALL: Any = {"heads": 4, "kv_heads": 2, "hidden": 192, "page_size": 64, "pages_per_seq": 4}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "the first token": (1, {}),
    "a tile": (65, {}),
    "every CTA has a tile, not whole": (230, {}),
    "window": (200, {"window": 70}),
    "window of itself": (100, {"window": 1}),
    "no biases and no sinks": (100, {"biased": False, "sunk": False}),
    "not real": (100, {"live": False}),
    "sinks in float32": (40, {"wide_sinks": True}),
    "small pages": (61, {"page_size": 16, "pages_per_seq": 5}),
    "odd heads": (70, {"heads": 3, "kv_heads": 1, "hidden": 320}),
}


@pytest.mark.few("the first token", "window", "not real")
@pytest.mark.parametrize("case", CASES)
def test_kernel(case: str) -> None:
    length, changes = CASES[case]
    call = make(length, **SMALL | changes)
    check(call, interpreted(call, ctas=9))


def test_several_tiles_of_a_cta() -> None:
    call = make(700, **SMALL | {"heads": 2, "pages_per_seq": 12})
    check(call, interpreted(call, ctas=6))


@pytest.mark.parametrize("window", [None, 128])
def test_lowers_for_an_h200(window: int | None) -> None:
    sizes = REAL | {"pages_per_seq": 20, "window": window}
    given = make(1, **SMALL | {"window": window})
    call = jax.eval_shape(
        lambda: {name: one for name, one in make(1, **sizes).items() if name not in ("added", "window")}
    )
    parts, weight = jax.ShapeDtypeStruct((4, 1, 2880), jnp.float32), jax.ShapeDtypeStruct((2880,), jnp.bfloat16)

    def run(call: Any, parts: jax.Array, weight: jax.Array) -> Any:
        added, exchange = AddNorm(parts, weight, *given["added"][2:]), token_attention_exchange(8)
        how: Any = {"window": given["window"], "added": added, "exchange": exchange, "implementation": "mosaic_gpu"}
        return token_attention(**call, **how)

    with h200():
        text = jax.jit(run).trace(call, parts, weight).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu_v2") == 1


def test_what_is_refused() -> None:
    sizes: Any = {
        "heads": 64, "kv_heads": 8, "head_dim": 64, "turned": 64, "page_size": 64, "table_width": 20, "hidden": 2880,
        "page_dtype": jnp.bfloat16,
    }  # fmt: skip
    with h200():
        assert token_attention_refusal(jnp.bfloat16, **sizes) is None
        assert token_attention_refusal(jnp.bfloat16, **sizes | {"table_width": 2000}, window=(127, 0)) is None
        for changes, reason in (
            ({"table_width": 65}, "4160 keys are 5 tiles"), ({"head_dim": 128, "turned": 128}, "heads of 64"),
            ({"turned": 32}, "32 columns"), ({"page_dtype": jnp.int8}, "int8"), ({"hidden": 2888}, "whole 64s"),
            ({"window": (3, 3)}, "windows to the left"), ({"heads": 128}, "18 heads"), ({"page_size": 24}, "page sizes"),
            ({"hidden": 12288}, "no room"), ({"heads": 112, "hidden": 5120}, "weights of 14 heads"),
            ({"heads": 32, "kv_heads": 1}, "weights of 32 heads"), ({"kv_heads": 16, "heads": 128}, "10 heads"),
        ):  # fmt: skip
            assert reason in str(token_attention_refusal(jnp.bfloat16, **sizes | changes))
    fits = plan(jnp.bfloat16, **sizes, window=(None, None), ctas=132)
    assert fits.splits == 16
    assert fits.stages >= 16
    with pytest.raises(NotImplementedError, match="10 heads, more than 78 multiprocessors"):
        plan(jnp.bfloat16, **sizes, window=(None, None), ctas=78)


def test_shapes_are_checked() -> None:
    call = make(1, **SMALL)
    for changes, reason in (
        ({"exchange": token_attention_exchange(3)}, "for 2 key heads"), ({"sinks": jnp.zeros((3,))}, "sinks"),
        ({"qkv": (call["qkv"][0][:-64], None)}, "must be"), ({"output": (call["output"][0], jnp.zeros((64,)))}, "bias"),
        ({"x": call["x"][:, :64]}, "belong together"), ({"cos": call["cos"][:, :16]}, "half of 64"),
        ({"added": call["added"]._replace(weight=jnp.zeros((64,)))}, "norm's weight"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=reason):
            token_attention(**call | changes)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="for machines without a Hopper GPU")
def test_other_devices_are_refused() -> None:
    call = make(1, **SMALL)
    with pytest.raises(NoImplementationError, match="needs a Hopper GPU"):
        token_attention(**call, implementation="mosaic_gpu")


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("length", [1, 63, 128, 129, 1000, 1150, 2048])
def test_full_size(length: int, window: int | None) -> None:
    call = make(length, **REAL, pages_per_seq=32, window=window)
    exchange = token_attention_exchange(8)
    for _ in range(3):
        check(call, token_attention(**call, scale=0.125, exchange=exchange, implementation="mosaic_gpu"))
    assert not np.asarray(exchange[...]).any()


@pytest.mark.gpu
def test_full_size_that_is_not_real() -> None:
    call = make(100, **REAL, pages_per_seq=32, live=False)
    check(call, token_attention(**call, scale=0.125, implementation="mosaic_gpu"))
