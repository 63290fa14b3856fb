"""Writes a trained pair as two Hugging Face folders: config.json, bfloat16 safetensors, tokenizer and model card."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from dflash_jax.models import to_huggingface
from dflash_jax.models.dflash import dflash_parameters
from dflash_jax.models.parameters import Parameter
from dflash_jax.models.qwen3 import qwen3_parameters
from dflash_jax.training.kinds import kind_keys
from dflash_jax.training.optimizer import Params
from dflash_jax.training.settings import EOS, EOS_ID, Settings


def common_config(settings: Settings, layers: int) -> dict[str, Any]:
    """Keys of `config.json` that the bundled target and its drafter share."""
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": EOS_ID,
        "dtype": "bfloat16",
        "eos_token_id": EOS_ID,
        "head_dim": settings.head_dim,
        "hidden_act": "silu",
        "hidden_size": settings.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": settings.intermediate_size,
        "layer_types": ["full_attention"] * layers,
        "max_position_embeddings": settings.max_position,
        "model_type": "qwen3",
        "num_attention_heads": settings.num_heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": settings.vocab_size,
    }


def target_json(settings: Settings) -> dict[str, Any]:
    return {"architectures": ["Qwen3ForCausalLM"], **common_config(settings, settings.target_layers)}


def draft_json(settings: Settings) -> dict[str, Any]:
    keys = kind_keys(settings.draft_config)
    return {"architectures": keys.pop("architectures"), **common_config(settings, settings.draft_layers), **keys}


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")


def write_weights(path: Path, parameters: tuple[Parameter, ...], params: Params) -> None:
    tensors = {name: np.ascontiguousarray(value) for name, value in to_huggingface(parameters, params).items()}
    save_file(tensors, path, metadata={"format": "pt"})


def export_pair(
    settings: Settings, target: Params, draft: Params, tokenizer: Path, cards: Mapping[str, str], out: Path
) -> dict[str, int]:
    """Writes `out/target` and `out/draft`, and returns the bytes of every file.

    Args:
      target, draft: weights as they are to be stored (bfloat16).
      cards: README.md of `target` and `draft`.
    """
    for name, config, table, params in (
        ("target", target_json(settings), qwen3_parameters(settings.target_config), target),
        ("draft", draft_json(settings), dflash_parameters(settings.draft_config), draft),
    ):
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "config.json", config)
        write_weights(folder / "model.safetensors", table, params)
        (folder / "README.md").write_text(cards[name], "utf-8")
    folder = out / "target"
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    special = {
        "added_tokens_decoder": {str(EOS_ID): _special(EOS)},
        "eos_token": EOS,
        "bos_token": EOS,
        "pad_token": EOS,
    }
    write_json(
        folder / "tokenizer_config.json",
        special
        | {
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": settings.max_position,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )
    write_json(folder / "generation_config.json", {"do_sample": False, "eos_token_id": EOS_ID, "pad_token_id": EOS_ID})
    return {str(path.relative_to(out)): path.stat().st_size for path in sorted(out.rglob("*")) if path.is_file()}


def _special(content: str) -> dict[str, Any]:
    return {
        "content": content,
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
        "special": True,
    }
