"""Copies from global to shared memory: TMA with an evict-first hint, `cp.async` of rows, prefetches.

Pallas' own TMA copies have no cache hint. What a launch reads once is better copied with one: it leaves the L2 to what CTAs read
again and hand to one another. There are two techniques, since a matrix in swizzled tiles takes one instruction that is written out
here (`copy_once`), and a page takes what Pallas makes of it, to which the hint is added (`copy_page_once`). Both complete the
barriers that Pallas' copies do.
"""

# Pallas declares what it inlines with the context that it passes itself.
# pyright: reportAbstractUsage=false, reportCallIssue=false, reportPrivateImportUsage=false

import math
from typing import Any

import jax.numpy as jnp
from jax._src.pallas.mosaic_gpu import lowering
from jax.core import ShapedArray
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.core import Primitive
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from dflash_kernels.core.device import WARP, WARPGROUP
from dflash_kernels.mosaic_gpu import ptx as th
from dflash_kernels.mosaic_gpu.layouts import TILED, swizzled, tiled
from dflash_kernels.mosaic_gpu.thread_op import GLOBAL, SCALAR, thread_op

_BARRIER = 8  # bytes
# What createpolicy.fractional.L2::evict_first makes of all bytes: a constant needs no registers over the loop.
_EVICT_FIRST = 0x12F0000000000000

_address_p = Primitive("barrier_address")
_address_p.def_abstract_eval(lambda _: ShapedArray((), jnp.dtype(jnp.int32)))


@lowering.register_lowering_rule(_address_p, mgpu.LoweringSemantics.Warpgroup)
def _lower_address(_: Any, barriers: Any) -> ir.Value:
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), barriers.barrier_ref.base_address)


def address_of(barriers: Any) -> Any:
    """Where barriers lie in shared memory, int32 scalar."""
    return _address_p.bind(barriers)


def copy_once(
    source: Any, rows: Any, columns: Any, target: Any, barriers: Any, slot: Any, *, one_warp: bool = False
) -> None:
    """Starts a copy of rows and columns of `source` to swizzled tiles of 8 rows, and arrives at a barrier with its bytes.

    Args:
      source: a matrix in global memory, an argument of the kernel; rows, columns: slices of it, 128 bytes of columns.
      target: `[rows, columns]` in shared memory.
      barriers: `address_of` some; slot: which of them.
      one_warp: called by a warp alone, not by all threads of a warpgroup.
    """
    box = rows.size, columns.size
    size = box[0] * box[1] * jnp.dtype(source.dtype).itemsize

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR, plgpu.RefType(tiled(source.dtype)), SCALAR))
    def start(ctx, source, row, column, target, barrier):
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        descriptor = ctx._get_tma_desc(source, (), None, box, 128, None)
        row, column, barrier = (value.registers.item() for value in (row, column, barrier))
        shared = llvm.ptrtoint(i32, utils.memref_ptr(target))
        # Pallas's barriers count arrivals of all threads of a warpgroup: each expects its share of the bytes, and one of a warp
        # that is alone arrives for three others.
        scope, threads, others = utils.ThreadSubset.WARPGROUP, WARPGROUP, ""
        if one_warp:
            scope, threads = utils.ThreadSubset.WARP, WARP
            others = "mbarrier.arrive.noComplete.shared::cta.b64 _, [$5], 3; "
        one = utils.single_thread_predicate(scope)
        policy = utils.inline_ptx(
            "createpolicy.fractional.L2::evict_first.b64 $0, 1.0;", result_types=i64, has_side_effects=False
        )
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"), [one, shared, descriptor, column, row, barrier, policy],
            f"{others}mbarrier.arrive.expect_tx.shared::cta.b64 _, [$5], {size // threads};"
            " @$0 cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
            " [$1], [$2, {$3, $4}], [$5], $6;",
            "b,r,l,r,r,r,l", has_side_effects=True,
        )  # fmt: skip

    start(
        source,
        *(jnp.asarray(value, jnp.int32) for value in (rows.start, columns.start)),
        target,
        barriers + slot * _BARRIER,
    )


def addresses(buffers: dict[str, Any]) -> dict[str, Any]:
    """Where barriers that copies arrive at lie in shared memory, by name."""
    return {name: address_of(barriers) for name, barriers in buffers.items() if name.endswith("_in")}


def arrival(address: Any, slot: Any) -> Any:
    """Where barrier number `slot` lies."""
    return address + slot * _BARRIER


def copy_page_once(source: Any, page: Any, head: Any, rows: Any, target: Any, barrier: Any, *, one_warp: bool) -> None:
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
    threads = 32 if one_warp else WARPGROUP
    scope = utils.ThreadSubset.WARP if one_warp else utils.ThreadSubset.WARPGROUP

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[SCALAR] * 3, plgpu.RefType(transforms), SCALAR))
    def start(ctx, source, page, head, first, target, barrier):
        page, head, first, barrier = (_scalar(value) for value in (page, head, first, barrier))
        page, head, first = (arith.index_cast(ir.IndexType.get(), value) for value in (page, head, first))
        # Pallas's barriers count arrivals of all threads of a warpgroup: each expects its share of the bytes.
        if one_warp:
            more = WARPGROUP // threads - 1
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


def _copy_rows_interpreted(source: Any, column: Any, target: Any, *, rows: int) -> None:
    blocks, tokens, width = target.shape
    for block in range(blocks):
        held = source[pl.ds(0, rows), pl.ds(column + block * width, width)]
        target.at[block][...] = jnp.pad(held, ((0, tokens - rows), (0, 0)))


def copy_rows(source: Any, column: Any, target: Any, *, rows: int) -> None:
    """Starts copies of the first rows of `source`, some columns of them, to shared memory; rows that are not there become zeros.

    They are `cp.async`: TMA would queue them behind all copies of weights that were started before.

    Args:
      source: `[rows or more, columns]` in global memory, two bytes an element.
      column: first column, int32 scalar.
      target: `[blocks, tokens, 64]` in shared memory, in swizzled tiles of 8 rows.
      rows: how many rows count.
    """
    _copy_rows(source, column, target, rows=rows, shape=target.shape, pitch=source.shape[1] * 2)


@thread_op(
    args=(GLOBAL, SCALAR, plgpu.RefType(TILED)),
    interpret=lambda source, column, target, *, rows, **_: _copy_rows_interpreted(source, column, target, rows=rows),
)
def _copy_rows(source: Any, column: Any, target: Any, *, rows: int, shape: tuple[int, int, int], pitch: int) -> None:
    blocks, tokens, width = shape
    i64, chunks, number = ir.IntegerType.get_signless(64), blocks * tokens * width * 2 // th.CHUNK, th.number
    first, shared, thread = th.address(source), th.address(target, space=3), th.thread()
    for start in range(0, chunks, WARPGROUP):
        chunk = arith.addi(thread, number(start))
        line, place = arith.divui(chunk, number(8)), arith.remui(chunk, number(8))
        block, token = arith.divui(line, number(tokens)), arith.remui(line, number(tokens))
        there = arith.cmpi(arith.CmpIPredicate.ult, token, number(rows))
        size = arith.select(there, number(th.CHUNK), number(0))
        row = arith.muli(arith.select(there, token, number(0)), number(pitch))
        columns = arith.addi(column, arith.muli(block, number(width)))
        offset = arith.addi(arith.addi(row, arith.muli(columns, number(2))), arith.muli(place, number(th.CHUNK)))
        swizzled = arith.muli(arith.xori(place, arith.remui(token, number(8))), number(th.CHUNK))
        to = arith.addi(arith.addi(shared, arith.muli(line, number(width * 2))), swizzled)
        inside = arith.cmpi(arith.CmpIPredicate.ult, chunk, number(chunks))
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"), [inside, to, arith.addi(first, arith.extui(i64, offset)), size],
            f"@$0 cp.async.cg.shared.global [$1], [$2], {th.CHUNK}, $3;", "b,r,l,r", has_side_effects=True,
        )  # fmt: skip
    utils.inline_ptx("cp.async.commit_group;", has_side_effects=True)


@thread_op(interpret=lambda *, later: plgpu.commit_smem())
def copied(*, later: int) -> None:
    """Waits for all `cp.async` copies that this warpgroup started but those of the `later` last groups."""
    utils.inline_ptx(f"cp.async.wait_group {later};", has_side_effects=True)
    utils.inline_ptx("fence.proxy.async.shared::cta;", has_side_effects=True)


@thread_op(interpret=lambda: None)
def order_copies() -> None:
    """Copies that begin afterwards find what the warpgroup's threads have stored in global memory before."""
    utils.inline_ptx("fence.proxy.async.global;", has_side_effects=True)
    utils.warpgroup_barrier()


def prefetch_rows(rows):
    """Asks for whole rows that lie next to each other in global memory, so that they are in the L2 before they are copied."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def prefetch(_ctx, rows):
        from jax.experimental.mosaic.gpu import utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith

        from dflash_kernels.mosaic_gpu import ptx as th

        ty = ir.MemRefType(rows.type)
        count = ty.shape[0] * ty.shape[1] * utils.bytewidth(ty.element_type)
        leads = arith.cmpi(arith.CmpIPredicate.eq, th.rem(utils.thread_idx(), 128), utils.c(0, th.i32()))
        th.when(leads, f"cp.async.bulk.prefetch.L2.global [$0], {count};", th.address(rows))

    prefetch(rows)


@thread_op(args=(GLOBAL,), interpret=lambda row: None)
def touch_row(row: Any) -> None:
    """Asks for a row of integers, its first 16 KiB, before it is known which of them are needed."""
    (count,), _ = th.shape_and_strides(row)
    thread = th.thread()
    there = th.add(th.address(row), th.widen_index(th.mul(thread, 128)))
    th.when(th.below(thread, -(-count // 32)), "prefetch.global.L1 [$0];", there)
