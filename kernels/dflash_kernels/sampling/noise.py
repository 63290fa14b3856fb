"""Gumbel noise of tokens by a counter-based generator: of any tokens, in any order, with a bound for whole chunks of them.

The noise of a token is minus the logarithm of a time: that of the first arrival of a Poisson process of its own. Tokens come in
chunks of `CHUNK`. One hash gives the first time in a chunk and the token that it belongs to; every other token of the chunk comes a
time of its own later, from a hash of its own. As such processes have no memory, all times are independent and exponential, as if
each were drawn by itself. But no token of a chunk has more noise than the first one: who looks for the largest sum of logit and
noise hashes the tokens that may still be it, and no others.
"""

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Float, Int, UInt32

CHUNK = 1024  # a power of two
BITS = CHUNK.bit_length() - 1
OF_TOKENS, OF_CHUNKS = 0, 1  # second words of what is hashed
MOST = 1 - 2.0**-24  # of a uniform number: no token is refused by its noise, it may be the only one that filters leave


def noise_of(keys: UInt32[Array, "*R 2"], tokens: Int[Array, "*R C"]) -> Float[Array, "*R C"]:
    """Standard Gumbel noise of some tokens.

    Args:
      keys: of each row a Threefry key ("Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011).
    """
    least, first = arrivals(keys, tokens >> BITS)
    later = exponential(*hashed(keys, tokens, OF_TOKENS))
    return -jnp.log(jnp.where((tokens & (CHUNK - 1)) == first, least, least + later))


def noise_of_all(keys: UInt32[Array, "*R 2"], vocab: int) -> Float[Array, "*R V"]:
    """`noise_of` of all tokens of a vocabulary."""
    rows = keys.shape[:-1]
    chunks, tokens = (
        jax.lax.broadcasted_iota(jnp.int32, (*rows, count), len(rows)) for count in (-(-vocab // CHUNK), vocab)
    )
    least, first = (_to_tokens(each, vocab) for each in arrivals(keys, chunks))
    later = exponential(*hashed(keys, tokens, OF_TOKENS))
    return -jnp.log(jnp.where((tokens & (CHUNK - 1)) == first, least, least + later))


def _to_tokens(of_chunks: Array, vocab: int) -> Array:
    """Numbers of chunks to the tokens of these."""
    if vocab <= CHUNK:  # without whole chunks in memory
        return jnp.broadcast_to(of_chunks, (*of_chunks.shape[:-1], vocab))
    return jnp.repeat(of_chunks, CHUNK, axis=-1)[..., :vocab]


def arrivals(
    keys: UInt32[Array, "*R 2"], chunks: Int[Array, "*R C"]
) -> tuple[Float[Array, "*R C"], Int[Array, "*R C"]]:
    """The first time in each of some chunks, and the place in the chunk of the token that it belongs to."""
    high, low = hashed(keys, chunks, OF_CHUNKS)
    # The place takes the first bits of one word; the others are digits of the time.
    time = exponential(high, low << BITS)
    return time * (1 / CHUNK), (low >> (32 - BITS)).astype(jnp.int32)


def hashed(
    keys: UInt32[Array, "*R 2"], places: Int[Array, "*R C"], kind: int
) -> tuple[UInt32[Array, "*R C"], UInt32[Array, "*R C"]]:
    """Threefry-2x32 of `(place, kind)`."""
    counters = places.astype(jnp.uint32)
    of_rows = [jnp.broadcast_to(keys[..., word, None], counters.shape) for word in (0, 1)]
    high, low = threefry2x32_p.bind(*of_rows, counters, jnp.full_like(counters, kind))
    return high, low


def exponential(high: UInt32[Array, "*R C"], low: UInt32[Array, "*R C"]) -> Float[Array, "*R C"]:
    """A standard exponential number of 64 bits: small ones, which the largest noise is made of, have all digits of float32."""
    uniform = (high.astype(jnp.float32) + (low.astype(jnp.float32) + 0.5) * 2.0**-32) * 2.0**-32
    return -jnp.log1p(-jnp.minimum(uniform, MOST))
