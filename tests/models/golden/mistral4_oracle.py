"""Golden of a Mistral Small 4 target: transformers' class of the text model, eager attention, float32."""

from golden.folders import write
from transformers import Mistral4Config, Mistral4ForCausalLM

CONFIG = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "moe_intermediate_size": 16, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 6, "num_experts_per_tok": 2, "kv_lora_rank": 12,
    "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1,
    "max_position_embeddings": 256, "routed_scaling_factor": 1.5,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3,
    },
}  # fmt: skip


def write_all() -> dict[str, int]:
    """Writes `mistral4_folder` and returns the size of its weights in bytes by name. Queries grow twice within its tokens."""
    return write("mistral4", Mistral4ForCausalLM(Mistral4Config(**CONFIG, attn_implementation="eager")))
