"""Weights in eight bits: rounding, products, lookups, and models that decode with them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import dflash_jax as dj
from dflash_jax.attention.dense import dense_attend
from dflash_jax.config import Qwen3Config
from dflash_jax.execution.fused_dense import multiplied
from dflash_jax.execution.plan import CallShape, choose, weight_format
from dflash_jax.execution.runner import Planned
from dflash_jax.models.layers import ONE_BY_ONE, Linear, best_rows, linear
from dflash_jax.models.parameters import init_params
from dflash_jax.models.qwen3 import qwen3_parameters
from dflash_jax.models.registry import bind, layer_traits
from dflash_jax.options import WeightDtype, check_weight_dtype
from dflash_jax.quantization.weights import MANY_ROWS, Quantized, quantize, quantize_weights, rounding_jobs

KINDS: tuple[WeightDtype, ...] = ("int8", "fp8", "fp8_dynamic")


def matrix(dtype: Any = jnp.float32, width: int = 24) -> jax.Array:
    """Rows of very different sizes, one of zeros."""
    rows = np.random.default_rng(0).standard_normal((7, width)) * np.logspace(-6, 4, 7)[:, None]
    rows[3] = 0
    return jnp.asarray(rows, dtype)


def dequantized(weight: Quantized) -> np.ndarray:
    values, count = np.asarray(weight.values, np.float64), weight.shape[0]
    if weight.paired:  # column 2 i + h of a block of sixteen is its column 8 h + i
        values = np.concatenate([values.reshape(len(values), -1, 16)[:, :, h::2] for h in (0, 1)], axis=2)
    rows = values.reshape(weight.values.shape) * np.asarray(weight.scales, np.float64)[:, None]
    rows[count - weight.doubled : count] += rows[count:]
    return rows[:count]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [24, 48])
def test_every_entry_is_the_nearest_one(kind: WeightDtype, width: int) -> None:
    """Columns in sixteens are stored in pairs."""
    weight = quantize(matrix(width=width), kind)
    assert weight.paired == (width == 48)
    true = np.asarray(matrix(width=width), np.float64)
    error, top = np.abs(dequantized(weight) - true), np.abs(true).max(axis=1, keepdims=True)
    # int8: half a step of 1/127 of the row's largest. float8: 3 bits after the first, steps of 2^-9 near zero.
    bound = top / 254 if kind == "int8" else np.maximum(np.abs(true) / 16, top / 448 * 2.0**-10)
    assert (error <= bound * 1.0001).all()
    assert (error[3] == 0).all()
    np.testing.assert_allclose(np.abs(dequantized(weight)).max(axis=1), top[:, 0], rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("width", [24, 48])
def test_products_and_lookups(kind: WeightDtype, dtype: Any, width: int) -> None:
    weight = quantize(matrix(dtype, width), kind)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((2, 3, width)), dtype)
    y, rows = linear(x, weight), weight[jnp.array([[4, 0], [3, 6]])]
    assert y.dtype == rows.dtype == dtype
    true = np.asarray(x, np.float64) @ dequantized(weight).T
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(y, np.float64), true, rtol=2 * eps, atol=8 * 2.0**-24 * np.abs(true).max())
    np.testing.assert_allclose(np.asarray(rows, np.float64), dequantized(weight)[[[4, 0], [3, 6]]], rtol=eps)
    assert weight[...] is weight


def test_which_parameters_are_quantized() -> None:
    names = {
        "embed.weight": True, "layers.0.attn.qkv_proj.weight": True, "layers.0.attn.qkv_proj.bias": False,
        "layers.0.attn.kv_b_proj.weight": False, "layers.0.mlp.router.weight": False, "norm.weight": False,
        "layers.0.mlp.experts.gate_up_proj.weight": False, "layers.0.mlp.shared.down_proj.weight": True,
        "layers.0.mlp.down_proj.weight": True, "layers.0.attn.q_norm.weight": False, "lm_head.weight": True,
        "layers.1.delta.in_proj.weight": True, "layers.1.delta.conv": False, "layers.1.delta.a_log": False,
        "layers.1.delta.out_proj.weight": True,
    }  # fmt: skip
    params = {name: jnp.ones((4, 8)) for name in names} | {"layers.1.delta.a_log": jnp.ones(1)}
    result = quantize_weights(params, "int8")
    assert {name: isinstance(array, Quantized) for name, array in result.items()} == names
    assert list(result) == list(names)
    assert not params  # taken out, so that no array is kept twice


@pytest.mark.few("24-float32", "48-bfloat16")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("width", [24, 48])
def test_many_rows_are_rounded_by_their_own_largest(dtype: Any, width: int) -> None:
    """With one row fewer none is; rows of zeros and those with NaN reach no other."""
    weight = quantize(matrix(dtype, width), "fp8_dynamic")
    x = (
        jnp.asarray(np.random.default_rng(1).standard_normal((MANY_ROWS, width)), dtype)
        .at[5]
        .set(0)
        .at[7, 3]
        .set(jnp.nan)
    )
    y, few = linear(x, weight), linear(x[1:], weight)
    assert y.dtype == few.dtype == dtype
    alone = linear(x[1:], dataclasses.replace(weight, dynamic=False))
    np.testing.assert_array_equal(np.asarray(few, np.float32), np.asarray(alone, np.float32))
    wide = np.asarray(x, np.float64)
    top = np.abs(wide).max(axis=1, keepdims=True)
    scaled = np.where(top > 0, wide / np.where(top > 0, top, 1) * 448, 0)
    near = np.asarray(jnp.asarray(scaled, jnp.float32).astype(jnp.float8_e4m3fn), np.float64) * top / 448
    true = near @ dequantized(weight).T
    sound = np.arange(MANY_ROWS) != 7
    rounding, one = 2 * float(jnp.finfo(dtype).eps) * np.abs(true), top * np.abs(dequantized(weight)).max(axis=1)
    off = np.abs(np.asarray(y, np.float64) - true)[sound]
    assert (off <= (rounding + one * 2.0**-5)[sound]).all()  # a number half-way between two may go to either
    assert (off <= (rounding + one * 2.0**-14)[sound]).mean() > 0.97
    assert (np.asarray(y, np.float32)[5] == 0).all()
    assert np.isnan(np.asarray(y, np.float32)[7]).all()
    np.testing.assert_array_equal(best_rows(x[:5], weight), jnp.argmax(linear(x[:5], weight), axis=-1))
    np.testing.assert_array_equal(best_rows(x[sound][:64], weight), jnp.argmax(linear(x[sound][:64], weight), axis=-1))


@pytest.mark.few("True")
@pytest.mark.parametrize("paired", [False, True])
def test_layers_that_round_rows_as_one_operation_each(paired: bool) -> None:
    """The same as layers called one by one, whose products round what they multiply; entries of a head turn with those half a head
    away, or with those beside them."""
    model = dj.load(max_batch=1, max_model_len=128, weight_dtype="fp8_dynamic", draft=False)
    weights: Any = model.engine.weights["target"]
    target = bind(
        dataclasses.replace(model.target, rope=dataclasses.replace(model.target.rope, paired=paired)), weights
    )
    x = jax.random.normal(jax.random.key(0), (5, 16, model.target.hidden_size)) * 0.1
    rotary = target.rotary(jnp.broadcast_to(jnp.arange(16), (5, 16)))

    plans = [
        choose(layer_traits(model.target), CallShape(rows, 16, x.dtype), weight_format(weights)) for rows in (5, 3)
    ]
    assert [one.runner for one in plans] == ["fused_float8", "plain"]
    ours, theirs = (
        run(target.layers, target.norm, x, rotary, dense_attend(), None) for run in (Planned(plans[0]), ONE_BY_ONE)
    )
    for found, expected in zip([*ours[0], ours[1]], [*theirs[0], theirs[1]], strict=True):
        assert np.abs(np.asarray(found - expected)).max() <= 0.02 * np.abs(np.asarray(expected)).max()


@pytest.mark.parametrize(
    ("changes", "fitting"),
    [({}, True), ({"attention_bias": True}, False), ({"intermediate_size": 24}, False), ({"hidden_size": 24}, False)],
)
def test_layers_that_round_rows_one_by_one(changes: dict[str, Any], fitting: bool) -> None:
    """Where projections have biases, or some of their matrices lie in pairs and others not."""
    sizes: dict[str, Any] = {
        "vocab_size": 8,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 16,
    }
    config = Qwen3Config(num_layers=2, windows=(None,) * 2, **sizes | changes)
    params = quantize_weights(init_params(qwen3_parameters(config), jax.random.key(0)), "fp8_dynamic")
    call = CallShape(1, MANY_ROWS, jnp.dtype(jnp.float32))
    chosen = choose(layer_traits(config), call, weight_format(params))
    assert chosen.runner == ("fused_float8" if fitting else "plain")
    assert (chosen.refused("fused_float8") is None) == fitting


def test_a_bias_is_added_to_rows_that_are_rounded() -> None:
    layer: Any = Linear(48, 32, bias=True)
    x = jax.random.normal(jax.random.key(0), (2, MANY_ROWS, 32))
    weight = quantize(jax.random.normal(jax.random.key(1), (48, 32)), "fp8_dynamic")
    layer.weight, layer.bias = nnx.Param(weight), nnx.Param(100 * jnp.arange(1.0, 49))
    rounded = np.asarray(x, np.float64) @ dequantized(weight).T
    assert np.abs(np.asarray(multiplied(layer, x)) - rounded - 100 * np.arange(1, 49)).max() < 2


@pytest.mark.few
@pytest.mark.parametrize("kind", ["fp8", "fp8_dynamic"])
def test_a_drafter_in_eight_bits_changes_no_text(kind: WeightDtype) -> None:
    """Six sequences: enough rows for the drafter to round them."""
    prompts = ["def test_", "class Matrix:", "import os\n", "for i in range(", "    return ", "The quick brown fox"]
    params = dj.SamplingParams(max_tokens=40, ignore_eos=True)
    exact, model = (dj.load(max_batch=6, max_model_len=128, draft_weight_dtype=one) for one in (None, kind))
    before, ours = (dj.generate(one, prompts, params) for one in (exact, model))
    assert [one.token_ids for one in ours] == [one.token_ids for one in before]
    means = [np.mean([n for one in completions for n in one.acceptance_lengths]) for completions in (before, ours)]
    assert means[1] > 0.8 * means[0] > 1.2
    assert model.memory.weights < exact.memory.weights


def test_a_drafter_that_is_not_there_has_no_weights() -> None:
    with pytest.raises(dj.ParameterError, match="draft_weight_dtype must be left out without a drafter, got 'fp8'"):
        dj.load(draft=False, draft_weight_dtype="fp8")
    with pytest.raises(
        dj.ParameterError, match="draft_weight_dtype must be None, int8, fp8, fp8_dynamic or mxfp4, got 'fp4'"
    ):
        check_weight_dtype("fp4", "draft_weight_dtype")


FEW = ["def test_", "class Matrix:"], dj.SamplingParams(max_tokens=48, ignore_eos=True)


def size(model: dj.Model) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(model.engine.weights))


def mean_length(completions: list[dj.Completion]) -> float:
    return float(np.mean([n for one in completions for n in one.acceptance_lengths]))


@pytest.fixture(scope="module")
def exact() -> tuple[int, float]:
    """Bytes of the shipped pair's weights in float32, and how much of its drafts stands."""
    model = dj.load(max_batch=1, max_model_len=128)
    return size(model), mean_length(dj.generate(model, *FEW))


@pytest.mark.few
@pytest.mark.parametrize("kind", KINDS)
def test_the_shipped_pair_in_eight_bits(exact: tuple[int, float], kind: WeightDtype) -> None:
    model, (whole, before) = dj.load(max_batch=1, max_model_len=128, weight_dtype=kind), exact
    assert size(model) < 0.29 * whole  # tables of the draft head stay as they are
    drafted, plain = (dj.generate(model, *FEW, draft=draft) for draft in (True, False))
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    assert mean_length(drafted) > 0.6 * before > 1.5


@pytest.mark.parametrize("kind", ["int8", "fp8", "fp8_dynamic"])
def test_programs_that_round_are_compiled_before_there_are_weights(
    kind: WeightDtype, caplog: pytest.LogCaptureFixture
) -> None:
    """Of shapes alone, each once; weights then find them."""
    names, width = (
        ("layers.0.mlp.down_proj.weight", "layers.1.mlp.down_proj.weight", "norm.weight"),
        {"int8": 40}.get(kind, 48),
    )
    params = {name: jnp.ones((24, width) if "mlp" in name else (24,), jnp.float32) for name in names}
    shapes = jax.eval_shape(lambda: quantize_weights(dict(params), kind))
    jobs = rounding_jobs({"target": shapes})
    assert len(jobs) == 1
    for job in jobs:
        job()
    with jax.log_compiles(), caplog.at_level("WARNING"):
        quantize_weights(dict(params), kind)
    assert not [record for record in caplog.records if "Compiling" in record.message and "quantize" in record.message]
