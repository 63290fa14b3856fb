"""Folders with quantized weights, and what these stand for in float64: an own reading of the bits, and an own way to write files.

Codes and scales are drawn, so that every pattern of bits comes up; nothing here is the library's.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

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
