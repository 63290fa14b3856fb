"""Output of `dflash-convert`, and the exit code if it cannot be written."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dflash_jax.cli.streams import leave_stdout
from dflash_jax.cli.terminal import printable

UNEXPECTED = 1  # exit code


class Console:
    """Output of the command: text on stdout unless quiet, bars on stderr, or one JSON object on stdout at the end."""

    def __init__(self, *, quiet: bool, as_json: bool):
        self.quiet, self.as_json = quiet, as_json
        self.report: dict[str, Any] = {"status": "ok"}

    def say(self, line: str) -> None:
        if not self.quiet and not self.as_json:
            print(printable(line, sys.stdout))

    def tell(self, message: str) -> None:
        """On stderr, whatever else is shown."""
        print(printable(f"dflash-convert: {message}", sys.stderr), file=sys.stderr)

    @contextmanager
    def progress(self, phase: str, nbytes: int) -> Iterator[Callable[[int], Any]]:
        from dflash_jax.engine.progress import progress_bar

        with progress_bar(
            total=nbytes, desc=phase, unit="B", unit_scale=True, unit_divisor=1024, disable=self.quiet
        ) as bar:
            yield bar.update

    def finish(self, code: int) -> int:
        """The exit code, once all is written that goes to stdout."""
        try:
            if self.as_json:
                print(json.dumps(self.report | {"exit_code": code, "peak_rss_bytes": peak_rss()}))
            sys.stdout.flush()
        except BrokenPipeError:  # the reader has left
            code = UNEXPECTED
        except OSError as error:
            code = UNEXPECTED
            self.tell(f"stdout: {error}")
        leave_stdout()
        return code


def peak_rss() -> int:
    """The largest memory this process held, in bytes.

    Linux's own counter where it is there: the one of `getrusage` starts at the parent's size after a fork.
    """
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) << 10
    except (OSError, StopIteration):
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
