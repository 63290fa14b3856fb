"""Resolution of model names: an existing folder, or one downloaded from the Hugging Face hub."""

import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import Any

from dflash_jax.errors import CheckpointError

_HUB = "huggingface_hub"
# A model, or the drafter in a folder of it.
_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+?)(/dflash)?")
# A drafter's mask_embedding.pt comes along: see `mask_file`. No other pickle does.
_HUB_FILES = ["*.safetensors", "*.json", "tokenizer*", "*.jinja", "mask_embedding.pt"]
_HUB_IGNORED = ["*/*", "tokenizer*.py", "tokenizer*.bin", "tokenizer*.pt", "tokenizer*.pkl"]

# The first line is a number; that a model is gated, and what to do then, comes after it.
_MOST_OF_A_REASON = 500

# What `git clone` leaves in a large file's place where git-lfs is not installed.
_POINTER_START = b"version https://git-lfs"
POINTER = "is a pointer of Git LFS, not the file itself: run `git lfs pull` in its folder, or fetch it again"


def is_pointer(path: Path) -> bool:
    """Whether a file is what Git LFS puts in place of one that it has not fetched."""
    with path.open("rb") as file:
        return file.read(len(_POINTER_START)) == _POINTER_START


def resolve_source(source: str | Path, revision: str | None = None) -> tuple[Path, str | None]:
    """The folder that `source` means, fetched from the hub where it is no folder, and its commit where that is known.

    Only safetensors, configuration and tokenizer files are fetched, no code. `owner/name/dflash` is the folder of that name in a
    model's repository, where some releases have their drafter.

    Raises:
      CheckpointError: no such folder, no such model, no network, or huggingface_hub is not installed.
    """
    if (found := find_here(source, revision)) is not None:
        return found
    subject = str(source)
    named = _HUB_ID.fullmatch(subject)
    assert named is not None, "find_here has seen to it"
    part = "" if named[2] is None else f"{named[2][1:]}/"
    patterns = ([f"{part}{pattern}" for pattern in listed] for listed in (_HUB_FILES, _HUB_IGNORED))
    try:
        import huggingface_hub

        allowed, ignored = patterns
        fetched = huggingface_hub.snapshot_download(
            named[1], revision=revision, allow_patterns=allowed, ignore_patterns=ignored
        )
    except Exception as error:  # what a lost connection raises is of whichever library the hub's uses, and no OSError
        reason = " ".join(str(error).split())[:_MOST_OF_A_REASON] or type(error).__name__
        problem = (
            f"is no folder here and could not be fetched ({reason}); check the name, the revision, the network and, for a gated "
            "model, your login (hf auth login), or download the model elsewhere and give its folder"
        )
        raise CheckpointError(subject, problem) from error
    return Path(fetched) / part, Path(fetched).name


def find_here(source: Any, revision: str | None = None) -> tuple[Path, str | None] | None:
    """The folder that `source` means if it is one here, and its commit where that is known; None for a model of the hub.

    Raises:
      CheckpointError: it is neither, or huggingface_hub, which fetches the other kind, is not installed.
    """
    if not isinstance(source, str | os.PathLike):
        raise CheckpointError(
            repr(source), f"is of type {type(source).__name__}; give a folder or a model id of the form owner/name"
        )
    try:
        folder, subject = Path(source).expanduser(), str(source)
    except RuntimeError:
        raise CheckpointError(str(source), "begins with the home of a user whom this machine does not know") from None
    if not subject:
        raise CheckpointError("no model", "an empty name was given; give a folder or a model id of the form owner/name")
    try:
        there = folder.exists()
    except OSError as error:  # a folder above it is closed, or the name is too long
        raise CheckpointError(subject, f"cannot be looked for ({error.strerror or error})") from error
    if there:
        if not folder.is_dir():
            raise CheckpointError(subject, "is a file; give the folder that holds it")
        if not os.access(folder, os.R_OK | os.X_OK):
            raise CheckpointError(subject, "cannot be opened (Permission denied); give a folder that you may read")
        if revision is not None:
            raise CheckpointError(subject, f"is a local folder, so revision {revision!r} has no meaning; leave it out")
        if not (folder / "config.json").exists() and (found := sorted(folder.glob("snapshots/*/config.json"))):
            problem = f"is a model's folder in the hub's cache: give its name on the hub, or {found[-1].parent}"
            raise CheckpointError(subject, problem)
        real = folder.resolve()
        return folder, real.name if real.parent.name == "snapshots" else None
    if not _HUB_ID.fullmatch(subject):
        seen = "" if folder.is_absolute() else f" (seen from {Path.cwd()})"
        raise CheckpointError(subject, f"is neither an existing folder{seen} nor a model id of the form owner/name")
    if (sys.modules[_HUB] if _HUB in sys.modules else importlib.util.find_spec(_HUB)) is None:
        problem = "is no folder here, and models are fetched with huggingface_hub: pip install huggingface-hub"
        raise CheckpointError(subject, problem)
    return None
