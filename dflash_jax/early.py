"""What can begin before everything is imported: the device starts and files are read while Python is busy, seconds of each."""

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path


def read_models(path: str | Path | None, draft: str | Path | bool | None = None) -> None:
    """Asks for the files that `load` would read of folders here; arguments are as `load` takes them."""
    try:
        target = None if path is None else Path(path).expanduser()
        if isinstance(draft, str | Path):
            drafter = Path(draft).expanduser()
        else:
            drafter = None if draft is False or target is None else target / "draft"
    except RuntimeError:  # no such user: `load` will say so
        return
    folders = [folder for folder in (target, drafter) if folder is not None]
    read_ahead([file for folder in folders for file in sorted(folder.glob("*.safetensors"))])


def start_device() -> None:
    """Starts JAX's backend in the background.

    For commands: it takes memory, and settings of JAX that concern it have no effect afterwards. Where it fails, whoever needs it
    will meet the same error, and can tell.
    """
    import jax

    _in_background("start device", jax.local_devices)


def read_ahead(paths: Sequence[Path]) -> None:
    """Asks the system to read files into its cache while the caller does other things: up to a quarter of the memory."""

    def ask() -> None:
        room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
        for path in paths:
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, room, os.POSIX_FADV_WILLNEED)
            room -= path.stat().st_size
            if room <= 0:
                return

    if hasattr(os, "posix_fadvise"):
        _in_background("read ahead", ask)


def _in_background(name: str, work: Callable[[], object]) -> None:
    def run() -> None:
        with suppress(Exception):  # not for this thread to tell
            work()

    threading.Thread(target=run, name=name, daemon=True).start()
