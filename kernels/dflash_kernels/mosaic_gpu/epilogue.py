"""Epilogues of attention: tiles of results from registers to global memory, row `t * G + g` of a tile to head g of token t."""

# Pallas declares ACC and its transforms less public than it documents them.
# pyright: reportPrivateImportUsage=false

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import vector

from dflash_kernels.core.device import MATRIX_ROWS as ROWS
from dflash_kernels.mosaic_gpu import ptx as th
from dflash_kernels.mosaic_gpu.combine import rows_stored, store_fragments
from dflash_kernels.mosaic_gpu.layouts import swizzled
from dflash_kernels.mosaic_gpu.thread_op import GLOBAL, MATRIX, SCALAR, thread_op


def _columns_stored(target: Any, tile: Any, column: Any, first_row: Any = 0, *, rows: int) -> None:
    # Tiles hold whole tokens, or there is only one tile.
    tokens, group, _ = target.shape
    first = lax.div(jnp.int32(first_row), jnp.int32(group))

    @pl.loop(0, jnp.minimum(tokens - first, max(ROWS // group, 1)))
    def _(token: Any) -> None:
        place = target.at[first + token, :, pl.ds(column, tile.shape[1])]
        place[...] = lax.dynamic_slice_in_dim(tile, token * group, group)


@thread_op(args=lambda *operands, rows: (GLOBAL, MATRIX, SCALAR, SCALAR)[: len(operands)], interpret=_columns_stored)
def store_columns(target, tile, column, first_row=None, *, rows: int) -> None:
    """A tile `[64, C]` of two-byte elements to columns of `target [T, G, H]` from one on, and to its rows `t * G + g` from 0 on, or
    from `first_row`; the first `rows` exist."""
    (_, group, _), (token_stride, group_stride, _) = th.shape_and_strides(target)
    lane, warp = th.lane_and_warp()
    base, own = th.address(target), th.mul(th.rem(lane, 4), 4)  # bytes: two columns of every eight
    places = []
    for half in range(2):
        row = th.add(th.add(th.mul(warp, 16), th.div(lane, 4)), 8 * half)
        row = row if first_row is None else th.add(first_row, row)
        token = th.div(row, group)
        offset = th.add(th.mul(token, token_stride), th.mul(th.sub(row, th.mul(token, group)), group_stride))
        address = th.add(base, th.add(th.mul(th.widen_index(th.add(offset, column)), 2), th.widen_index(own)))
        places.append((th.below(row, rows), address))
    for place, index in enumerate(np.ndindex(tile.registers.shape)):
        # Rows take turns, eight columns after eight columns.
        exists, address = places[place % 2]
        word = utils.bitcast(tile.registers[index], th.i32())
        th.when(exists, "st.global.b32 [$0], $1;", th.add(address, 16 * (place // 2)), word)


@thread_op(args=(GLOBAL, MATRIX, SCALAR), interpret=rows_stored)
def store_split(target, tile, first_row) -> None:
    """A split's tile `[64, H]` of float32 to `target [R, H]` from `first_row` on, as far as it has rows.

    From registers, which is sooner than by way of shared memory.
    """
    (rows, _), (row_stride, _) = th.shape_and_strides(target)
    size = 4  # bytes of a float32
    lane, warp = th.lane_and_warp()
    base = th.add(th.address(target), th.widen_index(th.mul(th.rem(lane, 4), 2 * size)))  # two columns of every eight
    places = []
    for half in range(2):
        row = th.add(th.add(th.mul(warp, 16), th.div(lane, 4)), 8 * half)
        row = th.add(first_row, row)
        places.append((th.below(row, rows), th.add(base, th.mul(th.widen_index(row), row_stride * size))))
    for place, index in enumerate(np.ndindex(tile.registers.shape)):
        # Rows take turns, eight columns after eight columns.
        exists, address = places[place % 2]
        both = (vector.extract(tile.registers[index], [], [i]) for i in range(2))
        th.when(exists, "st.global.v2.f32 [$0], {$1, $2};", th.add(address, 8 * size * (place // 2)), *both)


def scratch(launch: Any, dtype: Any) -> dict[str, Any]:
    """Shared memory that results go through. The direct output leaves in slices of `group` rows, which a tiled layout cannot
    give."""
    plain = launch.direct or launch.combines
    out: dict[str, Any] = {} if plain else {"transforms": swizzled(jnp.float32, launch.head_dim)}
    rows = (launch.warpgroups, ROWS, launch.head_dim)
    buffers: dict[str, Any] = {"o_sm": plgpu.SMEM(rows, dtype if launch.direct else jnp.float32, **out)}
    if launch.together:
        buffers["lse_sm"] = plgpu.SMEM((ROWS,), jnp.float32)
    return buffers


def write_split(launch: Any, refs: dict[str, Any], work: Any, out: Any) -> None:
    """A warpgroup's rows of a split, from registers."""
    store = store_fragments if launch.fragments else store_split
    store(refs["o"].at[work.place.sequence, work.head, work.place.split], out, work.first_row)


def write_through(launch: Any, refs: dict[str, Any], work: Any, o_sm: Any, out: Any) -> None:
    """A warpgroup's rows of the output itself by way of shared memory, one token's group of heads after the other.

    Tiles hold whole tokens, or there is only one tile.
    """
    rows, group = o_sm.at[work.warpgroup], launch.group
    rows[...] = out.astype(o_sm.dtype)
    plgpu.commit_smem()
    first = lax.div(work.first_row, jnp.int32(group))

    @pl.loop(0, jnp.minimum(launch.tokens - first, ROWS // group))
    def _(token):
        target = refs["o"].at[work.place.sequence, first + token, work.head]
        plgpu.copy_smem_to_gmem(rows.at[pl.ds(token * group, group)], target)

    plgpu.wait_smem_to_gmem(0)
