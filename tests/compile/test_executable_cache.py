"""Programs on disk: the same results without tracing, a key for all that matters, and what goes wrong is a notice, not an error."""

import errno
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import stat
import time
from importlib import resources
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import compilation_cache, config

import dflash_jax.models  # noqa: F401  # before what it imports, also in processes that read this module alone
from dflash_jax.cache import Pages
from dflash_jax.compile import executable_cache as stored_programs
from dflash_jax.compile import jax_patches
from dflash_jax.compile.executable_cache import MAGIC, SUFFIX, StoredPrograms
from dflash_jax.compile.programs import Programs
from dflash_jax.execution import switches

TRACED: list[str] = []


def step(scale, weights, pages, index, flag):
    """One array of the weights is not read, the pages are donated."""
    TRACED.append("step")
    key = pages.k[0].at[index].add(jnp.where(flag, weights["read"][0] * scale, 0))
    return Pages((key,), pages.v), {"sum": weights["read"].sum() + 1.5, "none": None}


def arguments(size=8):
    weights = {"read": jnp.arange(4.0), "unread": jnp.ones(3)}
    return weights | {"read": weights["read"] + 1}, Pages((jnp.zeros(size),), ()), np.int32(3), np.bool_(True)


@pytest.fixture
def notices():
    return []


@pytest.fixture
def folder(tmp_path):
    TRACED.clear()
    # What the other tests share would give programs that cannot be kept.
    with config.enable_compilation_cache(False):
        compilation_cache.reset_cache()
        yield tmp_path
    compilation_cache.reset_cache()


@pytest.fixture
def store(folder, notices, monkeypatch):
    kept = StoredPrograms(folder, notices.append)
    monkeypatch.setattr(Programs, "stored", kept)
    return kept


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{SUFFIX}"))


def run(scale=2.0, args=None):
    """The step by an engine that has no programs of its own yet."""
    pages, out = Programs().call(step, (scale,), (1,), *(arguments() if args is None else args))
    return pages.k[0].tolist(), float(out["sum"])


EXPECTED = ([0, 0, 0, 2, 0, 0, 0, 0], 11.5)


def test_a_second_process_neither_traces_nor_compiles(store, notices):
    assert run() == EXPECTED
    assert TRACED == ["step"]
    [path] = entries(store.folder)
    assert path.stat().st_mode & 0o777 == 0o600
    args = arguments()
    assert run(args=args) == EXPECTED
    assert TRACED == ["step"]
    assert args[1].k[0].is_deleted()
    assert not args[0]["read"].is_deleted()
    assert notices == []


def test_what_was_compiled_for_shapes_serves_arrays(store):
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arguments())
    for _ in range(2):
        programs = Programs()
        programs.prepare(step, (2.0,), (1,), *shapes)
        pages, out = programs.call(step, (2.0,), (1,), *arguments())
        assert (pages.k[0].tolist(), float(out["sum"])) == EXPECTED
    assert TRACED == ["step"]


def test_a_restored_program_refuses_other_shapes(store):
    run()
    programs = Programs()
    program = programs.prepare(step, (2.0,), (1,), *arguments())
    with pytest.raises(TypeError, match=r"float32\[8\].*float32\[9\]"):
        program(*arguments(9))


CHANGES = {
    "sources": lambda patch: patch.setattr(stored_programs, "sources", lambda: "other"),
    "versions": lambda patch: patch.setattr(stored_programs, "_version", lambda name: "9.9"),
    "driver or processor": lambda patch: patch.setattr(stored_programs, "_lines", lambda *_: "other"),
    "flags": lambda patch: patch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"),
} | {
    f"{name} of ours": lambda patch, name=name, value=value: patch.setattr(switches, name, not value)
    for name, value in switches.switches().items()
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_everything_a_program_depends_on_is_in_its_key(store, monkeypatch, change):
    run()
    with monkeypatch.context() as patch:
        change(patch)
        stored_programs.environment.cache_clear()
        run()
    stored_programs.environment.cache_clear()
    assert TRACED == ["step"] * 2
    assert len(entries(store.folder)) == 2


def test_all_switches_stand_in_one_place():
    """A flag of another module would change what is traced, and not its key."""
    flags = re.compile(r"^([A-Z][A-Z0-9_]*)(?::[^=]+)? = (?:True|False)\b", re.MULTILINE)
    found = {
        (path.name, name)
        for package in stored_programs.SOURCES
        for path in Path(str(resources.files(package))).rglob("*.py")
        for name in flags.findall(path.read_text())
    }
    assert found == {("switches.py", name) for name in switches.switches()}
    assert len(found) >= 5


def test_settings_of_one_thread_are_in_the_key(store):
    keys = [store.key(step, (2.0,), (1,), arguments())]
    for precision in ("bfloat16", "float32"):
        with jax.default_matmul_precision(precision):
            keys.append(store.key(step, (2.0,), (1,), arguments()))
    assert len(set(keys)) == 3


def test_static_arguments_shapes_and_donation_are_in_the_key(store):
    keys = {
        store.key(step, (2.0,), (1,), arguments()), store.key(step, (3.0,), (1,), arguments()),
        store.key(step, (2.0,), (), arguments()), store.key(step, (2.0,), (1,), arguments(9)),
        store.key(run, (2.0,), (1,), arguments()),
    }  # fmt: skip
    assert None not in keys
    assert len(keys) == 5
    assert store.key(step, (2.0,), (1,), arguments()) in keys


DAMAGE = {
    "empty": lambda content: b"",
    "cut off": lambda content: content[:-1],
    "half": lambda content: content[: len(content) // 2],
    "one bit of the code": lambda content: content[:-100] + bytes([content[-100] ^ 1]) + content[-99:],
    "one bit of the head": lambda content: content[:80] + bytes([content[80] ^ 1]) + content[81:],
    "another kind of file": lambda content: b"\x80\x04" + content,
    "longer": lambda content: content + b"x",
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_entry_is_compiled_again_with_a_notice(store, notices, damage):
    run()
    [path] = entries(store.folder)
    path.write_bytes(damage(path.read_bytes()))
    assert run() == EXPECTED
    assert TRACED == ["step"] * 2
    assert [("damaged" in notice) for notice in notices] == [True]
    assert run() == EXPECTED
    assert TRACED == ["step"] * 2


@pytest.mark.parametrize(
    "change", [{"key": "another"}, {"results": {"pickle": ""}}, {"read": [0, 17]}, {"payload": b"no code"}]
)
def test_a_whole_entry_that_does_not_fit_is_compiled_again_with_a_notice(store, notices, change):
    run()
    [path] = entries(store.folder)
    head, payload = stored_programs._open(path.read_bytes())
    payload = change.pop("payload", payload)
    text = json.dumps(head | change).encode()
    content = len(text).to_bytes(8, "little") + text + payload
    path.write_bytes(MAGIC + hashlib.sha256(content).digest() + content)
    assert run() == EXPECTED
    assert TRACED == ["step"] * 2
    assert len(notices) == 1


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC, errno.EACCES])
@pytest.mark.parametrize("place", ["open", "replace"])
def test_a_folder_that_cannot_be_written_to_is_one_notice(store, notices, monkeypatch, code, place):
    usual = getattr(os, place)

    def fails(*what, **options):
        if place == "open" and not what[1] & os.O_CREAT:
            return usual(*what, **options)
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, place, fails)
        assert run() == EXPECTED
        assert run(args=arguments(9))[1] == EXPECTED[1]
    assert list(store.folder.iterdir()) == []
    assert notices == [f"compiled programs are not kept: [Errno {code}] {os.strerror(code)}"]


def another_user_s(path, belongs):
    belongs(path, 12345)


def writable(path, belongs):
    path.chmod(0o620)


def linked(path, belongs):
    path.rename(path.with_suffix(".elsewhere"))
    path.symlink_to(path.with_suffix(".elsewhere"))


def pipe(path, belongs):
    path.unlink()
    os.mkfifo(path, 0o600)


PLANTED = {
    "another user's": (another_user_s, "belongs to user 12345, not to you"),
    "writable": (writable, "may be written by other users"),
    "a link": (linked, "Too many levels of symbolic links"),
    "a pipe": (pipe, "is no plain file"),
}


@pytest.mark.parametrize(("plant", "said"), PLANTED.values(), ids=PLANTED)
def test_an_entry_that_others_can_have_made_is_not_read(store, notices, belongs, plant, said):
    """Left there while the folder was open to them, whatever it is now; its place is taken by what is compiled here."""
    run()
    [path] = entries(store.folder)
    plant(path, belongs)
    assert run() == EXPECTED
    assert TRACED == ["step"] * 2
    assert [said in notice for notice in notices] == [True]
    found = path.lstat()
    assert (found.st_uid, stat.S_IMODE(found.st_mode), stat.S_ISREG(found.st_mode)) == (os.getuid(), 0o600, True)
    assert run() == EXPECTED
    assert TRACED == ["step"] * 2


def test_root_s_entries_are_read(store, notices, belongs, monkeypatch):
    run()
    belongs(entries(store.folder)[0], 0)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert run() == EXPECTED
    assert TRACED == ["step"]


def test_another_folder_of_the_same_name_is_never_looked_at(store):
    run()
    [path] = entries(store.folder)
    store.folder.rename(store.folder.with_name("aside"))
    store.folder.mkdir()
    (store.folder / path.name).write_bytes(b"planted")
    try:
        assert run() == EXPECTED
        assert TRACED == ["step"]
        assert run(args=arguments(9))[1] == EXPECTED[1]
        assert len(entries(store.folder)) == 1
        assert len(entries(store.folder.with_name("aside"))) == 2
    finally:
        shutil.rmtree(store.folder)
        store.folder.with_name("aside").rename(store.folder)


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path, mode):
    tmp_path.chmod(mode)
    with pytest.raises(PermissionError, match="may be written by other users"):
        StoredPrograms(tmp_path)
    tmp_path.chmod(0o700)


def test_a_folder_that_is_gone_is_one_notice(store, notices):
    store.folder.rmdir()
    assert run() == EXPECTED
    assert run() == EXPECTED
    assert len(notices) == 1
    store.folder.mkdir()


def test_programs_not_used_for_longest_make_room(store):
    for size in (8, 9, 10):
        run(args=arguments(size))
    sizes = {path: path.stat().st_size for path in entries(store.folder)}
    first, second, third = sorted(sizes, key=lambda path: path.stat().st_mtime_ns)
    now = time.time()
    for age, path in ((30, first), (20, second), (10, third)):
        os.utime(path, (now - age, now - age))
    run()  # the first one: used now
    store.most_bytes = sum(sizes.values()) + 200
    run(args=arguments(11))
    left = entries(store.folder)
    assert [path in left for path in (first, second, third)] == [True, False, True]
    assert len(left) == 3


def test_what_others_left_half_written_goes_after_a_while(store):
    old, new = store.folder / "a.partial", store.folder / "b.partial"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    run()
    assert (old.exists(), new.exists()) == (False, True)


def test_what_jax_kept_itself_is_not_kept_again(store, tmp_path_factory, monkeypatch, notices):
    """Serialised once more it would lack its code on a CPU."""
    names = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("jax")),
        "jax_persistent_cache_min_compile_time_secs": 0,
    }
    before = {name: getattr(jax.config, name) for name in names}
    for name, value in names.items():
        jax.config.update(name, value)
    try:
        with config.enable_compilation_cache(True):
            compilation_cache.reset_cache()
            monkeypatch.setattr(Programs, "stored", None)
            run()
            monkeypatch.setattr(Programs, "stored", store)
            for _ in range(2):
                assert run() == EXPECTED
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
    assert entries(store.folder) == []
    assert TRACED == ["step"] * 3
    assert notices == []


def test_a_version_of_jax_that_is_not_known_has_programs_that_are_not_kept(store, notices, monkeypatch):
    monkeypatch.setattr(jax_patches, "KNOWN_VERSIONS", ())
    assert run() == EXPECTED
    assert run() == EXPECTED
    assert TRACED == ["step"] * 2
    assert entries(store.folder) == []
    assert notices == []


def test_programs_with_callbacks_are_not_kept(store, notices):
    def told(_, x):
        jax.debug.callback(lambda _: None, x)
        return x + 1

    assert Programs().call(told, (), (), None, jnp.ones(2)).tolist() == [2, 2]
    assert entries(store.folder) == []
    assert notices == []


def test_what_cannot_be_described_is_compiled_and_not_kept(store, notices):
    def applied(function, _, x):
        return function(x)

    assert Programs().call(applied, (jnp.negative,), (), None, jnp.ones(2)).tolist() == [-1, -1]
    assert entries(store.folder) == []
    assert notices == []


def compile_in_a_process(folder, start, answers):
    start.wait()
    noticed = []
    Programs.stored = StoredPrograms(Path(folder), noticed.append)
    answers.put((run(), len(TRACED), noticed))


@pytest.mark.few
def test_processes_at_once_do_not_spoil_each_other(folder, notices, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2])  # where new processes find this module by its name
    context = multiprocessing.get_context("spawn")
    start, answers = context.Event(), context.Queue()
    processes = [context.Process(target=compile_in_a_process, args=(str(folder), start, answers)) for _ in range(3)]
    for process in processes:
        process.start()
    start.set()
    found = [answers.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    assert [one[0] for one in found] == [EXPECTED] * 3
    assert [one[2] for one in found] == [[]] * 3
    assert len(entries(folder)) == 1
    assert [path.suffix for path in folder.iterdir()] == [SUFFIX]
