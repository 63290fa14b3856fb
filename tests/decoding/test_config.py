"""Configurations as model files give them: what is read, what is refused, and what is left alone."""

import inspect
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_jax.config import NEUTRAL_KEYS, DecoderConfig, Qwen3Config, RopeConfig, reaching
from dflash_jax.engine.planning import plan_engine
from dflash_jax.errors import ConfigError, UnsupportedModelError
from dflash_jax.models import DFlashConfig, family_for, family_named, family_of
from dflash_jax.models.layers import rope_frequencies
from dflash_jax.options import LoadOptions

from .config_files import DRAFT, REMOVE, SLIDING, TARGET, changed, draft, target


def test_a_target_is_read() -> None:
    expected = Qwen3Config(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=8,
        rope=RopeConfig(theta=1e6, original_max_position=512), max_position=512, windows=(None,) * 4, tie_embeddings=True,
    )  # fmt: skip
    config = target()
    assert (config.rope.kind, config.rope.theta, config.rope.partial) == ("default", 1e6, 1.0)
    assert config.to_dict() | {"rope": None} == expected.to_dict() | {"rope": None}


@pytest.mark.parametrize("value", [True, 1, 0.5, "on", [1], {"a": 1}])
@pytest.mark.parametrize("read", [target, draft], ids=["target", "draft"])
def test_an_unknown_key_is_refused_by_name(read: Any, value: Any) -> None:
    with pytest.raises(ConfigError, match=r"keys this package does not implement: .*new_gate="):
        read(new_gate=value)


@pytest.mark.parametrize("read", [target, draft], ids=["target", "draft"])
def test_several_unknown_keys_are_all_named(read: Any) -> None:
    with pytest.raises(ConfigError, match=r"mup_scale=2\.0, qk_clip=4"):
        read(qk_clip=4, mup_scale=2.0)


@pytest.mark.parametrize("value", [None, False, 0, "", [], {}])
@pytest.mark.parametrize("read", [target, draft], ids=["target", "draft"])
def test_an_unknown_key_is_refused_also_where_it_says_nothing(read: Any, value: Any) -> None:
    """Nobody can tell what the absence of something unknown means: false is not always the default."""
    with pytest.raises(ConfigError, match="new_gate="):
        read(new_gate=value)


@pytest.mark.parametrize(
    "changes",
    [
        {"quantization_config": {"bits": 4}},
        {"num_experts": 128},
        {"final_logit_softcapping": 30.0},
        {"is_causal": False},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_targets_refuse_what_only_other_models_have(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        target(**changes)


def test_neutral_keys_change_nothing() -> None:
    neutral = dict.fromkeys(NEUTRAL_KEYS - {"architectures", "model_type"}, 1)
    assert target(**neutral) == target()
    assert draft(**neutral) == draft()
    training = {"num_anchors": 512, "loss_decay_gamma": 7.0, "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}}
    assert draft(**training) == draft()


@pytest.mark.parametrize(
    "key", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
)
@pytest.mark.parametrize("read", [target, draft], ids=["target", "draft"])
def test_a_missing_key_is_named(read: Any, key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} must be an integer of at least 1, got nothing: the key is missing"):
        read(**{key: REMOVE, "layer_types": REMOVE})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 0}, "hidden_size must be an integer of at least 1, got 0"),
        ({"vocab_size": "64"}, "vocab_size must be an integer of at least 1, got '64'"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be an integer"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"hidden_act": "gelu"}, "hidden_act must be silu, got 'gelu'"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a finite number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number"),
        ({"attention_bias": 1}, "attention_bias must be true or false"),
        ({"layer_types": ["full_attention"]}, "layer_types must list full_attention or sliding_attention for each of"),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types must list"),
        ({"layer_types": "full_attention"}, "layer_types must list"),
        ({"layer_types": 4}, "layer_types must list"),
        ({"layer_types": [["full_attention"]] * 4}, "layer_types must list"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_window must be an integer"),
    ],
    ids=lambda part: next(iter(part)) if isinstance(part, dict) else "",
)
def test_malformed_keys(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        target(**changes)


def test_a_file_that_is_no_object_is_refused() -> None:
    with pytest.raises((ConfigError, TypeError), match=r"got list|\[1\]"):  # type checks may speak first
        Qwen3Config.from_hf([1])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"use_sliding_window": False, "sliding_window": 99}, (None,) * 4),
        ({"use_sliding_window": True, "sliding_window": 99, "max_window_layers": 2}, (None, None, 99, 99)),
        ({"use_sliding_window": True, "sliding_window": 99, "max_window_layers": REMOVE}, (None,) * 4),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, (None,) * 4),
        (
            {
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "sliding_window": 7,
                "use_sliding_window": True,
            },
            (7, None, 7, None),
        ),
        ({"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 7}, (7, None, 7, None)),
    ],
)
def test_windows_of_a_target(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert target(**changes).windows == windows


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"kind": "default", "theta": 1e6}),
        ({"rope_theta": REMOVE}, {"kind": "default", "theta": 1e4}),
        ({"partial_rotary_factor": 0.5}, {"partial": 0.5}),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, {"kind": "linear", "factor": 4.0, "theta": 1e6}),
        ({"rope_theta": REMOVE, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, {"kind": "default", "theta": 5e5}),
        (
            {"rope_theta": REMOVE, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.25}},
            {"theta": 5e5, "partial": 0.25},
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "mscale": 1.0}},
            {"kind": "yarn", "factor": 8.0, "original_max_position": 64, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0},
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 64}},
            {"kind": "yarn", "factor": 8.0, "attention_factor": None},
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                              "original_max_position_embeddings": 128}},
            {"kind": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 128},
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("read", [target, draft], ids=["target", "draft"])
def test_rope_kinds(read: Any, changes: dict[str, Any], expected: dict[str, Any]) -> None:
    rope = read(**changes).rope
    assert {name: getattr(rope, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        (None, 512),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
            1024,
        ),  # added to a model's file
        ({"type": "yarn", "factor": 4.0}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "linear", "factor": 4.0}, 512),
        ({"rope_type": "dynamic", "factor": 4.0}, 2048),
    ],
)
def test_yarn_lengthens_what_a_model_takes(rope: dict[str, Any] | None, positions: int) -> None:
    assert target(rope_scaling=rope).max_position == positions


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"rope_type": "mrope", "factor": 2.0}}, "rope_type must be .* got 'mrope'"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rope_type dynamic needs factor"),
        ({"rope_scaling": {"rope_type": "longrope", "long_factor": [1.0]}}, "rope_type longrope needs short_factor"),
        (
            {"head_dim": 2, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "needs 2 pairs .* heads of 2 have 1",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "long_factor": [1.0] * 4, "short_factor": [1.0]}},
            "short_factor must have 4 numbers, one for each pair, got 1",
        ),
        (
            {
                "original_max_position_embeddings": 1,
                "rope_scaling": {"rope_type": "longrope", "long_factor": [1.0] * 4, "short_factor": [1.0] * 4},
            },
            "original_max_position_embeddings must be at least 2, got 1",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "long_factor": [1.0, 0], "short_factor": [1.0, 1.0]}},
            r"long_factor must be a list of positive numbers, got \[1.0, 0\]",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_type linear needs factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "needs low_freq_factor, high_freq_factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0}}, "factor and rope_theta must be positive"),
        ({"rope_scaling": "linear"}, "rope_scaling must be a JSON object, got str"),
        ({"rope_parameters": [1e6]}, "rope_parameters must be a JSON object, got list"),
        ({"rope_theta": -1}, "factor and rope_theta must be positive"),
        ({"partial_rotary_factor": 0.0}, r"partial_rotary_factor must be in \(0, 1\], got 0.0"),
        ({"partial_rotary_factor": 1.5}, r"partial_rotary_factor must be in"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mrope_section": [1, 2]}}, r"mrope_section=\[1, 2\]"),
    ],
)
def test_rope_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        target(**changes)


LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "long_factor": [1.0, 2.5, 8.0, 16.0], "short_factor": [1.0, 1.0, 1.5, 2.0],
    "original_max_position_embeddings": 64,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


@pytest.mark.parametrize(
    ("scaling", "largest", "positions", "expected", "factor"),
    [
        (DYNAMIC, 64, 32, [1.0, 0.1, 0.01, 0.001], 1.0),
        (DYNAMIC, 64, 65, [1.0, 0.0979994609951973, 0.00960389431566, 0.0009411764913238585], 1.0),
        (DYNAMIC, 64, 200, [1.0, 0.047216322273015976, 0.002229380654171109, 0.00010526315600145608], 1.0),
        (LONG, 256, 64, [1.0, 0.1, 0.01 / 1.5, 0.0005], 1.1547005383792517),
        (LONG, 256, 65, [1.0, 0.04, 0.00125, 6.25e-05], 1.1547005383792517),
        (LONG | {"factor": 8.0}, 256, 65, [1.0, 0.04, 0.00125, 6.25e-05], 1.224744871391589),
        (LONG | {"attention_factor": 1.25}, 256, 65, [1.0, 0.04, 0.00125, 6.25e-05], 1.25),
    ],
)
def test_frequencies_that_follow_the_length(
    scaling: dict[str, Any], largest: int, positions: int, expected: list[float], factor: float
) -> None:
    """transformers' numbers (5.17, `ROPE_INIT_FUNCTIONS`) for a call of so many positions."""
    outside = scaling | {"original_max_position_embeddings": None}
    top = {"original_max_position_embeddings": scaling.get("original_max_position_embeddings")}
    for changes in (
        {"rope_scaling": scaling},
        {"rope_scaling": outside, **top},
    ):  # Phi's files have it at the top level
        config = target(rope_theta=REMOVE, max_position_embeddings=largest, **changes)
        again = Qwen3Config.from_dict(json.loads(json.dumps(config.to_dict())))
        found, scale = rope_frequencies(reaching(again, positions).rope, 8)
        assert found == pytest.approx(expected, rel=1e-6)
        assert scale == pytest.approx(factor, rel=1e-12)


def test_an_engine_reaches_as_far_as_it_serves() -> None:
    """Frequencies are those of the longest sequence for all tokens, the drafter's too."""
    pair = [
        replace(one, rope=replace(one.rope, kind="dynamic", factor=2.0))
        for one in (target(), draft(num_target_layers=4, nested={"target_layer_ids": [0, 1]}))
    ]
    own = {
        "dtype": "float32",
        "folder": Path(),
        "notices": [],
        "cache_dtype": None,
        "cache_scales": None,
        "vision": None,
    }
    own |= dict.fromkeys(("expect", "load"), print)
    checkpoints = [SimpleNamespace(config=one, family=family_for(one), **own) for one in pair]
    engine, _ = inspect.unwrap(plan_engine)(*checkpoints, LoadOptions(max_model_len=200, max_batch=1))  # type: ignore[arg-type]
    assert engine.target.rope.reach == engine.draft.rope.reach == 200
    assert reaching(target(), 200) == target()


@pytest.mark.parametrize(
    "config", [target(), draft(nested={"causal": True}), draft(**SLIDING)], ids=["target", "draft", "sliding"]
)
def test_our_own_form_survives_json(config: DecoderConfig) -> None:
    assert type(config).from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_our_own_form_of_another_version_is_refused() -> None:
    values = target().to_dict()
    with pytest.raises(ConfigError, match=r"missing fields \['head_dim'\], unknown fields \['heads'\]"):
        Qwen3Config.from_dict({key: value for key, value in values.items() if key != "head_dim"} | {"heads": 1})


def test_families_are_found_by_architecture_then_by_kind() -> None:
    assert family_of(TARGET).name == "qwen3"
    assert family_of(DRAFT).name == "dflash"
    assert family_of(changed(DRAFT, architectures=["Qwen3DSparkModel"])).role == "draft"
    assert family_of(changed(TARGET, architectures=REMOVE)).name == "qwen3"
    assert family_of(changed(DRAFT, architectures=REMOVE)).name == "dflash"
    assert family_named("dflash").config_class is DFlashConfig
    with pytest.raises(
        UnsupportedModelError, match=r"\['GemmaForCausalLM'\].*known architectures: Qwen3ForCausalLM, .*DFlash"
    ):
        family_of({"architectures": ["GemmaForCausalLM"], "model_type": "gemma"})
    with pytest.raises(UnsupportedModelError, match=r"no model family is called 'gemma'; known: qwen3, .*dflash"):
        family_named("gemma")
