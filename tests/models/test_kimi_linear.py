"""Kimi-Linear: transformers' logits and taps, what the release's file says, what is refused, and the way through our format."""

from pathlib import Path
from typing import Any

import pytest

from dflash_jax.engine.sharing import sharing_refusals
from dflash_jax.errors import ConfigError
from dflash_jax.execution.plan import exact_refusals
from dflash_jax.models import family_of, layer_traits
from dflash_jax.models.kimi_linear import KimiLinearConfig

from .golden_files import GOLDEN, TOLERANCE
from .golden_models import check_conversion, check_logits_and_taps

FOLDER = GOLDEN / "kimi_linear_folder"
LINEAR: dict[str, Any] = {
    "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4, "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
    "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
}  # fmt: skip
# The keys of Kimi-Linear-48B-A3B-Instruct's file.
FILE: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "vocab_size": 163_840, "hidden_size": 2304,
    "intermediate_size": 9216, "num_hidden_layers": 27, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 72,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "rope_scaling": None, "model_max_length": 1_048_576,
    "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "mla_use_nope": True, "linear_attn_config": LINEAR, "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1,
    "moe_intermediate_size": 1024, "moe_router_activation_func": "sigmoid", "moe_renormalize": True, "use_grouped_topk": True,
    "num_expert_group": 1, "topk_group": 1, "routed_scaling_factor": 2.446, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0, "tie_word_embeddings": False, "use_cache": True, "dtype": "bfloat16",
}  # fmt: skip


def read(**changes: Any) -> KimiLinearConfig:
    values = {key: value for key, value in (FILE | changes).items() if value != "left out"}
    config = family_of(values).config(values)
    assert isinstance(config, KimiLinearConfig)
    return config


def test_transformers_logits_and_taps() -> None:
    check_logits_and_taps(FOLDER, TOLERANCE)


@pytest.mark.few
def test_it_is_converted_there_and_back(tmp_path: Path) -> None:
    check_conversion(FOLDER, tmp_path)


def test_what_a_file_says() -> None:
    """The released one counts layers from 1, and has 49 billion weights."""
    config = read()
    assert config.full_layers == (3, 7, 11, 15, 19, 23, 26)
    assert (config.kda.heads, config.kda.lower_bound, config.num_dense_layers) == (32, None, 1)
    assert round(sum(row.size for row in family_of(FILE).parameters(config)) / 1e9, 1) == 49.1
    kinds = ["full_attention" if i in config.full_layers else "linear_attention" for i in range(27)]
    assert read(linear_attn_config="left out", layer_types=kinds) == config
    assert KimiLinearConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mla_use_nope": False}, "mla_use_nope=False"), ({"moe_router_activation_func": "softmax"}, "softmax"),
        ({"linear_attn_config": LINEAR | {"full_attn_layers": [4]}}, "kda_layers"), ({"num_expert_group": 3}, "do not fit"),
        ({"linear_attn_config": "left out"}, "must list which layers attend"), ({"num_nextn_predict_layers": 1}, "next"),
        ({"linear_attn_config": LINEAR | {"use_full_rank_gate": True}}, "use_full_rank_gate"), ({"moe_layer_freq": 2}, "freq"),
        ({"linear_attn_config": LINEAR | {"gate_lower_bound": -5.0}}, "gate_lower_bound"), ({"hidden_act": "situ"}, "must be silu"),
        ({"layer_types": ["full_attention"] * 27}, "of both kinds"), ({"num_key_value_heads": 8}, "must be num_attention_heads"),
    ],
)  # fmt: skip
def test_what_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read(**changes)


def test_what_its_layers_do_not_go_with() -> None:
    assert any("Kimi delta attention" in reason for reason in sharing_refusals(read(), None, 2))
    assert any("in another order" in reason for reason in exact_refusals(layer_traits(read()), 5))
