"""Golden of a MiniMax-M2 target: transformers' class, eager attention, float32."""

from golden.folders import write
from transformers import MiniMaxM2Config, MiniMaxM2ForCausalLM

CONFIG = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "num_local_experts": 6, "num_experts_per_tok": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}, "rms_norm_eps": 1e-6,
}  # fmt: skip


def write_all() -> dict[str, int]:
    """Writes `minimax_m2_folder` and returns the size of its weights in bytes by name."""
    return write("minimax_m2", MiniMaxM2ForCausalLM(MiniMaxM2Config(**CONFIG, attn_implementation="eager")))
