"""Experts in MXFP4: tiles, the definition, and the Hopper kernel interpreted, lowered for an H200, and for real (`-m gpu`)."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import (
    Mxfp4Tiles,
    NoImplementationError,
    mxfp4_mixture,
    mxfp4_mixture_refusal,
    mxfp4_tiles,
    routed_experts_exchange,
)
from dflash_kernels.core.mxfp4 import MOST_SCALE
from dflash_kernels.fused.mxfp4_experts.mosaic_gpu import launch
from dflash_kernels.fused.mxfp4_experts.plan import Gate, plan
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..devices import h200

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
GATE = Gate(1.702, 7.0)
SIZES = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6])
NUMBERS = np.concatenate([SIZES, -SIZES])


def released(key: int, count: int, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Random blocks and scales of a matrix, its numbers around `columns ** -0.5`."""
    rng = np.random.default_rng(key)
    middle = 126 - round(np.log2(columns) / 2)
    blocks = rng.integers(0, 256, (count, rows, columns // 32, 16), np.uint8)
    return blocks, rng.integers(middle - 3, middle + 1, blocks.shape[:-1]).astype(np.uint8)


def numbers(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """`[E, F, D]` float64, by the specification."""
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, 32)
    wide = NUMBERS[codes] * 2.0 ** (scales[..., None].astype(np.float64) - 127)
    return wide.reshape(*scales.shape[:-1], -1)


def make(tokens: int, count: int, hidden: int, inner: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A call, and its matrices in float64."""
    given = {"gate_up": released(1, count, 2 * inner, hidden), "down": released(2, count, hidden, inner)}
    keys = jax.random.split(jax.random.key(tokens), 4)
    call: dict[str, Any] = {
        "logits": jax.random.normal(keys[0], (tokens, count)) * 2,
        "x": (jax.random.normal(keys[1], (tokens, hidden)) * 3).astype(jnp.bfloat16),
    }
    for key, (name, (blocks, scales)) in zip(keys[2:], given.items(), strict=True):
        call[name] = mxfp4_tiles(*map(jnp.asarray, (blocks, scales)), gated=name == "gate_up", dtype=jnp.bfloat16)
        call[f"{name}_bias"] = jax.random.normal(key, (count, blocks.shape[1])).astype(jnp.bfloat16)
    return call, {name: numbers(*both) for name, both in given.items()}


def true_values(call: dict[str, Any], matrices: dict[str, np.ndarray], taken: int) -> np.ndarray:
    """`[T, D]` in float64, with no rounding between the products."""
    logits, x = (np.asarray(call[name], np.float64) for name in ("logits", "x"))
    first, last = (np.asarray(call[name], np.float64) for name in ("gate_up_bias", "down_bias"))
    out = np.zeros_like(x)
    for token, experts in enumerate(np.argsort(-logits, axis=-1, kind="stable")[:, :taken]):
        shares = np.exp(logits[token, experts] - logits[token].max())
        for expert, share in zip(experts, shares / shares.sum(), strict=True):
            both = matrices["gate_up"][expert] @ x[token] + first[expert]
            gate, up = np.minimum(both[0::2], GATE.limit), np.clip(both[1::2], -GATE.limit, GATE.limit)
            inner = (up + 1) * gate / (1 + np.exp(-GATE.alpha * gate))
            out[token] += share * (matrices["down"][expert] @ inner + last[expert])
    return out


def check(call: dict[str, Any], matrices: dict[str, np.ndarray], taken: int, found: jax.Array) -> None:
    """The sum of the parts is as near to float64 as rounding what lies between the products to bfloat16 allows."""
    assert found.dtype == jnp.float32
    true = true_values(call, matrices, taken)
    far = np.abs(np.asarray(found, np.float64).sum(axis=0) - true).max()
    assert far <= 2**-8 * np.abs(true).max()


@pytest.mark.few("three consumers", "no expert twice")
@pytest.mark.parametrize(
    ("tokens", "taken", "count", "hidden", "inner"),
    [(2, 2, 3, 192, 384), (1, 1, 2, 64, 64), (5, 2, 4, 128, 64), (17, 1, 2, 64, 128), (2, 2, 3, 128, 128)],
    ids=["three consumers", "no expert twice", "ragged", "chosen before", "two"],
)
def test_kernel(tokens: int, taken: int, count: int, hidden: int, inner: int) -> None:
    """More items than CTAs, rings that turn, widths of odd tiles, experts that nobody takes and groups that are not full."""
    call, matrices = make(tokens, count, hidden, inner)
    check(call, matrices, taken, launch(**call, taken=taken, gate=GATE, ctas=3, interpret=INTERPRET))


def shapes(tokens: int, count: int, hidden: int, inner: int) -> dict[str, Any]:
    """Of a call."""
    shaped = jax.ShapeDtypeStruct

    def matrix(rows: int, columns: int, gated: bool) -> Mxfp4Tiles:
        return Mxfp4Tiles(shaped((count, rows // 64, columns // 64, 4, 136), jnp.int32), gated, jnp.dtype("bfloat16"))

    return {
        "logits": shaped((tokens, count), jnp.float32), "x": shaped((tokens, hidden), jnp.bfloat16),
        "gate_up": matrix(2 * inner, hidden, True), "gate_up_bias": shaped((count, 2 * inner), jnp.bfloat16),
        "down": matrix(hidden, inner, False), "down_bias": shaped((count, hidden), jnp.bfloat16),
    }  # fmt: skip


@pytest.mark.few("1-32", "8-128", "512-32")
@pytest.mark.parametrize("count", [32, 128])
@pytest.mark.parametrize("tokens", [1, 8, 64, 512])
def test_lowers_for_an_h200(tokens: int, count: int) -> None:
    """gpt-oss-20b and 120b."""
    with h200():
        assert mxfp4_mixture_refusal(tokens, 4, jnp.bfloat16, experts=count, hidden=2880, inner=2880) is None
        program = jax.jit(
            lambda call: mxfp4_mixture(**call, taken=4, alpha=1.702, limit=7.0, implementation="mosaic_gpu")
        )
        text = program.trace(shapes(tokens, count, 2880, 2880)).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("@mosaic_gpu_v2") == 1 + (tokens > 16)
    assert plan(tokens, 4, count, 2880, 2880, 132, GATE).stages >= 6
