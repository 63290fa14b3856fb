"""Safetensors files, read without trust and without holding more than one chunk.

The format is eight bytes of header length (little endian), a JSON header, and one buffer that the header's tensors tile
exactly. `read_header` checks all of that before anything is believed; `chunks` then reads a tensor's values piece by
piece into one buffer, with plain reads: mapped pages would count as this process's memory.

    tensors = read_header(Path("model.safetensors"))
    for piece in chunks(tensors["fc.weight"]):
        ...
"""

import math
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from dflash_jax.checkpoints.hub import POINTER, is_pointer
from dflash_jax.checkpoints.json_files import parse
from dflash_jax.checkpoints.prefetch import wait_until_read
from dflash_jax.config import shown
from dflash_jax.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
CHUNK_BYTES = 16 << 20
_MAX_SIZE = 2**63 - 1
_MAX_RANK = 16
_SHOWN = 20
_DAMAGED = "the file is damaged, fetch or write it again"
_ADVICE = "take the release in bfloat16, float16 or float32"

DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
}
# Bits of the format's other types, which no array here has: their tensors are placed and checked, and never read.
UNREAD_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "C64": 64,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Tensor:
    """Location of one tensor: `nbytes` bytes at `offset` of `path`, row major, little endian."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * _bits(self.dtype) // 8

    @property
    def dtype_name(self) -> str:
        """numpy's name for its dtype, or the format's own where numpy has none."""
        return DTYPES[self.dtype].name if self.dtype in DTYPES else self.dtype

    @property
    def stored(self) -> "tuple[Tensor, ...]":
        """The tensors of files that are read for it."""
        return (self,)

    @property
    def stored_name(self) -> str:
        """Dtype in the file; another name for numbers that are made while they are read."""
        return self.dtype_name

    @property
    def kept_name(self) -> str:
        """The dtype that it keeps where none is asked for."""
        return self.dtype_name

    def part(self, begin: int, shape: tuple[int, ...]) -> "Tensor":
        """Some of its values, from number `begin` on, in `shape`."""
        return replace(self, shape=shape, offset=self.offset + begin * _bits(self.dtype) // 8)

    def pieces(self, chunk_bytes: int, into: np.ndarray | None = None) -> Iterator[np.ndarray]:
        """See `chunks`."""
        if self.dtype in UNREAD_BITS:
            raise CheckpointError(str(self.path), unread_dtypes([self]))
        wait_until_read(self.path, self.offset, self.nbytes)
        dtype = DTYPES[self.dtype]
        step = max(1, min(self.size, chunk_bytes // dtype.itemsize))
        buffer = np.empty(step, dtype) if into is None else into
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.offset)
            for begin in range(0, self.size, step):
                first = 0 if into is None else begin
                piece = buffer[first : first + min(step, self.size - begin)]
                fill(piece, file, self)
                yield piece


def _bits(dtype: str) -> int:
    return DTYPES[dtype].itemsize * 8 if dtype in DTYPES else UNREAD_BITS[dtype]


def unread_dtypes(tensors: Iterable[Tensor]) -> list[str]:
    """One sentence for each dtype of the format that is not read here."""
    found: dict[str, list[str]] = {}
    for tensor in tensors:
        if tensor.dtype in UNREAD_BITS:
            found.setdefault(tensor.dtype, []).append(tensor.name)
    return [
        f"tensor {names[0]}{f' and {len(names) - 1} more have' if len(names) > 1 else ' has'} dtype {dtype}, which is not read: "
        f"{_ADVICE}"
        for dtype, names in found.items()
    ]


def read_header(path: Path) -> dict[str, Tensor]:
    """The tensors of one file, by name.

    Raises:
      CheckpointError: the file is not a well-formed safetensors file; lists everything that is wrong with it.
    """
    try:
        raw, length, size = _raw_header(path)
    except OSError as error:
        raise CheckpointError(str(path), f"cannot be read ({error.strerror or error}); fetch it again") from error
    if not raw.startswith(b"{"):
        problem = f"header must be a JSON object and start with '{{', got {raw[:8]!r}; not a safetensors file"
        raise CheckpointError(str(path), problem)
    try:
        entries = parse(raw)
    except ValueError as error:
        raise CheckpointError(str(path), f"header is not usable: {error}; {_DAMAGED}") from None
    metadata = entries.pop("__metadata__", None)
    tensors, problems, newer = {}, list[str](), list[str]()
    named = isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    if metadata is not None and not named:
        problems.append(f"has __metadata__ {shown(metadata)}, expected an object of texts; {_DAMAGED}")
    for name, entry in entries.items():
        try:
            tensors[name] = _tensor(path, name, entry, 8 + length)
        except _UnknownDtypeError as error:
            newer.append(f"tensor {name!r} {error}")
        except ValueError as error:
            problems.append(f"tensor {name!r} {error}; {_DAMAGED}")
    if not problems and not newer:
        problems = [f"{each}; {_DAMAGED}" for each in _tiling_problems(tensors, 8 + length, size)]
    problems = newer + problems
    if problems:
        listed = problems[:_SHOWN]
        more = [f"and {len(problems) - _SHOWN} more like these"] if len(problems) > _SHOWN else []
        raise CheckpointError(str(path), listed + more)
    return tensors


def _raw_header(path: Path) -> tuple[bytes, int, int]:
    """A file's header, its length and that of the file. Raises CheckpointError where it is none, OSError where none can be read."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(str(path), "is not a regular file; give a folder that holds the files themselves")
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if is_pointer(path):
            raise CheckpointError(str(path), POINTER)
        if len(prefix) == 8 and length > MAX_HEADER_BYTES:
            problem = f"announces a header of {length:,} bytes, at most {MAX_HEADER_BYTES:,} are permitted"
            raise CheckpointError(str(path), f"{problem}; not a safetensors file")
        if len(prefix) < 8 or length > status.st_size - 8:
            wanted = f"a header of {length:,} bytes" if len(prefix) == 8 else "8 bytes of header length"
            problem = f"is truncated: expected {wanted}, the file has {status.st_size:,} bytes; fetch it again"
            raise CheckpointError(str(path), problem)
        raw = file.read(length)
    return raw, length, status.st_size


class _UnknownDtypeError(ValueError):
    """A dtype that the format did not have when this was written."""


def _tensor(path: Path, name: str, entry: Any, start: int) -> Tensor:
    """One header entry as a `Tensor`; ValueError says what is wrong with it."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"must have exactly dtype, shape and data_offsets, got {str(entry)[:80]}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        raise ValueError(f"has dtype {str(dtype)[:40]!r}, expected a name")
    if dtype not in DTYPES and dtype not in UNREAD_BITS:
        known = ", ".join([*DTYPES, *UNREAD_BITS])
        raise _UnknownDtypeError(
            f"has dtype {dtype[:40]!r}, known are {known}; the file is of a newer format or damaged: {_ADVICE}"
        )
    for values, what in ((shape, "shape"), (offsets, "data_offsets")):
        numbers = isinstance(values, list) and all(type(value) is int and 0 <= value <= _MAX_SIZE for value in values)
        if not numbers or len(values) > _MAX_RANK:
            wanted = f"a list of at most {_MAX_RANK} integers from 0 to 2**63 - 1"
            raise ValueError(f"has {what} {str(values)[:80]}, expected {wanted}")
    if len(offsets) != 2 or offsets[1] < offsets[0]:
        raise ValueError(f"has data_offsets {offsets}, expected [begin, end] with begin <= end")
    bits = math.prod(shape) * _bits(dtype)
    nbytes = -(-bits // 8)
    if bits % 8:
        raise ValueError(f"has shape {shape} of {dtype}, which are {bits:,} bits and no whole bytes")
    if nbytes > _MAX_SIZE:
        raise ValueError(f"has shape {shape}, whose size overflows 64 bits")
    if nbytes != offsets[1] - offsets[0]:
        raise ValueError(f"has {offsets[1] - offsets[0]:,} bytes of data, but {dtype} {shape} takes {nbytes:,}")
    return Tensor(name, dtype, tuple(shape), path, start + offsets[0])


def _tiling_problems(tensors: dict[str, Tensor], start: int, file_size: int) -> list[str]:
    """Whether the tensors cover the buffer from `start` to the end of the file exactly once."""
    problems, position, previous = [], start, "the header"
    for tensor in sorted(tensors.values(), key=_place):
        if tensor.offset < position:
            problems.append(f"tensor {tensor.name!r} overlaps {previous} by {position - tensor.offset:,} bytes")
        elif tensor.offset > position:
            hole = tensor.offset - position
            problems.append(f"a hole of {hole:,} bytes lies between {previous} and tensor {tensor.name!r}")
        position, previous = tensor.offset + tensor.nbytes, f"tensor {tensor.name!r}"
    if position > file_size:
        problems.append(f"the tensors end at byte {position:,}, but the file is truncated at {file_size:,}")
    elif position < file_size:
        problems.append(f"{file_size - position:,} bytes follow the last tensor, which ends at byte {position:,}")
    return problems


def _place(tensor: Tensor) -> tuple[int, int]:
    return tensor.offset, tensor.nbytes


def chunks(tensor: Tensor, chunk_bytes: int = CHUNK_BYTES, into: np.ndarray | None = None) -> Iterator[np.ndarray]:
    """The tensor's values in order, as flat arrays of at most `chunk_bytes`.

    Args:
      into: a flat array of the tensor's dtype and size that is filled piece by piece. Without, all pieces share one buffer: each is
        valid until the next is asked for.

    Raises:
      CheckpointError: no array has its dtype, or the file became shorter since its header was read.
    """
    return tensor.pieces(chunk_bytes, into)


def fill(array: np.ndarray, file: FileIO, tensor: Tensor) -> None:
    """Fills a contiguous array with the next bytes of `file`. Raises CheckpointError where it ends before."""
    view, filled = memoryview(array.view(np.uint8)), 0
    while filled < len(view):
        count = file.readinto(view[filled:])
        if not count:
            problem = f"ended inside tensor {tensor.name!r}: it changed while it was read; convert again"
            raise CheckpointError(str(tensor.path), problem)
        filled += count
