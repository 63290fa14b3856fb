"""JAX's persistent compilation cache in a folder of the user's own.

Whoever can write to that folder can run code in the processes that read it, so it is made with mode 0700 and a folder that
others could write to, or swap for another one, is refused. The library never turns the cache on by itself; the CLI does.
"""

import os
import stat
from pathlib import Path

import jax

# Small programs are kept too: a demo on a CPU is made of them.
MIN_COMPILE_SECONDS = 0.2


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/dflash_jax/xla`, or `~/.cache/dflash_jax/xla` where that variable is not an absolute path."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "dflash_jax" / "xla"


def enable_compilation_cache() -> Path:
    """Turns the cache on and returns its folder. A folder already named by JAX's own settings is left as it is.

    Raises:
      OSError: the folder cannot be made, or others may write to it.
    """
    named = jax.config.jax_compilation_cache_dir
    if named:
        return Path(named)
    folder = cache_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    refuse_shared(folder)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_SECONDS)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
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
