"""Early start of the command line: the device starts and files are read while Python imports, seconds of each."""

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dflash_jax.checkpoints.prefetch import read_ahead


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

    # No first array as well, for which XLA takes three quarters of the memory in 1.6 s: whoever asks what is free would wait for it
    # with Python in hand, the threads that read ahead with them (6.4 s to a first token from disk in place of 5.6).
    _in_background("start device", jax.local_devices)


def _in_background(name: str, work: Callable[[], object]) -> None:
    def run() -> None:
        with suppress(Exception):  # not for this thread to tell
            work()

    threading.Thread(target=run, name=name, daemon=True).start()
