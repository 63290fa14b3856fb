"""Files of published drafters and of their targets, at small sizes: the keys of each layout as its trainer writes them.

`tests/data/published_drafters.json` names the drafters, the family of each one's target and the layout of its file.
"""

from typing import Any

from .quantized_folders import modelopt

VOCAB, LAYERS, REDUCED = 97, 4, 40
MASK = VOCAB - 1
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
}  # fmt: skip
BOOKS: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "initializer_range": 0.02, "tie_word_embeddings": False, "use_cache": True,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT: dict[str, Any] = {
    "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 16, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 1.5, "num_nextn_predict_layers": 0, "first_k_dense_replace": 1,
    "num_key_value_heads": 4, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
}  # fmt: skip
HYBRID: dict[str, Any] = {
    "layer_types": ["linear_attention"] * 3 + ["full_attention"], "linear_conv_kernel_dim": 4, "linear_key_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_value_head_dim": 8,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5, "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
    },
}  # fmt: skip
LFM2: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
    "layer_types": ["conv", "conv", "full_attention", "conv"], "max_position_embeddings": 512, "norm_eps": 1e-5,
    "conv_L_cache": 3, "conv_bias": False, "rope_theta": 1e6,
}  # fmt: skip
NEMOTRON: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "chunk_size": 8, "conv_kernel": 4, "eos_token_id": 2,
    "expand": 2, "head_dim": 8, "hidden_dropout": 0.0, "hidden_size": 32, "initializer_range": 0.02, "intermediate_size": 24,
    "layer_norm_epsilon": 1e-5, "mamba_head_dim": 8, "mamba_hidden_act": "silu", "mamba_num_heads": 4, "mamba_proj_bias": False,
    "mamba_ssm_cache_dtype": "float32", "max_position_embeddings": 512, "mlp_bias": False, "mlp_hidden_act": "relu2",
    "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 40, "moe_shared_expert_overlap": True, "n_group": 1,
    "n_groups": 2, "n_routed_experts": 4, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 4,
    "num_experts_per_tok": 2, "num_hidden_layers": LAYERS, "num_key_value_heads": 2, "num_logits_to_keep": 1, "pad_token_id": 0,
    "rescale_prenorm_residual": True, "residual_in_fp32": False, "routed_scaling_factor": 2.5, "sliding_window": None,
    "ssm_state_size": 8, "tie_word_embeddings": False, "time_step_floor": 1e-4, "time_step_max": 0.1, "time_step_min": 0.001,
    "topk_group": 1, "use_bias": False, "use_cache": True, "use_conv_bias": True, "use_mamba_kernels": True, "vocab_size": VOCAB,
}  # fmt: skip
WINDOWED = ["sliding_attention", "full_attention"] * 2


def _text_model(architecture: str, kind: str, text: dict[str, Any]) -> dict[str, Any]:
    """A vision-language file with the text model of `text`."""
    return {"architectures": [architecture], "model_type": kind, "text_config": text, "vision_config": {"depth": 2}}


# By family of the table: what a target's config.json says.
TARGETS: dict[str, dict[str, Any]] = {
    "Qwen3": SIZES | BOOKS | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rope_theta": 1e6},
    "Qwen3 with experts": SIZES | BOOKS | EXPERTS | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "Kimi K2": {
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "vision_config": {"depth": 2},
        "text_config": {key: value for key, value in SIZES.items() if key != "head_dim"} | BOOKS | LATENT | {
            "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2",
        },
    },
    "Qwen3.5 to 3.8, dense": _text_model(
        "Qwen3_5ForConditionalGeneration", "qwen3_5", SIZES | BOOKS | HYBRID | {"model_type": "qwen3_5_text"}
    ),
    "Qwen3.5 to 3.8 with experts": _text_model(
        "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe",
        SIZES | BOOKS | HYBRID | EXPERTS | {"model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 24},
    ),
    "Qwen3.8-Flash-Next": _text_model(
        "Qwen4ExpForConditionalGeneration", "qwen4_exp",
        SIZES | BOOKS | HYBRID | EXPERTS | {
            "model_type": "qwen4_exp_text", "shared_expert_intermediate_size": 24, "norm_topk_prob": True,
            "output_gate_type": "sigmoid", "hc_count": 4, "hc_lowrank": 6, "indexer_n_heads": 4, "indexer_kv_heads": 1,
            "indexer_head_dim": 8, "indexer_budget": 12, "indexer_compress_ratio": 4, "ple_layer_ids": [2], "ple_embed_dim": 24,
            "ple_conv_kernel_size": 4, "ngram_size": 3, "heads_per_ngram": 2, "ngram_vocab_size_base": 29,
            "make_ngram_vocab_size_divisible_by": 4, "split_ngram_parts": 2, "seed": 1234, "full_attention_interval": 4,
            "partial_rotary_factor": 0.5, "mtp_num_hidden_layers": 1, "mamba_ssm_dtype": "float32", "attn_output_gate": True,
        },
    ),
    "Qwen3-Coder-Next": SIZES | BOOKS | HYBRID | EXPERTS | {
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "shared_expert_intermediate_size": 24,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5}, "norm_topk_prob": True,
    },
    "Gemma 4": _text_model(
        "Gemma4ForConditionalGeneration", "gemma4",
        SIZES | {
            "model_type": "gemma4_text", "layer_types": WINDOWED, "sliding_window": 9, "global_head_dim": 24,
            "num_global_key_value_heads": 1, "attention_k_eq_v": True, "final_logit_softcapping": 5.0,
            "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "tie_word_embeddings": True,
            "hidden_activation": "gelu_pytorch_tanh",
        },
    ),
    "GLM-5.1 to 5.3": {key: value for key, value in SIZES.items() if key != "head_dim"} | BOOKS | LATENT | {
        "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "index_topk": 20, "index_n_heads": 2,
        "index_head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "gpt-oss": SIZES | {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2,
        "sliding_window": 9, "layer_types": WINDOWED, "attention_bias": True, "swiglu_limit": 7.0, "rope_theta": 1.5e5,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 128,
        },
    },
    "Llama 3.1": {key: value for key, value in SIZES.items() if key != "head_dim"} | BOOKS | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": 5e5, "mlp_bias": False, "pretraining_tp": 1,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    },
    "LFM2.5": LFM2 | {
        "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "block_auto_adjust_ff_dim": False, "block_dim": 32,
        "block_ff_dim": 48, "block_mlp_init_scale": 1.0, "block_multiple_of": 8, "block_norm_eps": 1e-5, "block_use_swiglu": True,
        "block_use_xavier_init": True, "conv_dim": 32, "conv_use_xavier_init": True, "full_attn_idxs": [2], "num_heads": 4,
        "theta": 1e6, "use_pos_enc": True, "tie_embedding": True,
    },
    "LFM2.5 with experts": LFM2 | EXPERTS | {
        "architectures": ["Lfm2MoeForCausalLM"], "model_type": "lfm2_moe", "intermediate_size": 48, "num_dense_layers": 1,
        "norm_topk_prob": True, "routed_scaling_factor": 1.0, "use_expert_bias": True, "tie_word_embeddings": True,
    },
    "Nemotron 3 and 3.5": NEMOTRON | {
        "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "hybrid_override_pattern": "ME*M",
        "norm_eps": 1e-5, "partial_rotary_factor": 1.0, "rope_theta": 10000, "time_step_limit": [0.0, 1e30],
    },
    "Nemotron 3.5 with pictures": {
        "architectures": ["NemotronH_Super_Omni_Reasoning_V3"], "model_type": "nemotron_h_omni", "img_context_token_id": 18,
        "patch_size": 16, "downsample_ratio": 0.5, "norm_mean": [0.0, 0.0, 0.0], "vision_config": {"depth": 2},
        "llm_config": NEMOTRON | {
            "model_type": "nemotron_h", "layers_block_type": ["mamba", "moe", "attention", "mamba"], "moe_latent_size": 16,
            "num_nextn_predict_layers": 1, "mtp_layers_block_type": ["attention", "moe"],
        },
    },
    "GLM-5.3-Flash": _text_model(
        "Glm5NextForConditionalGeneration", "glm5_next",
        {
            "model_type": "glm5_next_text", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "hidden_act": "silu",
            "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 4, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 512, "attention_bias": False, "head_dim": 0, "swiglu_limit": 10.0,
            "layer_types": ["linear_attention", "linear_attention", "deepseek_sparse_attention", "linear_attention"],
            "linear_attn_config": {
                "num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0, "kda_layers": [0, 1, 3],
                "full_attn_layers": [2],
            },
            "q_lora_rank": 16, "kv_lora_rank": 16, "qk_head_dim": 12, "qk_nope_head_dim": 12, "qk_rope_head_dim": 0,
            "v_head_dim": 12, "mla_use_nope": True, "index_n_heads": 6, "index_head_dim": 8, "index_topk": 16, "index_kpool": 4,
            "index_kpool_always_select_tail": True, "index_kpool_compress": True, "indexer_rope_interleave": True,
            "indexer_types": ["full"] * LAYERS, "index_share_for_mtp_iteration": True, "mhc": True, "hc_mult": 4, "hc_eps": 1e-6,
            "hc_sinkhorn_iters": 20, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "first_k_dense_replace": 1,
            "moe_layer_freq": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
            "moe_intermediate_size": 16, "moe_router_dtype": "float32", "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
            "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 1,
            "tie_word_embeddings": False, "dtype": "bfloat16",
        },
    ),
    "Muse Glimmer": _text_model(
        "MuseGlimmerForConditionalGeneration", "muse_glimmer",
        SIZES | {
            "model_type": "muse_glimmer_text", "hidden_activation": "silu", "sliding_window": 9, "qk_scale_factor": 3.87,
            "output_multiplier": 0.6, "post_norm_eps": 1e-8, "final_logit_softcapping": 20.0, "tie_word_embeddings": False,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "layer_rope_theta": [5e5, 5e5, 5e5, 0],
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        },
    ),
    "Mellum 2": SIZES | BOOKS | EXPERTS | {
        "architectures": ["MellumForCausalLM"], "model_type": "mellum", "layer_types": WINDOWED, "sliding_window": 9,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "norm_topk_prob": True,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "MiniMax-M2.5 and M2.7": SIZES | BOOKS | {
        "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "attn_type_list": [1] * LAYERS, "rope_theta": 5e6,
        "layernorm_full_attention_beta": 1.0, "layernorm_mlp_beta": 1.0, "mlp_intermediate_size": 64, "mtp_transformer_layers": 1,
        "num_experts_per_tok": 2, "num_local_experts": 4, "num_mtp_modules": 3, "qk_norm_type": "per_layer", "rotary_dim": 8,
        "scoring_func": "sigmoid", "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid", "use_mtp": True,
        "use_qk_norm": True, "use_routing_bias": True,
    },
    "MiniMax-M3": _text_model(
        "MiniMaxM3SparseForConditionalGeneration", "minimax_m3_vl", SIZES | BOOKS | {
            "architectures": ["MiniMaxM3SparseForCausalLM"], "model_type": "minimax_m3_text", "attention_output_gate": False,
            "dense_intermediate_size": 40, "hidden_act": "swigluoai", "intermediate_size": 24, "moe_layer_freq": [0, 1, 1, 1],
            "n_shared_experts": 1, "num_experts_per_tok": 2, "num_local_experts": 4, "num_mtp_modules": 1,
            "partial_rotary_factor": 0.5, "qk_norm_type": "per_head", "rope_theta": 5e6, "rotary_dim": 8,
            "routed_scaling_factor": 2.0, "scoring_func": "sigmoid", "shared_intermediate_size": 24, "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0, "use_gemma_norm": True, "use_qk_norm": True, "use_routing_bias": True,
            "sparse_attention_config": {
                "use_sparse_attention": True, "sparse_attention_freq": [0, 1, 1, 1], "sparse_block_size": 4,
                "sparse_disable_index_value": [0, 1, 1, 1], "sparse_index_dim": 16, "sparse_init_block": 0,
                "sparse_local_block": 1, "sparse_num_index_heads": 2, "sparse_score_type": "max", "sparse_topk_blocks": 3,
            },
        },
    ),
    "Mistral Small 4": _text_model(
        "Mistral3ForConditionalGeneration", "mistral3",
        {key: value for key, value in SIZES.items() if key != "head_dim"} | BOOKS | {
            "model_type": "mistral4", "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 4,
            "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 24,
            "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "first_k_dense_replace": 0,
            "num_key_value_heads": 4, "pretraining_tp": 1, "rope_interleave": True,
            "rope_parameters": {
                "type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
                "max_position_embeddings": 512, "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0,
                "llama_4_scaling_beta": 0.1, "partial_rotary_factor": 0.25,
            },
        },
    ),
    "MiMo-V2.5": SIZES | BOOKS | {
        "architectures": ["MiMoV2ForCausalLM"], "model_type": "mimo_v2",
        "auto_map": {"AutoConfig": "configuration_mimo_v2.MiMoV2Config"}, "num_key_value_heads": 1, "head_dim": 12, "v_head_dim": 8,
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 12, "swa_v_head_dim": 8,
        "partial_rotary_factor": 0.334, "rope_theta": 5e6, "swa_rope_theta": 1e4,
        "rope_parameters": {"partial_rotary_factor": 0.334, "rope_theta": 5e6, "rope_type": "default", "type": "default"},
        "attention_value_scale": 0.612, "attention_projection_layout": "fused_qkv", "attention_chunk_size": 9,
        "add_full_attention_sink_bias": False, "add_swa_attention_sink_bias": True, "sliding_window": 9, "sliding_window_size": 9,
        "hybrid_block_size": None, "hybrid_layer_pattern": [0, 1, 1, 0], "moe_layer_freq": [0, 1, 1, 1], "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": None, "scoring_func": "sigmoid",
        "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": None,
        "moe_router_dtype": "bfloat16", "layernorm_epsilon": 1e-6, "num_nextn_predict_layers": 3, "image_token_id": 90,
        "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93, "vision_model_type": "mimo_vl",
        "vision_config": {"depth": 2}, "audio_config": {"group_size": 4}, "processor_config": {"audio_token_id": 94},
    },
    "Inkling": {
        "architectures": ["InklingForConditionalGeneration"], "model_type": "inkling_mm_model", "eos_token_id": 2,
        "image_token_id": 90, "audio_token_id": 91, "image_bos_token_id": 92, "audio_bos_token_id": 93,
        "text_config": {
            "model_type": "inkling_text", "vocab_size": VOCAB, "unpadded_vocab_size": VOCAB - 5, "hidden_size": 32,
            "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16,
            "swa_num_attention_heads": 6, "swa_num_key_value_heads": 2, "swa_head_dim": 16, "sliding_window_size": 9,
            "local_layer_ids": [0, 2], "d_rel": 3, "rel_extent": 14, "log_scaling_n_floor": 12, "log_scaling_alpha": 0.1,
            "model_max_length": 512, "rms_norm_eps": 1e-6, "use_embed_norm": True, "use_sconv": True, "sconv_kernel_size": 4,
            "dense_mlp_idx": 2, "dense_intermediate_size": 48, "intermediate_size": 24, "n_routed_experts": 4,
            "num_experts_per_tok": 2, "n_shared_experts": 2, "shared_expert_sink": True, "route_scale": 8.0,
            "use_gate_bias": True, "gate_activation": "sigmoid", "norm_after_topk": True, "use_global_scale": True,
            "q_bias": False, "o_bias": False, "final_logit_softcapping": None, "logits_mup_width_multiplier": 1.5,
            "torch_dtype": "bfloat16",
        },
        "audio_config": {"n_mel_bins": 2}, "vision_config": {"n_layers": 1},
        "mtp_config": {"num_nextn_predict_layers": 1, "chain_hidden_post_norm": False, "local_layer_ids": [0]},
    },
    "Laguna": SIZES | BOOKS | EXPERTS | {
        "architectures": ["LagunaForCausalLM"], "model_type": "laguna", "num_attention_heads_per_layer": [4, 6, 2, 4],
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"], "sliding_window": 9,
        "gating": "per-head", "gating_types": ["per_head"] * 4, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "mlp_only_layers": [0], "decoder_sparse_step": 1, "norm_topk_prob": True, "moe_routed_scaling_factor": 2.5,
        "moe_apply_router_weight_on_input": False, "moe_router_logit_softcapping": 0.0, "shared_expert_intermediate_size": 24,
        "output_router_logits": False, "router_aux_loss_coef": 0.0,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 32.0,
                "beta_slow": 1.0, "attention_factor": 1.2, "partial_rotary_factor": 0.5,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
            "original_max_position_embeddings": 64,
        },
    },
    "DeepSeek V4": {
        "architectures": ["DeepseekV4ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0,
        "compress_ratios": [0, 4, 128, 4, 0], "compress_rope_theta": 160000, "eos_token_id": 1, "expert_dtype": "fp4",
        "hc_eps": 1e-6, "hc_mult": 4, "hc_sinkhorn_iters": 3, "head_dim": 16, "hidden_act": "silu", "hidden_size": 32,
        "index_head_dim": 8, "index_n_heads": 4, "index_topk": 4, "initializer_range": 0.02, "max_position_embeddings": 512,
        "model_type": "deepseek_v4", "moe_intermediate_size": 24, "n_routed_experts": 4, "n_shared_experts": 1,
        "norm_topk_prob": True, "num_attention_heads": 4, "num_experts_per_tok": 2, "num_hidden_layers": LAYERS,
        "num_hash_layers": 1, "num_key_value_heads": 1, "num_nextn_predict_layers": 1, "o_groups": 2, "o_lora_rank": 8,
        "q_lora_rank": 12, "qk_rope_head_dim": 8, "rms_norm_eps": 1e-6, "rope_theta": 10000, "routed_scaling_factor": 1.5,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 16, "original_max_position_embeddings": 32, "type": "yarn",
        },
        "scoring_func": "sqrtsoftplus", "sliding_window": 9, "swiglu_limit": 10.0, "tie_word_embeddings": False,
        "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": VOCAB,
    },
}  # fmt: skip
# What targets that are not loaded call themselves, where that is known.
REFUSED_TARGETS: dict[str, tuple[str, ...]] = {
    "MiniMax-M3.1": (),
    "Kimi K3": (),
    "Beam": (),
    "Alpamayo": (),
}

BACKBONE: dict[str, Any] = SIZES | BOOKS | {
    "architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "dtype": "bfloat16",
    "layer_types": ["full_attention"] * 2, "max_window_layers": 2, "model_type": "qwen3", "num_hidden_layers": 2,
    "num_target_layers": LAYERS, "rope_scaling": None, "rope_theta": 1e6, "sliding_window": None, "use_sliding_window": False,
}  # fmt: skip
TAPS: dict[str, Any] = {"mask_token_id": MASK, "target_layer_ids": [0, 1, 3]}
SLIDING: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9, "use_sliding_window": True
}  # fmt: skip
ALL_SLIDING: dict[str, Any] = SLIDING | {"layer_types": ["sliding_attention"] * 2}
YARN: dict[str, Any] = {
    "rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32.0, "beta_slow": 1.0,
    },
}  # fmt: skip
KERNELS = {"conv_kernel_size": 2, "conv_group_size": 16}
SELECTOR = {"selector_rank": 6, "selector_top_k": 5}
MARKOV: dict[str, Any] = {
    "markov_rank": 6, "markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True
}  # fmt: skip
LILICORR: dict[str, Any] = {
    "lilicorr_enabled": True, "lilicorr_hidden_size": 16, "lilicorr_candidate_topk": 4, "lilicorr_num_heads": 2,
    "lilicorr_mlp_ratio": 2.0, "lilicorr_factor_dim": 6, "lilicorr_vector_eps": 1e-6, "lilicorr_logit_scale": 8.0,
    "lilicorr_num_layers": 2,
}  # fmt: skip
DSPARK: dict[str, Any] = TAPS | MARKOV | {
    "projector_type": "dspark", "attention_mode": "gqa", "confidence_head_alpha": 1.0
}  # fmt: skip
DOMINO: dict[str, Any] = {
    "projector_type": "domino", "pure_draft_prefix_len": 1, "emb_dim": 6, "gru_hidden_dim": 10, "shift_label": True
}  # fmt: skip


def _speculators(kind: str, architecture: str, *, copied: Any = (), **own: Any) -> dict[str, Any]:
    """A file of the speculators library, whose trainer gives every layer a window.

    `copied`: keys of the decoder that the trainer copies from its target.
    """
    layers = {key: value for key, value in (BACKBONE | ALL_SLIDING).items() if key not in ("architectures", "auto_map")}
    layers |= {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}} | dict(copied)
    return {
        "architectures": [architecture], "aux_hidden_state_layer_ids": [1, 2, 4], "block_size": 4, "draft_vocab_size": VOCAB,
        "dtype": "bfloat16", "mask_token_id": MASK, "sample_from_anchor": False, "sliding_window_non_causal": False,
        "speculators_model_type": kind, "speculators_version": "0.9.0", "target_hidden_size": None, "tie_word_embeddings": False,
        "speculators_config": {"algorithm": kind, "default_proposal_method": "greedy"}, "transformers_version": "5.5.3",
        "transformer_layer_config": layers, **own,
    }  # fmt: skip


# The trainer gives a whole head the target's share of it, and leaves the sections of pictures in.
_OF_PICTURES: dict[str, Any] = {
    "copied": {
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 1.0, "mrope_section": [4, 2, 2],
        },
    },
}  # fmt: skip
_OF_GEMMA: dict[str, Any] = {"copied": {"hidden_act": "gelu_pytorch_tanh"}}
_OF_MISTRAL: dict[str, Any] = {
    "copied": {
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
            "max_position_embeddings": 512, "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
}  # fmt: skip
_OF_GEMMA4: dict[str, Any] = {
    "architectures": ["Gemma4DSparkModel"], "attention_bias": False, "attention_dropout": 0.0, "attention_k_eq_v": True,
    "block_size": 4, "dtype": "bfloat16", "enable_moe_block": False, "final_logit_softcapping": 5.0, "global_head_dim": 24,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 0, "layer_types": ["full_attention"] * 2,
    "model_type": "gemma4_text", "moe_intermediate_size": None, "num_anchors": 512, "num_experts": None,
    "num_global_key_value_heads": 1, "num_hidden_layers": 2, "num_kv_shared_layers": 0, "num_target_layers": LAYERS,
    "sliding_window": 9, "target_model_type": "gemma4_unified", "target_text_model_type": "gemma4_unified_text",
    "tie_word_embeddings": False, "top_k_experts": None, "use_bidirectional_attention": "vision", "use_double_wide_mlp": False,
    "vocab_size_per_layer_input": VOCAB, **TAPS,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"}, "rope_theta": None,
        "rope_type": "default", "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    },
}  # fmt: skip
# NVIDIA's, as they come with Nemotron 3.5 Lightning; projections of feed-forwards, of features and one of the head's in NVFP4.
_OF_NVIDIA: dict[str, Any] = SIZES | {
    "attention_bias": False, "draft_vocab_size": None, "dtype": "bfloat16", "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
    "has_embed_tokens": True, "has_lm_head": False, "hidden_act": "silu", "model_type": "qwen3", "num_aux_layers": 3,
    "num_hidden_layers": 2, "pard_token": MASK, "rope_theta": 10000, "sample_from_anchor": False, "train_embed_tokens": False,
    "transformers_version": "5.5.3", "use_cache": False, **TAPS,
}  # fmt: skip
_OF_NVIDIA_DFLASH: dict[str, Any] = _OF_NVIDIA | {
    "architectures": ["DFlashDraftModel"], "attention_sink_bias": False, "dflash_query_causal": False,
    "dspark_fixup_head_type": None, "dspark_markov_rank": None, "layer_types": ["full_attention"] * 2, "sliding_window": None,
    "dflash_config": TAPS | {"attention_sink_bias": False, "causal": False, "use_swa": False, "sample_from_anchor": False},
    "rope_parameters": {
        "factor": 128.0, "original_max_position_embeddings": 64, "rope_theta": 10000, "rope_type": "yarn"
    },
}  # fmt: skip
_OF_NVIDIA_DSPARK: dict[str, Any] = _OF_NVIDIA | {
    "architectures": ["Qwen3DSparkModel"], "attention_sink_bias": True, "block_size": 4, "dflash_query_causal": True,
    "dspark_bonus_anchor": True, "dspark_fixup_head_type": "markov", "dspark_markov_rank": 16, "markov_head_type": "vanilla",
    "markov_rank": 16, "layer_types": ["sliding_attention"] * 2, "rope_parameters": None, "sliding_window": 9,
    "dflash_config": TAPS | {
        "attention_sink_bias": True, "causal": True, "swa_window_size": 9, "use_swa": True, "sample_from_anchor": False,
    },
}  # fmt: skip
_IN_NVFP4 = {"quantization_config": modelopt("W4A16_NVFP4", ignore=["*embed_tokens*", "*markov_w1*", "*self_attn*"])}
_OF_DEEPSPEC = {"architectures": ["Qwen3DSparkModel"], "block_size": 4, "num_anchors": 512, **TAPS}

# By layout of the table: what a drafter's config.json says, and which tensors it brings beside its layers.
LAYOUTS: dict[str, dict[str, Any]] = {
    "z-lab": BACKBONE | {"block_size": 4, "dflash_config": TAPS},
    "z-lab, block inside": BACKBONE | {"dflash_config": TAPS | {"block_size": 4}},
    "z-lab, windows": BACKBONE | SLIDING | {"dflash_config": TAPS | {"block_size": 4}},
    "z-lab, YaRN": BACKBONE | YARN | {"block_size": 4, "dflash_config": TAPS},
    "z-lab, llama3 rotation": BACKBONE | {
        "block_size": 4, "dflash_config": TAPS, "rope_theta": 5e5, "rope_scaling": TARGETS["Llama 3.1"]["rope_scaling"],
    },
    "z-lab with a Markov head": BACKBONE | {
        "dflash_config": TAPS | {"block_size": 4, "sample_from_anchor": False}, "markov_rank": 6, "markov_head_type": "vanilla",
    },
    "z-lab DFlash 2": BACKBONE | ALL_SLIDING | {
        "architectures": ["DFlash2DraftModel"], "is_causal": False, "dflash_config": TAPS | KERNELS | SELECTOR | {"block_size": 4},
    },
    "z-lab DFlash 2, mask in a pickle": BACKBONE | {
        "architectures": ["DFlash2DraftModel"], "is_causal": False,
        "dflash_config": TAPS | KERNELS | SELECTOR | {"block_size": 4},
    },
    "z-lab DFlash 2, capped": BACKBONE | ALL_SLIDING | {
        "architectures": ["DFlash2DraftModel"], "is_causal": False, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        "rope_theta": None,
        "dflash_config": TAPS | KERNELS | SELECTOR | {
            "block_size": 4, "final_logit_softcapping": 20.0, "output_multiplier": 0.6,
        },
    },
    "NeMo Automodel": BACKBONE | {
        "architectures": ["Qwen3DFlashDraftModel"], "is_causal": False, "block_size": 4, "dflash_config": TAPS | {"block_size": 4},
    },
    "SpecForge DSpark": BACKBONE | {"architectures": ["DSparkDraftModel"], "block_size": 4, "dflash_config": DSPARK},
    "SpecForge DSpark, YaRN": BACKBONE | YARN | {
        "architectures": ["DSparkDraftModel"], "block_size": 4, "dflash_config": DSPARK,
    },
    "SpecForge Domino": BACKBONE | {
        "architectures": ["DominoDraftModel"], "block_size": 4, "emb_dim": 6, "dflash_config": TAPS | DOMINO,
    },
    "DSpark with a bonus anchor": BACKBONE | {
        "architectures": ["DSparkDraftModel"], "block_size": 4, "dspark_bonus_anchor": True, "draft_vocab_size": REDUCED,
        "dflash_config": DSPARK,
    },
    "DeepSpec": BACKBONE | _OF_DEEPSPEC | MARKOV,
    "DeepSpec, rank 0": BACKBONE | _OF_DEEPSPEC | {"markov_rank": 0, "enable_confidence_head": False},
    "DeepSpec, layers of Gemma 4": SIZES | _OF_GEMMA4 | MARKOV,
    "DeepSpec, layers of Gemma 4, rank 0": SIZES | _OF_GEMMA4 | {"markov_rank": 0, "enable_confidence_head": False},
    "speculators": _speculators("dflash", "DFlashSpeculator"),
    "speculators, of a target with pictures": _speculators("dflash", "DFlashDraftModel", **_OF_PICTURES),
    "speculators, of Gemma": _speculators("dflash", "DFlashDraftModel", **_OF_GEMMA),
    "speculators, of Mistral Small 4": _speculators("dflash", "DFlashDraftModel", **_OF_MISTRAL),
    "speculators, reduced vocabulary": _speculators("dflash", "DFlashDraftModel", draft_vocab_size=REDUCED),
    "speculators, of DeepSeek V4": _speculators(
        "dflash", "DFlashDraftModel", draft_vocab_size=REDUCED, copied={"hc_mult": 4}
    ),
    "speculators DFlash 2": _speculators(
        "dflash2", "DFlash2DraftModel", sliding_window_non_causal=True, **KERNELS, **SELECTOR
    ),
    "speculators DFlash 2, of Gemma": _speculators(
        "dflash2", "DFlash2DraftModel", sliding_window_non_causal=True, **KERNELS, **SELECTOR, **_OF_GEMMA
    ),
    "speculators DSpark": _speculators("dspark", "DSparkSpeculator", sample_from_anchor=True, **MARKOV),
    "speculators DSpark, of a target with pictures": _speculators(
        "dspark", "DSparkSpeculator", sample_from_anchor=True, **MARKOV, **_OF_PICTURES
    ),
    "speculators DSpark, of Mistral Small 4": _speculators(
        "dspark", "DSparkSpeculator", sample_from_anchor=True, **MARKOV, **_OF_MISTRAL
    ),
    "speculators DSpark, fill-in": _speculators("dspark", "DSparkDraftModel", **MARKOV),
    "speculators DSpark, reduced vocabulary, of Gemma": _speculators(
        "dspark", "DSparkSpeculator", sample_from_anchor=True, draft_vocab_size=REDUCED, **MARKOV, **_OF_GEMMA
    ),
    "LFM2.5 DSpark": BACKBONE | MARKOV | {
        "architectures": ["Lfm2DSparkDraftModel"], "block_size": 4, "num_target_layers": None, "rope_is_neox_style": False,
        "dflash_config": TAPS | {"num_target_layers": LAYERS},
    },
    "NVIDIA DSpark": _OF_NVIDIA_DSPARK,
    "NVIDIA DSpark in NVFP4": _OF_NVIDIA_DSPARK | _IN_NVFP4,
    "NVIDIA DFlash in NVFP4": _OF_NVIDIA_DFLASH | _IN_NVFP4,
    "Model Optimizer DSpark": SIZES | BOOKS | {
        "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "block_size": 4, "layer_types": ["sliding_attention"] * 2,
        "num_hidden_layers": 2, "num_target_layers": LAYERS, "rope_scaling": None, "rope_theta": 5e6, "sliding_window": 9,
        "torch_dtype": "float32", "dflash_config": TAPS | {
            "causal": False, "markov_head_type": "vanilla", "markov_rank": 6, "projector_type": "dspark", "shift_label": True,
            "swa_window_size": 9, "use_confidence_head": True, "use_swa": True,
        },
    },
    "LiLiCorr": BACKBONE | {
        "architectures": ["LiLiCorrDraftModel"], "dflash_config": TAPS | LILICORR | {"block_size": 4},
    },
    "MiMo": SIZES | BOOKS | {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "num_hidden_layers": 2, "v_head_dim": 16, "partial_rotary_factor": 0.5, "rope_theta": 1e4, "sliding_window": 9,
        "block_size": 4, "num_target_layers": LAYERS, "torch_dtype": "bfloat16",
        "dflash_config": TAPS | {
            "block_size": 4, "num_anchors": 4096, "loss_decay_gamma": 7.0, "use_swa": True, "swa_window_size": 9,
            "backbone_rotary_base": 5_000_000, "attention_value_scale": 0.612, "attention_sink_bias": True,
        },
    },
    "layers of Laguna": SIZES | {
        "architectures": ["DFlashLagunaForCausalLM"], "model_type": "laguna", "attention_bias": False, "hidden_act": "silu",
        "num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2, "sliding_window": 9, "rope_theta": 5e5,
        "gating": "per-head", "draft_vocab_size": VOCAB, "eagle_aux_hidden_state_layer_ids": [1, 2, 4], "torch_dtype": "bfloat16",
        "dflash_config": TAPS | {"block_size": 4, "num_target_layers": LAYERS, "causal": True},
    },
    "Muse assistant": SIZES | {
        "architectures": ["MuseGlimmerAssistantModel"], "model_type": "muse_glimmer_assistant", "attention_dropout": 0,
        "block_size": 4, "hidden_act": "silu", "layer_types": ["sliding_attention"] * 2, "num_hidden_layers": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "sliding_window": 9, **TAPS,
    },
}  # fmt: skip
# Layouts that are refused, by what their files say.
REFUSED_LAYOUTS: dict[str, dict[str, Any]] = {
    "gated heads of Qwen3's": BACKBONE | {"dflash_config": TAPS | {"block_size": 4}, "gating": True},
    "layers of Kimi K3": BACKBONE | {"architectures": ["K3DSparkModel"], "block_size": 4} | DSPARK,
    "layers of GLM-5": BACKBONE | {"architectures": ["Glm5DSparkForCausalLM"], "block_size": 4, "kv_lora_rank": 16} | DSPARK,
}  # fmt: skip
# By layout: tensors that tell what a file's others are, or that it brings beside its layers.
BROUGHT: dict[str, tuple[str, ...]] = {
    **{name: ("embed_tokens.weight",) for name in LAYOUTS if name.startswith("NVIDIA")},
    **{name: ("embed_tokens.weight", "lm_head.weight") for name in LAYOUTS if name.startswith("DeepSpec")},
    "layers of Laguna": ("aux_hidden_norms.0.weight", "layers.0.self_attn.qkv_proj.weight"),
    "MiMo": ("mask_embedding",),
    "Model Optimizer DSpark": ("embed_tokens.weight",),
    "z-lab DFlash 2, mask in a pickle": ("mask_embedding", "embed_tokens.weight", "lm_head.weight"),
}
