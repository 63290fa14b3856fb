"""Hugging Face checkpoints in, converted checkpoints out, and back. The command line is `dflash-convert`."""
