"""Steps of the Hopper kernel below Pallas: sums brought under a new base only where it moved, and tiles asked for early."""

# Pallas declares what it inlines as if it were called as written.
# pyright: reportCallIssue=false

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

_WGMMA = plgpu.Layout.WGMMA
_VOTE = (
    "{ .reg .pred own, anyones; setp.ne.b32 own, $1, 0; vote.sync.any.pred anyones, own, 0xffffffff;"
    " selp.b32 $0, 1, 0, anyones; }"
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


def prefetch_rows(rows):
    """Asks for whole rows that lie next to each other in global memory, so that they are in the L2 before they are copied."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def prefetch(_ctx, rows):
        from jax.experimental.mosaic.gpu import utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith

        from dflash_kernels.paged_attention import mosaic_gpu_threads as th

        ty = ir.MemRefType(rows.type)
        count = ty.shape[0] * ty.shape[1] * utils.bytewidth(ty.element_type)
        leads = arith.cmpi(arith.CmpIPredicate.eq, th.rem(utils.thread_idx(), 128), utils.c(0, th.i32()))
        th.when(leads, f"cp.async.bulk.prefetch.L2.global [$0], {count};", th.address(rows))

    prefetch(rows)
