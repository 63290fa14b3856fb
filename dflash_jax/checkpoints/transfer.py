"""From files to the device: several threads fill arrays in memory that is used again, while others travel.

One thread copies a file's bytes from the system's cache at some 7 GB/s, a bus takes 50: threads side by side come near to that.
Memory is the second half of it. New memory costs more to touch than the copy, and what the device cannot read directly is copied
once more by the runtime; so all arrays pass through one ring that the device may read.
"""

import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import numpy as np

from dflash_jax.compile.tracing import short_turns

THREADS = 8
# Room beside the largest array, so that others can be filled while it travels.
SLACK_BYTES = 256 << 20
ALIGNMENT = 4096


@dataclass(frozen=True)
class Incoming:
    """An array to be filled.

    Attributes:
      parts: functions that each fill a span of the flat array, with its first element and their number.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    parts: Sequence[tuple[int, int, Callable[[np.ndarray], None]]]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def place(
    arrays: Iterable[Incoming],
    send: Callable[[str, np.ndarray], Any] | None = None,
    arrived: Callable[[], Any] | None = None,
    keep: Callable[[str, jax.Array], Any] | None = None,
) -> dict[str, Any]:
    """Fills all arrays and places them on the default device. Takes at most twice the largest array's bytes on the host.

    Raises whatever a part raises.

    Args:
      send: starts the way of an array, given by name, to where it belongs; what it copies on the host is beside that.
      arrived: called for each array that is on its way.
      keep: makes of an array, given by name, what is kept of it. Arrays of which others are kept are on the device as long as they
        have room on the host.
    """
    waiting = list(arrays)
    threads = min(THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, thread_name_prefix="read") as readers, short_turns():
        # A CPU's arrays may be the very memory they were made from, so there each needs its own.
        if jax.default_backend() == "cpu":
            return _Pipeline(readers, _Fresh(), send, arrived, keep).run(waiting)
        with _ring(ring_bytes(array.nbytes for array in waiting), readers) as ring:
            return _Pipeline(readers, ring, send, arrived, keep).run(waiting)


def ring_bytes(nbytes: Iterable[int]) -> int:
    """The memory that arrays of so many bytes pass through: the largest one's and some beside it, at most twice as much, or all of
    them."""
    sizes = [_aligned(size) for size in nbytes]
    largest = max(sizes, default=0)
    return min(sum(sizes), largest + min(largest, SLACK_BYTES))


class _Fresh:
    """New memory for each array, two arrays at a time."""

    def __init__(self):
        self.held = 0

    def take(self, nbytes: int) -> np.ndarray | None:
        if self.held == 2:
            return None
        self.held += 1
        return np.empty(nbytes, np.uint8)

    def release(self) -> None:
        self.held -= 1


class _Ring:
    """Memory handed out piece after piece and taken back in the same order."""

    def __init__(self, memory: np.ndarray):
        self.memory = memory
        self.taken: deque[tuple[int, int]] = deque()

    def take(self, nbytes: int) -> np.ndarray | None:
        """The next `nbytes` bytes, or None where there is no room before others are released."""
        size, end = _aligned(nbytes), len(self.memory)
        if not self.taken:
            start = 0
        else:
            first, last = self.taken[0][0], self.taken[-1][1]
            wrapped = last <= first
            if size <= (first if wrapped else end) - last:
                start = last
            elif not wrapped and size <= first:
                start = 0
            else:
                return None
        self.taken.append((start, start + size))
        return self.memory[start : start + nbytes]

    def release(self) -> None:
        """Takes back what was handed out first."""
        self.taken.popleft()


@contextmanager
def _ring(nbytes: int, readers: ThreadPoolExecutor) -> Iterator[_Ring]:
    """A ring in memory that the device reads without a copy in between, where the runtime allows it."""
    area = mmap.mmap(-1, max(nbytes, mmap.PAGESIZE))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(area, np.uint8)
    # Touched side by side: the system hands out new pages slowly to one thread.
    spans = np.array_split(memory, THREADS)
    list(readers.map(_touch, spans))
    client = jax.local_devices()[0].client
    try:
        client.dma_map(memory.ctypes.data, memory.nbytes)
    except (AttributeError, jax.errors.JaxRuntimeError):  # the runtime copies then: right, and slower
        yield _Ring(memory)
        return
    try:
        yield _Ring(memory)
    finally:
        client.dma_unmap(memory.ctypes.data)


def _touch(memory: np.ndarray) -> None:
    memory[:: mmap.PAGESIZE] = 0


def _aligned(nbytes: int) -> int:
    return -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT


class _Pipeline:
    """Arrays on their way: first being filled, then travelling, in one order.

    Args:
      send, arrived, keep: see `place`.
    """

    def __init__(
        self,
        readers: ThreadPoolExecutor,
        memory: _Ring | _Fresh,
        send: Callable[[str, np.ndarray], Any] | None = None,
        arrived: Callable[[], Any] | None = None,
        keep: Callable[[str, jax.Array], Any] | None = None,
    ):
        self.readers, self.memory, self.send, self.arrived, self.keep = readers, memory, send, arrived, keep
        self.filling: deque[tuple[Incoming, np.ndarray, list[Future]]] = deque()
        self.travelling: deque[Any] = deque()
        self.placed: dict[str, Any] = {}

    def run(self, arrays: Sequence[Incoming]) -> dict[str, Any]:
        try:
            for incoming in arrays:
                while (memory := self.memory.take(incoming.nbytes)) is None:
                    self._make_room()
                array = memory.view(incoming.dtype)
                parts = [self.readers.submit(fill, array[at : at + size]) for at, size, fill in incoming.parts]
                self.filling.append((incoming, array, parts))
                while self.filling and all(part.done() for part in self.filling[0][2]):
                    self._send()
            while self.filling:
                self._send()
        finally:
            # Nothing may write to the memory or read it once it is given back.
            self.readers.shutdown(cancel_futures=True)
            for sent in self.travelling:
                sent.block_until_ready()
        return self.placed

    def _send(self) -> None:
        incoming, array, parts = self.filling[0]
        for part in parts:
            part.result()
        self.filling.popleft()
        whole = array.reshape(incoming.shape)
        sent = jax.device_put(whole) if self.send is None else self.send(incoming.name, whole)
        self.placed[incoming.name] = sent if self.keep is None else self.keep(incoming.name, sent)
        self.travelling.append(sent)
        if self.arrived is not None:
            self.arrived()

    def _make_room(self) -> None:
        if not self.travelling:
            self._send()
        self.travelling.popleft().block_until_ready()
        self.memory.release()
