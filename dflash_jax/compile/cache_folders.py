"""Compiled programs in folders of the user's own: the engine's (`executable_cache`), and JAX's persistent cache for all others.

Whoever can write to these folders can run code in the processes that read them. So they are made with mode 0700, and one that
others could write to, could swap for another one, or have left something in is refused; root may, as it may everything. The library
never turns them on by itself; the CLI does.
"""

import os
import stat
import warnings
from collections.abc import Callable
from pathlib import Path

import jax

from dflash_jax.compile.private_folders import foreign, open_private
from dflash_jax.compile.programs import Programs

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
