"""The Hopper kernels' thread arithmetic, run for all 128 threads at once in numpy against what the instructions are said to do."""

import types
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels.mosaic_gpu import convert as below
from dflash_kernels.mosaic_gpu import ptx as th
from dflash_kernels.mosaic_gpu import queries as of_queries
from dflash_kernels.mosaic_gpu.layouts import in_key_order
from dflash_kernels.mosaic_gpu.transposed import LIFT, SHRUNK

THREAD = np.arange(128)
LANE, WARP = THREAD % 32, THREAD // 32
MASK = 2**32 - 1


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Integers of all threads as arrays in the place of code that computes them."""
    arith = {
        "addi": np.add, "subi": np.subtract, "muli": np.multiply, "xori": np.bitwise_xor, "divui": np.floor_divide,
        "remui": np.remainder, "andi": np.bitwise_and, "ori": np.bitwise_or, "shrui": np.right_shift,
    }  # fmt: skip
    for module in (below, th):
        monkeypatch.setattr(module, "arith", types.SimpleNamespace(**arith))
        monkeypatch.setattr(module, "utils", types.SimpleNamespace(c=lambda value, ty: value & MASK))
    monkeypatch.setattr(th, "constant", lambda value, like: value)
    monkeypatch.setattr(th, "lane_and_warp", lambda: (LANE, WARP))
    monkeypatch.setattr(th, "shift_left", lambda a, bits: a << bits & MASK)


def swizzled_bytes(tile: np.ndarray) -> np.ndarray:
    """Shared memory after a TMA copy of `[64, H]` bytes: tiles of 8 rows, 16-byte chunks exchanged by address bits 7 to 9."""
    width = 128 if tile.shape[1] % 128 == 0 else 64
    flat = tile.reshape(8, 8, -1, width).swapaxes(1, 2).reshape(-1)
    address = np.arange(flat.size)
    memory = np.empty_like(flat)
    memory[address ^ (address >> 3 & (width // 16 - 1) << 4)] = flat
    return memory


def load_matrices(memory: np.ndarray, address: np.ndarray, transposed: bool) -> np.ndarray:
    """`ldmatrix.x4` of every warp: `[4, 128]` 32-bit words. Lane l names row `l % 8` of matrix `l // 8`."""
    halves = memory.view(np.uint16)
    words = np.empty((4, 128), np.int64)
    for warp in range(4):
        rows = address[32 * warp : 32 * warp + 32]
        assert (rows % 16 == 0).all()
        matrices = halves[(rows // 2)[:, None] + np.arange(8)].reshape(4, 8, 8)
        if transposed:
            matrices = matrices.swapaxes(1, 2)
        pairs = matrices.reshape(4, 32, 2).astype(np.int64)
        words[:, 32 * warp : 32 * warp + 32] = pairs[..., 0] | pairs[..., 1] << 16
    return words


def fragments(tile: np.ndarray, loads: Any, transposed: bool) -> np.ndarray:
    """The matrix that all threads hold after the loads, each byte widened to itself."""
    memory, width = swizzled_bytes(tile), 128 if tile.shape[1] % 128 == 0 else 64
    shape, opcode, steps = loads(tile.shape[1], width)
    assert opcode == (".trans" if transposed else "")
    found = np.full(shape, -1)
    row, column = LANE // 4, LANE % 4 * 2
    for offset, places in steps:
        for word, of_word in zip(load_matrices(memory, offset, transposed), places, strict=True):
            for (tile_row, tile_column, half), pair in zip(of_word, below.byte_pairs(transposed), strict=True):
                for element in range(2):
                    value = word >> 8 * pair[element] & 255
                    found[64 * tile_row + 16 * WARP + 8 * half + row, 8 * tile_column + column + element] = value
    return found


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_keys_and_values_land_where_the_product_expects_them(head_dim: int) -> None:
    tile = np.random.default_rng(0).integers(0, 256, (64, head_dim)).astype(np.uint8)
    keys = fragments(tile, below.key_loads, transposed=False)
    np.testing.assert_array_equal(keys, np.asarray(in_key_order(jnp.asarray(tile))))
    values = fragments(tile, below.value_loads, transposed=True)
    in_order = values.reshape(-1, 2, 8, 64).swapaxes(1, 2).reshape(head_dim, 64)
    np.testing.assert_array_equal(in_order, tile.T)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("columns", "width"), [(128, 128), (96, 64), (80, 32), (64, 128)])
def test_places_in_a_swizzled_tile(columns: int, width: int) -> None:
    """Of 16-byte chunks of two-byte elements: tiles of 8 rows, and within them chunks exchanged by address bits 7 to 9."""
    row, chunk = (part.reshape(-1) for part in np.indices((64, columns // 8)))
    across, inside = np.divmod(16 * chunk, width)
    plain = row // 8 * 16 * columns + across * 8 * width + row % 8 * width + inside
    expected = plain ^ (plain >> 3 & (width // 16 - 1) << 4)
    np.testing.assert_array_equal(th.within(row, 16 * chunk, columns, width), expected)
    assert sorted(expected) == list(range(0, 64 * columns * 2, 16))


def run_ptx(ptx: str, *arguments: np.ndarray, result_types: Any) -> Any:
    """The few instructions that widening is written in, on arrays of 32-bit words."""
    results = len(result_types) if isinstance(result_types, list) else 1
    held: dict[str, Any] = {f"${results + i}": argument for i, argument in enumerate(arguments)}

    def value(name: str) -> Any:
        return held[name] if name in held else np.full(1, int(name, 0), np.int64)

    def halves(name: str) -> np.ndarray:
        return np.stack([value(name) >> 16 * i & 0xFFFF for i in range(2)]).astype(np.uint16).view(np.float16)

    def permuted(low: Any, high: Any, selector: Any) -> Any:
        both, word = low | high << 32, 0
        for i in range(4):
            nibble = int(selector[0]) >> 4 * i & 15
            byte = both >> 8 * (nibble & 7) & 255
            word |= (np.where(byte > 127, 255, 0) if nibble & 8 else byte) << 8 * i
        return word

    def joined(pair: np.ndarray) -> np.ndarray:
        return pair[0].view(np.uint16).astype(np.int64) | pair[1].view(np.uint16).astype(np.int64) << 16

    def widened(name: str) -> np.ndarray:
        stored = np.stack([value(name) >> 8 * i & 255 for i in range(2)]).astype(np.uint8)
        return stored.view(jnp.float8_e4m3fn).astype(np.float16)

    def single(name: str) -> np.ndarray:
        return value(name).astype(np.uint32).view(np.float32)

    def signed(name: str) -> np.ndarray:
        return value(name).astype(np.uint32).view(np.int32).astype(np.int64)

    for step in ptx.strip("{ }").split(";"):
        opcode, _, names = step.strip().partition(" ")
        given = [name.strip(" {}") for name in names.split(",")]
        if opcode == "prmt.b32":
            held[given[0]] = permuted(*map(value, given[1:]))
        elif opcode == "shl.b32":
            held[given[0]] = value(given[1]) << value(given[2]) & MASK
        elif opcode == "and.b32":
            held[given[0]] = value(given[1]) & value(given[2])
        elif opcode == "mov.b32" and len(given) == 3:
            held |= {given[i]: value(given[2]) >> 16 * i & 0xFFFF for i in range(2)}
        elif opcode == "mov.b32":
            held[given[0]] = value(given[1])
        elif opcode == "cvt.rn.f16x2.e4m3x2":
            held[given[0]] = joined(widened(given[1]))
        elif opcode == "cvt.f32.f16":
            held[given[0]] = halves(given[1])[0].astype(np.float32).view(np.uint32).astype(np.int64)
        elif opcode == "mul.f32":
            held[given[0]] = (single(given[1]) * single(given[2])).view(np.uint32).astype(np.int64)
        elif opcode == "cvt.rni.s32.f32":
            held[given[0]] = np.rint(single(given[1])).astype(np.int64) & MASK
        elif opcode in ("min.s32", "add.s32", "shr.s32"):
            combine = {"min": np.minimum, "add": np.add, "shr": np.right_shift}[opcode[:3]]
            held[given[0]] = combine(signed(given[1]), signed(given[2])) & MASK
        elif opcode == "mul.rn.f16x2":
            held[given[0]] = joined(halves(given[1]) * halves(given[2]))
        else:
            assert opcode in ("", ".reg"), step
    found = tuple(held[f"${i}"] for i in range(results))
    return found if isinstance(result_types, list) else found[0]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("stored", ["float8", "float8-finite", "int8"])
def test_every_byte_widens_exactly(stored: str, across: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Float8:
        pass

    monkeypatch.setattr(below, "ir", types.SimpleNamespace(Float8E4M3FNType=Float8))
    monkeypatch.setattr(below.utils, "inline_ptx", run_ptx, raising=False)
    monkeypatch.setattr(th, "i32", lambda: None)
    held = np.arange(256, dtype=np.uint8)
    words = held.view(np.uint32).astype(np.int64)
    narrow = None if stored == "int8" else Float8()
    found = np.empty(256)
    pairs = below._pairs(words, narrow, across, stored.endswith("finite"))
    for bytes_of_pair, pair in zip(below.byte_pairs(across), pairs, strict=True):
        for element, byte in enumerate(bytes_of_pair):
            found[byte::4] = (pair >> 16 * element & 0xFFFF).astype(np.uint16).view(np.float16)
    true = held.view(np.int8 if narrow is None else jnp.float8_e4m3fn).astype(np.float64)
    if stored == "float8-finite":
        true = np.where(np.isnan(true), np.copysign(480.0, true), true)
    if narrow is None:
        true = (true + LIFT) * SHRUNK
    np.testing.assert_array_equal(found, true)


@pytest.mark.usefixtures("threads")
def test_float8_bits_in_bfloat16_are_the_value_times_a_power_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    class Float8:
        pass

    monkeypatch.setattr(below, "ir", types.SimpleNamespace(Float8E4M3FNType=Float8))
    monkeypatch.setattr(below.utils, "inline_ptx", run_ptx, raising=False)
    monkeypatch.setattr(th, "i32", lambda: None)
    stored = np.arange(256, dtype=np.uint8)
    words = stored.view(np.uint32).astype(np.int64)
    found = np.empty(256)
    for first, pair in zip((0, 1), below._bfloat16_pairs(words, Float8()), strict=True):
        for element in range(2):
            wide = (pair >> 16 * element & 0xFFFF).astype(np.uint16).view(jnp.bfloat16)
            found[first + 2 * element :: 4] = wide.astype(np.float64) * 2.0**120
    true = stored.view(jnp.float8_e4m3fn).astype(np.float64)
    np.testing.assert_array_equal(found, np.where(np.isnan(true), np.copysign(480.0, true), true))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_queries_of_two_bytes_are_rounded_once(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_queries.utils, "inline_ptx", run_ptx, raising=False)
    monkeypatch.setattr(th, "i32", lambda: None)
    numbers = np.arange(2**16, dtype=np.uint16).view(dtype)
    numbers = numbers[np.abs(np.nan_to_num(numbers.astype(np.float32), nan=np.inf)) < 2**15]
    numbers = np.resize(numbers, -(-len(numbers) // 4) * 4).reshape(-1, 4)
    words = np.ascontiguousarray(numbers).view(np.uint32).astype(np.int64).T
    one, half = np.array([[1], [0.5]], np.float32).view(np.uint32).astype(np.int64)
    hi, lo = of_queries._hi_lo(words[0], words[1], half, dtype == jnp.bfloat16)
    found = [np.asarray(word, np.uint32).view(np.int8).reshape(-1, 4).astype(np.int64) for word in (hi, lo)]
    np.testing.assert_array_equal(256 * found[0] + found[1], np.rint(numbers.astype(np.float32) / 2))
    # The largest bfloat16 below 2^15, 32640, would have a lower byte of 128: 32639.
    largest = np.full(1, 0x46FF46FF, np.int64)
    hi, lo = of_queries._hi_lo(largest, largest, one, True)
    assert (hi == 0x7F7F7F7F).all()
    assert (lo == 0x7F7F7F7F).all()
