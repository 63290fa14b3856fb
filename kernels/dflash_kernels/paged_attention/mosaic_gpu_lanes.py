"""Steps of the Hopper kernels below Pallas, in terms of single threads; written out while a kernel is lowered for a GPU.

Every function stands for code that all 128 threads of a warpgroup run together.
"""

import functools
import math

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from dflash_kernels.paged_attention import mosaic_gpu_threads as th

_STORE = "st.shared.v4.b32 [$0], {$1, $2, $3, $4};"


def load_queries(source, target, first_row, rows: int) -> None:
    """Query rows from `source [T, G, H]` to shared memory, zeros where `rows` are over; then all threads may read them."""
    (_, group, head_dim), (token_stride, group_stride, _) = th.shape_and_strides(source)
    width, (count, columns) = th.swizzle(target), th.rows_and_columns(target)
    units = 2 * columns // th.CHUNK
    lane, warp = th.lane_and_warp()
    base, place, first = th.address(source), th.address(target, space=3), first_row.registers.item()
    for start in range(0, count * units, 128):
        unit = th.add(th.add(th.mul(warp, 32), lane), start)
        row, column = th.div(unit, units), th.mul(th.rem(unit, units), th.CHUNK)
        inside = th.below(row, count)
        exists = arith.andi(inside, th.below(th.add(first, row), rows))
        if columns > head_dim:
            exists = arith.andi(exists, th.below(column, 2 * head_dim))
        token = th.div(th.add(first, row), group)
        offset = th.mul(token, token_stride)
        offset = th.add(offset, th.mul(th.sub(th.add(first, row), th.mul(token, group)), group_stride))
        address = th.add(base, th.add(th.mul(th.widen_index(offset), 2), th.widen_index(column)))
        words = th.load_if(exists, address)
        th.when(inside, _STORE, th.add(place, th.within(row, column, columns, width)), *words)
    mgpu.commit_shared()


def pad_columns(source, target) -> None:
    """Rows of shared memory, packed, to a swizzled tile with more columns, zeros there; then all threads may read them."""
    i32 = th.i32()
    (count, columns), packed, width = (
        th.rows_and_columns(target),
        2 * th.shape_and_strides(source)[0][1],
        th.swizzle(target),
    )
    units = 2 * columns // th.CHUNK
    lane, warp = th.lane_and_warp()
    base, place = th.address(source, space=3), th.address(target, space=3)
    for start in range(0, count * units, 128):
        unit = th.add(th.add(th.mul(warp, 32), lane), start)
        row, column = th.div(unit, units), th.mul(th.rem(unit, units), th.CHUNK)
        inside = th.below(row, count)
        words = utils.inline_ptx(
            "{ .reg .pred there; setp.ne.b32 there, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;"
            " @there ld.shared.v4.b32 {$0, $1, $2, $3}, [$4]; }",
            th.add(base, th.add(th.mul(row, packed), column)),
            arith.extui(i32, arith.andi(inside, th.below(column, packed))),
            result_types=[i32] * 4, has_side_effects=True,
        )  # fmt: skip
        th.when(inside, _STORE, th.add(place, th.within(row, column, columns, width)), *words)
    mgpu.commit_shared()


def store_rows(target, tile, column: int, rows: int) -> None:
    """Row `t * G + g` of a tile to `target [T, G, H]` in global memory, from a column on; the first `rows` exist.

    `tile`: `[64, C]` of two-byte elements in the layout of a matrix instruction's result.
    """
    (_, group, _), (token_stride, group_stride, _) = th.shape_and_strides(target)
    lane, warp = th.lane_and_warp()
    base, own = th.address(target), th.mul(th.rem(lane, 4), 4)  # bytes: two columns of every eight
    places = []
    for half in range(2):
        row = th.add(th.add(th.mul(warp, 16), th.div(lane, 4)), 8 * half)
        token = th.div(row, group)
        offset = th.add(th.mul(token, token_stride), th.mul(th.sub(row, th.mul(token, group)), group_stride))
        address = th.add(base, th.add(th.mul(th.widen_index(th.add(offset, column)), 2), th.widen_index(own)))
        places.append((th.below(row, rows), address))
    for place, index in enumerate(np.ndindex(tile.registers.shape)):
        # Rows take turns, eight columns after eight columns.
        exists, address = places[place % 2]
        word = utils.bitcast(tile.registers[index], th.i32())
        th.when(exists, "st.global.b32 [$0], $1;", th.add(address, 16 * (place // 2)), word)


def merge_cluster(part, lse, target, rows: int, parts: int) -> None:
    """Every CTA of the cluster merges some rows of all, four columns in each thread; none leaves before all are read."""
    i32, f32 = th.i32(), ir.F32Type.get()
    (_, group, head_dim), (token_stride, group_stride, _) = th.shape_and_strides(target)
    dtype = ir.MemRefType(target.type).element_type
    lane, warp = th.lane_and_warp()
    thread, threads = th.add(th.mul(warp, 32), lane), head_dim // 4
    at_once = 128 // threads
    rank = utils.inline_ptx("mov.u32 $0, %cluster_ctarank;", result_types=i32)
    column, held, held_lse, base = th.rem(thread, threads), th.address(part, 3), th.address(lse, 3), th.address(target)
    _cluster_barrier()
    zero, one, lowest = (utils.c(value, f32) for value in (0.0, 1.0, -math.inf))
    # CTAs take turns, so that few rows are everybody's and nobody has more steps than it must.
    for step in range(0, rows, parts * at_once):
        row = th.add(th.add(th.mul(rank, at_once), th.div(thread, threads)), step)
        # Everything is asked for before the first answer is needed. Rows past the last lie in shared memory all the same.
        row_held = arith.minsi(row, utils.c(63, i32))
        place = th.add(held, th.add(th.mul(row_held, 4 * head_dim), th.mul(column, 16)))
        logits = [_load_peer(th.add(held_lse, th.mul(row_held, 4)), other, 1)[0] for other in range(parts)]
        loaded = [_load_peer(place, other, 4) for other in range(parts)]
        top = functools.reduce(arith.maximumf, logits)
        top = arith.select(arith.cmpf(arith.CmpFPredicate.OEQ, top, lowest), zero, top)
        total, sums = zero, [zero] * 4
        for logit, values in zip(logits, loaded, strict=True):
            weight = _exp2(arith.mulf(arith.subf(logit, top), utils.c(math.log2(math.e), f32)))
            some = arith.cmpf(arith.CmpFPredicate.OGT, weight, zero)
            # Empty parts were never written: what lies there is skipped, not weighted.
            kept = [arith.select(some, value, zero) for value in values]
            sums = [arith.addf(one_sum, arith.mulf(weight, value)) for one_sum, value in zip(sums, kept, strict=True)]
            total = arith.addf(total, weight)
        share = arith.divf(one, arith.select(arith.cmpf(arith.CmpFPredicate.OGT, total, zero), total, one))
        quad = vector.from_elements(ir.VectorType.get((4,), f32), [arith.mulf(value, share) for value in sums])
        rounded = utils.bitcast(arith.truncf(ir.VectorType.get((4,), dtype), quad), ir.VectorType.get((2,), i32))
        token = th.div(row, group)
        offset = th.add(th.mul(token, token_stride), th.mul(th.sub(row, th.mul(token, group)), group_stride))
        address = th.add(base, th.mul(th.widen_index(th.add(offset, th.mul(column, 4))), 2))
        low, high = (vector.extract(rounded, [], [i]) for i in range(2))
        th.when(th.below(row, rows), "st.global.v2.b32 [$0], {$1, $2};", address, low, high)
    _cluster_barrier()


def _cluster_barrier() -> None:
    for ptx in ("barrier.cluster.arrive.release.aligned;", "barrier.cluster.wait.acquire.aligned;"):
        utils.inline_ptx(ptx, has_side_effects=True, convergent=True)


def _load_peer(address, rank: int, count: int):
    """Float32 from the shared memory of the cluster's CTA `rank`, at an address of the own."""
    f32, vectors = ir.F32Type.get(), "" if count == 1 else ".v4"
    names = ", ".join(f"${i}" for i in range(count))
    return utils.inline_ptx(
        f"{{ .reg .b32 there; mapa.shared::cluster.u32 there, ${count}, {rank};"
        f" ld.shared::cluster{vectors}.f32 {names if count == 1 else '{' + names + '}'}, [there]; }}",
        address, result_types=[f32] * count, has_side_effects=True,
    )  # fmt: skip


def _exp2(value):
    return utils.inline_ptx("ex2.approx.ftz.f32 $0, $1;", value, result_types=ir.F32Type.get())
