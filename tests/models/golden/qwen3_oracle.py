"""Goldens of the Qwen3 target: transformers' Qwen3ForCausalLM, eager attention, float32, one file per configuration."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from golden.recording import NAME, record_output, recorded
from golden.store import Draw, save
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_next import modeling_qwen3_next

BATCH, TOKENS = 2, 37

BASE = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "max_window_layers": 2,
    "model_type": "qwen3",
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 61,
}

# Only what differs from BASE. Each case is one way a reader of config.json can go wrong.
CASES: dict[str, dict[str, object]] = {
    # head_dim is not hidden_size / heads; the head is its own matrix; three layers, theta of the released models
    "qwen3_untied": {
        "vocab_size": 97,
        "hidden_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "tie_word_embeddings": False,
        "rope_theta": 1000000,
    },
    # odd sizes everywhere, the newer spelling of the rope settings, a large eps
    "qwen3_gqa5": {
        "hidden_size": 40,
        "num_attention_heads": 5,
        "head_dim": 12,
        "intermediate_size": 72,
        "vocab_size": 101,
        "rms_norm_eps": 1e-3,
        "rope_theta": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    # no layer_types: layers from max_window_layers on slide
    "qwen3_gqa14_bias": {
        "hidden_size": 56,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "attention_bias": True,
        "sliding_window": 5,
        "use_sliding_window": True,
        "max_window_layers": 1,
    },
    # the oldest spelling, "type"; and a window that is written down but switched off
    "qwen3_rope_linear": {
        "rope_scaling": {"type": "linear", "factor": 4.0},
        "sliding_window": 5,
        "use_sliding_window": False,
        "max_window_layers": 0,
    },
    "qwen3_rope_llama3": {
        "rope_theta": 500000.0,
        "head_dim": 24,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    # mscale alone changes nothing; the factor of the attention follows from the rope factor
    "qwen3_rope_yarn": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "mscale": 0.7},
    },
    "qwen3_rope_yarn_mscale": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 64.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 16,
            "beta_slow": 2,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
            "truncate": False,
        },
    },
    "qwen3_rope_yarn_factor": {
        "rope_theta": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 50000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "attention_factor": 1.3,
        },
    },
    "qwen3_rope_partial": {"partial_rotary_factor": 0.5},
    "qwen3_rope_partial_yarn": {
        "rope_theta": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "partial_rotary_factor": 0.75,
        },
    },
    "qwen3_window": {
        "num_hidden_layers": 3,
        "sliding_window": 9,
        "use_sliding_window": True,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}


def write_all() -> dict[str, int]:
    """Writes every case and returns the sizes in bytes by case."""
    return {case: _write(case, BASE | changes) for case, changes in CASES.items()}


@contextlib.contextmanager
def _partial_rotary(model: Any) -> Iterator[None]:
    """Qwen3 rotates whole heads only, so Qwen3-Next's rotary, the same on the first dimensions, takes its place."""
    if model.config.rope_parameters.get("partial_rotary_factor", 1.0) == 1.0:
        yield
        return
    model.model.rotary_emb = modeling_qwen3_next.Qwen3NextRotaryEmbedding(model.config)
    with mock.patch.object(modeling_qwen3, "apply_rotary_pos_emb", modeling_qwen3_next.apply_rotary_pos_emb):
        yield


@torch.no_grad()
def _write(case: str, config: dict[str, object]) -> int:
    config = {key: value for key, value in config.items() if value is not None}
    return golden_of(case, config, Qwen3Config.from_dict(dict(config)), Qwen3ForCausalLM, Draw(case), dict)


def golden_of(
    case: str,
    config: dict[str, object],
    parsed: Any,
    kind: type[Any],
    draw: Draw,
    checkpoint: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
) -> int:
    """Writes one case of a model class; `checkpoint` gives its tensors the names of released files."""
    parsed._attn_implementation = NAME
    model = kind(parsed).float().eval()
    tensors = {name: draw.weight(name, tuple(value.shape)) for name, value in model.named_parameters()}
    missing = model.load_state_dict(tensors, strict=False)
    if missing.unexpected_keys or set(missing.missing_keys) - {"lm_head.weight"}:
        raise ValueError(f"{case}: the tensors drawn are not the model's: {missing}")

    ids = draw.integers("ids", (BATCH, TOKENS), parsed.vocab_size)
    # The second row starts later in its sequence; positions are per row.
    positions = torch.arange(TOKENS)[None, :] + torch.tensor([[0], [23]])
    outputs: dict[str, torch.Tensor] = {}
    first = model.model.layers[0]
    hooked = {
        "embed": model.model.embed_tokens,
        "norm0": first.input_layernorm,
        "attn0": first.self_attn,
        "mlp0": first.mlp,
    }
    hooked |= {f"block{index}": layer for index, layer in enumerate(model.model.layers)}
    hooked["final_norm"] = model.model.norm
    for name, module in hooked.items():
        module.register_forward_hook(record_output(outputs, name))
    with _partial_rotary(model):
        outputs["logits"] = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    outputs["q0"], outputs["k0"], outputs["v0"] = recorded[0]
    return save(case, config, checkpoint(tensors), {"ids": ids, "positions": positions}, outputs)
