"""Goldens of GLM-5.3-Flash targets: transformers' class of the text model and the head, eager attention, float32."""

from typing import Any

from golden.folders import write
from transformers import Glm5NextConfig, Glm5NextForConditionalGeneration

# Pools of four tokens, of which five are chosen: texts of 40 tokens go far beyond.
TEXT: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "moe_intermediate_size": 16, "num_hidden_layers": 4,
    "num_attention_heads": 3, "num_key_value_heads": 3, "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 0, "v_head_dim": 9, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "routed_scaling_factor": 1.5, "swiglu_limit": 0.7, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "layer_types": ["linear_attention", "deepseek_sparse_attention", "linear_attention", "deepseek_sparse_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "indexer_types": ["full"] * 4, "index_topk": 20, "index_kpool": 4,
    "index_n_heads": 8, "index_head_dim": 8, "linear_num_heads": 3, "linear_head_dim": 8, "linear_lower_bound": -5.0, "hc_mult": 3,
    "hc_sinkhorn_iters": 5, "pad_token_id": 0,
}  # fmt: skip
TOWER: dict[str, Any] = {
    "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 24, "image_size": 28,
    "projection_intermediate_size": 16,
}  # fmt: skip


def write_all() -> dict[str, int]:
    """Writes `glm5_next_folder` and returns the size of its weights in bytes by name."""
    config = Glm5NextConfig(text_config=TEXT, vision_config=TOWER, attn_implementation="eager")
    return write("glm5_next", Glm5NextForConditionalGeneration(config))
