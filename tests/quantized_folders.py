"""Folders with quantized weights, and what these stand for in float64: an own reading of the bits, and an own way to write files.

Codes and scales are drawn, so that every pattern of bits comes up; nothing here is the library's.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

FORMAT = {
    "uint8": "U8", "int8": "I8", "int32": "I32", "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}


def save(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes a safetensors file, of dtypes too that older releases of the library do not write."""
    header, position = {}, 0
    for name, tensor in tensors.items():
        end = position + tensor.nbytes
        header[name] = {
            "dtype": FORMAT[tensor.dtype.name],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header).encode()
    data = b"".join(np.ascontiguousarray(tensor).tobytes() for tensor in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def load(path: Path) -> dict[str, np.ndarray]:
    """Reads a safetensors file."""
    raw, kinds = path.read_bytes(), {name: dtype for dtype, name in FORMAT.items()}
    length = int.from_bytes(raw[:8], "little")
    entries = json.loads(raw[8 : 8 + length])
    entries.pop("__metadata__", None)
    found = {}
    for name, entry in entries.items():
        begin, end = (8 + length + one for one in entry["data_offsets"])
        kind = np.dtype(getattr(ml_dtypes, kinds[entry["dtype"]], kinds[entry["dtype"]]))
        found[name] = np.frombuffer(raw[begin:end], kind).reshape(entry["shape"])
    return found


def e4m3(codes: np.ndarray) -> np.ndarray:
    """What bytes stand for: a sign, four bits of exponent with a bias of 7, three of mantissa; all ones is no number."""
    codes = codes.astype(np.int64)
    sign, exponent, mantissa = 1.0 - 2.0 * (codes >> 7), codes >> 3 & 15, codes & 7
    size = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    return np.where(codes & 127 == 127, np.nan, sign * size)


def drawn_float8(
    shape: tuple[int, ...], block: tuple[int, int] | None, rng: np.random.Generator, powers: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scales of blocks (one of all where None) and the exact products, float64; most numbers are of the size of weights."""
    codes = rng.integers(0, 256, shape).astype(np.uint8)
    codes[codes & 127 == 127] = 0
    *lead, height, width = shape
    rows, columns = block or (height, width)
    grid = (*lead, -(-height // rows), -(-width // columns))
    scales = (2.0 ** rng.integers(-14, -9, grid) * (1 if powers else rng.uniform(1, 2, grid))).astype(np.float32)
    exact = e4m3(codes) * spread(scales, shape, (rows, columns))
    return codes.view(ml_dtypes.float8_e4m3fn), scales if block else scales.reshape(()), exact


def spread(grid: np.ndarray, shape: tuple[int, ...], block: tuple[int, int]) -> np.ndarray:
    """Blocks' numbers for each number of a matrix, float64."""
    wide = np.repeat(np.repeat(grid.astype(np.float64), block[0], axis=-2), block[1], axis=-1)
    return wide[..., : shape[-2], : shape[-1]]


def near_float8(tensor: np.ndarray, block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scales of blocks and the exact products, near a matrix: of a model that still says something."""
    height, width = tensor.shape
    tiles = [
        [tensor[i : i + block[0], j : j + block[1]] for j in range(0, width, block[1])]
        for i in range(0, height, block[0])
    ]
    scales = np.array([[np.abs(tile).max() / 448 for tile in row] for row in tiles], np.float32)
    wide = spread(scales, tensor.shape, block)
    codes = (tensor / wide).astype(ml_dtypes.float8_e4m3fn)
    return codes, scales, e4m3(codes.view(np.uint8)) * wide


def quantized(
    tensors: Mapping[str, np.ndarray],
    chosen: Callable[[str, np.ndarray], bool],
    block: tuple[int, int] | None,
    seed: int = 0,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Tensors with the chosen ones in drawn float8 beside their scales, and what all of them stand for."""
    stored, exact, rng = {}, {}, np.random.default_rng(seed)
    for name, tensor in tensors.items():
        if chosen(name, tensor):
            stored[name], stored[f"{name}_scale_inv"], exact[name] = drawn_float8(tensor.shape, block, rng)
        else:
            stored[name] = exact[name] = tensor
    return stored, exact


def is_projection(name: str, tensor: np.ndarray) -> bool:
    """Whether releases quantize a tensor: projections and experts, not embeddings, norms and routers."""
    return tensor.ndim > 1 and not any(part in name for part in ("embed", "lm_head", "norm", "mlp.gate.", "conv1d"))


def put(folder: Path, tensors: Mapping[str, np.ndarray], shards: int = 1) -> Path:
    """Writes tensors in place of a folder's own: every name's last part may be in another shard than its neighbours'."""
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    if shards == 1:
        save(folder / "model.safetensors", tensors)
        return folder
    names, weight_map = list(tensors), {}
    for index in range(shards):
        shard, part = f"model-{index + 1:05}-of-{shards:05}.safetensors", names[index::shards]
        save(folder / shard, {name: tensors[name] for name in part})
        weight_map |= dict.fromkeys(part, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def packed(numbers: np.ndarray, bits: int = 4) -> np.ndarray:
    """Whole numbers in 32-bit words along the last axis, bit after bit; words that are not full have zeros."""
    wide = (numbers.astype(np.uint8)[..., None] >> np.arange(bits, dtype=np.uint8) & 1).reshape(*numbers.shape[:-1], -1)
    full = np.zeros((*wide.shape[:-1], -(-wide.shape[-1] // 32) * 32), np.uint8)
    full[..., : wide.shape[-1]] = wide
    return np.packbits(full, axis=-1, bitorder="little").view("<i4")


def e2m1(codes: np.ndarray) -> np.ndarray:
    """What four bits stand for: a sign, two bits of exponent with a bias of 1, one of mantissa."""
    codes = codes.astype(np.int64)
    sign, exponent, mantissa = 1.0 - 2.0 * (codes >> 3), codes >> 1 & 3, codes & 1
    return sign * np.where(exponent > 0, (2 + mantissa) * 2.0 ** (exponent - 2), mantissa * 0.5)


def _pairs(codes: np.ndarray, *, high_first: bool = False) -> np.ndarray:
    """Two numbers of four bits in a byte."""
    first, second = codes[..., 0::2].astype(np.uint8), codes[..., 1::2].astype(np.uint8)
    return first << 4 | second if high_first else first | second << 4


def _drawn_scales(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Float8 from 1 to 448."""
    return rng.integers(0x38, 0x7F, shape).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)


type Parts = dict[str, np.ndarray]


def nvfp4_of_modelopt(shape: tuple[int, ...], rng: np.random.Generator, group: int = 16) -> tuple[Parts, np.ndarray]:
    """With a scale of scales for each expert."""
    *lead, height, width = shape
    codes, scales = rng.integers(0, 16, shape), _drawn_scales((*lead, height, -(-width // group)), rng)
    whole = rng.uniform(1e-4, 2e-4, lead).astype(np.float32)
    products = scales.astype(np.float32) * whole[..., None, None]
    parts = {
        ".weight": _pairs(codes),
        ".weight_scale": scales,
        ".weight_scale_2": whole,
        ".input_scale": np.ones(lead, np.float32),
    }
    return parts, e2m1(codes) * spread(products, shape, (1, group))  # fmt: skip


def nvfp4_of_compressed_tensors(shape: tuple[int, ...], rng: np.random.Generator) -> tuple[Parts, np.ndarray]:
    """Scales are divided by the scale of scales."""
    codes, scales = rng.integers(0, 16, shape), _drawn_scales((shape[0], -(-shape[1] // 16)), rng)
    whole = rng.uniform(5e3, 9e3, 1).astype(np.float32)
    products = scales.astype(np.float32) / whole
    parts = {".weight_packed": _pairs(codes), ".weight_scale": scales, ".weight_global_scale": whole}
    return parts | {".input_global_scale": np.ones(1, np.float32)}, e2m1(codes) * spread(products, shape, (1, 16))


def mxfp4(shape: tuple[int, ...], rng: np.random.Generator) -> tuple[Parts, np.ndarray]:
    codes, exponents = (
        rng.integers(0, 16, shape),
        rng.integers(118, 125, (shape[0], -(-shape[1] // 32))).astype(np.uint8),
    )
    products = 2.0 ** (exponents.astype(np.int64) - 127)
    return {".weight_packed": _pairs(codes), ".weight_scale": exponents}, e2m1(codes) * spread(products, shape, (1, 32))


def mxfp4_of_modelopt(shape: tuple[int, ...], rng: np.random.Generator) -> tuple[Parts, np.ndarray]:
    parts, exact = mxfp4(shape, rng)
    return {".weight": parts[".weight_packed"], ".weight_scale": parts[".weight_scale"]}, exact


def mxfp8(shape: tuple[int, ...], rng: np.random.Generator) -> tuple[Parts, np.ndarray]:
    codes, scales, exact = drawn_float8(shape, (1, 32), rng, powers=True)
    return {".weight": codes, ".weight_scale": (np.log2(scales) + 127).astype(np.uint8)}, exact


def float8_rows_of_modelopt(shape: tuple[int, ...], rng: np.random.Generator) -> tuple[Parts, np.ndarray]:
    codes, scales, exact = drawn_float8(shape, (1, shape[1]), rng)
    return {".weight": codes, ".weight_scale": scales[:, 0]}, exact


def float8_blocks_of_modelopt(shape: tuple[int, ...], rng: np.random.Generator) -> tuple[Parts, np.ndarray]:
    codes, scales, exact = drawn_float8(shape, (128, 128), rng)
    return {".weight": codes, ".weight_scale": scales[:, None, :, None]}, exact


def gptq(bits: int, *, less: int = 1, ordered: bool = True, size: int = 8) -> "Maker":
    """In groups of `size`. Zeros of 1 to the largest and of 0, which is stored as all ones where one is taken off."""

    def make(shape: tuple[int, ...], rng: np.random.Generator) -> tuple[Parts, np.ndarray]:
        height, width = shape
        numbers, zeros = (
            rng.integers(0, 1 << bits, (width, height)),
            rng.integers(0, 1 << bits, (width // size, height)),
        )
        scales = rng.uniform(0.01, 0.02, zeros.shape).astype(np.float16)
        index = np.arange(width, dtype=np.int32) // size
        index = rng.permutation(index) if ordered else index
        parts = {
            ".qweight": packed(numbers.T, bits).T, ".qzeros": packed(zeros - less & (1 << bits) - 1, bits),
            ".scales": scales, ".g_idx": index,
        }  # fmt: skip
        return parts, ((numbers - zeros[index]) * scales.astype(np.float64)[index]).T

    return make


def four_bits(kind: str, *, nested: bool, storage: str = "uint8") -> "Maker":
    """bitsandbytes', in blocks of 64 that take no notice of rows; tables are drawn."""

    def make(shape: tuple[int, ...], rng: np.random.Generator) -> tuple[Parts, np.ndarray]:
        size, table = int(np.prod(shape)), np.sort(rng.uniform(-0.3, 0.3, 16)).astype(np.float32)
        codes, blocks = rng.integers(0, 16, size), -(-size // 64)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": list(shape)}
        if nested:
            inner, places = (
                np.sort(rng.uniform(-1, 1, 256)).astype(np.float32),
                rng.integers(0, 256, blocks).astype(np.uint8),
            )
            wholes, offset = rng.uniform(0.5, 1, -(-blocks // 256)).astype(np.float32), 1.75
            scales = inner[places] * wholes[np.arange(blocks) // 256] + np.float32(offset)
            parts = {"absmax": places, "nested_absmax": wholes, "nested_quant_map": inner}
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        else:
            scales = rng.uniform(0.5, 1.5, blocks).astype(np.float32)
            parts = {"absmax": scales}
        stored = {f".weight.{name}": one for name, one in parts.items()}
        stored[".weight"] = _pairs(codes, high_first=True).view(getattr(ml_dtypes, storage, storage))[:, None]
        stored[".weight.quant_map"] = table
        stored[f".weight.quant_state.bitsandbytes__{kind}"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
        exact = table[codes].astype(np.float64) * scales[np.arange(size) // 64]
        return stored, exact.reshape(shape)

    return make


def eight_bits(shape: tuple[int, ...], rng: np.random.Generator) -> tuple[Parts, np.ndarray]:
    """bitsandbytes' int8: rounded after the scale, and again after 1 / 127."""
    codes, scales = rng.integers(-127, 128, shape).astype(np.int8), rng.uniform(0.2, 0.4, shape[0]).astype(np.float32)
    exact = (codes.astype(np.float64) * scales[:, None]).astype(np.float32).astype(np.float64) * np.float32(1 / 127)
    return {".weight": codes, ".SCB": scales, ".weight_format": np.zeros((), np.uint8)}, exact


type Maker = Callable[[tuple[int, ...], np.random.Generator], tuple[Parts, np.ndarray]]


def compressed(form: str, weights: Mapping[str, Any], activations: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A `quantization_config` of compressed-tensors with one group."""
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "ignore": ["lm_head", r"re:.*mlp\.gate$"], "kv_cache_scheme": None, "global_compression_ratio": None,
        "sparsity_config": {}, "transform_config": {}, "version": "0.12.2",
        "config_groups": {
            "group_0": {
                "format": form, "targets": ["Linear"], "input_activations": activations, "output_activations": None,
                "weights": {
                    "actorder": None, "block_structure": None, "dynamic": False, "observer": "minmax", "observer_kwargs": {},
                    "scale_dtype": None, "symmetric": True, "zp_dtype": None, **weights,
                },
            },
        },
    }  # fmt: skip


def modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    """A `quantization_config` of ModelOpt, as newer releases have it in config.json."""
    return {
        "quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head", "model.layers.0.self_attn*"],
        "producer": {"name": "modelopt", "version": "0.37.0"}, "config_groups": {"group_0": {"targets": ["Linear"]}}, **more,
    }  # fmt: skip


def bitsandbytes(**more: Any) -> dict[str, Any]:
    """A `quantization_config` of bitsandbytes, as transformers writes it."""
    return {
        "quant_method": "bitsandbytes", "_load_in_4bit": True, "_load_in_8bit": False, "load_in_4bit": True, "load_in_8bit": False,
        "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8", "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True, "llm_int8_enable_fp32_cpu_offload": False, "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": ["lm_head", "model.layers.0.mlp"], "llm_int8_threshold": 6.0, **more,
    }  # fmt: skip


def gptq_config(bits: int, **more: Any) -> dict[str, Any]:
    """A `quantization_config` of GPTQ."""
    return {"quant_method": "gptq", "bits": bits, "group_size": 8, "desc_act": True, "sym": False, **more}


def auto_round_config(bits: int, **more: Any) -> dict[str, Any]:
    """A `quantization_config` of AutoRound, as it writes it beside its settings."""
    return {
        "quant_method": "auto-round", "bits": bits, "group_size": 8, "sym": False, "data_type": "int", "autoround_version": "0.9.1",
        "packing_format": "auto_round:auto_gptq", "block_name_to_quantize": "model.layers", "iters": 1000, "enable_alg_ext": True,
        "extra_config": {"lm_head": {"bits": 16, "data_type": "float"}}, "static_kv_granularity": "tensor", **more,
    }  # fmt: skip


_E2M1 = {"num_bits": 4, "type": "float"}
_LOCAL = _E2M1 | {"strategy": "tensor_group", "group_size": 16, "dynamic": "local"}
_EIGHT = {"load_in_4bit": False, "_load_in_4bit": False, "load_in_8bit": True, "_load_in_8bit": True}
# How a matrix is made, what config.json says, and what a notice says of it.
RELEASES: dict[str, tuple[Maker, dict[str, Any], str]] = {
    "modelopt nvfp4": (nvfp4_of_modelopt, modelopt("NVFP4"), "NVFP4"),
    "modelopt w4a8": (
        partial(nvfp4_of_modelopt, group=32), modelopt("W4A8_NVFP4_FP8", group_size=32), "NVFP4 in groups of 32",
    ),
    "modelopt mxfp4": (mxfp4_of_modelopt, modelopt("w4a8_mxfp4_fp8"), "MXFP4"),
    "modelopt mxfp8": (mxfp8, modelopt("MXFP8"), "MXFP8"),
    "modelopt rows": (float8_rows_of_modelopt, modelopt("FP8_PER_CHANNEL_PER_TOKEN"), "float8 with a scale for each row"),
    "modelopt blocks": (float8_blocks_of_modelopt, modelopt("fp8_pb_wo"), "float8 in blocks of 128 x 128"),
    "nvfp4": (
        nvfp4_of_compressed_tensors,
        compressed("nvfp4-pack-quantized", _E2M1 | {"strategy": "tensor_group", "group_size": 16}, _LOCAL),
        "NVFP4",
    ),
    "mxfp4": (mxfp4, compressed("mxfp4-pack-quantized", _E2M1 | {"strategy": "group", "group_size": 32}), "MXFP4"),
    "mxfp8": (
        mxfp8,
        compressed("mxfp8-quantized", {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}),
        "float8 in groups of 32",
    ),
    "gptq int2": (gptq(2), gptq_config(2), "GPTQ, int2 in groups of 8"),
    "gptq int3": (gptq(3), gptq_config(3), "GPTQ, int3 in groups of 8"),
    "gptq int3 v2": (gptq(3, less=0, ordered=False), gptq_config(3, checkpoint_format="gptq_v2", desc_act=False), "GPTQ, int3 in"),
    "gptq int8": (gptq(8), gptq_config(8), "GPTQ, int8 in groups of 8"),
    "auto-round": (gptq(4, ordered=False), auto_round_config(4, extra_config=None), "AutoRound, int4 in groups of 8"),
    "auto-round int2": (
        gptq(2, less=0, ordered=False), auto_round_config(2, packing_format="auto_round", extra_config=None), "AutoRound, int2 in",
    ),
    "nf4": (four_bits("nf4", nested=True), bitsandbytes(), "bitsandbytes, nf4"),
    "nf4 in bfloat16": (
        four_bits("nf4", nested=False, storage="bfloat16"),
        bitsandbytes(bnb_4bit_quant_storage="bfloat16", bnb_4bit_use_double_quant=False),
        "bitsandbytes, nf4",
    ),
    "fp4": (four_bits("fp4", nested=False), bitsandbytes(bnb_4bit_quant_type="fp4"), "bitsandbytes, fp4"),
    "bitsandbytes int8": (eight_bits, bitsandbytes(**_EIGHT), "bitsandbytes, int8 with a scale for each row"),
}  # fmt: skip


def released(
    tensors: Mapping[str, np.ndarray],
    make: Maker,
    chosen: Callable[[str, np.ndarray], bool] = is_projection,
    seed: int = 0,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Tensors with the chosen ones in a release's parts, and what all of them stand for, float64."""
    stored, exact, rng = dict(tensors), dict(tensors), np.random.default_rng(seed)
    for name, tensor in tensors.items():
        if chosen(name, tensor):
            del stored[name]
            parts, exact[name] = make(tensor.shape, rng)
            module = name.removesuffix(".weight")
            if module == name:  # experts in one tensor, as ModelOpt names theirs
                parts = {"" if end == ".weight" else end.replace(".", "_", 1): one for end, one in parts.items()}
            stored |= {module + end: one for end, one in parts.items()}
    return stored, exact
