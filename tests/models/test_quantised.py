"""Weights in eight bits: rounding, products, lookups, and models that decode with them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflash_jax as dj
from dflash_jax.models.layers import linear
from dflash_jax.models.quantised import Quantised, WeightDtype, quantise, quantise_weights

KINDS: tuple[WeightDtype, ...] = ("int8", "fp8")


def matrix(dtype: Any = jnp.float32, width: int = 24) -> jax.Array:
    """Rows of very different sizes, one of zeros."""
    rows = np.random.default_rng(0).standard_normal((7, width)) * np.logspace(-6, 4, 7)[:, None]
    rows[3] = 0
    return jnp.asarray(rows, dtype)


def dequantised(weight: Quantised) -> np.ndarray:
    values = np.asarray(weight.values, np.float64)
    if weight.paired:  # column 2 i + h of a block of sixteen is its column 8 h + i
        values = np.concatenate([values.reshape(len(values), -1, 16)[:, :, h::2] for h in (0, 1)], axis=2)
    return values.reshape(weight.shape) * np.asarray(weight.scales, np.float64)[:, None]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [24, 48])
def test_every_entry_is_the_nearest_one(kind: WeightDtype, width: int) -> None:
    """Columns in sixteens are stored in pairs."""
    weight = quantise(matrix(width=width), kind)
    assert weight.paired == (width == 48)
    true = np.asarray(matrix(width=width), np.float64)
    error, top = np.abs(dequantised(weight) - true), np.abs(true).max(axis=1, keepdims=True)
    # int8: half a step of 1/127 of the row's largest. float8: 3 bits after the first, steps of 2^-9 near zero.
    bound = top / 254 if kind == "int8" else np.maximum(np.abs(true) / 16, top / 448 * 2.0**-10)
    assert (error <= bound * 1.0001).all()
    assert (error[3] == 0).all()
    np.testing.assert_allclose(np.abs(dequantised(weight)).max(axis=1), top[:, 0], rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("width", [24, 48])
def test_products_and_lookups(kind: WeightDtype, dtype: Any, width: int) -> None:
    weight = quantise(matrix(dtype, width), kind)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((2, 3, width)), dtype)
    y, rows = linear(x, weight), weight[jnp.array([[4, 0], [3, 6]])]
    assert y.dtype == rows.dtype == dtype
    true = np.asarray(x, np.float64) @ dequantised(weight).T
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(y, np.float64), true, rtol=2 * eps, atol=8 * 2.0**-24 * np.abs(true).max())
    np.testing.assert_allclose(np.asarray(rows, np.float64), dequantised(weight)[[[4, 0], [3, 6]]], rtol=eps)
    assert weight[...] is weight


def test_which_parameters_are_quantised() -> None:
    names = {
        "embed.weight": True, "layers.0.attn.qkv_proj.weight": True, "layers.0.attn.qkv_proj.bias": False,
        "layers.0.attn.kv_b_proj.weight": False, "layers.0.mlp.router.weight": False, "norm.weight": False,
        "layers.0.mlp.experts.gate_up_proj.weight": False, "layers.0.mlp.shared.down_proj.weight": True,
        "layers.0.mlp.down_proj.weight": True, "layers.0.attn.q_norm.weight": False, "lm_head.weight": True,
    }  # fmt: skip
    params = {name: jnp.ones((4, 8)) for name in names}
    result = quantise_weights(params, "int8")
    assert {name: isinstance(array, Quantised) for name, array in result.items()} == names
    assert list(result) == list(names)
    assert not params  # taken out, so that no array is kept twice


@pytest.mark.parametrize("kind", KINDS)
def test_the_shipped_pair_in_eight_bits(kind: WeightDtype) -> None:
    exact, model = dj.load(max_batch=2, max_model_len=128), dj.load(max_batch=2, max_model_len=128, weight_dtype=kind)
    sizes = [sum(leaf.nbytes for leaf in jax.tree.leaves(one.engine.weights)) for one in (exact, model)]
    assert sizes[1] < 0.27 * sizes[0]  # from float32
    prompts, params = ["def test_", "class Matrix:"], dj.SamplingParams(max_tokens=48, ignore_eos=True)
    drafted, plain = (dj.generate(model, prompts, params, draft=draft) for draft in (True, False))
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    lengths, before = (
        np.mean([n for one in completions for n in one.acceptance_lengths])
        for completions in (drafted, dj.generate(exact, prompts, params))
    )
    assert lengths > 0.6 * before > 1.5
