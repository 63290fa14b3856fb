"""Rows of hashed n-grams against Python's whole numbers, and what slots keep of verified tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels.recurrent.ngrams import NgramFactors, NgramState, ngram_fold, ngram_rows

# Of Qwen3.8-Flash-Next's table: `seed` 1234, 248,320 tokens, eight heads for pairs and eight for three tokens.
MULTIPLIERS = (23_703_573_157_769, 20_109_073_645_365, 8_052_911_324_071)
PRIMES = (
    20_000_003, 20_000_023, 20_000_033, 20_000_047, 20_000_059, 20_000_063, 20_000_069, 20_000_077, 20_000_081, 20_000_093,
    20_000_107, 20_000_147, 20_000_153, 20_000_159, 20_000_161, 20_000_171,
)  # fmt: skip
END = 248_044


def rows_of(text: list[int], end: int, multipliers: tuple[int, ...], primes: tuple[int, ...]) -> list[list[int]]:
    """Of every token: what is before an end of a text, or before its beginning, counts as one."""
    size, found = len(multipliers), []
    heads = len(primes) // (size - 1)
    for place, token in enumerate(text):
        mixed, own, ended = token * multipliers[0], [], False
        for back in range(1, size):
            before = text[place - back] if place >= back and not ended else end
            ended = ended or before == end
            mixed ^= before * multipliers[back]
            first = (back - 1) * heads
            own += [
                mixed % prime + sum(primes[:head]) for head, prime in enumerate(primes[first : first + heads], first)
            ]
        found.append(own)
    return found


@pytest.mark.parametrize(
    ("end", "vocab", "multipliers", "primes"),
    [
        (END, 248_320, MULTIPLIERS, PRIMES),
        (2, 5, ((1 << 60) + 1, (1 << 60) + 33, 3, (1 << 59) + 7), (2, 3, 2**31 - 1)),
        (7, 1 << 24, ((1 << 38) + 1, (1 << 38) + 5), (2**29 - 3, 65_537)),
    ],
)  # fmt: skip
def test_rows_are_those_of_whole_numbers(
    end: int, vocab: int, multipliers: tuple[int, ...], primes: tuple[int, ...]
) -> None:
    rng, size = np.random.default_rng(0), len(multipliers)
    texts = rng.integers(0, vocab, (3, 33))
    texts[0, [0, 5, 6, 9, 11, 32]] = end
    texts[1, ::2] = vocab - 1
    offsets = tuple(np.cumsum((0, *primes[:-1])).tolist())
    if sum(primes) > 2**31:
        offsets = (0,) * len(primes)
    tokens = np.concatenate([np.zeros((3, size - 1), np.int32), texts - end], axis=1)[..., None]
    found = jax.jit(
        lambda tokens: ngram_rows(tokens, end=end, multipliers=multipliers, primes=primes, offsets=offsets)
    )(jnp.asarray(tokens, jnp.int32))
    expected = np.array([rows_of(text, end, multipliers, primes) for text in texts.tolist()])
    expected -= np.cumsum((0, *primes[:-1])) - np.array(offsets)
    np.testing.assert_array_equal(found, expected)


def test_a_fold_keeps_the_last_rows_and_tokens_that_stand() -> None:
    rng, counts = np.random.default_rng(1), np.array([0, 1, 2, 5])
    kept = NgramState(
        jnp.asarray(rng.normal(size=(4, 6, 3)), jnp.bfloat16), jnp.asarray(rng.integers(0, 9, (4, 2, 1)), jnp.int32)
    )
    new = NgramFactors(
        jnp.asarray(rng.normal(size=(4, 5, 3)), jnp.bfloat16), jnp.asarray(rng.integers(0, 9, (4, 5, 1)), jnp.int32)
    )
    folded = ngram_fold(kept, new, jnp.asarray(counts))
    for before, more, after in zip(kept, new, folded, strict=True):
        whole = np.concatenate([before, more], axis=1)
        assert after.dtype == before.dtype
        for slot, count in enumerate(counts):
            np.testing.assert_array_equal(np.asarray(after)[slot], whole[slot, count : count + before.shape[1]])
