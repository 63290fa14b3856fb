"""An output is whole or absent, whenever the process dies."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
from dflash_convert.write import OutputError, OutputExistsError, output_folder

from dflash_jax.checkpoints.converted import open_converted
from dflash_jax.checkpoints.huggingface import open_checkpoint

# Ctrl-C counts, although what runs in the background, as these tests may, ignores it.
HEARING = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)"
COMMAND = (sys.executable, "-c", f"{HEARING}; from dflash_convert.cli import main; sys.exit(main())")


def dead_pid() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        return process.pid


@contextmanager
def started(source, output, *options):
    """A conversion in a process of its own, once it has begun to write."""
    command = [*COMMAND, str(source), "--output", str(output), "--quiet", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not (output.parent / f"{output.name}.tmp-{process.pid}").exists():
            time.sleep(0.002)
        yield process


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
    for index in range(3 if overwrite else 7):
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(hf, number):
    source, output = hf.qwen3(hidden_size=256, vocab_size=8192, intermediate_size=1024), hf.root / "out"
    with started(source, output) as process:
        process.send_signal(number)
        _, errors = process.communicate()
    assert process.returncode == 130, errors
    assert "interrupted" in errors
    assert not list(hf.root.glob("out*"))


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
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(OutputExistsError), output_folder(link, overwrite=True):
        pass
