"""`quant_method: "compressed-tensors"`, as llm-compressor writes it: float8 and int8 as they are, int2, int4, int8 and E2M1 packed.

    X.weight            float8_e4m3fn or int8 [F, D] (formats float-quantized, int-quantized, naive-quantized, mxfp8-quantized)
    X.weight_packed     int32 [F, D * bits / 32] (pack-quantized): the number plus 2^(bits-1), the first in the lowest bits;
                        uint8 [F, D/2] (nvfp4-, mxfp4-pack-quantized): two numbers in E2M1, the first in the lower bits
    X.weight_scale      [1] of a tensor, [F, 1] of rows, [F, D/g] of groups of g columns, [F/b, D/c] of blocks; of mxfp4 and mxfp8
                        exponents, uint8, and of nvfp4 float8_e4m3fn
    X.weight_global_scale   float32 [1] of nvfp4: what its scales are divided by
    X.weight_zero_point of each scale, where weights are not symmetric; int8, or packed along rows
    X.weight_g_idx      each column's group, of older files whose columns were ordered by activations
    X.weight_shape, X.input_scale, X.input_zero_point, X.output_scale, ...   not needed

Groups of modules may be kept in different ways; a tensor's dtype and its scales' shape tell which of them is its own, so nothing
depends on `targets` and `ignore`. Source: the library compressed-tensors, `compressors/` and `quantization/quant_args.py`.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from dflash_jax.checkpoints.cache_scales import is_scale
from dflash_jax.checkpoints.quantized.dequantized import Decoder, float8, read, signed_bytes
from dflash_jax.checkpoints.quantized.packed import E2M1, table_of, unpacked, whole_numbers
from dflash_jax.checkpoints.quantized.release import (
    KEY,
    Found,
    Release,
    check_names,
    one_of,
    positive_pair,
    refuse_unknown,
)
from dflash_jax.checkpoints.quantized.scaled import PER_ROW, PER_TENSOR, Block, Scaled, scaled
from dflash_jax.checkpoints.safetensors import DTYPES, Tensor
from dflash_jax.config import shown
from dflash_jax.errors import ConfigError

_METHOD = "compressed-tensors"
_KNOWN = (
    "config_groups format global_compression_ratio ignore moe_sparsity_config provider quant_method quantization_status "
    "run_compressed sparsity_config transform_config version"
).split()
_OF_GROUP = ("format", "input_activations", "output_activations", "targets", "weights")
_OF_WEIGHTS = (
    "actorder block_structure dynamic group_size num_bits observer observer_kwargs scale_dtype strategy symmetric type zp_dtype"
).split()
_PACKED, _MXFP8 = "pack-quantized", "mxfp8-quantized"
# Columns that share a scale, of formats whose numbers are in E2M1.
_NVFP4, _MXFP4 = "nvfp4-pack-quantized", "mxfp4-pack-quantized"
_GROUPS = {_NVFP4: 16, _MXFP4: 32}
_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", _MXFP8, _PACKED, _NVFP4, _MXFP4)
_DTYPES = {("float", 8): "F8_E4M3", ("int", 8): "I8"}
_E2M1 = table_of(E2M1)
_DECODERS: Mapping[str, Decoder] = {"F8_E4M3": float8, "I8": signed_bytes}
_UNPACKERS: Mapping[int, Decoder] = {bits: whole_numbers(bits, -(1 << (bits - 1))) for bits in (2, 4, 8)}
_PARTS = ("scale", "zero_point", "g_idx", "global_scale")
# Of a matrix, beside what its numbers are made of; but `output_scale` of keys and values, which is that of their pages.
_OWN = "weight_shape input_scale input_zero_point input_global_scale".split()
_BESIDE = (*_OWN, "output_scale", "output_zero_point")


@dataclass(frozen=True)
class _Scheme:
    """How some modules' weights are kept.

    Attributes:
      bits: of a packed number; None where numbers stand for themselves, in `dtype`.
      two_scales: whether scales have a scale of their own.
    """

    dtype: str
    bits: int | None
    block: Block
    symmetric: bool
    two_scales: bool = False

    @property
    def decode(self) -> Decoder:
        if self.bits is None:
            return _DECODERS[self.dtype]
        return _E2M1 if self.dtype == "U8" else _UNPACKERS[self.bits]


def read_compressed(said: Mapping[str, Any]) -> Release:
    """The release that a `quantization_config` of this method tells of. Raises ConfigError for what is not read."""
    refuse_unknown(_METHOD, said, _KNOWN)
    one_of(said, "quantization_status", (None, "compressed"))
    check_names(said, "ignore")
    sparsity = said.get("sparsity_config")
    if sparsity and (not isinstance(sparsity, Mapping) or sparsity.get("format") not in (None, "dense")):
        raise ConfigError(f"config.json says sparsity_config={shown(sparsity)} in {KEY}: only dense weights are read")
    for key in ("transform_config", "moe_sparsity_config"):
        one_of(said, key, (None, {}))
    groups = said.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ConfigError(f"config.json: config_groups in {KEY} must be an object of groups, got {shown(groups)}")
    schemes, kinds, activations = list[_Scheme](), list[str](), list[str]()
    for name, group in groups.items():
        where = f"{KEY}.config_groups.{name}"
        if not isinstance(group, Mapping):
            raise ConfigError(f"config.json: {where} must be an object, got {shown(group)}")
        refuse_unknown(_METHOD, group, _OF_GROUP, where)
        if group.get("weights") is not None:
            scheme, kind = _read_weights(
                group["weights"], group.get("format") or said.get("format"), f"{where}.weights"
            )
            schemes.append(scheme)
            kinds.append(kind)
        activations += _read_activations(group.get("input_activations"))
    return Release(
        " and ".join(dict.fromkeys(kinds)),
        " and ".join(dict.fromkeys(activations)) or None,
        partial(_find, schemes),
        dict.fromkeys(
            (".weight_packed", *(f".weight_{part}" for part in _PARTS), *(f".{one}" for one in _OWN)), ".weight"
        ),
    )


def _read_weights(said: Any, form: Any, where: str) -> tuple[_Scheme, str]:
    """How a group keeps its weights, and in words."""
    if not isinstance(said, Mapping):
        raise ConfigError(f"config.json: {where} must be an object, got {shown(said)}")
    refuse_unknown(_METHOD, said, _OF_WEIGHTS, where)
    if form not in _FORMATS:
        raise ConfigError(
            f"config.json says format={shown(form)} in {KEY}, read are {', '.join(_FORMATS)}: take another release of the model"
        )
    kind, bits = one_of(said, "type", ("int", "float"), where), one_of(said, "num_bits", (2, 4, 8), where)
    packed, group = form == _PACKED, _GROUPS.get(form)
    permitted = kind == "int" if packed else (kind, bits) == ("float", 4) if group else (kind, bits) in _DTYPES
    if not permitted or (form == _MXFP8 and kind == "int"):
        raise ConfigError(f"config.json says {kind} weights of {bits} bits in format {form}, which is not read")
    one_of(said, "dynamic", (None, False), where)
    symmetric = one_of(said, "symmetric", (None, True, False), where) is not False
    if kind == "float" and not symmetric:
        raise ConfigError(f"config.json says symmetric=False of float weights in {where}, which is not read")
    if group:
        one_of(said, "group_size", (group,), where)
        one_of(said, "strategy", ("tensor_group",) if form == _NVFP4 else (None, "group"), where)
        return _Scheme("U8", bits, (1, group), symmetric, form == _NVFP4), form.removesuffix("-pack-quantized").upper()
    block, size = _read_strategy(said, where)
    dtype = "I32" if packed else _DTYPES[kind, bits]
    return _Scheme(dtype, bits if packed else None, block, symmetric), f"{kind}{bits} {size}"


def _read_strategy(said: Mapping[str, Any], where: str) -> tuple[Block, str]:
    """Which rows and columns share a scale, and in words. Without a name of it, the size of groups tells."""
    size, strategy = said.get("group_size"), said.get("strategy")
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if strategy == "tensor":
        return PER_TENSOR, "with a scale for each tensor"
    if strategy == "channel":
        return PER_ROW, "with a scale for each row"
    if strategy == "group" and isinstance(size, int) and size > 0:
        return (1, size), f"in groups of {size}"
    if strategy == "block" and (pair := _pair(said.get("block_structure"))) is not None:
        return pair, f"in blocks of {pair[0]} x {pair[1]}"
    raise ConfigError(
        f"config.json says strategy={shown(strategy)}, group_size={shown(size)}, block_structure="
        f"{shown(said.get('block_structure'))} in {where}, expected tensor, channel, group with a positive group_size, or block "
        "with block_structure of two positive integers"
    )


def _pair(structure: Any) -> tuple[int, int] | None:
    """Rows and columns of a block; older files have them as a text, "128x128"."""
    parts = structure.split("x") if isinstance(structure, str) else ()
    return positive_pair([int(part) for part in parts if part.isdecimal()] if parts else structure)


def _read_activations(said: Any) -> list[str]:
    if not isinstance(said, Mapping):
        return []
    return [f"{said.get('type', 'int')}{said.get('num_bits', 8)}, {'dynamic' if said.get('dynamic') else 'static'}"]


def _find(
    schemes: list[_Scheme], tensors: Mapping[str, Tensor], lost: Collection[str], problems: list[str]
) -> dict[str, Found]:
    found = {}
    for name, codes in tensors.items():
        own = [one for one in schemes if codes.dtype == one.dtype]
        weight = name.removesuffix("_packed")
        module = weight.removesuffix(".weight")
        if not own or module == weight or (weight != name) != (codes.dtype in ("I32", "U8")) or weight in lost:
            continue
        parts = {end: tensors[one] for end in _PARTS if (one := f"{weight}_{end}") in tensors}
        beside = [one for end in _BESIDE if (one := f"{module}.{end}") in tensors and not is_scale(one)]
        matrix = _matrix(weight, codes, parts, own, problems)
        found[weight] = Found(matrix, [name, *(one.name for one in parts.values()), *beside])
    return found


def _matrix(
    name: str, codes: Tensor, parts: Mapping[str, Tensor], schemes: list[_Scheme], problems: list[str]
) -> Scaled | None:
    """The matrix by the first of the schemes that its scales' shape fits; None with what is wrong with it."""
    if "scale" not in parts:
        problems.append(f"tensor {codes.name} has no scale {name}_scale; fetch the tensors again")
        return None
    wrong = list[str]()
    for scheme in schemes:
        per_word = 8 * DTYPES[codes.dtype].itemsize // scheme.bits if scheme.bits else 1
        shape = (*codes.shape[:-1], *(width * per_word for width in codes.shape[-1:]))
        more: dict[str, object] = {}
        if scheme.two_scales:
            if "global_scale" not in parts:
                wrong.append(f"tensor {codes.name} has no scale {name}_global_scale; fetch the tensors again")
                continue
            more = {"whole": parts["global_scale"], "inverse": True}
        found = scaled(name, shape, codes, parts["scale"], scheme.decode, [scheme.block], wrong, **more)
        if found is not None:
            order, zeros = parts.get("g_idx"), _zeros(found, scheme, parts, wrong)
            if order is not None and (order.dtype not in ("I32", "I64") or order.shape != shape[-1:]):
                wrong.append(
                    f"tensor {order.name} is {order.dtype_name} {list(order.shape)}, expected {shape[-1]} integers"
                )
            if not wrong:
                return replace(found, zeros=zeros, order=order)
            break
    problems += dict.fromkeys(wrong)
    return None


def _zeros(
    matrix: Scaled, scheme: _Scheme, parts: Mapping[str, Tensor], problems: list[str]
) -> Callable[[int, int], np.ndarray] | None:
    """What reads the zeros of rows of a matrix's scales; None where they are zero."""
    zero, (height, width) = parts.get("zero_point"), matrix.shape[-2:]
    if scheme.dtype in ("F8_E4M3", "U8") or (zero is None and scheme.symmetric):
        return None
    rows, groups = -(-height // matrix.block[0]), -(-width // matrix.block[1])
    bits = scheme.bits or 8
    expected = (rows if scheme.bits is None else -(-rows * bits // 32), groups)
    if zero is None:
        problems.append(
            f"tensor {matrix.codes.name} has no zeros {matrix.codes.name.removesuffix('_packed')}_zero_point"
        )
    elif zero.dtype != scheme.dtype or len(matrix.shape) > 2 or zero.size != expected[0] * expected[1]:
        problems.append(
            f"tensor {zero.name} is {zero.dtype_name} {list(zero.shape)}, expected {DTYPES[scheme.dtype].name} {list(expected)}"
        )
    else:
        return partial(_read_zeros, zero, groups, scheme.bits)
    return None


def _read_zeros(tensor: Tensor, groups: int, bits: int | None, first: int, last: int) -> np.ndarray:
    """Zeros of some rows, float32 `[last - first, groups]`; packed ones stand along rows."""
    if bits is None:
        return read(tensor.part(first * groups, (last - first, groups))).astype(np.float32)
    per_word = 32 // bits
    top, bottom = first // per_word, -(-last // per_word)
    words = read(tensor.part(top * groups, (bottom - top, groups)))
    numbers = unpacked(words.T, bits).T[first - top * per_word : last - top * per_word]
    return numbers.astype(np.float32) - np.float32(1 << (bits - 1))
