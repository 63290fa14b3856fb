"""Files on their way into the system's cache while Python is busy, and waiting for parts of them."""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

# Threads that read, and what each of them reads at a time.
STREAMS, SPAN_BYTES = 8, 64 << 20
# As long as a disk of 200 MB/s takes for one span of each thread.
PATIENCE_S = 3.0
# Where the spans begin that are still to be read, of every file that is being read.
_PENDING: dict[str, set[int]] = {}
_CHANGED = threading.Condition()


def read_ahead(paths: Sequence[Path]) -> None:
    """Reads files into the system's cache in the background: in their order, up to half of the memory. Says nothing of what fails.

    Several threads, each on a span of its own, keep a disk busy that one of them does not. What they read goes nowhere: nothing is
    copied, and none of them needs Python before its span is there. (`posix_fadvise` would be no such request: Linux takes a few
    megabytes of each.)
    """
    if not hasattr(os, "sendfile"):
        return
    spans = list(_claim(paths))
    waiting = iter(spans)  # of a list: several threads may ask it

    def stream() -> None:
        for span in waiting:
            try:
                with suppress(OSError):
                    _read_away(*span)
            finally:
                _done(*span)

    for _ in range(min(STREAMS, len(spans))):
        threading.Thread(target=stream, name="read ahead", daemon=True).start()


def wait_until_read(path: Path, start: int, nbytes: int) -> None:
    """Returns when nobody reads ahead in these bytes of a file, or after `PATIENCE_S`.

    Readers beside the threads that read ahead slowed the disk down from 1.65 to 1.1 GB/s.
    """
    name, first = os.path.realpath(path), start // SPAN_BYTES * SPAN_BYTES
    ours = range(first, start + nbytes, SPAN_BYTES)
    with _CHANGED:
        _CHANGED.wait_for(lambda: _PENDING.get(name, set()).isdisjoint(ours), PATIENCE_S)


def _claim(paths: Sequence[Path]) -> Iterator[tuple[str, int, int]]:
    """Files in pieces (name, first byte, number of bytes), but for those that are being read already."""
    room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    for path in paths:
        name = os.path.realpath(path)
        with suppress(OSError), _CHANGED:  # gone: `load` will say so
            size = min(room, os.stat(name).st_size)
            room -= size
            if name not in _PENDING and size:
                starts = range(0, size, SPAN_BYTES)
                _PENDING[name] = set(starts)
                yield from [(name, start, min(SPAN_BYTES, size - start)) for start in starts]


def _read_away(name: str, start: int, nbytes: int) -> None:
    with open(name, "rb", buffering=0) as file, open(os.devnull, "wb", buffering=0) as nowhere:
        while nbytes and (count := os.sendfile(nowhere.fileno(), file.fileno(), start, nbytes)):
            start, nbytes = start + count, nbytes - count


def _done(name: str, start: int, _: int) -> None:
    with _CHANGED:
        _PENDING[name].discard(start)
        if not _PENDING[name]:
            del _PENDING[name]
        _CHANGED.notify_all()
