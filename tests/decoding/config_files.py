"""Configuration files of a small target and a small drafter, and how tests change them."""

from typing import Any

from dflash_jax.config import Qwen3Config
from dflash_jax.models import DFlashConfig

TARGET: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000, "rope_scaling": None, "max_position_embeddings": 512, "tie_word_embeddings": True,
    "attention_bias": False, "hidden_act": "silu", "use_sliding_window": False, "sliding_window": None, "max_window_layers": 4,
}  # fmt: skip
DRAFT: dict[str, Any] = TARGET | {
    "architectures": ["DFlashDraftModel"], "num_hidden_layers": 3, "num_target_layers": 36, "tie_word_embeddings": False,
    "layer_types": ["full_attention"] * 3, "block_size": 16,
    "dflash_config": {"mask_token_id": 60, "target_layer_ids": [1, 17, 33]},
}  # fmt: skip
SLIDING = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "sliding_window": 9}
REMOVE = object()


def changed(base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A file with other values; REMOVE takes a key out."""
    return {key: value for key, value in (base | changes).items() if value is not REMOVE}


def target(**changes: Any) -> Qwen3Config:
    return Qwen3Config.from_hf(changed(TARGET, **changes))


def draft(tensors: tuple[str, ...] = (), nested: dict[str, Any] | None = None, **changes: Any) -> DFlashConfig:
    """The drafter's configuration; `nested` changes `dflash_config`."""
    inner = changed(DRAFT["dflash_config"], **(nested or {}))
    return DFlashConfig.from_hf(changed(DRAFT, **{"dflash_config": inner} | changes), tensors)
