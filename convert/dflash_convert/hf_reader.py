"""Former place of `dflash_jax.checkpoints.huggingface`, kept for programs that import it from here."""

from dflash_jax.checkpoints.huggingface import HuggingFaceCheckpoint, inspect, open_checkpoint

__all__ = ["HuggingFaceCheckpoint", "inspect", "open_checkpoint"]
