"""Cross-CTA mailbox: results in words of global memory that say themselves whether they have been written.

Before a launch every word of a mailbox is EMPTY, bits that no result has. Whoever needs a result reads it until none of its words
is EMPTY. Nobody counts, no store waits for another one, and readers go on with what is there. Launches take turns with two areas:
one is used, the other one is emptied for the next launch.

In Pallas' interpreter, where no CTA can wait for a later one, whoever publishes is in a launch before (`stages`), or its CTA comes
first: all words are there, whose order within a tile is the interpreter's own. Each call has a mailbox of its own, which is used
once: no launch is counted, and nothing is emptied.
"""

# Pallas declares what it inlines with the context that it passes itself.
# pyright: reportAbstractUsage=false, reportCallIssue=false, reportPrivateImportUsage=false

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from dflash_kernels.core.device import WARPGROUP
from dflash_kernels.core.layouts import EMPTY
from dflash_kernels.mosaic_gpu import ptx as th
from dflash_kernels.mosaic_gpu.layouts import TILED, interleaved_column
from dflash_kernels.mosaic_gpu.thread_op import (
    COLUMN,
    GLOBAL,
    MATRIX,
    NUMBER,
    SCALAR,
    interpreting,
    matrix,
    thread_op,
)

VECTOR = 4  # words that one thread moves at once


def given_or_own(exchange: Any, *shape: int) -> Any:
    """A mailbox, or where none is given one of this shape that is used once, all words EMPTY."""
    return jax.new_ref(jnp.full(shape, EMPTY, jnp.int32)) if exchange is None else exchange


@thread_op(args=(GLOBAL, SCALAR), interpret=lambda *_, words: None)
def empty(area, word, *, words: int) -> None:
    """Makes words of a mailbox EMPTY; `word` and `words` are multiples of 4."""
    none = th.number(EMPTY)
    for first in range(0, words, WARPGROUP * VECTOR):
        place = arith.addi(th.number(first), th.mul(th.thread(), VECTOR))
        with utils.when(th.under(place, words)):
            store(th.word_address(area, th.add(word, place)), [none] * VECTOR)


def _held(area: Any, word: Any, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Any:
    """In the interpreter: what lies at a word, of float32 or two bytes a number; `area` may also be a matrix of numbers."""
    words = area[...].reshape(-1)
    if words.dtype != dtype:
        words = lax.bitcast_convert_type(words, dtype).reshape(-1)
    first = word * (4 // jnp.dtype(dtype).itemsize)
    return lax.dynamic_slice(words, (jnp.asarray(first, jnp.int32),), (math.prod(shape),)).reshape(shape)


def _put(area: Any, word: Any, numbers: Any) -> None:
    """In the interpreter: writes numbers at a word."""
    halves = 4 // numbers.dtype.itemsize
    numbers = numbers.reshape(-1) if halves == 1 else numbers.reshape(-1, halves)
    words = lax.bitcast_convert_type(numbers, jnp.int32)
    area[pl.ds(word, words.size)] = words


def held_matrix(area: Any, word: Any, rows: int, pitch: int) -> Any:
    """In the interpreter: `[rows, pitch]` of bfloat16, as `put_transposed` publishes it or the launch was given it."""
    return _held(area, word, (rows, pitch), jnp.bfloat16)


@thread_op(args=(GLOBAL, SCALAR, MATRIX), interpret=_put)
def put_tile(area, word, tile) -> None:
    """Publishes a tile of float32 in the layout of a matrix instruction's result, for `add_tiles`."""
    words = [filled(value) for value in words_of(tile.registers)]
    for first in range(0, len(words), VECTOR):
        store(own(area, word, first), words[first : first + VECTOR])


def add_tiles(area, places, tile):
    """`tile` plus the tiles that other CTAs publish at `places`, added in order as soon as all are there (split-K reduction)."""
    return _add_tiles(area, list(places), tile) if places else tile


def sum_splits(
    area: Any, split: Any, splits: int, tile: Any, word_of: Callable[[Any], Any], reduce: Callable[[Callable], None]
) -> None:
    """Split-K reduction by the CTA of the first split: `reduce(total)`; the others publish their tiles.

    In the interpreter it is the last split's CTA, which runs after the others'. The order of the sum is the same.

    Args:
      split: this CTA's, int32 scalar; CTAs of a tile's splits are neighbors in the grid.
      word_of: where a split's tile lies, called with int32 scalars.
      reduce: is given `total(words)`, this split's tile plus the ones that others publish there.
    """
    if interpreting():
        put_tile(area, word_of(split), tile)
        first = functools.partial(_held, area, word_of(0), tile.shape)
        pl.when(split == splits - 1)(lambda: reduce(lambda words: add_tiles(area, words, first())))
        return
    pl.when(split > 0)(lambda: put_tile(area, word_of(split), tile))
    pl.when(split == 0)(lambda: reduce(lambda words: add_tiles(area, words, tile)))


def _tiles_added(area: Any, words: Any, tile: Any) -> Any:
    for word in words:
        tile = tile + _held(area, word, tile.shape)
    return tile


@thread_op(
    args=(GLOBAL, SCALAR, MATRIX),
    returns=lambda area, places, tile: matrix(tile.shape, tile.dtype),
    interpret=_tiles_added,
)
def _add_tiles(area, words, tile):
    count = len(words_of(tile.registers))
    addresses = [own(area, word, first) for word in words for first in range(0, count, VECTOR)]
    found, f32 = await_all(addresses, "u32"), ir.F32Type.get()
    registers = np.empty_like(tile.registers)
    for index, place in enumerate(np.ndindex(tile.registers.shape)):
        register = tile.registers[place]
        for part in range(len(words)):
            pair = [arith.bitcast(f32, found[part * count + index * 2 + i]) for i in range(2)]
            register = arith.addf(register, vector.from_elements(register.type, pair))
        registers[place] = register
    return mgpu.FragmentedArray(_registers=registers, _layout=tile.layout, _is_signed=tile.is_signed)


def put_transposed(
    area, word, first_feature, tile, *, first_row: int, rows: int, tokens: int, pitch: int, paired: bool
) -> None:
    """Publishes a tile `[64, N]` as bfloat16: element `[token, first_feature + row]` of a matrix of `pitch` columns.

    Rows from `first_row` up to `rows` and so many `tokens` are what of the tile counts; `paired`: whether columns are interleaved.
    """
    sizes = {"first_row": first_row, "rows": rows, "tokens": tokens, "pitch": pitch}
    _put_transposed(area, word, first_feature, tile.astype(jnp.bfloat16), paired=paired, **sizes)


def _transposed_put(
    area: Any, word: Any, first_feature: Any, tile: Any, *, first_row: int, rows: int, tokens: int, pitch: int, paired: bool
) -> None:  # fmt: skip
    held = held_matrix(area, word, tokens, pitch)
    features = first_feature + jnp.arange(first_row, rows)
    if paired:
        features = (features & -16) + (features & 7) * 2 + (features >> 3 & 1)
    _put(area, word, held.at[:, features].set(tile[first_row:rows, :tokens].T))


@thread_op(args=(GLOBAL, SCALAR, SCALAR, MATRIX), interpret=_transposed_put)
def _put_transposed(
    area, word, first_feature, tile, *, first_row: int, rows: int, tokens: int, pitch: int, paired: bool
) -> None:
    base = th.word_address(area, word)

    def store(value, position):
        row, token = (arith.index_cast(th.i32(), place) for place in position)
        limits = [(row, rows, tile.shape[0]), (token, tokens, tile.shape[1])]
        with contextlib.ExitStack() as stack:
            if first_row:
                stack.enter_context(utils.when(arith.cmpi(arith.CmpIPredicate.uge, row, th.number(first_row))))
            for place, limit, size in limits:
                if limit < size:
                    stack.enter_context(utils.when(th.under(place, limit)))
            feature = th.add(first_feature, row)
            if paired:
                feature = interleaved_column(feature)
            element = arith.addi(th.mul(token, pitch), feature)
            bits = arith.bitcast(ir.IntegerType.get_signless(16), value)
            place = th.offset(base, th.mul(element, 2))
            utils.inline_ptx("st.relaxed.gpu.global.b16 [$0], $1;", place, bits, has_side_effects=True)

    tile.foreach(store)


def _rows_taken(
    area: Any, word: Any, column: Any, target: Any, count: Any, waits: Any, slots: Any, *, rows: int, pitch: int
) -> None:
    _, blocks, tokens, width = target.shape
    held = held_matrix(area, word, rows, pitch)
    for unit, slot in enumerate(slots):

        @pl.when(unit < count)
        def _(unit: int = unit, slot: Any = slot) -> None:
            for block in range(blocks):
                taken = lax.dynamic_slice_in_dim(held, column + (unit * blocks + block) * width, width, axis=1)
                target.at[slot, block][...] = jnp.pad(taken, ((0, tokens - rows), (0, 0)))

    plgpu.commit_smem()


@thread_op(args=(GLOBAL, SCALAR, SCALAR, plgpu.RefType(TILED), SCALAR, SCALAR, SCALAR), interpret=_rows_taken)
def _take_rows(area, word, column, target, count, waits, slots, *, rows: int, pitch: int) -> None:
    _, blocks, groups, _, rows_of_group, width = th.shape_and_strides(target)[0]
    tokens = groups * rows_of_group
    chunks, size = blocks * tokens * width // 8, blocks * tokens * width * 2
    base = th.word_address(area, word)
    shared, wanted, sources = th.address(target, space=3), [], []
    for unit, slot in enumerate(slots):
        fills = arith.cmpi(arith.CmpIPredicate.ult, th.number(unit), count)
        # What is not wanted is read where the first one is, which costs nothing.
        columns = arith.select(fills, th.number(unit * blocks * width), th.number(0))
        for start in range(0, chunks, WARPGROUP):
            chunk = th.add(th.thread(), start)
            line, place = th.div(chunk, 8), th.rem(chunk, 8)
            block, token = th.div(line, tokens), th.rem(line, tokens)
            there = th.under(token, rows)
            element = arith.addi(th.mul(arith.select(there, token, th.number(0)), pitch), column)
            element = arith.addi(element, arith.addi(th.mul(block, width), columns))
            sources.append(th.offset(base, arith.addi(th.mul(element, 2), th.mul(place, 16))))
            swizzle = th.mul(arith.xori(place, th.rem(token, 8)), 16)
            first = arith.addi(shared, th.mul(slot, size))
            wanted.append((fills, there, arith.addi(arith.addi(first, th.mul(line, width * 2)), swizzle)))
    asked = arith.select(waits, th.mul(count, blocks), th.number(0))
    await_first(th.offset(base, th.mul(column, 2)), asked, width * 2)
    found = await_all(sources, "u16x2")
    for index, (fills, there, to) in enumerate(wanted):
        words = [arith.select(there, value, th.number(0)) for value in found[index * VECTOR : (index + 1) * VECTOR]]
        with utils.when(fills):
            utils.inline_ptx("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", to, *words, has_side_effects=True)
    utils.inline_ptx("fence.proxy.async.shared::cta;", has_side_effects=True)


def take_rows(area, word, column, target, slots, count, waits, *, rows: int, pitch: int) -> None:
    """Copies columns of a matrix that others publish with `put_transposed` to shared memory, as soon as they are there.

    Args:
      column: the first one, int32 scalar.
      target: `[slots, blocks, tokens, 64]` in shared memory, in swizzled tiles of 8 rows.
      slots: where each `blocks * 64` columns go, int32 scalars; count: how many of them are filled, the first ones.
      waits: whether a few threads ask first, where others may not have written yet. What has been there for long is read at once.
      rows: how many tokens count; the others become zeros.
    """
    _take_rows(area, word, column, target, count, waits, list(slots), rows=rows, pitch=pitch)


@thread_op(args=(GLOBAL, SCALAR, COLUMN), interpret=_put)
def put_columns(area, word, values) -> None:
    """Publishes one float32 for each column of a tile, for `take_columns`."""

    def store(value, position):
        place = th.add(word, arith.index_cast(th.i32(), position[0]))
        bits = filled(arith.bitcast(th.i32(), value))
        utils.inline_ptx(
            "st.relaxed.gpu.global.b32 [$0], $1;", th.word_address(area, place), bits, has_side_effects=True
        )

    values.foreach(store)


def _columns_taken(area: Any, word: Any, *, rows: int, tokens: int) -> Any:
    return jnp.pad(_held(area, word, (rows, tokens)), ((0, -rows % 64), (0, 0)))


@thread_op(
    args=(GLOBAL, SCALAR),
    returns=lambda *_, rows, tokens: matrix((-(-rows // 64) * 64, tokens)),
    interpret=_columns_taken,
)
def take_columns(area, word, *, rows: int, tokens: int):
    """Takes `rows` tiles that were published with `put_columns`: `[64 n, tokens]`, zeros after the last one."""
    shape, f32 = (-(-rows // 64) * 64, tokens), ir.F32Type.get()
    zero = mgpu.FragmentedArray.splat(utils.c(0.0, f32), shape, layout=mgpu.WGMMA_LAYOUT)
    addresses, there = [], []
    for position in zero.layout.thread_idxs(shape):
        row, column = (arith.index_cast(th.i32(), place) for place in position)
        there.append(th.under(row, rows))
        place = arith.addi(th.mul(arith.select(there[-1], row, th.number(0)), tokens), column)
        addresses.append(th.word_address(area, th.add(word, place)))
    await_first(th.word_address(area, word), th.number(rows), tokens * 4)
    found, registers = await_all(addresses, "u32", width=2), np.empty_like(zero.registers)
    for index, (place, inside) in enumerate(zip(np.ndindex(registers.shape), there, strict=True)):
        old: Any = zero.registers[place]
        pair = [arith.bitcast(f32, value) for value in found[index * 2 : index * 2 + 2]]
        registers[place] = arith.select(inside, vector.from_elements(old.type, pair), old)
    return mgpu.FragmentedArray(_registers=registers, _layout=zero.layout, _is_signed=None)


@thread_op(args=(GLOBAL, SCALAR), returns=NUMBER, interpret=lambda *_: jnp.int32(0))
def launches(area, word):
    """The number of launches that have ended, which `launched` counts at this word."""
    return th.load(th.word_address(area, word), op="ld.relaxed.gpu.global")[0]


@thread_op(args=(GLOBAL, SCALAR, SCALAR), interpret=lambda *_: None)
def launched(area, word, count) -> None:
    """Sets the word that `launches` reads, after all threads of this warpgroup have read it."""
    set_count(area, word, count)


def set_count(area, word, count) -> None:
    utils.warpgroup_barrier()
    with utils.single_thread(scope=utils.ThreadSubset.WARPGROUP):
        utils.inline_ptx(
            "st.relaxed.gpu.global.b32 [$0], $1;", th.word_address(area, word), count, has_side_effects=True
        )


def await_first(base, count, pitch: int) -> None:
    """Waits for `count` words (int32), each `pitch` bytes after the one before, with as many threads.

    All threads of all CTAs, reading again and again, would be in the way of what they wait for.
    """
    with utils.when(arith.cmpi(arith.CmpIPredicate.ult, th.thread(), count)):
        utils.inline_ptx(
            "{ .reg .pred p; .reg .b32 w; .reg .b64 a; mov.b64 a, $0; again: ld.relaxed.gpu.global.b32 w, [a]; "
            "setp.eq.u32 p, w, 0xffffffff; @p bra again; }",
            th.offset(base, th.mul(th.thread(), pitch)), has_side_effects=True,
        )  # fmt: skip
    utils.warpgroup_barrier()


def await_all(addresses, kind: str, width: int = VECTOR, *, scope: str = "gpu"):
    """The words at all addresses, `width` each, read until no u32, or no half of a u16x2, is EMPTY.

    `scope`: "sys" for what other GPUs write.
    """
    count, i32 = len(addresses), ir.IntegerType.get_signless(32)

    def load(index: int) -> str:
        words = ", ".join(f"${index * width + word}" for word in range(width))
        return f"ld.relaxed.{scope}.global.v{width}.b32 {{{words}}}, [a{index}];"

    def check(indices) -> str:
        words = [f"${index * width + word}" for index in indices for word in range(width)]
        lines = [f"mov.b32 m, {words[0]};", *(f"max.{kind} m, m, {word};" for word in words[1:])]
        if kind == "u32":
            return " ".join(lines) + " setp.eq.u32 p, m, 0xffffffff;"
        return " ".join(lines) + " and.b32 t, m, 0xffff; setp.eq.u32 p, t, 0xffff; setp.ge.or.u32 p, m, 0xffff0000, p;"

    lines = ["{", ".reg .pred p; .reg .b32 m, t;", f".reg .b64 a<{count}>;"]
    lines += [f"mov.b64 a{index}, ${count * width + index};" for index in range(count)]
    every = range(count)
    lines += ["again:", *(load(index) for index in every), check(every), "@p bra again;"]
    lines += ["}"]
    return utils.inline_ptx("\n".join(lines), *addresses, result_types=[i32] * (count * width), has_side_effects=True)


def load_all(addresses):
    """The words at all addresses, VECTOR each."""
    return [word for address in addresses for word in th.load(address, VECTOR, op="ld.relaxed.gpu.global")]


def words_of(registers):
    """All elements of float32 registers of two, as int32."""
    i32 = ir.IntegerType.get_signless(32)
    return [
        arith.bitcast(i32, vector.extract(register, dynamic_position=[], static_position=[i]))
        for register in registers.flat
        for i in range(2)
    ]


def filled(bits):
    """Bits of a float32 that are not EMPTY: another NaN stands for that one."""
    none = arith.cmpi(arith.CmpIPredicate.eq, bits, th.number(EMPTY))
    return arith.select(none, th.number(0x7FFFFFFF), bits)


def store(address, words, *, scope: str = "gpu") -> None:
    """One vector; `scope` "sys" for what other GPUs read."""
    names = ", ".join(f"${i + 1}" for i in range(len(words)))
    utils.inline_ptx(
        f"st.relaxed.{scope}.global.v{len(words)}.b32 [$0], {{{names}}};", address, *words, has_side_effects=True
    )


def own(area, word, first: int):
    """Address of this thread's vector number `first / 4` of a tile in the order of threads."""
    place = arith.addi(th.number(first * WARPGROUP), th.mul(th.thread(), VECTOR))
    return th.word_address(area, th.add(word, place))
