"""`mask_embedding.pt`: the one vector that some drafters have in a file of `torch.save` beside their safetensors.

Such a file is a zip archive of a pickle, which says what the tensors are, and their numbers. A pickle can name any function to be
called. This reader knows the three that rebuild a plain tensor, has its own in their place, and refuses every other name; torch is
not needed. The numbers stay where they are: what is given back is where they lie in the file.
"""

import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple

from dflash_jax.checkpoints.safetensors import DTYPES, Tensor

NAME = "mask_embedding"
FILE = f"{NAME}.pt"
_MOST_BYTES, _MOST_PICKLE = 1 << 28, 1 << 16
_STORAGES = {"FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16"}
# A file's one tensor may stand by itself, or under one of these names beside the mask's id.
_VECTORS, _TOKEN = ("embedding", NAME, "weight"), "mask_token_id"
_LOCAL_HEADER = 30
WAY_OUT = f"save that tensor as `{NAME}` in the safetensors file and remove {FILE}"


class _Plain(NamedTuple):
    """A tensor as the pickle describes it; one that nothing in the pickle can change afterwards."""

    dtype: str
    entry: str
    held: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class _Reader(pickle.Unpickler):
    """Knows dictionaries, numbers, texts and plain tensors; everything else is refused before it is called."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuilt
        if (module_name, global_name) == ("torch._utils", "_rebuild_parameter"):
            return _of_parameter
        if (module_name, global_name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module_name == "torch" and global_name in _STORAGES:
            return _STORAGES[global_name]
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")

    def persistent_load(self, pid: Any, /) -> Any:
        return pid


def _rebuilt(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> _Plain:
    kind, dtype, entry, _, held = storage
    numbers = offset, held, *size, *stride
    plain = all(type(one) is int and 0 <= one < 1 << 40 for one in numbers) and isinstance(entry, str)
    if kind != "storage" or dtype not in DTYPES or not plain or len(size) != len(stride):
        raise pickle.UnpicklingError("its tensor is not a plain one")
    return _Plain(dtype, entry, held, offset, tuple(size), tuple(stride))


def _of_parameter(data: Any, *rest: Any) -> Any:
    return data


def read_mask(path: Path) -> tuple[Tensor, int | None]:
    """The vector of such a file as `mask_embedding`, and the id of the token that it is of, where the file says it.

    Raises:
      ValueError: the file is no such archive, holds more than that, or names anything else.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"is larger than {_MOST_BYTES >> 20} MiB")
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            held, token = _said(archive)
            root = next(name for name in archive.namelist() if name.endswith("/data.pkl")).removesuffix("data.pkl")
            offset = _place(file, archive.getinfo(f"{root}data/{held.entry}"), held)
    except Exception as error:  # a damaged archive or pickle raises whatever it happens upon
        reason = str(error) or type(error).__name__
        raise ValueError(
            f"{FILE} cannot be read: {reason}. Of pickles only plain tensors are read; {WAY_OUT}"
        ) from None
    return Tensor(NAME, held.dtype, (prod(held.size),), path, offset), token


def _said(archive: zipfile.ZipFile) -> tuple[_Plain, int | None]:
    """The one vector that the pickle describes, and the mask's id where it is there."""
    pickles = [one for one in archive.infolist() if one.filename.endswith("/data.pkl")]
    if len(pickles) != 1 or pickles[0].file_size > _MOST_PICKLE:
        raise ValueError("it is no file of torch.save with one small pickle")
    root = pickles[0].filename.removesuffix("data.pkl")
    if f"{root}byteorder" in archive.namelist() and archive.read(f"{root}byteorder") != b"little":
        raise ValueError("its numbers are not little endian")
    with archive.open(pickles[0]) as stream:
        content = _Reader(stream).load()
    token = None
    if isinstance(content, Mapping):
        token, vectors = content.get(_TOKEN), [content[name] for name in _VECTORS if name in content]
        if len(vectors) != 1 or len(content) != 1 + (_TOKEN in content) or not (token is None or type(token) is int):
            raise ValueError(f"it has {sorted(map(str, content))}, expected {_VECTORS[0]} and {_TOKEN}")
        content = vectors[0]
    if not isinstance(content, _Plain) or not content.size or prod(content.size) != max(content.size):
        raise ValueError("it holds no vector")
    return content, token


def _place(file: IO[bytes], entry: zipfile.ZipInfo, held: _Plain) -> int:
    """Where the vector's numbers begin in the file."""
    steps = [stride for size, stride in zip(held.size, held.stride, strict=True) if size != 1]
    count, width = prod(held.size), DTYPES[held.dtype].itemsize
    stored = entry.compress_type == zipfile.ZIP_STORED and entry.file_size == held.held * width
    if not stored or steps not in ([], [1]) or held.offset + count > held.held:
        raise ValueError("its numbers do not lie in the file one after the other")
    file.seek(entry.header_offset)
    header = file.read(_LOCAL_HEADER)
    name, extra = struct.unpack("<HH", header[26:])
    begin = entry.header_offset + _LOCAL_HEADER + name + extra + held.offset * width
    if begin + count * width > file.seek(0, 2):
        raise ValueError("it is truncated")
    return begin
