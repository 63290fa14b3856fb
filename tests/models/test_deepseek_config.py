"""What a `config.json` with latent attention reads as, what is refused, the YaRN magnitudes, and the presets' sizes."""

import dataclasses
import math
from typing import Any

import pytest

from dflash_jax.config import RopeConfig
from dflash_jax.errors import ConfigError
from dflash_jax.models import DeepseekConfig, count, family_named, family_of
from dflash_jax.models.layers import rope_frequencies
from dflash_jax.models.presets import DEEPSEEK_TARGETS

# Counted by transformers 5.23 on models without storage. Model cards say 15.7B, 236B, 671B (14B of MTP layers beside), and 1T.
COUNTS = {
    "DeepSeek-V2-Lite": 15_706_484_224, "DeepSeek-V2": 235_741_434_880, "DeepSeek-V3": 671_026_419_200,
    "Kimi-K2": 1_026_408_232_448, "Kimi-K2.5": 1_026_408_232_448,
}  # fmt: skip
# (0.1 * mscale * ln factor + 1) ** 2.
SQUARED_MAGNITUDES = {
    "DeepSeek-V2-Lite": 1.589626, "DeepSeek-V2": 1.589626, "DeepSeek-V3": 1.873854, "Kimi-K2": 1.813260,
    "Kimi-K2.5": 2.004740,
}  # fmt: skip


def as_file(config: DeepseekConfig) -> dict[str, Any]:
    """The keys of the published files."""
    rope, sigmoid = config.rope, config.routing == "noaux_tc"
    names = ("DeepseekV3ForCausalLM", "deepseek_v3") if sigmoid else ("DeepseekV2ForCausalLM", "deepseek_v2")
    return {
        "architectures": [names[0]], "model_type": names[1], "attention_bias": False, "attention_dropout": 0.0,
        "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekForCausalLM"}, "aux_loss_alpha": 0.001,
        "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": config.num_dense_layers,
        "hidden_act": "silu", "hidden_size": config.hidden_size, "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size, "kv_lora_rank": config.kv_lora_rank,
        "max_position_embeddings": config.max_position, "moe_intermediate_size": config.moe_intermediate_size,
        "moe_layer_freq": 1, "n_group": config.num_groups, "n_routed_experts": config.num_experts,
        "n_shared_experts": config.num_shared_experts, "norm_topk_prob": config.norm_routing_weights,
        "num_attention_heads": config.num_heads, "num_experts_per_tok": config.experts_per_token,
        "num_hidden_layers": config.num_layers, "num_key_value_heads": config.num_heads,
        "num_nextn_predict_layers": config.num_mtp_layers, "pretraining_tp": 1, "q_lora_rank": config.q_lora_rank,
        "qk_nope_head_dim": config.qk_nope_head_dim, "qk_rope_head_dim": config.qk_rope_head_dim,
        "rms_norm_eps": config.norm_eps, "rope_theta": rope.theta, "routed_scaling_factor": config.routing_scale,
        "rope_scaling": {
            "beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "factor": rope.factor, "mscale": rope.mscale,
            "mscale_all_dim": rope.mscale_all_dim, "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "scoring_func": "sigmoid" if sigmoid else "softmax", "seq_aux": True, "tie_word_embeddings": False,
        "topk_group": config.groups_per_token, "topk_method": config.routing, "torch_dtype": "bfloat16",
        "transformers_version": "4.33.1", "use_cache": True, "v_head_dim": config.v_head_dim,
        "vocab_size": config.vocab_size,
    }  # fmt: skip


def read(file: dict[str, Any]) -> DeepseekConfig:
    config = family_of(file).config(file)
    assert isinstance(config, DeepseekConfig)
    return config


V3_FILE, LITE_FILE = as_file(DEEPSEEK_TARGETS["DeepSeek-V3"]), as_file(DEEPSEEK_TARGETS["DeepSeek-V2-Lite"])


@pytest.mark.parametrize("name", DEEPSEEK_TARGETS)
def test_a_published_file_reads_as_its_preset(name: str) -> None:
    config = DEEPSEEK_TARGETS[name]
    assert read(as_file(config)) == config
    assert DeepseekConfig.from_dict(config.to_dict()) == config
    assert (config.latent_width, config.head_dim) == (576, 192)


@pytest.mark.few("DeepSeek-V2*", "DeepSeek-V3", "Kimi-K2")
@pytest.mark.parametrize("name", DEEPSEEK_TARGETS)
def test_presets_have_their_published_size(name: str) -> None:
    assert count(family_named("deepseek").parameters(DEEPSEEK_TARGETS[name])) == COUNTS[name]


@pytest.mark.parametrize("name", DEEPSEEK_TARGETS)
def test_yarn_reaches_the_scale_squared_and_cos_and_sin_as_a_ratio(name: str) -> None:
    config = DEEPSEEK_TARGETS[name]
    rope = config.rope
    magnitude = 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1
    assert config.attention_scale == pytest.approx(192**-0.5 * magnitude**2, rel=1e-12)
    assert round(config.attention_scale * 192**0.5, 6) == SQUARED_MAGNITUDES[name]
    assert rope_frequencies(rope, 64)[1] == 1.0
    other = dataclasses.replace(rope, mscale=rope.mscale_all_dim / 2)
    expected = (0.05 * rope.mscale_all_dim * math.log(rope.factor) + 1) / magnitude
    assert rope_frequencies(other, 64)[1] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(),
        RopeConfig(kind="yarn", factor=40.0, original_max_position=4096),
        RopeConfig(kind="yarn", factor=1.0, original_max_position=4096, mscale=1.0, mscale_all_dim=1.0),
    ],
)
def test_without_a_magnitude_the_scale_is_plain(rope: RopeConfig) -> None:
    config = dataclasses.replace(DEEPSEEK_TARGETS["DeepSeek-V3"], rope=rope)
    assert config.attention_scale == 192**-0.5


def test_norms_of_latents_keep_their_epsilon() -> None:
    """transformers' default, whatever rms_norm_eps says."""
    config = DEEPSEEK_TARGETS["Kimi-K2.5"]
    assert (config.norm_eps, config.latent_norm_eps) == (1e-5, 1e-6)


def test_the_text_model_inside_a_vision_model() -> None:
    config = DEEPSEEK_TARGETS["Kimi-K2.5"]
    text = as_file(config) | {"model_type": "kimi_k2"}
    outer = {
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": text,
        "vision_config": {"mm_hidden_size": 1152}, "media_placeholder_token_id": 163_605,
    }  # fmt: skip
    assert read(outer) == config
    del outer["architectures"], text["architectures"]
    assert read(outer) == config
    for where in (outer, text):
        changed = outer | {"text_config": text | {"quantization_config": {"quant_method": "compressed-tensors"}}}
        changed = changed if where is text else outer | {"quantization_config": {"quant_method": "compressed-tensors"}}
        with pytest.raises(ConfigError, match=r"quantized.*'compressed-tensors'.*bfloat16"):
            read(changed)
    with pytest.raises(ConfigError, match="text_config must be a JSON object"):
        read({"architectures": ["KimiK25ForConditionalGeneration"]})


@pytest.mark.parametrize(
    ("architecture", "model_type"),
    [("DeepseekV3ForCausalLM", "kimi_k2"), ("KimiK2ForCausalLM", "kimi_k2"), (None, "deepseek_v3"), (None, "kimi_k2")],
)
def test_names_of_the_same_model(architecture: str | None, model_type: str) -> None:
    names = None if architecture is None else [architecture]
    file = V3_FILE | {"architectures": names, "model_type": model_type}
    assert read(file) == DEEPSEEK_TARGETS["DeepSeek-V3"]
    assert read(LITE_FILE | {"architectures": None}) == DEEPSEEK_TARGETS["DeepSeek-V2-Lite"]


def test_absent_keys_mean_what_transformers_takes_for_them() -> None:
    optional = (
        "first_k_dense_replace", "n_shared_experts", "norm_topk_prob", "num_nextn_predict_layers", "routed_scaling_factor",
        "scoring_func", "topk_method",
    )  # fmt: skip
    assert read({key: value for key, value in V3_FILE.items() if key not in optional}) == read(V3_FILE)
    lite = read({key: value for key, value in LITE_FILE.items() if key not in optional})
    assert lite == dataclasses.replace(read(LITE_FILE), num_dense_layers=0)
    # A greedy router has no groups.
    assert read(LITE_FILE | {"n_group": None, "topk_group": None}) == read(LITE_FILE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index_topk": 2048}, "does not implement: index_topk=2048"),
        ({"mlp_bias": True}, "does not implement: mlp_bias=True"),
        ({"topk_method": "greedy"}, "topk_method must be noaux_tc, got 'greedy'"),
        ({"scoring_func": "softmax"}, "scoring_func must be sigmoid with noaux_tc, got 'softmax'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq must be 1, got 2"),
        ({"n_group": 7}, "n_routed_experts=256, n_group=7"),
        ({"n_group": 256, "topk_group": 8}, "groups must be of equal size"),
        ({"topk_group": 9}, "topk_group=9"),
        ({"num_experts_per_tok": 200}, "num_experts_per_tok=200"),
        ({"n_group": None}, "n_group must be an integer"),
        ({"num_key_value_heads": 8}, "num_key_value_heads must be num_attention_heads=128, got 8"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim must be even, got 63"),
        ({"hidden_act": "gelu"}, "hidden_act must be silu, got 'gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized .'fp8'.*publisher's tool"),
        ({"rope_scaling": {"type": "mrope"}}, "rope_type must be"),
        ({"kv_lora_rank": None}, "kv_lora_rank must be an integer of at least 1, got nothing: the key is missing"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(V3_FILE | changes)


def test_what_is_refused_of_the_second_version() -> None:
    with pytest.raises(ConfigError, match="topk_method must be greedy or group_limited_greedy, got 'noaux_tc'"):
        read(LITE_FILE | {"topk_method": "noaux_tc"})
    with pytest.raises(ConfigError, match="norm_topk_prob must be false"):
        read(LITE_FILE | {"norm_topk_prob": True})
    with pytest.raises(ConfigError, match="q_lora_rank is missing; null says"):
        read({key: value for key, value in LITE_FILE.items() if key != "q_lora_rank"})


def test_tensor_names() -> None:
    family, config = family_named("deepseek"), DEEPSEEK_TARGETS["DeepSeek-V3"]
    canonical = family.canonical_for(config)
    assert canonical("language_model.model.layers.3.mlp.gate.weight") == "model.layers.3.mlp.gate.weight"
    assert canonical("vision_tower.encoder.blocks.0.wo.weight") is None
    assert canonical("model.layers.0.self_attn.rotary_emb.inv_freq") is None
    assert canonical("model.layers.60.mlp.gate.weight") is not None
    assert canonical("model.layers.61.eh_proj.weight") is None
    # One MTP layer is announced, so a second one is not a thing to be quiet about.
    assert canonical("model.layers.62.eh_proj.weight") is not None
    assert family.canonical("model.layers.61.eh_proj.weight") is not None
