"""Mistakes that newcomers make: what the commands answer, that it is short, and that nothing is left behind."""

import errno
import io
import json
import os
import shlex
import shutil
import subprocess
import sys

import jax
import pytest
from dflash_convert import cli as converter
from dflash_convert import write
from dflash_convert.write import OutputError, output_folder

import dflash_jax as dj
from dflash_jax.cli.commands import main
from dflash_jax.compile.device import local_device

GENERATE = [sys.executable, "-m", "dflash_jax.cli.commands", "generate", "ab", "--max-tokens", "5", "--model"]
CONVERT = [sys.executable, "-c", "import sys; from dflash_convert.command import main; sys.exit(main())"]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if think is defined %}{{ think }}{% endif %}"


@pytest.fixture
def alone(target, tmp_path):
    """The target's folder without the drafter in it."""
    return shutil.copytree(target, tmp_path / "Qwen3-4B", ignore=shutil.ignore_patterns("draft"))


def test_a_target_that_has_no_drafter_says_so_unless_none_is_wanted(alone, target, capsys):
    """The one thing this package is for may not be left out in silence."""
    command = ["generate", "ab", "--max-tokens", "5", "--model", str(alone)]
    assert main(command) == 0
    err = capsys.readouterr().err
    assert err.startswith("note: no drafter: none lies in ")
    assert "z-lab/Qwen3-4B-DFlash-b16 was trained for a model of this name" in err
    assert main(["info", str(alone)]) == 0
    assert "\nnote      no drafter: " in capsys.readouterr().out
    for options in (["--no-draft"], ["--draft", str(target / "draft")]):
        assert main([*command, *options]) == 0
        assert capsys.readouterr().err == ""


def test_options_of_the_chat_template(alone, target, capsys):
    """Values are JSON where they are some; a template sees them by their names."""
    (alone / "chat_template.jinja").write_text(TEMPLATE)
    command = ["generate", "ab", "--model", str(alone), "--draft", str(target / "draft"), "--max-tokens", "5", "--json"]
    found = {}
    for said in ("think=false", "think=word", "think=3"):
        assert main([*command, "--chat", "--chat-option", said]) == 0
        found[said] = bytes(json.loads(capsys.readouterr().out)["prompt_token_ids"])
    model = dj.load(alone, draft=target / "draft")
    assert model.tokenizer is not None
    expected = [bytes(model.tokenizer.encode(text)) for text in ("abFalse", "abword", "ab3")]
    assert list(found.values()) == expected


@pytest.mark.parametrize("text", ["enable_thinking", "=false", "a b=1"])
def test_options_of_the_chat_template_are_names_and_values(text, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["generate", "x", "--chat", "--chat-option", text])
    assert stop.value.code == 2
    assert "expected NAME=VALUE" in capsys.readouterr().err


@pytest.mark.few("command0")
@pytest.mark.parametrize("command", [[*GENERATE], [sys.executable, "-m", "dflash_jax.cli.commands", "info"], CONVERT])
def test_a_device_that_is_not_there(command, target, tmp_path):
    """As a shell has it that was set up for another machine."""
    extra = ["--output", str(tmp_path / "out")] if command is CONVERT else []
    env = os.environ | {"JAX_PLATFORMS": "no_such_device"}
    done = subprocess.run([*command, str(target), *extra], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    for part in ("JAX starts no device: ", "JAX_PLATFORMS=no_such_device", "set JAX_PLATFORMS=cpu"):
        assert part in done.stderr
    assert os.listdir(tmp_path) == []


def test_what_jax_says_without_words_is_named_too(monkeypatch):
    """For a CUDA device on a machine without one it fails an assertion."""

    def fail():
        raise AssertionError

    monkeypatch.setattr(jax, "local_devices", fail)
    with pytest.raises(dj.DeviceError, match="no such device was found"):
        local_device()


INTERRUPTED_IMPORT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "jaxlib":
            sys.meta_path.remove(Finder)
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                if {swallowed}:
                    raise ImportError("Encountered an error while initializing the extension.")
                raise
sys.meta_path.insert(0, Finder)
from {module} import main
sys.exit(main())
"""


@pytest.mark.few("dflash_convert.command-False")
@pytest.mark.parametrize("swallowed", [False, True])
@pytest.mark.parametrize("module", ["dflash_jax.cli.commands", "dflash_convert.command"])
def test_interrupted_while_jax_is_imported(module, swallowed, target, tmp_path):
    """The first second or two of every command; extension modules make an ImportError of it."""
    code = INTERRUPTED_IMPORT.format(module=module, swallowed=swallowed)
    arguments = ["generate", "x"] if "cli" in module else [str(target), "--output", str(tmp_path / "out")]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.split()[-1], "Traceback" in done.stderr) == (130, "interrupted", False)


def test_an_import_that_fails_by_itself_is_not_called_an_interrupt(monkeypatch):
    monkeypatch.setattr("dflash_jax.cli.commands.COMMANDS", {"info": lambda args: __import__("no_such_module")})
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        main(["info"])


@pytest.mark.few
def test_reader_of_a_plan_that_leaves(target):
    """As `| head -1` does."""
    process = subprocess.Popen([*CONVERT, str(target), "--dry-run"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert (process.wait(timeout=60), errors) == (1, b"")


def test_a_disk_that_fills_up_while_weights_are_written(target, tmp_path):
    """A limit of the process stands for the disk's. Orbax would log a hundred lines for it."""
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000)); {CONVERT[2]}"
    command = [sys.executable, "-c", limited, str(target), "--output", str(tmp_path / "out"), "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == converter.EXISTS
    assert done.stderr == (
        f"dflash-convert: output not usable: {tmp_path}/out cannot be written (File too large): nothing is left of it; make room "
        "or name another output\n"
    )
    assert os.listdir(tmp_path) == []


def test_a_disk_that_fills_up_while_other_files_are_written(tmp_path):
    def fill(number):
        with output_folder(tmp_path / "out"):
            raise OSError(number, os.strerror(number))

    with pytest.raises(OutputError, match="No space left on device"):
        fill(errno.ENOSPC)
    with pytest.raises(PermissionError):  # anything else stays what it is
        fill(errno.EACCES)
    assert os.listdir(tmp_path) == []


def test_threads_that_still_write_leave_nothing_behind(tmp_path):
    """Some of Orbax's writes are under way when one fails; they make the folders that they miss, whenever they get to it."""
    named = []

    def fail():
        with output_folder(tmp_path / "out") as folder, write._by_descriptor(folder) as name:
            named.append(name / "params")
            named[0].mkdir()
            raise OSError(errno.EIO, "I/O")

    with pytest.raises(OSError, match="I/O"):
        fail()
    with pytest.raises(FileNotFoundError):
        named[0].mkdir(parents=True)
    assert os.listdir(tmp_path) == []


def test_errors_of_orbax_that_are_not_the_systems_stay_what_they_are():
    def fail(text):
        with write._system_errors():
            raise ValueError(text)

    with pytest.raises(OSError, match="No space left") as caught:
        fail("OUT_OF_RANGE: Failed to write [os_error_code='28']")
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(ValueError, match="something else"):
        fail("something else")


@pytest.mark.few("<&- >&- 2>&-*")
@pytest.mark.parametrize(
    ("redirection", "out"), [("<&-", True), ("2>&-", True), (">&-", False), ("<&- >&- 2>&-", False)]
)
def test_streams_that_the_shell_has_closed(redirection, out, target):
    command = " ".join([shlex.join([*GENERATE, str(target)]), "--stats", redirection])
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert (done.returncode, bool(done.stdout)) == (0, out), done.stderr
    assert ("tokens per cycle" in done.stderr) == ("2>" not in redirection)


def test_a_prompt_from_a_terminal_is_asked_for(target, capsys, monkeypatch):
    """Without a word the command would seem to hang."""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    command = ["generate", "-", "--model", str(target), "--max-tokens", "5"]
    monkeypatch.setattr("sys.stdin", Terminal("ab\n"))
    assert main(command) == 0
    assert "note: the prompt is read from the terminal; Ctrl-D" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO("ab\n"))
    assert main(command) == 0
    assert capsys.readouterr().err == ""
