"""The command `dflash-jax`: `main` runs it, `commands.py` holds what each command does."""

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. See `commands.main`; nothing slow is imported before it is needed."""
    try:
        from dflash_jax.cli import commands
    except KeyboardInterrupt:  # in the tenth of a second before anything listens to it
        print("\ninterrupted", file=sys.stderr)
        return 130
    return commands.main(argv)
