"""Layer traits: what tells the layers of one decoder stack from another's, beside their weights.

Modules are built from them, and `execution.plan` chooses by them how a stack runs. So a family says once what its layers have and
lack, and nobody asks which class they are.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

from dflash_jax.config import DecoderConfig

Activation = Literal["silu", "gelu_tanh", "clamped_swiglu", "relu2"]


@dataclass(frozen=True)
class ExpertTraits:
    """Routed experts of a layer.

    Attributes:
      count: experts (E).
      per_token: experts of a token, top-k.
      inner: inner width of one.
      shared: whether the last one is every token's, of which each of several devices has a copy.
      gated: whether one has a gate; otherwise its activation is that of its one projection.
      width: columns that one takes and gives; None for those of the stream.
    """

    count: int
    per_token: int
    inner: int
    shared: bool = False
    gated: bool = True
    width: int | None = None

    def of_rank(self, ranks: int) -> "ExpertTraits":
        """Traits of one of several devices."""
        return replace(self, count=(self.count - self.shared) // ranks + self.shared)


@dataclass(frozen=True)
class DeltaTraits:
    """Gated delta nets, which keep a state and no keys.

    Attributes:
      columns: rows of the projection to what they take.
      width: columns of the projection of what they give.
      gates: of the rows, the last ones, which are gates.
    """

    columns: int
    width: int
    gates: int = 0


@dataclass(frozen=True, kw_only=True)
class LayerTraits:
    """Traits of all layers of a stack, for the execution plan.

    Attributes:
      hidden, heads, kv_heads, head_dim: D, N, K and H.
      inner: width of a dense feed-forward (F).
      rotary_dim: leading entries of a head that rotate.
      paired: whether those that lie next to each other rotate together, otherwise those of both halves.
      attention: "heads" keeps keys and values of heads, "latent" one row for all of them (MLA).
      qk_norm: whether every head of queries and keys is normed before it rotates.
      bias: which of attention's projections have biases; "qkv" leaves the output's without.
      window: whether a layer attends through a sliding window.
      sinks: whether heads have learned attention sinks.
      value_scale: factor on what attention gives.
      gated: whether what attention gives is gated, by rows of the projection after those of queries, keys and values.
      zero_centered: whether weights of the norms of the stream are offsets from 1.
      full_heads: key heads of layers without a window and the size of all their heads, where others differ in both; None where
        all are alike.
      normed_out: whether what comes out of a sublayer is normed before it is added to the stream.
      normed_values: whether values are normed, without a weight, and queries and keys before attention is asked.
      convolved: whether what goes into a sublayer and what comes out of it is convolved along the tokens.
      delta: of the layers that have a gated delta net in attention's place.
      short_conv: whether some layers have a short convolution in attention's place.
      mamba2: whether layers have a mixer or a feed-forward and not both, and some mixers are Mamba 2.
      normed_together: whether queries, and keys, are normed over all heads at once, before attention is asked.
      streams: residual streams, which sublayers mix where there are several.
      uneven_heads: whether heads are gated one by one, differ in number from layer to layer, or have values of another size than
        keys, which no fused runner does.
      relative: whether scores have a bias by distance that follows from hidden states, and convolutions along the tokens stand
        around attention and feed-forwards.
      compressed: whether layers attend to compressed keys beside a window.
      block_sparse: whether heads of some layers attend to blocks of keys that an indexer chooses.
      summed_together: arrays like the stream that a layer has added over devices in one sum.
      feed_forward: "dense", "moe", or "mixed" where some layers have experts and others a dense one, or all have both.
      activation: of the feed-forwards' gate, or of what stands in its place.
      experts: of the layers that have such.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    rotary_dim: int
    attention: Literal["heads", "latent"] = "heads"
    paired: bool = False
    qk_norm: bool = True
    bias: Literal["none", "qkv", "all"] = "none"
    window: bool = False
    sinks: bool = False
    value_scale: float = 1.0
    feed_forward: Literal["dense", "moe", "mixed"] = "dense"
    activation: Activation = "silu"
    experts: ExpertTraits | None = None
    gated: bool = False
    zero_centered: bool = False
    full_heads: tuple[int, int] | None = None
    normed_out: bool = False
    normed_values: bool = False
    convolved: bool = False
    delta: DeltaTraits | None = None
    short_conv: bool = False
    mamba2: bool = False
    normed_together: bool = False
    streams: int = 1
    uneven_heads: bool = False
    block_sparse: bool = False
    compressed: bool = False
    relative: bool = False
    summed_together: int = 1

    @property
    def heads_width(self) -> int:
        """Columns of the output projection."""
        return self.heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        """Rows of the projection to queries, keys and values, and gates where there are such."""
        return (self.heads * (1 + self.gated) + 2 * self.kv_heads) * self.head_dim

    @property
    def wide_heads(self) -> tuple[int, int] | None:
        """Key heads, and the size of one, of layers without a window whose heads may be wider than a kernel attends to; None where
        no layers are of such a family."""
        return self.full_heads or ((self.kv_heads, self.head_dim) if self.normed_values else None)

    @property
    def mixers(self) -> tuple[tuple[int, int], ...]:
        """Rows of the first projection and columns of the last one, of each kind of layer."""
        attention = self.qkv_width, self.heads_width
        return (attention,) if self.delta is None else (attention, (self.delta.columns, self.delta.width))


def decoder_traits(config: DecoderConfig, **changes: Any) -> LayerTraits:
    """Traits of a pre-norm decoder with SwiGLU feed-forwards and q/k norm; `changes` are fields that a family has otherwise."""
    rotary = int(config.head_dim * config.rope.partial)
    traits = LayerTraits(
        hidden=config.hidden_size, heads=config.num_heads, kv_heads=config.num_kv_heads, head_dim=config.head_dim,
        inner=config.intermediate_size, rotary_dim=rotary + rotary % 2, bias="all" if config.attention_bias else "none",
        window=any(reach is not None for reach in config.windows), paired=config.rope.paired,
    )  # fmt: skip
    return replace(traits, **changes)
