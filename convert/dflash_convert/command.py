"""`dflash-convert` as a shell starts it, in a process of its own.

What ends it is heard from the first import on. Once all is said the process ends at once, without Orbax's threads and what they
leave to be collected: that would take a second, in which a signal ends a process whose work is done. For the same reason nobody
hears of writes that a failure or an interrupt has left without anyone to tell.
"""

import os
import sys
import warnings
from contextlib import suppress
from typing import Any, NoReturn

from dflash_convert.cli import ENDING, INTERRUPTED
from dflash_convert.cli import main as convert
from dflash_jax.cli.signals import arrived, interruption, interrupts
from dflash_jax.cli.streams import leave_stdout


def main() -> NoReturn:
    """Runs `dflash_convert.cli.main` and ends the process with its exit code."""
    sys.unraisablehook = _unraisable
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    try:
        with interrupts(*ENDING):
            try:
                _leave(convert())
            except SystemExit as stop:  # help, or wrong usage
                _leave(int(stop.code or 0))
    except KeyboardInterrupt:  # before or after all that `convert` tells of
        print(f"dflash-convert: {interruption()}", file=sys.stderr)
        _leave(INTERRUPTED)


def _leave(code: int) -> NoReturn:
    leave_stdout()
    with suppress(OSError):
        sys.stderr.flush()
    os._exit(code)


def _unraisable(told: Any) -> None:
    # Writes of Orbax that are still under way when one has failed; the command tells of that one.
    if str(told.exc_value) != "Event loop is closed" and not arrived():
        sys.__unraisablehook__(told)


if __name__ == "__main__":
    main()
