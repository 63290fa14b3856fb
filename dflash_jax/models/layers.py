"""Building blocks of the decoder stacks: norm, rotary embedding, attention projections, MLP, one layer.

A layer projects its input and hands the projection to `attend`, a function of the caller's. Where keys live (a page pool, a dense
array, nowhere) is the caller's business, and whether norm, rotation and the write to a pool are one operation or several; so one
set of modules serves training, prefill, verification and drafting.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from dflash_kernels import ColumnBlocks, dense, dense_best
from flax import nnx
from jaxtyping import Array, Float, Int

from dflash_jax.config import DecoderConfig, RopeConfig
from dflash_jax.models.parameters import Parameter, Source, single
from dflash_jax.models.traits import Activation, LayerTraits, decoder_traits
from dflash_jax.parallel.collectives import best_of_ranks, reduced
from dflash_jax.parallel.cut import by_columns, by_rows
from dflash_jax.quantization.weights import Quantized, best_product, product, summed_rows

SWIGLU_ALPHA = 1.702  # on the gate inside its sigmoid, in "clamped_swiglu"


def relu_squared(x: Array) -> Array:
    """`max(x, 0)^2` (Primer, arXiv 2109.08668, section 4)."""
    return jnp.square(jax.nn.relu(x))


ACTIVATIONS: Mapping[Activation, Callable[[Array], Array]] = {
    "silu": jax.nn.silu, "gelu_tanh": jax.nn.gelu, "relu2": relu_squared
}  # fmt: skip


class Rotary(NamedTuple):
    """Rotary embedding of some positions: cos and sin of every angle times the factor on both, float32 `[..., rotary dim / 2]`."""

    cos: Array
    sin: Array


# What attention reads and changes: page pools, say, or None where it keeps nothing. A pytree that it takes and gives back.
type Cache = Any


@runtime_checkable
class Attend(Protocol):
    """Attention over whatever keys the caller keeps.

    Takes the layer, its projection `qkv [B,T,(N+2K)*H]`, the tokens' rotation and the cache, and gives `[B,T,N,H]` and the cache
    with the new tokens. `layer.heads(qkv, rotary)` are queries, keys and values.
    """

    def __call__(self, layer: "Attention", qkv: Array, rotary: Rotary, cache: Cache) -> tuple[Array, Cache]: ...


@runtime_checkable
class LatentAttend(Protocol):
    """Attention to latent rows, wherever the caller keeps them."""

    def latent(self, layer: Any, q: Array, row: Array, rotary: Rotary, cache: Cache) -> tuple[Array, Cache]:
        """`q [B,T,N,P+r]` and `row [B,T,R+r]` as projected to `[B,T,N,V_h]`, and the cache with the new rows.

        `layer.parts(q, row, rotary)` are both, normed and rotated.
        """
        ...


class IndexRows(NamedTuple):
    """Outputs of an indexer for tokens: rotated queries `[B,T,I,E]` and keys `[B,T,E]`, and float32 weights `[B,T,I]` of its heads.

    A query's score of a key is `sum over heads of weight * relu(q . k)`.
    """

    q: Array
    k: Array
    weights: Array


@runtime_checkable
class IndexedAttend(Protocol):
    """Attention of each query to the latent rows that an indexer chooses for it."""

    def indexed(
        self, layer: Any, q: Array, row: Array, index: IndexRows | None, rotary: Rotary, cache: Cache
    ) -> tuple[Array, Cache]:
        """As `LatentAttend.latent`, over the `layer.config.index_topk` best rows of each query by its own score.

        `index` None takes over the rows that the layers before have chosen last.
        """
        ...


class PooledRows(NamedTuple):
    """Outputs of an indexer of pools for tokens: queries `[B,T,I,E]`, keys `[B,T,E]` and logits of their weights in a pool, float32
    weights `[B,T,I]` of its heads, and logits of the places in a pool `[p,E]`.
    """

    q: Array
    k: Array
    logits: Array
    weights: Array
    places: Array


@runtime_checkable
class PooledAttend(Protocol):
    """Attention of each query to the latent rows of whole pools that an indexer chooses for it."""

    def pooled(self, layer: Any, q: Array, row: Array, index: PooledRows, cache: Cache) -> tuple[Array, Cache]:
        """As `LatentAttend.latent` of rows that nothing rotates, over the pools with `layer.config.index_topk` tokens that have the
        best scores, and the tokens behind the last whole pool."""
        ...


class BlockRows(NamedTuple):
    """Outputs of an indexer of blocks for tokens, normed and rotated: queries `[B,T,K,E]`, one a key head, and keys `[B,T,E]`.

    Of an indexer of whole blocks, as many queries as it has heads, and keys as they are projected.
    """

    q: Array
    k: Array


@runtime_checkable
class BlockAttend(Protocol):
    """Attention of the heads of each key head to the blocks of keys that an indexer chooses for them."""

    def blocks(self, layer: Any, qkv: Array, index: BlockRows, rotary: Rotary, cache: Cache) -> tuple[Array, Cache]:
        """As `Attend`, over `layer.config.index_blocks` blocks of `index_block` keys, of which the last `index_local` always."""
        ...


@runtime_checkable
class WholeBlockAttend(Protocol):
    """Attention of all heads to the whole blocks of keys that an indexer chooses."""

    def whole_blocks(
        self, layer: Any, qkv: Array, index: BlockRows, rotary: Rotary, cache: Cache
    ) -> tuple[Array, Cache]:
        """As `Attend`, over the blocks with `layer.config.index_topk` tokens that have the best scores, and the tokens behind the
        last whole block. `layer.block_keys` are keys of blocks."""
        ...


@runtime_checkable
class RelativeAttend(Protocol):
    """Attention of heads whose scores have a bias by the distance to the key."""

    def relative(self, layer: Any, q: Array, k: Array, v: Array, mixes: Array, cache: Cache) -> tuple[Array, Cache]:
        """`q [B,T,N,H]`, `k` and `v [B,T,K,H]`, normed, to `[B,T,N,H]`, and the cache with the new keys and values.

        `mixes [B,T,N,r]` mix `layer.profiles [r, extent]` into a bias for each distance, `layer.window` bounds what is seen, and
        `layer.growth` of positions is a factor on scores, or None.
        """
        ...


class ChoiceRows(NamedTuple):
    """Outputs of an indexer of compressed keys for tokens: rotated queries `[B,T,I,E]`, and float32 weights `[B,T,I]` of its heads.

    The keys are parts of the compressed rows.
    """

    q: Array
    weights: Array


@runtime_checkable
class CompressedAttend(Protocol):
    """Attention to a window of tokens, and to rows that stand for whole stretches of tokens each."""

    def compressed(
        self, layer: Any, q: Array, row: Array, choice: ChoiceRows | None, cache: Cache
    ) -> tuple[Array, Cache]:
        """`q [B,T,N,H]` and `row [B,T,W]`, both rotated, to `[B,T,N,H]`, and the cache with the new rows.

        The first H numbers of a row are the token's key, and its value. `layer.entries` makes compressed rows of the others, of
        `layer.rate` tokens each and in the same form; 0 where a layer has none. A query sees the last `layer.window` tokens and all
        stretches that end before or at it, or, with a choice, the `layer.config.index_topk` best of these.
        """
        ...


def linear(x: Float[Array, "... D"], weight: Float[Array, "F D"] | Quantized | ColumnBlocks) -> Float[Array, "... F"]:
    """`x @ weight.T`. float32 stays float32 on GPUs, where XLA would otherwise round operands to tf32."""
    if isinstance(weight, Quantized):
        return product(x, weight)
    if isinstance(weight, ColumnBlocks):
        return dense(x.reshape(-1, x.shape[-1]), weight).reshape(*x.shape[:-1], -1)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum("...d,fd->...f", x, weight, precision=precision)


def best_rows(x: Float[Array, "... D"], weight: Float[Array, "F D"] | Quantized) -> Int[Array, "..."]:
    """The row of the weight that has the largest product with x, the first of equal ones."""
    if isinstance(weight, Quantized):
        return best_product(x, weight)
    return dense_best(x.reshape(-1, x.shape[-1]), weight).reshape(x.shape[:-1])


def best_of_head(x: Float[Array, "... D"], weight: Float[Array, "F D"] | Quantized, count: int) -> Int[Array, "..."]:
    """The row, of `count`, that has the largest product with x, the first of equal ones; each rank may have a share of the rows."""
    if weight.shape[0] == count:
        return best_rows(x, weight)
    if x.dtype == jnp.float32:
        products = linear(x, weight)
        return best_of_ranks(
            jnp.max(products, axis=-1), jnp.argmax(products, axis=-1).astype(jnp.int32), weight.shape[0]
        )
    rows = best_rows(x, weight)
    # Compared as rounded as within a rank: of equal ones the first is taken.
    products = jnp.sum(weight[rows].astype(jnp.float32) * x.astype(jnp.float32), axis=-1).astype(x.dtype)
    return best_of_ranks(products, rows, weight.shape[0])


@runtime_checkable
class DeltaAttend(Protocol):
    """An `Attend` that also runs gated delta nets on whatever states the caller keeps."""

    def delta(self, layer: Any, projected: Array, cache: Cache) -> tuple[Array, Cache]:
        """`projected [B,T,W]`, columns as `dflash_kernels.delta_verify` takes them, to `[B,T,Hv*dv]`, and the cache with the states
        after these tokens, or with what they are made from once it is known how many of the tokens stand.
        """
        ...


def rms_norm(x: Float[Array, "... D"], weight: Float[Array, "D"], eps: float) -> Float[Array, "... D"]:
    """Root-mean-square norm in float32, cast back before the weight is applied, as Hugging Face's Qwen3 does."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return weight * wide.astype(x.dtype)


def unit_norm(x: Float[Array, "... D"], eps: float) -> Float[Array, "... D"]:
    """Root-mean-square norm without a weight, in float32."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)).astype(x.dtype)


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies `[rotary_dim / 2]` float32 and the factor on cos and sin (YaRN, arXiv 2309.00071, section 3; LongRoPE,
    arXiv 2402.13753).

    Proportional ones are those of a whole head; pairs of entries past the part that turns have frequency 0.
    """
    if rope.kind == "proportional":
        turning = int(rope.partial * head_dim // 2)
        exponents = np.arange(0, 2 * turning, 2, dtype=np.float32) / np.float32(head_dim)
        freqs = np.zeros(head_dim // 2, np.float32)
        freqs[:turning] = np.float32(1) / np.float32(rope.theta) ** exponents
        return freqs / np.float32(rope.factor), 1.0
    dim = int(head_dim * rope.partial)
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    theta = rope.theta
    if rope.kind == "dynamic":
        longest = max(rope.reach, rope.original_max_position)
        theta *= (rope.factor * longest / rope.original_max_position - (rope.factor - 1)) ** (dim / (dim - 2))
    freqs = (np.float32(1) / np.float32(theta) ** exponents).astype(np.float32)
    if rope.kind == "longrope":
        return _longrope(rope, freqs)
    if rope.kind == "linear":
        return freqs / np.float32(rope.factor), 1.0
    if rope.kind == "llama3":
        wavelength = 2 * math.pi / freqs
        low, high = (
            rope.original_max_position / rope.low_freq_factor,
            rope.original_max_position / rope.high_freq_factor,
        )
        smooth = rope.original_max_position / wavelength - rope.low_freq_factor
        smooth = smooth / (rope.high_freq_factor - rope.low_freq_factor)
        between = (1 - smooth) * freqs / rope.factor + smooth * freqs
        scaled = np.where(wavelength > low, freqs / rope.factor, np.where(wavelength < high, freqs, between))
        return scaled.astype(np.float32), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, dim, freqs)
    return freqs, 1.0


def _longrope(rope: RopeConfig, freqs: np.ndarray) -> tuple[np.ndarray, float]:
    name = "long_factor" if rope.reach > rope.original_max_position else "short_factor"
    divisors = np.array(getattr(rope, name), np.float32)
    factor = rope.attention_factor
    if factor is None:
        grown = math.log(max(rope.factor, 1.0)) / math.log(rope.original_max_position)
        factor = math.sqrt(1 + grown)
    return freqs / divisors, factor


def _yarn(rope: RopeConfig, dim: int, freqs: np.ndarray) -> tuple[np.ndarray, float]:
    def magnitude(scale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * scale * math.log(rope.factor) + 1.0

    def dimension(rotations: float) -> float:
        return dim * math.log(rope.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    keep = 1 - np.clip((np.arange(dim // 2, dtype=np.float32) - low) / width, 0, 1)
    scaled = freqs / np.float32(rope.factor) * (1 - keep) + freqs * keep
    factor = rope.attention_factor
    if factor is None:
        both = rope.mscale and rope.mscale_all_dim
        factor = magnitude(rope.mscale) / magnitude(rope.mscale_all_dim) if both else magnitude(1.0)
    return scaled.astype(np.float32), factor


def rotary_tables(positions: Int[Array, "..."], rope: RopeConfig, head_dim: int) -> Rotary:
    """The rotation at `positions`: the first `partial * head_dim` dims of a head turn. Computed once for all layers."""
    freqs, factor = rope_frequencies(rope, head_dim)
    angles = positions[..., None].astype(jnp.float32) * freqs
    return Rotary(jnp.cos(angles) * factor, jnp.sin(angles) * factor)


def rotate(x: Float[Array, "... heads H"], rotary: Rotary) -> Float[Array, "... heads H"]:
    """Turns the first dims of every head, halves paired (neox order); products in float32."""
    cos, sin = rotary.cos[..., None, :], rotary.sin[..., None, :]
    half, wide = cos.shape[-1], x.astype(jnp.float32)
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    turned = [first * cos - second * sin, second * cos + first * sin, rest]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def halved(x: Float[Array, "... H"], turning: int) -> Float[Array, "... H"]:
    """Heads whose first `turning` entries turn in pairs that lie next to each other, in the order in which `rotate` pairs them.

    Done to queries and keys alike, it changes no product of both.
    """
    pairs = x[..., :turning].reshape(*x.shape[:-1], -1, 2)
    return jnp.concatenate([pairs[..., 0], pairs[..., 1], x[..., turning:]], axis=-1)


@runtime_checkable
class Runner(Protocol):
    """Interface of a runner of a stack of layers. `ONE_BY_ONE` calls them; `execution` has others that compute the same."""

    def embed(
        self, layers: Sequence[Any], table: Array | Quantized, ids: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"] | None]:
        """Rows of a table as input of the first layer, and after its norm where that is the same launch."""
        ...

    def __call__(
        self,
        layers: Sequence[Any],
        norm: Callable[[Array], Array],
        x: Float[Array, "B T *streams D"],
        rotary: Rotary,
        attend: Any,
        cache: Cache,
        *,
        normed: Float[Array, "B T D"] | None = None,
    ) -> tuple[list[Float[Array, "B T *streams D"]], Float[Array, "B T D"], Cache]:
        """The residual stream, or several of them, after each layer, the last one after `norm`, and the cache that all layers'
        attention has left.

        `normed`: x after the first layer's norm.
        """
        ...


class OneByOne:
    """Calls each layer: the definition of what every `Runner` computes."""

    def embed(
        self, layers: Sequence[Any], table: Array | Quantized, ids: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T D"], None]:
        return table[ids], None

    def __call__(
        self,
        layers: Sequence[Any],
        norm: Callable[[Array], Array],
        x: Float[Array, "B T *streams D"],
        rotary: Rotary,
        attend: Any,
        cache: Cache,
        *,
        normed: Float[Array, "B T D"] | None = None,
    ) -> tuple[list[Float[Array, "B T *streams D"]], Float[Array, "B T D"], Cache]:
        streams = []
        for layer in layers:
            x, cache = layer(x, rotary, attend, cache)
            streams.append(x)
        return streams, norm(x), cache


ONE_BY_ONE = OneByOne()


class RMSNorm(nnx.Module):
    """RMS norm in float32 with a weight `[D]`; see `rms_norm`."""

    zero_centered = False
    rounds_last = False  # after its weight, not before

    def __init__(self, dim: int, eps: float):
        self.weight = nnx.Param(jnp.ones((dim,)))
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        return rms_norm(x, self.weight[...], self.eps)


class WideNorm(RMSNorm):
    """RMS norm whose weight is applied in float32, before the cast back, as Hugging Face's gpt-oss does."""

    rounds_last = True

    def __call__(self, x: Array) -> Array:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * self.weight[...].astype(jnp.float32)).astype(x.dtype)


class ZeroCenteredNorm(nnx.Module):
    """RMS norm whose weight is kept as its offset from 1; both are applied in float32, as Hugging Face's Qwen3.5 does."""

    zero_centered, rounds_last = True, True

    def __init__(self, dim: int, eps: float):
        self.offset = nnx.Param(jnp.zeros((dim,)))
        self.eps = eps

    @property
    def weight(self) -> nnx.Param:
        """The norm's weight as operations take it, together with `zero_centered`."""
        return self.offset

    def __call__(self, x: Array) -> Array:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * (1.0 + self.offset[...].astype(jnp.float32))).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Mean and deviation of a row are made 0 and 1, all in float32."""

    def __init__(self, dim: int, eps: float):
        self.weight, self.bias = nnx.Param(jnp.ones((dim,))), nnx.Param(jnp.zeros((dim,)))
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * self.weight[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)).astype(x.dtype)


type Norm = RMSNorm | ZeroCenteredNorm


class Linear(nnx.Module):
    """A matrix `[F, D]` in the checkpoint's layout, with an optional bias `[F]`."""

    def __init__(self, rows: int, columns: int, *, bias: bool = False):
        self.weight = nnx.Param(jnp.zeros((rows, columns)))
        self.bias = nnx.Param(jnp.zeros((rows,))) if bias else None

    def __call__(self, x: Array) -> Array:
        y = linear(x, self.weight[...])
        return y if self.bias is None else y + self.bias[...]

    def of_product(self, product: Float[Array, "... rows"]) -> Float[Array, "... F"]:
        """Its result, from a product with all rows of the stored weight."""
        y = summed_rows(product, self.weight[...])
        return y if self.bias is None else y + self.bias[...]


class SummedLinear(Linear):
    """A matrix whose columns ranks share: what each of them multiplies is added up, and the bias once."""

    def __call__(self, x: Array) -> Array:
        y = reduced(linear(x, self.weight[...]))
        return y if self.bias is None else y + self.bias[...]


class Attention(nnx.Module):
    """Projections around the caller's `attend`, and the per-head q/k norm and rotation it asks for.

    Attributes the caller reads: `index`, `causal`, `window` (left, right; None = unbounded), `sinks [N]` or None, `scale`,
    `soft_cap` (c of `c * tanh(score / c)`; None = no cap), `norms`, `zero_centered` for weights of these that are offsets from 1,
    `beside`, heads of the projection after the values', and `keeps`, whether the layer has keys of its own: one without attends to
    those that layer `index` keeps, of which `reused` says that some layer does.

    Args:
      beside: heads whose rows of the projection stand after the values', for a subclass that has a use for them.
      norm: of every head's queries and keys, where the traits say that they are normed.
    """

    zero_centered = False
    soft_cap: float | None = None
    keeps, reused = True, False

    def __init__(
        self,
        config: DecoderConfig,
        index: int,
        traits: LayerTraits,
        *,
        causal: bool = True,
        beside: int = 0,
        norm: "type[Norm]" = RMSNorm,
    ):
        self.config, self.index, self.causal, self.beside = config, index, causal, beside
        self.scale = config.head_dim**-0.5
        reach = config.windows[index]
        self.window = None if reach is None else (reach - 1, 0 if causal else reach - 1)
        n, k, h = config.num_heads, config.num_kv_heads, config.head_dim
        self.qkv_proj = Linear((n + 2 * k + beside) * h, config.hidden_size, bias=traits.bias != "none")
        self.o_proj = SummedLinear(config.hidden_size, n * h, bias=traits.bias == "all")
        self.q_norm, self.k_norm = (norm(h, config.norm_eps) if traits.qk_norm else None for _ in "qk")
        self.sinks = nnx.Param(jnp.zeros((n,))) if traits.sinks else None
        self.pairs = traits.rotary_dim if traits.paired else 0

    @property
    def norms(self) -> tuple[Float[Array, "H"] | None, Float[Array, "H"] | None]:
        """Weights of the norm of every head's queries and keys, as `mix` orders these; None where there is none."""
        if self.q_norm is None or self.k_norm is None:
            return None, None
        weights = self.q_norm.weight[...], self.k_norm.weight[...]
        return (halved(weights[0], self.pairs), halved(weights[1], self.pairs)) if self.pairs else weights

    def heads(self, qkv: Array, rotary: Rotary) -> tuple[Array, Array, Array]:
        """Queries `[B,T,N,H]` and keys `[B,T,K,H]`, normed where layers norm them and rotated, and values `[B,T,K,H]`.

        Args:
          qkv: as `mix` gives it to attention.
        """
        config = self.config
        heads = qkv.reshape(*qkv.shape[:-1], -1, config.head_dim)
        q, k, v = jnp.split(heads, [config.num_heads, config.num_heads + config.num_kv_heads], axis=-2)
        if self.pairs:
            q, k = (
                x if norm is None else rms_norm(x, norm, config.norm_eps)
                for x, norm in zip((q, k), self.norms, strict=True)
            )
        else:
            q, k = (x if norm is None else norm(x) for x, norm in ((q, self.q_norm), (k, self.k_norm)))
        return rotate(q, rotary), rotate(k, rotary), v

    def queries(self, projected: Array, rotary: Rotary) -> Array:
        """Queries `[B,T,N,H]` of a layer without keys of its own."""
        return self.heads(projected, rotary)[0]

    @property
    def projections(self) -> tuple[Linear, Linear]:
        """See `Mixer`."""
        return self.qkv_proj, self.o_proj

    def mix(self, projected: Array, rotary: Rotary, attend: Attend, cache: Cache) -> tuple[Array, Cache]:
        """See `Mixer`."""
        if self.pairs:
            heads = projected.reshape(*projected.shape[:-1], -1, self.config.head_dim)
            turning = self.config.num_heads + self.config.num_kv_heads
            parts = halved(heads[..., :turning, :], self.pairs), heads[..., turning:, :]
            projected = jnp.concatenate(parts, axis=-2).reshape(projected.shape)
        return attend(self, projected, rotary, cache)

    def mix_rows(
        self, x: Array, rotary: Rotary, attend: Attend, cache: Cache, added: Any = None
    ) -> tuple[Array, Array, Cache] | None:
        """`mix` of the first projection of `x [B,T,D]`, where attention has both in fewer launches (`of_rows`); else None.

        With `added`, as of `few_qkv_write`, x is the residual stream, which comes first in what is returned.
        """
        whole = getattr(attend, "of_rows", None)
        return None if whole is None else whole(self, x, rotary, cache, added)

    def mix_token(
        self, x: Array, rotary: Rotary, attend: Attend, cache: Cache, added: Any, exchange: Callable[[int], Any]
    ) -> tuple[Array, Array, Cache] | None:
        """The residual stream `x [B,T,D]` after what is `added`, as of `few_qkv_write`, and what attention adds to it then, output
        projection included, in parts `[S,B*T,D]` float32, where attention has both in one launch (`of_token`); else None.

        `exchange` gives the memory through which CTAs meet, for so many key heads.
        """
        whole = getattr(attend, "of_token", None)
        return None if whole is None else whole(self, x, rotary, cache, added, exchange)

    def __call__(self, x: Array, rotary: Rotary, attend: Attend, cache: Cache = None) -> tuple[Array, Cache]:
        out, cache = self.mix(self.qkv_proj(x), rotary, attend, cache)
        return self.o_proj(out.reshape(*out.shape[:-2], -1)), cache


@runtime_checkable
class Mixer(Protocol):
    """Interface of a layer's mixer, between a projection of the normed stream and one onto the stream."""

    @property
    def projections(self) -> tuple[Linear, Linear]:
        """The first one, and the last one."""
        ...

    def mix(self, projected: Array, rotary: Rotary, attend: Any, cache: Cache) -> tuple[Array, Cache]:
        """Mixes tokens: from the first projection's result `[B,T,W]` to the last one's argument, whose columns may be on
        several axes."""
        ...


class RecurrentMixer(nnx.Module):
    """Base of mixers that keep a state in place of keys and values: two projections around the caller's `attend.delta`, which
    keeps states and calls the mixer's `verify`, `step` and `prefill` with them."""

    in_proj: Linear
    out_proj: Linear

    @property
    def projections(self) -> tuple[Linear, Linear]:
        """See `Mixer`."""
        return self.in_proj, self.out_proj

    def mix(self, projected: Array, rotary: Rotary, attend: DeltaAttend, cache: Cache) -> tuple[Array, Cache]:
        """See `Mixer`."""
        del rotary  # the state tells the order of tokens
        return attend.delta(self, projected, cache)

    def __call__(self, x: Array, rotary: Rotary, attend: DeltaAttend, cache: Cache = None) -> tuple[Array, Cache]:
        out, cache = self.mix(self.in_proj(x), rotary, attend, cache)
        return self.out_proj(out), cache


def gated(both: Float[Array, "... F2"], activation: Activation, limit: float | None) -> Float[Array, "... F"]:
    """Of gates and what they multiply, both side by side; `limit` bounds gates from above and the others from both sides.

    "clamped_swiglu" is `(u + 1) * g * sigmoid(alpha * g)`, in float32.
    """
    gate, up = jnp.split(both, 2, axis=-1)
    if limit is not None:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    if activation == "clamped_swiglu":
        gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
        return ((up + 1) * gate * jax.nn.sigmoid(SWIGLU_ALPHA * gate)).astype(both.dtype)
    return ACTIVATIONS[activation](gate) * up


class MLP(nnx.Module):
    """Gated feed-forward (SwiGLU with silu); gate and up are one matrix `[2F, D]`.

    Args:
      summed: what ranks multiply is added up; False for who adds more to it first.
      limit: see `gated`.
    """

    routed = False

    def __init__(
        self,
        hidden: int,
        inner: int,
        activation: Activation = "silu",
        *,
        summed: bool = True,
        limit: float | None = None,
    ):
        self.gate_up_proj = Linear(2 * inner, hidden)
        self.down_proj = (SummedLinear if summed else Linear)(hidden, inner)
        self.activation: Activation = activation
        self.limit = limit

    def __call__(self, x: Array) -> Array:
        return self.down_proj(self._inner(x))

    def of_rank(self, x: Array) -> Array:
        """A rank's partial product, which has not been summed over ranks."""
        return linear(self._inner(x), self.down_proj.weight[...])

    def _inner(self, x: Array) -> Array:
        return gated(self.gate_up_proj(x), self.activation, self.limit)


class PreNormLayer(nnx.Module):
    """Base of layers with a mixer and a feed-forward, each behind a norm and added to the residual stream."""

    attention_conv: Any = None  # around its sublayers, in layers that have such
    mlp_conv: Any = None
    input_norm: Any
    post_norm: Any
    mlp: Any

    @property
    def mixer(self) -> Any:
        """Of this layer (`Mixer`)."""
        raise NotImplementedError

    def __call__(self, x: Array, rotary: Rotary, attend: Any, cache: Cache = None) -> tuple[Array, Cache]:
        mixed, cache = self.mixer(self.input_norm(x), rotary, attend, cache)
        x = x + mixed
        return x + self.mlp(self.post_norm(x)), cache


class DecoderLayer(PreNormLayer):
    """Pre-norm attention and feed-forward, each added to the residual stream.

    Args:
      traits: what the layer has and lacks; those of `decoder_traits(config)` where they are left out.
      feed_forward: in place of the traits' `MLP`.
      norm: of the stream.
    """

    def __init__(
        self,
        config: DecoderConfig,
        index: int,
        traits: LayerTraits | None = None,
        *,
        causal: bool = True,
        feed_forward: nnx.Module | None = None,
        norm: type[RMSNorm] = RMSNorm,
    ):
        traits = decoder_traits(config) if traits is None else traits
        self.input_norm = norm(config.hidden_size, config.norm_eps)
        self.attn = Attention(config, index, traits, causal=causal)
        self.post_norm = norm(config.hidden_size, config.norm_eps)
        self.mlp: Any = (
            MLP(config.hidden_size, traits.inner, traits.activation) if feed_forward is None else feed_forward
        )

    @property
    def mixer(self) -> Mixer:
        return self.attn


def mlp_parameters(config: DecoderConfig, ours: str, theirs: str) -> list[Parameter]:
    """Parameters of one `MLP` whose checkpoint names start with `theirs`."""
    d, f = config.hidden_size, config.intermediate_size
    gates = tuple(Source(f"{theirs}{name}.weight", (f, d)) for name in ("gate_proj", "up_proj"))
    return [
        Parameter(f"{ours}gate_up_proj.weight", gates, cut=by_rows((f, f), (f, f))),
        single(f"{ours}down_proj.weight", f"{theirs}down_proj.weight", (d, f), cut=by_columns((f, f))),
    ]


def decoder_parameters(
    config: DecoderConfig,
    prefix: str,
    traits: LayerTraits | None = None,
    *,
    feed_forward: Callable[[int, str, str], list[Parameter]] | None = None,
    sinks: str = "attention_sink_bias",
) -> list[Parameter]:
    """Parameters of `config.num_layers` layers with these traits whose checkpoint names start with `prefix`.

    `feed_forward` declares what stands in place of layer i's `MLP`, given i, our prefix and the checkpoint's. `sinks` is the
    checkpoint's name of attention's.
    """
    traits = decoder_traits(config) if traits is None else traits
    d, h = config.hidden_size, config.head_dim
    n, k = config.num_heads, config.num_kv_heads
    table = []
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}.", f"{prefix}layers.{i}."
        rows = (("q_proj", n * h), ("k_proj", k * h), ("v_proj", k * h))
        attn, heads = f"{theirs}self_attn.", by_rows((n * h, n), (k * h, k), (k * h, k))
        table += [
            single(f"{ours}input_norm.weight", f"{theirs}input_layernorm.weight", (d,)),
            Parameter(
                f"{ours}attn.qkv_proj.weight",
                tuple(Source(f"{attn}{name}.weight", (r, d)) for name, r in rows),
                cut=heads,
            ),
            single(f"{ours}attn.o_proj.weight", f"{attn}o_proj.weight", (d, n * h), cut=by_columns((n * h, n))),
        ]
        if traits.qk_norm:
            table += [single(f"{ours}attn.{one}.weight", f"{attn}{one}.weight", (h,)) for one in ("q_norm", "k_norm")]
        if traits.bias != "none":
            biases = tuple(Source(f"{attn}{name}.bias", (r,)) for name, r in rows)
            table.append(Parameter(f"{ours}attn.qkv_proj.bias", biases, cut=heads))
        if traits.bias == "all":
            table.append(single(f"{ours}attn.o_proj.bias", f"{attn}o_proj.bias", (d,)))
        if traits.sinks:
            table.append(single(f"{ours}attn.sinks", f"{attn}{sinks}", (n,), cut=by_rows((n, n))))
        table.append(single(f"{ours}post_norm.weight", f"{theirs}post_attention_layernorm.weight", (d,)))
        names = f"{ours}mlp.", f"{theirs}mlp."
        table += mlp_parameters(config, *names) if feed_forward is None else feed_forward(i, *names)
    return table
