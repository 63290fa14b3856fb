"""Tiles of one-byte pages as matrix fragments: loaded from shared memory as bytes and widened in registers.

Every function stands for code that all 128 threads of a warpgroup run together.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from dflash_kernels.mosaic_gpu import ptx as th


def keys(tile, start: int, stop: int) -> Any:
    """Columns `start` to `stop`, multiples of 32, of a `[64, H]` tile of keys: float16, matrix layout, the keys' order."""
    narrow, loads = ir.MemRefType(tile.type).element_type, _loads(tile, across=False)
    steps = loads.steps[start // 32 : stop // 32]
    return _assembled(
        _loaded(tile, loads.opcode, steps), steps, (64, stop - start), lambda word: _pairs(word, narrow, False, False),
        ir.F16Type.get(), start // 8,
    )  # fmt: skip


def values(tile, finite: bool) -> Any:
    """A `[64, H]` tile of values, transposed: float16 in the matrix layout, `[H, 64]` in the product's order of rows.

    int8 comes as `(value + 128) * 2^-24`.
    """
    narrow, loads = ir.MemRefType(tile.type).element_type, _loads(tile, across=True)
    return _assembled(
        _loaded(tile, loads.opcode, loads.steps), loads.steps, loads.shape,
        lambda word: _pairs(word, narrow, True, finite), ir.F16Type.get(),
    )  # fmt: skip


def widened_rows(_ctx, tile) -> Any:
    """A `[64, H]` tile as bfloat16, float8 times 2^-120, its columns in parity order."""
    narrow, loads = ir.MemRefType(tile.type).element_type, _loads(tile, across=False)
    loaded = _loaded(tile, loads.opcode, loads.steps)
    return _assembled(loaded, loads.steps, loads.shape, lambda word: _bfloat16_pairs(word, narrow), ir.BF16Type.get())


class Loads(NamedTuple):
    """How a tile is loaded: shape of the matrix, what `ldmatrix` is told, and each load's offset and places of its words' pairs."""

    shape: tuple[int, int]
    opcode: str
    steps: list[Any]


def _loads(tile, across: bool) -> Loads:
    _, columns, _, width = ir.MemRefType(tile.type).shape
    return (value_loads if across else key_loads)(columns * width, width)


def _loaded(tile, opcode: str, steps: list[Any]) -> list[Any]:
    base = th.address(tile, space=3)
    return [
        utils.inline_ptx(
            f"ldmatrix.sync.aligned.m8n8.x4{opcode}.shared.b16 {{$0, $1, $2, $3}}, [$4];", th.add(base, offset),
            result_types=[th.i32()] * 4, has_side_effects=True, convergent=True,
        )
        for offset, _ in steps
    ]  # fmt: skip


def _assembled(
    loaded: list[Any], steps: list[Any], shape: tuple[int, int], pairs: Callable[[Any], tuple[Any, ...]], dtype: Any,
    first_column: int = 0,
) -> Any:  # fmt: skip
    """The matrix of all words, of which `first_column` is the first group of eight columns. Widened here, not where it is used."""
    pair, registers = ir.VectorType.get((2,), dtype), np.empty(mgpu.WGMMA_LAYOUT.registers_shape(shape), dtype=object)
    for words, (_, places) in zip(loaded, steps, strict=True):
        for word, of_word in zip(words, places, strict=True):
            for (row, column, half), value in zip(of_word, pairs(word), strict=True):
                registers[row, column - first_column, 0, 0, half, 0, 0, 0, 0] = utils.bitcast(value, pair)
    wide = mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)
    return mgpu.optimization_barrier(wide)


def key_loads(head_dim: int, width: int) -> Loads:
    """Each load: rows 0 to 7 and 8 to 15 of the warp's, for two neighbouring chunks."""
    lane, warp = th.lane_and_warp()
    matrix, row = th.div(lane, 8), th.rem(lane, 8)
    group_of_8 = th.add(th.mul(warp, 2), th.rem(matrix, 2))
    start = th.add(th.mul(group_of_8, 8 * head_dim), th.mul(row, width))
    chunk = th.xor(th.mul(th.div(matrix, 2), th.CHUNK), th.swizzle_of(row, width))
    steps = []
    for first in range(0, head_dim // th.CHUNK, 2):
        across, inside = divmod(first * th.CHUNK, width)
        offset = th.add(th.add(start, across * 8 * width), th.xor(chunk, inside))
        places = [[(0, 2 * (first + i // 2) + pair, i % 2) for pair in range(2)] for i in range(4)]
        steps.append((offset, places))
    return Loads((64, head_dim), "", steps)


def value_loads(head_dim: int, width: int) -> Loads:
    """Each load: 32 keys of the chunk of 16 channels that is the warp's in 64."""
    lane, warp = th.lane_and_warp()
    matrix, row = th.div(lane, 8), th.rem(lane, 8)
    start = th.add(th.mul(matrix, 8 * head_dim), th.mul(row, width))
    swizzle, own = th.swizzle_of(row, width), th.mul(warp, th.CHUNK)
    steps = []
    for tile in range(head_dim // 64):
        across, inside = divmod(tile * 64, width)
        chunk = th.xor(th.add(own, inside), swizzle)
        for keys in range(2):
            offset = th.add(th.add(start, keys * 32 * head_dim + across * 8 * width), chunk)
            steps.append((offset, [[(tile, 4 * keys + i, parity) for parity in range(2)] for i in range(4)]))
    return Loads((head_dim, 64), ".trans", steps)


def paired(across: bool) -> tuple[tuple[int, int], ...]:
    """Which of a word's bytes become a pair, as a product takes it: neighbours, or where a word lies across two keys, theirs."""
    return ((0, 2), (1, 3)) if across else ((0, 1), (2, 3))


def _pairs(word, narrow, across: bool, finite: bool) -> tuple[Any, ...]:
    """The pairs of a word's bytes as float16: float8's NaN as 480 where they have to be `finite`, int8 lifted and shrunk."""
    i32 = th.i32()
    if isinstance(narrow, ir.Float8E4M3FNType) and not finite:
        if across:
            (a, b), (c, d) = paired(across)
            word = utils.inline_ptx(f"prmt.b32 $0, $1, 0, {a | b << 4 | c << 8 | d << 12};", word, result_types=i32)
        return utils.inline_ptx(
            "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }",
            word, result_types=[i32] * 2,
        )  # type: ignore  # fmt: skip
    if isinstance(narrow, ir.Float8E4M3FNType):
        # Each byte below eight copies of its sign; at a float16's places they are the value times 2^-8, subnormals included.
        above, steps = (8, 9, 10, 11), (
            "shl.b32 wide, wide, 7; and.b32 wide, wide, 0xbf80bf80; mov.b32 by, 0x5c005c00; mul.rn.f16x2 $0, wide, by;"
        )  # fmt: skip
    else:
        # The byte, sign turned, alone in a float16 that has no exponent.
        word, above, steps = arith.xori(word, utils.c(0x80808080 - 2**32, i32)), (4, 4, 4, 4), "mov.b32 $0, wide;"
    selectors = [a | above[a] << 4 | b << 8 | above[b] << 12 for a, b in paired(across)]
    return tuple(
        utils.inline_ptx(f"{{ .reg .b32 wide, by; prmt.b32 wide, $1, 0, {selector}; {steps} }}", word, result_types=i32)
        for selector in selectors
    )


def _bfloat16_pairs(word, narrow) -> tuple[Any, Any]:
    """Bytes 0 and 2 of four, and bytes 1 and 3, as pairs of bfloat16."""
    i32 = th.i32()
    if isinstance(narrow, ir.Float8E4M3FNType):
        # Each byte below eight copies of its sign, at a bfloat16's places: the value times 2^-120.
        return tuple(
            utils.inline_ptx(
                f"{{ .reg .b32 wide; prmt.b32 wide, $1, 0, {selector}; shl.b32 wide, wide, 4; and.b32 $0, wide, 0x87f087f0; }}",
                word, result_types=i32,
            )
            for selector in ("0xa280", "0xb391")
        )  # type: ignore  # fmt: skip
    # The byte as the fraction of a bfloat16 between 128 and 256, less 128 or, where its sign bit is in the exponent's place, 256.
    return tuple(
        utils.inline_ptx(
            f"{{ .reg .b32 both, low, high; prmt.b32 both, $1, 0x43, {selector}; and.b32 low, both, 0xff7fff7f;"
            " and.b32 high, both, 0xff80ff80; sub.bf16x2 $0, low, high; }",
            word, result_types=i32,
        )
        for selector in ("0x4240", "0x4341")
    )  # type: ignore  # fmt: skip
