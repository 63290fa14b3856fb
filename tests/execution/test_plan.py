"""Execution plans: which runner takes a call, and why the others were refused."""

import json
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.cache import make_pages
from dflash_jax.checkpoints.weights import weight_shapes
from dflash_jax.cli.info import collect, lines
from dflash_jax.decoding.cycle import graph_refusal, in_one_graph
from dflash_jax.decoding.state import Plans, Setup
from dflash_jax.execution import plan, switches
from dflash_jax.execution.plan import (
    CUBLAS_PRODUCTS,
    ONE_GRAPH,
    CallShape,
    PageShape,
    WeightFormat,
    choose,
    choose_context,
    weight_format,
)
from dflash_jax.execution.runner import Planned
from dflash_jax.execution.weight_layout import cycle_rows
from dflash_jax.models import family_for, family_named, layer_traits
from dflash_jax.models.presets import (
    DEEPSEEK_TARGETS,
    DRAFTERS,
    GEMMA4_TARGETS,
    GPT_OSS_TARGETS,
    HEAD_DRAFTERS,
    HYBRID_TARGETS,
    LLAMA_TARGETS,
    MOE_TARGETS,
    QWEN2_TARGETS,
    TARGETS,
)
from dflash_jax.models.traits import DeltaTraits
from dflash_jax.parallel.ranks import share_config
from dflash_jax.quantization.weights import quantize_weights

from ..devices import h200, on

BFLOAT16 = jnp.dtype(jnp.bfloat16)
QWEN3 = TARGETS["Qwen3-4B"]
DRAFT = DRAFTERS["Qwen3-4B-DFlash-b16"]
TRAITS = layer_traits(QWEN3)
FORMAT = WeightFormat("bfloat16", layout="column_blocks", plain=True)
PAGES = PageShape(64, 32, BFLOAT16)
CYCLE = CallShape(1, 16, BFLOAT16, PAGES)
STORED = replace(FORMAT, layout="rows")


@pytest.mark.parametrize(
    ("name", "sequences", "weights", "runner", "attention"),
    [
        ("Qwen3-4B", 1, None, "persistent", "in_layer"), ("Qwen3-4B", 8, None, "fused_dense", "apart"),
        ("Qwen3-4B", 32, None, "fused_dense", "apart"), ("Qwen3-4B", 64, None, "plain", "apart"),
        ("Qwen3-4B", 1, "int8", "persistent", "in_layer"), ("Qwen3-4B", 8, "int8", "plain", "apart"),
        ("Qwen3-4B", 8, "fp8_dynamic", "fused_float8", "apart"), ("Qwen3-30B-A3B", 1, None, "fused_moe", "apart"),
        ("Llama-3.1-8B", 1, None, "persistent", "in_layer"), ("Llama-3.1-8B", 8, "fp8_dynamic", "fused_float8", "apart"),
        ("Qwen2.5-7B", 1, None, "persistent", "apart"), ("Qwen2.5-7B", 8, "fp8_dynamic", "fused_float8", "apart"),
        ("Qwen3.5-4B", 1, None, "persistent", "apart"),
        ("Qwen3.5-4B", 8, None, "fused_dense", "apart"), ("Qwen3.5-27B", 1, None, "persistent", "apart"),
        ("Qwen3.5-35B-A3B", 1, None, "fused_moe", "apart"),
    ],
)  # fmt: skip
def test_runner_of_a_published_target(name: str, sequences: int, weights: Any, runner: str, attention: str) -> None:
    """A pass over 16 tokens of each sequence on an H200."""
    every: Any = {**TARGETS, **MOE_TARGETS, **LLAMA_TARGETS, **QWEN2_TARGETS, **HYBRID_TARGETS}
    config = every[name]
    if name not in HYBRID_TARGETS:
        config = replace(config, num_layers=1, windows=config.windows[:1])
    with h200():
        shapes = weight_shapes([(config, family_for(config))], BFLOAT16, weights, rows=16 * sequences)["target"]
        found = choose(layer_traits(config), replace(CYCLE, sequences=sequences), weight_format(shapes))
    assert (found.runner, found.attention) == (runner, attention)
    assert found.device == "NVIDIA H200"
    assert (found.workspace is None) == (runner != "persistent")
    order = ["persistent", "fused_dense", "fused_float8", "fused_moe", "plain"]
    assert [one.what for one in found.refusals if one.what in order] == order[: order.index(runner)]
    assert all(one.reason for one in found.refusals)


@pytest.mark.parametrize(
    ("sequences", "tokens", "weights", "runner"),
    [
        (1, 16, "int8", "persistent"), (4, 1, "fp8", "persistent"), (1, 16, "fp8_dynamic", "persistent"),
        (2, 16, "fp8_dynamic", "plain"), (8, 16, "fp8", "plain"), (8, 16, "fp8_dynamic", "fused_float8"),
        (1, 512, "fp8_dynamic", "fused_float8"),
    ],
)  # fmt: skip
def test_hybrid_targets_in_eight_bits(
    sequences: int, tokens: int, weights: Any, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As dense targets, unless that is switched off."""
    config, call = HYBRID_TARGETS["Qwen3.5-9B"], CallShape(sequences, tokens, BFLOAT16)
    with h200():
        held = weight_format(weight_shapes([(config, family_for(config))], BFLOAT16, weights)["target"])
        found = choose(layer_traits(config), call, held)
        assert (found.runner, found.attention) == (runner, "apart")
        monkeypatch.setattr(switches, "HYBRID_EIGHT_BITS", False)
        off = choose(layer_traits(config), call, held)
        assert off.runner == "plain"
        assert runner == "plain" or "switched off for weights in eight bits" in (off.refused(runner) or "")


def test_rows_of_gates_count_twice_in_eight_bits() -> None:
    """A kernel takes widths of whole 32: of 24 heads the projection has 16 too many, and none with its gates twice."""
    config = replace(HYBRID_TARGETS["Qwen3.5-9B"], linear_key_heads=8, linear_value_heads=24)
    with h200():
        wide = choose(layer_traits(config), CYCLE, FORMAT)
        narrow = choose(layer_traits(config), CYCLE, WeightFormat("int8", quantized=True, paired=True))
    assert "32 divides, not next 8240" in (wide.refused("persistent") or "")
    assert narrow.runner == "persistent"


@pytest.mark.parametrize(
    ("change", "what", "said"),
    [
        ({"attention": "latent"}, "persistent", "latent rows"), ({"bias": "all"}, "persistent", "output has a bias"),
        ({"activation": "gelu_tanh"}, "persistent", "gelu_tanh"), ({"value_scale": 2.0}, "persistent", "multiplied with 2.0"),
        ({"feed_forward": "mixed"}, "persistent", "experts"),
        ({"convolved": True}, "persistent", "convolved along the block"),
        ({"window": True}, "in_layer", "sliding windows"), ({"sinks": True}, "in_layer", "sinks"),
        ({"rotary_dim": 64}, "in_layer", "64 of a head's 128"), ({"paired": True}, "in_layer", "lie next to each other"),
        ({"gated": True}, "in_layer", "attention is gated"),
        ({"delta": DeltaTraits(12352, 4096)}, "in_layer", "gated delta nets"),
    ],
)  # fmt: skip
def test_every_trait_that_kernels_lack_is_refused_by_name(change: dict[str, Any], what: str, said: str) -> None:
    with h200():
        assert choose(TRAITS, CYCLE, FORMAT).refusals == ()
        found = choose(replace(TRAITS, **change), CYCLE, FORMAT)
    assert said in (found.refused(what) or "")
    apart = "fused_dense" if "convolved" in change else "plain"
    assert found.runner == ("persistent" if what == "in_layer" else apart)


def test_a_draft_head_leaves_the_layers_as_fast_as_they_are() -> None:
    """DSpark's are v1's; DFlash 2's have convolutions, which no fused runner has."""
    call = replace(CYCLE, tokens=7)
    with h200():
        runners = {}
        for name in ("dspark_qwen3_8b_block7", "Qwen3-8B-DFlash2-b16"):
            config = HEAD_DRAFTERS[name]
            shapes = weight_shapes([(config, family_for(config))], BFLOAT16, rows=16)["draft"]
            runners[name] = choose(layer_traits(config), call, weight_format(shapes)).runner
    assert list(runners.values()) == ["persistent", "plain"]


def test_several_devices_and_switches_leave_other_runners(monkeypatch: pytest.MonkeyPatch) -> None:
    with h200():
        found = choose(TRAITS, CYCLE, FORMAT, ranks=2)
        assert found.runner == "fused_dense"
        assert "twice a layer" in (found.refused("persistent") or "")
        assert found.xla_options == ()
        assert choose(TRAITS, CYCLE, None, ranks=2).weight_layout == "rows"
        monkeypatch.setattr(switches, "PERSISTENT", False)
        assert choose(TRAITS, CYCLE, FORMAT).runner == "fused_dense"
        monkeypatch.setattr(switches, "FUSED_DENSE", False)
        found = choose(TRAITS, CYCLE, FORMAT)
        assert (found.runner, found.refused("persistent"), found.refused("fused_dense")) == (
            "plain", "switched off", "switched off",
        )  # fmt: skip
        monkeypatch.undo()
        monkeypatch.setattr(switches, "BIASES", False)
        assert "switched off" in (choose(replace(TRAITS, bias="qkv"), CYCLE, FORMAT).refused("fused_dense") or "")
        monkeypatch.setattr(switches, "HYBRID", False)
        found = choose(layer_traits(HYBRID_TARGETS["Qwen3.5-4B"]), CYCLE, FORMAT)
        assert "switched off" in (found.refused("persistent") or "")


def test_few_rows_of_wide_layers_that_devices_share() -> None:
    """XLA multiplies them faster, and adds up by collectives, with which a loop is no graph."""
    traits = layer_traits(share_config(TARGETS["Qwen3-8B"], 4))
    call, stored = CallShape(32, 1, BFLOAT16, PAGES), replace(FORMAT, layout="rows")
    with h200():
        outside, inside = (choose(traits, call, stored, ranks=4, loops=loops) for loops in (False, True))
        assert choose(traits, call, stored).runner == "plain"
    assert (outside.runner, outside.exchange) == ("plain", False)
    assert (inside.runner, inside.exchange) == ("fused_dense", True)


GPT_OSS, GEMMA4 = GPT_OSS_TARGETS["gpt-oss-20b"], GEMMA4_TARGETS["gemma-4-26B-A4B"]


@pytest.mark.parametrize(("target", "sums"), [(GPT_OSS, 1), (GEMMA4, 2), (DEEPSEEK_TARGETS["DeepSeek-V2-Lite"], 1)])
def test_layers_one_by_one_add_up_by_launches_of_their_own(target: Any, sums: int) -> None:
    call = CallShape(8, 16, BFLOAT16, PAGES)
    with h200():
        outside, inside = (
            choose(layer_traits(share_config(target, 2)), call, STORED, ranks=2, loops=loops) for loops in (False, True)
        )
    assert (outside.exchange, outside.sums, outside.workspace, outside.xla_options) == (False, 0, None, ())
    assert (inside.exchange, inside.sums, inside.workspace) == (True, sums, "sums")
    assert dict(inside.xla_options).items() >= ONE_GRAPH.items()


@pytest.mark.parametrize(("dtype", "ranks", "told"), [
    ("bfloat16", 8, "each of 8 devices would send 20643840 bytes for a sum"), ("float32", 4, "would send 17694720 bytes"),
    ("float16", 2, "adds up bfloat16 or float32, not float16"), ("bfloat16", 2, "switched off"),
])  # fmt: skip
def test_sums_that_stay_with_collectives(dtype: str, ranks: int, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switches, "RANK_EXCHANGE_SUMS", told != "switched off")
    with h200():
        found = choose(
            layer_traits(share_config(GPT_OSS, ranks)),
            CallShape(32, 16, jnp.dtype(dtype)),
            STORED,
            ranks=ranks,
            loops=True,
        )
    assert (found.runner, found.exchange, found.sums, found.workspace) == ("plain", False, 0, None)
    assert told in (found.refused("exchange") or "")
    assert "WHILE" not in str(found.xla_options)


def test_launches_that_norm_take_no_stream_of_any_width() -> None:
    """Those of a drafter 2,880 wide are followed by sums of their own."""
    drafter = replace(DRAFTERS["gpt-oss-20b-DFlash"], hidden_size=2880)
    call = CallShape(8, 16, BFLOAT16, PAGES)
    with h200():
        narrow, wide = (
            choose(layer_traits(share_config(one, 2)), call, STORED, ranks=2, loops=True)
            for one in (drafter, replace(drafter, hidden_size=3072))
        )
    assert (narrow.runner, narrow.exchange, narrow.workspace) == ("fused_dense", True, "sums")
    assert (wide.runner, wide.exchange, wide.workspace) == ("fused_dense", True, "rows")


def test_pages_that_rows_may_share_keep_attention_apart() -> None:
    with h200():
        found = choose(TRAITS, replace(CYCLE, pages=None), FORMAT)
    assert (found.runner, found.attention, found.workspace) == ("persistent", "apart", "layer")


def test_other_devices_run_plain_layers() -> None:
    for kind in ("NVIDIA A100-SXM4-80GB", None):
        with on(kind) if kind else jax.default_device(jax.devices("cpu")[0]):
            found = choose(TRAITS, CYCLE, replace(FORMAT, layout="rows"))
        assert found.runner == "plain"
        assert "Hopper" in (found.refused("persistent") or "")


@pytest.mark.parametrize(
    ("slots", "dtypes", "plain"),
    [(32, {"bfloat16"}, True), (31, {"bfloat16"}, False), (32, {"bfloat16", "int8"}, False), (32, {"float32"}, False)],
)
@pytest.mark.parametrize("kind", [None, "fp8", "fp8_dynamic"])
def test_products_of_many_rows_are_left_to_cublas(slots: int, dtypes: set[str], plain: bool, kind: Any) -> None:
    """Beside a drafter in float8 where that has kernels of its own for many rows."""
    weights = weight_format({name: jax.ShapeDtypeStruct((2, 2), name) for name in dtypes})
    beside = None
    if kind is not None:
        drafter = {"fc.weight": jax.ShapeDtypeStruct((2, 16), jnp.bfloat16)}
        beside = weight_format(jax.eval_shape(lambda params: quantize_weights(params, kind), drafter))
        plain = plain and kind == "fp8_dynamic"
    found = choose(TRAITS, CallShape(slots, 16, BFLOAT16), weights, beside=beside)
    assert dict(found.xla_options) == ONE_GRAPH | (CUBLAS_PRODUCTS if plain else {})


def test_context_of_a_drafter() -> None:
    """One launch for few rows, packed rows for many, where a block is drafted after it."""
    with h200():
        shapes = weight_shapes([(QWEN3, family_named("qwen3")), (DRAFT, family_named("dflash"))], BFLOAT16)["draft"]
        forms = {rows: choose_context(shapes, rows, BFLOAT16).form for rows in (16, 128, 512)}
        alone = choose_context(shapes, 16, BFLOAT16, drafts=False)
        assert forms == {16: "one_launch", 128: "apart", 512: "packed"}
        assert [one.what for one in alone.refusals] == ["packed", "one_launch"]


def test_the_plans_of_a_setup() -> None:
    """The target's pass, the block and the context of one cycle; a cycle of one verified token drafts nothing."""
    pair = [(QWEN3, family_named("qwen3")), (DRAFT, family_named("dflash"))]
    setup = Setup(QWEN3, DRAFT)
    with h200():
        weights = weight_shapes(pair, BFLOAT16, rows=cycle_rows(1, DRAFT))
        pools = _pools(QWEN3), _pools(DRAFT)
        plans: Any = setup.plans(weights, 1, 32, pools)
        assert plans.target.runner == plans.draft.runner == "persistent"
        assert plans.target.weight_layout == plans.draft.weight_layout == "column_blocks"
        assert plans.context.form == "one_launch"
        alone: Any = setup.verifying(1).plans(weights, 1, 32, pools)
        assert (alone.draft, alone.context.form) == (None, "apart")


def _pools(config: Any) -> Any:
    return jax.eval_shape(partial(make_pages, config, 4, 64, BFLOAT16))


def test_a_plain_plan_reads_rows_of_the_table() -> None:
    table = jnp.arange(6.0).reshape(3, 2)
    rows, normed = Planned(plan.PLAIN).embed([], table, jnp.array([[2, 0]]))
    np.testing.assert_array_equal(np.asarray(rows), [[[4, 5], [0, 1]]])
    assert normed is None


def test_info_tells_plans_and_refusals() -> None:
    facts = collect(max_batch=4)
    calls = [(one["model"], one["sequences"], one["runner"]) for one in facts["execution"]]
    assert calls == [(role, n, "plain") for n in (1, 4) for role in ("target", "draft")]
    assert all("Hopper" in one["refused"]["persistent"] for one in facts["execution"])
    assert json.loads(json.dumps(facts["execution"])) == facts["execution"]
    text = "\n".join(lines(facts))
    assert "execution target 1 x 16, draft 1 x 16, target 4 x 16, draft 4 x 16 tokens: plain, matrices in rows" in text
    assert text.count("not persistent: needs a Hopper GPU") == 1


def test_why_a_loop_over_devices_is_no_graph() -> None:
    there, none = plan.ExecutionPlan("plain", exchange=True), plan.ExecutionPlan("plain")
    refused = replace(none, refusals=(plan.Refusal("exchange", "too far apart"),))
    setup = Setup(target=GPT_OSS, draft=DRAFTERS["gpt-oss-20b-DFlash"], ranks=2)
    assert graph_refusal(setup, Plans(there, there)) is None
    assert in_one_graph(replace(setup, ranks=1), Plans(none, none))
    assert graph_refusal(setup, Plans(there, refused)) == "layers of the drafter add up by collectives: too far apart"
    changes: tuple[dict[str, Any], ...] = (
        {"dealt": 2}, {"mode": "sampled"}, {"logprobs": True}, {"exact": True},
        {"draft": HEAD_DRAFTERS["dspark_qwen3_8b_block7"]},
    )  # fmt: skip
    told = ("dealt out", "tokens are drawn", "log-probabilities told", "exact texts", "draft head")
    for change, reason in zip(changes, told, strict=True):
        changed = replace(setup, **change)
        assert reason in (graph_refusal(changed, Plans(there, there)) or "")
        assert not in_one_graph(changed, Plans(there, there))
    assert in_one_graph(replace(setup, exact=True, target=QWEN3), Plans(there)) == QWEN3.tie_embeddings
