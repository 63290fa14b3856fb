"""Goldens of drafters with layers of Gemma 4, by DeepSpec's own model (commit afdfa7c).

Apart from `make_golden`, as it needs transformers 5.10 and a checkout of deepseek-ai/DeepSpec on the path. In `tests/models`:

    python -m golden.deepspec_oracle

The text of config.json is laid out as that of dspark_gemma4_12b_block7. Taps, tokens and sizes are small.
"""

import torch
from deepspec.modeling.dspark.gemma4.modeling import Gemma4DSparkModel, apply_gemma4_rotary_pos_emb
from golden.recording import record_output
from golden.store import Draw, save
from transformers import DynamicCache, Gemma4TextConfig

BATCH, CONTEXT = 2, 19
ROPE = {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"}
CONFIG: dict[str, object] = {
    "architectures": ["Gemma4DSparkModel"], "attention_bias": False, "attention_dropout": 0.0, "attention_k_eq_v": True,
    "block_size": 7, "bos_token_id": 2, "confidence_head_with_markov": True, "dtype": "bfloat16", "enable_confidence_head": True,
    "enable_moe_block": False, "eos_token_id": 1, "final_logit_softcapping": 5.0, "global_head_dim": 16, "head_dim": 8,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 32, "hidden_size_per_layer_input": 0, "initializer_range": 0.02,
    "intermediate_size": 48, "layer_types": ["full_attention"] * 2, "markov_head_type": "vanilla", "markov_rank": 6,
    "mask_token_id": 95, "max_position_embeddings": 512, "model_type": "gemma4_text", "moe_intermediate_size": None,
    "num_anchors": 512, "num_attention_heads": 4, "num_experts": None, "num_global_key_value_heads": 1, "num_hidden_layers": 2,
    "num_key_value_heads": 2, "num_kv_shared_layers": 0, "num_target_layers": 6, "pad_token_id": 0, "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "full_attention": ROPE, "rope_theta": None, "rope_type": "default",
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 8, "target_layer_ids": [0, 2, 3], "target_model_type": "gemma4_unified",
    "target_text_model_type": "gemma4_unified_text", "tie_word_embeddings": False, "top_k_experts": None,
    "use_bidirectional_attention": "vision", "use_cache": True, "use_double_wide_mlp": False, "vocab_size": 97,
    "vocab_size_per_layer_input": 97,
}  # fmt: skip
# v1, with a projection to values.
PLAIN = {"attention_k_eq_v": False, "markov_rank": 0, "enable_confidence_head": False}
CASES = {"dflash_gemma4": CONFIG, "dflash_gemma4_values": {
    key: value for key, value in (CONFIG | PLAIN).items() if key not in ("markov_head_type", "confidence_head_with_markov")
}}  # fmt: skip


def write_all() -> dict[str, int]:
    """Writes every case and returns the sizes in bytes by case."""
    return {name: _write(name, config) for name, config in CASES.items()}


@torch.no_grad()
def _write(name: str, config: dict[str, object]) -> int:
    draw, rope = Draw(name), {key: value for key, value in config["rope_parameters"].items() if isinstance(value, dict)}
    settings = Gemma4TextConfig(**(config | {"rope_parameters": rope}), attn_implementation="eager")
    model = Gemma4DSparkModel(settings).eval()
    tensors = {key: _weight(draw, key, value.shape) for key, value in model.state_dict().items()}
    model.load_state_dict(tensors)
    taps, start = len(config["target_layer_ids"]), torch.tensor([[0], [31]])
    block = start + CONTEXT + torch.arange(config["block_size"])
    inputs = {
        "features": draw.normal("features", (BATCH, CONTEXT, taps * config["hidden_size"])),
        "context_positions": start + torch.arange(CONTEXT), "block_positions": block,
        "pending": draw.integers("pending", (BATCH,), config["vocab_size"]),
    }  # fmt: skip

    outputs: dict[str, torch.Tensor] = {}
    model.hidden_norm.register_forward_hook(record_output(outputs, "context"))
    for index, layer in enumerate(model.layers):
        layer.self_attn.q_norm.register_forward_hook(record_output(outputs, f"q{index}"))
    ids = torch.full((BATCH, config["block_size"]), config["mask_token_id"])
    ids[:, 0] = inputs["pending"]
    embeddings, cache = model.embed_tokens(ids), DynamicCache()
    hidden = model._forward_backbone(
        position_ids=torch.cat([inputs["context_positions"], block], dim=1), noise_embedding=embeddings,
        target_hidden_states=inputs["features"], past_key_values=cache, use_cache=True, is_causal=False,
    )  # fmt: skip
    cos, sin = model.rotary_emb(hidden, block, layer_type="full_attention")
    for index in range(len(model.layers)):
        turned = apply_gemma4_rotary_pos_emb(outputs[f"q{index}"].transpose(1, 2), cos, sin, unsqueeze_dim=1)
        outputs[f"q{index}"] = turned.transpose(1, 2)
    kept = [(layer.keys, layer.values) for layer in cache.layers]
    for side, key in enumerate(("context_k", "context_v")):
        outputs[key] = torch.stack([both[side][:, :, :CONTEXT].transpose(1, 2) for both in kept])
    outputs |= {"block_embeddings": embeddings, "hidden": hidden, "logits": model.compute_logits(hidden)}
    if model.markov_head is not None:
        drafted = model.sample_draft_tokens(
            outputs["logits"], first_prev_token_ids=inputs["pending"], hidden_states=hidden, temperature=0.0
        )
        outputs |= {"proposals": drafted[0], "proposal_logits": drafted[1]}
    return save(name, config, tensors, inputs, outputs)


def _weight(draw: Draw, name: str, shape: torch.Size) -> torch.Tensor:
    if name.endswith("layer_scalar"):
        return (0.75 + draw.normal(name, shape, 0.2).abs()).half().float()
    if "self_attn.k_norm" in name or "self_attn.q_norm" in name:  # scores have no scale
        return (0.6 + draw.normal(name, shape, 0.1)).half().float()
    if name.endswith("lm_head.weight"):
        return draw.normal(name, shape, 2 / shape[-1] ** 0.5)
    return draw.weight(name, tuple(shape))


if __name__ == "__main__":
    for case, size in write_all().items():
        print(f"{case:28s} {size / 1000:8.1f} kB")
