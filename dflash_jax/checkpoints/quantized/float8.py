"""Float8_e4m3fn with scales beside it: of blocks, as DeepSeek-V3 and the FP8 releases of Qwen3 have, of tensors, or of rows.

    X.weight             float8_e4m3fn [F, D]
    X.weight_scale_inv   one for each block, [F/128, D/128]; what numbers are multiplied with, whatever its name says
    X.weight_scale       one for all, of AutoFP8 and vLLM; of each row, of FBGEMM
    X.scale              the same as X.weight_scale_inv, of DeepSeek V4
    X.input_scale, X.activation_scale, X.input_scale_ub   what activations would be divided by, or their largest; not needed

Experts in one tensor, `experts.gate_up_proj [E, 2F, D]`, have `experts.gate_up_proj_scale_inv`. With `scale_fmt: "ue8m0"` scales
are powers of two, stored as such or as their exponents alone. With `store_dtype: "mxfp4"` (MiMo-V2) experts are in MXFP4: uint8
[F, D/2], two numbers in E2M1, the first in the lower bits, and `X.weight_scale`, exponents of 32 columns, uint8 [F, D/32]. Those of
DeepSeek V4 are int8, with such exponents in `X.scale`, and nothing says so but the tensors.

Attention's projections of MiMo-V2 were cut for several devices before their pieces were rounded: blocks of rows begin anew with
each piece, so that there are more of them. How many pieces there were is the smallest number that explains the scales of all
layers.
`quant_method` is "fp8" or "fbgemm_fp8". Sources: "DeepSeek-V3 Technical Report", arXiv 2412.19437, section 3.3; transformers'
FineGrainedFP8Config and FbgemmFp8Config; vLLM's Fp8Config.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from dflash_jax.checkpoints.quantized.dequantized import float8
from dflash_jax.checkpoints.quantized.packed import E2M1, table_of
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
from dflash_jax.checkpoints.safetensors import Tensor
from dflash_jax.config import shown
from dflash_jax.errors import ConfigError

# What would be done with the weights, and which modules are told apart: the tensors say so too.
_KNOWN = (
    "act_per_tensor activation_scheme dequantize fmt ignored_layers modules_to_convert modules_to_not_convert quant_method "
    "mxfp4_block_size scale_fmt store_dtype weight_block_size weight_per_tensor"
).split()
_SCALES = ("_scale_inv", "_scale")
# Rows of a matrix that may have been rounded piece by piece, and the most pieces.
_CUT, _MOST_PIECES = tuple(f".self_attn.{name}_proj.weight" for name in ("q", "k", "v", "qkv")), 64
_MXFP4: Block = (1, 32)
_OF_ACTIVATIONS = ("input_scale", "activation_scale", "input_scale_ub")


def read_float8(said: Mapping[str, Any]) -> Release:
    """The release that a `quantization_config` of this method tells of. Raises ConfigError for what is not read."""
    refuse_unknown("fp8", said, _KNOWN)
    one_of(said, "fmt", (None, "e4m3", "float8_e4m3fn"))
    one_of(said, "scale_fmt", (None, "float", "ue8m0"))
    scheme = one_of(said, "activation_scheme", (None, "dynamic", "static"))
    fours = one_of(said, "store_dtype", (None, "fp8", "mxfp4")) == "mxfp4"
    one_of(said, "mxfp4_block_size", (None, _MXFP4[1]))
    check_names(said, "ignored_layers", "modules_to_convert", "modules_to_not_convert")
    size = said.get("weight_block_size")
    block = positive_pair(size)
    if size is not None and block is None:
        raise ConfigError(
            f"config.json: weight_block_size in {KEY} must be two positive integers, rows and columns, got {shown(size)}"
        )
    one_of(said, "weight_per_tensor", (None, False) if block is not None else (None, False, True))
    if block is None:
        return _release("with a scale for each tensor", scheme or "dynamic", PER_TENSOR)
    return _release(f"in blocks of {block[0]} x {block[1]}", scheme or "dynamic", block, fours=fours)


def read_fbgemm(said: Mapping[str, Any]) -> Release:
    """`read_float8` of FBGEMM's float8."""
    refuse_unknown("fbgemm_fp8", said, "activation_scale_ub modules_to_not_convert quant_method".split())
    check_names(said, "modules_to_not_convert")
    return _release("with a scale for each row", "dynamic", PER_ROW)


def _release(scales: str, activations: str, block: Block, *, fours: bool = False) -> Release:
    return Release(
        f"float8 {scales}" + (" and MXFP4" if fours else ""),
        f"float8, {activations}",
        partial(_find, block, fours),
        {f".{suffix}": ".weight" for suffix in _OF_ACTIVATIONS} | dict.fromkeys(_SCALES, "") | {".scale": ".weight"},
    )


def _find(
    block: Block, fours: bool, tensors: Mapping[str, Tensor], lost: Collection[str], problems: list[str]
) -> dict[str, Found]:
    found, pieces = {}, _pieces(block, tensors)
    for name, codes in tensors.items():
        own = name.endswith(".weight") and name not in lost
        if own and ((fours and codes.dtype == "U8") or (codes.dtype == "I8" and _short(name) in tensors)):
            found[name] = _in_mxfp4(name, codes, tensors, problems)
        if codes.dtype != "F8_E4M3" or name in lost:
            continue
        places = (f"{name}_", name.removesuffix("weight"))
        of_weights = [*(f"{name}{suffix}" for suffix in _SCALES), _short(name)]
        beside = of_weights + [f"{place}{end}" for place in places for end in _OF_ACTIVATIONS]
        names, matrix = [name, *(one for one in beside if one in tensors)], None
        scale = next((tensors[one] for one in of_weights if one in tensors), None)
        if scale is None:
            problems.append(f"tensor {name} is in float8 and has no scale {name}{_SCALES[0]}; fetch the tensors again")
        else:
            own = next((count for end, count in pieces.items() if name.endswith(end)), 1)
            matrix = _of_pieces(name, codes, scale, block, own, problems)
        found[name] = Found(matrix, names)
    return found


def _short(name: str) -> str:
    """Name of a matrix's scales in DeepSeek V4's files."""
    return f"{name.removesuffix('weight')}scale"


def _in_mxfp4(name: str, codes: Tensor, tensors: Mapping[str, Tensor], problems: list[str]) -> Found:
    scale = tensors.get(f"{name}_scale", tensors.get(_short(name)))
    if scale is None:
        problems.append(f"tensor {name} is in MXFP4 and has no scale {name}_scale; fetch the tensors again")
        return Found(None, [name])
    shape = (*codes.shape[:-1], *(2 * width for width in codes.shape[-1:]))
    return Found(scaled(name, shape, codes, scale, table_of(E2M1), [_MXFP4], problems), [name, scale.name])


def _pieces(block: Block, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """By kind of projection, in how many pieces it was rounded, by the shapes of all layers' scales."""
    fits: dict[str, set[int]] = {}
    for name, codes in tensors.items():
        end = next((one for one in _CUT if name.endswith(one)), None)
        scale = next((tensors[name + suffix] for suffix in _SCALES if name + suffix in tensors), None)
        if end is None or scale is None or block[0] is None or not len(codes.shape) == len(scale.shape) == 2:
            continue
        rows, grid = codes.shape[0], scale.shape[0]
        counts = (one for one in range(1, _MOST_PIECES + 1) if rows % one == 0)
        own = {one for one in counts if one * -(-(rows // one) // block[0]) == grid}
        fits[end] = own & fits.get(end, own)
    return {end: min(counts, default=1) for end, counts in fits.items()}


def _of_pieces(
    name: str, codes: Tensor, scale: Tensor, block: Block, pieces: int, problems: list[str]
) -> Scaled | None:
    """The matrix, whose blocks of rows begin anew after every piece of it."""
    if pieces == 1:
        return scaled(name, codes.shape, codes, scale, float8, [block], problems)
    (rows, width), (grid, columns) = codes.shape, scale.shape
    shape, scale = (pieces, rows // pieces, width), replace(scale, shape=(pieces, grid // pieces, columns))
    matrix = scaled(name, shape, codes, scale, float8, [block], problems)
    return None if matrix is None else replace(matrix, shape=codes.shape)
