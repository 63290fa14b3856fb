"""Layouts in shared memory and the order of columns and rows that matrix instructions see.

A tile is swizzled over 128, 64 or 32 bytes, in groups of eight rows, as TMA writes it and matrix instructions read it without bank
conflicts.
"""

# Pallas declares its transforms less public than it documents them, and what it inlines as if it were called as written.
# pyright: reportAbstractUsage=false, reportCallIssue=false, reportPrivateImportUsage=false

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref

from dflash_kernels.mosaic_gpu import ptx as th
from dflash_kernels.mosaic_gpu.thread_op import GLOBAL, MATRIX, ROW, SCALAR, interpreting, thread_op

TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # of operands of two bytes a number


def tiled(dtype: Any) -> tuple[Any, ...]:
    """The same bytes as `TILED` for elements of `dtype`."""
    return plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(128)


def swizzled(dtype: Any, columns: int, most: int = 128) -> tuple[Any, ...]:
    """Shared-memory layout that matrix instructions and TMA read without bank conflicts, swizzled over up to `most` bytes."""
    for swizzle in (128, 64, 32):
        if swizzle <= most and columns % (swizzle // jnp.dtype(dtype).itemsize) == 0:
            return (
                plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize)),
                plgpu.SwizzleTransform(swizzle),
            )
    raise NotImplementedError(f"rows of {columns} {jnp.dtype(dtype).name} do not tile")


def tile_of(memory, most: int = 128):
    """Type of a swizzled tile `[rows, columns]` in shared memory, as an operand of an operation; `most` as of `swizzled`."""
    return plgpu.RefType(swizzled(memory.dtype, memory.shape[1], most))


def in_key_order(q: jax.Array) -> jax.Array:
    """`[..., H]` in the order in which products see a key's columns."""
    return q.reshape(*q.shape[:-1], -1, 4, 2, 2).swapaxes(-2, -3).reshape(q.shape)


def in_parity_order(x: jax.Array) -> jax.Array:
    """`[..., H]` in the order in which rows widened to bfloat16 come: each 16 columns as `[parity, column // 2]`."""
    return x.reshape(*x.shape[:-1], -1, 8, 2).swapaxes(-1, -2).reshape(x.shape)


def in_value_order(values: jax.Array) -> jax.Array:
    """`[H, keys]` in the order of the product's rows."""
    return values.reshape(-1, 8, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)


def in_column_order(out: jax.Array) -> jax.Array:
    """The other way round."""
    return out.reshape(-1, 2, 8, out.shape[1]).swapaxes(1, 2).reshape(out.shape)


def _stored_transposed(target, first_feature, tile, *, rows: int, tokens: int) -> None:
    transposed = tile[:rows, :tokens].T.astype(target.dtype)
    target.at[pl.ds(0, tokens), pl.ds(first_feature, rows)][...] = transposed


def store_transposed(target, first_feature, tile, *, rows: int, tokens: int) -> None:
    """`target[token, first_feature + row] = tile[row, token]`, rounded to the target's dtype.

    Args:
      target: `[tokens or more, features]` in global memory.
      first_feature: int32 scalar.
      tile: `[64, N]` in the layout of a matrix instruction's result.
      rows, tokens: what of the tile counts, the first ones of each.
    """
    _store_transposed(target, first_feature, tile.astype(target.dtype), rows=rows, tokens=tokens)


@thread_op(args=(GLOBAL, SCALAR, MATRIX), interpret=_stored_transposed)
def _store_transposed(target, first_feature, tile, *, rows: int, tokens: int) -> None:
    index = ir.IndexType.get()
    feature0 = arith.index_cast(index, first_feature)

    def put(value, position):
        limits = zip(position, (rows, tokens), tile.shape, strict=True)
        limits = [(place, limit) for place, limit, size in limits if limit < size]
        with contextlib.ExitStack() as stack:
            for place, limit in limits:
                inside = arith.cmpi(arith.CmpIPredicate.slt, place, utils.c(limit, index))
                stack.enter_context(utils.when(inside))
            memref.store(value, target, [position[1], arith.addi(feature0, position[0])])

    tile.foreach(put)


def store(place: Any, value: jax.Array) -> None:
    """Stores registers to global memory, however few bytes a thread has.

    JAX 0.12 refuses by default what 0.11 stores: fewer than four bytes a thread, or parts of a 32-byte sector.

    Args:
      place: a Ref's `.at[...]`.
      value: as many numbers, of the Ref's dtype.
    """
    unaligned = getattr(plgpu, "store", None)  # new in JAX 0.12
    if unaligned is None or interpreting():
        place[...] = value
    else:
        unaligned(place, value, optimized=False)


def rows_of(ref, layout):
    """A Ref's contents in registers, in any layout."""
    return plgpu.load(ref, layout=layout, optimized=False)


def row_of(ref):
    """A vector in registers, in the layout of an accumulator's rows."""
    return ref[...] if interpreting() else rows_of(ref, ROW)


def interleaved_column(column):
    """Place of a column in rows whose columns are interleaved (`core.layouts.interleave_columns`)."""
    block, other = arith.andi(column, th.number(-16)), arith.andi(arith.shrui(column, th.number(3)), th.number(1))
    return arith.addi(block, arith.addi(th.mul(arith.andi(column, th.number(7)), 2), other))
