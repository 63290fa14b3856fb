"""Compiled programs on disk, so that another process neither traces nor compiles them.

An entry is one file, named after everything that its program depends on:

    line       "dflash_jax program 1"
    32 bytes   sha256 of all that follows
    8 bytes    length of the head
    head       JSON: the key in full, which arguments the code reads, what it returns
    payload    XLA's bytes

A file is written beside its place and renamed, so it is whole or not there; what is found damaged, or does not load, is left alone
with a notice and written again. A folder that cannot be written to is read and no more. XLA's bytes are machine code that will run:
the folder must be the user's own (`cache_folders.open_private`), all is done relative to its descriptor, and an entry is read once
what was opened is known to be the user's own file, which nobody else may write to.
"""

import hashlib
import json
import os
import secrets
import stat
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import jax

from dflash_jax.compile.cache_folders import foreign, open_private
from dflash_jax.compile.described import NotDescribable, describe, rebuild
from dflash_jax.compile.fingerprint import environment, settings
from dflash_jax.compile.serialization import (
    NotSerialisable,
    compile_here,
    device_of,
    find_kernel_runtime,
    restore,
    serialise,
)

MAGIC = b"dflash_jax program 1\n"
SUFFIX, PARTIAL = ".program", ".partial"
MOST_BYTES = 8 << 30
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
