"""A word at a terminal while nothing comes, and none where it came in time or nobody looks."""

import io
import time

import pytest

from dflash_jax.cli import progress as waiting
from dflash_jax.cli.commands import main


class Terminal(io.StringIO):
    def isatty(self):
        return True


def terminal(monkeypatch) -> Terminal:
    """In a test's body: between its fixtures and that, pytest puts its own stream in place."""
    stderr = Terminal()
    monkeypatch.setattr("sys.stderr", stderr)
    return stderr


def test_a_run_that_compiles_is_told(target, monkeypatch, capsys):
    monkeypatch.setattr(waiting, "SECONDS", 0.0)
    stderr = terminal(monkeypatch)
    assert main(["generate", "ab", "--model", str(target), "--max-tokens", "5"]) == 0
    assert stderr.getvalue() == waiting.FIRST_RUN + "\n"
    assert waiting.FIRST_RUN not in capsys.readouterr().out


@pytest.mark.parametrize("soon", [True, False])
def test_what_is_ready_in_time_is_not(monkeypatch, soon):
    monkeypatch.setattr(waiting, "SECONDS", 0.2)
    stderr = terminal(monkeypatch)
    with waiting.told_if_slow("slow") as ready:
        if soon:
            assert list(waiting.announced([1, 2], ready)) == [1, 2]
            time.sleep(0.4)
    time.sleep(0.0 if soon else 0.4)
    assert stderr.getvalue() == ""


def test_a_file_is_not_told(monkeypatch, capsys):
    monkeypatch.setattr(waiting, "SECONDS", 0.0)
    with waiting.told_if_slow("slow"):
        time.sleep(0.2)
    assert capsys.readouterr().err == ""
