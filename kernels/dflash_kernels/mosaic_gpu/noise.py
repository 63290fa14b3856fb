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
from jaxlib.mlir.dialects import arith, scf, vector

from dflash_kernels.core.device import WARPGROUP
from dflash_kernels.mosaic_gpu import ptx as th
from dflash_kernels.mosaic_gpu.thread_op import SCALAR, thread_op

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))  # of Threefry-2x32
PARITY = 0x1BD11BDA  # of its key schedule
FEW_TERMS = 7  # of the series that is taken for uniform numbers below 1/8


def _strided(size: int) -> Any:
    return plgpu.Layout.WG_STRIDED((size,), vec_size=size // WARPGROUP)


def _interpreted(values, key, least, first, start, over, louder, *, hashed, exponential):
    places = start + jnp.arange(values.shape[0], dtype=jnp.int32)
    later = exponential(*hashed(jnp.stack([jnp.asarray(word).astype(jnp.uint32) for word in key]), places, 0))
    noise = -jnp.log(jnp.where(places == first, least, least + later))
    return jnp.where(values > over, values + louder * noise, -jnp.inf)


@thread_op(
    args=lambda values, *_, **__: (_strided(values.shape[0]), *[SCALAR] * 6),
    returns=lambda values, *_, **__: plgpu.ShapeDtypeStruct(
        values.shape, jnp.dtype(jnp.float32), layout=_strided(values.shape[0])
    ),
    interpret=_interpreted,
)
def with_noise(
    values: Any, key: Any, least: Any, first: Any, start: Any, over: Any, louder: Any, *, hashed: Any, exponential: Any
) -> Any:
    """A row's numbers with the noise of their places where they are above a bound, -inf elsewhere.

    A thread hashes for the numbers above the bound alone, and the threads of a warp wait for each other: few such numbers cost
    little, wherever they are.

    Args:
      values: `[n]` float32, n / 128 neighbouring numbers a thread.
      key: two int32 words.
      least, first: the first time of the places' chunk, and the place that it belongs to.
      start: the place of the first number.
      over: the bound.
      louder: the noise's factor.
      hashed, exponential: the definitions, which the interpreter takes.
    """
    per_thread = values.shape[0] // WARPGROUP
    begin = th.add(start, th.mul(th.thread(), per_thread))
    found = []
    for index in range(per_thread):
        value = vector.extract(values.registers.item(), [], [index])
        branch = scf.IfOp(arith.cmpf(arith.CmpFPredicate.OGT, value, over), [th.f32()], has_else=True)
        heard, unheard = (region.blocks[0] for region in branch.regions)
        with ir.InsertionPoint(heard):
            place = th.add(begin, index)
            later = _exponential(*_threefry(key, place, 0))
            time = th.select(th.compare(place, "eq", first), least, th.fadd(least, later))
            scf.yield_([th.fsub(value, th.fmul(louder, _log(time)))])
        with ir.InsertionPoint(unheard):
            scf.yield_([th.real(-math.inf)])
        found.append(branch.results[0])
    register = vector.from_elements(ir.VectorType.get((per_thread,), th.f32()), found)
    layout = mgpu.WGStridedFragLayout(values.shape, per_thread)
    return mgpu.FragmentedArray(_registers=np.array([register], dtype=object), _layout=layout, _is_signed=None)


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
