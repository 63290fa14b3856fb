"""What can begin before everything is imported: the device starts and files are read while Python is busy, seconds of each."""

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path


def begin(*models: str | Path | bool | None) -> None:
    """Starts JAX's backend and asks for the files of models that are folders here, in the background.

    For commands: a backend takes memory, and settings of JAX that concern it have no effect afterwards. Whoever needs what fails
    here will meet the same error, and can tell.

    Args:
      models: what `load` will read, as far as that is known.
    """
    folders = [Path(model).expanduser() for model in models if isinstance(model, str | Path)]
    read_ahead([path for folder in folders for path in sorted(folder.glob("*.safetensors"))])
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
