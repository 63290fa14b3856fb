"""KV-cache quantization named in a checkpoint's `quantization_config`: pages in float8 while weights stay as they are.

Two tools write such files, compressed-tensors and ModelOpt, which has `kv_cache_quant_algo` in place of a scheme or beside it.
A configuration that also quantizes weights stays in the file, where `config.refuse_quantized` meets it.
"""

from collections.abc import Mapping
from typing import Any

from dflash_jax.config import shown
from dflash_jax.errors import ConfigError

KEY = "quantization_config"
# Bookkeeping. Whatever else says something says it of weights or activations.
_BOOKKEEPING = frozenset(
    "exclude_modules format global_compression_ratio ignore kv_cache_quant_algo kv_cache_scheme producer quant_method "
    "quantization_status run_compressed version".split()
)
# Of a scheme: what these numbers are, and how whoever found the scales looked at them.
_SCHEME: Mapping[str, tuple[Any, ...]] = {
    "num_bits": (8,), "type": ("float",), "symmetric": (None, True), "dynamic": (None, False),
    "strategy": (None, "tensor", "attn_head"), "group_size": (None,), "block_structure": (None,), "actorder": (None, False),
}  # fmt: skip
_OBSERVING = frozenset("observer observer_kwargs scale_dtype zp_dtype".split())
_SIDES = ("k_proj", "v_proj")


def take_cache_scheme(values: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """A `config.json` without a `quantization_config`, of itself or of its `text_config`, that quantizes keys and values alone; and
    whether there was one.

    Raises:
      ConfigError: one quantizes nothing else, and these not as float8 with scales that are in the checkpoint.
    """
    kept, found = dict(values), _only_cache(values.get(KEY))
    if found:
        del kept[KEY]
    text = values.get("text_config")
    if isinstance(text, Mapping) and _only_cache(text.get(KEY)):
        kept["text_config"], found = {key: value for key, value in text.items() if key != KEY}, True
    return kept, found


def _only_cache(config: Any) -> bool:
    """Whether a `quantization_config` is about keys and values alone."""
    if not isinstance(config, Mapping):
        return False
    nested = config.get("quantization")  # ModelOpt's own file has it so
    said = dict(config) | (dict(nested) if isinstance(nested, Mapping) else {})
    said.pop("quantization", None)
    scheme, algorithm = said.get("kv_cache_scheme"), said.get("kv_cache_quant_algo")
    if scheme is None and algorithm is None:
        return False
    left = {key: value for key, value in said.items() if key not in _BOOKKEEPING and value}
    if left.keys() - {"config_groups"} or not _of_cache(left.get("config_groups")):
        return False
    if (scheme is not None and not _is_float8(scheme)) or algorithm not in (None, "FP8"):
        raise ConfigError(
            f"config.json keeps keys and values in {shown(algorithm if scheme is None else scheme)}, expected float8 with scales "
            f'in the checkpoint: num_bits 8, type "float", not dynamic. Its weights are not quantized: remove {KEY}, and scales '
            "are found with calibration"
        )
    return True


def _of_cache(groups: Any) -> bool:
    """Whether groups of modules are none, or those of what leaves the key's and the value's projection, as older files say it."""
    if not groups:
        return True
    return isinstance(groups, Mapping) and all(
        isinstance(group, Mapping)
        and group.get("weights") is None
        and group.get("input_activations") is None
        and isinstance(group.get("targets"), list)
        and all(isinstance(target, str) and target.endswith(_SIDES) for target in group["targets"])
        for group in groups.values()
    )


def _is_float8(scheme: Any) -> bool:
    if not isinstance(scheme, Mapping) or not {"num_bits", "type"} <= scheme.keys():
        return False
    return all(
        key in _OBSERVING or (key in _SCHEME and any(value is one or value == one for one in _SCHEME[key]))
        for key, value in scheme.items()
    )
