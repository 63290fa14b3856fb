"""How CTAs of the chain hand results to one another: words in global memory that say themselves whether they have been written.

Before a launch every word of its exchange is EMPTY, bits that no result has. Whoever needs a result reads it until none of its
words is EMPTY. Nobody counts, no store waits for another one, and readers go on with what is there. Launches take turns with two
areas: one is used, the other one is emptied for the next launch.
"""

# Pallas declares what it inlines with the context that it passes itself.
# pyright: reportAbstractUsage=false, reportCallIssue=false, reportPrivateImportUsage=false

import contextlib
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm, vector
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.fused.layer.plan import EMPTY
from dflash_kernels.mosaic_gpu import layer_memory as memory
from dflash_kernels.mosaic_gpu.layouts import TILED

_SCALAR = plgpu.Layout.WG_SPLAT


def empty(area, word, *, words: int) -> None:
    """Makes words of an exchange EMPTY; `word` and `words` are multiples of 4."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR))
    def clear(_, area, word):
        none = memory.number(EMPTY)
        for first in range(0, words, memory.WARPGROUP * memory.VECTOR):
            place = arith.addi(memory.number(first), memory.times(memory.thread(), memory.VECTOR))
            with memory.when(arith.cmpi(arith.CmpIPredicate.ult, place, memory.number(words))):
                memory.store(memory.address(area, arith.addi(word.registers.item(), place)), [none] * memory.VECTOR)

    clear(area, jnp.asarray(word, jnp.int32))


def put_tile(area, word, tile) -> None:
    """Hands over a tile of float32 in the layout of a matrix instruction's result, for `add_tiles`."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR, plgpu.Layout.WGMMA))
    def put(_, area, word, tile):
        words = [memory.filled(value) for value in memory.words_of(tile.registers)]
        for first in range(0, len(words), memory.VECTOR):
            memory.store(memory.own(area, word, first), words[first : first + memory.VECTOR])

    put(area, jnp.asarray(word, jnp.int32), tile)


def add_tiles(area, places, tile):
    """`tile` plus the tiles that other CTAs hand over at `places`, added in order as soon as all are there."""
    if not places:
        return tile
    result = plgpu.ShapeDtypeStruct(tile.shape, tile.dtype, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[_SCALAR] * len(places), plgpu.Layout.WGMMA), return_type=result)
    def add(_, area, *rest):
        *words, tile = rest
        count = len(memory.words_of(tile.registers))
        addresses = [memory.own(area, word, first) for word in words for first in range(0, count, memory.VECTOR)]
        found, f32 = memory.await_all(addresses, "u32"), ir.F32Type.get()
        registers = np.empty_like(tile.registers)
        for index, place in enumerate(np.ndindex(tile.registers.shape)):
            register = tile.registers[place]
            for part in range(len(words)):
                pair = [arith.bitcast(f32, found[part * count + index * 2 + i]) for i in range(2)]
                register = arith.addf(register, vector.from_elements(register.type, pair))
            registers[place] = register
        return mgpu.FragmentedArray(_registers=registers, _layout=tile.layout, _is_signed=tile.is_signed)

    return add(area, *[jnp.asarray(place, jnp.int32) for place in places], tile)


def put_turned(
    area, word, first_feature, tile, *, first_row: int, rows: int, tokens: int, pitch: int, paired: bool
) -> None:
    """Hands over a tile `[64, N]` as bfloat16: element `[token, first_feature + row]` of a matrix of `pitch` columns.

    Rows from `first_row` up to `rows` and so many `tokens` are what of the tile counts; `paired`: whether columns lie in pairs.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR, _SCALAR, plgpu.Layout.WGMMA))
    def put(_, area, word, first_feature, tile):
        base, i32 = memory.address(area, word.registers.item()), ir.IntegerType.get_signless(32)

        def store(value, position):
            row, token = (arith.index_cast(i32, place) for place in position)
            limits = [(row, rows, tile.shape[0]), (token, tokens, tile.shape[1])]
            with contextlib.ExitStack() as stack:
                if first_row:
                    stack.enter_context(memory.when(arith.cmpi(arith.CmpIPredicate.uge, row, memory.number(first_row))))
                for place, limit, size in limits:
                    if limit < size:
                        stack.enter_context(
                            memory.when(arith.cmpi(arith.CmpIPredicate.ult, place, memory.number(limit)))
                        )
                feature = arith.addi(first_feature.registers.item(), row)
                if paired:
                    feature = memory.paired(feature)
                element = arith.addi(memory.times(token, pitch), feature)
                bits = arith.bitcast(ir.IntegerType.get_signless(16), value)
                mgpu.utils.inline_ptx(
                    "st.relaxed.gpu.global.b16 [$0], $1;",
                    memory.offset(base, memory.times(element, 2)),
                    bits,
                    has_side_effects=True,
                )

        tile.foreach(store)

    arguments = [jnp.asarray(value, jnp.int32) for value in (word, first_feature)]
    put(area, *arguments, tile.astype(jnp.bfloat16))


def take_rows(area, word, column, target, slots, count, waits, *, rows: int, pitch: int) -> None:
    """Copies columns of a matrix that others hand over with `put_turned` to shared memory, as soon as they are there.

    Args:
      column: the first one, int32 scalar.
      target: `[slots, blocks, tokens, 64]` in shared memory, in swizzled tiles of 8 rows.
      slots: where each `blocks * 64` columns go, int32 scalars; count: how many of them are filled, the first ones.
      waits: whether a few threads ask first, where others may not have written yet. What has been there for long is read at once.
      rows: how many tokens count; the others become zeros.
    """
    _, blocks, tokens, width = target.shape
    chunks, size = blocks * tokens * width // 8, blocks * tokens * width * 2

    scalars = [_SCALAR] * (2 + len(slots))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR, _SCALAR, plgpu.RefType(TILED), *scalars))
    def take(_, area, word, column, target, count, waits, *slots):
        count, waits = count.registers.item(), waits.registers.item()
        base, i32 = memory.address(area, word.registers.item()), ir.IntegerType.get_signless(32)
        shared, wanted, sources = llvm.ptrtoint(i32, mgpu.utils.memref_ptr(target)), [], []
        for unit, slot in enumerate(slots):
            filled = arith.cmpi(arith.CmpIPredicate.ult, memory.number(unit), count)
            # What is not wanted is read where the first one is, which costs nothing.
            columns = arith.select(filled, memory.number(unit * blocks * width), memory.number(0))
            for start in range(0, chunks, memory.WARPGROUP):
                chunk = arith.addi(memory.thread(), memory.number(start))
                line, place = arith.divui(chunk, memory.number(8)), arith.remui(chunk, memory.number(8))
                block, token = arith.divui(line, memory.number(tokens)), arith.remui(line, memory.number(tokens))
                there = arith.cmpi(arith.CmpIPredicate.ult, token, memory.number(rows))
                element = arith.addi(
                    memory.times(arith.select(there, token, memory.number(0)), pitch), column.registers.item()
                )
                element = arith.addi(element, arith.addi(memory.times(block, width), columns))
                sources.append(memory.offset(base, arith.addi(memory.times(element, 2), memory.times(place, 16))))
                swizzled = memory.times(arith.xori(place, arith.remui(token, memory.number(8))), 16)
                first = arith.addi(shared, memory.times(slot.registers.item(), size))
                wanted.append((filled, there, arith.addi(arith.addi(first, memory.times(line, width * 2)), swizzled)))
        asked = arith.select(waits, memory.times(count, blocks), memory.number(0))
        memory.await_first(memory.offset(base, memory.times(column.registers.item(), 2)), asked, width * 2)
        found = memory.await_all(sources, "u16x2")
        for index, (filled, there, to) in enumerate(wanted):
            words = [
                arith.select(there, value, memory.number(0))
                for value in found[index * memory.VECTOR : (index + 1) * memory.VECTOR]
            ]
            with memory.when(filled):
                mgpu.utils.inline_ptx("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", to, *words, has_side_effects=True)
        mgpu.utils.inline_ptx("fence.proxy.async.shared::cta;", has_side_effects=True)

    word, column, count, *slots = (jnp.asarray(value, jnp.int32) for value in (word, column, count, *slots))
    take(area, word, column, target, count, jnp.asarray(waits), *slots)


def put_columns(area, word, values) -> None:
    """Hands over one float32 for each column of a tile, for `take_columns`."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR, plgpu.Layout.WGMMA.reduce(0)))
    def put(_, area, word, values):
        i32 = ir.IntegerType.get_signless(32)

        def store(value, position):
            place = arith.addi(word.registers.item(), arith.index_cast(i32, position[0]))
            bits = memory.filled(arith.bitcast(i32, value))
            mgpu.utils.inline_ptx(
                "st.relaxed.gpu.global.b32 [$0], $1;", memory.address(area, place), bits, has_side_effects=True
            )

        values.foreach(store)

    put(area, jnp.asarray(word, jnp.int32), values)


def take_columns(area, word, *, rows: int, tokens: int):
    """What `rows` tiles hand over with `put_columns`, one after the other in memory: `[64 n, tokens]`, zeros after the last one."""
    shape = (-(-rows // 64) * 64, tokens)
    result = plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.float32), layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR), return_type=result)
    def take(_, area, word):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        zero = mgpu.FragmentedArray.splat(mgpu.c(0.0, f32), shape, layout=mgpu.WGMMA_LAYOUT)
        addresses, there = [], []
        for position in zero.layout.thread_idxs(shape):
            row, column = (arith.index_cast(i32, place) for place in position)
            there.append(arith.cmpi(arith.CmpIPredicate.ult, row, memory.number(rows)))
            place = arith.addi(memory.times(arith.select(there[-1], row, memory.number(0)), tokens), column)
            addresses.append(memory.address(area, arith.addi(word.registers.item(), place)))
        memory.await_first(memory.address(area, word.registers.item()), memory.number(rows), tokens * 4)
        found, registers = memory.await_all(addresses, "u32", width=2), np.empty_like(zero.registers)
        for index, (place, inside) in enumerate(zip(np.ndindex(registers.shape), there, strict=True)):
            old: Any = zero.registers[place]
            pair = [arith.bitcast(f32, value) for value in found[index * 2 : index * 2 + 2]]
            registers[place] = arith.select(inside, vector.from_elements(old.type, pair), old)
        return mgpu.FragmentedArray(_registers=registers, _layout=zero.layout, _is_signed=None)

    return take(area, jnp.asarray(word, jnp.int32))


def launches(area, word):
    """How many launches have ended: what `launched` has counted at this word."""
    result = plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=_SCALAR)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR), return_type=result)
    def read(_, area, word):
        i32 = ir.IntegerType.get_signless(32)
        value = mgpu.utils.inline_ptx(
            "ld.relaxed.gpu.global.b32 $0, [$1];", memory.address(area, word.registers.item()), result_types=i32,
            has_side_effects=True,
        )  # fmt: skip
        return mgpu.FragmentedArray.splat(value, (), is_signed=True)

    return read(area, jnp.asarray(word, jnp.int32))


def launched(area, word, count) -> None:
    """Sets the word that `launches` reads, after all threads of this warpgroup have read it."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR, _SCALAR))
    def write(_, area, word, count):
        mgpu.utils.warpgroup_barrier()
        with mgpu.utils.single_thread(scope=mgpu.utils.ThreadSubset.WARPGROUP):
            mgpu.utils.inline_ptx(
                "st.relaxed.gpu.global.b32 [$0], $1;", memory.address(area, word.registers.item()), count.registers.item(),
                has_side_effects=True,
            )  # fmt: skip

    write(area, jnp.asarray(word, jnp.int32), jnp.asarray(count, jnp.int32))
