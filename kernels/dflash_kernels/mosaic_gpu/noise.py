"""Gumbel noise made in registers, for the numbers of a row that it may bring above a bound (`dflash_kernels.sampling.noise`)."""

# Pallas declares what it inlines with the context that it passes itself.
# pyright: reportAbstractUsage=false, reportCallIssue=false

import math
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith, vector

from dflash_kernels.core.device import WARP, WARPGROUP
from dflash_kernels.mosaic_gpu import ptx as th
from dflash_kernels.mosaic_gpu.rows import one_each
from dflash_kernels.mosaic_gpu.thread_op import GLOBAL, SCALAR, thread_op

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))  # of Threefry-2x32
PARITY = 0x1BD11BDA  # of its key schedule
FEW_TERMS = 7  # of the series that is taken for uniform numbers below 1/8
QUEUED = 2 * 2 * WARP  # words of a warp's queue: lanes add at most one number each to what is less than one for each


def _strided(size: int) -> Any:
    return plgpu.Layout.WG_STRIDED((size,), vec_size=size // WARPGROUP)


def _row(dtype: Any) -> plgpu.ShapeDtypeStruct:
    """One number of each thread."""
    return plgpu.ShapeDtypeStruct((WARPGROUP,), jnp.dtype(dtype), layout=_strided(WARPGROUP))


def _interpreted(best, values, memory, key, slots, start, over, most_noise, factor, *, bits, step, hashed, exponential):
    sums, places, waiting = best
    here = start + jnp.arange(values.shape[0], dtype=jnp.int32)
    slot = slots[0] + ((here[-1] >> bits) - slots[1]) // step
    least, first = (each[slot] for each in memory[1:])
    later = exponential(*hashed(jnp.stack([jnp.asarray(word).astype(jnp.uint32) for word in key]), here, 0))
    noise = -jnp.log(jnp.where((here & ((1 << bits) - 1)) == first, least, least + later))
    values, noise, here = (each.reshape(WARPGROUP, -1) for each in (values, noise, here))
    noisy = jnp.where(values + most_noise > jnp.maximum(over, sums)[:, None], values + factor * noise, -jnp.inf)
    most, which = noisy.max(axis=1), noisy.argmax(axis=1)
    return jnp.maximum(sums, most), jnp.where(most > sums, here[jnp.arange(WARPGROUP), which], places), waiting


@thread_op(
    args=lambda best, values, *_, **__: (_strided(WARPGROUP), _strided(values.shape[0]), GLOBAL, *[SCALAR] * 6),
    returns=[_row(jnp.float32), _row(jnp.int32), _row(jnp.int32)],
    interpret=_interpreted,
)
def best_with_noise(
    best: Any, values: Any, memory: Any, key: Any, slots: Any, start: Any, over: Any, most_noise: Any, factor: Any,
    *, bits: int, step: int, hashed: Any, exponential: Any,
) -> Any:  # fmt: skip
    """Each thread's largest sum of a number and the noise of its place, and that place, of a chunk's numbers.

    Those that may exceed what is known wait in a queue of the warp's, wherever they are, until its lanes can hash for one each: as
    lanes hash for their own, the warp would wait for the lane that has most of them. `rest_with_noise` looks at the last ones.

    Args:
      best: the sums and places found so far, and how many numbers of a thread's warp wait, `[128]` each.
      values: `[n]` float32, n / 128 neighbouring numbers a thread.
      memory: in shared memory, the queues, int32 `[warps of the CTA * QUEUED]`, and of chunks the first time and the place that it
        belongs to.
      key: two int32 words.
      slots: of the warpgroup's first chunk in these, and that chunk's number; every `step`th chunk is the warpgroup's.
      start: the place of the first number. The last number is one of the chunk.
      over: a sum that the best one of all exceeds.
      most_noise: more than any noise of the chunk, times its factor.
      factor: the noise's factor.
      bits: a chunk has `2**bits` places.
      hashed, exponential: the definitions, which the interpreter takes.
    """
    del hashed, exponential
    per_thread = values.shape[0] // WARPGROUP
    begin = th.add(start, th.mul(th.thread(), per_thread))
    sum_, place, waiting = (vector.extract(each.registers.item(), [], [0]) for each in best)
    numbers = [vector.extract(values.registers.item(), [], [index]) for index in range(per_thread)]
    bound = th.fsub(arith.maximumf(over, sum_), most_noise)
    left = th.number(0)
    for index, number in enumerate(numbers):
        may_win = arith.cmpf(arith.CmpFPredicate.OGT, number, bound)
        left = th.either(left, th.select(may_win, th.number(1 << index), th.number(0)))
    lane, queue = _own_queue(memory[0])

    @th.fori(th.over_lanes(th.bits_set(left), "max"), [left, sum_, place, waiting])
    def found(_, carry):
        left, sum_, place, waiting = carry
        index, mine = th.first_bit(left), th.compare(left, "ne", 0)
        value = numbers[-1]
        for other in range(per_thread - 1):
            value = th.select(th.compare(index, "eq", other), numbers[other], value)
        voted = th.ballot(mine)
        behind = th.add(waiting, th.bits_set(th.lower_lanes(voted, lane)))
        th.when(mine, "st.shared.v2.b32 [$0], {$1, $2};", _entry(queue, behind), th.bits(value), th.add(begin, index))
        waiting = th.add(waiting, th.bits_set(voted))
        full = th.compare(waiting, "sge", WARP)
        waiting = th.select(full, th.sub(waiting, WARP), waiting)

        @th.fori(th.as_word(full), [sum_, place])
        def looked(_, best):
            return _better(best, _entry(queue, th.add(waiting, lane)), None, memory, key, slots, factor, bits, step)

        return [arith.andi(left, th.sub(left, 1)), *looked.results, waiting]

    _, sum_, place, waiting = found.results
    return [one_each(sum_, None), one_each(place, True), one_each(waiting, True)]


@thread_op(
    args=(_strided(WARPGROUP), GLOBAL, *[SCALAR] * 3),
    returns=[_row(jnp.float32), _row(jnp.int32)],
    interpret=lambda best, *_, **__: best[:2],
)
def rest_with_noise(best: Any, memory: Any, key: Any, slots: Any, factor: Any, *, bits: int, step: int) -> Any:
    """What `best_with_noise` gave with the numbers that still wait."""
    sum_, place, waiting = (vector.extract(each.registers.item(), [], [0]) for each in best)
    lane, queue = _own_queue(memory[0])
    there = th.compare(lane, "slt", waiting)
    sum_, place = _better([sum_, place], _entry(queue, lane), there, memory, key, slots, factor, bits, step)
    return [one_each(sum_, None), one_each(place, True)]


def _own_queue(queues: Any) -> tuple[Any, Any]:
    """The lane, and the address of the warp's queue."""
    thread = th.thread_of_cta()
    of_warp = th.mul(th.div(thread, WARP), 4 * QUEUED)
    return th.rem(thread, WARP), th.add(th.address(queues, 3), of_warp)


def _entry(queue: Any, place: Any) -> Any:
    return th.add(queue, th.mul(place, 8))


def _better(
    best: list, entry: Any, there: Any, memory: Any, key: Any, slots: Any, factor: Any, bits: int, step: int
) -> list:
    """A lane's best sum and place, and what the entry of a queue has: of equal sums the first place. `there`: whether the lane has
    one, None if all have."""
    sum_, place = best
    th.warp_barrier()
    value, here = th.load(entry, 2, op="ld.shared")
    th.warp_barrier()  # before anyone writes there again
    slot = th.add(slots[0], th.div(th.sub(th.shift_right(here, th.number(bits)), slots[1]), step))
    if there is not None:
        slot = th.select(there, slot, slots[0])
    noisy = th.fsub(th.as_real(value), th.fmul(factor, _log(_time(here, slot, memory[1:], key, bits))))
    above, same = (arith.cmpf(relation, noisy, sum_) for relation in (arith.CmpFPredicate.OGT, arith.CmpFPredicate.OEQ))
    wins = th.either(above, th.every(same, th.compare(here, "slt", place)))
    wins = wins if there is None else th.every(there, wins)
    return [th.select(wins, noisy, sum_), th.select(wins, here, place)]


def _time(here: Any, slot: Any, arrivals: Any, key: Any, bits: int) -> Any:
    """When a place's arrival is; `slot`: that of its chunk in the first times and their places."""
    least, first = (th.shared_word(th.address(each, 3), slot) for each in arrivals)
    later = _exponential(*_threefry(key, here, 0))
    is_first = th.compare(th.bit_and(here, (1 << bits) - 1), "eq", first)
    return th.select(is_first, th.as_real(least), th.fadd(th.as_real(least), later))


def _noise_interpreted(places, memory, key, *, bits, step, listed, hashed, exponential):
    chunks = places >> bits
    least, first = (each[...][chunks % step * listed + chunks // step] for each in memory)
    later = exponential(*hashed(jnp.stack([jnp.asarray(word).astype(jnp.uint32) for word in key]), places, 0))
    return -jnp.log(jnp.where((places & ((1 << bits) - 1)) == first, least, least + later))


@thread_op(args=(_strided(WARPGROUP), GLOBAL, SCALAR), returns=_row(jnp.float32), interpret=_noise_interpreted)
def noise_at(
    places: Any, memory: Any, key: Any, *, bits: int, step: int, listed: int, hashed: Any, exponential: Any
) -> Any:
    """The noise of a place for each thread.

    Args:
      places: `[128]` int32.
      memory: in shared memory, of chunks the first time and the place that it belongs to: chunk c in slot
        `c % step * listed + c // step`.
      key: two int32 words.
      bits: a chunk has `2**bits` places.
      hashed, exponential: the definitions, which the interpreter takes.
    """
    del hashed, exponential
    here = vector.extract(places.registers.item(), [], [0])
    chunk = th.div(here, 1 << bits)
    slot = th.add(th.mul(th.rem(chunk, step), listed), th.div(chunk, step))
    return one_each(th.fsub(th.real(0.0), _log(_time(here, slot, memory, key, bits))), None)


def _threefry(key: Any, place: Any, kind: int) -> tuple[Any, Any]:
    schedule = [*key, th.xor(th.xor(key[0], key[1]), PARITY)]
    high, low = th.add(place, schedule[0]), th.add(schedule[1], kind)
    for turn in range(5):
        for bits in ROTATIONS[turn % 2]:
            high = th.add(high, low)
            low = th.xor(th.either(th.shift_left(low, bits), arith.shrui(low, th.number(32 - bits))), high)
        high = th.add(high, schedule[(turn + 1) % 3])
        low = th.add(th.add(low, schedule[(turn + 2) % 3]), turn + 1)
    return high, low


def _exponential(high: Any, low: Any) -> Any:
    """Minus the logarithm of what 64 bits leave of 1."""

    def plus(factor: Any, number: Any, term: float) -> Any:
        return th.fadd(th.fmul(factor, number), th.real(term))

    rest = th.fmul(th.fadd(_real(low), th.real(0.5)), th.real(2.0**-32))
    uniform = th.fmul(th.fadd(_real(high), rest), th.real(2.0**-32))
    uniform = arith.minimumf(uniform, th.real(1 - 2.0**-24))
    # Near 1 the hardware's logarithm keeps no digits of what is left.
    series = th.real(1 / FEW_TERMS)
    for term in range(FEW_TERMS - 1, 0, -1):
        series = plus(series, uniform, 1 / term)
    far = th.fsub(th.real(0.0), _log(th.fsub(th.real(1.0), uniform)))
    near = arith.cmpf(arith.CmpFPredicate.OLT, uniform, th.real(0.125))
    return th.select(near, th.fmul(uniform, series), far)


def _real(word: Any) -> Any:
    return arith.uitofp(th.f32(), word)


def _log(value: Any) -> Any:
    return th.fmul(th.log2(value), th.real(math.log(2)))
