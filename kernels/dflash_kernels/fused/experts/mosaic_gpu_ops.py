"""Steps of the kernel that Pallas has no words for, and what stands for them in its interpreter."""

# Pallas declares what it inlines with the context that it passes itself.
# pyright: reportAbstractUsage=false, reportCallIssue=false, reportPrivateImportUsage=false

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu.utils import when
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.core.device import WARPGROUP
from dflash_kernels.mosaic_gpu.layouts import TILED
from dflash_kernels.mosaic_gpu.ptx import mul, number, offset, thread, word_address

_SCALAR, _WGMMA = plgpu.Layout.WG_SPLAT, plgpu.Layout.WGMMA
_CHUNK = 16  # bytes that one thread copies at once


def copy_entries(source, column, target, order, first, live, *, taken: int, interpret: Any) -> None:
    """Starts copies of a group's rows of `source`, some columns of them, to shared memory; columns of no entry become zeros.

    Args:
      source: `[rows, columns]` in global memory, two bytes an element: a row for each token, or for each sorted entry.
      column: first column, int32 scalar.
      target: `[blocks, N, 64]` in shared memory, in swizzled tiles of 8 rows.
      order: the sorted entries in shared memory.
      first, live: the group's first one and how many there are, int32 scalars.
      taken: entries of a token, where source has a row for each token; else 0.
      interpret: not None under Pallas's interpreter.
    """
    blocks, columns, width = target.shape
    if interpret is not None:
        places = jnp.minimum(first + lax.iota(jnp.int32, columns), first + live - 1)
        rows = order[...][places] // taken if taken else places
        held = source[...][rows]
        for block in range(blocks):
            part = lax.dynamic_slice_in_dim(held, column + block * width, width, axis=1)
            target.at[block][...] = jnp.where(lax.iota(jnp.int32, columns)[:, None] < live, part, jnp.zeros_like(part))
        return
    pitch, chunks = source.shape[1] * 2, blocks * columns * width * 2 // _CHUNK

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR, plgpu.RefType(TILED), plgpu.RefType(), _SCALAR, _SCALAR))
    def start(_, source, column, target, order, first, live):
        i64 = ir.IntegerType.get_signless(64)
        base, to, entries = llvm.ptrtoint(i64, mgpu.utils.memref_ptr(source)), _shared(target), _shared(order)
        column, first, live = (value.registers.item() for value in (column, first, live))
        for begin in range(0, chunks, WARPGROUP):
            chunk = arith.addi(thread(), number(begin))
            line, piece = arith.divui(chunk, number(8)), arith.remui(chunk, number(8))
            block, place = arith.divui(line, number(columns)), arith.remui(line, number(columns))
            there = arith.cmpi(arith.CmpIPredicate.ult, place, live)
            row = arith.addi(first, arith.select(there, place, number(0)))
            if taken:
                row = arith.divui(load_shared(entries, row), number(taken))
            bytes_ = arith.addi(mul(arith.addi(column, mul(block, width)), 2), mul(piece, _CHUNK))
            where = arith.addi(arith.addi(base, arith.muli(_wide(row), mgpu.c(pitch, i64))), _wide(bytes_))
            swizzled = mul(arith.xori(piece, arith.remui(place, number(8))), _CHUNK)
            target_at = arith.addi(arith.addi(to, mul(line, width * 2)), swizzled)
            size = arith.select(there, number(_CHUNK), number(0))
            mgpu.utils.inline_ptx(
                f"cp.async.cg.shared.global [$0], [$1], {_CHUNK}, $2;", target_at, where, size, has_side_effects=True
            )
        mgpu.utils.inline_ptx("cp.async.commit_group;", has_side_effects=True)

    start(source, jnp.asarray(column, jnp.int32), target, order, *_scalars(first, live))


def put_inner(target, tile, first, live, feature, *, rows: int, interpret: Any) -> None:
    """`target[first + column, feature + row] = tile[row, column]` for the first rows and `live` columns, in the target's dtype."""
    tile = tile.astype(target.dtype)
    if interpret is not None:
        for column in range(tile.shape[1]):

            @pl.when(column < live)
            def _(column=column):
                target.at[first + column, pl.ds(feature, rows)][...] = tile[:rows, column]

        return
    pitch = target.shape[1]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _WGMMA, _SCALAR, _SCALAR, _SCALAR))
    def put(_, target, tile, first, live, feature):
        first, live, feature = (value.registers.item() for value in (first, live, feature))
        base = word_address(target, number(0))

        def store(value, position):
            row, column = (arith.index_cast(ir.IntegerType.get_signless(32), place) for place in position)
            element = arith.addi(mul(arith.addi(first, column), pitch), arith.addi(feature, row))
            there = arith.cmpi(arith.CmpIPredicate.ult, column, live)
            if rows < tile.shape[0]:
                there = arith.andi(there, arith.cmpi(arith.CmpIPredicate.ult, row, number(rows)))
            bits = arith.bitcast(ir.IntegerType.get_signless(16), value)
            mgpu.utils.inline_ptx(
                "st.global.b16 [$0], $1;", offset(base, mul(element, 2)), bits, has_side_effects=True, predicate=there
            )

        tile.foreach(store)

    put(target, tile, *_scalars(first, live, feature))


def put_out(target, tile, order, share, first, live, feature, interpret: Any) -> None:
    """`target[choice, token, feature + row] = share * tile[row, column]` for the entries of the `live` first columns.

    Args:
      target: `[k, T, D]` float32 in global memory.
      tile: `[64, N]` float32.
      order, share: sorted entries and their weights, in shared memory.
    """
    taken, tokens, hidden = target.shape
    if interpret is not None:
        for column in range(tile.shape[1]):

            @pl.when(column < live)
            def _(column=column):
                entry = order[first + column]
                place = target.at[lax.rem(entry, taken), lax.div(entry, taken), pl.ds(feature, tile.shape[0])]
                place[...] = tile[:, column] * share[first + column]

        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _WGMMA, plgpu.RefType(), plgpu.RefType(), _SCALAR, _SCALAR, _SCALAR))
    def put(_, target, tile, order, share, first, live, feature):
        first, live, feature = (value.registers.item() for value in (first, live, feature))
        base, entries, shares = word_address(target, number(0)), _shared(order), _shared(share)
        i64, found = ir.IntegerType.get_signless(64), {}

        def column_of(column, key):
            """Where a column's entry goes, and its weight: once for all rows of a thread."""
            if key not in found:
                there = arith.cmpi(arith.CmpIPredicate.ult, column, live)
                place = arith.addi(first, arith.select(there, column, number(0)))
                entry = load_shared(entries, place)
                token, choice = arith.divui(entry, number(taken)), arith.remui(entry, number(taken))
                row = _wide(arith.addi(mul(choice, tokens), token))
                start = arith.addi(base, arith.muli(row, mgpu.c(hidden * 4, i64)))
                weight = arith.bitcast(ir.F32Type.get(), load_shared(shares, place))
                found[key] = there, start, weight
            return found[key]

        count = 0

        def store(value, position):
            nonlocal count
            row, column = (arith.index_cast(ir.IntegerType.get_signless(32), place) for place in position)
            # Two rows of two neighbouring columns follow one another.
            there, start, weight = column_of(column, (count // 4, count % 2))
            count += 1
            where = offset(start, mul(arith.addi(feature, row), 4))
            mgpu.utils.inline_ptx(
                "st.global.f32 [$0], $1;", where, arith.mulf(value, weight), has_side_effects=True, predicate=there
            )

        tile.foreach(store)

    put(target, tile, order, share, *_scalars(first, live, feature))


def announce_tile(ready, group) -> None:
    """Counts one more tile of a group, after all that this warpgroup has written."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR))
    def announce(_, ready, group):
        mgpu.utils.inline_ptx("fence.acq_rel.gpu;", has_side_effects=True)
        mgpu.utils.warpgroup_barrier()
        with mgpu.utils.single_thread(scope=mgpu.utils.ThreadSubset.WARPGROUP):
            mgpu.utils.inline_ptx(
                "red.release.gpu.global.add.u32 [$0], 1;",
                word_address(ready, group.registers.item()),
                has_side_effects=True,
            )

    announce(ready, *_scalars(group))


def await_tiles(ready, group, *, given: int, taken: int) -> None:
    """Waits until so many tiles of a group are there. The last of `taken` who wait leaves the count at 0 for the next launch."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR))
    def wait(_, ready, group):
        with when(arith.cmpi(arith.CmpIPredicate.eq, thread(), number(0))):
            mgpu.utils.inline_ptx(
                "{ .reg .pred p; .reg .b32 w; .reg .b64 a; mov.b64 a, $0; again: ld.acquire.gpu.global.u32 w, [a]; "
                f"setp.lt.u32 p, w, {given}; @p bra again; atom.relaxed.gpu.global.add.u32 w, [a], 1; "
                f"setp.eq.u32 p, w, {given + taken - 1}; @p st.relaxed.gpu.global.u32 [a], 0; }}",
                word_address(ready, group.registers.item()), has_side_effects=True,
            )  # fmt: skip
        mgpu.utils.warpgroup_barrier()

    wait(ready, *_scalars(group))


def _scalars(*values):
    return [jnp.asarray(value, jnp.int32) for value in values]


def _shared(ref):
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), mgpu.utils.memref_ptr(ref))


def load_shared(base, place):
    """A word of shared memory."""
    i32 = ir.IntegerType.get_signless(32)
    return mgpu.utils.inline_ptx(
        "ld.shared.b32 $0, [$1];", arith.addi(base, mul(place, 4)), result_types=i32, has_side_effects=True
    )


def _wide(value):
    return arith.extui(ir.IntegerType.get_signless(64), value)
