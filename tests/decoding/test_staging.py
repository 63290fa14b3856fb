"""Memory that arrays pass through is used again, and never before its array has arrived."""

import itertools
import os
import random
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from dflash_jax.checkpoints import transfer as staging
from dflash_jax.checkpoints.transfer import Incoming, place
from dflash_jax.errors import CheckpointError


class Late:
    """An array that reaches the device only when somebody waits for it: what is overwritten before then arrives wrong."""

    waited = 0

    def __init__(self, source: np.ndarray):
        self.source, self.arrived = source, None

    def block_until_ready(self) -> "Late":
        if self.arrived is None:
            self.arrived = self.source.copy()
            Late.waited += 1
        return self


def send_late(arrays: list[Incoming]) -> dict[str, Late]:
    """All arrays through a ring to a device that takes its time."""
    with ThreadPoolExecutor(4) as readers:
        ring = staging._Ring(np.full(staging.ring_bytes(array.nbytes for array in arrays), 255, np.uint8))
        return staging._Pipeline(readers, ring, send=lambda _, array: Late(array)).run(arrays)


def incoming(name: str, values: np.ndarray, parts: int) -> Incoming:
    flat, edges = values.reshape(-1), np.linspace(0, values.size, parts + 1, dtype=int).tolist()

    def fill(begin: int, end: int):
        def run(array: np.ndarray) -> None:
            array[:] = flat[begin:end]

        return begin, end - begin, run

    return Incoming(name, values.shape, values.dtype, [fill(a, b) for a, b in itertools.pairwise(edges)])


def some_arrays(seed: int) -> dict[str, np.ndarray]:
    """Sizes from nothing to a megabyte, in no order."""
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    shapes = [(rng.choice([0, 1, 3, 1000, 4096, 100_000, 262_144]),) for _ in range(60)] + [(512, 512)]
    rng.shuffle(shapes)
    kinds = (np.float32, np.int8, np.uint16)
    return {f"{i}": numbers.integers(0, 100, shape).astype(rng.choice(kinds)) for i, shape in enumerate(shapes)}


@pytest.mark.parametrize("slack", [0, 300_000])
def test_arrays_arrive_whole_through_one_ring(monkeypatch, slack):
    monkeypatch.setattr(staging, "SLACK_BYTES", slack)
    arrays, before = some_arrays(slack), Late.waited
    placed = send_late([incoming(name, values, 1 + i % 4) for i, (name, values) in enumerate(arrays.items())])
    assert list(placed) == list(arrays)
    assert Late.waited - before == len(arrays)
    for name, values in arrays.items():
        assert placed[name].arrived.dtype == values.dtype
        np.testing.assert_array_equal(placed[name].arrived, values)


@pytest.mark.parametrize("seed", [0, 1])
def test_arrays_of_a_cpu_have_memory_of_their_own(seed):
    arrays = some_arrays(seed)
    placed = place(incoming(name, values, parts=3) for name, values in arrays.items())
    for name, values in arrays.items():
        np.testing.assert_array_equal(placed[name], values)


def test_a_ring_never_hands_out_what_is_taken():
    rng, ring = random.Random(0), staging._Ring(np.zeros(40 * staging.ALIGNMENT, np.uint8))
    owners, held, refused = np.zeros(40, int), [], 0
    for _ in range(5000):
        size = rng.randint(1, 15 * staging.ALIGNMENT)
        memory = ring.take(size)
        if memory is None:
            assert held  # an empty ring has room for anything it is as large as
            refused += 1
            owners[held.pop(0)] -= 1
            ring.release()
            continue
        first = (memory.ctypes.data - ring.memory.ctypes.data) // staging.ALIGNMENT
        span = slice(first, first + -(-size // staging.ALIGNMENT))
        owners[span] += 1
        assert owners.max() == 1
        held.append(span)
    assert refused > 500


def test_whoever_cannot_read_is_heard():
    def broken(array: np.ndarray) -> None:
        raise CheckpointError("model.safetensors", "ended inside tensor x")

    arrays = [incoming(str(i), np.ones(1000), 2) for i in range(20)]
    arrays[7] = Incoming("7", (1000,), np.dtype(np.float32), [(0, 1000, broken)])
    turns = sys.getswitchinterval()
    for through in (place, send_late):
        with pytest.raises(CheckpointError, match="ended inside"):
            through(arrays)
    assert sys.getswitchinterval() == turns


@pytest.mark.gpu
def test_a_gpu_gets_what_was_read(tmp_path):
    """Through memory that the GPU reads itself; more arrays than the ring holds, read from a file."""
    values = np.random.default_rng(0).integers(0, 2**16, 48 << 20, np.uint16)
    (tmp_path / "file").write_bytes(values.tobytes())
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    sizes = [1, 5, 4096, 3 << 20, 16 << 20, 7, 8 << 20, 2 << 20, 16 << 20, 1 << 20]

    def reading(at: int):
        def run(array: np.ndarray) -> None:
            assert os.preadv(descriptor, [memoryview(array)], 2 * at) == array.nbytes

        return run

    def arrays():
        at = 0
        for i, size in enumerate(sizes):
            half = size // 2
            spans = [(0, half, reading(at)), (half, size - half, reading(at + half))]
            yield Incoming(str(i), (size,), values.dtype, spans)
            at += size

    placed, at = place(arrays()), 0
    for i, size in enumerate(sizes):
        assert isinstance(placed[str(i)], jax.Array)
        np.testing.assert_array_equal(np.asarray(placed[str(i)]), values[at : at + size])
        at += size
    os.close(descriptor)
