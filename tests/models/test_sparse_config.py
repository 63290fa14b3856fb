"""What a `config.json` with an indexer reads as, what is refused, and the presets' sizes."""

import dataclasses
from typing import Any

import pytest

from dflash_jax.errors import ConfigError
from dflash_jax.models import SparseDeepseekConfig, count, family_named, family_of
from dflash_jax.models.presets import DEEPSEEK_TARGETS, SPARSE_TARGETS

# Counted by transformers 5.24 on models without storage, and 256 correction biases, which it keeps as buffers, of each layer with
# experts.
COUNTS = {"DeepSeek-V3.2": 671_877_944_064, "GLM-5.2": 743_377_019_904}
FULL_OF_52 = [0, 1, *range(2, 78, 4)]


def as_file(config: SparseDeepseekConfig) -> dict[str, Any]:
    """The keys of the published files."""
    rope, glm = config.rope, config.index_interleaved
    scaling = {
        "beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "factor": rope.factor, "mscale": rope.mscale,
        "mscale_all_dim": rope.mscale_all_dim, "original_max_position_embeddings": 4096, "rope_type": "yarn",
        "rope_theta": rope.theta,
    }  # fmt: skip
    names = ("GlmMoeDsaForCausalLM", "glm_moe_dsa") if glm else ("DeepseekV32ForCausalLM", "deepseek_v32")
    return {
        "architectures": [names[0]], "model_type": names[1], "attention_bias": False, "attention_dropout": 0.0, "ep_size": 1,
        "first_k_dense_replace": config.num_dense_layers, "head_dim": config.qk_nope_head_dim, "hidden_act": "silu",
        "hidden_size": config.hidden_size, "index_head_dim": 128, "index_n_heads": config.index_heads, "index_topk": 2048,
        "intermediate_size": config.intermediate_size, "kv_lora_rank": 512, "max_position_embeddings": config.max_position,
        "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": config.num_groups, "n_routed_experts": 256,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": config.num_heads, "num_experts_per_tok": 8,
        "num_hidden_layers": config.num_layers, "num_key_value_heads": config.num_heads, "num_nextn_predict_layers": 1,
        "q_lora_rank": config.q_lora_rank, "qk_head_dim": config.head_dim, "qk_nope_head_dim": config.qk_nope_head_dim,
        "qk_rope_head_dim": 64, "rms_norm_eps": config.norm_eps, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
        "rope_parameters": {"rope_type": "default", "rope_theta": rope.theta} if glm else scaling, "tie_word_embeddings": False,
        "topk_group": config.groups_per_token, "topk_method": "noaux_tc", "v_head_dim": config.v_head_dim,
        "vocab_size": config.vocab_size, **({"indexer_rope_interleave": True} if glm else {}),
    }  # fmt: skip


def read(file: dict[str, Any]) -> SparseDeepseekConfig:
    config = family_of(file).config(file)
    assert isinstance(config, SparseDeepseekConfig)
    return config


V32_FILE, GLM_FILE = as_file(SPARSE_TARGETS["DeepSeek-V3.2"]), as_file(SPARSE_TARGETS["GLM-5"])
LISTED = {"indexer_types": ["full" if i in FULL_OF_52 else "shared" for i in range(78)]}
SCHEDULE = {"index_topk_freq": 4, "index_skip_topk_offset": 3, "index_topk_pattern": None}
FILE_52 = as_file(SPARSE_TARGETS["GLM-5.2"]) | LISTED | SCHEDULE | {"index_share_for_mtp_iteration": True}


@pytest.mark.parametrize("name", SPARSE_TARGETS)
def test_a_published_file_reads_as_its_preset_of_its_size(name: str) -> None:
    config = SPARSE_TARGETS[name]
    assert read(FILE_52 if name == "GLM-5.2" else as_file(config)) == config
    assert SparseDeepseekConfig.from_dict(config.to_dict()) == config
    if name in COUNTS:
        assert count(family_named("deepseek_sparse").parameters(config)) == COUNTS[name]
    assert config.latent_width == 576


def test_beside_its_indexers_it_is_the_third_version() -> None:
    config, base = SPARSE_TARGETS["DeepSeek-V3.2"], DEEPSEEK_TARGETS["DeepSeek-V3"]
    assert {field.name: getattr(config, field.name) for field in dataclasses.fields(base)} == base.to_dict() | {
        "rope": base.rope
    }
    assert not config.index_interleaved  # whatever the main attention does
    assert not read(V32_FILE | {"rope_interleave": True}).index_interleaved
    assert read(V32_FILE | {"indexer_rope_interleave": True}).index_interleaved


def test_which_layers_have_an_indexer_is_said_in_several_ways() -> None:
    config = SPARSE_TARGETS["GLM-5.2"]
    places = [layer for layer, own in enumerate(config.indexers) if own]
    assert places == FULL_OF_52
    assert [config.index_place(layer) for layer in (0, 1, 2, 5, 6, 77)] == [0, 1, 2, 2, 3, 20]
    plain = {key: value for key, value in FILE_52.items() if key not in (*LISTED, *SCHEDULE)}
    letters = "".join("F" if kind == "full" else "S" for kind in LISTED["indexer_types"])
    ways = [LISTED, SCHEDULE, {"index_topk_pattern": letters}, {"index_topk_pattern": letters, "index_topk_freq": 1}]
    assert [read(plain | way) for way in ways] == [config] * 4
    assert all(read(plain).indexers)


def test_what_writers_add_of_their_layers_is_checked() -> None:
    kinds = {"mlp_layer_types": ["dense"] * 3 + ["sparse"] * 58}
    for layer_types in ("indexed_attention", "deepseek_sparse_attention"):
        assert read(V32_FILE | kinds | {"layer_types": [layer_types] * 61}) == SPARSE_TARGETS["DeepSeek-V3.2"]
    dense = {key: value for key, value in V32_FILE.items() if key != "first_k_dense_replace"}
    assert read(dense | {"mlp_layer_types": ["dense"] * 61}).num_dense_layers == 61
    assert read({key: value for key, value in V32_FILE.items() if key != "architectures"}) == read(V32_FILE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index_kpool": 4}, "does not implement: index_kpool=4"),
        ({"index_topk": 0}, "index_topk must be an integer of at least 1"),
        ({"index_head_dim": 96}, "index_head_dim must be a power of two"),
        ({"index_head_dim": 32}, "hold 64 rotary dimensions, got 32"),
        ({"q_lora_rank": None}, "q_lora_rank must be an integer of at least 1, got nothing: the key is missing"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized .'fp8'.*publisher's tool"),
        ({"layer_types": ["full_attention"] * 61}, "layer_types must be indexed_attention for each of 61 layers"),
        ({"layer_types": ["indexed_attention"] * 60}, "layer_types must be indexed_attention for each of 61 layers"),
        ({"mlp_layer_types": ["sparse"] * 60 + ["dense"]}, "mlp_layer_types must be dense for some leading layers"),
        ({"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 59}, "first_k_dense_replace=3, and 2 dense layers"),
        ({"indexer_types": ["full"] * 60}, "indexer_types must say full or shared of each of 61 layers"),
        ({"indexer_types": ["full"] * 60 + ["half"]}, "indexer_types must say full or shared of each of 61 layers"),
        ({"indexer_types": ["shared"] + ["full"] * 60}, "the first layer must have an indexer"),
        ({"indexer_types": ["full"] * 61, "index_topk_freq": 4}, "indexer_types and index_topk_freq say different things"),
        ({"index_topk_pattern": ["F"] * 61, "indexer_types": ["full"] * 60 + ["shared"]}, "and index_topk_pattern say different"),
    ],
)  # fmt: skip
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(V32_FILE | changes)


def test_tensor_names() -> None:
    family, whole = family_named("deepseek_sparse"), SPARSE_TARGETS["GLM-5.2"]
    config = dataclasses.replace(whole, num_layers=4, windows=(None,) * 4, indexers=whole.indexers[:4])
    sources = {source.name for parameter in family.parameters(config) for source in parameter.sources}
    found = sorted(
        name.removeprefix("model.layers.2.self_attn.") for name in sources if ".layers.2.self_attn.indexer" in name
    )
    names = ["k_norm.bias", "k_norm.weight", "weights_proj.weight", "wk.weight", "wq_b.weight"]
    assert found == [f"indexer.{name}" for name in names]
    assert not [name for name in sources if ".layers.3.self_attn.indexer" in name]
    # Of the layer for further tokens.
    assert family.canonical_for(whole)("model.layers.78.self_attn.indexer.wk.weight") is None
