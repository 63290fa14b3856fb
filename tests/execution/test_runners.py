"""Fused runners against the same layers called one by one."""

import collections
import dataclasses
import re
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dflash_jax.attention import paged
from dflash_jax.attention.dense import dense_attend
from dflash_jax.attention.paged import PagedAttend
from dflash_jax.attention.recurrent import verifying
from dflash_jax.cache.pages import make_pages
from dflash_jax.cache.recurrent import make_states
from dflash_jax.checkpoints.huggingface import open_checkpoint
from dflash_jax.execution import fused_moe, plan, switches
from dflash_jax.execution.fused_dense import multiplied
from dflash_jax.execution.plan import PLAIN, CallShape, ExecutionPlan, PageShape, choose, weight_format
from dflash_jax.execution.runner import Planned
from dflash_jax.execution.weight_layout import block_columns
from dflash_jax.models import bind, family_for, init_params, layer_traits
from dflash_jax.models.dflash import dflash_parameters, dflash_traits
from dflash_jax.models.layers import Linear, Rotary
from dflash_jax.models.presets import HYBRID_TARGETS, MOE_TARGETS, QWEN2_TARGETS
from dflash_jax.models.qwen3_5 import qwen35_parameters
from dflash_jax.quantization.weights import Quantized, quantize_weights

from ..devices import h200, on
from ..hybrid_pair import hybrid_config
from ..models.golden_files import GOLDEN, cases, golden
from ..models.test_qwen3_5 import random_weights
from ..random_pair import draft_config

CASES = [*cases("qwen3"), "llama_published", "mistral_window", "qwen2_window"]


def runs(plan: ExecutionPlan, model: Any, x: jax.Array, rotary: Rotary, attend: Any) -> list[jax.Array]:
    """The residual stream after each layer and the last one's norm."""
    streams, hidden, _ = Planned(plan)(model.layers, model.norm, x, rotary, attend, None)
    return [*streams, hidden]


def program(config: Any, inputs: dict[str, Any]) -> Callable[[ExecutionPlan, Any], list[jax.Array]]:
    """`runs` of a plan and parameters: operation by operation, each would be compiled by itself."""
    ids, positions = jnp.asarray(inputs["ids"]), jnp.asarray(inputs["positions"])

    @partial(jax.jit, static_argnums=0)
    def run(chosen: ExecutionPlan, params: Any) -> list[jax.Array]:
        model: Any = bind(config, params)
        return runs(chosen, model, model.embed(ids), model.rotary(positions), dense_attend())

    return run


def agree(theirs: list[jax.Array], ours: list[jax.Array]) -> None:
    for expected, found in zip(theirs, ours, strict=True):
        np.testing.assert_allclose(np.asarray(found), np.asarray(expected), atol=1e-5 * float(jnp.abs(expected).max()))


@pytest.mark.few("qwen2_window", "qwen3_moe_plain")
@pytest.mark.parametrize("case", CASES)
def test_fused_runners_agree_with_layers_called_one_by_one(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where traits allow them: with sliding windows, partial rotation and biases, but not one of attention's output."""
    config, params, inputs, _ = golden(case)
    run = program(config, inputs)
    theirs = run(PLAIN, params)
    assert len(theirs) == config.num_layers + 1
    call, weights = CallShape(*inputs["ids"].shape, theirs[0].dtype), weight_format(params)
    assert choose(layer_traits(config), call, weights).runner == "plain"  # on a CPU
    monkeypatch.setattr(plan, "layer_chain_refusal", lambda *_, **__: None)
    monkeypatch.setattr(plan, "dense_refusal", lambda *_: None)
    for wanted in ("persistent", "fused_dense"):
        chosen = choose(layer_traits(config), call, weights)
        fitting = layer_traits(config).bias != "all" and layer_traits(config).feed_forward == "dense"
        assert chosen.runner == (wanted if fitting else "plain")
        agree(theirs, run(chosen, params))
        monkeypatch.setattr(switches, "PERSISTENT", False)


@pytest.mark.parametrize("case", cases("qwen3_moe"))
def test_layers_with_experts_agree_with_layers_called_one_by_one(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, params, inputs, _ = golden(case)
    run = program(config, inputs)
    theirs = run(PLAIN, params)
    call, weights = CallShape(*inputs["ids"].shape, theirs[0].dtype), weight_format(params)
    assert choose(layer_traits(config), call, weights).runner == "plain"  # without a kernel
    monkeypatch.setattr(plan, "routed_experts_refusal", lambda *_, **__: None)
    chosen = choose(layer_traits(config), call, weights)
    assert chosen.runner == "fused_moe"
    agree(theirs, run(chosen, params))


@pytest.mark.few("qwen3_5_moe")
@pytest.mark.parametrize("case", ["qwen3_5", "qwen3_5_moe", "shared_among_experts"])
def test_hybrid_layers_agree_with_layers_called_one_by_one(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gated delta nets and gated attention, whose norms are zero-centered, with weights of norms that matter."""
    checkpoint: Any = open_checkpoint(GOLDEN / "hybrid" / ("qwen3_5" if case == "qwen3_5" else "qwen3_5_moe"))
    config, params = checkpoint.config, checkpoint.load("float32")
    if case == "shared_among_experts":
        config = dataclasses.replace(config, shared_intermediate_size=config.moe_intermediate_size)
        drawn = init_params(qwen35_parameters(config), jax.random.key(0))
        params = {name: params[name] if ".mlp." not in name else one for name, one in drawn.items()}
    ids, call = jnp.asarray([[5, 90, 17, 3, 44], [7, 7, 0, 61, 2]]), CallShape(2, 5, jnp.dtype(jnp.float32))

    @partial(jax.jit, static_argnums=0)
    def run(chosen: ExecutionPlan, params: Any) -> list[jax.Array]:
        model: Any = bind(config, params)
        rotary = model.rotary(jnp.arange(5)[None].repeat(2, axis=0))
        return runs(chosen, model, model.embed(ids), rotary, dense_attend())

    theirs = run(PLAIN, params)
    monkeypatch.setattr(plan, "layer_chain_refusal", lambda *_, **__: None)
    monkeypatch.setattr(plan, "dense_refusal", lambda *_: None)
    monkeypatch.setattr(plan, "routed_experts_refusal", lambda *_, **__: None)
    for wanted in ("persistent", "fused_dense") if case == "qwen3_5" else ("fused_moe",) * 2:
        chosen = choose(layer_traits(config), call, weight_format(params))
        assert (chosen.runner, chosen.attention) == (wanted, "apart")
        agree(theirs, run(chosen, params))
        monkeypatch.setattr(switches, "PERSISTENT", False)
        # Then norms with the projections after them, as of one token.
        monkeypatch.setattr(fused_moe, "add_norm_dense_refusal", lambda *_, **__: None)
        run.clear_cache()


@pytest.mark.few("int8-persistent-2")
@pytest.mark.parametrize(
    ("kind", "runner", "sequences"),
    [("int8", "persistent", 2), ("fp8", "persistent", 2), ("fp8_dynamic", "persistent", 2), ("fp8_dynamic", "fused_float8", 14)],
)  # fmt: skip
def test_hybrid_layers_in_eight_bits(kind: Any, runner: str, sequences: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As called one by one, which rounds many rows as well; gates are added up behind every projection."""
    config = hybrid_config(hidden_size=48, linear_value_dim=8)
    drawn = {name: jnp.asarray(array) for name, array in random_weights(config, 6).items()}
    params = quantize_weights(drawn, kind)
    ids = jax.random.randint(jax.random.key(3), (sequences, 5), 0, config.vocab_size)
    call = CallShape(sequences, 5, jnp.dtype(jnp.float32))

    @partial(jax.jit, static_argnums=0)
    def run(chosen: ExecutionPlan, params: Any) -> list[jax.Array]:
        model: Any = bind(config, params)
        rotary = model.rotary(jnp.arange(5)[None].repeat(sequences, axis=0))
        return runs(chosen, model, model.embed(ids), rotary, dense_attend())

    monkeypatch.setattr(plan, "layer_chain_refusal", lambda rows, *_, **__: "many rows" if rows > 16 else None)
    monkeypatch.setattr(switches, "HYBRID_EIGHT_BITS", False)
    off = choose(layer_traits(config), call, weight_format(params))
    assert (off.runner, "switched off" in (off.refused(runner) or "")) == ("plain", True)
    monkeypatch.setattr(switches, "HYBRID_EIGHT_BITS", True)
    chosen = choose(layer_traits(config), call, weight_format(params))
    assert (chosen.runner, chosen.attention) == (runner, "apart")
    theirs, ours = run(PLAIN, params), run(chosen, params)
    if runner == "persistent":
        agree(theirs, ours)
        return
    for expected, found in zip(theirs, ours, strict=True):
        assert np.abs(np.asarray(found - expected)).max() <= 0.02 * np.abs(np.asarray(expected)).max()


@pytest.mark.few("Qwen3.5-35B-A3B-1")
@pytest.mark.parametrize(("name", "tokens"), [("Qwen3-30B-A3B", 1), ("Qwen3-30B-A3B", 16), ("Qwen3.5-35B-A3B", 1)])
def test_a_layer_with_experts_is_few_launches(name: str, tokens: int) -> None:
    """Two norms with what comes before them, and all experts with the choice among them, a shared one or not: three kernels, but
    for attention's.
    """
    hybrid = {"full_layers": (0,)} if name in HYBRID_TARGETS else {}
    whole: Any = {**MOE_TARGETS, **HYBRID_TARGETS}[name]
    config = dataclasses.replace(whole, num_layers=1, windows=(None,), vocab_size=256, **hybrid)
    table = family_for(config).parameters(config)
    params = jax.eval_shape(lambda: init_params(table, jax.random.key(0), "bfloat16"))

    def run(params: Any, x: jax.Array) -> Any:
        model: Any = bind(config, params)
        chosen = choose(layer_traits(config), CallShape(1, tokens, x.dtype), weight_format(params))
        assert chosen.runner == "fused_moe"
        return runs(chosen, model, x, model.rotary(jnp.arange(tokens)[None]), dense_attend())[-1]

    with h200():
        x = jax.ShapeDtypeStruct((1, tokens, config.hidden_size), jnp.bfloat16)
        text = jax.jit(run).trace(params, x).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu_v2") == 3
    assert "top_k" not in text


@pytest.mark.parametrize("together", [True, False])
def test_one_token_is_normed_and_projected_at_once(together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two layers of experts, the last norm of one and the first projection of the next, which may be switched off."""
    monkeypatch.setattr(switches, "NORM_PRODUCT", together)
    whole = HYBRID_TARGETS["Qwen3.5-35B-A3B"]
    config = dataclasses.replace(whole, num_layers=2, windows=(None,) * 2, vocab_size=256, full_layers=(0, 1))
    params = jax.eval_shape(lambda: init_params(qwen35_parameters(config), jax.random.key(0), "bfloat16"))

    def run(params: Any, x: jax.Array) -> Any:
        model: Any = bind(config, params)
        chosen = choose(layer_traits(config), CallShape(1, 1, x.dtype), weight_format(params))
        return runs(chosen, model, x, model.rotary(jnp.arange(1)[None]), dense_attend())[-1]

    with h200():
        x = jax.ShapeDtypeStruct((1, 1, config.hidden_size), jnp.bfloat16)
        text = jax.jit(run).trace(params, x).lower(lowering_platforms=("cuda",)).as_text()
    found = collections.Counter(re.findall(r"call @launch_(add_norm_dense|add_norm)(?:_\d+)?\(", text))
    assert found == ({"add_norm_dense": 1, "add_norm": 1} if together else {"add_norm": 2})


@pytest.mark.few("mistral_window")
@pytest.mark.parametrize("case", [*CASES, "qwen2_opened"])
def test_attention_in_the_same_kernel(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls one after the other, the second of one token of one sequence and none of another; pages and streams agree."""
    config, params, inputs, _ = golden(case.replace("opened", "window"))
    if case == "qwen2_opened":
        config = dataclasses.replace(config, windows=(None,) * config.num_layers)
    ids = jnp.asarray(inputs["ids"])[:1, :4].repeat(2, axis=0)
    table, pages = jnp.asarray([[2, 0, 5], [1, 4, 3]]), make_pages(config, 6, 4, jnp.dtype(jnp.float32))
    monkeypatch.setattr(plan, "layer_chain_refusal", lambda *_, **__: None)
    call = CallShape(2, 4, jnp.dtype(jnp.float32), PageShape(4, 3, jnp.dtype(jnp.float32)))

    def run(**options: Any) -> tuple[ExecutionPlan, list[Any]]:
        shape = dataclasses.replace(call, pages=None) if options else call
        chosen = choose(layer_traits(config), shape, weight_format(params))

        def calls(params: Any, held: Any) -> list[Any]:
            model, found = cast(Any, bind(config, params)), []
            for first, lens in ((0, [4, 3]), (4, [1, 0])):
                positions = first + jnp.arange(4)[None].repeat(2, axis=0)
                attend = PagedAttend(table, positions, jnp.asarray(lens), held.page_size, **options)
                x, rotary = model.embed(ids), model.rotary(positions)
                *outs, held = Planned(chosen)(model.layers, model.norm, x, rotary, attend, held)
                found.append(outs)
            return [found, held]

        return chosen, jax.jit(calls)(params, pages)

    monkeypatch.setattr(plan, "attention_chain_refusal", lambda *_, **__: "apart")
    apart_plan, apart = run()
    monkeypatch.setattr(plan, "attention_chain_refusal", lambda *_, **__: None)
    whole_plan, whole = run()
    traits = layer_traits(config)
    fitting = traits.feed_forward == "dense" and traits.bias != "all" and not traits.window and config.rope.partial == 1
    assert (apart_plan.attention, whole_plan.attention) == ("apart", "in_layer" if fitting else "apart")
    monkeypatch.setattr(plan, "attention_chain_refusal", lambda *_, **__: "apart")
    written = []
    monkeypatch.setattr(paged, "qkv_attention_refusal", lambda *_, **__: written.append(True))
    _, at_once = run()
    assert bool(written) == any(reach is None for reach in config.windows)
    # Rows that may be pieces of one sequence are all written before one of them attends.
    monkeypatch.setattr(plan, "attention_chain_refusal", lambda *_, **__: None)
    before = len(written)
    related_plan, related = run(related=True)
    assert (related_plan.attention, len(written)) == ("apart", before)
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
    config, params, _, expected = golden(case)
    best = bind(config, params).best(jnp.asarray(expected["final_norm"]))
    np.testing.assert_array_equal(np.asarray(best), np.argmax(expected["logits"], axis=-1))


@pytest.mark.gpu
@pytest.mark.large  # a tenth of an 80 GB card is not enough
@pytest.mark.parametrize(
    ("name", "sequences", "tokens", "runner"),
    [
        ("Qwen3.5-4B", 4, 1, "persistent"), ("Qwen3.5-27B", 1, 16, "persistent"), ("Qwen3.5-9B", 8, 16, "fused_dense"),
    ],
)  # fmt: skip
def test_hybrid_layers_of_published_shapes(name: str, sequences: int, tokens: int, runner: str) -> None:
    """As far from the layers in float32 as those called one by one in bfloat16 are, up to a little; twice the same bits."""
    config, jitted = first_layers(name), jax.jit(verified(first_layers(name), sequences, tokens), static_argnums=1)
    params = drawn_params(config)
    wide = {one: array.astype(jnp.float32) for one, array in params.items()}
    call = CallShape(sequences, tokens, jnp.dtype(jnp.bfloat16))
    true, plain = jitted(wide, PLAIN), jitted(params, PLAIN)
    for layout in ("rows", "column_blocks"):
        held = params if layout == "rows" else block_columns(dict(params))
        chosen = choose(layer_traits(config), call, weight_format(held))
        assert chosen.runner == runner
        agree_as_plain(true, plain, jitted(held, chosen), jitted(held, chosen))


EIGHT_BITS: list[Any] = [
    ("Qwen3.5-9B", 1, 16, "int8", "persistent"), ("Qwen3.5-27B", 1, 16, "fp8_dynamic", "persistent"),
    ("Qwen3.5-9B", 8, 16, "fp8_dynamic", "fused_float8"),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize(("name", "sequences", "tokens", "kind", "runner"), EIGHT_BITS)
def test_hybrid_layers_in_eight_bits_of_published_shapes(
    name: str, sequences: int, tokens: int, kind: Any, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far from float32 activations on the same rounded weights as layers called one by one are, which round rows as well."""
    monkeypatch.setattr(switches, "HYBRID_EIGHT_BITS", True)
    config, jitted = first_layers(name), jax.jit(verified(first_layers(name), sequences, tokens), static_argnums=1)
    params: dict[str, Any] = dict(quantize_weights(drawn_params(config), kind))
    wide: dict[str, Any] = {}
    for one, weight in params.items():
        if isinstance(weight, Quantized):
            wide[one] = dataclasses.replace(weight, dtype=jnp.dtype(jnp.float32), dynamic=False)
        else:
            wide[one] = weight.astype(jnp.float32)
    chosen = choose(layer_traits(config), CallShape(sequences, tokens, jnp.dtype(jnp.bfloat16)), weight_format(params))
    assert chosen.runner == runner
    agree_as_plain(jitted(wide, PLAIN), jitted(params, PLAIN), jitted(params, chosen), jitted(params, chosen))


@pytest.mark.few
@pytest.mark.parametrize(("name", "sequences", "tokens", "kind", "runner"), EIGHT_BITS)
def test_hybrid_layers_in_eight_bits_lower(
    name: str, sequences: int, tokens: int, kind: Any, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For an H100. Behind each mixer one launch has all that follows, or sums are normed and rounded in one."""
    monkeypatch.setattr(switches, "HYBRID_EIGHT_BITS", True)
    config = first_layers(name, 2)
    params = jax.eval_shape(lambda: quantize_weights(drawn_params(config), kind))
    run = jax.jit(verified(config, sequences, tokens), static_argnums=1)
    with on("NVIDIA H100 80GB HBM3"):
        call = CallShape(sequences, tokens, jnp.dtype(jnp.bfloat16))
        chosen = choose(layer_traits(config), call, weight_format(params))
        text = run.trace(params, chosen).lower(lowering_platforms=("cuda",)).as_text()
    assert chosen.runner == runner
    # A kernel is a function of its own in a program, whoever calls it.
    calls = collections.Counter(re.findall(r"call @(_run_products|launch_verify|_add_norm)", text))
    assert calls == {"launch_verify": 1} | ({"_run_products": 2} if runner == "persistent" else {"_add_norm": 3})


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize(
    ("sequences", "tokens", "kind", "runner", "attention"),
    [
        (1, 1, None, "persistent", "in_layer"), (1, 16, None, "persistent", "apart"), (8, 16, None, "fused_dense", "apart"),
        (8, 16, "fp8_dynamic", "fused_float8", "apart"),
    ],
)  # fmt: skip
def test_layers_with_biases_of_published_shapes(
    sequences: int, tokens: int, kind: Any, runner: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen2.5-7B's, of which a launch gives the product and the next one takes it with the bias."""
    config, pages = first_layers("Qwen2.5-7B", 2), PageShape(64, 2, jnp.dtype(jnp.bfloat16))
    jitted, params = jax.jit(verified(config, sequences, tokens), static_argnums=1), drawn_params(config)
    held: dict[str, Any] = dict(params) if kind is None else dict(quantize_weights(dict(params), kind))
    wide: dict[str, Any] = {one: array.astype(jnp.float32) for one, array in params.items()}
    for one, weight in held.items():
        if isinstance(weight, Quantized):
            wide[one] = dataclasses.replace(weight, dtype=jnp.dtype(jnp.float32), dynamic=False)
    call = CallShape(sequences, tokens, jnp.dtype(jnp.bfloat16), pages)
    chosen = choose(layer_traits(config), call, weight_format(held))
    assert (chosen.runner, chosen.attention) == (runner, attention)
    agree_as_plain(jitted(wide, PLAIN), jitted(held, PLAIN), jitted(held, chosen), jitted(held, chosen))


def first_layers(name: str, count: int = 4) -> Any:
    """Of a published target; of a hybrid one the last one attends."""
    sizes: Any = {"num_layers": count, "windows": (None,) * count, "vocab_size": 256}
    sizes |= {"full_layers": (count - 1,)} if name in HYBRID_TARGETS else {}
    every: Any = {**HYBRID_TARGETS, **QWEN2_TARGETS}
    return dataclasses.replace(every[name], **sizes)


def drawn_params(config: Any) -> dict[str, jax.Array]:
    """Random weights in bfloat16, those of norms away from 1, and biases."""
    params = init_params(family_for(config).parameters(config), jax.random.key(0), "bfloat16")
    for one in [one for one in params if one.endswith((".offset", ".bias"))]:
        params[one] = 0.1 * jax.random.normal(jax.random.key(len(one)), params[one].shape, params[one].dtype)
    return params


def agree_as_plain(
    true: list[jax.Array], plain: list[jax.Array], fused: list[jax.Array], again: list[jax.Array]
) -> None:
    """Two runs of the same bits, about as far from what is true as the plain one."""
    for exact, theirs, ours, second in zip(true, plain, fused, again, strict=True):
        unit = float(jnp.finfo(ours.dtype).eps) * float(jnp.abs(exact).max())
        assert float(jnp.abs(ours - exact).max()) <= 1.3 * float(jnp.abs(theirs - exact).max()) + 2 * unit
        assert np.asarray(ours).tobytes() == np.asarray(second).tobytes()


def verified(config: Any, sequences: int, tokens: int) -> Callable[[Any, ExecutionPlan], list[jax.Array]]:
    """What runs a block of tokens over pages, and states where there are such, for the stream after each layer and the last one's
    norm."""
    table = jnp.arange(2 * sequences).reshape(sequences, 2)
    positions, live = jnp.arange(tokens)[None].repeat(sequences, axis=0), jnp.ones((sequences,), bool)
    ids = jax.random.randint(jax.random.key(1), (sequences, tokens), 0, 256)

    def run(params: Any, chosen: ExecutionPlan) -> Any:
        dtype = params["embed.weight"].dtype
        model, cache = bind(config, params), make_pages(config, 2 * sequences, 64, dtype)
        attend: Any = PagedAttend(table, positions, jnp.full((sequences,), tokens), 64)
        if layer_traits(config).delta is not None:
            attend, cache = verifying(attend, cache, make_states(config, sequences, dtype), live)
        planned, rotary = Planned(chosen), model.rotary(positions)
        x, normed = planned.embed(model.layers, model.embed.weight[...], ids)
        streams, hidden, _ = planned(model.layers, model.norm, x, rotary, attend, cache, normed=normed)
        return [*streams, hidden]

    return run


def test_convolved_layers_agree_with_layers_called_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks of different tokens: what is convolved stays in its own. Of fused runners one takes such layers."""
    config = draft_config(block_size=5, conv_taps=2, conv_group=4)
    params = init_params(dflash_parameters(config), jax.random.key(3))
    x = jax.random.normal(jax.random.key(4), (2, 5, config.hidden_size))
    monkeypatch.setattr(plan, "layer_chain_refusal", lambda *_, **__: None)
    monkeypatch.setattr(plan, "dense_refusal", lambda *_: None)
    chosen = choose(dflash_traits(config), CallShape(2, 5, x.dtype), weight_format(params))
    assert (chosen.runner, "no epilogue" in (chosen.refused("persistent") or "")) == ("fused_dense", True)

    @partial(jax.jit, static_argnums=0)
    def run(chosen: ExecutionPlan, params: Any) -> list[jax.Array]:
        model: Any = bind(config, params)
        rotary = model.rotary(jnp.arange(5)[None].repeat(2, axis=0))
        return runs(chosen, model, x, rotary, dense_attend())

    agree(run(PLAIN, params), run(chosen, params))
