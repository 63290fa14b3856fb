"""Min-p, top-k and top-p by radix selection. No logits are sorted: the smallest kept one, the threshold, is found digit by digit.

The threshold is the largest number that enough tokens reach, where enough is `top_k` of them, or `top_p` of their probability.
Logits become integers of the same order; a pass over a row tells how much reaches each of fifteen integers, and so four more bits
(radix selection, as in "Parallel Top-K Algorithms on GPU", SC 2023, section 2).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt32

from dflash_kernels.core.device import target

MOST_BITS = 4  # that one pass finds


def kept(
    logits: Float[Array, "*R V"],
    scaled: Float[Array, "*R V"],
    *,
    min_p: Float[Array, "*#R 1"],
    top_k: Int[Array, "*#R 1"],
    top_p: Float[Array, "*#R 1"],
    rounded: jnp.dtype,
) -> Bool[Array, "*R V"]:
    """Whether each token may be sampled: after min_p, of those left `top_k`, of those `top_p`; ties with the last one stay.

    Args:
      logits: float32.
      scaled: the same after temperature, which decide probabilities.
      min_p: of the largest probability; 0 for all.
      top_k: 0 for all.
      top_p: 1 or more for all; the most probable token stays in any case.
      rounded: dtype that holds every logit.
    """
    bits = 1 + 8 + min(jnp.finfo(rounded).nmant, 23)  # sign, exponent and mantissa as float32 has them
    bits += -bits % MOST_BITS
    # A barrier: every pass would make them anew, from twice the bytes.
    keys = jax.lax.optimization_barrier(ordered(logits, bits))
    top = jnp.max(scaled, axis=-1, keepdims=True)
    stays = scaled >= top + jnp.log(min_p)
    count = jnp.where(top_k > 0, jnp.minimum(top_k, logits.shape[-1]), logits.shape[-1])
    stays &= keys >= largest_reached(keys, jnp.ones(keys.shape, jnp.int32), count, bits)
    shares = jnp.where(stays, jnp.exp(scaled - top), 0.0)
    # A top_p below float32's smallest number is 0, which every number is reached by.
    enough = jnp.maximum(top_p * jnp.sum(shares, axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    return stays & ((top_p >= 1) | (keys >= largest_reached(keys, shares, enough, bits)))


def ordered(logits: Float[Array, "*R V"], bits: int) -> Shaped[Array, "*R V"]:
    """Whole numbers in the order of the logits, equal where these are: their first `bits`, in which they differ, as float32."""
    raw = jax.lax.bitcast_convert_type(jnp.where(logits == 0, 0.0, logits), jnp.uint32)  # one zero of two
    keys = jnp.where(raw >> 31 == 1, ~raw, raw | jnp.uint32(1 << 31)) >> (32 - bits)
    return keys.astype(jnp.uint16 if bits <= 16 else jnp.uint32)


def largest_reached(
    keys: Shaped[Array, "*R V"], weights: Shaped[Array, "*R V"], enough: Shaped[Array, "*#R 1"], bits: int
) -> UInt32[Array, "*R 1"]:
    """The largest whole number of so many bits that keys of at least `enough` weight reach; 0 where there is none."""
    gpu = target().platform == "gpu"
    digit = MOST_BITS if gpu else 2

    def more(step: Any, found: Array) -> Array:
        shift = jnp.uint32(bits) - jnp.uint32(digit) * jnp.uint32(step + 1)
        digits = [found + (jnp.uint32(number) << shift) for number in range(1, 1 << digit)]
        # One reduction for all of them, which reads a row once.
        parts = tuple(jnp.where(keys >= least, weights, 0) for least in digits)
        zeros = tuple(jnp.zeros((), weights.dtype) for _ in parts)
        sums = jax.lax.reduce(parts, zeros, _added, (keys.ndim - 1,))
        return found + (sum((one[..., None] >= enough).astype(jnp.uint32) for one in sums) << shift)

    found = jnp.zeros((*keys.shape[:-1], 1), jnp.uint32)
    if not gpu:
        return jax.lax.fori_loop(0, bits // digit, more, found)  # one pass to compile, not eight or sixteen
    for step in range(bits // digit):
        found = more(step, found)
    return found


def _added(ours: tuple[Array, ...], theirs: tuple[Array, ...]) -> tuple[Array, ...]:
    return tuple(map(jax.lax.add, ours, theirs))
