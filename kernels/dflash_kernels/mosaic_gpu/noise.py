"""Gumbel noise made in registers, for the numbers of a row that it may bring above a bound (`dflash_kernels.sampling.noise`)."""

# Pallas declares what it inlines with the context that it passes itself.
# pyright: reportAbstractUsage=false, reportCallIssue=false

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from dflash_kernels.core.device import WARPGROUP
from dflash_kernels.mosaic_gpu import ptx as th
from dflash_kernels.mosaic_gpu.thread_op import SCALAR, thread_op

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))  # of Threefry-2x32
PARITY = 0x1BD11BDA  # of its key schedule
FEW_TERMS = 7  # of the series that is taken for uniform numbers below 1/8


def _strided(size: int) -> Any:
    return plgpu.Layout.WG_STRIDED((size,), vec_size=size // WARPGROUP)


def _row(dtype: Any) -> plgpu.ShapeDtypeStruct:
    """One number of each thread."""
    return plgpu.ShapeDtypeStruct((WARPGROUP,), jnp.dtype(dtype), layout=_strided(WARPGROUP))


def _interpreted(best, values, key, least, first, start, over, most_noise, factor, *, hashed, exponential):
    sums, places = best
    here = start + jnp.arange(values.shape[0], dtype=jnp.int32)
    later = exponential(*hashed(jnp.stack([jnp.asarray(word).astype(jnp.uint32) for word in key]), here, 0))
    noise = -jnp.log(jnp.where(here == first, least, least + later))
    values, noise, here = (each.reshape(WARPGROUP, -1) for each in (values, noise, here))
    noisy = jnp.where(values + most_noise > jnp.maximum(over, sums)[:, None], values + factor * noise, -jnp.inf)
    most, which = noisy.max(axis=1), noisy.argmax(axis=1)
    return jnp.maximum(sums, most), jnp.where(most > sums, here[jnp.arange(WARPGROUP), which], places)


@thread_op(
    args=lambda best, values, *_, **__: (_strided(WARPGROUP), _strided(values.shape[0]), *[SCALAR] * 7),
    returns=[_row(jnp.float32), _row(jnp.int32)],
    interpret=_interpreted,
)
def best_with_noise(
    best: Any, values: Any, key: Any, least: Any, first: Any, start: Any, over: Any, most_noise: Any, factor: Any,
    *, hashed: Any, exponential: Any,
) -> Any:  # fmt: skip
    """Each thread's largest sum of a number and the noise of its place, and that place.

    A thread hashes for the numbers that may exceed what is known, one after the other, and the threads of a warp wait for the one
    that has most of them: few such numbers cost little, wherever they are.

    Args:
      best: the sums and places found so far, `[128]` each; of equal sums these stay.
      values: `[n]` float32, n / 128 neighbouring numbers a thread.
      key: two int32 words.
      least, first: the first time of the places' chunk, and the place that it belongs to.
      start: the place of the first number.
      over: a sum that the best one of all exceeds.
      most_noise: more than any noise of the chunk, times its factor.
      factor: the noise's factor.
      hashed, exponential: the definitions, which the interpreter takes.
    """
    per_thread = values.shape[0] // WARPGROUP
    begin = th.add(start, th.mul(th.thread(), per_thread))
    sum_, place = (vector.extract(each.registers.item(), [], [0]) for each in best)
    numbers = [vector.extract(values.registers.item(), [], [index]) for index in range(per_thread)]
    bound = th.fsub(arith.maximumf(over, sum_), most_noise)
    left = th.number(0)
    for index, number in enumerate(numbers):
        may_win = arith.cmpf(arith.CmpFPredicate.OGT, number, bound)
        left = th.either(left, th.select(may_win, th.number(1 << index), th.number(0)))

    @th.fori(th.bits_set(left), [left, sum_, place])
    def found(_, carry):
        left, sum_, place = carry
        index = th.first_bit(left)
        value = numbers[-1]
        for other in range(per_thread - 1):
            value = th.select(th.compare(index, "eq", other), numbers[other], value)
        here = th.add(begin, index)
        later = _exponential(*_threefry(key, here, 0))
        time = th.select(th.compare(here, "eq", first), least, th.fadd(least, later))
        noisy = th.fsub(value, th.fmul(factor, _log(time)))
        better = arith.cmpf(arith.CmpFPredicate.OGT, noisy, sum_)
        return [arith.andi(left, th.sub(left, 1)), th.select(better, noisy, sum_), th.select(better, here, place)]

    _, sum_, place = found.results
    return [_one_each(sum_, None), _one_each(place, True)]


def _one_each(value: Any, is_signed: bool | None) -> Any:
    register = vector.from_elements(ir.VectorType.get((1,), value.type), [value])
    layout = mgpu.WGStridedFragLayout((WARPGROUP,), 1)
    return mgpu.FragmentedArray(_registers=np.array([register], dtype=object), _layout=layout, _is_signed=is_signed)


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
