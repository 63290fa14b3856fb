"""Conversions in registers: 8-bit numbers to sixteen bits, float32 to float8, activations to two 8-bit numbers (hi and lo).

`keys` and `values` load a tile of 8-bit pages as bytes and widen them to a matrix instruction's operand; `widen_tile` goes from
shared memory to shared memory. `digits_of`, `float8_words` and `int8_words` decompose activations so that matrix instructions
multiply them with 8-bit weights as these lie. A number of eight significant bits is the sum of two of float8_e4m3fn, which have
four: its own rounding, and a sixteenth of what that leaves times 16. Before that, a power of two brings the largest of a token's
256 numbers in a slot between 128 and 256. Numbers down to 2^-13 of the largest one are then exact, and of smaller ones at most
2^-21 of it is lost. For weights in int8 it brings the largest one between 2^14 and 2^15, and the bytes are those of the nearest
whole number: about 2^-15 of the largest one is lost at most, where rounding that one to bfloat16 has lost up to 2^-9.

Every function stands for code that all 128 threads of a warpgroup run together.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from dflash_kernels.core.device import MATRIX_ROWS as ROWS
from dflash_kernels.mosaic_gpu import ptx as th
from dflash_kernels.mosaic_gpu.layouts import TILED, in_key_order, in_value_order, swizzled, tile_of, tiled
from dflash_kernels.mosaic_gpu.thread_op import matrix, thread_op

FLOAT8_SHIFT = (
    120  # float8_e4m3fn bits at a bfloat16's places are the value times 2 to the minus this, subnormals included
)
SECOND = 16  # what a second digit in float8 is divided by
BYTE = 256  # what a first digit in int8 is times
MOST = 127 * BYTE + 127  # of two digits in int8
_WHOLE = 1.5 * 2**23  # what float32 rounds to whole numbers beside
# m: the exponent, as it is stored, of the largest of four words in each thread of a warp.
_LARGEST = (
    "and.b32 m, $5, 0x7fff7fff;",
    *(f"and.b32 t, ${word}, 0x7fff7fff; max.u16x2 m, m, t;" for word in (6, 7, 8)),
    "shr.u32 t, m, 16; and.b32 m, m, 0xffff; max.u32 m, m, t; redux.sync.max.u32 m, m, 0xffffffff; shr.u32 m, m, 7;",
)
_TILE = 64  # columns of a swizzled tile of float8
_WIDEN = (
    "{ .reg .b16 a, b, c, d; .reg .b32 e, f, g, h; mov.b32 {a, b}, $1; mov.b32 {c, d}, $2; cvt.rn.f16x2.e4m3x2 e, a;"
    " cvt.rn.f16x2.e4m3x2 f, b; cvt.rn.f16x2.e4m3x2 g, c; cvt.rn.f16x2.e4m3x2 h, d; st.shared.v4.b32 [$0], {e, f, g, h}; }"
)
_LINE = 128  # bytes of a swizzled row: 128 columns of float8, 64 of float16
_COLUMNS = 4  # of a thread


def keys(tile, start: int, stop: int) -> Any:
    """Columns `start` to `stop`, multiples of 32, of a `[64, H]` tile of keys: float16, matrix layout, the keys' order."""
    narrow, loads = ir.MemRefType(tile.type).element_type, _loads(tile, across=False)
    steps = loads.steps[start // 32 : stop // 32]
    return _here(_assembled(
        _loaded(tile, loads.opcode, steps), steps, (64, stop - start), lambda word: _pairs(word, narrow, False, False),
        ir.F16Type.get(), start // 8,
    ))  # fmt: skip


def values(tile, finite: bool) -> Any:
    """A `[64, H]` tile of values, transposed: float16 in the matrix layout, `[H, 64]` in the product's order of rows.

    int8 comes as `(value + 128) * 2^-24`.
    """
    narrow, loads = ir.MemRefType(tile.type).element_type, _loads(tile, across=True)
    return _here(_assembled(
        _loaded(tile, loads.opcode, loads.steps), loads.steps, loads.shape,
        lambda word: _pairs(word, narrow, True, finite), ir.F16Type.get(),
    ))  # fmt: skip


@thread_op(args=lambda tile: (tile_of(tile),), returns=lambda tile: matrix(tile.shape, jnp.bfloat16))
def widened_rows(tile) -> Any:
    """A `[64, H]` tile in shared memory as bfloat16, float8 times 2^-120, its columns in parity order."""
    narrow, loads = ir.MemRefType(tile.type).element_type, _loads(tile, across=False)
    loaded = _loaded(tile, loads.opcode, loads.steps)
    return _here(
        _assembled(loaded, loads.steps, loads.shape, lambda word: _bfloat16_pairs(word, narrow), ir.BF16Type.get())
    )


def _here(wide) -> Any:
    """Widened where it stands in the code, not where it is used."""
    return mgpu.optimization_barrier(wide)


def _latent_keys(tile, *, first: int, count: int):
    return in_key_order(tile[...].astype(jnp.float32))[:, first : first + count]


@thread_op(
    args=lambda tile, **_: (tile_of(tile),), returns=lambda _, first, count: matrix((ROWS, count), jnp.float16),
    interpret=_latent_keys,
)  # fmt: skip
def latent_keys(tile, *, first: int, count: int):
    """`count` columns from `first` on, multiples of 32, of a `[64, C]` tile of float8: float16 `[64, count]` in the keys' order."""
    (_, columns), width = th.rows_and_columns(tile), th.swizzle(tile)
    loads = key_loads(columns, width, first, count, th.opaque_lane_and_warp)
    return _assembled(_loaded(tile, *loads[1:]), loads.steps, loads.shape, _neighbours, ir.F16Type.get())


def _latent_values(tile, *, first: int, count: int, finite: bool):
    del finite
    wide = tile[...].astype(jnp.float32)
    return in_value_order(jnp.where(jnp.isnan(wide), 480.0, wide).T[first : first + count])


@thread_op(
    args=lambda tile, **_: (tile_of(tile),), returns=lambda _, first, count, finite: matrix((count, ROWS), jnp.float16),
    interpret=_latent_values,
)  # fmt: skip
def latent_values(tile, *, first: int, count: int, finite: bool):
    """`count` columns from `first` on, multiples of 64, of a `[64, C]` tile of float8, transposed: float16 `[count, 64]` in the
    product's order of rows. With `finite` a NaN reads as 480.
    """
    (_, columns), width = th.rows_and_columns(tile), th.swizzle(tile)
    loads = value_loads(columns, width, first, count, th.opaque_lane_and_warp)
    pairs = _finite_across if finite else _across
    return _assembled(_loaded(tile, *loads[1:]), loads.steps, loads.shape, pairs, ir.F16Type.get())


class Loads(NamedTuple):
    """Loads of a tile: shape of the matrix, arguments of `ldmatrix`, and each load's offset and places of its words' pairs."""

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
    """The matrix of all words, of which `first_column` is the first group of eight columns."""
    pair, registers = ir.VectorType.get((2,), dtype), np.empty(mgpu.WGMMA_LAYOUT.registers_shape(shape), dtype=object)
    for words, (_, places) in zip(loaded, steps, strict=True):
        for word, of_word in zip(words, places, strict=True):
            for (row, column, half), value in zip(of_word, pairs(word), strict=True):
                registers[row, column - first_column, 0, 0, half, 0, 0, 0, 0] = utils.bitcast(value, pair)
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)


def key_loads(
    head_dim: int, width: int, first: int = 0, count: int | None = None, place: Callable[[], Any] | None = None
):
    """Loads of `count` columns from `first` on as keys, multiples of 32: rows 0 to 7 and 8 to 15 of the warp's, for two
    neighbouring chunks at a time. `place`: gives lane and warp.
    """
    lane, warp = (place or th.lane_and_warp)()
    matrix, row = th.div(lane, 8), th.rem(lane, 8)
    group_of_8 = th.add(th.mul(warp, 2), th.rem(matrix, 2))
    start = th.add(th.mul(group_of_8, 8 * head_dim), th.mul(row, width))
    chunk = th.xor(th.mul(th.div(matrix, 2), th.CHUNK), th.swizzle_of(row, width))
    count, steps = head_dim if count is None else count, []
    for column in range(0, count, 2 * th.CHUNK):
        across, inside = divmod(first + column, width)
        offset = th.add(th.add(start, across * 8 * width), th.xor(chunk, inside))
        places = [[(0, column // 8 + 2 * (i // 2) + pair, i % 2) for pair in range(2)] for i in range(4)]
        steps.append((offset, places))
    return Loads((64, count), "", steps)


def value_loads(
    head_dim: int, width: int, first: int = 0, count: int | None = None, place: Callable[[], Any] | None = None
):
    """Loads of `count` columns from `first` on as values, multiples of 64, transposed: 32 keys of the chunk of 16 channels
    that
    is the warp's in 64 at a time.
    """
    lane, warp = (place or th.lane_and_warp)()
    matrix, row = th.div(lane, 8), th.rem(lane, 8)
    start = th.add(th.mul(matrix, 8 * head_dim), th.mul(row, width))
    swizzle, own = th.swizzle_of(row, width), th.mul(warp, th.CHUNK)
    count, steps = head_dim if count is None else count, []
    for tile in range(count // 64):
        across, inside = divmod(first + tile * 64, width)
        chunk = th.xor(th.add(own, inside), swizzle)
        for keys in range(2):
            offset = th.add(th.add(start, keys * 32 * head_dim + across * 8 * width), chunk)
            steps.append((offset, [[(tile, 4 * keys + i, parity) for parity in range(2)] for i in range(4)]))
    return Loads((count, 64), ".trans", steps)


def byte_pairs(across: bool) -> tuple[tuple[int, int], ...]:
    """Bytes of a word that become a pair, as a product takes it: neighbours, or where a word lies across two keys, theirs."""
    return ((0, 2), (1, 3)) if across else ((0, 1), (2, 3))


def _pairs(word, narrow, across: bool, finite: bool) -> tuple[Any, ...]:
    """The pairs of a word's bytes as float16: float8's NaN as 480 where they have to be `finite`, int8 lifted and shrunk."""
    i32 = th.i32()
    if isinstance(narrow, ir.Float8E4M3FNType) and not finite:
        if across:
            (a, b), (c, d) = byte_pairs(across)
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
    selectors = [a | above[a] << 4 | b << 8 | above[b] << 12 for a, b in byte_pairs(across)]
    return tuple(
        utils.inline_ptx(f"{{ .reg .b32 wide, by; prmt.b32 wide, $1, 0, {selector}; {steps} }}", word, result_types=i32)
        for selector in selectors
    )


def _neighbours(word) -> tuple[Any, ...]:
    """Bytes 0 and 1 of four, and 2 and 3, as pairs of float16."""
    return _two_words(
        "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }",
        word,
    )


def _across(word) -> tuple[Any, ...]:
    """Bytes 0 and 2, and 1 and 3: a word lies across two keys."""
    return _two_words(
        "{ .reg .b32 turned; .reg .b16 low, high; prmt.b32 turned, $2, 0, 0x3120; mov.b32 {low, high}, turned;"
        " cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }",
        word,
    )


def _finite_across(word) -> tuple[Any, ...]:
    """The same without NaN: each byte below eight copies of its sign, at a float16's places the value times 2^-8."""
    return _two_words(
        "{ .reg .b32 even, odd, by; prmt.b32 even, $2, 0, 0xa280; prmt.b32 odd, $2, 0, 0xb391; mov.b32 by, 0x5c005c00;"
        " shl.b32 even, even, 7; shl.b32 odd, odd, 7; and.b32 even, even, 0xbf80bf80; and.b32 odd, odd, 0xbf80bf80;"
        " mul.rn.f16x2 $0, even, by; mul.rn.f16x2 $1, odd, by; }",
        word,
    )


def _two_words(ptx: str, word) -> tuple[Any, ...]:
    return tuple(utils.inline_ptx(ptx, word, result_types=[th.i32()] * 2))


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


def _widen_tile_interpreted(source: Any, target: Any) -> None:
    wide, width = source[...].astype(target.dtype), target.shape[1]
    for block in range(target.shape[0] // ROWS):
        target.at[pl.ds(block * ROWS, ROWS)][...] = wide[:, block * width : (block + 1) * width]
    plgpu.commit_smem()


@thread_op(
    args=lambda source, target: (plgpu.RefType(tiled(source.dtype)), plgpu.RefType(TILED)),
    interpret=_widen_tile_interpreted,
)
def widen_tile(source: Any, target: Any) -> None:
    """`source [64, 128]` float8_e4m3fn to `target [2 * 64, 64]` float16, a block of columns below the other, both swizzled.

    Eight threads that go to memory together have 16 columns each, of two rows whose swizzles leave them no bank in common. At the
    end matrix instructions may read the target, and copies may fill the source.
    """
    lane, warp = th.lane_and_warp()
    thread = th.add(th.mul(warp, 32), lane)
    column, other = th.rem(thread, 4), th.rem(th.div(thread, 4), 2)
    first = th.xor(th.mul(th.div(thread, 8), 2), th.mul(other, 5))
    swizzle, line = th.rem(first, 8), th.mul(first, _LINE)
    sources, targets = (th.add(th.address(ref, space=3), line) for ref in (source, target))
    loaded = []
    for block in range(2):
        place = th.mul(th.xor(th.add(column, 4 * block), swizzle), th.CHUNK)
        for start in range(0, ROWS, 32):
            words = utils.inline_ptx(
                "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", th.add(th.add(sources, start * _LINE), place),
                result_types=[th.i32()] * 4, has_side_effects=True,
            )  # fmt: skip
            loaded.append((block, start, words))
    for block, start, words in loaded:
        halves = [half for word in words for half in _halves(word)]
        for chunk in range(2):
            place = th.mul(th.xor(th.add(th.mul(column, 2), chunk), swizzle), th.CHUNK)
            address = th.add(th.add(targets, (block * ROWS + start) * _LINE), place)
            four = halves[4 * chunk : 4 * chunk + 4]
            utils.inline_ptx("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", address, *four, has_side_effects=True)
    utils.inline_ptx("fence.proxy.async.shared::cta;", has_side_effects=True)
    utils.warpgroup_barrier()


def _widened_rows(source, target) -> None:
    numbers = plgpu.load(source, layout=plgpu.Layout.WGMMA_UPCAST_2X, optimized=False)
    plgpu.commit_smem()
    target[...] = numbers.astype(target.dtype)


@thread_op(
    args=lambda source, target: tuple(plgpu.RefType(swizzled(ref.dtype, _TILE)) for ref in (source, target)),
    interpret=_widened_rows,
)
def widen_rows(source, target) -> None:
    """Writes rows of float8_e4m3fn as float16; `target` may lie where `source` does.

    A warp converts tiles of 8 rows and 64 columns one after the other, a thread 16 numbers of one row, without bank conflicts.
    """
    rows, columns = th.rows_and_columns(source)
    lane, warp = th.opaque_lane_and_warp()
    row, chunk = th.div(lane, 4), th.rem(lane, 4)
    # The chunk of 16 columns that lies there, and both chunks of 8 that it becomes.
    first = th.mul(th.xor(chunk, th.rem(th.div(row, 2), 4)), 2)
    start = th.add(th.address(source, space=3), th.add(th.mul(warp, 8 * _TILE), th.mul(lane, th.CHUNK)))
    end = th.add(th.address(target, space=3), th.add(th.mul(warp, 16 * _TILE), th.mul(row, 2 * _TILE)))
    ends = [th.add(end, th.mul(th.xor(th.add(first, i), row), th.CHUNK)) for i in range(2)]
    loaded = [
        th.load(th.add(start, 4 * 8 * _TILE * tile), 4, op="ld.shared")
        for tile in range(rows * columns // (4 * 8 * _TILE))
    ]
    utils.warpgroup_barrier()
    for tile, words in enumerate(loaded):
        for i, place in enumerate(ends):
            utils.inline_ptx(
                _WIDEN, th.add(place, 4 * 16 * _TILE * tile), *words[2 * i : 2 * i + 2], has_side_effects=True
            )


def narrowed(values, scale):
    """float32 numbers over a scale as words of four float8_e4m3fn, cut to their range."""
    words = []
    for start in range(0, len(values), 4):
        four = [arith.divf(value, scale) for value in values[start : start + 4]]
        word = utils.inline_ptx(
            "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;"
            " mov.b32 $0, {low, high}; }",
            *four, result_types=th.i32(),
        )  # fmt: skip
        words.append(word)
    return words


def widened(words):
    """Words of four float8_e4m3fn as words of two float16."""
    return [half for word in words for half in _halves(word)]


def _halves(word):
    return utils.inline_ptx(
        "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }",
        word, result_types=[th.i32()] * 2,
    )  # fmt: skip


def numbers(words):
    """float32 numbers of words of two bfloat16."""
    values = []
    for word in words:
        values.append(utils.bitcast(th.shift_left(word, 16), ir.F32Type.get()))
        values.append(utils.bitcast(arith.andi(word, utils.c(-65536, th.i32())), ir.F32Type.get()))
    return values


def packed(values):
    """Words of two bfloat16 each, rounded to the nearest."""
    words = []
    for low, high in zip(values[::2], values[1::2], strict=True):
        words.append(utils.inline_ptx("cvt.rn.bf16x2.f32 $0, $1, $2;", high, low, result_types=th.i32()))
    return words


def as_float16(words):
    """Words of two bfloat16 as words of two float16."""
    values = numbers(words)
    return [
        utils.inline_ptx("cvt.rn.f16x2.f32 $0, $1, $2;", high, low, result_types=th.i32())
        for low, high in zip(values[::2], values[1::2], strict=True)
    ]


def interleaved_float8(row: mgpu.FragmentedArray, layout: Any) -> mgpu.FragmentedArray:
    """int32 words of `row [D]` float32, four columns a thread, in `layout`, one word a thread. NaN stays, others saturate."""
    i32, lane = th.i32(), th.lane_and_warp()[0]
    place = th.rem(lane, _COLUMNS)
    lower = th.add(th.sub(lane, place), th.div(place, 2))
    # Bytes 0 and 1 of both words or 2 and 3, one after the other.
    order = th.add(th.mul(th.rem(place, 2), 0x2222), 0x5140)
    words = []
    for register in row.registers.flat:
        numbers = [vector.extract(register, [], [i]) for i in range(_COLUMNS)]
        word = utils.inline_ptx(
            "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;"
            " cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
            *numbers, result_types=i32,
        )  # fmt: skip
        word = utils.inline_ptx(
            "{ .reg .b32 one, other; shfl.sync.idx.b32 one, $1, $2, 31, -1;"
            " shfl.sync.idx.b32 other, $1, $3, 31, -1; prmt.b32 $0, one, other, $4; }",
            word, lower, th.add(lower, 2), order, result_types=i32, has_side_effects=True,
        )  # fmt: skip
        words.append(vector.from_elements(ir.VectorType.get((1,), i32), [word]))
    registers = np.empty(len(words), dtype=object)
    registers[:] = words
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)


def digits_of(x, kind: Any):
    """`x [tokens, columns]` float32 as digits `[2 * tokens, columns]` of `kind`, and what they are times, `[tokens]` float32."""
    _, exponent = jnp.frexp(jnp.abs(x).max(axis=1))
    unit = jnp.where(x.any(axis=1), jnp.ldexp(jnp.float32(1), exponent - (15 if kind == jnp.int8 else 8)), 1.0)
    x = x / unit[:, None]
    if kind == jnp.int8:
        x = jnp.minimum(jnp.round(x), MOST)
        first = jnp.floor((x + BYTE // 2) / BYTE)
        second = x - first * BYTE
    else:
        first = x.astype(kind)
        second = (x - first.astype(jnp.float32)) * SECOND
    return jnp.concatenate([first.astype(kind), second.astype(kind)]), unit


def float8_words(words):
    """First digits and second ones, two words each, of four words of bfloat16, and bits of what they are times.

    All of a warp have the same largest number.
    """
    lines = [
        "{ .reg .b32 m, t, x, f0, f1, g, d, k; .reg .b16 a0, a1, b0, b1; mov.b32 k, 0x4C004C00;",  # k: 16 in float16, twice
        *_LARGEST,
        # Times 2^(134 - m).
        "max.u32 m, m, 8; sub.u32 t, 261, m; shl.b32 t, t, 7; prmt.b32 t, t, t, 0x1010;",
        "sub.u32 m, m, 7; shl.b32 $4, m, 23;",
    ]
    for word in range(4):
        digit = word % 2
        lines += [
            f"mul.rn.bf16x2 x, ${5 + word}, t; shl.b32 f0, x, 16; and.b32 f1, x, 0xffff0000;",
            f"cvt.rn.satfinite.e4m3x2.f32 a{digit}, f1, f0; cvt.rn.f16x2.e4m3x2 g, a{digit}; cvt.rn.f16x2.f32 d, f1, f0;",
            f"sub.rn.f16x2 d, d, g; mul.rn.f16x2 d, d, k; cvt.rn.satfinite.e4m3x2.f16x2 b{digit}, d;",
        ]
        if digit:
            lines.append(f"mov.b32 ${word // 2}, {{a0, a1}}; mov.b32 ${2 + word // 2}, {{b0, b1}};")
    return _of_words(lines, words)


def int8_words(words):
    """`float8_words` for weights in int8."""
    lines = [
        "{ .reg .b32 m, t, x, v, g, f0, f1, v0, v1, g0, g1; .reg .pred p;",
        *_LARGEST,
        # Digits of what is not a number are numbers.
        "setp.eq.u32 p, m, 255; max.u32 m, m, 15; sub.u32 t, 268, m; shl.b32 t, t, 7; prmt.b32 t, t, t, 0x1010;",
        "sub.u32 m, m, 14; shl.b32 m, m, 23; selp.b32 $4, 0x7fffffff, m, p;",
    ]
    for word in range(4):
        digit = word % 2
        lines.append(f"mul.rn.bf16x2 x, ${5 + word}, t; shl.b32 f0, x, 16; and.b32 f1, x, 0xffff0000;")
        for half in ("f0", "f1"):
            lines.append(f"min.f32 {half}, {half}, {_bits(float(MOST))};")
        # The last bits of a sum of this size are those of the nearest whole number; of half a low byte more, the high byte counts.
        for name, first in (("v", _WHOLE), ("g", _WHOLE + BYTE // 2)):
            lines += [f"add.rn.f32 v, f0, {_bits(first)}; add.rn.f32 g, f1, {_bits(first)};"]
            lines += [f"prmt.b32 {name}{digit}, v, g, 0x5410;"]
        if digit:
            lines.append(f"prmt.b32 ${word // 2}, g0, g1, 0x7531; prmt.b32 ${2 + word // 2}, v0, v1, 0x6420;")
    return _of_words(lines, words)


def _of_words(lines, words):
    i32 = ir.IntegerType.get_signless(32)
    return utils.inline_ptx("\n".join([*lines, "}"]), *words, result_types=[i32] * 5, has_side_effects=True)


def _bits(value: float) -> str:
    return "0f" + np.float32(value).tobytes()[::-1].hex()
