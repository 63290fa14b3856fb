"""Small targets of the families that came last, with the widths of heads, states and experts of the published models, and their
tensors.

`test_families_on_gpu` holds their texts on a GPU. Hidden columns, layers, heads and experts are fewer than published; queries of a
key head are as many.
"""

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from dflash_jax.models import family_of

from ..convert.conftest import Folders

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
SPARSE = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
COMMON: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 3, "max_position_embeddings": 2048,
    "tie_word_embeddings": False, "eos_token_id": 1, "rms_norm_eps": 1e-6, "head_dim": 128,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
ROUTED: dict[str, Any] = {
    "n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 512, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
}  # fmt: skip
SIGMOID: dict[str, Any] = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}

# Short convolutions of three taps, heads of 64, four queries to a key.
LFM2: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "vocab_size": 4096, "hidden_size": 1024,
    "intermediate_size": 3072, "block_auto_adjust_ff_dim": False, "num_hidden_layers": 3, "num_attention_heads": 16,
    "num_key_value_heads": 4, "layer_types": ["conv", FULL, "conv"], "max_position_embeddings": 2048, "norm_eps": 1e-5,
    "conv_L_cache": 3, "conv_bias": False, "rope_theta": 1e6, "tie_word_embeddings": True, "eos_token_id": 1,
}  # fmt: skip
LFM2_MOE: dict[str, Any] = {key: value for key, value in LFM2.items() if not key.startswith("block_")} | EXPERTS | {
    "architectures": ["Lfm2MoeForCausalLM"], "model_type": "lfm2_moe", "num_dense_layers": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 1.0, "use_expert_bias": True,
}  # fmt: skip
# Heads of Mamba 2 of 64 with a state of 128, eight to a group, 16 queries to a key; experts of no whole number of 128 columns.
NEMOTRON: dict[str, Any] = COMMON | ROUTED | {
    "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "num_hidden_layers": 4,
    "hybrid_override_pattern": "ME*M", "num_attention_heads": 32, "num_key_value_heads": 2, "mamba_num_heads": 32,
    "mamba_head_dim": 64, "n_groups": 4, "ssm_state_size": 128, "conv_kernel": 4, "chunk_size": 128, "expand": 2,
    "moe_intermediate_size": 576, "moe_shared_expert_intermediate_size": 1152, "mlp_hidden_act": "relu2", "norm_eps": 1e-5,
}  # fmt: skip
del NEMOTRON["rms_norm_eps"]
# Experts of a narrower projection of the stream, as Nemotron 3 Super's; and a dense feed-forward.
NEMOTRON_LATENT = NEMOTRON | {"hybrid_override_pattern": "ME*-", "moe_latent_size": 256}
LATENT: dict[str, Any] = {key: value for key, value in COMMON.items() if key != "head_dim"} | {
    "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "first_k_dense_replace": 1,
}  # fmt: skip
DELTA: dict[str, Any] = {"linear_num_heads": 8, "linear_head_dim": 128, "linear_conv_kernel_dim": 4}
KINDS: dict[str, Any] = {"layer_types": [LINEAR, FULL, LINEAR]}
KIMI: dict[str, Any] = LATENT | KINDS | DELTA | {
    "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "q_lora_rank": None, "mla_use_nope": True,
    "rms_norm_eps": 1e-5, "num_experts": 16, "num_experts_per_token": 4, "num_shared_experts": 1, "moe_intermediate_size": 512,
    "moe_router_activation_func": "sigmoid", "moe_renormalize": True, "num_expert_group": 1, "topk_group": 1,
    "routed_scaling_factor": 2.446,
}  # fmt: skip
# 64 pools of four tokens: prompts have more.
GLM5_NEXT: dict[str, Any] = LATENT | KINDS | ROUTED | SIGMOID | DELTA | {
    "architectures": ["Glm5NextForCausalLM"], "model_type": "glm5_next_text", "linear_lower_bound": -5.0, "q_lora_rank": 512,
    "qk_nope_head_dim": 192, "qk_rope_head_dim": 0, "v_head_dim": 256, "rms_norm_eps": 1e-5, "index_n_heads": 32,
    "index_head_dim": 128, "index_topk": 256, "index_kpool": 4, "hc_mult": 4, "hc_eps": 1e-6, "hc_sinkhorn_iters": 20,
    "swiglu_limit": 10.0,
}  # fmt: skip
MISTRAL4: dict[str, Any] = LATENT | ROUTED | {
    "architectures": ["Mistral4ForCausalLM"], "model_type": "mistral4", "q_lora_rank": 512, "kv_lora_rank": 256,
    "qk_nope_head_dim": 64, "routed_scaling_factor": 1.0,
    "rope_parameters": {
        "type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 256, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
    },
}  # fmt: skip
TWO_ROTATIONS: dict[str, Any] = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {
        "rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 256, "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
}  # fmt: skip
MELLUM: dict[str, Any] = COMMON | EXPERTS | SPARSE | {
    "architectures": ["MellumForCausalLM"], "model_type": "mellum", "num_attention_heads": 16, "num_key_value_heads": 2,
    "layer_types": [SLIDING, SLIDING, FULL], "sliding_window": 128, "norm_topk_prob": True, "rope_parameters": TWO_ROTATIONS,
    "moe_intermediate_size": 896,
}  # fmt: skip
# Six queries to a key where all keys are seen, nine where a window is.
LAGUNA: dict[str, Any] = COMMON | EXPERTS | SPARSE | {
    "architectures": ["LagunaForCausalLM"], "model_type": "laguna", "num_attention_heads": 12, "num_key_value_heads": 2,
    "num_attention_heads_per_layer": [12, 18, 12], "layer_types": [FULL, SLIDING, FULL], "sliding_window": 128,
    "gating": "per-head", "norm_topk_prob": True, "moe_routed_scaling_factor": 2.5, "shared_expert_intermediate_size": 512,
    "rope_parameters": {
        SLIDING: TWO_ROTATIONS[SLIDING] | {"partial_rotary_factor": 1.0},
        FULL: TWO_ROTATIONS[FULL] | {"partial_rotary_factor": 0.5},
    },
}  # fmt: skip
# Keys of 192 and values of 128, sinks where a window is.
MIMO: dict[str, Any] = COMMON | SIGMOID | {
    "architectures": ["MiMoV2ForCausalLM"], "model_type": "mimo_v2", "num_attention_heads": 16, "num_key_value_heads": 1,
    "head_dim": 192, "v_head_dim": 128, "swa_num_attention_heads": 16, "swa_num_key_value_heads": 2, "swa_head_dim": 192,
    "swa_v_head_dim": 128, "partial_rotary_factor": 0.334, "rope_theta": 5e6, "swa_rope_theta": 1e4,
    "attention_value_scale": 0.612, "add_full_attention_sink_bias": False, "add_swa_attention_sink_bias": True,
    "sliding_window": 128, "hybrid_layer_pattern": [0, 1, 0], "moe_layer_freq": [0, 1, 1], "n_routed_experts": 16,
    "num_experts_per_tok": 4, "moe_intermediate_size": 512, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
}  # fmt: skip
# Six queries to a key, half of a head rotated, and queries and keys normed over all heads at once.
MINIMAX_M2: dict[str, Any] = COMMON | {
    "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "num_attention_heads": 12, "num_key_value_heads": 2,
    "intermediate_size": 512, "num_local_experts": 16, "num_experts_per_tok": 4, "rotary_dim": 64, "rope_theta": 5e6,
    "scoring_func": "sigmoid", "use_qk_norm": True, "qk_norm_type": "per_layer", "use_routing_bias": True,
}  # fmt: skip
# Three blocks of 128 tokens: prompts have more.
MINIMAX_M3: dict[str, Any] = COMMON | {
    "architectures": ["MiniMaxM3SparseForCausalLM"], "model_type": "minimax_m3_text", "num_attention_heads": 32,
    "num_key_value_heads": 2, "dense_intermediate_size": 3072, "intermediate_size": 512, "shared_intermediate_size": 512,
    "hidden_act": "swigluoai", "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "moe_layer_freq": [0, 1, 1], "n_shared_experts": 1,
    "num_local_experts": 16, "num_experts_per_tok": 4, "partial_rotary_factor": 0.5, "rotary_dim": 64, "rope_theta": 5e6,
    "qk_norm_type": "per_head", "use_qk_norm": True, "use_gemma_norm": True, "routed_scaling_factor": 2.0,
    "scoring_func": "sigmoid", "use_routing_bias": True,
    "sparse_attention_config": {
        "use_sparse_attention": True, "sparse_attention_freq": [0, 1, 1], "sparse_block_size": 128,
        "sparse_disable_index_value": [0, 1, 1], "sparse_index_dim": 128, "sparse_init_block": 0, "sparse_local_block": 1,
        "sparse_num_index_heads": 2, "sparse_score_type": "max", "sparse_topk_blocks": 3,
    },
}  # fmt: skip
MUSE: dict[str, Any] = COMMON | {
    "architectures": ["MuseGlimmerForCausalLM"], "model_type": "muse_glimmer_text",
    "num_attention_heads": 32, "num_key_value_heads": 2, "hidden_activation": "silu", "sliding_window": 128,
    "layer_types": [SLIDING, SLIDING, FULL], "layer_rope_theta": [5e5, 5e5, 0], "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "qk_scale_factor": 3.87,
    "output_multiplier": 0.19611613513818404, "post_norm_eps": 1e-8, "final_logit_softcapping": 20.0,
}  # fmt: skip
FP8: dict[str, Any] = {"cache_dtype": "fp8"}
# A target, and options.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lfm2": (LFM2, {}),
    "lfm2 pages fp8": (LFM2, FP8),
    "lfm2 moe": (LFM2_MOE, {}),
    "nemotron": (NEMOTRON, {}),
    "nemotron pages fp8": (NEMOTRON, FP8),
    "nemotron latent experts": (NEMOTRON_LATENT, {}),
    "kimi_linear": (KIMI, {}),
    "glm5_next": (GLM5_NEXT, {}),
    "mistral4": (MISTRAL4, {}),
    "mellum": (MELLUM, {}),
    "laguna": (LAGUNA, {}),
    "mimo": (MIMO, {}),
    "mimo pages fp8": (MIMO, FP8),
    "minimax_m2": (MINIMAX_M2, {}),
    "minimax_m2 weights fp8_dynamic": (MINIMAX_M2, {"weight_dtype": "fp8_dynamic"}),
    "minimax_m3": (MINIMAX_M3, {}),
    "muse_glimmer": (MUSE, {}),
}


def tensors_of(folders: Folders, config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Those that `folders` draws but for some. Time steps and rates of decay are as transformers begins with them: a state whose
    tokens were forgotten at once would hide what is wrong with it. Biases of convolutions are about 0, and so are weights of norms
    to which 1 is added: twice as large queries and keys would let one key decide."""
    tensors, rng, family = folders.tensors(config), np.random.default_rng(1), family_of(config)
    rows = family.parameters(family.config(config))
    centered = {source.name for row in rows if row.name.endswith(".offset") for source in row.sources}
    for name, tensor in tensors.items():
        if name.endswith(".A_log"):
            drawn = np.log(rng.uniform(1, 16, tensor.shape))
        elif name.endswith(".dt_bias"):
            drawn = np.log(np.expm1(np.exp(rng.uniform(np.log(0.001), np.log(0.1), tensor.shape))))
        elif name.endswith(".conv1d.bias") or name in centered:
            drawn = rng.normal(size=tensor.shape) * 0.1
        else:
            continue
        tensors[name] = drawn.astype(ml_dtypes.bfloat16)
    return tensors
