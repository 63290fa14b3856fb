"""Laguna: files of targets and drafters, a drafter's block against float64, both layouts of its tensors, and what is refused.

Logits, taps, texts and the way back are held with those of other families with experts in `test_other_experts`.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from dflash_convert.cli import main as dflash_convert
from safetensors.numpy import load_file

import dflash_jax as dj
from dflash_jax.attention.dense import dense_attend
from dflash_jax.checkpoints.huggingface import open_checkpoint
from dflash_jax.checkpoints.opening import open_checkpoint as open_any
from dflash_jax.engine.sharing import sharing_refusals
from dflash_jax.execution.plan import CallShape, choose, choose_context, exact_refusals
from dflash_jax.models import DFlashConfig, bind, count, family_for, family_of, fuse_context_projection, layer_traits

from ..published_layouts import LAYOUTS, TARGETS
from .test_parity_llama import opened

TARGET, DRAFTER = TARGETS["Laguna"], LAYOUTS["layers of Laguna"]
NAMES = ("aux_hidden_norms.0.weight", "layers.0.self_attn.qkv_proj.weight")
FULL, SLIDING = "full_attention", "sliding_attention"
# Laguna-S-2.1-DFlash.
PUBLISHED = DRAFTER | {
    "head_dim": 128, "hidden_size": 3072, "intermediate_size": 12_288, "max_position_embeddings": 1_048_576,
    "num_attention_heads": 72, "num_hidden_layers": 6, "num_key_value_heads": 8, "sliding_window": 512, "vocab_size": 100_352,
    "layer_types": [SLIDING] * 6, "draft_vocab_size": 100_352, "eagle_aux_hidden_state_layer_ids": [2, 11, 20, 30, 39, 48],
    "dflash_config": {
        "block_size": 16, "mask_token_id": 12, "num_target_layers": 48, "target_layer_ids": [1, 10, 19, 29, 38, 47],
        "causal": True,
    },
}  # fmt: skip


def read(file: dict[str, Any], names: Any = None, /, **changes: Any) -> Any:
    values = {key: value for key, value in (file | changes).items() if value is not ...}
    return family_of(values).config(values, *(() if names is None else (names,)))


def test_what_targets_say() -> None:
    config = read(TARGET)
    assert (config.layer_heads, config.num_heads, config.windows) == ((4, 6, 2, 4), 6, (None, 9, 9, None))
    assert (config.rope.partial, config.rope.attention_factor, config.local_rope.theta) == (0.5, 1.2, 1e4)
    assert (config.gating, config.dense_layers, config.routing_scale) == ("per-head", (0,), 2.5)
    assert type(config).from_dict(config.to_dict()) == config
    assert config == read(TARGET, gating=True, gating_types=...)
    assert config == read(TARGET, mlp_layer_types=...) == read(TARGET, mlp_only_layers=...)
    ropes = TARGET["rope_parameters"]
    flat = read(TARGET, rope_parameters=ropes[FULL], swa_rope_parameters=ropes[SLIDING])
    assert flat == config == read(TARGET, partial_rotary_factor=0.5)
    halves = {
        kind: {key: value for key, value in ropes[kind].items() if "partial" not in key} for kind in (FULL, SLIDING)
    }
    assert read(TARGET, rope_parameters=halves, partial_rotary_factor=0.5).local_rope.partial == 0.5
    absent = read(TARGET, rope_parameters=...)
    assert (absent.rope.theta, absent.rope.partial, absent.local_rope.theta) == (5e5, 0.5, 1e4)
    # M.1: no windows, gates of every entry, as many heads everywhere.
    wide = read(
        TARGET, layer_types=..., sliding_window=0, gating="per-element", gating_types=..., num_attention_heads_per_layer=...,
        rope_parameters={FULL: ropes[FULL]},
    )  # fmt: skip
    assert (wide.layer_heads, wide.windows, wide.gating) == ((4,) * 4, (None,) * 4, "per-element")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_attention_heads_per_layer": [4, 6, 3, 4]}, "a multiple of num_key_value_heads=2"),
        ({"num_attention_heads_per_layer": [4]}, "a number for each of 4 layers"), ({"gating": False}, "read in two ways"),
        ({"gating": "per-layer"}, "gating must be"), ({"gating_types": ["per_element"] * 4}, "gating_types must be per_head"),
        ({"mlp_only_layers": [1]}, "keep what the model"), ({"decoder_sparse_step": 2}, "decoder_sparse_step must be 1"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types must list"), ({"attention_bias": True}, "attention_bias must be false"),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types must list"), ({"num_experts_per_tok": 9}, "is more than"),
        ({"moe_apply_router_weight_on_input": True}, "moe_apply_router_weight_on_input=True"),
        ({"moe_router_score_func": "sqrtsoftplus"}, "moe_router_score_func="), ({"norm_topk_prob": False}, "norm_topk_prob=False"),
        ({"rope_parameters": {FULL: TARGET["rope_parameters"][FULL]}}, "says how these rotate"),
        ({"rope_parameters": {SLIDING: {"rope_theta": 1e4}}}, "must say how layers of"),
        ({"swa_rope_parameters": {"rope_theta": 1e3}}, "in two ways how layers of"),
    ],
)  # fmt: skip
def test_what_is_refused_of_targets(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(dj.ConfigError, match=said):
        read(TARGET, **changes)


def test_the_published_drafter_has_its_size_and_tensors() -> None:
    config = read(PUBLISHED, NAMES)
    assert (config.laguna, config.gating, config.joined_rows) == (True, "per-head", True)
    assert (config.windows, config.causal, config.num_drafts) == ((512,) * 6, (True,) * 6, 15)
    table = family_for(config).parameters(config)
    assert (count(table), len({source.name for row in table for source in row.sources})) == (1_114_977_792, 69)
    assert read(PUBLISHED) == replace(config, joined_rows=False)
    assert DFlashConfig.from_dict(config.to_dict()) == config
    assert (
        read(PUBLISHED, ("aux_hidden_norms.0.weight",), architectures=["DFlashDraftModel"], gating=False).gating
        == "disabled"
    )


@pytest.mark.parametrize(
    ("changes", "names", "said"),
    [
        ({}, ("layers.0.input_layernorm.weight",), "there is no aux_hidden_norms"), ({"gating": 1.0}, NAMES, "gating must be"),
        ({"num_attention_heads_per_layer": [4, 6]}, NAMES, "must be 4 for each of 2 layers"),
        ({"attention_bias": True}, NAMES, "attention_bias false"),
        ({"attention_value_scale": 0.5}, NAMES, "not known of drafters with layers of laguna"),
        ({"draft_vocab_size": 40}, (*NAMES, "layers.0.x"), "draft_vocab_size=40 needs a head"),
    ],
)  # fmt: skip
def test_what_is_refused_of_drafters(changes: dict[str, Any], names: tuple[str, ...], said: str) -> None:
    with pytest.raises(dj.ConfigError, match=said):
        read(DRAFTER, names, **changes)


def random_tensors(config: DFlashConfig, seed: int) -> dict[str, np.ndarray]:
    """float32 weights under the published names; norms' are about 1."""
    rng, found = np.random.default_rng(seed), dict[str, np.ndarray]()
    for row in family_for(config).parameters(config):
        for source in row.sources:
            drawn = rng.normal(size=source.shape) / np.sqrt(source.shape[-1])
            found[source.name] = (drawn if len(source.shape) > 1 else rng.uniform(0.5, 1.5, source.shape)).astype(
                np.float32
            )
    return found


def block(config: DFlashConfig, tensors: dict[str, np.ndarray], features: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Hidden states `[G, D]` in float64 of a block with the embeddings x after tokens with these features, by vLLM's law."""
    w, before = {name: array.astype(np.float64) for name, array in tensors.items()}, len(features)
    n, k, h, reach = config.num_heads, config.num_kv_heads, config.head_dim, config.windows[0]
    assert reach is not None
    angles = np.arange(before + len(x))[:, None] * config.rope.theta ** (-np.arange(0, h, 2) / h)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps) * w[f"{name}.weight"]

    def turned(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
        (first, second), cos, sin = np.split(x, 2, -1), np.cos(angles)[:, None], np.sin(angles)[:, None]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    taps = np.split(features, len(config.target_layer_ids), -1)
    context = np.concatenate([norm(tap, f"aux_hidden_norms.{i}") for i, tap in enumerate(taps)], -1)
    context = norm(context @ w["fc.weight"].T, "hidden_norm")
    for i in range(config.num_layers):
        at = f"layers.{i}."
        rows = norm(np.concatenate([context, x]), f"{at}input_layernorm")
        parts = np.split(rows @ w[f"{at}self_attn.qkv_proj.weight"].T, [n * h, (n + k) * h], -1)
        q, keys, values = (part.reshape(len(rows), -1, h) for part in parts)
        q = turned(norm(q, f"{at}self_attn.q_norm"), angles)[before:]
        keys = turned(norm(keys, f"{at}self_attn.k_norm"), angles)
        scores = np.einsum("tkgh,skh->kgts", q.reshape(len(q), k, -1, h), keys) / np.sqrt(h)
        ahead = np.arange(len(rows))[None] - np.arange(before, len(rows))[:, None]
        weights = np.exp(scores - scores.max()) * ((ahead <= 0) & (ahead > -reach))
        out = np.einsum("kgts,skh->tkgh", weights / weights.sum(-1, keepdims=True), values).reshape(len(q), n, h)
        gates = np.log1p(np.exp(rows[before:] @ w[f"{at}self_attn.g_proj.weight"].T))
        x = x + (out * gates.reshape(len(q), n, -1)).reshape(len(q), -1) @ w[f"{at}self_attn.o_proj.weight"].T
        normed = norm(x, f"{at}post_attention_layernorm")
        gate, up = (normed @ w[f"{at}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{at}mlp.down_proj.weight"].T
    return norm(x, "norm")


@pytest.mark.parametrize("gating", ["per-head", "per-element"])
def test_a_block_is_the_one_of_float64(gating: str) -> None:
    """Of 20 tokens of context a window of nine is seen."""
    config = read(DRAFTER, NAMES, gating=gating)
    tensors, rng = random_tensors(config, 0), np.random.default_rng(1)
    features = rng.normal(size=(20, 3 * config.target_hidden_size)).astype(np.float32)
    x = rng.normal(size=(config.block_size, config.hidden_size)).astype(np.float32)
    params = {
        row.name: jnp.asarray(np.concatenate([tensors[source.name] for source in row.sources]))
        for row in family_for(config).parameters(config)
    }
    drafter: Any = bind(config, fuse_context_projection(config, params))
    places = jnp.arange(20 + config.block_size)[None]
    context = drafter.context_kv(drafter.context(jnp.asarray(features)[None]), places[:, :20])
    ours, _ = drafter(jnp.asarray(x)[None], places[:, 20:], dense_attend(context=context))
    theirs = block(config, tensors, features.astype(np.float64), x.astype(np.float64))
    assert np.abs(np.asarray(ours[0]) - theirs).max() <= 1e-5 * np.abs(theirs).max()


@pytest.mark.parametrize("joined", [True, False])
def test_a_drafter_is_converted_there_and_back(tmp_path: Path, joined: bool) -> None:
    """Queries, keys and values in one tensor, as published, or apart."""
    config = replace(read(DRAFTER, NAMES), joined_rows=joined)
    (tmp_path / "in").mkdir()
    checkpoint = opened(tmp_path / "in", DRAFTER, random_tensors(config, 2))
    assert checkpoint.config == config
    assert dflash_convert([str(tmp_path / "in"), "--output", str(tmp_path / "out"), "--quiet"]) == 0
    assert open_any(tmp_path / "out").config == config
    assert dflash_convert([str(tmp_path / "out"), "--reverse", "--output", str(tmp_path / "back"), "--quiet"]) == 0
    assert open_checkpoint(tmp_path / "back").config == config
    first, last = (load_file(tmp_path / one / "model.safetensors") for one in ("in", "back"))
    assert first.keys() == last.keys()
    assert all(first[key].tobytes() == last[key].tobytes() for key in first)


def test_kernels_that_lack_its_heads_are_refused() -> None:
    """Fused runners, the projection of features in one launch, `exact`, and devices that heads of some layer do not divide."""
    target, draft = layer_traits(read(TARGET)), layer_traits(read(PUBLISHED, NAMES))
    for traits in (target, draft):
        plan = choose(traits, CallShape(1, 16, jnp.dtype("bfloat16")))
        assert plan.runner == "plain"
        assert any("gated one by one" in one.reason for one in plan.refusals)
    params = {name: jnp.zeros((8, 8)) for name in ("fc.weight", "context_kv_proj.weight", "feature_norms.weight")}
    assert choose_context(params, 8, jnp.dtype("bfloat16")).form == "apart"
    assert any("gated" in reason for reason in exact_refusals(target, 4))
    assert any("6 query heads are no multiple of 4" in reason for reason in sharing_refusals(read(TARGET), None, 4))
