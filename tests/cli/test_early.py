"""What commands begin early: in the background, without the slow imports, and without a word about what fails."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dflash_jax.cli import startup as early


@pytest.fixture
def begun(monkeypatch):
    """What was asked for."""
    found: list[list[Path]] = []
    monkeypatch.setattr(early, "read_ahead", found.append)
    return found


def test_the_files_of_target_and_drafter_are_read_ahead(tmp_path, begun):
    for folder in ("", "draft", "other"):
        (tmp_path / folder).mkdir(exist_ok=True)
        for name in ("b.safetensors", "a.safetensors", "config.json"):
            (tmp_path / folder / name).write_bytes(b"x")
    for draft in (None, True, False, tmp_path / "other"):
        early.read_models(str(tmp_path), draft)
    own, beside, other = (
        [tmp_path / folder / f"{name}.safetensors" for name in "ab"] for folder in ("", "draft", "other")
    )
    assert begun == [own + beside, own + beside, own, own + other]


@pytest.mark.parametrize("models", [("Qwen/Qwen3-4B", None), (None, False), (None, None), ("/no/such/folder", True)])
def test_models_that_are_no_folders_have_nothing_to_read(begun, models):
    early.read_models(*models)
    assert begun == [[]]


def test_devices_that_fail_say_nothing_here(monkeypatch, capfd):
    def fails():
        raise RuntimeError("no device")

    monkeypatch.setattr("jax.local_devices", fails)
    before = set(threading.enumerate())
    early.start_device()
    for thread in set(threading.enumerate()) - before:
        thread.join()
    assert capfd.readouterr() == ("", "")


def test_nothing_slow_is_imported_before(tmp_path):
    code = """
import sys
import dflash_jax.cli.commands
from dflash_jax.cli.startup import read_models, start_device
read_models(None)
from dflash_jax.compile.cache_folders import enable_compilation_cache
enable_compilation_cache()
start_device()
print([name for name in ("flax", "orbax", "dflash_kernels", "dflash_jax.model") if name in sys.modules])
from jax._src import xla_bridge
import jax
jax.local_devices()
print(len(xla_bridge._backends) > 0)
"""
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "True"]


@pytest.mark.few
def test_orbax_is_imported_for_converted_folders_alone():
    code = "import sys; import dflash_jax.generation; print('orbax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
