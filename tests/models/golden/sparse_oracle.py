"""Goldens of targets with an indexer: transformers' DeepseekV32 and GlmMoeDsa, eager attention, float32.

Which tokens are chosen is compared one by one. So weights are drawn until no query's last choice and first refusal score within
1e-3 of one another: then float32 leaves no doubt which they are.
"""

from collections.abc import Callable
from itertools import count

import torch
import transformers
from golden.deepseek_oracle import checkpoint_tensors
from golden.store import Draw, save

TOKENS, SEQUENCES, LEAST_GAP = 40, 2, 1e-3
BASE = {
    "attention_bias": False, "bos_token_id": 0, "eos_token_id": 1, "first_k_dense_replace": 1, "hidden_act": "silu",
    "hidden_size": 32, "index_head_dim": 16, "index_n_heads": 16, "index_topk": 8, "intermediate_size": 48, "kv_lora_rank": 16,
    "max_position_embeddings": 256, "moe_intermediate_size": 24, "n_routed_experts": 8, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4, "q_lora_rank": 24,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "routed_scaling_factor": 2.5, "tie_word_embeddings": False, "v_head_dim": 12,
    "vocab_size": 61,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, object]]] = {
    # groups of experts, a stretched rotation, indexers in all layers that turn halves
    "sparse_v32": (
        "DeepseekV32",
        {
            "model_type": "deepseek_v32", "n_group": 4, "num_hidden_layers": 3, "rms_norm_eps": 1e-6, "topk_group": 2,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0,
                "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
            },
        },
    ),
    # a layer that takes over what the one before it chose, indexers that turn pairs, norms of another epsilon
    "sparse_glm": (
        "GlmMoeDsa",
        {
            "model_type": "glm_moe_dsa", "indexer_types": ["full", "full", "shared", "full"], "n_group": 1,
            "num_hidden_layers": 4, "rms_norm_eps": 1e-5, "topk_group": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
}  # fmt: skip


def write_all() -> dict[str, int]:
    """Writes every case and returns the sizes in bytes by case."""
    return {case: _write(case, kind, BASE | changes) for case, (kind, changes) in CASES.items()}


@torch.no_grad()
def _write(case: str, kind: str, config: dict[str, object]) -> int:
    config = {"architectures": [f"{kind}ForCausalLM"]} | config
    parsed = getattr(transformers, f"{kind}Config").from_dict(dict(config))
    parsed._attn_implementation = "eager"
    model = getattr(transformers, f"{kind}ForCausalLM")(parsed).eval()
    ids = Draw(case).integers("ids", (SEQUENCES, TOKENS), 61)
    for seed in count():
        draw = Draw(f"{case}/{seed}")
        for name, value in model.state_dict().items():
            value.copy_(_weight(draw, name, tuple(value.shape)))
        chosen, gap = [], []
        outputs = _watched(lambda: model(ids, output_hidden_states=True, use_cache=False), chosen, gap)
        if min(gap) > LEAST_GAP:
            break
    # Hugging Face's last hidden state is after the final norm.
    results = {
        "logits": outputs.logits,
        "hidden": torch.stack(outputs.hidden_states[1:-1]),
        "chosen": torch.stack(chosen),
    }
    return save(case, config, checkpoint_tensors(model.state_dict()), {"ids": ids}, results)


def _weight(draw: Draw, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Sharper than usual, so that attention and scores are far from flat."""
    if len(shape) == 1 or "embed_tokens" in name:
        return draw.weight(name, shape) * (16.0 if "embed_tokens" in name else 1.0)
    return draw.normal(name, shape, 1.2 * shape[-1] ** -0.5)


def _watched(run: Callable[[], torch.Tensor], chosen: list[torch.Tensor], gap: list[float]) -> torch.Tensor:
    """`run`, with a mask of every indexer's choices, and by how much each query's last choice is ahead of its first refusal."""
    choose = torch.Tensor.topk

    def watched(scores: torch.Tensor, k: int, dim: int = -1, **options: object) -> torch.Tensor:
        found = choose(scores, k, dim=dim, **options)
        if scores.shape[-2:] == (TOKENS, TOKENS):
            mask = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, found.indices, value=True)
            chosen.append(mask & torch.tril(torch.ones(TOKENS, TOKENS, dtype=torch.bool)))
            more = choose(scores[:, k:], k + 1, dim=-1).values
            gap.append(float((more[..., -2] - more[..., -1]).min()))
        return found

    torch.Tensor.topk = watched
    try:
        return run()
    finally:
        torch.Tensor.topk = choose
