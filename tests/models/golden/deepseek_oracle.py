"""Goldens of latent attention with experts: transformers' DeepseekV2ForCausalLM and DeepseekV3ForCausalLM, eager, float32."""

import torch
from golden.recording import NAME, record_output, recorded
from golden.store import Draw, save
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

BATCH, TOKENS = 2, 19

BASE = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 40,
    "kv_lora_rank": 16,
    "max_position_embeddings": 640,
    "moe_intermediate_size": 12,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 2,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "pretraining_tp": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 10,
    "vocab_size": 53,
}
V2 = {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"}
V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "ep_size": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 24,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}


def yarn(**changes: float) -> dict[str, object]:
    """The released models' spelling, with an original length whose frequencies the ramp divides."""
    scaling: dict[str, object] = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "type": "yarn"}
    return {"rope_scaling": scaling | {"original_max_position_embeddings": 16} | changes}


# Only what differs. Routing, queries and both places of the YaRN magnitude, in the released combinations and beside them.
CASES: dict[str, dict[str, object]] = {
    "deepseek_v2_lite": V2 | yarn(mscale=0.707, mscale_all_dim=0.707),
    # Magnitudes that differ leave a factor on cos and sin; tied head; other epsilon, which the latents' norms do not take.
    "deepseek_v2_groups": V2
    | yarn(mscale=1.0, mscale_all_dim=0.707)
    | {
        "n_group": 4,
        "num_experts_per_tok": 3,
        "q_lora_rank": 24,
        "rms_norm_eps": 1e-2,
        "routed_scaling_factor": 16.0,
        "tie_word_embeddings": True,
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
    },
    "deepseek_v3": V3 | yarn(mscale=1.0, mscale_all_dim=1.0) | {"n_group": 4, "num_hidden_layers": 3, "topk_group": 2},
    # Kimi-K2: one group, both betas 1, so that the ramp is a step.
    "deepseek_kimi": V3
    | yarn(mscale=1.0, mscale_all_dim=1.0, beta_fast=1, factor=32)
    | {"model_type": "kimi_k2", "n_shared_experts": 1, "rope_theta": 50000.0, "routed_scaling_factor": 2.827},
    # No YaRN, halves that turn together, biases, queries without a latent.
    "deepseek_v3_halves": V3
    | {
        "attention_bias": True,
        "n_group": 2,
        "norm_topk_prob": False,
        "q_lora_rank": None,
        "rope_interleave": False,
        "topk_group": 1,
    },
}


def write_all() -> dict[str, int]:
    """Writes every case and returns the sizes in bytes by case."""
    return {case: _write(case, BASE | changes) for case, changes in CASES.items()}


def checkpoint_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors under the names of the released files: one matrix for each expert and projection."""
    result = {}
    for name, value in tensors.items():
        stem = name.removesuffix("gate_up_proj").removesuffix("down_proj")
        for index, expert in enumerate(value if name != stem else ()):
            if name.endswith("gate_up_proj"):
                gate, up = expert.chunk(2)
                result |= {f"{stem}{index}.gate_proj.weight": gate, f"{stem}{index}.up_proj.weight": up}
            else:
                result[f"{stem}{index}.down_proj.weight"] = expert
        if name == stem:
            result[name] = value
    return result


@torch.no_grad()
def _write(case: str, config: dict[str, object]) -> int:
    draw, second = Draw(case), config["model_type"] == "deepseek_v2"
    kinds = (DeepseekV2Config, DeepseekV2ForCausalLM) if second else (DeepseekV3Config, DeepseekV3ForCausalLM)
    parsed = kinds[0].from_dict(config | {"model_type": kinds[0].model_type})
    parsed._attn_implementation = NAME
    parsed._experts_implementation = "eager"
    model = kinds[1](parsed).float().eval()
    tensors = {name: draw.weight(name, tuple(value.shape)) for name, value in model.state_dict().items()}
    if parsed.tie_word_embeddings:
        del tensors["lm_head.weight"]
    missing = model.load_state_dict(tensors, strict=False)
    if missing.unexpected_keys or set(missing.missing_keys) - {"lm_head.weight"}:
        raise ValueError(f"{case}: the tensors drawn are not the model's: {missing}")

    ids = draw.integers("ids", (BATCH, TOKENS), parsed.vocab_size)
    # The second row starts later in its sequence; positions are per row.
    positions = torch.arange(TOKENS)[None, :] + torch.tensor([[0], [23]])
    outputs: dict[str, torch.Tensor] = {}
    first, sparse = model.model.layers[:2]
    hooked = {
        "embed": model.model.embed_tokens,
        "norm0": first.input_layernorm,
        "attn0": first.self_attn,
        "mlp0": first.mlp,
        "attn1": sparse.self_attn,
        "mlp1": sparse.mlp,
        "experts1": sparse.mlp.experts,
        "shared1": sparse.mlp.shared_experts,
    }
    hooked |= {f"block{index}": layer for index, layer in enumerate(model.model.layers)}
    hooked["final_norm"] = model.model.norm
    for name, module in hooked.items():
        module.register_forward_hook(record_output(outputs, name))

    def routing(_module: torch.nn.Module, _inputs: object, result: tuple[torch.Tensor, ...]) -> None:
        logits, weights, experts = result
        outputs["routing1"] = torch.zeros_like(logits).scatter(1, experts, weights.float())

    sparse.mlp.gate.register_forward_hook(routing)
    outputs["logits"] = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    outputs["q0"], outputs["k0"], outputs["v0"] = recorded[0]
    outputs["scale0"] = torch.tensor(first.self_attn.scaling)
    config = {key: value for key, value in config.items() if value is not None or key == "q_lora_rank"}
    return save(case, config, checkpoint_tensors(tensors), {"ids": ids, "positions": positions}, outputs)
