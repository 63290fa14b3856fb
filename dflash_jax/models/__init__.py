"""Model families: configurations, parameters and Flax modules. `registry` is their table."""

from dflash_jax.config import Qwen3Config
from dflash_jax.models.deepseek import Deepseek, DeepseekConfig
from dflash_jax.models.deepseek_sparse import SparseDeepseek, SparseDeepseekConfig
from dflash_jax.models.dflash import DFlash, fuse_context_projection
from dflash_jax.models.dflash_config import DFlashConfig, default_target_layer_ids
from dflash_jax.models.gemma3 import Gemma3, Gemma3Config
from dflash_jax.models.gemma4 import Gemma4, Gemma4Config
from dflash_jax.models.gpt_oss import GptOss, GptOssConfig
from dflash_jax.models.llama import Llama, LlamaConfig
from dflash_jax.models.mistral import Mistral, MistralConfig
from dflash_jax.models.parameters import Parameter, Source, count, init_params, to_huggingface
from dflash_jax.models.qwen2 import Qwen2, Qwen2Config
from dflash_jax.models.qwen3 import Qwen3
from dflash_jax.models.qwen3_5_vision import Patches, VisionConfig, VisionTower
from dflash_jax.models.qwen3_moe import Qwen3Moe, Qwen3MoeConfig
from dflash_jax.models.registry import (
    Family,
    bind,
    family_for,
    family_named,
    family_of,
    layer_traits,
    parameter_names,
)
from dflash_jax.models.traits import LayerTraits

__all__ = [
    "DFlash", "DFlashConfig", "Deepseek", "DeepseekConfig", "Family", "Gemma3", "Gemma3Config", "Gemma4", "Gemma4Config",
    "GptOss", "GptOssConfig", "LayerTraits", "Llama", "LlamaConfig", "Mistral", "MistralConfig", "Parameter", "Patches", "Qwen2",
    "Qwen2Config", "Qwen3", "Qwen3Config", "Qwen3Moe", "Qwen3MoeConfig", "Source", "SparseDeepseek", "SparseDeepseekConfig",
    "VisionConfig", "VisionTower", "bind", "count", "default_target_layer_ids", "family_for", "family_named", "family_of",
    "fuse_context_projection", "init_params", "layer_traits", "parameter_names", "to_huggingface",
]  # fmt: skip
