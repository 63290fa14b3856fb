"""Golden of an Inkling target: transformers' class, eager attention, float32, with two counts of heads and texts of 40 tokens that
go beyond windows, profiles and where scores grow."""

from typing import Any

from golden.folders import write
from transformers import InklingForCausalLM, InklingTextConfig

TEXT: dict[str, Any] = {
    "vocab_size": 61, "unpadded_vocab_size": 57, "hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 10, "swa_num_attention_heads": 6, "swa_num_key_value_heads": 2, "swa_head_dim": 7,
    "sliding_window_size": 9, "d_rel": 3, "rel_extent": 20, "log_scaling_n_floor": 12, "log_scaling_alpha": 0.4,
    "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"], "max_position_embeddings": 256,
    "conv_kernel_size": 4, "mlp_layer_types": ["dense", "sparse", "sparse", "dense"], "intermediate_size": 20,
    "moe_intermediate_size": 12, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 2, "route_scale": 3.0,
    "logits_mup_width_multiplier": 1.5, "num_mtp_layers": 0,
}  # fmt: skip


def write_all() -> dict[str, int]:
    """Writes `inkling_folder` and returns the size of its weights in bytes by name."""
    return write("inkling", InklingForCausalLM(InklingTextConfig(**TEXT, attn_implementation="eager")))
