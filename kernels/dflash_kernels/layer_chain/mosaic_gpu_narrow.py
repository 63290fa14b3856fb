"""Weights of one byte on their way from shared memory into a matrix instruction, and the scales of their rows."""

# Pallas declares what it inlines with the context that it passes itself.
# pyright: reportAbstractUsage=false, reportCallIssue=false, reportPrivateImportUsage=false

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, memref
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.layer_chain.mosaic_gpu_ops import tiled
from dflash_kernels.layer_chain.mosaic_gpu_plan import BLOCK, ROWS
from dflash_kernels.quantised_linear.columns import out_of_pairs

_SCALAR = plgpu.Layout.WG_SPLAT


# Of each thread: the warpgroup that attends and multiplies, those that copy, and the second one that multiplies; 512 together at
# most. Those that multiply run the same code.
REGISTERS = (168, 40, 136, 168)
LAUNCHED_REGISTERS = 128


def deal_registers(warpgroup: int) -> None:
    """Gives a warpgroup its registers; all four call this first."""
    own = REGISTERS[warpgroup]
    plgpu.set_max_registers(own, action="increase" if own > LAUNCHED_REGISTERS else "decrease")


def widened(tiles: list[Any], half, spare: Any, interpret: Any):
    """One half of the columns of a tile of weights as bfloat16 `[64, 64]` in registers, out of their pairs.

    Args:
      tiles: one `[64, 128]`, or two of up to 32 rows for half of the rows each, of which the others are anything.
      half: int32 scalar.
      spare: where the result is under the interpreter.
    """
    if interpret is not None:
        size = ROWS // len(tiles)
        whole = jnp.concatenate([jnp.pad(tile[...], ((0, size - tile.shape[0]), (0, 0))) for tile in tiles])
        wide = out_of_pairs(whole.astype(jnp.float32)).reshape(ROWS, 2, BLOCK)
        spare[...] = lax.dynamic_index_in_dim(wide, half, 1, keepdims=False).astype(spare.dtype)
        return spare

    from dflash_kernels.paged_attention.mosaic_gpu_narrow_words import widened_columns

    result = plgpu.ShapeDtypeStruct((ROWS, BLOCK), jnp.dtype(jnp.bfloat16), layout=plgpu.Layout.WGMMA)
    kinds = [plgpu.RefType(tiled(tile.dtype)) for tile in tiles]

    @plgpu.inline_mgpu(arg_types=(_SCALAR, *kinds), return_type=result)
    def widen(_, half, *tiles):
        return widened_columns(tiles, half.registers.item())

    return widen(jnp.asarray(half, jnp.int32), *tiles)


def times_rows(tile, scales, first, last: int, interpret: Any):
    """`tile [64, N]` with each row times `scales[first + row]`, float32; rows past `last` take the one there."""
    if interpret is not None:
        rows = jnp.minimum(first + lax.iota(jnp.int32, ROWS), last)
        return tile * scales[...][rows][:, None]

    result = plgpu.ShapeDtypeStruct(tile.shape, tile.dtype, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR, plgpu.Layout.WGMMA), return_type=result)
    def scale(_, scales, first, tile):
        index, i32 = ir.IndexType.get(), ir.IntegerType.get_signless(32)

        def multiplied(value, position):
            row = arith.addi(first.registers.item(), arith.index_cast(i32, position[0]))
            row = arith.minsi(row, mgpu.c(last, i32))
            return arith.mulf(value, memref.load(scales, [arith.index_cast(index, row)]))

        return tile.foreach(multiplied, create_array=True)

    return scale(scales, jnp.asarray(first, jnp.int32), tile)
