"""A short list of a row's numbers in shared memory: gathered from chunks, put in order, and how far a share of its weight reaches.

A warpgroup gathers in a list of its own, in whatever order its threads arrive. In order, the largest number first and of equal ones
the first place, nothing depends on it any more.
"""

# Pallas declares what it inlines with the context that it passes itself.
# pyright: reportAbstractUsage=false, reportCallIssue=false

import functools
import math
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith, vector

from dflash_kernels.core.device import WARP, WARPGROUP
from dflash_kernels.mosaic_gpu import ptx as th
from dflash_kernels.mosaic_gpu.rows import one_each
from dflash_kernels.mosaic_gpu.thread_op import GLOBAL, NUMBER, SCALAR, thread_op

MOST = WARPGROUP  # numbers of a list, one for each thread
FIELD = 10  # bits of a warp's count, three of them in a word
THRESHOLDS = 3


def _strided(size: int) -> Any:
    return plgpu.Layout.WG_STRIDED((size,), vec_size=size // WARPGROUP)


def _row(dtype: Any) -> plgpu.ShapeDtypeStruct:
    return plgpu.ShapeDtypeStruct((WARPGROUP,), jnp.dtype(dtype), layout=_strided(WARPGROUP))


def _numbers(values: Any) -> list:
    """A thread's numbers."""
    size = values.shape[0] // WARPGROUP
    return [vector.extract(values.registers.item(), [], [index]) for index in range(size)]


def _real_above(a: Any, b: Any) -> Any:
    return arith.cmpf(arith.CmpFPredicate.OGT, a, b)


def _counted(values: Any, least: list, counts: Any, wg: Any) -> None:
    of_warps = jnp.stack([(values >= one).reshape(4, -1).sum(axis=1) for one in least])
    for warp in range(4):
        fields = (of_warps[place, warp].astype(jnp.int32) << (FIELD * place) for place in range(THRESHOLDS))
        counts[wg * 4 + warp] = functools.reduce(jnp.bitwise_or, fields)


@thread_op(args=lambda values, *_: (_strided(values.shape[0]), SCALAR, GLOBAL, SCALAR), interpret=_counted)
def count_reaching(values: Any, least: list, counts: Any, wg: Any) -> None:
    """How many numbers of each warp are each of three thresholds or more, for `reaching` behind a barrier of the CTA.

    Args:
      values: `[n]` float32, fewer than 1,024 of a warp.
      least: the thresholds, float32.
      counts: `[warps of the CTA]` int32 in shared memory.
      wg: the warpgroup's number.
    """
    total = th.number(0)
    for number in _numbers(values):
        for place, one in enumerate(least):
            reaches = arith.cmpf(arith.CmpFPredicate.OGE, number, one)
            total = th.add(total, th.select(reaches, th.number(1 << (FIELD * place)), th.number(0)))
    total = th.over_lanes(total, "add")
    lane, warp = th.lane_and_warp()
    where = th.add(th.address(counts, 3), th.mul(th.add(th.mul(wg, WARPGROUP // WARP), warp), 4))
    th.when(th.compare(lane, "eq", 0), "st.shared.b32 [$0], $1;", where, total)


def _fields(words: Any) -> list:
    return [(words >> (FIELD * place)) & ((1 << FIELD) - 1) for place in range(THRESHOLDS)]


@thread_op(
    args=(GLOBAL,), returns=[NUMBER] * THRESHOLDS, interpret=lambda counts: [one.sum() for one in _fields(counts[...])]
)
def reaching(counts: Any) -> list:
    """The sums of what `count_reaching` counted, int32."""
    (warps,), _ = th.shape_and_strides(counts)
    lane, _ = th.lane_and_warp()
    word = th.shared_word(th.address(counts, 3), th.least(lane, warps - 1))
    word = th.select(th.under(lane, warps), word, th.number(0))
    shifted = [th.shift_right(word, th.number(FIELD * place)) for place in range(THRESHOLDS)]
    return [th.over_lanes(th.bit_and(one, (1 << FIELD) - 1), "add") for one in shifted]


def _appended(values: Any, lists: Any, counts: Any, wg: Any, start: Any) -> None:
    there = values > -jnp.inf
    place = counts[wg] + jnp.cumsum(there) - 1
    slots = jnp.where(there & (place < MOST), place, MOST)
    for index, found in enumerate((values, (start + jnp.arange(values.shape[0])).astype(jnp.int32))):
        words = found.view(jnp.int32)
        lists[wg, index] = jnp.append(lists[wg, index], 0).at[slots].set(words)[:MOST]
    counts[wg] = counts[wg] + there.sum().astype(jnp.int32)


@thread_op(args=lambda values, *_: (_strided(values.shape[0]), GLOBAL, GLOBAL, SCALAR, SCALAR), interpret=_appended)
def append(values: Any, lists: Any, counts: Any, wg: Any, start: Any) -> None:
    """Adds a chunk's numbers that are not -inf, and their places, to the warpgroup's list; those without room are counted only.

    Args:
      values: `[n]` float32, n / 128 neighbouring numbers a thread.
      lists: `[warpgroups, 2, MOST]` int32 in shared memory: bits of numbers, places.
      counts: `[warpgroups]` int32 in shared memory.
      wg: the warpgroup's number.
      start: the place of the first number.
    """
    numbers = _numbers(values)
    first = th.add(start, th.mul(th.thread(), len(numbers)))
    counter = th.add(th.address(counts, 3), th.mul(wg, 4))
    own = th.add(th.address(lists, 3), th.mul(wg, 2 * 4 * MOST))
    left = th.number(0)
    for index, number in enumerate(numbers):
        stays = th.select(_real_above(number, th.real(-math.inf)), th.number(1 << index), th.number(0))
        left = th.either(left, stays)

    @th.fori(th.over_lanes(th.bits_set(left), "max"), [left])
    def _(_, carry):
        (left,) = carry
        index, mine = th.first_bit(left), th.compare(left, "ne", 0)
        value = numbers[-1]
        for other in range(len(numbers) - 1):
            value = th.select(th.compare(index, "eq", other), numbers[other], value)
        there = th.inline(
            "{ .reg .pred mine; setp.ne.b32 mine, $2, 0; mov.b32 $0, 0; @mine atom.shared.add.u32 $0, [$1], 1; }",
            counter, th.as_word(mine), returns=th.i32(),
        )  # fmt: skip
        where = th.add(own, th.mul(there, 4))
        roomy = th.every(mine, th.under(there, MOST))
        for which, word in enumerate((th.bits(value), th.add(first, index))):
            th.when(roomy, "st.shared.b32 [$0], $1;", th.add(where, which * 4 * MOST), word)
        return [arith.andi(left, th.sub(left, 1))]


def _joined(lists: Any, counts: Any, ordered: Any) -> tuple[Any, Any]:
    values, places = (lists[:, which].reshape(-1) for which in range(2))
    there = (jnp.arange(MOST) < counts[...][:, None]).reshape(-1)
    numbers = jnp.where(there, values.view(jnp.float32), -jnp.inf)
    places = jnp.where(there, places, jnp.iinfo(jnp.int32).max)
    order = jnp.lexsort((places, -numbers))[:MOST]
    ordered[...] = numbers[order]
    return numbers[order], places[order]


@thread_op(args=(GLOBAL,) * 3, returns=[_row(jnp.float32), _row(jnp.int32)], interpret=_joined)
def in_order(lists: Any, counts: Any, ordered: Any) -> list:
    """The numbers of all lists and their places, the largest one in the first thread, by one warpgroup behind a barrier of the CTA.

    Behind the last there are -inf and a place of no row. Needs the memory of the lists.

    Args:
      lists, counts: as for `append`; `MOST` numbers together at most, and fewer than `MOST` of a warpgroup where there are several.
      ordered: `[MOST]` float32 in shared memory, for the numbers in order.
    """
    (warpgroups,), _ = th.shape_and_strides(counts)
    base, own, target = th.address(lists, 3), th.thread(), th.address(ordered, 3)
    held = [th.shared_word(th.address(counts, 3), warpgroup) for warpgroup in map(th.number, range(warpgroups))]
    # Of the own entry the place in the lists.
    word, count = th.number(0), th.number(0)
    for warpgroup, here in enumerate(held):
        is_here = th.every(th.compare(own, "uge", count), th.compare(own, "ult", th.add(count, here)))
        word = th.select(is_here, th.add(th.sub(own, count), warpgroup * 2 * MOST), word)
        count = th.add(count, here)
    there = th.compare(own, "ult", count)
    value = th.select(there, th.shared_word(base, word), th.bits(th.real(-math.inf)))
    place = th.select(there, th.shared_word(base, th.add(word, MOST)), th.number((1 << 31) - 1))

    def keep(entry: Any, number: Any, place: Any) -> None:
        th.inline("st.shared.v2.b32 [$0], {$1, $2};", th.add(base, th.mul(entry, 8)), number, place)

    th.warpgroup_barrier()
    keep(own, value, place)
    th.warpgroup_barrier()

    @th.fori(count, [th.number(0)])
    def before(other, carry):
        theirs, where = th.load(th.add(base, th.mul(other, 8)), 2, op="ld.shared")
        a, b = th.as_real(theirs), th.as_real(value)
        same = th.every(arith.cmpf(arith.CmpFPredicate.OEQ, a, b), th.compare(where, "slt", place))
        return [th.add(carry[0], th.as_word(th.either(_real_above(a, b), same)))]

    rank = th.select(there, before.results[0], own)
    th.warpgroup_barrier()
    keep(rank, value, place)
    th.store_shared(target, rank, value)
    th.warpgroup_barrier()
    value, place = th.load(th.add(base, th.mul(own, 8)), 2, op="ld.shared")
    return [one_each(th.as_real(value), None), one_each(place, True)]


def _crossed(weights: Any, memory: Any, count: Any, share: Any) -> Any:
    del memory, count
    through = jnp.cumsum(weights)
    return (through < jnp.maximum(share * through[-1], jnp.finfo(jnp.float32).tiny)).sum().astype(jnp.int32)


@thread_op(args=(_strided(WARPGROUP), GLOBAL, SCALAR, SCALAR), returns=NUMBER, interpret=_crossed)
def reached_by(weights: Any, memory: Any, count: Any, share: Any) -> Any:
    """The first thread that, with all before it, has so large a share of all weight, by one warpgroup. Sums are in order.

    Args:
      weights: `[128]` float32, 0 from number `count` on.
      memory: `[128]` float32 in shared memory.
      count: one or more.
      share: float32, less than 1; 0 is what every weight reaches.
    """
    base = th.address(memory, 3)
    th.store_shared(base, th.thread(), th.bits(_numbers(weights)[0]))
    th.warpgroup_barrier()

    def added(number: Any, total: Any) -> Any:
        return th.fadd(total, th.as_real(th.shared_word(base, number)))

    @th.fori(count, [th.real(0.0)])
    def total(number, carry):
        return [added(number, carry[0])]

    enough = arith.maximumf(th.fmul(share, total.results[0]), th.real(float(jnp.finfo(jnp.float32).tiny)))

    @th.fori(count, [th.real(0.0), th.number(0)])
    def crossing(number, carry):
        through = added(number, carry[0])
        return [through, th.add(carry[1], th.as_word(_real_above(enough, through)))]

    return th.least(crossing.results[1], th.sub(count, 1))
