"""Steps of the Hopper kernel below Pallas: sums brought under a new base only where it moved, tiles asked for early and widened."""

# Pallas declares what it inlines as if it were called as written.
# pyright: reportCallIssue=false

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.mosaic_gpu.layouts import swizzled
from dflash_kernels.mosaic_gpu.ptx import opaque_lane_and_warp

_WGMMA = plgpu.Layout.WGMMA
_VOTE = (
    "{ .reg .pred own, anyones; setp.ne.b32 own, $1, 0; vote.sync.any.pred anyones, own, 0xffffffff;"
    " selp.b32 $0, 1, 0, anyones; }"
)
_TILE = 64  # columns
_WIDEN = (
    "{ .reg .b16 a, b, c, d; .reg .b32 e, f, g, h; mov.b32 {a, b}, $1; mov.b32 {c, d}, $2; cvt.rn.f16x2.e4m3x2 e, a;"
    " cvt.rn.f16x2.e4m3x2 f, b; cvt.rn.f16x2.e4m3x2 g, c; cvt.rn.f16x2.e4m3x2 h, d; st.shared.v4.b32 [$0], {e, f, g, h}; }"
)


def rescale(acc, kept):
    """`acc * kept[:, None]`; a warp whose rows all keep 1 leaves its sums alone. Not for the interpreter."""

    @plgpu.inline_mgpu(
        arg_types=(_WGMMA, _WGMMA.reduce(1)),
        return_type=plgpu.ShapeDtypeStruct(acc.shape, jnp.dtype(jnp.float32), layout=_WGMMA),
    )
    def scale(_ctx, acc, kept):
        return _scaled(acc, kept)

    return scale(acc, kept)


def _scaled(acc, kept) -> Any:
    # Not at the top: they need the compiler.
    from jax.experimental.mosaic import gpu as mgpu
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, scf, vector

    i32, one, moved = ir.IntegerType.get_signless(32), utils.c(1.0, ir.F32Type.get()), None
    for of_row in kept.registers.flat:
        differs = arith.cmpf(arith.CmpFPredicate.UNE, vector.extract(of_row, [], [0]), one)
        moved = differs if moved is None else arith.ori(moved, differs)
    voted = utils.inline_ptx(_VOTE, arith.extui(i32, moved), result_types=i32, has_side_effects=True, convergent=True)
    sums = list(acc.registers.flat)
    some = arith.cmpi(arith.CmpIPredicate.ne, voted, utils.c(0, i32))
    branch = scf.IfOp(some, [register.type for register in sums], has_else=True)
    changed, unchanged = (region.blocks[0] for region in branch.regions)
    with ir.InsertionPoint(changed):
        scf.yield_(list((acc * kept.broadcast_in_dim(acc.shape, (0,), acc.layout)).registers.flat))
    with ir.InsertionPoint(unchanged):
        scf.yield_(sums)
    registers = np.empty(acc.registers.shape, dtype=object)
    registers.flat = list(branch.results)
    return mgpu.FragmentedArray(_registers=registers, _layout=acc.layout, _is_signed=None)


def widen(source, target):
    """Writes rows of e4m3 numbers as float16; `target` may lie where `source` does. Not for the interpreter.

    A warp turns tiles of 8 rows and 64 columns one after the other, a thread 16 numbers of one row, without bank conflicts.
    """
    tiled = [plgpu.RefType(swizzled(ref.dtype, _TILE)) for ref in (source, target)]

    @plgpu.inline_mgpu(arg_types=tuple(tiled))
    def inlined(_ctx, source, target):
        _widened(source, target)

    inlined(source, target)


def _widened(source, target) -> None:
    from jax.experimental.mosaic.gpu import utils

    from dflash_kernels.mosaic_gpu import ptx as th

    rows, columns = th.rows_and_columns(source)
    lane, warp = opaque_lane_and_warp()
    row, chunk = th.div(lane, 4), th.rem(lane, 4)
    # The chunk of 16 columns that lies there, and both chunks of 8 that it becomes.
    first = th.mul(th.xor(chunk, th.rem(th.div(row, 2), 4)), 2)
    start = th.add(th.address(source, space=3), th.add(th.mul(warp, 8 * _TILE), th.mul(lane, th.CHUNK)))
    end = th.add(th.address(target, space=3), th.add(th.mul(warp, 16 * _TILE), th.mul(row, 2 * _TILE)))
    ends = [th.add(end, th.mul(th.xor(th.add(first, i), row), th.CHUNK)) for i in range(2)]
    loaded = [
        utils.inline_ptx(
            "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", th.add(start, 4 * 8 * _TILE * tile), result_types=[th.i32()] * 4,
            has_side_effects=True,
        )
        for tile in range(rows * columns // (4 * 8 * _TILE))
    ]  # fmt: skip
    utils.warpgroup_barrier()
    for tile, words in enumerate(loaded):
        for i, place in enumerate(ends):
            utils.inline_ptx(
                _WIDEN, th.add(place, 4 * 16 * _TILE * tile), *words[2 * i : 2 * i + 2], has_side_effects=True
            )
