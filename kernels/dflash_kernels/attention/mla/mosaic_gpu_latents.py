"""Float8 latents as the first operand of matrix products: from shared memory to registers as bytes, float16 there.

A thread gets four bytes at a time, of which two at a time become a pair. That fixes the order in which a product sees them: as
keys, each 16 columns as `[half, column // 4, column % 2]` (`in_key_order`); as values, transposed, whose columns are rows of the
product, each 16 as `[parity, column // 2]` (`store` puts them back). Both are exact. Where rows may be unused a NaN reads as 480
among the values; among the keys it may stay, because scores of unused rows are replaced.
"""

# Pallas declares what it inlines as if it were called as written.
# pyright: reportCallIssue=false

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.attention.mla.launch import KEYS
from dflash_kernels.mosaic_gpu.layouts import in_key_order, swizzled
from dflash_kernels.mosaic_gpu.ptx import opaque_lane_and_warp

_MATRIX = plgpu.Layout.WGMMA


def keys(tile, first: int, count: int, interpret: Any):
    """`count` columns from `first` on, multiples of 32, of a `[64, C]` tile: `[64, count]` in the keys' order."""
    if interpret is not None:
        return in_key_order(tile[...].astype(jnp.float32))[:, first : first + count]
    return _inlined(lambda tile: _keys(tile, first, count), tile, (KEYS, count))


def values(tile, first: int, count: int, interpret: Any, *, finite: bool):
    """`count` columns from `first` on, multiples of 64, transposed: `[count, 64]` in the product's order of rows."""
    if interpret is not None:
        wide = tile[...].astype(jnp.float32)
        across = jnp.where(jnp.isnan(wide), 480.0, wide).T[first : first + count]
        return across.reshape(-1, 8, 2, KEYS).swapaxes(1, 2).reshape(count, KEYS)
    return _inlined(lambda tile: _values(tile, first, count, finite), tile, (count, KEYS))


def _inlined(make: Callable[[Any], Any], tile, shape: tuple[int, int]):
    given = plgpu.RefType(swizzled(tile.dtype, tile.shape[1]))

    @plgpu.inline_mgpu(
        arg_types=(given,), return_type=plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.float16), layout=_MATRIX)
    )
    def inlined(_ctx, tile):
        return make(tile)

    return inlined(tile)


def _keys(tile, first: int, count: int) -> Any:
    """Each load: rows 0 to 7 and 8 to 15 of the warp's, for two neighbouring chunks of 16 bytes."""
    from dflash_kernels.mosaic_gpu import ptx as th

    (_, columns), width = th.rows_and_columns(tile), th.swizzle(tile)
    (lane, warp), steps = opaque_lane_and_warp(), []
    matrix, row = th.div(lane, 8), th.rem(lane, 8)
    start = th.add(th.mul(th.add(th.mul(warp, 2), th.rem(matrix, 2)), 8 * columns), th.mul(row, width))
    chunk = th.xor(th.mul(th.div(matrix, 2), th.CHUNK), th.swizzle_of(row, width))
    for column in range(0, count, 2 * th.CHUNK):
        across, inside = divmod(first + column, width)
        group = column // 8
        places = [[(0, group + 2 * (i // 2) + pair, i % 2) for pair in range(2)] for i in range(4)]
        steps.append((th.add(th.add(start, across * 8 * width), th.xor(chunk, inside)), places))
    return _fragment(tile, "", steps, (KEYS, count), _neighbours)


def _values(tile, first: int, count: int, finite: bool) -> Any:
    """Each load: 32 keys of the chunk of 16 channels that is the warp's in 64."""
    from dflash_kernels.mosaic_gpu import ptx as th

    (_, columns), width = th.rows_and_columns(tile), th.swizzle(tile)
    (lane, warp), steps = opaque_lane_and_warp(), []
    matrix, row = th.div(lane, 8), th.rem(lane, 8)
    start = th.add(th.mul(matrix, 8 * columns), th.mul(row, width))
    swizzle, own = th.swizzle_of(row, width), th.mul(warp, th.CHUNK)
    for block in range(count // 64):
        across, inside = divmod(first + 64 * block, width)
        chunk = th.xor(th.add(own, inside), swizzle)
        for half in range(2):
            offset = th.add(th.add(start, half * 32 * columns + across * 8 * width), chunk)
            steps.append((offset, [[(block, 4 * half + i, parity) for parity in range(2)] for i in range(4)]))
    return _fragment(tile, ".trans", steps, (count, KEYS), _finite_across if finite else _across)


def _fragment(
    tile, opcode: str, steps: list[Any], shape: tuple[int, int], pairs: Callable[[Any], tuple[Any, ...]]
) -> Any:
    """All loads, then all words widened: a load's words to the places that stand with it."""
    from jax.experimental.mosaic import gpu as mgpu
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir

    from dflash_kernels.mosaic_gpu import ptx as th

    base, pair = th.address(tile, space=3), ir.VectorType.get((2,), ir.F16Type.get())
    loaded = [
        utils.inline_ptx(
            f"ldmatrix.sync.aligned.m8n8.x4{opcode}.shared.b16 {{$0, $1, $2, $3}}, [$4];", th.add(base, offset),
            result_types=[th.i32()] * 4, has_side_effects=True, convergent=True,
        )
        for offset, _ in steps
    ]  # fmt: skip
    registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(shape), dtype=object)
    for words, (_, places) in zip(loaded, steps, strict=True):
        for word, of_word in zip(words, places, strict=True):
            for (row, column, half), value in zip(of_word, pairs(word), strict=True):
                registers[row, column, 0, 0, half, 0, 0, 0, 0] = utils.bitcast(value, pair)
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)


def _neighbours(word) -> tuple[Any, ...]:
    """Bytes 0 and 1 of four, and 2 and 3, as pairs of float16."""
    return _two(
        "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }",
        word,
    )


def _across(word) -> tuple[Any, ...]:
    """Bytes 0 and 2, and 1 and 3: a word lies across two keys."""
    return _two(
        "{ .reg .b32 turned; .reg .b16 low, high; prmt.b32 turned, $2, 0, 0x3120; mov.b32 {low, high}, turned;"
        " cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }",
        word,
    )


def _finite_across(word) -> tuple[Any, ...]:
    """The same without NaN: each byte below eight copies of its sign, at a float16's places the value times 2^-8."""
    return _two(
        "{ .reg .b32 even, odd, by; prmt.b32 even, $2, 0, 0xa280; prmt.b32 odd, $2, 0, 0xb391; mov.b32 by, 0x5c005c00;"
        " shl.b32 even, even, 7; shl.b32 odd, odd, 7; and.b32 even, even, 0xbf80bf80; and.b32 odd, odd, 0xbf80bf80;"
        " mul.rn.f16x2 $0, even, by; mul.rn.f16x2 $1, odd, by; }",
        word,
    )


def _two(ptx: str, word) -> tuple[Any, ...]:
    from jax.experimental.mosaic.gpu import utils

    from dflash_kernels.mosaic_gpu import ptx as th

    return tuple(utils.inline_ptx(ptx, word, result_types=[th.i32()] * 2))
