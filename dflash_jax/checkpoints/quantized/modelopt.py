"""`quant_method: "modelopt"`: float8, NVFP4 and MX formats as TensorRT Model Optimizer writes them, one or several side by side.

    X.weight          float8_e4m3fn [F, D], or of NVFP4 and MXFP4 uint8 [F, D/2]: two numbers in E2M1, the first in the lower bits
    X.weight_scale    FP8: one; FP8_PER_CHANNEL_PER_TOKEN: [F]; FP8_PB_WO: [F/128, 1, D/128, 1]; MXFP8, MXFP4: exponents, uint8
                      [F, D/32]; NVFP4: float8_e4m3fn [F, D/16], or [F, D/32] beside activations in float8
    X.weight_scale_2  of NVFP4, float32: what its scales are multiplied with
    X.input_scale     what activations would be divided by; not needed

Experts in one tensor, `experts.gate_up_proj [E, 2F, D]`, have `experts.gate_up_proj_weight_scale` and the like, and a second scale
for each expert or for all; gpt-oss's have input channels first (`input_first`). Which modules are left out (`exclude_modules`,
`ignore`, with wildcards) and which are in which format (`quantized_layers`), the tensors say too. Sources: ModelOpt,
`torch/export/quant_utils.py`, `torch/export/convert_hf_config.py` and `torch/quantization/qtensor`; vLLM's
ModelOptQuantConfigBase and its kin.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dflash_jax.checkpoints.quantized.dequantized import Matrix, float8
from dflash_jax.checkpoints.quantized.input_first import input_first, is_input_first
from dflash_jax.checkpoints.quantized.packed import E2M1, table_of
from dflash_jax.checkpoints.quantized.release import KEY, Found, Release, check_names, one_of, refuse_unknown
from dflash_jax.checkpoints.quantized.scaled import PER_ROW, PER_TENSOR, Block, scaled
from dflash_jax.checkpoints.safetensors import Tensor
from dflash_jax.config import shown
from dflash_jax.errors import ConfigError


@dataclass(frozen=True)
class _Algorithm:
    """What one `quant_algo` keeps.

    Attributes:
      what, activations: see `Release`.
      dtype: of codes.
      exponents: whether scales are.
    """

    what: str
    dtype: str
    block: Block
    activations: str | None
    exponents: bool = False


_ALGORITHMS: Mapping[str, _Algorithm] = {
    "FP8": _Algorithm("float8 with a scale for each tensor", "F8_E4M3", PER_TENSOR, "float8, static"),
    "FP8_PER_CHANNEL_PER_TOKEN": _Algorithm("float8 with a scale for each row", "F8_E4M3", PER_ROW, "float8, dynamic"),
    "FP8_PB_WO": _Algorithm("float8 in blocks of 128 x 128", "F8_E4M3", (128, 128), None),
    "MXFP8": _Algorithm("MXFP8", "F8_E4M3", (1, 32), "MXFP8, dynamic", exponents=True),
    "MXFP4": _Algorithm("MXFP4", "U8", (1, 32), "MXFP4, dynamic", exponents=True),
    "W4A8_MXFP4_FP8": _Algorithm("MXFP4", "U8", (1, 32), "float8, static", exponents=True),
    "NVFP4": _Algorithm("NVFP4", "U8", (1, 16), "NVFP4, static"),
    "W4A16_NVFP4": _Algorithm("NVFP4", "U8", (1, 16), None),
    "W4A8_NVFP4_FP8": _Algorithm("NVFP4 in groups of 32", "U8", (1, 32), "float8, static"),
}
_MIXED = "MIXED_PRECISION"
_KNOWN = (
    "config_groups exclude_modules group_size has_zero_point ignore pre_quant_scale producer quant_algo quant_method "
    "quantized_layers version"
).split()
_OF_LAYER = "group_size has_zero_point pre_quant_scale quant_algo".split()
_DECODERS = {"F8_E4M3": float8, "U8": table_of(E2M1)}


def read_modelopt(said: Mapping[str, Any]) -> Release:
    """The release that a `quantization_config` of this method tells of. Raises ConfigError for what is not read."""
    # First: other formats have keys of their own.
    mixed = _name(said) == _MIXED
    found = _of_layers(said.get("quantized_layers")) if mixed else [_algorithm(said, KEY)]
    refuse_unknown("modelopt", said, _KNOWN)
    check_names(said, "exclude_modules", "ignore")
    activations = dict.fromkeys(one.activations for one in found if one.activations is not None)
    ends = ("weight_scale", "weight_scale_2", "input_scale")
    return Release(
        " and ".join(dict.fromkeys(one.what for one in found)),
        " and ".join(activations) or None,
        partial(_find, found),
        {f".{end}": ".weight" for end in ends} | {f"_{end}": "" for end in ends},
    )


def _of_layers(layers: Any) -> list[_Algorithm]:
    """What layers are kept in, each once."""
    if not isinstance(layers, Mapping) or not all(isinstance(one, Mapping) for one in layers.values()) or not layers:
        raise ConfigError(
            f"config.json: quantized_layers in {KEY} must be an object of layers, as quant_algo={_MIXED} needs, got {shown(layers)}"
        )
    found = []
    for name, layer in layers.items():
        where = f"{KEY}.quantized_layers.{name}"
        algorithm = _algorithm(layer, where)
        refuse_unknown("modelopt", layer, _OF_LAYER, where)
        found.append(algorithm)
    return list(dict.fromkeys(found))


def _name(said: Mapping[str, Any]) -> str:
    """The algorithm's, which ModelOpt writes in small letters too."""
    return str(said.get("quant_algo")).upper()


def _algorithm(said: Mapping[str, Any], where: str) -> _Algorithm:
    algorithm = _ALGORITHMS[one_of({"quant_algo": _name(said)}, "quant_algo", tuple(_ALGORITHMS), where)]
    # What AWQ and SVDQuant multiply activations with is no part of these formats.
    one_of(said, "pre_quant_scale", (None, False), where)
    one_of(said, "has_zero_point", (None, False), where)
    width = algorithm.block[1]
    one_of(said, "group_size", (None, 0, width) if width is not None else (None, 0, -1), where)
    return algorithm


def _find(
    algorithms: list[_Algorithm], tensors: Mapping[str, Tensor], lost: Collection[str], problems: list[str]
) -> dict[str, Found]:
    found = {}
    for name, codes in tensors.items():
        own = [one for one in algorithms if one.dtype == codes.dtype]
        if not own or name in lost or name.endswith(("_scale", "_scale_2")):
            continue
        stacked = not name.endswith(".weight")
        module = f"{name}_" if stacked else name.removesuffix("weight")
        parts = {
            end: tensors[module + end]
            for end in ("weight_scale", "weight_scale_2", "input_scale")
            if module + end in tensors
        }
        scale = parts.get("weight_scale")
        if scale is not None:
            own = [one for one in own if one.exponents == (scale.dtype == "U8")] or own
        two = codes.dtype == "U8" and not own[0].exponents
        wanted = ("weight_scale", "weight_scale_2") if two else ("weight_scale",)
        if missing := [module + end for end in wanted if end not in parts]:
            kind = own[0].what.split()[0]
            problems.append(
                f"tensor {name} is in {kind} and has no scale {' and no '.join(missing)}; fetch the tensors again"
            )
        found[name] = Found(
            None if missing else _matrix(name, codes, parts, [one.block for one in own], two, problems),
            [name, *(one.name for one in parts.values())],
        )
    return found


def _matrix(
    name: str, codes: Tensor, parts: Mapping[str, Tensor], blocks: list[Block], two: bool, problems: list[str]
) -> Matrix | None:
    """The matrix in one of these blocks; None with what is wrong with it.

    Args:
      two: whether its scales have one of their own.
    """
    scale, decode = parts["weight_scale"], _DECODERS[codes.dtype]
    if codes.dtype == "U8":
        shape = (*codes.shape[:-1], *(2 * width for width in codes.shape[-1:]))
        whole, group = parts.get("weight_scale_2"), blocks[0][1]
        if two and whole is not None and group is not None and is_input_first(codes, scale, group):
            return input_first(name, codes, scale, whole, group, problems)
        more = {"whole": whole} if two else {}
        return scaled(name, shape, codes, scale, decode, list(dict.fromkeys(blocks)), problems, **more)
    if len(scale.shape) == 4 and scale.shape[1::2] == (1, 1):
        scale = replace(scale, shape=scale.shape[::2])
    return scaled(name, codes.shape, codes, scale, decode, blocks, problems)
