"""Goldens of Kimi-Linear targets: transformers' class, eager attention, float32."""

from typing import Any

from golden.folders import write
from transformers import KimiLinearConfig, KimiLinearForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "moe_intermediate_size": 16, "num_hidden_layers": 4,
    "num_attention_heads": 3, "num_key_value_heads": 3, "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 4, "v_head_dim": 9, "num_experts": 6, "num_experts_per_token": 2, "num_shared_experts": 1,
    "num_expert_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5, "model_max_length": 256, "rms_norm_eps": 1e-5,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"], "linear_num_heads": 3,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "linear_head_dim": 8, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "attn_implementation": "eager",
}  # fmt: skip


def write_all() -> dict[str, int]:
    """Writes `kimi_linear_folder` and returns the size of its weights in bytes by name."""
    return write("kimi_linear", KimiLinearForCausalLM(KimiLinearConfig(**SIZES)))
