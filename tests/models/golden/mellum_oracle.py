"""Golden of a Mellum target: transformers' class, eager attention, float32."""

from golden.folders import write
from transformers import MellumConfig, MellumForCausalLM

SLIDING, FULL = "sliding_attention", "full_attention"
CONFIG = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "sliding_window": 9, "num_experts": 6,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "layer_types": [SLIDING, FULL, SLIDING, FULL],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "rms_norm_eps": 1e-6,
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        FULL: {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 32},
    },
}  # fmt: skip


def write_all() -> dict[str, int]:
    """Writes `mellum_folder` and returns the size of its weights in bytes by name."""
    return write("mellum", MellumForCausalLM(MellumConfig(**CONFIG, attn_implementation="eager")))
