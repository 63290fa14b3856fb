"""Standard streams that a shell has closed, or whose reader has left."""

import os
import sys


def open_closed_streams() -> None:
    """Python has None in place of a stream that the shell has closed (`>&-`); what is written there goes nowhere."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def leave_stdout() -> None:
    """Lets what is still to be written to stdout go nowhere if it cannot be written: Python would complain at exit once more."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
