"""`mask_embedding.pt`: the one vector that some drafters have in a file of `torch.save` beside their safetensors.

Such a file is a zip archive of a pickle, which says what the tensors are, and their numbers. A pickle can name any function to be
called. Even where nothing is called, Python's unpickler reserves memory for any index that a pickle names and hashes keys that take
for ever, and zipfile unpacks whatever is compressed. So nothing here unpickles: opcodes are taken one by one, those that torch
writes for a plain tensor, and only what is stored as it is, and small, is read. torch is not needed. The numbers stay where they
are: what is given back is where they lie in the file.
"""

import io
import pickletools
import struct
import zipfile
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple

from dflash_jax.checkpoints.safetensors import DTYPES, Tensor
from dflash_jax.config import shown

NAME = "mask_embedding"
FILE = f"{NAME}.pt"
_MOST_BYTES, _MOST_READ = 1 << 28, 1 << 16
_MOST_OF_A_REASON = 200
_STORAGES = {"FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16"}
# A file's one tensor may stand by itself, or under one of these names beside the mask's id.
_VECTORS, _TOKEN = ("embedding", NAME, "weight"), "mask_token_id"
_LOCAL_HEADER = 30
WAY_OUT = f"save that tensor as `{NAME}` in the safetensors file and remove {FILE}"


class _Plain(NamedTuple):
    """A tensor as the pickle describes it: of an entry of the archive, which holds `held` numbers, those from `offset` on."""

    dtype: str
    entry: str
    held: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class _Small(io.BufferedReader):
    """A file that gives little at once: zipfile would read a directory as large as the archive, entry by entry."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > _MOST_READ:
            raise ValueError("it is no small file of torch.save")
        return super().read(size)


def read_mask(path: Path) -> tuple[Tensor, int | None]:
    """The vector of such a file as `mask_embedding`, and the id of the token that it is of, where the file says it.

    Args:
      path: what `torch.save` of torch 1.6 or later wrote: a float32, float16 or bfloat16 vector `[D]`, whose other sizes may be 1.

    Raises:
      ValueError: the file is no such archive, holds more than that, or names anything else.
    """
    try:
        if not path.is_file():
            raise ValueError("it is no file")
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"it is larger than {_MOST_BYTES >> 20} MiB")
        with _Small(io.FileIO(path)) as file, zipfile.ZipFile(file) as archive:
            pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            if len(pickles) != 1:
                raise ValueError("it is no file of torch.save with one pickle")
            root = pickles[0].removesuffix("data.pkl")
            if f"{root}byteorder" in archive.namelist() and _stored(archive, f"{root}byteorder") != b"little":
                raise ValueError("its numbers are not little endian")
            held, token = _vector(_unpickled(_stored(archive, pickles[0])))
            offset = _place(file, archive.getinfo(f"{root}data/{held.entry}"), held)
    except Exception as error:  # a damaged archive or pickle raises whatever it happens upon
        reason = (str(error) or type(error).__name__)[:_MOST_OF_A_REASON]
        raise ValueError(
            f"{FILE} cannot be read: {reason}. Of pickles only plain tensors are read; {WAY_OUT}"
        ) from None
    return Tensor(NAME, held.dtype, (prod(held.size),), path, offset), token


def _stored(archive: zipfile.ZipFile, name: str) -> bytes:
    """A small entry that is not compressed."""
    entry = archive.getinfo(name)
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > _MOST_READ:
        raise ValueError(f"{shown(name)} is compressed, or larger than {_MOST_READ >> 10} KiB")
    return archive.read(entry)


def _vector(content: Any) -> tuple[_Plain, int | None]:
    """The one vector that a pickle describes, and the mask's id where it is there."""
    token = None
    if isinstance(content, Mapping):
        token, vectors = content.get(_TOKEN), [content[name] for name in _VECTORS if name in content]
        if len(vectors) != 1 or len(content) != 1 + (_TOKEN in content) or not (token is None or _counts(token)):
            raise ValueError(f"it has {shown(sorted(content))}, expected {_VECTORS[0]} and {_TOKEN}")
        content = vectors[0]
    if not isinstance(content, _Plain) or not content.size or prod(content.size) != max(content.size):
        raise ValueError("it holds no vector")
    return content, token


def _counts(value: Any) -> bool:
    """Whether it is a number of something: no id, size or place in a file is larger."""
    return type(value) is int and 0 <= value < 1 << 40


def _unpickled(data: bytes) -> Any:
    """What a pickle of dictionaries with names, tuples, numbers, texts and plain tensors says.

    Raises:
      ValueError: it has other opcodes, or names anything else. Damaged pickles raise other errors as well.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def taken(begin: int) -> list[Any]:
        found = stack[begin:]
        del stack[begin:]
        return found

    argument: Any
    for opcode, argument, _ in pickletools.genops(data):
        match opcode.name:
            case (
                "PROTO" | "FRAME" | "STOP" | "BINPERSID"
            ):  # of which the last leaves what it says of a storage on the stack
                pass
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[opcode.name])
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINUNICODE" | "SHORT_BINUNICODE":
                stack.append(argument)
            case "GLOBAL":
                stack.append(_named(*argument.split(" ", 1)))
            case "STACK_GLOBAL":
                stack.append(_named(*taken(-2)))
            case "MARK":
                marks.append(len(stack))
            case "BINPUT" | "LONG_BINPUT" | "MEMOIZE":
                memo[len(memo) if argument is None else argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(taken(-int(opcode.name[-1]))))
            case "TUPLE":
                stack.append(tuple(taken(marks.pop())))
            case "EMPTY_DICT":
                stack.append({})
            case "SETITEM" | "SETITEMS":
                pairs = taken(-2 if opcode.name == "SETITEM" else marks.pop())
                _filled(stack[-1], pairs)
            case "REDUCE":
                function, arguments = taken(-2)
                stack.append(function(*arguments))
            case "BUILD" if isinstance(stack[-2], dict):  # the versions of modules that a `state_dict` has
                stack.pop()
            case _:
                raise ValueError(f"its pickle has {opcode.name}")
    (content,) = stack
    return content


def _filled(mapping: Any, pairs: list[Any]) -> None:
    names = pairs[::2]
    # Other keys would be hashed, which takes a tuple of tuples of tuples as long as it likes.
    if not isinstance(mapping, dict) or not all(isinstance(name, str) for name in names):
        raise ValueError("its pickle has keys that are no names")
    mapping |= zip(names, pairs[1::2], strict=True)


def _rebuilt(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> _Plain:
    kind, dtype, entry, _, held = storage
    texts = all(isinstance(one, str) for one in (kind, dtype, entry))
    plain = texts and kind == "storage" and dtype in _STORAGES.values()
    if not plain or not all(map(_counts, (offset, held, *size, *stride))) or len(size) != len(stride):
        raise ValueError("its tensor is not a plain one")
    return _Plain(dtype, entry, held, offset, tuple(size), tuple(stride))


def _of_parameter(data: Any, *rest: Any) -> Any:
    return data


# What torch's files name: stand-ins of ours, and storages by the dtype of their numbers. `dict` is of a tensor's hooks, of which it
# has none, and of a `state_dict`.
_NAMES: Mapping[str, Callable[..., Any] | str] = {
    "torch._utils._rebuild_tensor_v2": _rebuilt,
    "torch._utils._rebuild_parameter": _of_parameter,
    "collections.OrderedDict": lambda: {},
    **{f"torch.{name}": dtype for name, dtype in _STORAGES.items()},
}


def _named(module: Any, name: Any) -> Callable[..., Any] | str:
    whole = ".".join((module, name))
    if whole not in _NAMES:
        raise ValueError(f"it names {shown(whole)}")
    return _NAMES[whole]


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
