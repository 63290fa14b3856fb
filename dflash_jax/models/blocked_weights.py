"""Which matrices of a model lie in blocks of columns, where that makes decoding faster.

With up to some hundred tokens a layer waits for its weights, and weights in blocks come faster and take less of the power that a
GPU may draw. On an H200, engines with and without that took turns, medians of a cycle at 1k of context: XXX.

Only Hopper's kernels multiply them without a copy, so the head, the first layer's projection of queries, keys and values, and what
makes the drafter's context stay as they are: XLA multiplies those of some calls.
"""

from typing import Any

import jax
import jax.numpy as jnp
from dflash_kernels import ColumnBlocks, in_column_blocks, layer_chain_refusal
from jaxtyping import Array

from dflash_jax.config import DecoderConfig, Qwen3Config
from dflash_jax.models.dflash_config import DFlashConfig

BLOCK_COLUMNS = True  # False for comparisons
_MATRICES = "attn.qkv_proj.weight", "attn.o_proj.weight", "mlp.gate_up_proj.weight", "mlp.down_proj.weight"


def blocks_pay(config: DecoderConfig, dtype: Any) -> bool:
    """Whether `block_columns` makes a model in `dtype` faster on the device that is traced for: where `layer_chain` takes its
    layers, so that calls of few rows have a kernel as well.
    """
    if not BLOCK_COLUMNS or type(config) not in (Qwen3Config, DFlashConfig) or config.attention_bias:
        return False
    heads = config.num_heads * config.head_dim
    sizes = {
        "hidden": config.hidden_size, "heads_width": heads, "inner": config.intermediate_size,
        "next_width": heads + 2 * config.num_kv_heads * config.head_dim,
    }  # fmt: skip
    return layer_chain_refusal(1, jnp.dtype(dtype), **sizes) is None


def block_columns(params: dict[str, Array]) -> dict[str, Array | ColumnBlocks]:
    """A model's parameters with the matrices of its layers in blocks, taken out of `params` one by one: no two copies at a time.

    What stays as it is moves as well, for the same reason as in `quantise_weights`.
    """
    jitted, result = jax.jit(in_column_blocks), dict[str, Array | ColumnBlocks]()
    for name in list(params):
        array = params.pop(name)
        result[name] = jitted(array) if _is_blocked(name) else jnp.copy(array)
    return result


def _is_blocked(name: str) -> bool:
    return name.startswith("layers.") and name.endswith(_MATRICES) and name != "layers.0.attn.qkv_proj.weight"
