"""The table of formats that releases are quantized in, and a folder's tensors with what they stand for in place of them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from dflash_jax.checkpoints.converted import main_dtype
from dflash_jax.checkpoints.quantized.auto_round import read_auto_round
from dflash_jax.checkpoints.quantized.awq import read_awq
from dflash_jax.checkpoints.quantized.bitsandbytes import read_bitsandbytes
from dflash_jax.checkpoints.quantized.compressed import read_compressed
from dflash_jax.checkpoints.quantized.dequantized import Dequantized
from dflash_jax.checkpoints.quantized.float8 import read_fbgemm, read_float8
from dflash_jax.checkpoints.quantized.gptq import read_gptq
from dflash_jax.checkpoints.quantized.modelopt import read_modelopt
from dflash_jax.checkpoints.quantized.release import KEY, Release
from dflash_jax.checkpoints.safetensors import Tensor
from dflash_jax.options import FLOAT_DTYPES

# By `quant_method`. Each reads the `quantization_config`, and raises ConfigError for what it does not read.
FORMATS: Mapping[str, Callable[[Mapping[str, Any]], Release]] = {
    "auto-round": read_auto_round,
    "awq": read_awq,
    "bitsandbytes": read_bitsandbytes,
    "compressed-tensors": read_compressed,
    "fbgemm_fp8": read_fbgemm,
    "fp8": read_float8,
    "gptq": read_gptq,
    "modelopt": read_modelopt,
    "modelopt_fp4": read_modelopt,
    "modelopt_mixed": read_modelopt,
}
# What is left for `quantization.cache_scheme` of a file that also says how keys and values are kept.
_OF_CACHE = ("kv_cache_scheme", "kv_cache_quant_algo")


def take_release(values: Mapping[str, Any]) -> tuple[dict[str, Any], Release | None]:
    """A `config.json` without what it says of quantized weights, in itself or in its `text_config`, and how they are; None where it
    says nothing of them, or of a format that is not in the table. What it says of keys and values stays.

    Raises:
      ConfigError: the format is in the table, and this one of a kind that is not read.
    """
    kept, release = _without(values)
    text = values.get("text_config")
    if isinstance(text, Mapping) and (release is None or text.get(KEY) == values[KEY]):  # some tools write it twice
        inner, own = _without(text)
        kept, release = ({**kept, "text_config": inner}, own) if own is not None else (kept, release)
    return kept, release


def _without(values: Mapping[str, Any]) -> tuple[dict[str, Any], Release | None]:
    said = _flat(values.get(KEY))
    if not _of_weights(said):
        return dict(values), None
    # AutoFP8 says "static"; the scales themselves then say that there are some.
    cache = {key: said[key] for key in _OF_CACHE if said.get(key) not in (None, "static")}
    kept = {key: value for key, value in values.items() if key != KEY}
    if cache:
        kept[KEY] = {"quant_method": said["quant_method"], **cache}
    weights = {key: value for key, value in said.items() if key not in _OF_CACHE}
    return kept, FORMATS[said["quant_method"]](weights)


def _flat(said: Any) -> Mapping[str, Any]:
    """A `quantization_config` with its method beside all else: ModelOpt's own file has the rest in `quantization`, and older files
    of bitsandbytes name no method."""
    if not isinstance(said, Mapping):
        return {}
    method, nested = said.get("quant_method"), said.get("quantization")
    if isinstance(method, str) and method.startswith("modelopt") and isinstance(nested, Mapping):
        return {**{key: value for key, value in said.items() if key != "quantization"}, **nested}
    if method is None and (said.get("load_in_4bit") or said.get("load_in_8bit")):
        return {**said, "quant_method": "bitsandbytes"}
    return said


def _of_weights(said: Mapping[str, Any]) -> bool:
    """Whether a `quantization_config` of a known format is about weights, and not about keys and values alone."""
    method = said.get("quant_method")
    if not isinstance(method, str) or method not in FORMATS:
        return False
    if method.startswith("modelopt"):
        return said.get("quant_algo") is not None
    groups = said.get("config_groups")
    if not isinstance(groups, Mapping):
        return groups is not None or method != "compressed-tensors"
    return any(not isinstance(group, Mapping) or group.get("weights") is not None for group in groups.values())


def dequantized(
    release: Release, tensors: Mapping[str, Tensor], unreadable: Collection[str], problems: list[str]
) -> tuple[dict[str, Tensor], list[str]]:
    """Tensors with `Dequantized` ones in place of those that a release has quantized; and the names of tensors, as they would be,
    that are known to be there and cannot be read.

    Args:
      problems: takes what is wrong with codes and scales, one sentence each.
    """
    lost = [release.owner(name) for name in unreadable]
    found = release.find(tensors, lost, problems)
    taken = {name for one in found.values() for name in one.names} | {
        one for one in tensors if release.owner(one) in lost
    }
    result = {name: tensor for name, tensor in tensors.items() if name not in taken}
    plain = ((one.dtype_name, one.size) for one in result.values() if one.dtype_name in FLOAT_DTYPES)
    kept = main_dtype(plain)
    for name, one in found.items():
        if one.matrix is None:
            lost.append(name)
            continue
        if name in result:
            problems.append(
                f"tensor {name} is there twice, as it is and quantized ({one.matrix.stored[0].name}); keep one of them"
            )
        result[name] = Dequantized.of(name, one.matrix, kept)
    return result, lost


def notices(release: Release, tensors: Sequence[Tensor]) -> list[str]:
    """What to say of the tensors of a plan."""
    made = {one.stored[0].name: one for one in tensors if isinstance(one, Dequantized)}
    if not made:
        return [f"config.json tells of {release.what}, and no tensor is in it: the tensors count"]
    stored = sum(tensor.nbytes for one in made.values() for tensor in one.stored)
    numbers = sum(int(np.prod(one.matrix.shape)) for one in made.values())
    kept = next(iter(made.values())).kept_name
    wide = numbers * (4 if kept == "float32" else 2)
    said = [
        f"weights were released in {release.what}: {len(made)} tensors are dequantized while they are loaded, to {_size(wide)} in "
        f"{kept} (released: {_size(stored)}); weight_dtype rounds them anew"
    ]
    if release.activations is not None:
        said.append(f"the release rounds activations as well ({release.activations}); that is not done here")
    return said


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:,.1f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:,.1f} MB"
