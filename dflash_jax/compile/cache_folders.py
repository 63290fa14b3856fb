"""Compiled programs in folders of the user's own: the engine's (`executable_cache`), and JAX's persistent cache for all others.

Whoever can write to these folders can run code in the processes that read them. So they are made with mode 0700, and one that
others could write to, could swap for another one, or have left something in is refused; root may, as it may everything. The library
never turns them on by itself; the CLI does.
"""

import os
import stat
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import jax

from dflash_jax.compile.programs import Programs

ROOT = 0
# A folder on the way needs to be passed only, not read.
_PASS = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# The smallest are kept too: a start waits for some ten of them, one after the other.
MIN_COMPILE_SECONDS = 0.0


def cache_folder(name: str = "xla") -> Path:
    """`$XDG_CACHE_HOME/dflash_jax/<name>`, or `~/.cache/dflash_jax/<name>` where that variable is not an absolute path.

    Args:
      name: "programs" for the engine's, "xla" for JAX's.

    Raises:
      OSError: the user has no home, as in a container that runs with a number nobody has.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        try:
            base = Path.home() / ".cache"
        except RuntimeError as error:
            raise OSError(f"user {os.getuid()} has no home folder: set XDG_CACHE_HOME or HOME") from error
    return base / "dflash_jax" / name


def enable_compilation_cache(notice: Callable[[str], object] = warnings.warn) -> Path:
    """Turns both caches on and returns the folder of JAX's. A folder already named by JAX's own settings is left as it is; JAX's
    setting `jax_enable_compilation_cache` turns both off.

    Args:
      notice: told in one sentence of a program that could not be read or kept.

    Raises:
      OSError: a folder cannot be made, others may write to it, or JAX's holds something of theirs.
    """
    named = jax.config.jax_compilation_cache_dir
    if not jax.config.jax_enable_compilation_cache:
        return Path(named or cache_folder())
    from dflash_jax.compile.executable_cache import StoredPrograms

    programs = StoredPrograms(cache_folder("programs"), notice, make=True)
    folder = Path(named) if named else _vetted(cache_folder())
    Programs.stored = programs
    if not named:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_SECONDS)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return folder


def _vetted(folder: Path) -> Path:
    """The folder without links in its path, once nothing in it is another user's: JAX opens what it finds there by name."""
    folder, descriptor = open_private(folder, make=True)
    try:
        for within, folders, files, place in os.fwalk(".", dir_fd=descriptor):
            for name in (*folders, *files):
                found = os.stat(name, dir_fd=place, follow_symlinks=False)
                if problem := foreign(found, (stat.S_ISDIR, stat.S_ISREG)):
                    raise PermissionError(f"{os.path.normpath(folder / within / name)} {problem}: remove it")
    finally:
        os.close(descriptor)
    return folder


def foreign(found: os.stat_result, kinds: tuple[Callable[[int], bool], ...] = (stat.S_ISREG,)) -> str | None:
    """What is wrong with an entry of a private folder: another user's, or no plain file; None for the user's own and root's."""
    if not any(kind(found.st_mode) for kind in kinds):
        return "is a link" if stat.S_ISLNK(found.st_mode) else "is no plain file"
    return None if found.st_uid in (os.getuid(), ROOT) else f"belongs to user {found.st_uid}, not to you"


def open_private(folder: Path, *, make: bool = False) -> tuple[Path, int]:
    """A folder that is the user's own and that nobody else can write to or replace, as its path and a descriptor.

    Every folder of the path is opened inside the one above it and judged by its descriptor. Links are resolved before: one that
    somebody makes meanwhile is an error. The folder itself becomes one of mode 0700.

    Args:
      make: what is missing of the path, with mode 0700.

    Returns:
      The path without links, and the descriptor, which is the caller's to close.

    Raises:
      PermissionError: others could write to the folder, or put another one in its place.
      OSError: it cannot be opened, or made.
    """
    path = Path(os.path.realpath(folder))
    place, descriptor = Path(path.anchor), os.open(path.anchor, _PASS)
    try:
        for part in path.parts[1:]:
            _refuse_shared(place, os.fstat(descriptor), own=False)
            place /= part
            flags = _READ if place == path else _PASS
            try:
                inner = os.open(part, flags, dir_fd=descriptor)
            except FileNotFoundError:
                if not make:
                    raise
                with suppress(FileExistsError):  # another process makes it too
                    os.mkdir(part, 0o700, dir_fd=descriptor)
                inner = os.open(part, flags, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        _refuse_shared(path, os.fstat(descriptor), own=True)
        with suppress(OSError):  # of a read-only file system
            os.fchmod(descriptor, 0o700)
    except BaseException:
        os.close(descriptor)
        raise
    return path, descriptor


def _refuse_shared(folder: Path, found: os.stat_result, *, own: bool) -> None:
    """Raises PermissionError where another user could change what a folder holds.

    Args:
      own: the folder holds the entries themselves; otherwise the one that does lies somewhere in it.
    """
    if found.st_uid != os.getuid() and (own or found.st_uid != ROOT):
        raise PermissionError(
            f"{folder} belongs to user {found.st_uid}, not to you: set XDG_CACHE_HOME to a folder of your own"
        )
    # In a sticky folder, such as /tmp, others can make entries but not replace ours.
    if not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or (found.st_mode & stat.S_ISVTX and not own):
        return
    advice = f"remove it with all that they may have left there (rm -r {folder})" if own else f"chmod go-w {folder}"
    raise PermissionError(f"{folder} may be written by other users: {advice}, or set XDG_CACHE_HOME")
