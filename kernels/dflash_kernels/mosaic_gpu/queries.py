"""Query rows on their way to shared memory: asked for before the first TMA copies, put there after them.

Whatever a CTA reads after its first copies waits until all of those have arrived, be it in the cache or not. So queries are asked
for before, in loads that compilers leave where they stand, and stay in registers meanwhile. A query row is a (token, head of the
group) pair, row `t * G + g` of `source [T, G, H]`.

For 8-bit keys queries are scaled by powers of two: into the range of float16 for float8 keys, and to 256 * hi + lo, two bytes, for
int8 keys.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from dflash_kernels.core.device import MATRIX_ROWS as ROWS
from dflash_kernels.core.device import WARP, WARPGROUP
from dflash_kernels.mosaic_gpu import ptx as th
from dflash_kernels.mosaic_gpu.layouts import in_key_order, tile_of
from dflash_kernels.mosaic_gpu.thread_op import FACTOR, GLOBAL, SCALAR, WORDS, thread_op

_STORE = "st.shared.v4.b32 [$0], {$1, $2, $3, $4};"
_ORDERED = "ld.volatile.global"  # asked for where it stands in the code
_HIGHEST = 14  # exponent of a row's largest number once it is scaled
_LEAST = 20  # exponent that a row is taken to have at least, as float32 has it
_NAN = 0x7FC00000


def ask_for_rows(source, first_row, *, rows: int, columns: int) -> list[Any]:
    """64 query rows from `first_row` on, of which the source has `rows`: zeros after those, and in `columns` past its own.

    Under the interpreter nothing is asked for.
    """
    return _ask_for_rows(source, first_row, rows=rows, columns=columns)


@thread_op(
    args=(GLOBAL, SCALAR), returns=lambda *_, rows, columns: [WORDS] * (ROWS * 2 * columns // th.CHUNK // WARPGROUP),
    interpret=lambda *_, rows, columns: [],
)  # fmt: skip
def _ask_for_rows(source, first_row, *, rows: int, columns: int) -> list[Any]:
    (_, group, head_dim), (token_stride, group_stride, _) = th.shape_and_strides(source)
    base, first, found = th.address(source), first_row, []
    for row, column in _chunks(columns):
        exists = arith.andi(th.below(row, ROWS), th.below(th.add(first, row), rows))
        if columns > head_dim:
            exists = arith.andi(exists, th.below(column, 2 * head_dim))
        token = th.div(th.add(first, row), group)
        offset = th.mul(token, token_stride)
        offset = th.add(offset, th.mul(th.sub(th.add(first, row), th.mul(token, group)), group_stride))
        address = th.add(base, th.add(th.mul(th.widen_index(offset), 2), th.widen_index(column)))
        found.append(th.load_if(exists, address, _ORDERED))
    return [th.as_array(words) for words in found]


def _put_rows_interpreted(source, target, first_row, asked) -> None:
    del asked
    plain = source[...].reshape(-1, source.shape[2])
    more = target.shape[1] - plain.shape[1]
    plain = jnp.pad(plain, ((0, -plain.shape[0] % target.shape[0] + target.shape[0]), (0, more)))
    target[...] = lax.dynamic_slice_in_dim(plain, first_row, target.shape[0])


@thread_op(
    args=lambda source, target, *_: (None, tile_of(target), None, WORDS.layout), interpret=_put_rows_interpreted
)  # fmt: skip
def put_rows(source, target, first_row, asked) -> None:
    """Stores the rows of `ask_for_rows(source)` to `target [64, H or more]` in shared memory; then all threads may read it."""
    del source, first_row
    found = [th.as_words(array) for array in asked]
    width, (_, columns), place = th.swizzle(target), th.rows_and_columns(target), th.address(target, space=3)
    for words, (row, column) in zip(found, _chunks(columns), strict=True):
        th.when(th.below(row, ROWS), _STORE, th.add(place, th.within(row, column, columns, width)), *words)
    mgpu.commit_shared()


def _chunks(columns: int) -> list:
    """Row and byte of a row of each sixteen bytes that a thread moves of a block of query rows."""
    units, (lane, warp) = 2 * columns // th.CHUNK, th.lane_and_warp()
    numbers = [th.add(th.add(th.mul(warp, WARP), lane), start) for start in range(0, ROWS * units, WARPGROUP)]
    return [(th.div(number, units), th.mul(th.rem(number, units), th.CHUNK)) for number in numbers]


def query_rows(stored: Any, rows: int) -> tuple[int, Any]:
    """Rows in shared memory of so many queries of keys that are `stored` so, and their dtype."""
    return (2 * rows, jnp.int8) if stored == jnp.int8 else (rows, jnp.float16)


@thread_op(
    args=(GLOBAL, SCALAR), returns=lambda source, _, count: [WORDS] * _asked_words(count, source.shape[2]),
    interpret=lambda *_, count: [],
)  # fmt: skip
def ask_for_scaled(source, first_row, *, count: int) -> list[Any]:
    """Query rows for `put_scaled`: `count` from `first_row` on, bfloat16 or float16, zeros where there are none."""
    (tokens, group, head_dim), (token_stride, group_stride, _) = th.shape_and_strides(source)
    base, first, found = th.address(source), first_row, []
    for row, column in _units(count, head_dim):
        row = th.add(first, row)
        inside = arith.andi(th.below(row, tokens * group), th.below(column, 2 * head_dim))
        token = th.div(row, group)
        offset = th.add(th.mul(token, token_stride), th.mul(th.sub(row, th.mul(token, group)), group_stride))
        address = th.add(base, th.add(th.mul(th.widen_index(offset), 2), th.widen_index(column)))
        found += [th.load_if(inside, th.add(address, i * th.CHUNK), _ORDERED) for i in range(2)]
    return [th.as_array(words) for words in found]


def _put_scaled_interpreted(source, target, factors, memory, first_row, rows, asked, *, by_row: bool = False):
    del asked, memory
    count = factors.shape[0]
    plain = source[...].reshape(-1, source.shape[2])
    plain = jnp.pad(plain, ((0, -plain.shape[0] % count + count), (0, 0)))
    plain = lax.dynamic_slice_in_dim(plain, first_row, count).astype(jnp.float32)
    plain = jnp.where((first_row + jnp.arange(count) < rows)[:, None], plain, 0.0)
    top = jnp.max(jnp.where(jnp.isfinite(plain), jnp.abs(plain), 0.0), axis=1)
    exponent = jnp.clip(jnp.frexp(top)[1] - 1, -107, 127) - 14
    finite = jnp.isfinite(plain).all(axis=1)
    if source.dtype == target.dtype:
        exponent = jnp.zeros_like(exponent)
    if target.dtype == jnp.int8 and not by_row:
        exponent = jnp.full_like(exponent, jnp.max(jnp.where(finite, exponent, -107 - 14)))
    scaled, factor = (jnp.ldexp(x, e) for x, e in ((plain, -exponent[:, None]), (jnp.ones_like(top), exponent)))
    if target.dtype == jnp.int8:
        factors[...] = jnp.where(finite, factor if by_row else 0.0, jnp.nan)
        whole = jnp.minimum(jnp.round(jnp.where(jnp.isfinite(scaled), scaled, 0.0)).astype(jnp.int32), 2**15 - 129)
        upper = (whole + 128) >> 8
        target[...] = jnp.concatenate([upper, whole - 256 * upper]).astype(jnp.int8)
        return None if by_row else factor[0]
    target[...] = in_key_order(scaled).astype(target.dtype)
    factors[...] = factor
    return None


@thread_op(
    args=lambda source, target, *_, **__: (GLOBAL, tile_of(target), GLOBAL, GLOBAL, SCALAR, SCALAR, WORDS.layout),
    returns=lambda source, target, *_, by_row=False: FACTOR if target.dtype == jnp.int8 and not by_row else None,
    interpret=_put_scaled_interpreted,
)
def put_scaled(source, target, factors, memory, first_row, rows, asked, *, by_row: bool = False):
    """Stores the rows of `ask_for_scaled(source)` to shared memory, scaled: a largest number comes to between 2^14 and 2^15.

    Args:
      target: `[N, H]` float16, given rows `first_row` and on in the keys' order, each row times its own power, those of float16 as
        they are; or `[2 N, H]` int8, numbers times the power of the largest finite row, or of their own with `by_row`, rounded to
        `256 * hi + lo`, all hi first.
      factors: `[N]` float32 in shared memory, given what scores have to be multiplied with; for int8, NaN where a row is not
        finite throughout and 0 elsewhere but with `by_row`.
      memory: four words of shared memory for int8.
      rows: of the source's rows `t * G + g` the first so many are wanted, zeros take the place of others.

    Returns:
      What all scores have to be multiplied with, a float32 scalar, for int8 without `by_row`; else None. All threads may read
      afterwards.
    """
    asked = [th.as_words(array) for array in asked]
    i32, f32 = th.i32(), ir.F32Type.get()
    wide = isinstance(ir.MemRefType(source.type).element_type, ir.BF16Type)
    split = isinstance(ir.MemRefType(target.type).element_type, ir.IntegerType)
    head_dim = th.shape_and_strides(source)[0][2]
    width, (count, columns) = th.swizzle(target), th.rows_and_columns(target)
    count = count // 2 if split else count
    place, first, sharing = th.address(target, space=3), first_row, _sharing(head_dim)
    units, held, found = _units(count, head_dim), [], []
    for index, (row, _) in enumerate(units):
        # Rows of dead tokens may hold anything.
        exists = arith.cmpi(arith.CmpIPredicate.slt, th.add(first, row), rows)
        loaded = [word for words in asked[2 * index : 2 * index + 2] for word in words]
        held.append([arith.select(exists, word, utils.c(0, i32)) for word in loaded])
        as_they_are = utils.c(127 + _HIGHEST, i32), None
        found.append(_exponent_of_row(held[-1], sharing, wide) if wide or split else as_they_are)
    common = _largest(found, sharing, memory) if split and not by_row else None
    for (row, column), words, (exponent, finite) in zip(units, held, found, strict=True):
        inside = arith.andi(th.below(row, count), th.below(column, 2 * head_dim))
        exponent = exponent if common is None else common
        times = utils.bitcast(th.shift_left(arith.subi(utils.c(254 + _HIGHEST, i32), exponent), 23), f32)
        inverse = th.shift_left(th.sub(exponent, _HIGHEST), 23)
        if split:
            inverse = arith.select(finite, inverse if by_row else utils.c(0, i32), utils.c(_NAN, i32))
            pairs = [_hi_lo(words[i], words[i + 1], times, wide) for i in range(0, 8, 2)]
            parts = [[pair[part] for pair in pairs] for part in range(2)]
            inner = [th.within(th.add(row, part * count), th.div(column, 2), columns // 2, width) for part in range(2)]
        else:
            words = [_scaled(word, times) if wide else word for word in (*words[::2], *words[1::2])]
            parts = words[:4], words[4:]
            inner = [th.within(row, th.add(column, part * th.CHUNK), columns, width) for part in range(2)]
        for part, offset in zip(parts, inner, strict=True):
            th.when(inside, "st.shared.v4.b32 [$0], {$1, $2, $3, $4};", th.add(place, offset), *part)
        leads = arith.andi(inside, th.below(column, 1))
        th.when(leads, "st.shared.b32 [$0], $1;", th.add(th.address(factors, space=3), th.mul(row, 4)), inverse)
    mgpu.commit_shared()
    return None if common is None else utils.bitcast(th.shift_left(th.sub(common, _HIGHEST), 23), f32)


def _largest(found: list, sharing: int, tops):
    """The largest exponent of all threads' finite rows."""
    i32 = th.i32()
    top = functools.reduce(
        arith.maxui, [arith.select(finite, exponent, utils.c(_LEAST, i32)) for exponent, finite in found]
    )
    distance = sharing
    while distance < 32:
        top = arith.maxui(top, utils.shfl_bfly(top, distance))
        distance *= 2
    lane, warp = th.lane_and_warp()
    th.when(th.below(lane, 1), "st.shared.b32 [$0], $1;", th.add(th.address(tops, space=3), th.mul(warp, 4)), top)
    utils.warpgroup_barrier()
    all_four = th.load(th.address(tops, space=3), 4, op="ld.shared")
    return functools.reduce(arith.maxui, all_four)


def _asked_words(count: int, head_dim: int) -> int:
    """The number of loads of sixteen bytes of a thread."""
    return 2 * (-(-count * _sharing(head_dim) // 128))


def _sharing(head_dim: int) -> int:
    """Lanes that share a row, 16 columns each: a power of two, the last of which may have none."""
    return 1 << (head_dim // 16 - 1).bit_length()


def _units(count: int, head_dim: int) -> list:
    """Row and first byte of a row of what a thread moves of so many rows, 32 bytes at a time."""
    sharing, (lane, warp) = _sharing(head_dim), th.lane_and_warp()
    units = [th.add(th.add(th.mul(warp, 32), lane), start) for start in range(0, count * sharing, 128)]
    return [(th.div(unit, sharing), th.mul(th.rem(unit, sharing), 2 * th.CHUNK)) for unit in units]


def _exponent_of_row(words, sharing: int, wide: bool):
    """Exponent of the largest number of the row that `sharing` lanes hold, as float32 has it, kept where powers of two have
    inverses; and whether it is finite."""
    i32 = th.i32()
    tops = [arith.andi(word, utils.c(0x7FFF7FFF, i32)) for word in words]
    halves = [th.div(top, 1 << 16) for top in tops] + [arith.andi(top, utils.c(0xFFFF, i32)) for top in tops]
    top = functools.reduce(arith.maxui, halves)
    for distance in range(sharing.bit_length() - 1):
        top = arith.maxui(top, utils.shfl_bfly(top, 1 << distance))
    exponent = th.div(top, 1 << 7) if wide else th.add(th.div(top, 1 << 10), 127 - 15)
    exponent = arith.maxui(arith.minui(exponent, utils.c(254, i32)), utils.c(_LEAST, i32))
    return exponent, th.below(top, 0x7F80 if wide else 0x7C00)


def _hi_lo(first, second, times, wide: bool):
    """Four numbers in two words, times a power of two and rounded to `256 * hi + lo`: their hi and their lo bytes."""
    halves = (
        "shl.b32 f{0}, ${2}, 16; and.b32 f{1}, ${2}, 0xffff0000;" if wide
        else "mov.b32 {{low, high}}, ${2}; cvt.f32.f16 f{0}, low; cvt.f32.f16 f{1}, high;"
    )  # fmt: skip
    # 32640, the largest, has a lower byte of 128 above the upper one that remains: one less has not.
    rounded = (
        "mul.f32 f{0}, f{0}, $4; cvt.rni.s32.f32 x{0}, f{0}; min.s32 x{0}, x{0}, 32639; add.s32 y{0}, x{0}, 128;"
        " shr.s32 y{0}, y{0}, 8;"
    )
    packed = "prmt.b32 {0}0, {0}0, {0}1, 0x0040; prmt.b32 {0}2, {0}2, {0}3, 0x0040; prmt.b32 ${1}, {0}0, {0}2, 0x5410;"
    steps = [halves.format(2 * i, 2 * i + 1, 2 + i) for i in range(2)] + [rounded.format(i) for i in range(4)]
    steps += [packed.format(name, i) for i, name in enumerate("yx")]
    return utils.inline_ptx(
        f"{{ .reg .b32 f<4>, x<4>, y<4>; .reg .b16 low, high; {' '.join(steps)} }}",
        first, second, times, result_types=[th.i32()] * 2,
    )  # fmt: skip


def _scaled(word, times):
    """Two bfloat16 times a power of two, as float16."""
    return utils.inline_ptx(
        "{ .reg .b32 low, high; shl.b32 low, $1, 16; and.b32 high, $1, 0xffff0000; mul.f32 low, low, $2;"
        " mul.f32 high, high, $2; cvt.rn.f16x2.f32 $0, high, low; }",
        word, times, result_types=th.i32(),
    )  # fmt: skip
