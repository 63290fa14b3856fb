"""Hashed n-grams of tokens: their rows in a table, and what a slot keeps for those of its next token.

An n-gram is a token with the `n - 1` before it. Tokens times odd numbers, one for each place, are joined by exclusive or; the
remainder by a prime is the row. What lies before an end of a text counts as one, too, and so do places before the text's beginning.
Source: transformers' Qwen4ExpTextNGramEmbedding.

Tokens are kept less the end's, so that zeros are ends of texts. The numbers of 64 bits are pairs of 32, as JAX has no wider ones
unless told. Operations of XLA alone, which no GPU has timed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt32

from dflash_kernels.recurrent.rows import folded_rows

_HALF, _WORD = 0xFFFF, 0xFFFFFFFF


@dataclass(frozen=True)
class NgramShape:
    """Sizes of a layer of hashed n-grams.

    Attributes:
      channels: of the rows that its convolution reads.
      size: tokens of the longest n-gram, and from one tap of the convolution to the next.
      taps: of the convolution.
    """

    channels: int
    size: int
    taps: int

    @property
    def reach(self) -> int:
        """Rows before the newest that the convolution reaches."""
        return (self.taps - 1) * self.size


class NgramState(NamedTuple):
    """Of each slot the rows `[B, reach, C]` of the convolution before its next token, in the model's dtype, and the tokens
    `[B, size - 1, 1]` before that, int32 and less the end's; zeros at first."""

    rows: Array
    tokens: Array


class NgramFactors(NamedTuple):
    """Verified tokens' rows of the convolution, `[B, T, C]`, and the tokens `[B, T, 1]`, less the end's."""

    rows: Array
    tokens: Array


def ngram_fold(state: NgramState, factors: NgramFactors, counts: Int[Array, "B"]) -> NgramState:
    """The states after the first `counts[b]` of the tokens that `factors` are of; 0 leaves a slot as it is, bit for bit."""
    return NgramState(*(folded_rows(kept, new, counts) for kept, new in zip(state, factors, strict=True)))


def ngram_rows(
    tokens: Int[Array, "B kT 1"],
    *,
    end: int,
    multipliers: Sequence[int],
    primes: Sequence[int],
    offsets: Sequence[int],
) -> Int[Array, "B T heads"]:
    """Rows in the table of the n-grams of T tokens, by heads: those of pairs first, then those of three tokens, and so on.

    Args:
      tokens: those of T, behind the k before them, less the end's; k is one less than the multipliers.
      end: token that ends a text.
      multipliers: of a token itself, of the one before it, and so on: each below 2^63 divided by the largest token.
      primes: of the heads, below 2^31, as many for every length of n-grams.
      offsets: of the heads' rows in the table.
    """
    size = len(multipliers)
    heads = len(primes) // (size - 1)
    length = tokens.shape[1] - size + 1
    own = [tokens[:, size - 1 - back : size - 1 - back + length, 0] for back in range(size)]
    for back in range(2, size):
        own[back] = jnp.where(own[back - 1] == 0, 0, own[back])
    high, low = _product(own[0] + end, multipliers[0])
    rows = []
    for back in range(1, size):
        more = _product(own[back] + end, multipliers[back])
        high, low = high ^ more[0], low ^ more[1]
        place = slice((back - 1) * heads, back * heads)
        rows.append(_remainders(high, low, primes[place]) + jnp.asarray(offsets[place], jnp.int32))
    return jnp.concatenate(rows, axis=-1)


def _product(tokens: Int[Array, "*n"], factor: int) -> tuple[UInt32[Array, "*n"], UInt32[Array, "*n"]]:
    """Upper and lower 32 bits of tokens times a number; the product is below 2^64."""
    own = tokens.astype(jnp.uint32)
    first, second = own & _HALF, own >> 16
    low, high = factor & _WORD, factor >> 32
    parts = [[half * np.uint32(one) for one in (low & _HALF, low >> 16)] for half in (first, second)]
    middle = (parts[0][0] >> 16) + (parts[0][1] & _HALF) + (parts[1][0] & _HALF)
    upper = parts[1][1] + (parts[0][1] >> 16) + (parts[1][0] >> 16) + (middle >> 16) + own * np.uint32(high)
    return upper, (parts[0][0] & _HALF) | (middle << 16)


def _remainders(
    high: UInt32[Array, "B T"], low: UInt32[Array, "B T"], primes: Sequence[int]
) -> Int[Array, "B T heads"]:
    """Remainders of numbers by each of the primes: as in long division, as many bits of the lower half at a time as leave room."""
    divisors, left = jnp.asarray(np.array(primes, np.uint32)), 32
    found = high[..., None] % divisors
    while left:
        bits = min(32 - max(primes).bit_length(), left)
        left -= bits
        digit = (low >> left) & np.uint32((1 << bits) - 1)
        found = ((found << bits) | digit[..., None]) % divisors
    return found.astype(jnp.int32)
