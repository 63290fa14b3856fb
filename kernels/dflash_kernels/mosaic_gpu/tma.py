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

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.pallas.mosaic_gpu import lowering
from jax.core import ShapedArray
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.core import Primitive
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from dflash_kernels.core.device import WARP, WARPGROUP
from dflash_kernels.mosaic_gpu import ptx as th
from dflash_kernels.mosaic_gpu.layouts import TILED, swizzled, tiled
from dflash_kernels.mosaic_gpu.thread_op import GLOBAL, NUMBER, SCALAR, interpreting, thread_op

_BARRIER = 8  # bytes
# What createpolicy.fractional.L2::evict_first makes of all bytes: a constant needs no registers over the loop.
_EVICT_FIRST = 0x12F0000000000000

_address_p = Primitive("barrier_address")
_address_p.def_abstract_eval(lambda _: ShapedArray((), jnp.dtype(jnp.int32)))


@lowering.register_lowering_rule(_address_p, mgpu.LoweringSemantics.Warpgroup)
def _lower_address(_: Any, barriers: Any) -> ir.Value:
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), barriers.barrier_ref.base_address)


def address_of(barriers: Any) -> Any:
    """Address of barriers in shared memory, int32 scalar; in the interpreter, which has no addresses, the barriers themselves."""
    return barriers if interpreting() else _address_p.bind(barriers)


def addresses(buffers: dict[str, Any]) -> dict[str, Any]:
    """Addresses in shared memory of the barriers that copies arrive at, by name."""
    return {name: address_of(barriers) for name, barriers in buffers.items() if name.endswith("_in")}


def arrival(address: Any, slot: Any) -> Any:
    """Address of barrier number `slot`."""
    return address + slot * _BARRIER


def within_copies(x: jax.Array, rows: int, interpret: Any) -> jax.Array:
    """A matrix whose first `rows` rows are copied. Past its end a GPU's copies give zeros, which the interpreter needs appended."""
    return x if interpret is None else jnp.pad(x, ((0, rows - x.shape[0]), (0, 0)))


def copy_once(
    source: Any, rows: Any, columns: Any, target: Any, barriers: Any, slot: Any, *, one_warp: bool = False
) -> None:
    """Starts an evict-first TMA copy of rows and columns of `source` to swizzled tiles of 8 rows.

    Args:
      source: a matrix in global memory, an argument of the kernel; rows, columns: slices of it, 128 bytes of columns.
      target: `[rows, columns]` in shared memory.
      barriers: `address_of` some; slot: which of them the copy arrives at with its bytes.
      one_warp: called by a warp alone, not by all threads of a warpgroup.
    """
    if interpreting():
        plgpu.copy_gmem_to_smem(source.at[rows, columns], target, barriers.at[slot])
        return
    box, barrier = (rows.size, columns.size), arrival(barriers, slot)
    size = box[0] * box[1] * jnp.dtype(source.dtype).itemsize
    tile = plgpu.RefType(tiled(source.dtype))
    _copy_tile(source, rows.start, columns.start, target, barrier, tile=tile, box=box, size=size, one_warp=one_warp)


@thread_op(args=lambda *_, tile, **__: (GLOBAL, SCALAR, SCALAR, tile, SCALAR), context=True)
def _copy_tile(
    ctx, source, row, column, target, barrier, *, tile: Any, box: tuple[int, int], size: int, one_warp: bool
):
    del tile
    descriptor = ctx._get_tma_desc(source, (), None, box, 128, None)
    shared = th.address(target, space=3)
    # Pallas's barriers count arrivals of all threads of a warpgroup: each expects its share of the bytes, and one of a warp that is
    # alone arrives for three others.
    scope, threads, others = utils.ThreadSubset.WARPGROUP, WARPGROUP, ""
    if one_warp:
        scope, threads = utils.ThreadSubset.WARP, WARP
        others = "mbarrier.arrive.noComplete.shared::cta.b64 _, [$5], 3; "
    one = utils.single_thread_predicate(scope)
    policy = utils.inline_ptx(
        "createpolicy.fractional.L2::evict_first.b64 $0, 1.0;", result_types=th.i64(), has_side_effects=False
    )
    llvm.inline_asm(
        ir.Type.parse("!llvm.void"), [one, shared, descriptor, column, row, barrier, policy],
        f"{others}mbarrier.arrive.expect_tx.shared::cta.b64 _, [$5], {size // threads};"
        " @$0 cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [$1], [$2, {$3, $4}], [$5], $6;",
        "b,r,l,r,r,r,l", has_side_effects=True,
    )  # fmt: skip


def copy_page_once(
    source: Any, page: Any, head: Any, rows: Any, target: Any, barrier: Any, *, one_warp: bool, first_column: Any = None,
    swizzle: int = 128,
) -> None:  # fmt: skip
    """Starts an evict-first TMA copy of some rows of a page, or of as many columns of them as the target has.

    Args:
      source: `[P, K, p, H]`, or `[P, K, p]` of float32, in global memory: an argument of the kernel.
      page, head: int32 scalars; rows: a slice of the page.
      target: `[rows, H]`, in swizzled tiles where H is a multiple of 16, or `[rows]`, in shared memory.
      barrier: `arrival` of the one that completes.
      one_warp: runs this, not all of a warpgroup.
      first_column: int32 scalar; None for all columns.
      swizzle: the most bytes that the target is swizzled over.
    """
    columns = source.shape[3:] if first_column is None else target.shape[1:]
    swizzles = len(source.shape) == 4 and columns[0] % 16 == 0
    transforms = swizzled(source.dtype, columns[0], swizzle) if swizzles else ()
    size = rows.size * math.prod(columns) * jnp.dtype(source.dtype).itemsize
    places = [page, head, rows.start] + ([] if first_column is None else [first_column])
    _copy_page(
        source, target, barrier, *places, transforms=transforms, box=(rows.size, *columns)[: len(places) - 2], size=size,
        one_warp=one_warp,
    )  # fmt: skip


@thread_op(
    args=lambda source, target, barrier, *places, transforms, **_: (
        GLOBAL, plgpu.RefType(transforms), SCALAR, *[SCALAR] * len(places)
    ),
    context=True,
)  # fmt: skip
def _copy_page(ctx, source, target, barrier, *places, transforms: Any, box: tuple[int, ...], size: int, one_warp: bool):
    page, head, *starts = (arith.index_cast(ir.IndexType.get(), value) for value in places)
    threads = WARP if one_warp else WARPGROUP
    scope = utils.ThreadSubset.WARP if one_warp else utils.ThreadSubset.WARPGROUP
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
    parts = [utils.ds(*part) for part in zip(starts, box, strict=True)]
    ctx.async_copy(
        src_ref=source, dst_ref=target, gmem_slice=(page, head, *parts), arrive=False,
        barrier=_Barrier(barrier), predicate=utils.single_thread_predicate(scope), **tiles,
    )  # fmt: skip
    _add_hint()


class _Barrier:
    """Interface of a barrier for Pallas's copies."""

    def __init__(self, address):
        self.address = address

    def get_ptr(self):
        return llvm.inttoptr(ir.Type.parse("!llvm.ptr<3>"), self.address)


def _add_hint() -> None:
    """To the copy that was written last."""
    operations = ir.InsertionPoint.current.block.operations
    copy: Any = operations[len(operations) - 1]
    policy = utils.c(_EVICT_FIRST, ir.IntegerType.get_signless(64))
    if isinstance(copy, llvm.InlineAsmOp):  # JAX 0.12 writes its copies as PTX
        operands, text = list(copy.operands_), ir.StringAttr(copy.asm_string).value
        hinted = text.replace("::complete_tx::bytes ", "::complete_tx::bytes.L2::cache_hint ")
        assert hinted != text, text
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"), [*operands, policy], f"{hinted.rstrip(';')}, ${len(operands)};",
            ir.StringAttr(copy.constraints).value + ",l", has_side_effects=True,
        )  # fmt: skip
        copy.erase()
        return
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


def _copied_rows(source, column, target, *, rows: int) -> None:
    blocks, tokens, width = target.shape
    for block in range(blocks):
        held = source[pl.ds(0, rows), pl.ds(column + block * width, width)]
        target.at[block][...] = jnp.pad(held, ((0, tokens - rows), (0, 0)))


@thread_op(args=(GLOBAL, SCALAR, plgpu.RefType(TILED)), interpret=_copied_rows)
def copy_rows(source, column, target, *, rows: int) -> None:
    """Starts `cp.async` copies of the first rows of `source`, some columns of them; rows that are not there become zeros.

    They do not go through the tensor memory accelerator, where they would wait behind all weights asked for before.

    Args:
      source: `[rows or more, columns]` in global memory, two bytes an element.
      column: first column, int32 scalar.
      target: `[blocks, tokens, 64]` in shared memory, in swizzled tiles of 8 rows.
      rows: how many rows count.
    """
    blocks, groups, _, rows_of_group, width = th.shape_and_strides(target)[0]
    tokens, pitch = groups * rows_of_group, th.shape_and_strides(source)[1][0] * 2
    chunks = blocks * tokens * width * 2 // th.CHUNK
    first, shared, thread = th.address(source), th.address(target, space=3), th.thread()
    for start in range(0, chunks, WARPGROUP):
        chunk = th.add(thread, start)
        line, place = th.div(chunk, 8), th.rem(chunk, 8)
        block, token = th.div(line, tokens), th.rem(line, tokens)
        there = th.under(token, rows)
        size = arith.select(there, th.number(th.CHUNK), th.number(0))
        row = th.mul(arith.select(there, token, th.number(0)), pitch)
        columns = th.add(column, th.mul(block, width))
        offset = th.add(th.add(row, th.mul(columns, 2)), th.mul(place, th.CHUNK))
        swizzle = th.mul(th.xor(place, th.rem(token, 8)), th.CHUNK)
        to = th.add(th.add(shared, th.mul(line, width * 2)), swizzle)
        inside = th.under(chunk, chunks)
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"), [inside, to, th.offset(first, offset), size],
            f"@$0 cp.async.cg.shared.global [$1], [$2], {th.CHUNK}, $3;", "b,r,l,r", has_side_effects=True,
        )  # fmt: skip
    utils.inline_ptx("cp.async.commit_group;", has_side_effects=True)


def copied(later: int) -> None:
    """Waits for all copies that this warpgroup started with `copy_rows` but those of the `later` last calls."""
    _wait_for_rows(later=later)


@thread_op(interpret=lambda later: plgpu.commit_smem())
def _wait_for_rows(*, later: int) -> None:
    utils.inline_ptx(f"cp.async.wait_group {later};", has_side_effects=True)
    utils.inline_ptx("fence.proxy.async.shared::cta;", has_side_effects=True)


def copy_line(source: Any, first: Any, count: int, target: Any, barriers: Any, slot: Any) -> None:
    """Starts a copy of `count` neighbouring rows of `source` to shared memory without a swizzle, by one thread, evict-first.

    Args:
      source: a matrix of words in global memory; first: the first row, int32 scalar.
      target: `[count, columns]`.
      barriers: `address_of` some; slot: which of them completes, for all threads of the warpgroup.
    """
    if interpreting():
        plgpu.copy_gmem_to_smem(source.at[pl.ds(first, count)], target, barriers.at[slot])
    else:
        _copy_line(source, first, target, arrival(barriers, slot), size=4 * count * source.shape[1])


@thread_op(args=(GLOBAL, SCALAR, GLOBAL, SCALAR))
def _copy_line(source, first, target, barrier, *, size: int) -> None:
    pitch = th.shape_and_strides(source)[1][0] * 4
    start = th.add(th.address(source), th.mul(th.widen_index(first), pitch))
    shared, one = th.address(target, space=3), utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP)
    with utils.when(one):
        utils.inline_ptx(
            f"mbarrier.arrive.noComplete.shared::cta.b64 _, [$2], {WARPGROUP - 1};"
            f" mbarrier.arrive.expect_tx.shared::cta.b64 _, [$2], {size};"
            " cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
            f" [$0], [$1], {size}, [$2], $3;",
            shared, start, barrier, utils.c(_EVICT_FIRST, th.i64()), has_side_effects=True,
        )  # fmt: skip


_SLOTS = 64  # of a tile; each warp has all of them, two of a lane
_OF_THREADS = plgpu.ShapeDtypeStruct(
    (2 * WARPGROUP,), jnp.dtype(jnp.int32), layout=plgpu.Layout.WG_STRIDED((2 * WARPGROUP,), vec_size=2)
)


def _tile_slots_interpreted(slots: Any, first: Any) -> Any:
    return jnp.tile(slots[pl.ds(first, _SLOTS)].reshape(2, WARP).T, (WARPGROUP // WARP, 1)).reshape(-1)


def _in_order(held: Any) -> Any:
    """Interpreter form of `tile_slots`, in the order of the slots in memory."""
    return held.reshape(-1, WARP, 2)[0].T.reshape(-1)


@thread_op(args=(GLOBAL, SCALAR), returns=_OF_THREADS, interpret=_tile_slots_interpreted)
def tile_slots(slots, first):
    """Slots `first` and on of a tile of 64 rows, for `gather_rows` and `named_bits`: read now, needed later."""
    lane, _ = th.lane_and_warp()
    places = [th.word_address(slots, th.add(th.add(first, lane), step)) for step in (0, WARP)]
    pair = [th.load(place, op="ld.global.nc")[0] for place in places]
    held = vector.from_elements(ir.VectorType.get((2,), th.i32()), pair)
    layout = mgpu.WGStridedFragLayout((2 * WARPGROUP,), 2)
    return mgpu.FragmentedArray(_registers=np.array([held], dtype=object), _layout=layout, _is_signed=True)


def _named_bits_interpreted(pool: Any, held: Any) -> Any:
    pages, _, page_size, _ = pool.shape
    slots = _in_order(held)
    named = ((slots >= 0) & (slots < pages * page_size)).reshape(2, WARP).astype(jnp.int32)
    words = jnp.sum(named << jnp.arange(WARP, dtype=jnp.int32), axis=1, dtype=jnp.int32)
    return [words[0], words[1]]


@thread_op(
    args=lambda pool, held: (GLOBAL, _OF_THREADS.layout), returns=[NUMBER, NUMBER], interpret=_named_bits_interpreted
)
def named_bits(pool, held):
    """A bit for each of a tile's slots, two words of 32: whether it is a row of the pool."""
    (pages, _, page_size, _), _ = th.shape_and_strides(pool)
    return [th.ballot(th.under(slot, pages * page_size)) for slot in _pair(held)]


def _pair(held) -> list:
    return [vector.extract(held.registers.item(), [], [i]) for i in range(2)]


def gather_rows(pool: Any, held: Any, column: Any, target: Any, barriers: Any, slot: Any) -> None:
    """Starts `cp.async` copies of the 64 rows that are named one by one, some columns of them.

    Args:
      pool: `[P, 1, p, C]` in global memory, two bytes an element.
      held: `tile_slots`, each `page * p + row`; zeros come for a negative one, or one past the pool.
      column: the first one.
      target: `[64, columns]` in shared memory, in swizzled tiles of 8 rows of 128 bytes.
      barriers: `address_of` some; slot: which of them completes, as by one copy, when all has come. Whoever has waited for it calls
        `gathered` before matrix instructions read.
    """
    if interpreting():
        pages, _, page_size, _ = pool.shape
        rows = _in_order(held)
        there = (rows >= 0) & (rows < pages * page_size)
        found = pool[...].reshape(pages * page_size, -1)[jnp.where(there, rows, 0)]
        found = lax.dynamic_slice_in_dim(found, column, target.shape[1], axis=1)
        target[...] = jnp.where(there[:, None], found, jnp.zeros((), found.dtype))
        plgpu.barrier_arrive(barriers.at[slot])
        return
    _gather_rows(pool, held, target, arrival(barriers, slot), column=column)


@thread_op(args=lambda pool, held, target, barrier, **_: (GLOBAL, _OF_THREADS.layout, plgpu.RefType(TILED), SCALAR))
def _gather_rows(pool, held, target, barrier, *, column: int) -> None:
    (pages, _, page_size, width), _ = th.shape_and_strides(pool)
    rows, columns = th.rows_and_columns(target)
    across, (lane, warp) = columns * 2 // th.CHUNK, th.lane_and_warp()
    at_once, of_warp = WARP // across, rows // (WARPGROUP // WARP)
    # A warp copies sixteen rows that follow one another: half of what its lanes hold in one place.
    first, later = _pair(held)
    own = th.select(th.under(warp, 2), first, later)
    there = th.ballot(th.under(own, pages * page_size))
    own = th.select(th.under(own, pages * page_size), own, th.number(0))
    which = th.div(lane, across)  # of the rows at once
    source_lane = th.add(th.mul(th.rem(warp, 2), of_warp), which)
    place = th.mul(th.rem(lane, across), th.CHUNK)
    base = th.add(th.address(pool), th.widen_index(th.add(place, 2 * column)))
    row0, shared = th.add(th.mul(warp, of_warp), which), th.address(target, space=3)
    there = th.shift_right(there, source_lane)
    for row in range(0, of_warp, at_once):
        named = th.from_lane(own, th.add(source_lane, row))
        source = th.add(base, th.mul(th.widen_index(named), width * 2))
        size = th.mul(th.bit_and(th.div(there, 1 << row), 1), th.CHUNK)
        to = th.add(shared, th.within(th.add(row0, row), place, columns, 128))
        th.inline(f"cp.async.cg.shared.global [$0], [$1], {th.CHUNK}, $2;", to, source, size)
    th.inline("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];", barrier)


@thread_op(args=(GLOBAL, GLOBAL, *[SCALAR] * 3), interpret=lambda *_, **__: None)
def prefetch_named(pool, slots, begin, turn, end, *, pairs: int) -> None:
    """Starts the way from memory to the L2 of rows that `gather_rows` takes from it later.

    Args:
      pool, slots: `[P, 1, p, C]` and `[K]` in global memory.
      begin, turn, end: tiles of 64 slots come in pairs, `begin` and the next one, `begin + turn` and on, all of them below `end`;
        the first pair is left out.
      pairs: so many at most.
    """
    (pages, _, page_size, width), _ = th.shape_and_strides(pool)
    thread = th.thread_of_cta()
    pair0, key = th.div(thread, 2 * _SLOTS), th.rem(thread, 2 * _SLOTS)
    for pair in range(1, pairs, 2):
        tile = th.add(begin, arith.muli(th.add(pair0, pair), turn))
        tile = th.add(tile, th.div(key, _SLOTS))
        there = arith.cmpi(arith.CmpIPredicate.slt, tile, end)
        place = th.word_address(
            slots, th.select(there, th.add(th.mul(tile, _SLOTS), th.rem(key, _SLOTS)), th.number(0))
        )
        (named,) = th.load(place, op="ld.global.nc", there=there, otherwise="-1")
        row = th.add(th.address(pool), th.mul(th.widen_index(named), width * 2))
        th.when(
            th.under(named, pages * page_size), f"cp.async.bulk.prefetch.L2.global [$0], {width * 2};", row
        )  # fmt: skip


@thread_op(interpret=lambda: None)
def gathered() -> None:
    """Matrix instructions find what `gather_rows` has brought and this thread has waited for."""
    th.inline("fence.proxy.async.shared::cta;")


@thread_op(interpret=lambda: None)
def order_copies() -> None:
    """Copies that begin afterwards find what the warpgroup's threads have stored in global memory before."""
    utils.inline_ptx("fence.proxy.async.global;", has_side_effects=True)
    utils.warpgroup_barrier()


@thread_op(args=(GLOBAL,), interpret=lambda rows: None)
def prefetch_rows(rows) -> None:
    """Asks for whole rows that lie next to each other in global memory, so that they are in the L2 before they are copied."""
    ty = ir.MemRefType(rows.type)
    count = ty.shape[0] * ty.shape[1] * utils.bytewidth(ty.element_type)
    leads = arith.cmpi(arith.CmpIPredicate.eq, th.thread(), utils.c(0, th.i32()))
    th.when(leads, f"cp.async.bulk.prefetch.L2.global [$0], {count};", th.address(rows))


@thread_op(args=(GLOBAL,), interpret=lambda row: None)
def touch_row(row) -> None:
    """Asks for a row of integers, its first 16 KiB, before it is known which of them are needed."""
    (count,), _ = th.shape_and_strides(row)
    thread = th.thread()
    there = th.offset(th.address(row), th.mul(thread, 128))
    th.when(th.below(thread, -(-count // 32)), "prefetch.global.L1 [$0];", there)


def prefetch(source: Any) -> None:
    """Brings part of an array to the L2, by TMA."""
    if not interpreting():
        plgpu.async_prefetch(source)
