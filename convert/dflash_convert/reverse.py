"""The way back: a converted folder as a Hugging Face folder, every tensor under its first name with its first bits.

Tensors keep the converted folder's dtype, which config.json then names; only arrays whose dtype the family fixes return to the
source's. The file is written front to back while arrays are read, so the whole model is never held.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from dflash_convert.write import Progress, copy_sidecars, silent
from dflash_jax.checkpoints.cache_scales import stored_tensor
from dflash_jax.checkpoints.converted import Converted, main_dtype
from dflash_jax.checkpoints.hf_folder import CONFIG, SINGLE
from dflash_jax.checkpoints.quantized.releases import take_release
from dflash_jax.checkpoints.safetensors import DTYPE_NAMES
from dflash_jax.models.parameters import Source
from dflash_jax.options import FLOAT_DTYPES


@dataclass(frozen=True)
class _Piece:
    """One tensor to write, under a name: rows of a parameter, from all places where some of the tensor's went.

    Attributes:
      sources: what the parameter takes of the tensor, each with the parameter's first row of it.
    """

    name: str
    parameter: str
    sources: tuple[tuple[int, Source], ...]
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def of(self, array: np.ndarray) -> np.ndarray:
        """The tensor, in the parameter's dtype."""
        parts = [
            (array[row : row + source.taken[0]] if source.taken else array, source) for row, source in self.sources
        ]
        if len(parts) == 1 and parts[0][1].runs is None:
            return parts[0][0]
        whole = np.empty(self.shape, array.dtype)
        for rows, source in parts:
            source.write(whole, rows)
        return whole


def _parts(converted: Converted) -> list[Converted]:
    """The model and, where it has one, its vision tower: one file's."""
    return [converted] if converted.vision is None else [converted, converted.vision]


def _groups(converted: Converted) -> Iterator[dict[str, np.ndarray]]:
    for part in _parts(converted):
        yield from part.groups()


def tensor_bytes(converted: Converted) -> int:
    """Bytes of all tensors that `write_huggingface` will write."""
    pieces = (piece for part in _parts(converted) for piece in _pieces(part))
    return sum(piece.nbytes for piece in pieces) + sum(one.nbytes for one in _scales(converted).values())


def write_huggingface(folder: Path, converted: Converted, progress: Progress = silent) -> None:
    """Writes config.json, tokenizer files and model.safetensors into an existing empty folder."""
    pieces = [piece for part in _parts(converted) for piece in _pieces(part)]
    scales = _scales(converted)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, tensor in [*((piece.name, piece) for piece in pieces), *scales.items()]:
        end = position + tensor.nbytes
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with progress("writing", position) as advance, (folder / SINGLE).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        remaining = iter(pieces)
        piece = next(remaining, None)
        for arrays in _groups(converted):
            for name in list(arrays):
                array = arrays.pop(name)
                while piece is not None and piece.parameter == name:
                    rows = piece.of(array)
                    flat = np.ascontiguousarray(rows.astype(piece.dtype, copy=False)).reshape(-1)
                    file.write(flat.view(np.uint8).data)
                    advance(piece.nbytes)
                    piece = next(remaining, None)
                    # Gone before the next group is read.
                    del rows, flat
                del array
        for tensor in scales.values():
            file.write(tensor.tobytes())
            advance(tensor.nbytes)
    copy_sidecars(converted.folder, folder)
    _tell_dtype(folder / CONFIG, converted)


def _scales(converted: Converted) -> dict[str, np.ndarray]:
    """Tensors of scales by their names, as they were."""
    scales, rows = converted.cache_scales, converted.marker.get("cache_scales", ())
    if scales is None:
        return {}
    return {
        row["source"]: stored_tensor(scales, row["layer"], row["side"], tuple(row["shape"])).astype(
            jnp.dtype(row["from"])
        )
        for row in rows
    }


def _tell_dtype(path: Path, converted: Converted) -> None:
    """Puts the tensors' dtype into config.json where the conversion has changed it, and takes out how they were quantized:
    transformers loads in what stands there."""
    rows = [row for row in converted.marker["tensors"] if row["from"] in FLOAT_DTYPES]
    same = main_dtype((row["from"], math.prod(row["shape"])) for row in rows) == converted.dtype
    config = json.loads(path.read_text(encoding="utf-8"))
    kept, release = take_release(config)
    if same and release is None:
        return
    config = kept if same else kept | {key: converted.dtype for key in ("dtype", "torch_dtype") if key in kept}
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _pieces(converted: Converted) -> Iterator[_Piece]:
    """Every tensor of the source in the order of the parameters, copies of tied tensors behind what they repeat."""
    parameters, copies = converted.marker["parameters"], {}
    for copy, other in converted.marker["tied"].items():
        copies.setdefault(other, []).append(copy)
    names: dict[str, list[dict[str, Any]]] = {}
    for row in converted.marker["tensors"]:
        names.setdefault(row["parameter"], []).append(row)
    table = {parameter.name: parameter for parameter in converted.parameters}
    for name, rows in names.items():
        parameter, taken, tensors, first = table[name], iter(rows), dict[str, _Piece](), 0
        for source in parameter.sources:
            row, *_ = [next(taken) for _ in source.runs or (None,)]
            dtype = jnp.dtype(row["from"] if parameter.dtype is not None else parameters[name]["dtype"])
            before = tensors[row["source"]].sources if row["source"] in tensors else ()
            pieces = (*before, (first, source))
            tensors[row["source"]] = _Piece(row["source"], name, pieces, source.shape, dtype)
            first += source.taken[0] if source.taken else 0
        for own, piece in tensors.items():
            yield piece
            yield from (replace(piece, name=copy) for copy in copies.get(own, ()))
