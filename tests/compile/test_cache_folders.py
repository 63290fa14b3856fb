"""The CLI's caches of compiled programs: where they are, who may write to them, and that a second process compiles nothing."""

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from dflash_jax.cli.commands import main
from dflash_jax.compile.cache_folders import cache_folder, enable_compilation_cache, open_private
from dflash_jax.compile.programs import Programs

OTHER = 12345  # a user whom nobody is


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
    """With advice that leaves nothing of theirs there."""
    folder = cache_folder(name)
    folder.mkdir(parents=True)
    folder.chmod(mode)
    with pytest.raises(PermissionError, match=f"rm -r {folder}"):
        enable_compilation_cache()
    assert jax.config.jax_compilation_cache_dir is None
    assert Programs.stored is None


def test_folders_on_the_way_are_private_whatever_the_umask_is(private):
    before = os.umask(0)
    try:
        enable_compilation_cache()
    finally:
        os.umask(before)
    assert [stat.S_IMODE(place.stat().st_mode) for place in (private, private / "dflash_jax")] == [0o700] * 2


def test_a_folder_that_others_could_read_becomes_private(private):
    cache_folder().mkdir(parents=True)
    cache_folder().chmod(0o755)
    enable_compilation_cache()
    assert stat.S_IMODE(cache_folder().stat().st_mode) == 0o700


def test_jax_can_turn_both_off(private):
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        enable_compilation_cache()
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
    assert Programs.stored is None
    assert not private.exists()


def opened(folder):
    path, descriptor = open_private(folder)
    os.close(descriptor)
    return path


def test_parent_that_others_may_write_to_is_refused_unless_sticky(private):
    folder = cache_folder()
    folder.mkdir(parents=True, mode=0o700)
    folder.parent.chmod(0o777)
    with pytest.raises(PermissionError, match=f"chmod go-w {folder.parent}, or"):
        opened(folder)
    folder.parent.chmod(0o1777)
    assert opened(folder) == folder


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o1777])
@pytest.mark.parametrize("levels", [0, 1, 2])
def test_what_another_user_owns_on_the_way_is_refused(private, belongs, levels, mode):
    """Who owns a folder can put another one in the place of what it holds, sticky or not."""
    folder = cache_folder()
    folder.mkdir(parents=True, mode=0o700)
    assert opened(folder) == folder
    place = [folder, *folder.parents][levels]
    place.chmod(mode)
    belongs(place, OTHER)
    with pytest.raises(PermissionError, match=f"{place} belongs to user {OTHER}, not to you"):
        opened(folder)


def test_root_may_own_what_is_on_the_way_but_not_the_folder(private, monkeypatch, belongs):
    folder = cache_folder()
    folder.mkdir(parents=True, mode=0o700)
    for place in (folder, *folder.parents):
        if place.is_relative_to(private):
            belongs(place, 0)
    monkeypatch.setattr(os, "getuid", lambda: OTHER)
    with pytest.raises(PermissionError, match=f"{folder} belongs to user 0, not to you"):
        opened(folder)
    belongs(folder, OTHER)
    assert opened(folder) == folder


@pytest.mark.parametrize("place", ["entry", "inner/entry", "inner"])
def test_jax_s_folder_with_something_of_another_user_is_refused(private, belongs, place):
    """JAX itself opens entries by their names and asks for no owner."""
    (cache_folder() / "inner").mkdir(parents=True)
    (cache_folder() / "entry").write_text("code")
    (cache_folder() / "inner" / "entry").write_text("code")
    enable_compilation_cache()
    jax.config.update("jax_compilation_cache_dir", None)
    belongs(cache_folder() / place, OTHER)
    with pytest.raises(
        PermissionError, match=f"{cache_folder() / place} belongs to user {OTHER}, not to you: remove it"
    ):
        enable_compilation_cache()
    assert jax.config.jax_compilation_cache_dir is None


def test_jax_s_folder_with_a_link_is_refused(private, tmp_path):
    cache_folder().mkdir(parents=True)
    (cache_folder() / "entry").symlink_to(tmp_path / "anything")
    with pytest.raises(PermissionError, match="entry is a link: remove it"):
        enable_compilation_cache()


def test_a_link_is_resolved_once(private, tmp_path, monkeypatch):
    """Who turns it afterwards, or between the look at it and the opening, gives nobody another folder."""
    own, other = tmp_path / "own", tmp_path / "other"
    own.mkdir()
    other.mkdir()
    private.symlink_to(own)
    folder = enable_compilation_cache()
    assert folder == own / "dflash_jax" / "xla"
    assert jax.config.jax_compilation_cache_dir == str(folder)
    store = Programs.stored
    assert store is not None
    private.unlink()
    private.symlink_to(other)
    store._write("a.program", b"content")
    assert (own / "dflash_jax" / "programs" / "a.program").exists()
    # A folder in the middle becomes a link to somewhere else after all links were resolved.
    whole = os.path.realpath

    def resolved_then_turned(path):
        found = whole(path)
        (own / "dflash_jax").rename(own / "aside")
        (own / "dflash_jax").symlink_to(other)
        return found

    monkeypatch.setattr(os.path, "realpath", resolved_then_turned)
    with pytest.raises(OSError, match=r"Not a directory|Too many levels"):
        open_private(own / "dflash_jax" / "xla")


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
        "dflash_jax.cli.commands",
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


@pytest.mark.few
def test_unusable_folder_is_a_note_and_no_error(target, tmp_path):
    (tmp_path / "dflash_jax").write_text("a file in the way")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "JAX_COMPILATION_CACHE_DIR": ""}
    run = [
        sys.executable,
        "-m",
        "dflash_jax.cli.commands",
        "generate",
        "ab",
        "--model",
        str(target),
        "--max-tokens",
        "9",
    ]
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
