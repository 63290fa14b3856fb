"""What both commands print when the place it goes to is a terminal, full, gone, or of another encoding."""

import io
import json
import os
import shutil
import subprocess
import sys

import pytest

from dflash_jax.cli import terminal
from dflash_jax.cli.commands import main

MODULES = {"dflash-jax": "dflash_jax.cli.commands", "dflash-convert": "dflash_convert.command"}
# As Python has it for users: the end of a text waits for the end of the process.
BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
ESCAPE = "\x1b]0;owned\x07\x9b2J"
CONTROLS = [*range(9), *range(11, 32), *range(127, 160)]


def command(line: str, **places: object) -> list[str]:
    name, *arguments = line.format(**places).split()
    return [sys.executable, "-m", MODULES[name], *arguments]


@pytest.mark.few("dflash-convert {target} --dry-run-*", "dflash-convert {target} --output*", "dflash-jax --version*")
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("dflash-jax --version", "error: [Errno 28]"),
        ("dflash-jax info {target}", "error: [Errno 28]"),
        ("dflash-jax bench --model {target} --json - --input-length 4 --output-length 4 --requests 1", "error: [Errno 28]"),
        ("dflash-convert {target} --dry-run", "dflash-convert: stdout: [Errno 28]"),
        ("dflash-convert {target} --dry-run --json", "dflash-convert: stdout: [Errno 28]"),
        ("dflash-convert {target} --output {out} --quiet --json", "dflash-convert: stdout: [Errno 28]"),
        ("dflash-convert /no/such --dry-run --json", "dflash-convert: stdout: [Errno 28]"),
    ],
)  # fmt: skip
def test_what_a_full_disk_does_not_take_is_told(line, said, target, tmp_path):
    """It had ended in a traceback, in Python's "Exception ignored", or, a plan that was lost, in nothing and code 0."""
    with open("/dev/full", "w") as full:
        run = command(line, target=target, out=tmp_path / "out")
        done = subprocess.run(run, stdout=full, stderr=subprocess.PIPE, text=True, env=BUFFERED, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"{said} No space left on device"
    assert not any(word in done.stderr for word in ("Traceback", "ignored"))
    assert (tmp_path / "out" / "conversion.json").exists() == ("--output " in line)  # only the report of it is lost


@pytest.mark.few
@pytest.mark.parametrize("line", ["dflash-jax info {target}", "dflash-convert {target} --dry-run --json"])
def test_a_reader_that_left_before_anything_was_written(line, target):
    reading, writing = os.pipe()
    os.close(reading)
    run = command(line, target=target)
    done = subprocess.run(run, stdout=writing, stderr=subprocess.PIPE, text=True, env=BUFFERED, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_json_reads_back_in_any_encoding(target, monkeypatch, capsys):
    """Where stdout is Latin-1, or ASCII, the characters of other scripts had become question marks."""
    options = ["--model", str(target), "--max-tokens", "5", "--json"]
    for encoding, raw in (("utf-8", True), ("latin-1", False), ("ascii", False)):
        written = io.BytesIO()
        monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding=encoding))
        assert main(["generate", "漢\x9b\u2028字 é", *options]) == 0
        text = written.getvalue().decode(encoding)
        assert ("漢" in text) == raw
        assert len(text.splitlines()) == 1
        assert "\x9b" not in text
        assert json.loads(text)["prompt"] == "漢\x9b\u2028字 é"


def test_a_terminal_obeys_no_text_of_a_demonstration(target, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr("dflash_jax.text.detokenizer.TextStream.take", lambda *_, **__: ESCAPE)
    assert main(["demo", "ab", "--model", str(target), "--max-tokens", "9"]) == 0
    out = capsys.readouterr().out
    assert "owned" in out
    assert not set(map(ord, out)) & set(CONTROLS)


def test_a_terminal_obeys_no_folder(target, monkeypatch, tmp_path, capsys):
    """Neither what a chat template says when it refuses, nor the names of its files."""
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(f"sys.{name}.isatty", lambda: True)
    folder = shutil.copytree(target, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(f"{{{{ raise_exception('{ESCAPE}') }}}}")
    (folder / f"{ESCAPE}.py").touch()
    assert main(["generate", "ab", "--chat", "--model", str(folder)]) == 4
    assert main(["info", str(folder)]) == 0
    for line in ("dflash-convert", "dflash-convert --dry-run"):
        options = line.split()[1:] or ["--output", str(tmp_path / "out")]
        convert(str(folder), *options)
    told = "".join(capsys.readouterr())
    assert told.count("owned") >= 4
    assert not set(map(ord, told)) & set(CONTROLS) - {ord("\r")}


def test_what_is_no_terminal_gets_the_text_as_it_is(capsys):
    assert terminal.printable(ESCAPE, sys.stdout) == ESCAPE
    terminal.note("a")
    assert capsys.readouterr().err == "note: a\n"


def convert(*arguments: str) -> None:
    from dflash_convert.cli import main as converter

    assert converter(arguments) == 0
