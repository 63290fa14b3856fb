"""The command `dflash-jax`: `main` runs it, `commands.py` holds what each command does."""

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. See `commands.main`; nothing slow is imported before it is needed."""
    from dflash_jax.cli import commands

    return commands.main(argv)
