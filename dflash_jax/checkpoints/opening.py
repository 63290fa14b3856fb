"""Opens a checkpoint of either form, wherever it is."""

from pathlib import Path

from dflash_jax.checkpoints import huggingface
from dflash_jax.checkpoints.converted import MARKER, Checkpoint, open_converted
from dflash_jax.checkpoints.hub import resolve_source


def open_checkpoint(source: str | Path, revision: str | None = None) -> Checkpoint:
    """Opens a converted folder, a Hugging Face folder, or a model of the Hugging Face hub.

    Args:
      source: a folder, or `owner/name` on the hub where no such folder exists.
      revision: branch, tag or commit on the hub.

    Raises:
      CheckpointError: nothing usable is there; lists every problem.
      ConfigError: the configuration asks for something that is not implemented.
    """
    folder, _ = resolve_source(source, revision)
    if (folder / MARKER).exists():
        return open_converted(folder)
    return huggingface.open_checkpoint(folder)
