"""Golden of a MiniMax-M3 target: transformers' class, eager attention, float32, in the names and keys of the releases."""

import json

import torch
from golden.folders import write
from golden.store import FOLDER
from safetensors.torch import load_file, save_file
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM

SPARSE, FULL = "minimax_m3_sparse", "full_attention"
CONFIG = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 16, "dense_intermediate_size": 40, "shared_intermediate_size": 12,
    "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
    "layer_types": [FULL, SPARSE, SPARSE, SPARSE], "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "num_local_experts": 6, "num_experts_per_tok": 2, "rotary_dim": 4, "rms_norm_eps": 1e-6, "swiglu_limit": 1.5,
    "bos_token_id": 1, "eos_token_id": 2,
    "index_n_heads": 2, "index_head_dim": 6, "index_block_size": 4, "index_topk_blocks": 3, "index_local_blocks": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
}  # fmt: skip
_MOVED = {
    "index_n_heads": "sparse_num_index_heads", "index_head_dim": "sparse_index_dim", "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks", "index_local_blocks": "sparse_local_block",
}  # fmt: skip


def write_all() -> dict[str, int]:
    """Writes `minimax_m3_folder` and returns the size of its weights in bytes by name."""
    return write_as_released("minimax_m3", CONFIG)


def write_as_released(name: str, config: dict, *, seed: int = 0) -> dict[str, int]:
    """As `write`, and then in MiniMax's own names and keys."""
    sizes = write(name, MiniMaxM3VLForCausalLM(MiniMaxM3VLTextConfig(**config, attn_implementation="eager")), seed=seed)
    folder = FOLDER / f"{name}_folder"
    save_file(_renamed(load_file(folder / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})
    text = json.loads((folder / "config.json").read_text())
    chooses = [int(kind == SPARSE) for kind in text.pop("layer_types")]
    rope, text["moe_layer_freq"] = (
        text.pop("rope_parameters"),
        [int(one == "sparse") for one in text.pop("mlp_layer_types")],
    )
    text |= {
        "architectures": ["MiniMaxM3SparseForCausalLM"], "model_type": "minimax_m3_text", "hidden_act": "swigluoai",
        "rope_theta": rope["rope_theta"], "partial_rotary_factor": rope["partial_rotary_factor"], "use_gemma_norm": True,
        "attention_output_gate": False, "use_qk_norm": True, "qk_norm_type": "per_head", "n_shared_experts": 1,
        "scoring_func": "sigmoid", "use_routing_bias": True, "num_mtp_modules": 1,
        "sparse_attention_config": {theirs: text.pop(ours) for ours, theirs in _MOVED.items()} | {
            "use_sparse_attention": True, "sparse_attention_freq": chooses, "sparse_disable_index_value": chooses,
            "sparse_score_type": "max", "sparse_init_block": 0,
        },
    }  # fmt: skip
    whole = {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"], "model_type": "minimax_m3_vl", "text_config": text,
        "tie_word_embeddings": text["tie_word_embeddings"], "dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(whole, indent=2) + "\n")
    return sizes


def _renamed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    renamed: dict[str, torch.Tensor] = {}
    experts = {name.rsplit(".mlp.", 1)[0] for name in tensors if ".mlp.experts." in name}
    for name, tensor in tensors.items():
        layer, _, leaf = name.partition(".mlp.")
        if layer in experts and leaf:
            name = f"{layer}.block_sparse_moe.{leaf}".replace("gate.e_score", "e_score")
        name = f"language_model.{name}".replace(".indexer.", ".index_")
        if name.endswith(".experts.gate_up_proj"):
            for i, one in enumerate(tensor):
                first, last = one.chunk(2)
                renamed |= {
                    name.replace("gate_up_proj", f"{i}.w1.weight"): first,
                    name.replace("gate_up_proj", f"{i}.w3.weight"): last,
                }
        elif name.endswith(".experts.down_proj"):
            renamed |= {name.replace("down_proj", f"{i}.w2.weight"): one for i, one in enumerate(tensor)}
        elif name.endswith(".gate_up_proj.weight"):
            both = zip(("gate_proj", "up_proj"), tensor.chunk(2), strict=True)
            renamed |= {name.replace("gate_up_proj", part): rows for part, rows in both}
        else:
            renamed[name] = tensor
    return {name: tensor.clone().contiguous() for name, tensor in renamed.items()}
