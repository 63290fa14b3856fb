"""What a CTA does with its part of a sequence: the output itself, or a part for the last CTA that finishes to put together.

Every function stands for code that all 128 threads of a CTA run together; written out while a kernel is lowered for a GPU.
"""

import functools
import math
from typing import Any

from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from dflash_kernels.mosaic_gpu import ptx as th

_ROWS_AT_ONCE, _LOADS_AT_ONCE, _LOGITS_AT_ONCE = 8, 24, 8  # of a thread, while it adds up parts
_VOTE = (
    "{ .reg .pred mine, last, anyones; .reg .b32 before; setp.eq.b32 mine, $1, 0; mov.b32 before, 0;"
    " @mine atom.acq_rel.gpu.global.add.u32 before, [$2], 1; setp.eq.and.b32 last, before, $3, mine;"
    " bar.red.or.pred anyones, $4, 128, last; selp.b32 $0, 1, 0, anyones; }"
)


def settle(own, target, parts, lses, arrived, item, part, count, rows: int) -> None:
    """Writes the output where the part is the only one; else leaves it to whoever finishes last, who adds up in the parts' order.

    Args:
      own: `[64, H]` float32 in shared memory, normalised.
      target: `[T, G, H]` in global memory, of whose rows `t * G + g` the first `rows` exist.
      parts: `[I, R, H]` float32 in global memory; lses: `[I, 64]`, natural, the own row written already.
      arrived: counter of the sequence's head, 0 between calls.
      item, part, count: place of this part in `parts`, and among the sequence's, and how many those are.
    """
    quads = _Quads(target, rows)
    item, part, count = (value.registers.item() for value in (item, part, count))
    utils.warpgroup_barrier()
    with utils.when(arith.cmpi(arith.CmpIPredicate.eq, count, utils.c(1, th.i32()))):
        for row in quads.rows():
            quads.store(row, _load(quads.place(own, row, space=3), "shared"))
    with utils.when(arith.cmpi(arith.CmpIPredicate.sgt, count, utils.c(1, th.i32()))):
        for row in quads.rows():
            values = _load(quads.place(own, row, space=3), "shared")
            there = quads.place(parts, row, index=item)
            th.when(th.below(row, rows), "st.global.v4.f32 [$0], {$1, $2, $3, $4};", there, *values)
        last = _arrive(arrived, quads.thread, th.sub(count, 1))
        with utils.when(arith.cmpi(arith.CmpIPredicate.ne, last, utils.c(0, th.i32()))):
            first = arith.subi(item, part)
            is_first_thread = arith.cmpi(arith.CmpIPredicate.eq, quads.thread, utils.c(0, th.i32()))
            th.when(is_first_thread, "st.global.b32 [$0], 0;", th.address(arrived))
            _weigh(own, lses, quads.thread, first, count, rows)
            held = quads.rows()
            for begin in range(0, len(held), _ROWS_AT_ONCE):
                _add_up(quads, held[begin : begin + _ROWS_AT_ONCE], parts, own, first, count)


class _Quads:
    """Four columns for every thread: a row is `H / 4` threads, and a thread has one row in every `512 / H`."""

    def __init__(self, target, rows: int):
        (_, self.group, self.head_dim), (self.token_stride, self.group_stride, _) = th.shape_and_strides(target)
        self.target, self.dtype, self.count = th.address(target), ir.MemRefType(target.type).element_type, rows
        lane, warp = th.lane_and_warp()
        self.thread, self.threads = th.add(th.mul(warp, 32), lane), self.head_dim // 4
        self.column = th.mul(th.rem(self.thread, self.threads), 4)

    def rows(self) -> list[Any]:
        at_once = 128 // self.threads
        own = th.div(self.thread, self.threads)
        return [th.add(own, step) for step in range(0, self.count, at_once)]

    def place(self, ref, row, *, space: int = 0, index: Any = None):
        """Address of the thread's columns in `ref [rows, H]` or in `ref[index]`; of the last row for those past it."""
        strides = th.shape_and_strides(ref)[1]
        row = arith.minsi(row, utils.c(self.count - 1, th.i32()))
        inner = th.mul(th.add(th.mul(row, strides[-2]), self.column), 4)
        if space == 3:
            return th.add(th.address(ref, 3), inner)
        outer = th.mul(th.widen_index(index), 4 * strides[0])
        return th.add(th.add(th.address(ref), outer), th.widen_index(inner))

    def store(self, row, values) -> None:
        """Rounded, to the output."""
        quad = vector.from_elements(ir.VectorType.get((4,), ir.F32Type.get()), list(values))
        rounded = arith.truncf(ir.VectorType.get((4,), self.dtype), quad)
        rounded = utils.bitcast(rounded, ir.VectorType.get((2,), th.i32()))
        token = th.div(row, self.group)
        of_group = th.sub(row, th.mul(token, self.group))
        offset = th.add(th.mul(token, self.token_stride), th.mul(of_group, self.group_stride))
        address = th.add(self.target, th.mul(th.widen_index(th.add(offset, self.column)), 2))
        low, high = (vector.extract(rounded, [], [i]) for i in range(2))
        th.when(th.below(row, self.count), "st.global.v2.b32 [$0], {$1, $2};", address, low, high)


def _weigh(own, lses, row, first, count, rows: int) -> None:
    """Weights of all parts in their sum, `[parts, 64]` float32, to shared memory that held the own part; a thread has one row."""
    f32 = ir.F32Type.get()
    zero, one, lowest = (utils.c(value, f32) for value in (0.0, 1.0, -math.inf))
    rounds = th.div(th.add(count, _LOGITS_AT_ONCE - 1), _LOGITS_AT_ONCE)

    def logits(index):
        for step in range(_LOGITS_AT_ONCE):
            part = th.add(th.mul(index, _LOGITS_AT_ONCE), step)
            there = arith.cmpi(arith.CmpIPredicate.slt, part, count)
            yield part, there, _lse(lses, th.add(first, part), row, rows, there)

    @utils.fori(rounds, [lowest, zero])
    def totals(index, state):
        top, total = state
        found = [logit for _, _, logit in logits(index)]
        new_top = functools.reduce(arith.maximumf, found, top)
        base = _finite(new_top, lowest, zero)
        total = arith.mulf(total, _exponential(top, base))
        return [new_top, functools.reduce(arith.addf, [_exponential(logit, base) for logit in found], total)]

    top, total = totals.results
    some = arith.cmpf(arith.CmpFPredicate.OGT, total, zero)
    base, share = _finite(top, lowest, zero), arith.divf(one, arith.select(some, total, one))

    @utils.fori(rounds, [])
    def _(index, state):
        for part, there, logit in logits(index):
            weight = arith.mulf(_exponential(logit, base), share)
            exists = arith.andi(there, th.below(row, rows))
            th.when(exists, "st.shared.f32 [$0], $1;", _weight_place(own, part, row), weight)
        return state

    utils.warpgroup_barrier()


def _add_up(quads: _Quads, rows, parts, own, first, count) -> None:
    """Some rows of all parts times their weights, as many loads on their way as registers hold."""
    f32, at_once = ir.F32Type.get(), min(_LOADS_AT_ONCE // len(rows), 16)
    zero = utils.c(0.0, f32)

    @utils.fori(th.div(th.add(count, at_once - 1), at_once), [[zero] * 4 for _ in rows])
    def loop(index, sums):
        found = []
        for row in rows:
            for step in range(at_once):
                part = th.add(th.mul(index, at_once), step)
                there = arith.cmpi(arith.CmpIPredicate.slt, part, count)
                values = _load(quads.place(parts, row, index=th.add(first, part)), "global", there)
                last = arith.minsi(row, utils.c(quads.count - 1, th.i32()))
                found.append((_weight(_weight_place(own, part, last), there), values))
        added = []
        for i, total in enumerate(sums):
            for weight, values in found[i * at_once : (i + 1) * at_once]:
                total = [arith.addf(a, arith.mulf(weight, b)) for a, b in zip(total, values, strict=True)]
            added.append(total)
        return added

    for row, sums in zip(rows, loop.results, strict=True):
        quads.store(row, sums)


def _weight_place(own, part, row):
    return th.add(th.address(own, 3), th.mul(th.add(th.mul(part, 64), row), 4))


def _weight(address, there):
    return utils.inline_ptx(
        "{ .reg .pred there; setp.ne.b32 there, $2, 0; mov.b32 $0, 0; @there ld.shared.f32 $0, [$1]; }",
        address, arith.extui(th.i32(), there), result_types=ir.F32Type.get(), has_side_effects=True,
    )  # fmt: skip


def _finite(top, lowest, zero):
    return arith.select(arith.cmpf(arith.CmpFPredicate.OEQ, top, lowest), zero, top)


def _exponential(logit, base):
    exponent = arith.mulf(arith.subf(logit, base), utils.c(math.log2(math.e), ir.F32Type.get()))
    return utils.inline_ptx("ex2.approx.ftz.f32 $0, $1;", exponent, result_types=ir.F32Type.get())


def _arrive(arrived, thread, last: Any):
    """Counts this CTA after all its threads' stores; 1 in all threads of the last one, which then see everybody's stores."""
    utils.warpgroup_barrier()
    return utils.inline_ptx(
        _VOTE, thread, th.address(arrived), last, utils.warpgroup_barrier_idx(sync=False), result_types=th.i32(),
        has_side_effects=True, convergent=True,
    )  # fmt: skip


def _lse(lses, index, row, rows: int, there):
    stride = th.shape_and_strides(lses)[1][0]
    row = arith.minsi(row, utils.c(rows - 1, th.i32()))
    offset = th.add(th.mul(th.widen_index(index), stride), th.widen_index(row))
    return utils.inline_ptx(
        "{ .reg .pred there; setp.ne.b32 there, $2, 0; mov.b32 $0, 0xff800000; @there ld.global.f32 $0, [$1]; }",
        th.add(th.address(lses), th.mul(offset, 4)), arith.extui(th.i32(), there), result_types=ir.F32Type.get(),
        has_side_effects=True,
    )  # fmt: skip


def _load(address, space: str, there: Any = None):
    """Four float32; zeros where `there` is false."""
    f32 = [ir.F32Type.get()] * 4
    if there is None:
        return utils.inline_ptx(
            f"ld.{space}.v4.f32 {{$0, $1, $2, $3}}, [$4];", address, result_types=f32, has_side_effects=True
        )
    return utils.inline_ptx(
        "{ .reg .pred there; setp.ne.b32 there, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;"
        f" @there ld.{space}.v4.f32 {{$0, $1, $2, $3}}, [$4]; }}",
        address, arith.extui(th.i32(), there), result_types=f32, has_side_effects=True,
    )  # fmt: skip
