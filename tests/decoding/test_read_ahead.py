"""Files are read ahead whole and once, and whoever waits for a part of one never waits for what nobody reads."""

import ctypes
import itertools
import mmap
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from dflash_jax.checkpoints import prefetch as module
from dflash_jax.checkpoints.prefetch import read_ahead, wait_until_read

SPAN = 4096


@pytest.fixture
def finish():
    """Returns when all threads that were started since the test began have ended."""
    before = set(threading.enumerate())

    def wait() -> None:
        for thread in set(threading.enumerate()) - before:
            thread.join()

    yield wait
    wait()
    assert not module._PENDING


@pytest.fixture
def sent(monkeypatch):
    """Spans that the system read: a file's numbers, first byte, number of bytes. Each call does a part of what it is told."""
    spans: list[tuple[tuple[int, int], int, int]] = []

    def sendfile(nowhere: int, file: int, start: int, nbytes: int) -> int:
        status = os.fstat(file)
        count = min(nbytes, 700, status.st_size - start)
        spans.append(((status.st_dev, status.st_ino), start, count))
        return count

    monkeypatch.setattr(os, "sendfile", sendfile, raising=False)
    monkeypatch.setattr(module, "SPAN_BYTES", SPAN)
    return spans


@pytest.mark.parametrize("memory", [1 << 40, 2 * 25_000])
def test_every_byte_is_read_once_up_to_half_of_the_memory(tmp_path, monkeypatch, sent, finish, memory):
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": memory, "SC_PAGE_SIZE": 1}.get)
    sizes, paths = (20_000, 0, 1, SPAN, 9000), []
    for number, size in enumerate(sizes):
        paths.append(tmp_path / f"{number}.safetensors")
        paths[-1].write_bytes(b"x" * size)
    read_ahead([*paths[:2], tmp_path / "gone", *paths[2:]])
    finish()
    room = memory // 2
    for path, size in zip(paths, sizes, strict=True):
        status = path.stat()
        spans = sorted(span[1:] for span in sent if span[0] == (status.st_dev, status.st_ino))
        assert all(start + count == after for (start, count), (after, _) in itertools.pairwise(spans))
        assert sum(count for _, count in spans) == min(size, room)
        room -= min(size, room)


def test_a_file_that_is_being_read_is_not_read_twice(tmp_path, monkeypatch, sent, finish):
    path, link, go, counted = tmp_path / "a.safetensors", tmp_path / "b.safetensors", threading.Event(), os.sendfile
    path.write_bytes(b"x" * 50_000)
    link.symlink_to(path)
    monkeypatch.setattr(os, "sendfile", lambda *args: go.wait(60) and counted(*args))
    before = set(threading.enumerate())
    for name in (path, path, link):
        read_ahead([name])
    assert len(set(threading.enumerate()) - before) == module.STREAMS
    go.set()
    finish()
    assert sum(count for *_, count in sent) == 50_000
    read_ahead([path])  # the system may have dropped it since
    finish()
    assert sum(count for *_, count in sent) == 100_000


def test_a_part_is_waited_for_until_its_spans_are_read(tmp_path, monkeypatch, sent, finish):
    path, gates, counted = tmp_path / "a.safetensors", [threading.Event() for _ in range(4)], os.sendfile
    path.write_bytes(b"x" * (4 * SPAN))

    def gated(nowhere: int, file: int, start: int, nbytes: int) -> int:
        gates[start // SPAN].wait(60)
        return counted(nowhere, file, start, nbytes)

    monkeypatch.setattr(os, "sendfile", gated)
    monkeypatch.setattr(module, "PATIENCE_S", 60)
    read_ahead([path])
    back = threading.Event()
    # The last bytes of the second span and the first of the third.
    waiter = threading.Thread(target=lambda: (wait_until_read(path, 2 * SPAN - 3, 10), back.set()))
    waiter.start()
    gates[1].set()
    wait_until_read(path, SPAN, SPAN)
    assert not back.wait(0.05)
    gates[2].set()
    assert back.wait(60)
    gates[0].set()
    wait_until_read(path, 0, 3 * SPAN)
    assert module._PENDING[os.path.realpath(path)] == {3 * SPAN}
    gates[3].set()


def test_nobody_waits_for_long_or_for_what_nobody_reads(tmp_path, monkeypatch, finish):
    path, go = tmp_path / "a.safetensors", threading.Event()
    path.write_bytes(b"x")
    wait_until_read(path, 0, 1)
    wait_until_read(tmp_path / "gone", 0, 1 << 40)

    def refused(*_: int) -> int:
        go.wait(60)
        raise OSError("this system sends nothing to files")

    monkeypatch.setattr(os, "sendfile", refused, raising=False)
    read_ahead([path])
    monkeypatch.setattr(module, "PATIENCE_S", 0.05)
    began = time.monotonic()
    wait_until_read(path, 0, 1)
    assert 0.04 < time.monotonic() - began < 30
    monkeypatch.setattr(module, "PATIENCE_S", 60)
    go.set()
    wait_until_read(path, 0, 1)
    finish()
    monkeypatch.delattr(os, "sendfile")
    read_ahead([path])


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="needs a system that can be told to drop files")
def test_what_was_read_is_in_the_systems_cache(tmp_path, finish):
    path, size = Path(tmp_path / "a.safetensors"), 40 << 20
    path.write_bytes(os.urandom(size))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    read_ahead([path])
    wait_until_read(path, 0, size)
    resident = np.zeros(size // mmap.PAGESIZE, np.uint8)
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as area:
        pages = np.frombuffer(area, np.uint8)
        told = [ctypes.c_void_p(pages.ctypes.data), ctypes.c_size_t(size), ctypes.c_void_p(resident.ctypes.data)]
        assert ctypes.CDLL(None).mincore(*told) == 0
        del pages
    assert (resident & 1).all()
