"""Compiled programs in folders of the user's own: the engine's (`stored_programs`), and JAX's persistent cache for all others.

Whoever can write to these folders can run code in the processes that read them, so they are made with mode 0700 and a folder that
others could write to, or swap for another one, is refused. The library never turns them on by itself; the CLI does.
"""

import os
import stat
import warnings
from collections.abc import Callable
from pathlib import Path

import jax

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
      OSError: a folder cannot be made, or others may write to it.
    """
    named = jax.config.jax_compilation_cache_dir
    if not jax.config.jax_enable_compilation_cache:
        return Path(named or cache_folder())
    from dflash_jax.compile.executable_cache import StoredPrograms

    programs, folder = _private(cache_folder("programs")), Path(named) if named else _private(cache_folder())
    Programs.stored = StoredPrograms(programs, notice)
    if not named:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_SECONDS)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return folder


def _private(folder: Path) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    refuse_shared(folder)
    return folder


def refuse_shared(folder: Path) -> None:
    """Raises PermissionError unless `folder` is the user's own and nobody else can write to it or replace it."""
    folder = folder.resolve()
    if (owner := folder.stat().st_uid) != os.getuid():
        raise PermissionError(
            f"{folder} belongs to user {owner}, not to you: set XDG_CACHE_HOME to a folder of your own"
        )
    for place in (folder, *folder.parents):
        mode = place.stat().st_mode
        # In a sticky folder, such as /tmp, others can make entries but not replace ours.
        sticky = place != folder and mode & stat.S_ISVTX
        if mode & (stat.S_IWGRP | stat.S_IWOTH) and not sticky:
            raise PermissionError(f"{place} may be written by other users: chmod go-w {place}, or set XDG_CACHE_HOME")
