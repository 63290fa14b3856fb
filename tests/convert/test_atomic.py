"""An output is whole or absent, whenever the process dies."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from dflash_convert import write
from dflash_convert.errors import OutputError, OutputExistsError
from dflash_convert.write import output_folder

from dflash_jax.checkpoints.converted import open_converted
from dflash_jax.checkpoints.huggingface import open_checkpoint

# Signals count as at a terminal, although what runs in the background or under `nohup`, as these tests may, ignores some.
PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.{hangup})
from dflash_convert.cli import main
sys.exit(main())
"""


def dead_pid() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        return process.pid


@contextmanager
def started(source, output, *options, hangup="SIG_DFL"):
    """A conversion in a process of its own, once it has begun to write."""
    program = [sys.executable, "-c", PROGRAM.format(hangup=hangup)]
    command = [*program, str(source), "--output", str(output), "--quiet", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not (output.parent / f"{output.name}.tmp-{process.pid}").exists():
            time.sleep(0.002)
        yield process


@pytest.mark.few("True")
@pytest.mark.parametrize("overwrite", [False, True])
def test_killed_at_any_moment(hf, bits, overwrite):
    """SIGKILL at random moments of the writing; what is there opens, and a rerun succeeds and leaves nothing else behind."""
    source = hf.qwen3(hidden_size=256, vocab_size=4096, intermediate_size=1024, shards=2)
    expected, output = {name: bits(array) for name, array in open_checkpoint(source).load().items()}, hf.root / "out"
    with started(source, output) as process:
        began = time.monotonic()
        assert process.wait() == 0
        duration, clock = time.monotonic() - began, random.Random(7)
    killed = 0
    for index in range(2 if overwrite else 5):
        if not overwrite and output.exists():
            shutil.rmtree(output)
        with started(source, output, *(["--overwrite"] if overwrite else [])) as process:
            # Half of them anywhere, half around the moment of the rename.
            time.sleep(duration * clock.uniform(0.0, 1.0) if index % 2 else duration * clock.uniform(0.8, 1.05))
            process.kill()
            killed += process.wait() == -signal.SIGKILL
        if output.exists():
            opened = open_converted(output, hashes=True)
            assert {name: bits(array) for name, array in opened.load().items()} == expected
    assert killed
    assert hf.convert(source, "--output", output, "--overwrite") == 0
    assert sorted(path.name for path in hf.root.iterdir()) == ["out", "target"]
    assert {name: bits(array) for name, array in open_converted(output, hashes=True).load().items()} == expected


@pytest.mark.few("15-*")
@pytest.mark.parametrize(
    ("number", "told"),
    [
        (signal.SIGINT, "dflash-convert: interrupted\n"),
        (signal.SIGTERM, "dflash-convert: interrupted by SIGTERM\n"),
        (signal.SIGHUP, "dflash-convert: interrupted by SIGHUP\n"),
    ],
)
def test_interrupted(hf, number, told):
    """One line says so, and no traceback."""
    source, output = hf.qwen3(hidden_size=256, vocab_size=8192, intermediate_size=1024), hf.root / "out"
    with started(source, output) as process:
        process.send_signal(number)
        _, errors = process.communicate()
    assert process.returncode == 130, errors
    assert errors == told
    assert not list(hf.root.glob("out*"))


@pytest.mark.few
def test_a_hangup_that_is_ignored_ends_nothing(hf):
    """As `nohup` has it."""
    source, output = hf.qwen3(hidden_size=256, vocab_size=8192, intermediate_size=1024), hf.root / "out"
    with started(source, output, hangup="SIG_IGN") as process:
        process.send_signal(signal.SIGHUP)
        assert process.wait() == 0
    assert open_converted(output)


EXTRA = {"old": "big", "new": "part"}


def writing(output, steps, at, send):
    """Replaces a folder, and sends a signal as the step with that number of what the module does begins."""

    def trace(frame, event, _):
        if frame.f_code.co_filename != write.__file__:
            return None
        if event == "line":
            steps.append(frame.f_lineno)
            if len(steps) == at:
                send()
        return trace

    sys.settrace(trace)
    try:
        with output_folder(output, overwrite=True) as temporary:
            (temporary / "conversion.json").write_text("new")
            (temporary / "part").mkdir()
    finally:
        sys.settrace(None)


@pytest.mark.parametrize("there", [True, False])
def test_an_interrupt_at_any_step(tmp_path, monkeypatch, there):
    """What lay there, or the new folder, and nothing beside it."""
    monkeypatch.setattr(write, "_BETWEEN_LOOKS_S", 0.0)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    results = set()

    def run(place, at):
        output = place / "new" / "out"
        place.mkdir()
        if there:
            output.mkdir(parents=True)
            (output / "conversion.json").write_text("old")
            (output / "big").write_text("old")
        steps = []
        try:
            writing(output, steps, at, lambda: signal.raise_signal(signal.SIGINT))
        except KeyboardInterrupt:
            if output.exists():
                content = (output / "conversion.json").read_text()
                assert {path.name for path in output.iterdir()} == {"conversion.json", EXTRA[content]}, at
                assert [path.name for path in output.parent.iterdir()] == ["out"], at
            else:
                content = "none"
                assert not list(place.iterdir()), at
            results.add(content)
        return len(steps)

    try:
        for at in range(1, run(tmp_path / "all", 0) + 1):
            run(tmp_path / str(at), at)
    finally:
        signal.signal(signal.SIGINT, before)
    assert results == {"old" if there else "none", "new"}


def test_an_interrupt_while_what_was_replaced_is_removed(tmp_path, monkeypatch):
    """Raised by what removes it, as no signal would be."""
    output, remove = tmp_path / "out", shutil.rmtree
    output.mkdir()
    (output / "conversion.json").write_text("old")
    raised = []

    def interrupted(path, *rest, **options):
        if not raised:
            raised.append(path)
            raise KeyboardInterrupt
        remove(path, *rest, **options)

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt), output_folder(output, overwrite=True) as temporary:
        (temporary / "conversion.json").write_text("new")
    assert raised
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (output / "conversion.json").read_text() == "new"


def test_a_disk_that_does_not_answer_leaves_one_folder(tmp_path, monkeypatch):
    output = tmp_path / "out"
    output.mkdir()
    (output / "conversion.json").write_text("old")

    def fails(path):
        if path == tmp_path:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(write, "_sync_path", fails)
    with pytest.raises(OSError, match="Input/output"), output_folder(output, overwrite=True) as temporary:
        (temporary / "conversion.json").write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_folders_made_for_nothing_go_again(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(ZeroDivisionError), output_folder(tmp_path / "a" / "b" / "c" / "out"):
        raise ZeroDivisionError
    assert list(tmp_path.rglob("*")) == [tmp_path / "a"]


def test_an_interrupt_that_comes_with_the_folder(tmp_path, monkeypatch):
    """The first thing after the folder is there: nothing of it is left."""

    def interrupted(folder):
        assert folder.exists()
        raise KeyboardInterrupt

    monkeypatch.setattr("dflash_convert.write._lock", interrupted)
    with pytest.raises(KeyboardInterrupt), output_folder(tmp_path / "out"):
        pytest.fail("nothing is written")
    assert not list(tmp_path.iterdir())


def test_a_folder_of_somebody_elses_stays(tmp_path, monkeypatch):
    """Of another machine's process with this number, which writes to the same disk."""
    theirs = tmp_path / f"out.tmp-{os.getpid()}"
    monkeypatch.setattr("dflash_convert.write._clean", lambda output: (theirs.mkdir(), (theirs / "part").touch()))
    with pytest.raises(OutputError, match="cannot be written"), output_folder(tmp_path / "out"):
        pytest.fail("nothing is written")
    assert (theirs / "part").exists()


def test_leftovers_of_dead_processes_are_removed_and_others_are_not(hf):
    source, output = hf.qwen3(), hf.root / "out"
    stale, running = hf.root / f"out.tmp-{dead_pid()}", hf.root / f"out.tmp-{os.getppid()}"
    foreign = [hf.root / name for name in ("out.tmp-mine", "out.tmp-", "other.tmp-1", "out.tmp-1.txt")]
    for folder in (stale, running, *foreign):
        folder.mkdir()
        (folder / "conversion.json").write_text(json.dumps({"format": 1}))
    assert hf.convert(source, "--output", output) == 0
    assert not stale.exists()
    assert all(folder.exists() for folder in (running, *foreign))
    assert open_converted(output)


def test_a_replaced_folder_comes_back_when_the_replacing_process_died(hf):
    source, output = hf.qwen3(), hf.root / "out"
    assert hf.convert(source, "--output", output) == 0
    output.rename(hf.root / f"out.tmp-{dead_pid()}.old")
    assert hf.convert(source, "--output", output) == 5
    assert open_converted(output, hashes=True)
    assert sorted(path.name for path in hf.root.iterdir()) == ["out", "target"]


def test_a_failed_rename_puts_the_replaced_folder_back(tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    (output / "conversion.json").write_text("old")
    with pytest.raises(FileNotFoundError), output_folder(output, overwrite=True) as temporary:
        temporary.rename(tmp_path / "taken away")
    assert (output / "conversion.json").read_text() == "old"


def test_an_output_that_appears_meanwhile_is_not_replaced(tmp_path):
    output = tmp_path / "out"

    def write_while_another_does():
        with output_folder(output):
            output.mkdir()
            (output / "precious.txt").write_text("mine")

    with pytest.raises(OutputExistsError):
        write_while_another_does()
    assert (output / "precious.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_parents_are_made_and_links_are_not_followed(tmp_path):
    with output_folder(tmp_path / "a" / "b" / "out") as temporary:
        (temporary / "file").write_text("x")
    assert (tmp_path / "a" / "b" / "out" / "file").read_text() == "x"
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["out"]
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(OutputExistsError), output_folder(link, overwrite=True):
        pass


def test_an_output_has_a_name_of_its_own(tmp_path, monkeypatch):
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    for name in (".", "..", "/"):
        with pytest.raises(OutputExistsError), output_folder(Path(name), overwrite=True):
            pytest.fail("nothing is written")
    (tmp_path / "conversion.json").write_text("old")
    with output_folder(Path(".."), overwrite=True) as temporary:
        assert temporary.parent == tmp_path.parent
        (temporary / "conversion.json").write_text("new")
    assert (tmp_path / "conversion.json").read_text() == "new"


def test_names_that_no_file_can_have(tmp_path):
    (tmp_path / "file").touch()
    for output in (tmp_path / ("x" * 300), tmp_path / ("x" * 252), tmp_path / "file" / "out"):
        with pytest.raises(OutputError, match="cannot be written"), output_folder(output):
            pytest.fail("nothing is written")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
