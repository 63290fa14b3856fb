"""Golden of a DeepSeek V4 target: transformers' class, eager attention, float32, in the names of the release."""

from typing import Any

import torch
from golden.folders import write
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

CSA, HCA, SLIDING = "compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"
# Windows of four and of five tokens, of the former four chosen: texts of 40 tokens go far beyond.
CONFIG: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 24, "moe_intermediate_size": 16, "num_hidden_layers": 4, "num_attention_heads": 6,
    "num_key_value_heads": 1, "head_dim": 12, "q_lora_rank": 10, "qk_rope_head_dim": 6, "num_experts_per_tok": 2,
    "n_routed_experts": 6, "n_shared_experts": 1, "routed_scaling_factor": 1.5, "max_position_embeddings": 256,
    "rope_theta": 1e4, "layer_types": [SLIDING, CSA, HCA, CSA], "compress_rates": {CSA: 4, HCA: 5}, "compress_rope_theta": 1.6e5,
    "hc_mult": 3, "hc_sinkhorn_iters": 5, "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"], "swiglu_limit": 0.7,
    "sliding_window": 7, "o_groups": 2, "o_lora_rank": 8, "index_n_heads": 8, "index_head_dim": 8, "index_topk": 4,
    "rms_norm_eps": 1e-6, "bos_token_id": 1, "eos_token_id": 2,
    "rope_parameters": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0,
    },
}  # fmt: skip


def write_all() -> dict[str, int]:
    """Writes `deepseek_v4_folder` and returns the size of its weights in bytes by name."""
    config = DeepseekV4Config(**CONFIG, attn_implementation="eager")
    model = DeepseekV4ForCausalLM(config)
    for layer in model.model.layers[:2]:
        odds = torch.rand(config.vocab_size, config.n_routed_experts, generator=torch.Generator().manual_seed(1))
        layer.mlp.gate.tid2eid.copy_(odds.argsort(dim=1)[:, : config.num_experts_per_tok])
    return write("deepseek_v4", model, tapped=lambda _, streams: streams.flatten(2))
