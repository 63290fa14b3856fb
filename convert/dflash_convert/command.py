"""`dflash-convert` as a shell starts it, in a process of its own.

Ctrl-C or SIGTERM is heard while everything that converting needs is imported, a second or two, and threads that have nobody left
to tell of a write that failed are quiet.
"""

import signal
import sys
from typing import Any

from dflash_jax.cli.signals import interrupts, was_interrupted

INTERRUPTED = 130


def main() -> int:
    """Runs `dflash_convert.cli.main` and returns its exit code."""
    sys.unraisablehook = _unraisable
    try:
        with interrupts(signal.SIGTERM):
            from dflash_convert import cli

            return cli.main()
    except (KeyboardInterrupt, ImportError) as error:
        if not was_interrupted(error):
            raise
        print("dflash-convert: interrupted", file=sys.stderr)
        return INTERRUPTED


def _unraisable(told: Any) -> None:
    # Writes of Orbax that are still under way when one has failed; the command tells of that one.
    if str(told.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(told)


if __name__ == "__main__":
    sys.exit(main())
