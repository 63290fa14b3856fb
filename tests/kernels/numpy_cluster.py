"""Thread-level code of a cluster of CTAs run by NumPy: a word of a thread is an array of all threads' words.

Stands in for `dflash_kernels.mosaic_gpu.ptx` in the function that a `thread_op` was made of. All threads run in step, so that a
missing barrier is not found; counting, votes and exchanges between lanes are the hardware's. Shared memory is NaN's bits at first.
"""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

WARP = 32
_RELATIONS = {
    "eq": np.equal, "ne": np.not_equal, "ult": np.less, "uge": np.greater_equal, "ugt": np.greater, "slt": np.less,
    "sge": np.greater_equal,
}  # fmt: skip


class Cluster:
    """The names of `ptx` that such functions use, for `ctas` CTAs of `threads` threads."""

    def __init__(self, ctas: int, threads: int) -> None:
        self.ctas, self.threads = ctas, threads
        self.cta, self.thread = np.divmod(np.arange(ctas * threads), threads)
        self.memory = np.full((ctas, 1 << 16), 0x7FC00000, np.uint32)
        self.used = 0
        self.active = np.ones(self.thread.shape, bool)
        # Of barriers, by address: bytes that are missing, and threads that have arrived.
        self.pending, self.arrived = np.zeros((ctas, 64), np.int64), np.zeros((ctas, 64), np.int64)

    def shared(self, words: int) -> Any:
        ref = SimpleNamespace(start=self.used, shape=(words,))
        self.used += words
        return ref

    def device(self, array: np.ndarray) -> Any:
        """An array in global memory, whose addresses are in words of it; int32 or float32."""
        return SimpleNamespace(words=array.reshape(-1).view(np.uint32), shape=array.shape)

    def address(self, ref: Any, space: int = 0) -> Any:
        if space == 3:
            return self.number(4 * ref.start)
        return ref.words, np.zeros(self.thread.shape, np.int64)

    def word_address(self, ref: Any, word: np.ndarray) -> Any:
        return ref.words, 4 * word.astype(np.int64)

    def offset(self, address: Any, size: np.ndarray) -> Any:
        return address[0], address[1] + size

    def shape_and_strides(self, ref: Any) -> tuple[list[int], list[int]]:
        return list(ref.shape), []

    def number(self, value: int) -> np.ndarray:
        return np.full(self.thread.shape, value & 0xFFFFFFFF, np.uint32)

    def _as(self, value: Any) -> np.ndarray:
        return self.number(value) if isinstance(value, int) else value

    def thread_of_cta(self) -> np.ndarray:
        return self.thread.astype(np.uint32)

    def cta_of_cluster(self) -> np.ndarray:
        return self.cta.astype(np.uint32)

    def add(self, a: Any, b: Any) -> np.ndarray:
        return a + self._as(b)

    def sub(self, a: Any, b: Any) -> np.ndarray:
        return a - self._as(b)

    def mul(self, a: Any, b: Any) -> np.ndarray:
        return a * self._as(b)

    def div(self, a: Any, b: int) -> np.ndarray:
        return a // np.uint32(b)

    def rem(self, a: Any, b: int) -> np.ndarray:
        return a % np.uint32(b)

    def xor(self, a: Any, b: Any) -> np.ndarray:
        return a ^ self._as(b)

    unsigned_min, fadd = staticmethod(np.minimum), staticmethod(np.add)
    select, every, either = staticmethod(np.where), staticmethod(np.logical_and), staticmethod(np.logical_or)

    def compare(self, a: Any, relation: str, b: Any) -> np.ndarray:
        a, b = a, self._as(b)
        if relation.startswith("s"):
            a, b = a.view(np.int32), b.view(np.int32)
        return _RELATIONS[relation](a, b)

    def bit_and(self, a: Any, b: Any) -> np.ndarray:
        return a & self._as(b)

    def under(self, a: Any, bound: int) -> np.ndarray:
        return a < bound

    def as_word(self, condition: np.ndarray) -> np.ndarray:
        return condition.astype(np.uint32)

    def fori(self, count: np.ndarray, carry: list[Any]) -> Callable[..., Any]:
        def run(body: Callable[..., Any]) -> Any:
            held = carry
            for index in range(int(count[0])):
                held = body(self.number(index), list(held))
            return SimpleNamespace(results=held)

        return run

    def load(
        self, address: Any, count: int = 1, *, op: str, kind: str = "b32", there: Any = None, otherwise: str = "0",
        ordered: bool = True,
    ) -> list[np.ndarray]:  # fmt: skip
        if op == "ld.shared":
            assert kind == "f32"
            assert (address % (4 * count) == 0).all()
            return [self.shared_word(address, np.uint32(step)).view(np.float32) for step in range(count)]
        assert op == "ld.global.nc"
        words, place = address
        there = np.ones(place.shape, bool) if there is None else there
        assert (place[there] % (4 * count) == 0).all()
        found = []
        for step in range(count):
            word = self.number(int(otherwise, 0))
            word[there] = words[place[there] // 4 + step]
            found.append(word)
        return found

    def shared_word(self, base: np.ndarray, word: np.ndarray) -> np.ndarray:
        return self.memory[self.cta, (base // 4 + word).astype(np.int64)]

    def shared_quad(self, base: np.ndarray, word: np.ndarray) -> list[np.ndarray]:
        assert (word % 4 == 0).all()
        assert (base % 16 == 0).all()
        return [self.shared_word(base, word + np.uint32(step)) for step in range(4)]

    def store_shared(self, base: np.ndarray, word: np.ndarray, value: np.ndarray) -> None:
        self.when(np.ones(self.thread.shape, bool), "st.shared.b32 [$0], $1;", base + 4 * word, value)

    def store_shared_quad(self, base: np.ndarray, word: np.ndarray, values: list[np.ndarray]) -> None:
        assert (word % 4 == 0).all()
        for step, value in enumerate(values):
            self.store_shared(base, word + np.uint32(step), value)

    def push(self, base: Any, word: Any, cta: np.ndarray, values: list[np.ndarray], barrier: np.ndarray) -> None:
        assert len(values) in (2, 4)
        assert (word % len(values) == 0).all()
        assert (base % (4 * len(values)) == 0).all()
        assert (cta[self.active] < self.ctas).all()
        for step, value in enumerate(values):
            place = (base // 4 + word + np.uint32(step)).astype(np.int64)
            self.memory[cta[self.active], place[self.active]] = value.view(np.uint32)[self.active]
        np.add.at(self.pending, (cta[self.active], barrier[self.active]), -4 * len(values))

    def expect_bytes(self, barrier: np.ndarray, count: int, *, others: int = 0) -> None:
        at = self.cta[self.active], barrier[self.active]
        np.add.at(self.pending, at, count)
        np.add.at(self.arrived, at, 1 + others)

    def await_phase(self, barrier: np.ndarray, phase: np.ndarray) -> None:
        """A warpgroup's threads must have arrived, and what was expected have come, for the first time."""
        at = self.cta[self.active], barrier[self.active]
        assert (self.pending[at] == 0).all()
        assert (self.arrived[at] == 128).all()
        assert (phase == 0).all()

    def inline(self, ptx: str, address: np.ndarray) -> None:
        self.when(np.ones(self.thread.shape, bool), ptx, address)

    def over_lanes(self, value: np.ndarray, kind: str) -> np.ndarray:
        of = {"add": np.add, "max": np.maximum, "min": np.minimum}[kind]
        return np.repeat(of.reduce(self._warps(value), axis=1, dtype=np.uint32), WARP)

    def when(self, predicate: np.ndarray, ptx: str, address: Any, *values: np.ndarray) -> None:
        predicate = predicate & self.active
        if ptx == "st.global.b32 [$0], $1;":
            words, place = address
            assert len(np.unique(place[predicate])) == predicate.sum(), "two threads write one word"
            words[place[predicate] // 4] = values[0][predicate]
            return
        at = self.cta[predicate], address[predicate] // 4
        if ptx == "red.shared.add.u32 [$0], 1;":
            np.add.at(self.memory, at, 1)
            return
        assert ptx == "st.shared.b32 [$0], $1;"
        self.memory[at] = values[0][predicate]

    @contextlib.contextmanager
    def branch(self, condition: np.ndarray) -> Iterator[None]:
        """Threads that do not go there store nothing meanwhile; what they load is nobody's."""
        before, self.active = self.active, self.active & condition
        yield
        self.active = before

    def _warps(self, value: np.ndarray) -> np.ndarray:
        return value.reshape(-1, WARP)

    def from_lane_before(self, value: np.ndarray, distance: int) -> np.ndarray:
        warps = self._warps(value)
        return np.pad(warps, ((0, 0), (distance, 0)))[:, :WARP].ravel()

    def from_lane(self, value: np.ndarray, lane: int) -> np.ndarray:
        return np.repeat(self._warps(value)[:, lane], WARP)

    def shuffle_xor(self, value: np.ndarray, distance: int) -> np.ndarray:
        return self._warps(value)[:, np.arange(WARP) ^ distance].ravel()

    def cta_barrier(self) -> None:
        pass

    warpgroup_barrier = cta_barrier
