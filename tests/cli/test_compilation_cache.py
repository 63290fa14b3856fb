"""The CLI's caches of compiled programs: where they are, who may write to them, and that a second process compiles nothing."""

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from dflash_jax.cli.main import main
from dflash_jax.compile.cache_folders import cache_folder, enable_compilation_cache, refuse_shared
from dflash_jax.compile.programs import Programs


@pytest.fixture
def private(tmp_path, monkeypatch):
    """A cache root of our own, and JAX's settings as they were afterwards."""
    names = ("compilation_cache_dir", "persistent_cache_min_compile_time_secs", "persistent_cache_min_entry_size_bytes")
    before = {f"jax_{name}": getattr(jax.config, f"jax_{name}") for name in names}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(Programs, "stored", None)
    jax.config.update("jax_compilation_cache_dir", None)
    yield tmp_path / "cache"
    for name, value in before.items():
        jax.config.update(name, value)


def test_folders_are_made_private(private):
    folder = enable_compilation_cache()
    assert folder == private / "dflash_jax" / "xla"
    assert jax.config.jax_compilation_cache_dir == str(folder)
    assert Programs.stored is not None
    assert Programs.stored.folder == private / "dflash_jax" / "programs"
    assert [stat.S_IMODE(place.stat().st_mode) for place in (folder, Programs.stored.folder)] == [0o700] * 2


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
@pytest.mark.parametrize("name", ["xla", "programs"])
def test_folder_that_others_may_write_to_is_refused(private, name, mode):
    folder = cache_folder(name)
    folder.mkdir(parents=True)
    folder.chmod(mode)
    with pytest.raises(PermissionError, match="chmod go-w"):
        enable_compilation_cache()
    assert jax.config.jax_compilation_cache_dir is None
    assert Programs.stored is None


def test_jax_can_turn_both_off(private):
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        enable_compilation_cache()
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
    assert Programs.stored is None
    assert not private.exists()


def test_parent_that_others_may_write_to_is_refused_unless_sticky(private):
    folder = cache_folder()
    folder.mkdir(parents=True, mode=0o700)
    folder.parent.chmod(0o777)
    with pytest.raises(PermissionError, match=str(folder.parent)):
        refuse_shared(folder)
    folder.parent.chmod(0o1777)
    refuse_shared(folder)


def test_folder_of_another_user_is_refused(private, monkeypatch):
    folder = cache_folder()
    folder.mkdir(parents=True, mode=0o700)
    refuse_shared(folder)
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(PermissionError, match=r"belongs to user .*, not to you"):
        refuse_shared(folder)


def test_link_is_judged_by_where_it_leads(private, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    cache_folder().parent.mkdir(parents=True)
    cache_folder().symlink_to(shared)
    with pytest.raises(PermissionError):
        enable_compilation_cache()


def test_settings_of_jax_come_first(private, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "named"))
    assert enable_compilation_cache() == tmp_path / "named"
    assert not (private / "dflash_jax" / "xla").exists()
    assert not (tmp_path / "named").exists()


def test_relative_xdg_folder_is_ignored(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == Path.home() / ".cache" / "dflash_jax" / "xla"


def test_second_process_finds_the_programs_and_writes_the_same_text(target, tmp_path):
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("JAX_COMPILATION", "JAX_PERSISTENT"))
    }
    environment["XDG_CACHE_HOME"] = str(tmp_path)
    run = [
        sys.executable,
        "-m",
        "dflash_jax.cli.main",
        "generate",
        "ab",
        "--model",
        str(target),
        "--max-tokens",
        "24",
        "--stats",
    ]
    entries, texts, waits = [], [], []
    for _ in range(2):
        done = subprocess.run(run, env=environment, check=True, capture_output=True, text=True)
        # A program written again would be another file under its name.
        entries.append({(path.name, path.stat().st_ino) for path in (tmp_path / "dflash_jax" / "programs").iterdir()})
        texts.append(done.stdout)
        assert "note:" not in done.stderr
        waits += [float(wait) for wait in re.findall(r"compilation ([0-9.]+) s apart", done.stderr)]
    assert len(entries[0]) == 3  # prefill, first token, cycles
    assert entries[1] == entries[0]
    assert texts[1] == texts[0]
    assert waits[1] < waits[0]


def test_unusable_folder_is_a_note_and_no_error(target, tmp_path):
    (tmp_path / "dflash_jax").write_text("a file in the way")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "JAX_COMPILATION_CACHE_DIR": ""}
    run = [sys.executable, "-m", "dflash_jax.cli.main", "generate", "ab", "--model", str(target), "--max-tokens", "9"]
    done = subprocess.run(run, env=environment, check=True, capture_output=True, text=True)
    assert done.stderr.startswith("note: compiled programs are not kept: ")


def test_a_user_without_a_home_is_a_note(target, monkeypatch, capsys):
    """As in a container that runs with a number nobody has."""

    def nobody(_):
        raise KeyError("uid not found")

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    assert main(["generate", "ab", "--model", str(target), "--max-tokens", "2"]) == 0
    assert "note: compiled programs are not kept: user " in capsys.readouterr().err
    assert main(["generate", "ab", "--model", "~nobody-of-this-name/model", "--no-draft"]) == 3
