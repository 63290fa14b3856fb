"""The command `dflash-convert`.

    dflash-convert Qwen/Qwen3-8B --draft z-lab/Qwen3-8B-DFlash-b16 --output qwen3-8b
    dflash-convert Qwen3-8B --dry-run
    dflash-convert qwen3-8b --reverse --output Qwen3-8B

Exit codes: 0 done, 1 unexpected, 2 wrong usage, 3 source not usable, 4 verification failed, 5 output exists or cannot be
written, 130 interrupted.
"""

import logging
import os
import signal
import traceback
from collections.abc import Sequence
from dataclasses import fields

from dflash_convert.console import UNEXPECTED, Console
from dflash_convert.errors import OutputError, OutputExistsError, UsageError, VerificationError
from dflash_convert.parser import build_parser
from dflash_jax.cli.signals import interruption, interrupts, was_interrupted
from dflash_jax.cli.streams import leave_stdout, open_closed_streams
from dflash_jax.errors import CheckpointError, ConfigError, DFlashError, PairError, TokenizerError

USAGE, SOURCE, VERIFY, EXISTS, INTERRUPTED = 2, 3, 4, 5, 130
# What ends a conversion from outside: Ctrl-C, `kill` and a batch system, a terminal that is closed.
ENDING = (signal.SIGTERM, signal.SIGHUP)

# Most special first: a failed verification is a CheckpointError too.
_FAILURES: tuple[tuple[type[BaseException], int, str], ...] = (
    (UsageError, USAGE, "usage"),
    (OutputExistsError, EXISTS, "output exists"),
    (OutputError, EXISTS, "output not usable"),
    (VerificationError, VERIFY, "verification failed"),
    (CheckpointError, SOURCE, "source not usable"),
    (ConfigError, SOURCE, "source not usable"),
    (PairError, SOURCE, "source not usable"),
    (TokenizerError, SOURCE, "source not usable"),
    (Exception, UNEXPECTED, "unexpected"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    options = build_parser().parse_args(arguments)
    open_closed_streams()
    console = Console(quiet=options.quiet, as_json=options.json)
    try:
        with interrupts(*ENDING):
            from dflash_convert.conversion import Options, run

            _quieten()
            asked = {field.name: getattr(options, field.name) for field in fields(Options)}
            return console.finish(run(Options(**asked), console))
    except BrokenPipeError:
        # The reader of stdout has left.
        leave_stdout()
        return UNEXPECTED
    except (Exception, KeyboardInterrupt) as error:
        if was_interrupted(error):
            console.report |= {"status": "interrupted", "error": interruption(), "problems": []}
            console.tell(interruption())
            return console.finish(INTERRUPTED)
        code, label = next((code, label) for kind, code, label in _FAILURES if isinstance(error, kind))
        if code == UNEXPECTED and not isinstance(error, OSError | DFlashError):  # which name what is at fault
            traceback.print_exc()
        message = str(error) or type(error).__name__
        console.report |= {"status": label, "error": message, "problems": list(getattr(error, "problems", ()))}
        console.tell(f"{label}: {message}")
        return console.finish(code)


def _quieten() -> None:
    """Orbax logs each thread's traceback of a write that failed, asyncio every failure but the first. The error is told once."""
    import jax

    if "JAX_PLATFORMS" not in os.environ:
        # Bytes move on the host. Orbax would start JAX's GPU backend all the same, which takes most of the card's memory.
        jax.config.update("jax_platforms", "cpu")
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
