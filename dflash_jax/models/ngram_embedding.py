"""Hashed n-gram embeddings: what a layer adds to its streams that follows from a token and the few before it alone.

Source: transformers' Qwen4ExpTextPLELayer. A token's n-grams are rows of a large table (`dflash_kernels.recurrent.ngrams`), all of
them side by side. A projection of these is a value, and a key for each stream; the stream's product with its key gates the value,
and a short convolution along the tokens follows. A slot keeps the tokens and the rows before its next one as mixers keep states, so
that a verified block begins with the right ones whatever number of tokens stood before, and so do prompts in pieces.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from dflash_kernels.recurrent.ngrams import NgramFactors, NgramShape, NgramState, ngram_fold, ngram_rows
from dflash_kernels.recurrent.rows import prompt_rows, summed_taps
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.models.gated_residual import StreamNorm
from dflash_jax.models.layers import Cache, DeltaAttend, Linear
from dflash_jax.models.parameters import Parameter, Source, single

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_BESIDE_LAYERS = 10_007  # between the seeds of one layer's multipliers and of the next one's


@dataclass(frozen=True)
class Ngrams:
    """Sizes of a layer's hashed n-grams, and what tells their rows.

    Attributes:
      place: of the layer among those with n-grams.
      vocab: tokens.
      end: token that ends a text.
      size: tokens of the longest n-gram.
      heads: rows of the table for n-grams of each length.
      least: rows of a head at least: it has as many as the next prime that no head before it has.
      multiple: of which the table's rows are one.
      seed: of the multipliers.
      width: entries of all heads' rows side by side.
      taps: of the convolution.
    """

    place: int
    vocab: int
    end: int
    size: int
    heads: int
    least: int
    multiple: int
    seed: int
    width: int
    taps: int

    @property
    def multipliers(self) -> tuple[int, ...]:
        """Odd numbers, whose products with tokens are below 2^63."""
        most = max(1, ((1 << 63) - 1) // max(self.vocab, 1) // 2)
        base = self.seed + _BESIDE_LAYERS * self.place
        return tuple(2 * (_mixed(base + _GOLDEN * (i + 1)) % most) + 1 for i in range(self.size))

    @property
    def primes(self) -> tuple[int, ...]:
        """Rows of each head."""
        count = (self.size - 1) * self.heads
        return _primes_from(self.least, (self.place + 1) * count)[-count:]

    @property
    def offsets(self) -> tuple[int, ...]:
        """First row of each head in the table."""
        return tuple(sum(self.primes[:i]) for i in range(len(self.primes)))

    @property
    def rows(self) -> int:
        """Rows of the table."""
        return -(-sum(self.primes) // self.multiple) * self.multiple


def _mixed(value: int) -> int:
    """The output of SplitMix64 at a state (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014)."""
    value = (value + _GOLDEN) & _WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)


@functools.lru_cache(maxsize=64)
def _primes_from(least: int, count: int) -> tuple[int, ...]:
    """The first `count` primes from `least` on."""
    found, value = list[int](), max(least, 2)
    while len(found) < count:
        if all(value % divisor for divisor in range(2, math.isqrt(value) + 1)):
            found.append(value)
        value += 1
    return tuple(found)


class NgramEmbedding(nnx.Module):
    """What a layer with n-grams adds to its streams, behind the caller's `attend.delta`, which keeps states.

    Args:
      index: among all states of the model.
    """

    def __init__(self, ngrams: Ngrams, streams: int, hidden: int, index: int, eps: float):
        self.ngrams, self.streams, self.index = ngrams, streams, index
        width = streams * hidden
        self.shape = NgramShape(width, ngrams.size, ngrams.taps)
        self.table = nnx.Param(jnp.zeros((ngrams.rows, ngrams.width // len(ngrams.primes))))
        self.key_proj, self.value_proj = Linear(width, ngrams.width), Linear(hidden, ngrams.width)
        self.key_norm, self.query_norm, self.conv_norm = (StreamNorm(streams, hidden, eps) for _ in range(3))
        self.taps = nnx.Param(jnp.zeros((width, ngrams.taps)))

    def __call__(
        self, x: Float[Array, "B T S D"], ids: Int[Array, "B T"], attend: DeltaAttend, cache: Cache
    ) -> tuple[Float[Array, "B T S D"], Cache]:
        """What is to be added to the streams x of the tokens `ids`."""
        out, cache = attend.delta(_Told(self, ids), x.reshape(*x.shape[:2], -1), cache)
        return out.reshape(x.shape), cache

    def own_tokens(self, ids: Int[Array, "B T"]) -> Int[Array, "B T 1"]:
        """Tokens as states have them."""
        return ids.astype(jnp.int32)[..., None] - self.ngrams.end

    def gated(self, flat: Float[Array, "B T W"], tokens: Int[Array, "B kT 1"]) -> Float[Array, "B T S D"]:
        """Values times their gates, for streams side by side and T tokens behind those before them."""
        told = self.ngrams
        rows = ngram_rows(
            tokens, end=told.end, multipliers=told.multipliers, primes=told.primes, offsets=told.offsets
        )  # fmt: skip
        found = self.table[...][rows].reshape(*rows.shape[:2], -1)
        x = flat.reshape(*flat.shape[:2], self.streams, -1)
        keys = self.key_norm(self.key_proj(found).reshape(x.shape)).astype(jnp.float32)
        gate = jnp.sum(keys * self.query_norm(x).astype(jnp.float32), axis=-1) * x.shape[-1] ** -0.5
        gate = jax.nn.sigmoid(jnp.sqrt(jnp.maximum(jnp.abs(gate), 1e-6)) * jnp.sign(gate))
        return (gate[..., None] * self.value_proj(found).astype(jnp.float32)[:, :, None]).astype(x.dtype)

    def convolved(self, gated: Float[Array, "B T S D"], rows: Float[Array, "B RT W"]) -> Float[Array, "B T W"]:
        """Gated values and their convolution, of whose rows those before the tokens' come first."""
        flat = gated.reshape(*gated.shape[:2], -1)
        out = jax.nn.silu(summed_taps(rows, self.taps[...], apart=self.shape.size))
        return (flat.astype(jnp.float32) + out).astype(flat.dtype)

    def conv_rows(self, gated: Float[Array, "B T S D"]) -> Float[Array, "B T W"]:
        """The convolution's rows."""
        return self.conv_norm(gated).reshape(*gated.shape[:2], -1)


@dataclass(frozen=True)
class _Told:
    """An embedding that is told the tokens: what `attend.delta` is called with; see `RecurrentMixer`."""

    layer: NgramEmbedding
    ids: Int[Array, "B T"]
    differentiable: ClassVar[dict[str, Any]] = {}

    @property
    def index(self) -> int:
        return self.layer.index

    @property
    def shape(self) -> NgramShape:
        return self.layer.shape

    def verify(self, flat: Array, state: NgramState) -> tuple[Array, NgramFactors]:
        """T tokens of each slot from its state, which stays as it is."""
        tokens = self.layer.own_tokens(self.ids)
        gated = self.layer.gated(flat, jnp.concatenate([state.tokens, tokens], axis=1))
        rows = self.layer.conv_rows(gated)
        out = self.layer.convolved(gated, jnp.concatenate([state.rows.astype(rows.dtype), rows], axis=1))
        return out, NgramFactors(rows, tokens)

    def step(self, flat: Array, state: NgramState, live: Bool[Array, "B"]) -> tuple[Array, NgramState]:
        """One token of each slot, and the states after it; slots that are not live keep theirs, bit for bit."""
        out, factors = self.verify(flat, state)
        return out, ngram_fold(state, factors, live.astype(jnp.int32))

    def prefill(self, flat: Array, state: NgramState, **rows: Any) -> tuple[Array, NgramState]:
        """Prompts: n rows of up to L tokens, some of them pieces of one prompt in order; see `dflash_kernels.delta_prefill`."""
        tokens, last, targets = prompt_rows(self.layer.own_tokens(self.ids), state.tokens, **rows)
        gated = self.layer.gated(flat, tokens)
        own, after, _ = prompt_rows(self.layer.conv_rows(gated), state.rows, **rows)
        state = NgramState(
            state.rows.at[targets].set(after, mode="drop"), state.tokens.at[targets].set(last, mode="drop")
        )  # fmt: skip
        return self.layer.convolved(gated, own), state


def ngram_parameters(
    ngrams: Ngrams, streams: int, hidden: int, ours: str, theirs: str, *, parts: int
) -> list[Parameter]:
    """Parameters of one `NgramEmbedding`.

    Args:
      parts: of the table in a checkpoint, of as many rows each; 0 where it is one tensor.
    """
    width, entries = streams * hidden, ngrams.width // len(ngrams.primes)
    names = [f"shard_{part}." for part in range(parts)] or [""]
    shape = (ngrams.rows // len(names), entries)
    table = tuple(Source(f"{theirs}ple_embedding.ngram_embedding.{name}weight", shape) for name in names)
    conv = Source(f"{theirs}conv1d.weight", (width, 1, ngrams.taps), kept=(width, ngrams.taps))
    norms = {"key_norm": "norm_key", "query_norm": "norm_query", "conv_norm": "norm_conv"}
    return [
        Parameter(f"{ours}table", table),
        single(f"{ours}key_proj.weight", f"{theirs}key_proj.weight", (width, ngrams.width)),
        single(f"{ours}value_proj.weight", f"{theirs}value_proj.weight", (hidden, ngrams.width)),
        *(single(f"{ours}{our}.offset", f"{theirs}{their}.weight", (width,)) for our, their in norms.items()),
        Parameter(f"{ours}taps", (conv,)),
    ]
