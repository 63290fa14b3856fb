"""Between modules and plain arrays: compiled programs take a flat dict of arrays, modules exist only while tracing.

Walking an nnx graph costs milliseconds of Python for each call, so the module is split once and merged inside the trace.
"""

import functools
from collections.abc import Mapping
from typing import Any, cast

from flax import nnx
from jaxtyping import Array

from dflash_jax.config import DecoderConfig, Qwen3Config
from dflash_jax.models.deepseek import Deepseek
from dflash_jax.models.deepseek_config import DeepseekConfig
from dflash_jax.models.dflash import DFlash, fuse_context_projection
from dflash_jax.models.dflash_config import DFlashConfig
from dflash_jax.models.qwen3 import Qwen3
from dflash_jax.models.qwen3_moe import Qwen3Moe, Qwen3MoeConfig
from dflash_jax.quantization.weights import Weight


@functools.lru_cache(maxsize=64)
def _skeleton(config: DecoderConfig) -> tuple[nnx.GraphDef, dict[tuple, str]]:
    """The module graph of a config without arrays, and the dotted parameter name of every path in it."""
    kinds = {Qwen3Config: Qwen3, Qwen3MoeConfig: Qwen3Moe, DeepseekConfig: Deepseek, DFlashConfig: DFlash}
    abstract = nnx.eval_shape(functools.partial(kinds[type(config)], config))
    graph, state = nnx.split(abstract)
    return graph, {path: ".".join(map(str, path)) for path, _ in nnx.to_flat_state(state)}


def bind(config: DecoderConfig, params: Mapping[str, Weight]) -> Any:
    """A module of `config`'s family holding `params`, one array for each declared parameter name.

    Cheap inside `jax.jit`: it only places tracers. A drafter's fused context projection is made here when `params` lacks it, so
    that gradients reach the layers' own weights; decoding passes parameters that hold it already.

    Raises:
      KeyError: a parameter is missing (checkpoints are checked before they get here).
    """
    graph, names = _skeleton(config)
    if isinstance(config, DFlashConfig) and "context_kv_proj.weight" not in params:
        params = fuse_context_projection(config, cast(Mapping[str, Array], params))
    state = nnx.from_flat_state([(path, nnx.Param(params[name])) for path, name in names.items()])
    return nnx.merge(graph, state)


def parameter_names(config: DecoderConfig) -> frozenset[str]:
    """Names of the module graph's arrays; equal to the declared parameters' names."""
    return frozenset(_skeleton(config)[1].values())
