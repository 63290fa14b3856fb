"""Thread-level code run by NumPy: every number of a thread is an array of 128, one for each thread of a warpgroup.

Stands in for `dflash_kernels.mosaic_gpu.ptx` in the function that a `thread_op` was made of. Shared memory is one array of float32,
addresses are bytes in it. Matrix instructions keep eleven bits of their operands, as the hardware does.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

THREADS, WARP = 128, 32


class Threads:
    """The names of `ptx` that such functions use."""

    def __init__(self) -> None:
        self.memory = np.full(1 << 17, np.nan, np.float32)
        self.used = 0

    def place(self, shape: tuple[int, ...], numbers: np.ndarray | None = None) -> Any:
        """A Ref in shared memory."""
        size = int(np.prod(shape))
        ref = SimpleNamespace(start=self.used, shape=shape)
        self.used += -(-size // 256) * 256
        if numbers is not None:
            self.memory[ref.start : ref.start + size] = numbers.ravel()
        return ref

    def read(self, ref: Any) -> np.ndarray:
        return self.memory[ref.start : ref.start + int(np.prod(ref.shape))].reshape(ref.shape)

    def thread(self) -> np.ndarray:
        return np.arange(THREADS)

    def lane_and_warp(self) -> tuple[np.ndarray, np.ndarray]:
        return np.arange(THREADS) % WARP, np.arange(THREADS) // WARP

    def address(self, ref: Any, space: int) -> np.ndarray:
        assert space == 3
        return np.full(THREADS, 4 * ref.start)

    def shape_and_strides(self, ref: Any) -> tuple[list[int], list[int]]:
        return list(ref.shape), [int(np.prod(ref.shape[axis + 1 :])) for axis in range(len(ref.shape))]

    add, sub, mul = (staticmethod(op) for op in (np.add, np.subtract, np.multiply))
    div, rem, xor = (staticmethod(op) for op in (np.floor_divide, np.remainder, np.bitwise_xor))
    fadd, fsub, fmul, fdiv, exp = (staticmethod(op) for op in (np.add, np.subtract, np.multiply, np.divide, np.exp))

    def number(self, value: int) -> int:
        return value

    def real(self, value: float) -> np.ndarray:
        return np.full(THREADS, value, np.float32)

    def as_real(self, number: np.ndarray) -> np.ndarray:
        return number

    def i32(self) -> str:
        return "i32"

    def f32(self) -> str:
        return "f32"

    def fori(self, count: int, carry: list[Any]) -> Callable[..., Any]:
        def run(body: Callable[..., Any]) -> Any:
            held = carry
            for index in range(count):
                held = body(index, list(held))
            return SimpleNamespace(results=held)

        return run

    def load(self, address: np.ndarray, count: int = 1, *, op: str, kind: str) -> list[np.ndarray]:
        assert op in ("ld.shared", "ld.global")
        assert kind == "f32"
        assert (address % (4 * count) == 0).all()
        return [self.memory[address // 4 + place] for place in range(count)]

    def word_address(self, ref: Any, word: np.ndarray) -> np.ndarray:
        return 4 * (ref.start + word)

    def compare(self, a: Any, relation: str, b: int) -> Any:
        assert relation == "sgt"
        return a > b

    def when(self, predicate: Any, ptx: str, address: np.ndarray, number: np.ndarray) -> None:
        assert ptx == "st.global.f32 [$0], $1;"
        if predicate:
            self.memory[address // 4] = number

    def warpgroup_barrier(self) -> None:
        """All threads run in step."""

    def shuffle_xor(self, value: np.ndarray, distance: int) -> np.ndarray:
        return value[np.arange(THREADS) ^ distance]

    def inline(self, ptx: str, *operands: Any, returns: Any = None, convergent: bool = False) -> Any:
        if ptx.startswith("st.shared"):
            address, *numbers = operands
            assert (address % (4 * len(numbers)) == 0).all()
            for place, number in enumerate(numbers):
                self.memory[address // 4 + place] = number
            return None
        if ptx.startswith("cvt.rna.tf32"):
            (number,) = operands
            bits = number.astype(np.float32).view(np.uint32)
            return ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
        assert ptx.startswith("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32")
        assert convergent
        return _multiplied(operands)


def _multiplied(operands: Any) -> list[np.ndarray]:
    lane, warp = np.arange(THREADS) % WARP, np.arange(THREADS) // WARP
    group, of_4 = lane // 4, lane % 4
    a, b, c = (np.zeros((4, *shape), np.float32) for shape in ((16, 8), (8, 8), (16, 8)))
    for index, number in enumerate(operands[:4]):
        a[warp, group + 8 * (index % 2), of_4 + 4 * (index // 2)] = number
    for index, number in enumerate(operands[4:6]):
        b[warp, of_4 + 4 * index, group] = number
    for index, number in enumerate(operands[6:]):
        c[warp, group + 8 * (index // 2), 2 * of_4 + index % 2] = number
    found = (a.astype(np.float64) @ b + c).astype(np.float32)
    return [found[warp, group + 8 * (index // 2), 2 * of_4 + index % 2] for index in range(4)]
