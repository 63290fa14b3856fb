"""`quant_method: "bitsandbytes"`: four bits in blocks, or eight bits with a scale for each row, as transformers saves them.

    X.weight                     uint8 [F * D / 2, 1]: places in a table of 16 numbers, the first of two in the higher bits
    X.weight.quant_map           float32 [16], that table (nf4 or fp4)
    X.weight.absmax              float32, the scale of each block of 64 numbers, which may go on in the next row; or, quantized
                                 itself (double quantization), uint8: places in a table of 256, in blocks of 256
    X.weight.nested_quant_map    float32 [256], that table
    X.weight.nested_absmax       float32, the scale of each block of scales
    X.weight.quant_state.bitsandbytes__nf4, or __fp4    JSON as uint8: shape, sizes of blocks, and what is added to all scales

    X.weight, X.SCB, X.weight_format    int8 [F, D], float32 [F] (127 times the scale of a row), 0

The bytes may be stored as another dtype (`bnb_4bit_quant_storage`). Sources: "QLoRA: Efficient Finetuning of Quantized LLMs", arXiv
2305.14314; "LLM.int8()", arXiv 2208.07339; bitsandbytes, `QuantState` and `int8_vectorwise_dequant`.
"""

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from dflash_jax.checkpoints.json_files import parse
from dflash_jax.checkpoints.quantized.dequantized import Matrix, Rows, read, read_spread, scales, signed_bytes
from dflash_jax.checkpoints.quantized.packed import table_of
from dflash_jax.checkpoints.quantized.release import Found, Release, check_names, one_of, refuse_unknown
from dflash_jax.checkpoints.quantized.scaled import PER_ROW, Scaled, scaled
from dflash_jax.checkpoints.safetensors import DTYPES, Tensor
from dflash_jax.config import shown

_KNOWN = (
    "_load_in_4bit _load_in_8bit bnb_4bit_compute_dtype bnb_4bit_quant_storage bnb_4bit_quant_type bnb_4bit_use_double_quant "
    "llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight llm_int8_skip_modules llm_int8_threshold load_in_4bit load_in_8bit "
    "quant_method"
).split()
_STATE = ".quant_state.bitsandbytes__"
_TYPES = ("nf4", "fp4")
_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_OF_ROWS = ("SCB", "weight_format")
_MOST_STATE = 1 << 16
_LARGEST = np.float32(1 / 127)


@dataclass(frozen=True)
class _State:
    """What a state tells of a matrix.

    Attributes:
      block: numbers that share a scale.
      nested_block: scales that share one; None where they are not quantized.
      offset: what is added to all scales then.
    """

    shape: tuple[int, ...]
    block: int
    nested_block: int | None = None
    offset: float = 0.0


@dataclass(frozen=True)
class Nested:
    """Scales that are quantized themselves, in blocks of `block`."""

    places: Tensor
    table: Tensor
    scales: Tensor
    block: int
    offset: float


@dataclass(frozen=True)
class Blocks(Matrix):
    """A matrix in four bits, in blocks of its numbers one row after the other.

    Attributes:
      codes: as bytes.
      largest: scales of blocks.
      block: numbers that share a scale.
    """

    codes: Tensor
    table: Tensor
    largest: Tensor | Nested
    shape: tuple[int, ...]
    block: int

    @property
    def stored(self) -> tuple[Tensor, ...]:
        own = self.largest
        return (self.codes, self.table, *((own,) if isinstance(own, Tensor) else (own.places, own.table, own.scales)))

    def rows(self, first: int, last: int) -> Rows:
        width, count = self.shape[-1], last - first
        begin, end = first * width, last * width
        codes = read(self.codes.part(begin // 2, (count, width // 2)))
        low = begin // self.block
        grid = self._scales(low, -(-end // self.block))
        if width % self.block:  # a block goes on in the next row: each number has its own
            grid = grid[np.arange(begin, end) // self.block - low]
        spread = (lambda own: own) if width % self.block else read_spread(width, self.block)
        return Rows(codes, table_of(scales(self.table).reshape(-1), high_first=True), grid.reshape(count, -1), spread)

    def _scales(self, low: int, high: int) -> np.ndarray:
        """Of blocks `low` to before `high`, float32."""
        own = self.largest
        if isinstance(own, Tensor):
            return scales(own.part(low, (high - low,)))
        first = low // own.block
        of_blocks = scales(own.scales.part(first, (-(-high // own.block) - first,)))
        places = read(own.places.part(low, (high - low,)))
        with np.errstate(over="ignore"):
            found = scales(own.table).reshape(-1)[places] * of_blocks[np.arange(low, high) // own.block - first]
            return found + np.float32(own.offset)


def read_bitsandbytes(said: Mapping[str, Any]) -> Release:
    """The release that a `quantization_config` of this method tells of. Raises ConfigError for what is not read."""
    refuse_unknown("bitsandbytes", said, _KNOWN)
    check_names(said, "llm_int8_skip_modules")
    kind = one_of(said, "bnb_4bit_quant_type", (None, *_TYPES)) or "nf4"
    eight = bool(said.get("load_in_8bit") or said.get("_load_in_8bit"))
    if eight:
        one_of(said, "llm_int8_has_fp16_weight", (None, False))
    return Release(
        f"bitsandbytes, {'int8 with a scale for each row' if eight else kind}",
        "int8, dynamic" if eight else None,
        _find,
        {f".weight{_STATE}{one}": ".weight" for one in _TYPES}
        | {f".weight.{part}": ".weight" for part in _PARTS}
        | {f".{part}": ".weight" for part in _OF_ROWS},
    )


def _find(tensors: Mapping[str, Tensor], lost: Collection[str], problems: list[str]) -> dict[str, Found]:
    found, states = {}, [f"{_STATE}{kind}" for kind in _TYPES]
    for name, codes in tensors.items():
        if name in lost or not name.endswith(".weight"):
            continue
        module = name.removesuffix("weight")
        state = next((tensors[name + end] for end in states if name + end in tensors), None)
        parts = {part: tensors[f"{name}.{part}"] for part in _PARTS if f"{name}.{part}" in tensors}
        if codes.dtype == "I8":
            parts = {part: tensors[module + part] for part in _OF_ROWS if module + part in tensors}
            matrix = _by_rows(name, codes, parts, problems)
        elif state is None and not parts:
            continue
        elif state is None:
            matrix = None
            problems.append(f"tensor {name} has no state {name}{_STATE}nf4 or fp4; fetch the tensors again")
        else:
            matrix = _in_blocks(name, codes, state, parts, problems)
        own = [codes, *parts.values(), *(() if state is None else (state,))]
        found[name] = Found(matrix, [one.name for one in own])
    return found


def _by_rows(name: str, codes: Tensor, parts: Mapping[str, Tensor], problems: list[str]) -> Scaled | None:
    if "SCB" not in parts:
        scale = name.removesuffix("weight") + "SCB"
        problems.append(f"tensor {name} is in int8 and has no scale {scale}; fetch the tensors again")
        return None
    form = parts.get("weight_format")
    if form is not None and (form.dtype != "U8" or form.size != 1 or read(form).item()):
        problems.append(
            f"tensor {form.name} says that {name} is not stored row by row; save the model with a newer bitsandbytes"
        )
        return None
    return scaled(name, codes.shape, codes, parts["SCB"], signed_bytes, [PER_ROW], problems, factor=_LARGEST)


def _in_blocks(
    name: str, codes: Tensor, state: Tensor, parts: Mapping[str, Tensor], problems: list[str]
) -> Blocks | None:
    """The matrix that a state tells of; None with what is wrong with its tensors."""
    said = _read_state(state, problems)
    if said is None:
        return None
    shape, size = list(said.shape), prod(said.shape)
    nbytes = codes.size * DTYPES[codes.dtype].itemsize if codes.dtype in DTYPES else 0
    if 2 * nbytes != size:
        problems.append(
            f"tensor {name} is {codes.dtype_name} {list(codes.shape)}, expected {size // 2} bytes for {shape}; fetch it again"
        )
        return None
    blocks, inner = -(-size // said.block), said.nested_block
    expected = {"absmax": ("F32" if inner is None else "U8", blocks), "quant_map": ("F32", 16)}
    if inner is not None:
        expected |= {"nested_absmax": ("F32", -(-blocks // inner)), "nested_quant_map": ("F32", 256)}
    if missing := [f"{name}.{part}" for part in expected if part not in parts]:
        problems.append(f"tensor {name} has no {' and no '.join(missing)}; fetch the tensors again")
        return None
    wrong = [
        f"tensor {parts[part].name} is {parts[part].dtype_name} {list(parts[part].shape)}, expected {count} numbers in "
        f"{DTYPES[dtype].name} for {name} of shape {shape}; fetch it again"
        for part, (dtype, count) in expected.items()
        if (parts[part].dtype, parts[part].size) != (dtype, count)
    ]
    problems += wrong
    if wrong:
        return None
    largest: Tensor | Nested = parts["absmax"]
    if inner is not None:
        largest = Nested(largest, parts["nested_quant_map"], parts["nested_absmax"], inner, said.offset)
    return Blocks(replace(codes, dtype="U8", shape=(nbytes,)), parts["quant_map"], largest, said.shape, said.block)


def _read_state(state: Tensor, problems: list[str]) -> _State | None:
    """What a tensor says; None with what is wrong with it."""
    said: Any = None
    if state.dtype == "U8" and state.size <= _MOST_STATE:
        with suppress(ValueError):
            said = parse(read(state).tobytes())
    found = _state_of(said) if isinstance(said, Mapping) else None
    if found is None:
        problems.append(
            f"tensor {state.name} says {shown(said)}, expected bitsandbytes' JSON: a shape with an even number of columns, and "
            "sizes of blocks; fetch it again"
        )
    return found


def _state_of(said: Mapping[str, Any]) -> _State | None:
    shape, nested = said.get("shape"), "nested_blocksize" in said
    if not isinstance(shape, list) or len(shape) < 2:
        return None
    sizes = [*shape, said.get("blocksize"), *([said["nested_blocksize"]] if nested else [])]
    if not all(type(one) is int and one > 0 for one in sizes) or shape[-1] % 2:
        return None
    if not nested:
        return _State(tuple(shape), said["blocksize"])
    offset = said.get("nested_offset")
    if not isinstance(offset, float | int) or said.get("nested_dtype") != "float32":
        return None
    return _State(tuple(shape), said["blocksize"], said["nested_blocksize"], float(offset))
