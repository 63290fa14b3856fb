"""Copies of pages to shared memory with the hint that they are read once.

They leave the cache to what is read again: queries, and parts on their way to where they are put together. Pallas's copies have no
word for that: these are its own, to which the hint is added.
"""

# Pallas declares what it inlines with the context that it passes itself.
# pyright: reportAbstractUsage=false, reportCallIssue=false, reportPrivateImportUsage=false

import math
from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from dflash_kernels.attention.paged.mosaic_gpu_ops import swizzled
from dflash_kernels.mosaic_gpu.tma import address_of

_WARPGROUP = 128  # threads
_SCALAR = plgpu.Layout.WG_SPLAT(())
_BARRIER = 8  # bytes
# What createpolicy.fractional.L2::evict_first makes of all bytes: a constant needs no registers over the loop.
_EVICT_FIRST = 0x12F0000000000000


def addresses(buffers: dict[str, Any]) -> dict[str, Any]:
    """Where barriers that copies arrive at lie in shared memory, by name."""
    return {name: address_of(barriers) for name, barriers in buffers.items() if name.endswith("_in")}


def arrival(address: Any, slot: Any) -> Any:
    """Where barrier number `slot` lies."""
    return address + slot * _BARRIER


def copy_once(source: Any, page: Any, head: Any, rows: Any, target: Any, barrier: Any, *, one_warp: bool) -> None:
    """Starts a copy of some rows of a page.

    Args:
      source: `[P, K, p, H]`, or `[P, K, p]` of float32, in global memory: an argument of the kernel.
      page, head: int32 scalars; rows: a slice of the page.
      target: `[rows, H]`, in swizzled tiles where H is a multiple of 16, or `[rows]`, in shared memory.
      barrier: `arrival` of the one that completes.
      one_warp: runs this, not all of a warpgroup.
    """
    tiled = len(source.shape) == 4 and source.shape[3] % 16 == 0
    transforms = swizzled(source.dtype, source.shape[3]) if tiled else ()
    size = rows.size * math.prod(source.shape[3:]) * jnp.dtype(source.dtype).itemsize
    threads = 32 if one_warp else _WARPGROUP
    scope = utils.ThreadSubset.WARP if one_warp else utils.ThreadSubset.WARPGROUP

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[_SCALAR] * 3, plgpu.RefType(transforms), _SCALAR))
    def start(ctx, source, page, head, first, target, barrier):
        page, head, first, barrier = (_scalar(value) for value in (page, head, first, barrier))
        page, head, first = (arith.index_cast(ir.IndexType.get(), value) for value in (page, head, first))
        # Pallas's barriers count arrivals of all threads of a warpgroup: each expects its share of the bytes.
        if one_warp:
            more = _WARPGROUP // threads - 1
            utils.inline_ptx(f"mbarrier.arrive.shared::cta.b64 _, [$0], {more};", barrier, has_side_effects=True)
        utils.inline_ptx(
            f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {size // threads};", barrier, has_side_effects=True
        )
        tiles: dict[str, Any] = {}
        if transforms:
            tiles = {"gmem_transform": mgpu.TileTransform(transforms[0].tiling), "swizzle": transforms[1].swizzle}
        ctx.async_copy(
            src_ref=source, dst_ref=target, gmem_slice=(page, head, utils.ds(first, rows.size)), arrive=False,
            barrier=_Barrier(barrier), predicate=utils.single_thread_predicate(scope), **tiles,
        )  # fmt: skip
        _add_hint()

    start(source, page, head, jnp.asarray(rows.start, jnp.int32), target, barrier)


def _scalar(value):
    return value.registers.item() if isinstance(value, mgpu.FragmentedArray) else value


class _Barrier:
    """What Pallas's copies ask of a barrier."""

    def __init__(self, address):
        self.address = address

    def get_ptr(self):
        return llvm.inttoptr(ir.Type.parse("!llvm.ptr<3>"), self.address)


def _add_hint() -> None:
    """To the copy that was written last."""
    operations = ir.InsertionPoint.current.block.operations
    copy: Any = operations[len(operations) - 1]
    policy = utils.c(_EVICT_FIRST, ir.IntegerType.get_signless(64))
    nvvm.cp_async_bulk_tensor_shared_cluster_global(
        copy.dstMem,
        copy.tmaDescriptor,
        list(copy.coordinates),
        copy.mbar,
        [],
        l2_cache_hint=policy,
        predicate=copy.predicate,
    )
    copy.erase()
