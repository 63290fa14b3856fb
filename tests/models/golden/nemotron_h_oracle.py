"""Goldens of Nemotron-H targets: transformers' class, eager attention, float32, with the time step's limits that the file says.

transformers takes `time_step_min` for the lower limit in prompts (huggingface/transformers#48989), which NVIDIA's code does not.
"""

import math
from typing import Any

import numpy as np
import torch
from golden.folders import write
from golden.store import FOLDER
from transformers import NemotronHConfig, NemotronHForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 40,
    "max_position_embeddings": 256, "ssm_state_size": 6, "mamba_head_dim": 4, "attn_implementation": "eager",
}  # fmt: skip
# By name: every kind of layer; a latent of experts, chosen by groups, and limits that bound; no experts, one group of heads.
CASES: dict[str, dict[str, Any]] = {
    "nemotron_h": {
        "hybrid_override_pattern": "MEM*-EM", "mamba_num_heads": 6, "n_groups": 2, "chunk_size": 8, "n_routed_experts": 6,
        "num_experts_per_tok": 3, "moe_intermediate_size": 12, "moe_shared_expert_intermediate_size": 20,
        "routed_scaling_factor": 2.5,
    },
    "nemotron_h_latent": {
        "layers_block_type": ["mamba", "moe", "attention", "moe"], "mamba_num_heads": 8, "n_groups": 4, "chunk_size": 16,
        "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "moe_shared_expert_intermediate_size": 20,
        "moe_latent_size": 8, "n_group": 4, "topk_group": 2, "norm_topk_prob": False, "conv_kernel": 3,
        "time_step_limit": [0.4, 0.9],
    },
    "nemotron_h_dense": {
        "hybrid_override_pattern": "-M*-M", "mamba_num_heads": 3, "n_groups": 1, "chunk_size": 128,
    },
}  # fmt: skip


def write_all() -> dict[str, int]:
    """Writes a folder for each of `CASES` and returns the sizes of their weights in bytes by name."""
    sizes = {}
    for name, case in CASES.items():
        model = NemotronHForCausalLM(NemotronHConfig(**SIZES, **case))
        for layer in model.model.layers:
            if hasattr(layer.mixer, "time_step_limit"):
                layer.mixer.time_step_limit = tuple(case.get("time_step_limit", (0.0, math.inf)))
        sizes |= write(name, model)
        _add_states(name, model)
    return sizes


def _add_states(name: str, model: NemotronHForCausalLM) -> None:
    """Adds the states of every layer of Mamba 2 after the text to `expected.npz`, and the rows before its convolution."""
    path = FOLDER / f"{name}_folder" / "expected.npz"
    expected = dict(np.load(path))
    with torch.no_grad():
        cache = model(torch.from_numpy(expected["ids"])[None], use_cache=True).past_key_values
    kept = [cache.layers[i] for i, kind in enumerate(model.config.layers_block_type) if kind == "linear_attention"]
    expected["states"] = np.stack([layer.recurrent_states[0][0].numpy() for layer in kept])
    taps = model.config.conv_kernel
    expected["rows"] = np.stack([layer.conv_states[0][0].numpy().T[1 - taps :] for layer in kept])
    np.savez_compressed(path, **expected)
