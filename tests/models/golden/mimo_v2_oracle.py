"""Golden of a MiMo-V2 target: transformers' class, eager attention, float32."""

from golden.folders import write
from transformers import MiMoV2FlashConfig, MiMoV2FlashForCausalLM

SLIDING, FULL = "sliding_attention", "full_attention"
CONFIG = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "moe_intermediate_size": 16, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 12, "v_head_dim": 8, "n_routed_experts": 6,
    "num_experts_per_tok": 2, "max_position_embeddings": 256, "sliding_window": 9, "layer_types": [FULL, SLIDING, SLIDING, FULL],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "attention_value_scale": 0.612, "routed_scaling_factor": 1.5,
    "rms_norm_eps": 1e-5,
}  # fmt: skip


def write_all() -> dict[str, int]:
    """Writes `mimo_v2_folder` and returns the size of its weights in bytes by name. Four entries of a head turn."""
    return write("mimo_v2", MiMoV2FlashForCausalLM(MiMoV2FlashConfig(**CONFIG, attn_implementation="eager")))
