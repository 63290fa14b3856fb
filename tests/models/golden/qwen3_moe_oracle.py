"""Goldens of the Qwen3 target with experts: transformers' Qwen3MoeForCausalLM, eager attention and experts, float32."""

import torch
from golden.deepseek_oracle import checkpoint_tensors
from golden.qwen3_oracle import BASE as DENSE
from golden.qwen3_oracle import golden_of
from golden.store import Draw
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

BASE = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 12,
    "norm_topk_prob": True,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "tie_word_embeddings": False,
}

# Only what differs from BASE: weights that do not sum to 1, layers without experts by both keys, a window on all layers.
CASES: dict[str, dict[str, object]] = {
    "qwen3_moe_plain": {},
    "qwen3_moe_raw_weights": {"norm_topk_prob": False, "num_experts_per_tok": 1, "tie_word_embeddings": True},
    "qwen3_moe_some_dense": {
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
        "num_hidden_layers": 4,
        "sliding_window": 9,
        "use_sliding_window": True,
        "max_window_layers": 3,
    },
}


def write_all() -> dict[str, int]:
    """Writes every case and returns the sizes in bytes by case."""
    return {case: _write(case, BASE | changes) for case, changes in CASES.items()}


@torch.no_grad()
def _write(case: str, config: dict[str, object]) -> int:
    config = {key: value for key, value in config.items() if value is not None}
    parsed = Qwen3MoeConfig.from_dict(dict(config))
    parsed._experts_implementation = "eager"
    return golden_of(case, config, parsed, Qwen3MoeForCausalLM, Draw(case), checkpoint_tensors)
