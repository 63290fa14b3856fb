"""Golden of a Qwen3.8-Flash-Next target: transformers' class, eager attention, float32; taps are what the next layer reads."""

from typing import Any

import torch
from golden.folders import write
from transformers import Qwen4ExpConfig, Qwen4ExpForConditionalGeneration

# Blocks of three tokens, of which four are chosen: texts of 40 tokens go far beyond. The second and the third layer have n-grams of
# two to four tokens, in tables of a few dozen rows a head, so that tokens share some.
TEXT: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 24, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 20,
    "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "num_experts": 6,
    "num_experts_per_tok": 2, "max_position_embeddings": 256,
    "layer_types": ["linear_attention"] * 3 + ["qwen_sparse_attention", "qwen_sparse_attention"],
    "linear_key_head_dim": 6, "linear_value_head_dim": 10, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "output_gate_type": "sigmoid", "hc_count": 3, "hc_lowrank": 7, "ple_layer_ids": [2, 3], "ple_embed_dim": 18,
    "ple_conv_kernel_size": 3, "ngram_size": 4, "heads_per_ngram": 2, "ngram_vocab_size_base": 20,
    "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 4, "seed": 77, "indexer_n_heads": 8, "indexer_kv_heads": 1,
    "indexer_head_dim": 10, "indexer_budget": 12, "indexer_compress_ratio": 3, "eos_token_id": 5, "pad_token_id": 0,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_interleaved": True,
        "mrope_section": [1, 1, 1],
    },
}  # fmt: skip
TOWER: dict[str, Any] = {
    "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 24, "num_position_embeddings": 4,
}  # fmt: skip


def write_all() -> dict[str, int]:
    """Writes `qwen4_exp_folder` and returns the size of its weights in bytes by name."""
    config = Qwen4ExpConfig(text_config=TEXT, vision_config=TOWER, attn_implementation="eager")
    model = Qwen4ExpForConditionalGeneration(config)
    text = model.get_decoder()

    def tapped(index: int, streams: torch.Tensor) -> torch.Tensor:
        last = index + 1 == len(text.layers)
        return (
            text.hyper_connection_mixer(streams) if last else text.layers[index + 1].attn_hyper_connection(streams)[0]
        )

    # Ends of texts, alone, with a token between them, and side by side.
    return write("qwen4_exp", model, tapped=tapped, tokens=[(place, 5) for place in (6, 14, 16, 30, 31)])
