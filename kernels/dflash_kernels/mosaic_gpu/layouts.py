"""Steps of the chain that Pallas has no words for, and what stands for them in its interpreter."""

# Pallas declares what it inlines with the context that it passes itself.
# pyright: reportAbstractUsage=false, reportCallIssue=false, reportPrivateImportUsage=false

import contextlib
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm, memref, scf
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # of operands of matrix instructions


def tiled(dtype: Any) -> tuple[Any, ...]:
    """The same bytes as `TILED` for elements of `dtype`."""
    return plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(128)


_SCALAR = plgpu.Layout.WG_SPLAT
_WARPGROUP = 128
_CHUNK = 16  # bytes that one thread copies at once


def copy_rows(source, column, target, *, rows: int, interpret: Any) -> None:
    """Starts copies of the first rows of `source`, some columns of them, to shared memory; rows that are not there become zeros.

    They do not go through the tensor memory accelerator, where they would wait behind all weights asked for before.

    Args:
      source: `[rows or more, columns]` in global memory, two bytes an element.
      column: first column, int32 scalar.
      target: `[blocks, tokens, 64]` in shared memory, in swizzled tiles of 8 rows.
      rows: how many rows count.
      interpret: not None under Pallas's interpreter.
    """
    blocks, tokens, width = target.shape
    if interpret is not None:
        for block in range(blocks):
            held = source[pl.ds(0, rows), pl.ds(column + block * width, width)]
            target.at[block][...] = jnp.pad(held, ((0, tokens - rows), (0, 0)))
        return
    pitch, chunks = source.shape[1] * 2, blocks * tokens * width * 2 // _CHUNK

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR, plgpu.RefType(TILED)))
    def start(_, source, column, target):
        i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)

        def number(value):
            return mgpu.c(value, i32)

        first = llvm.ptrtoint(i64, mgpu.utils.memref_ptr(source))
        shared = llvm.ptrtoint(i32, mgpu.utils.memref_ptr(target))
        thread = arith.remui(mgpu.utils.thread_idx(), number(_WARPGROUP))
        for start in range(0, chunks, _WARPGROUP):
            chunk = arith.addi(thread, number(start))
            line, place = arith.divui(chunk, number(8)), arith.remui(chunk, number(8))
            block, token = arith.divui(line, number(tokens)), arith.remui(line, number(tokens))
            there = arith.cmpi(arith.CmpIPredicate.ult, token, number(rows))
            size = arith.select(there, number(_CHUNK), number(0))
            row = arith.muli(arith.select(there, token, number(0)), number(pitch))
            columns = arith.addi(column.registers.item(), arith.muli(block, number(width)))
            offset = arith.addi(arith.addi(row, arith.muli(columns, number(2))), arith.muli(place, number(_CHUNK)))
            swizzled = arith.muli(arith.xori(place, arith.remui(token, number(8))), number(_CHUNK))
            to = arith.addi(arith.addi(shared, arith.muli(line, number(width * 2))), swizzled)
            inside = arith.cmpi(arith.CmpIPredicate.ult, chunk, number(chunks))
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"), [inside, to, arith.addi(first, arith.extui(i64, offset)), size],
                f"@$0 cp.async.cg.shared.global [$1], [$2], {_CHUNK}, $3;", "b,r,l,r", has_side_effects=True,
            )  # fmt: skip
        mgpu.utils.inline_ptx("cp.async.commit_group;", has_side_effects=True)

    start(source, jnp.asarray(column, jnp.int32), target)


def copied(later: int, interpret: Any) -> None:
    """Waits for all copies that this warpgroup started with `copy_rows` but those of the `later` last calls."""
    if interpret is not None:
        plgpu.commit_smem()
        return

    @plgpu.inline_mgpu()
    def wait(_):
        mgpu.utils.inline_ptx(f"cp.async.wait_group {later};", has_side_effects=True)
        mgpu.utils.inline_ptx("fence.proxy.async.shared::cta;", has_side_effects=True)

    wait()


def store_turned(target, first_feature, tile, *, rows: int, tokens: int, interpret: Any) -> None:
    """`target[token, first_feature + row] = tile[row, token]`, rounded to the target's dtype.

    Args:
      target: `[tokens or more, features]` in global memory.
      first_feature: int32 scalar.
      tile: `[64, N]` in the layout of a matrix instruction's result.
      rows, tokens: what of the tile counts, the first ones of each.
      interpret: not None under Pallas's interpreter.
    """
    if interpret is not None:
        turned = tile[:rows, :tokens].T.astype(target.dtype)
        target.at[pl.ds(0, tokens), pl.ds(first_feature, rows)][...] = turned
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR, plgpu.Layout.WGMMA))
    def store(_, target, first_feature, tile):
        index = ir.IndexType.get()
        feature0 = arith.index_cast(index, first_feature.registers.item())

        def put(value, position):
            limits = zip(position, (rows, tokens), tile.shape, strict=True)
            limits = [(place, limit) for place, limit, size in limits if limit < size]
            with contextlib.ExitStack() as stack:
                for place, limit in limits:
                    branch = scf.IfOp(arith.cmpi(arith.CmpIPredicate.slt, place, mgpu.c(limit, index)))
                    stack.enter_context(then(branch))
                memref.store(value, target, [position[1], arith.addi(feature0, position[0])])

        tile.foreach(put)

    store(target, jnp.asarray(first_feature, jnp.int32), tile.astype(target.dtype))


@contextlib.contextmanager
def then(branch: scf.IfOp) -> Iterator[None]:
    """What is built inside runs where the branch's condition holds."""
    with ir.InsertionPoint(branch.then_block):
        yield
        scf.yield_([])


def rows_of(ref, layout):
    return plgpu.load(ref, layout=layout, optimized=False)


def sigmoid(x):
    return 1.0 / (1.0 + jnp.exp(-x))


def rem(a, b: int):
    return lax.rem(a, jnp.int32(b))


def div(a, b: int):
    return lax.div(a, jnp.int32(b))
