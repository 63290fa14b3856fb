"""Golden of a Laguna target: transformers' class, eager attention, float32."""

from golden.folders import write
from transformers import LagunaConfig, LagunaForCausalLM

SLIDING, FULL = "sliding_attention", "full_attention"
CONFIG = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_attention_heads_per_layer": [4, 6, 2, 4], "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
    "sliding_window": 9, "layer_types": [FULL, SLIDING, SLIDING, FULL], "gating": "per-head", "num_experts": 6,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 12,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "moe_routed_scaling_factor": 2.5,
    "moe_router_logit_softcapping": 1.5, "rms_norm_eps": 1e-6,
    "rope_parameters": {
        FULL: {
            "rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 64.0,
            "beta_slow": 1.0, "partial_rotary_factor": 0.5,
        },
        SLIDING: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    },
}  # fmt: skip


def write_all() -> dict[str, int]:
    """Writes `laguna_folder` and returns the size of its weights in bytes by name."""
    return write("laguna", LagunaForCausalLM(LagunaConfig(**CONFIG, attn_implementation="eager")))
