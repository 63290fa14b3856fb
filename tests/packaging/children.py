"""Processes that a test has started, and what they have said."""

import time
from pathlib import Path


def alive(pid):
    """Whether a process runs; one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(pid):
    """Whether a process ends within five seconds."""
    for _ in range(100):
        if not alive(pid):
            return True
        time.sleep(0.05)
    return False


def said(log):
    """Lines of a log, once there are two: the command and what it printed first."""
    for _ in range(200):
        if log.exists() and len(lines := log.read_text().splitlines()) > 1:
            return lines
        time.sleep(0.05)
    raise AssertionError(f"{log} stays empty")


def children(pid):
    """Numbers of the processes that a process has started itself."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = path.read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue
        if int(parent) == pid:
            found.append(int(path.parent.name))
    return found
