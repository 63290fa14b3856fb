"""Goldens of Llama, Qwen2 and Mistral targets: transformers' classes, eager attention, float32, one file per configuration."""

import torch
import transformers
from golden.qwen3_oracle import golden_of
from golden.store import Draw

BASE = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 61,
}

# Only what differs from BASE, with the class. Each case is one way a reader of config.json can go wrong.
CASES: dict[str, tuple[str, dict[str, object]]] = {
    # as Llama 3.1's files: no head_dim, several ends, the older spelling of the rotation
    "llama_published": (
        "Llama",
        {
            "attention_bias": False,
            "eos_token_id": [2, 8, 9],
            "mlp_bias": False,
            "pretraining_tp": 1,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    # three query heads of a size that is not hidden_size / heads, biases on all four projections, the head is the table
    "llama_bias_tied": (
        "Llama",
        {
            "attention_bias": True,
            "head_dim": 10,
            "hidden_size": 36,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    # biases that no key names; windows from layer 1 on
    "qwen2_window": (
        "Qwen2",
        {
            "hidden_size": 42,
            "max_window_layers": 1,
            "num_attention_heads": 7,
            "num_key_value_heads": 1,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "sliding_window": 9,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
        },
    ),
    # every layer slides, and nothing says so but the width
    "mistral_window": ("Mistral", {"sliding_window": 9, "rope_theta": 10000.0}),
}


def write_all() -> dict[str, int]:
    """Writes every case and returns the sizes in bytes by case."""
    return {case: _write(case, kind, BASE | changes) for case, (kind, changes) in CASES.items()}


@torch.no_grad()
def _write(case: str, kind: str, config: dict[str, object]) -> int:
    config = {"architectures": [f"{kind}ForCausalLM"], "model_type": kind.lower()} | config
    parsed = getattr(transformers, f"{kind}Config").from_dict(dict(config))
    return golden_of(case, config, parsed, getattr(transformers, f"{kind}ForCausalLM"), Draw(case), dict)
