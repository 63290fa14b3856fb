"""Folders that are the user's own: opened so that nobody else can write to them or put another one in their place."""

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

ROOT = 0
# A folder on the way needs to be passed only, not read.
_PASS = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def foreign(found: os.stat_result, kinds: tuple[Callable[[int], bool], ...] = (stat.S_ISREG,)) -> str | None:
    """Why an entry of a private folder is refused (another user's, or no plain file); None for the user's own and root's."""
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
