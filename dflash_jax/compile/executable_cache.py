"""Compiled programs on disk, so that another process neither traces nor compiles them.

An entry is one file, named after everything that its program depends on:

    line       "dflash_jax program 1"
    32 bytes   sha256 of all that follows
    8 bytes    length of the head
    head       JSON: the key in full, which arguments the code reads, what it returns
    payload    XLA's bytes

A file is written beside its place and renamed, so it is whole or not there; what is found damaged, or does not load, is left alone
with a notice and written again. A folder that cannot be written to is read and no more. XLA's bytes are machine code that will run:
the folder must be the user's own (`private_folders.open_private`), all is done relative to its descriptor, and an entry is read
once what was opened is known to be the user's own file, which nobody else may write to.
"""

import dataclasses
import functools
import hashlib
import importlib
import json
import math
import os
import platform
import secrets
import stat
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from importlib import resources
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.compile.jax_patches import (
    NotSerialisable,
    compile_here,
    device_of,
    find_kernel_runtime,
    restore,
    serialise,
)
from dflash_jax.compile.private_folders import foreign, open_private
from dflash_jax.execution.switches import switches

MAGIC = b"dflash_jax program 1\n"
SUFFIX, PARTIAL = ".program", ".partial"
MOST_BYTES = 8 << 30
# The packages whose Python becomes programs; their own dependencies do not.
SOURCES = ("dflash_jax", "dflash_kernels")
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "flax", "numpy", "jax-triton", "triton")
VARIABLES = ("XLA_", "TF_", "MOSAIC_", "PALLAS_", "TRITON_", "NVIDIA_TF32", "CUBLAS", "CUDNN", "LIBTPU_INIT_ARGS")
# Of them: memory, messages, and places that JAX sets itself when it first traces a kernel.
NEUTRAL_VARIABLES = (
    "XLA_PYTHON_CLIENT_", "TF_CPP_", "TRITON_CACHE_DIR", "MOSAIC_GPU_CUDA_ROOT", "MOSAIC_GPU_RUNTIME_LIB_PATH",
    "MOSAIC_GPU_NVSHMEM_",
)  # fmt: skip
# Of JAX's settings: where things are kept and what is told about them.
NEUTRAL_SETTINGS = ("cache", "log", "traceback", "dump")
# Longer than anybody takes to write one file.
ABANDONED_SECONDS = 3600.0


class StoredPrograms:
    """Programs in one folder. May be asked from several threads and processes.

    Args:
      folder: the user's own, in folders that nobody else can change.
      notice: told in one sentence what was ignored or could not be done.
      most_bytes: the programs that nobody has used for longest go where there are more.
      make: the folder, where it is missing.

    Raises:
      OSError: the folder cannot be opened, or others could write to it or replace it.
    """

    def __init__(
        self, folder: Path, notice: Callable[[str], object] = warnings.warn, most_bytes: int = MOST_BYTES, *,
        make: bool = False,
    ):  # fmt: skip
        self.folder, self._descriptor = open_private(folder, make=make)
        weakref.finalize(self, os.close, self._descriptor)
        self.notice, self.most_bytes = notice, most_bytes
        self.writes = True
        self._lock = threading.Lock()
        find_kernel_runtime()

    def program(
        self, function: Callable, static: tuple, donate: tuple[int, ...], args: tuple,
        lower: Callable[[], jax.stages.Lowered],
    ) -> tuple[jax.stages.Compiled, Callable[[], object]]:  # fmt: skip
        """`function(*static, *args)` from disk, or lowered and compiled, and then what writes it to disk.

        Args:
          donate: numbers arguments of `args`, which may be shapes.
        """
        key = self.key(function, static, donate, args)
        if key is None:
            return lower().compile(), _nothing
        if (found := self.find(key, function, donate, args)) is not None:
            return found, _nothing
        lowered = lower()
        program, whole = compile_here(lowered)
        return program, partial(self.keep, key, program, lowered.out_info) if whole else _nothing

    def key(self, function: Callable, static: tuple, donate: tuple[int, ...], args: tuple) -> str | None:
        """All that a program depends on, as text; None for programs that are not kept."""
        try:
            device = device_of(args)
            described = {
                "function": f"{function.__module__}:{function.__qualname__}", "static": describe(static),
                "donate": list(donate), "args": describe(args), "settings": settings(), "environment": environment(device),
            }  # fmt: skip
        except (NotDescribable, NotSerialisable):
            return None
        return json.dumps(described, sort_keys=True)

    def find(self, key: str, function: Callable, donate: tuple[int, ...], args: tuple) -> jax.stages.Compiled | None:
        """The program kept under `key`, ready to be called; None where there is none or it cannot be used."""
        path = self.path(key)
        try:
            content = self._read(path.name)
        except FileNotFoundError:
            return None
        except OSError as error:
            self.notice(f"a compiled program cannot be read, so it is compiled again ({error})")
            return None
        try:
            head, payload = _open(content)
            if head["key"] != key:
                raise ValueError("it was made for something else")
            program = restore(payload, head["read"], rebuild(head["results"]), function.__name__, donate, args)
        except Exception as error:  # whatever is wrong with an entry, the program can be compiled
            reason = (str(error).splitlines() or [""])[0]
            self.notice(f"{path} is damaged or of no use here, so its program is compiled again ({reason:.200})")
            return None
        with suppress(OSError):
            os.utime(path.name, dir_fd=self._descriptor, follow_symlinks=False)  # used: it stays
        return program

    def keep(self, key: str, program: jax.stages.Compiled, results: Any) -> None:
        """Writes a program that was compiled here. What cannot be kept is not, and what goes wrong is a notice.

        Args:
          results: what it returns, in shapes.
        """
        if not self.writes:
            return
        try:
            described = describe(jax.tree.map(_shape, results))
            if jax.tree.structure(rebuild(described)) != program.out_tree:
                return
            payload, read = serialise(program)
        except (NotDescribable, NotSerialisable, jax.errors.JaxRuntimeError):
            return
        head = json.dumps({"key": key, "read": read, "results": described}).encode()
        content = len(head).to_bytes(8, "little") + head + payload
        try:
            self._make_room(len(content))
            self._write(self.path(key).name, content)
        except OSError as error:
            self.writes = False
            self.notice(f"compiled programs are not kept: {error}")

    def path(self, key: str) -> Path:
        return self.folder / (hashlib.sha256(key.encode()).hexdigest() + SUFFIX)

    def _read(self, name: str) -> bytes:
        """An entry's bytes. Raises PermissionError where it is another user's, or others may write to it."""
        # A pipe would wait for who writes to it.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(name, flags, dir_fd=self._descriptor), "rb") as file:
            found = os.fstat(file.fileno())
            problem = foreign(found)
            if problem is None and found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                problem = "may be written by other users"
            if problem is not None:
                raise PermissionError(f"{self.folder / name} {problem}")
            return file.read()

    def _write(self, name: str, content: bytes) -> None:
        beside = secrets.token_hex(8) + PARTIAL
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with open(os.open(beside, flags, 0o600, dir_fd=self._descriptor), "wb") as file:
                for piece in (MAGIC, hashlib.sha256(content).digest(), content):
                    file.write(piece)
            os.replace(beside, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        except BaseException:
            with suppress(OSError):
                os.unlink(beside, dir_fd=self._descriptor)
            raise

    def _make_room(self, nbytes: int) -> None:
        """Removes what others left half written, and the programs not used for longest, until so many more bytes fit."""
        with self._lock, os.scandir(self._descriptor) as listed:
            entries = []
            for entry in listed:
                with suppress(FileNotFoundError):  # another process tidies up too
                    found = entry.stat(follow_symlinks=False)
                    if entry.name.endswith(PARTIAL) and time.time() - found.st_mtime > ABANDONED_SECONDS:
                        os.unlink(entry.name, dir_fd=self._descriptor)
                    elif entry.name.endswith(SUFFIX):
                        entries.append((found.st_mtime, found.st_size, entry.name))
            held = nbytes + sum(size for _, size, _ in entries)
            for _, size, name in sorted(entries):
                if held <= self.most_bytes:
                    return
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=self._descriptor)
                held -= size


def _open(content: bytes) -> tuple[dict[str, Any], bytes]:
    """Head and payload of an entry. Raises ValueError where it is not as it was written."""
    view = memoryview(content)
    start = len(MAGIC) + 32
    if view[: len(MAGIC)] != MAGIC or hashlib.sha256(view[start:]).digest() != view[len(MAGIC) : start]:
        raise ValueError("its checksum is wrong")
    length = int.from_bytes(view[start : start + 8], "little")
    return json.loads(bytes(view[start + 8 : start + 8 + length])), bytes(view[start + 8 + length :])


def _nothing() -> None:
    pass


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=bool(getattr(leaf, "weak_type", False)))


# The key: what a program is made for, as JSON. Two things that differ have different texts, and what cannot be told apart this way
# is refused. It is also read back, so that no pickle is needed to remember a pytree.


class NotDescribable(ValueError):
    """A value that has no description."""


def describe(value: Any) -> Any:
    """JSON for a tree of dataclasses, tuples (named ones too), lists, mappings, plain values, dtypes, and arrays or their shapes.

    Of an array there is the shape, the dtype and whether the dtype is weak; a NumPy number is an array.

    Raises:
      NotDescribable: something else is in it.
    """
    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, np.dtype):
        return {"dtype": value.name}
    if isinstance(value, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
        return {"array": [list(value.shape), str(value.dtype), bool(getattr(value, "weak_type", False))]}
    if type(value) in (tuple, list):
        return {type(value).__name__: [describe(part) for part in value]}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        kind = type(value)
        return {"named": f"{kind.__module__}:{kind.__qualname__}", "parts": [describe(part) for part in value]}
    if isinstance(value, Mapping) and all(type(name) is str for name in value):
        return {"dict": {name: describe(value[name]) for name in sorted(value)}}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        fields = {one.name: describe(getattr(value, one.name)) for one in dataclasses.fields(value)}
        return {"dataclass": f"{kind.__module__}:{kind.__qualname__}", "fields": fields}
    raise NotDescribable(f"{type(value).__module__}.{type(value).__qualname__}")


def rebuild(described: Any) -> Any:
    """Inverse of `describe`, with `jax.ShapeDtypeStruct` in place of arrays.

    Raises:
      NotDescribable: `describe` cannot have given it, or it names a dataclass that is not this package's.
    """
    if not isinstance(described, dict):
        return described
    try:
        match described:
            case {"float": text}:
                return float(text)
            case {"dtype": name}:
                return jnp.dtype(name)
            case {"array": [shape, dtype, weak]}:
                return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype), weak_type=weak)
            case {"tuple": parts}:
                return tuple(rebuild(part) for part in parts)
            case {"list": parts}:
                return [rebuild(part) for part in parts]
            case {"dict": items}:
                return {name: rebuild(item) for name, item in items.items()}
            case {"named": name, "parts": parts}:
                return _class(name, lambda found: issubclass(found, tuple) and hasattr(found, "_fields"))(
                    *map(rebuild, parts)
                )
            case {"dataclass": name, "fields": fields}:
                return _class(name, dataclasses.is_dataclass)(
                    **{field: rebuild(item) for field, item in fields.items()}
                )
    except (TypeError, ValueError, AttributeError, ImportError) as error:
        raise NotDescribable(str(error)) from error
    raise NotDescribable(f"unknown entry {sorted(described)}")


def _class(name: str, of_kind: Callable[[type], bool]) -> type:
    """A dataclass or a named tuple of these packages, by its module and name."""
    module, _, qualname = name.partition(":")
    if module.split(".")[0] not in SOURCES:
        raise NotDescribable(f"{name} is not of {', '.join(SOURCES)}")
    found = getattr(importlib.import_module(module), qualname)
    if not (isinstance(found, type) and of_kind(found)):
        raise NotDescribable(f"{name} is no dataclass and no named tuple")
    return found


# The rest of the key: this package's sources, its neighbours' versions, the device, JAX's settings.


def settings() -> dict[str, str]:
    """JAX's settings as they are for this thread, and the switches of this package that change what is traced."""
    found = {
        name: str(getattr(jax.config, name, None))
        for name in sorted(jax.config.values)
        if not any(part in name for part in NEUTRAL_SETTINGS)
    }
    return found | {f"switch {name}": str(value) for name, value in switches().items()}


@functools.cache
def environment(device: Any) -> dict[str, Any]:
    """The part of a key that is fixed for a process: sources, versions, variables, and the machine with its driver."""
    return {
        "sources": sources(), "versions": {name: _version(name) for name in PACKAGES}, "device": _device(device),
        "variables": {
            name: value for name, value in sorted(os.environ.items())
            if name.startswith(VARIABLES) and not name.startswith(NEUTRAL_VARIABLES)
        },
    }  # fmt: skip


@functools.cache
def sources() -> str:
    """One hash of all Python and JSON files of the packages that trace programs. A model's weights are none of them."""
    digest = hashlib.sha256()
    for package in SOURCES:
        root = Path(str(resources.files(package)))
        files = [path for path in root.rglob("*") if path.suffix in (".py", ".json")]
        for path in sorted(path for path in files if "pair" not in path.relative_to(root).parts):
            content = path.read_bytes()
            digest.update(f"{package}/{path.relative_to(root).as_posix()}:{len(content)}:".encode() + content)
    return digest.hexdigest()


def _device(device: Any) -> dict[str, str]:
    names = ("platform", "device_kind", "compute_capability", "core_count")
    found = {name: str(getattr(device, name, "")) for name in names}
    found["runtime"] = device.client.platform_version
    # The code of a CPU's programs uses whatever its machine has; that of a GPU's calls the driver.
    found["machine"] = f"{platform.machine()} {_lines('/proc/cpuinfo', ('model name', 'flags', 'Features'))}"
    if device.platform == "gpu":
        found["machine"] = f"{platform.machine()} {_lines('/proc/driver/nvidia/version', ('NVRM',))}"
    return found


def _lines(path: str, names: tuple[str, ...]) -> str:
    """The first line that begins with each of `names`; nothing where there is no such file."""
    try:
        lines = Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(next((line for line in lines if line.startswith(name)), "") for name in names)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
