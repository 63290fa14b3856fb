"""A model's layers through operations of several steps against the same layers called one by one."""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dflash_jax.attention import paged
from dflash_jax.attention.dense import dense_attend
from dflash_jax.attention.paged import PagedAttend
from dflash_jax.cache.pages import make_pages
from dflash_jax.checkpoints.weights import weight_shapes
from dflash_jax.config import Qwen3Config
from dflash_jax.execution import fused_moe as routed
from dflash_jax.execution import persistent as chain
from dflash_jax.execution.fused_dense import fits, multiplied, run_rows
from dflash_jax.execution.persistent import run_layers
from dflash_jax.models import bind, family_named, init_params
from dflash_jax.models.layers import Linear
from dflash_jax.models.moe import Experts
from dflash_jax.models.presets import MOE_TARGETS, TARGETS
from dflash_jax.models.qwen3_moe import qwen3_moe_parameters

from ..devices import h200
from .golden_files import cases, golden

CASES = cases("qwen3")


class Decodes:
    """An `attend` that nobody takes gradients of."""

    decodes = True

    def __init__(self) -> None:
        self.attend = dense_attend()

    def __call__(self, *args: Any) -> jax.Array:
        return self.attend(*args)


@pytest.mark.parametrize("case", CASES)
def test_agrees_with_layers_called_one_by_one(case: str) -> None:
    config, params, inputs, _ = golden(case)
    model: Any = bind(config, params)
    ids, positions = jnp.asarray(inputs["ids"]), jnp.asarray(inputs["positions"])
    x, rotary = model.embed(ids), model.rotary(positions)
    plain, hidden = run_layers(model.layers, model.norm, x, rotary, dense_attend())
    chained, ends = run_layers(model.layers, model.norm, x, rotary, Decodes(), implementation="xla")
    fitting = type(config) is Qwen3Config and not config.attention_bias
    assert fits(model.layers, x, "xla") == fitting
    rows, last = plain, hidden
    if fitting:
        normed = model.layers[0].input_norm(x)
        rows, last = run_rows(model.layers, model.norm, x, normed, rotary, Decodes(), "xla")
    assert len(plain) == len(chained) == len(rows) == config.num_layers
    for theirs, *ours in zip([*plain, hidden], [*chained, ends], [*rows, last], strict=True):
        for found in ours:
            np.testing.assert_allclose(np.asarray(found), np.asarray(theirs), atol=1e-5 * float(jnp.abs(theirs).max()))


@pytest.mark.parametrize(
    ("name", "rows", "wanted"),
    [
        ("Qwen3-4B", 24, False), ("Qwen3-4B", 32, True), ("Qwen3-4B", 512, True), ("Qwen3-4B", 1024, False),
        ("Qwen3-8B", 32, False), ("Qwen3-8B", 64, True),
    ],
)  # fmt: skip
def test_rows_that_the_kernels_take_where_weights_are_no_blocks(name: str, rows: int, wanted: bool) -> None:
    config = dataclasses.replace(TARGETS[name], num_layers=1, windows=(None,))
    shapes = weight_shapes([(config, family_named("qwen3"))], jnp.dtype(jnp.bfloat16))["target"]
    x, found = jax.ShapeDtypeStruct((rows, 1, config.hidden_size), jnp.bfloat16), list[bool]()
    with h200():
        jax.eval_shape(lambda params: found.append(fits(cast(Any, bind(config, params)).layers, x)), shapes)
    assert found == [wanted]


@pytest.mark.parametrize("case", cases("qwen3_moe"))
def test_layers_with_experts_agree_with_layers_called_one_by_one(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, params, inputs, _ = golden(case)
    model: Any = bind(config, params)
    ids = jnp.asarray(inputs["ids"])
    x, rotary = model.embed(ids), model.rotary(jnp.asarray(inputs["positions"]))
    plain, hidden = run_layers(model.layers, model.norm, x, rotary, dense_attend())
    assert not routed.fits(model.layers, x)  # without a kernel
    monkeypatch.setattr(Experts, "streams", lambda *_: True)
    assert routed.fits(model.layers, x)
    streams, ends = run_layers(model.layers, model.norm, x, rotary, Decodes())
    for theirs, found in zip([*plain, hidden], [*streams, ends], strict=True):
        np.testing.assert_allclose(np.asarray(found), np.asarray(theirs), atol=1e-5 * float(jnp.abs(theirs).max()))


@pytest.mark.parametrize("tokens", [1, 16])
def test_a_layer_with_experts_is_few_launches(tokens: int) -> None:
    """Two norms with what comes before them, and all experts with the choice among them: three kernels, but for attention's."""
    config = dataclasses.replace(MOE_TARGETS["Qwen3-30B-A3B"], num_layers=1, windows=(None,), vocab_size=256)
    params = jax.eval_shape(lambda: init_params(qwen3_moe_parameters(config), jax.random.key(0), "bfloat16"))

    def run(params: Any, x: jax.Array) -> Any:
        model: Any = bind(config, params)
        rotary = model.rotary(jnp.arange(tokens)[None])
        return run_layers(model.layers, model.norm, x, rotary, Decodes())[1]

    with h200():
        x = jax.ShapeDtypeStruct((1, tokens, config.hidden_size), jnp.bfloat16)
        text = jax.jit(run).trace(params, x).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu_v2") == 3
    assert "top_k" not in text


@pytest.mark.parametrize("case", CASES)
def test_attention_in_the_same_operation(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls one after the other, the second of one token of one sequence and none of another; pages and streams agree."""
    config, params, inputs, _ = golden(case)
    model: Any = bind(config, params)
    ids = jnp.asarray(inputs["ids"])[:1, :4].repeat(2, axis=0)
    table, pages = jnp.asarray([[2, 0, 5], [1, 4, 3]]), make_pages(config, 6, 4, jnp.dtype(jnp.float32))
    monkeypatch.setattr(chain, "layer_chain_refusal", lambda *_, **__: None)

    def runs(**options: Any) -> list[Any]:
        held, found = pages, []
        for first, lens in ((0, [4, 3]), (4, [1, 0])):
            positions = first + jnp.arange(4)[None].repeat(2, axis=0)
            attend = PagedAttend(held, table, positions, jnp.asarray(lens), **options)
            rotary = model.rotary(positions)
            found.append(run_layers(model.layers, model.norm, model.embed(ids), rotary, attend))
            held = attend.pages
        return [found, held]

    monkeypatch.setattr(chain, "attention_chain_refusal", lambda *_, **__: "apart")
    apart = runs()
    taken = []
    monkeypatch.setattr(chain, "attention_chain_refusal", lambda *_, **__: taken.append(True))
    whole = runs()
    plain = type(config) is Qwen3Config and not config.attention_bias and all(reach is None for reach in config.windows)
    plain = plain and config.rope.partial == 1
    assert bool(taken) == plain
    monkeypatch.setattr(chain, "attention_chain_refusal", lambda *_, **__: "apart")
    written = []
    monkeypatch.setattr(paged, "qkv_attention_refusal", lambda *_, **__: written.append(True))
    at_once = runs()
    assert bool(written) == any(reach is None for reach in config.windows)
    # Rows that may be pieces of one sequence are all written before one of them attends.
    monkeypatch.setattr(chain, "attention_chain_refusal", lambda *_, **__: taken.append(True))
    before = len(taken), len(written)
    related = runs(related=True)
    assert before == (len(taken), len(written))
    for theirs, *others in zip(*map(jax.tree.leaves, (apart, whole, at_once, related)), strict=True):
        for ours in others:
            np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), atol=1e-5 * float(jnp.abs(theirs).max()))


def test_products_of_some_hundred_rows_are_kernels() -> None:
    """The drafter's: a long depth in parts, a short one whole; and the definition where there is no kernel."""

    def layer(weight: jax.Array) -> Linear:
        made = Linear(*weight.shape)
        made.weight = nnx.Param(weight)
        return made

    def run(deep: jax.Array, x: jax.Array) -> Any:
        weights = jnp.zeros((512, 2560), deep.dtype), jnp.zeros((2048, 512), x.dtype)
        return [multiplied(layer(weight), rows) for weight, rows in zip(weights, (deep, x), strict=True)]

    for batch, launches in ((1, 0), (8, 2), (32, 0)):
        shapes = [jax.ShapeDtypeStruct((batch, 16, width), jnp.bfloat16) for width in (2560, 512)]
        with h200():
            text = jax.jit(run).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("stablehlo.custom_call @mosaic_gpu_v2") == launches
    one, x = layer(jax.random.normal(jax.random.key(1), (64, 128))), jax.random.normal(jax.random.key(0), (8, 16, 128))
    np.testing.assert_array_equal(np.asarray(multiplied(one, x)), np.asarray(one(x)))


@pytest.mark.parametrize("case", CASES)
def test_the_best_token_is_that_of_the_greatest_logit(case: str) -> None:
    config, params, inputs, _ = golden(case)
    model: Any = bind(config, params)
    hidden = model(jnp.asarray(inputs["ids"]), jnp.asarray(inputs["positions"]), dense_attend())[0]
    np.testing.assert_array_equal(np.asarray(model.best(hidden)), np.argmax(np.asarray(model.logits(hidden)), axis=-1))
