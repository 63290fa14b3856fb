"""Goldens of LFM2 targets, dense and with experts: transformers' classes, eager attention, float32."""

from typing import Any

from golden.folders import write
from transformers import Lfm2Config, Lfm2ForCausalLM, Lfm2MoeConfig, Lfm2MoeForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2,
    "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"], "max_position_embeddings": 256, "norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "attn_implementation": "eager",
}  # fmt: skip
# The first one's feed-forward is two thirds of what it says, rounded up: 40.
DENSE: dict[str, Any] = {"intermediate_size": 56, "block_multiple_of": 8}
MIXTURE: dict[str, Any] = {
    "intermediate_size": 40, "moe_intermediate_size": 16, "num_dense_layers": 1, "num_experts": 6, "num_experts_per_tok": 2,
    "conv_L_cache": 4, "tie_word_embeddings": False, "routed_scaling_factor": 1.5,
}  # fmt: skip


def write_all() -> dict[str, int]:
    """Writes `lfm2_folder` and `lfm2_moe_folder` and returns the sizes of their weights in bytes by name."""
    sizes = write("lfm2", Lfm2ForCausalLM(Lfm2Config(**SIZES, **DENSE)))
    return sizes | write("lfm2_moe", Lfm2MoeForCausalLM(Lfm2MoeConfig(**SIZES, **MIXTURE)))
