"""Qwen3.8-Flash-Next targets: gated delta nets beside attention to chosen blocks, over several residual streams.

Three of four layers are gated delta nets, as Qwen3.5's. The others are Qwen3.5's gated attention, to blocks of keys that an indexer
chooses (`attention.whole_blocks`). Every sublayer reads and writes several residual streams (`models.gated_residual`) and has no
norm of its own; the head reads them in the same way. Some layers begin with hashed n-grams of tokens (`models.ngram_embedding`).
Feed-forwards are experts with a gated shared one. Texts alone are read: the vision tower and layers that predict further tokens are
left out.

Source: transformers' Qwen4Exp classes, 5.17. What drafters read of a layer is what the next one's first sublayer would read of the
streams after it, before n-grams are added there, and after the last one what the head reads: SGLang's pull request 38642.
"""

import functools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from dflash_kernels import DeltaShape
from dflash_kernels.recurrent.ngrams import NgramShape
from flax import nnx
from jaxtyping import Array, Float, Int

from dflash_jax.config import NEUTRAL_KEYS, NEUTRAL_VALUES, KeyReader, shown
from dflash_jax.errors import ConfigError
from dflash_jax.models.decoder import Decoder
from dflash_jax.models.delta_net import DeltaNet
from dflash_jax.models.gated_residual import GatedResidual, StreamMixer, gated_residual_parameters
from dflash_jax.models.gemma import text_keys
from dflash_jax.models.layers import BlockRows, Cache, Linear, Rotary, ZeroCenteredNorm, rotary_tables, rotate
from dflash_jax.models.moe import MoE
from dflash_jax.models.ngram_embedding import NgramEmbedding, Ngrams, ngram_parameters
from dflash_jax.models.parameters import Parameter, Source, single
from dflash_jax.models.qwen3_5 import (
    BESIDE_TEXT,
    MIXTURE,
    GatedAttention,
    Qwen35Config,
    attention_parameters,
    decoder_keys,
    delta_fields,
    delta_parameters,
    expert_parameters,
    qwen35_canonical,
    qwen35_traits,
)
from dflash_jax.models.traits import LayerTraits

COMPOSITE, TEXT = "Qwen4ExpForConditionalGeneration", "Qwen4ExpForCausalLM"
ARCHITECTURES, MODEL_TYPES = (COMPOSITE, TEXT), ("qwen4_exp", "qwen4_exp_text")
SPARSE = "qwen_sparse_attention"
# How many states a layer has follows from the rest; layers that predict further tokens are left out.
_NEUTRAL = NEUTRAL_KEYS | {
    "full_attention_interval", "language_model_only", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings",
    "number_of_conv_states",
}  # fmt: skip
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    **NEUTRAL_VALUES,
    "attn_output_gate": (None, True), "mamba_ssm_dtype": (None, "float32"), "indexer_kv_heads": (None, 1),
    "decoder_sparse_step": (None, 1), "mlp_only_layers": (None, []), "sliding_window": (None,),
    "ple_embedding_dtype": (None, "bfloat16"), "use_sliding_window": (None, False),
}  # fmt: skip
_MOST_HEADS, _MOST_ROWS = 1 << 10, 1 << 31


@dataclass(frozen=True, kw_only=True)
class Qwen4ExpConfig(Qwen35Config):
    """A Qwen3.8-Flash-Next target; what it shares with Qwen3.5's is said there.

    Attributes:
      output_gate: activation of what gates the result of a gated delta net.
      streams, stream_rank: see `GatedResidual`.
      index_heads, index_head_dim: of the indexers (I and E).
      index_block, index_topk: tokens of a block, and those that a query sees in chosen blocks at most.
      ngram_layers: layers that begin with hashed n-grams.
      ngram_end, ngram_size, ngram_heads, ngram_least, ngram_multiple, ngram_seed, ngram_width, ngram_taps: see `Ngrams`; 0 where no
        layer has such.
      ngram_parts: tensors of a layer's table in a checkpoint; 0 where it is one, under another name.
    """

    output_gate: str
    streams: int
    stream_rank: int
    index_heads: int
    index_head_dim: int
    index_block: int
    index_topk: int
    ngram_layers: tuple[int, ...] = ()
    ngram_end: int = 0
    ngram_size: int = 0
    ngram_heads: int = 0
    ngram_least: int = 0
    ngram_multiple: int = 0
    ngram_seed: int = 0
    ngram_width: int = 0
    ngram_taps: int = 0
    ngram_parts: int = 0

    def __post_init__(self) -> None:
        """Raises ConfigError as `DecoderConfig` does, and where indexers or n-grams cannot be so."""
        super().__post_init__()
        turned, subject = int(self.head_dim * self.rope.partial), type(self).__name__
        if turned > self.index_head_dim:
            raise ConfigError(
                f"{subject}: index_head_dim={self.index_head_dim} must hold the {turned} entries of a head that rotate"
            )
        if self.index_topk % self.index_block:
            raise ConfigError(
                f"{subject}: index_topk={self.index_topk} is not a multiple of the {self.index_block} tokens of a block"
            )
        if not self.ngram_layers:
            return
        heads = (self.ngram_size - 1) * self.ngram_heads
        if heads < 1 or self.ngram_width % heads or heads * len(self.ngram_layers) > _MOST_HEADS:
            raise ConfigError(
                f"{subject}: ngram_width={self.ngram_width} must be a multiple of the {heads} heads of n-grams of 2 to "
                f"{self.ngram_size} tokens, of which all layers together have {_MOST_HEADS:,} at most"
            )
        if set(self.ngram_layers) & set(self.full_layers) or not 0 <= self.ngram_end < self.vocab_size:
            raise ConfigError(
                f"{subject}: n-grams are for layers that do not attend, not for {list(self.ngram_layers)}, and texts end with a "
                f"token of the vocabulary, got {self.ngram_end}"
            )
        if heads * self.ngram_least >= _MOST_ROWS or any(
            one.rows >= _MOST_ROWS or one.rows % max(self.ngram_parts, 1) for one in self.ngrams
        ):
            raise ConfigError(
                f"{subject}: a table of n-grams must have fewer than {_MOST_ROWS:,} rows, a multiple of its "
                f"{self.ngram_parts} parts"
            )

    @property
    def delta(self) -> DeltaShape:
        return replace(super().delta, gate=self.output_gate)

    @property
    def indexers(self) -> tuple[bool, ...]:
        """Of each layer with pages, whether it has an indexer."""
        return (True,) * self.cached_layers

    @property
    def index_row_width(self) -> int:
        """Numbers that pages keep of a token for an indexer."""
        return self.index_head_dim

    @property
    def ngrams(self) -> tuple[Ngrams, ...]:
        """Of each layer with n-grams."""
        return tuple(
            Ngrams(
                place, self.vocab_size, self.ngram_end, self.ngram_size, self.ngram_heads, self.ngram_least,
                self.ngram_multiple, self.ngram_seed, self.ngram_width, self.ngram_taps,
            )
            for place in range(len(self.ngram_layers))
        )  # fmt: skip

    @property
    def ngram_shapes(self) -> tuple[NgramShape, ...]:
        """Of what slots keep for each of these layers."""
        shape = NgramShape(self.streams * self.hidden_size, self.ngram_size, self.ngram_taps)
        return (shape,) * len(self.ngram_layers)

    @classmethod
    def from_hf(
        cls, values: Mapping[str, Any], tensor_names: Collection[str] = (), notices: list[str] | None = None
    ) -> "Qwen4ExpConfig":
        """Reads a `config.json` of one of `ARCHITECTURES`.

        Args:
          tensor_names: canonical ones of the checkpoint, which tell how experts and tables of n-grams are stored.
          notices: takes what was decided where the file leaves a choice, one sentence each.

        Raises:
          ConfigError: a needed key is missing or malformed, the weights are quantized, or a key is present that this package does
            not implement.
        """
        keys, whole = text_keys(values, (COMPOSITE,), notices)
        kinds = keys.values.get("layer_types")
        if isinstance(kinds, list | tuple):  # releases say full_attention of layers that attend to chosen blocks
            named = ["full_attention" if kind == SPARSE else kind for kind in kinds]
            keys = KeyReader(keys.subject, {**keys.values, "layer_types": named}, notices)
        fields = decoder_keys(keys, MIXTURE, partial=1.0) | delta_fields(keys) | _experts(keys)
        fields["experts_in_one"] = any(name.endswith(".experts.gate_up_proj") for name in tensor_names)
        if fields["attention_bias"]:
            raise ConfigError(f"{keys.subject}: attention_bias must be false, as the release has it")
        gate = keys.get("output_gate_type", "silu")
        if gate not in ("silu", "sigmoid"):
            raise ConfigError(f"{keys.subject}: output_gate_type must be silu or sigmoid, got {shown(gate)}")
        streams = keys.integer("hc_count", 4)
        if not 1 < streams <= 64:
            raise ConfigError(f"{keys.subject}: hc_count must be from 2 to 64, got {streams}")
        tied = keys.flag("tie_word_embeddings")
        if whole is not None and "tie_word_embeddings" not in keys.values:
            tied = whole.flag("tie_word_embeddings")
        config = cls(
            **fields | {"intermediate_size": fields["shared_intermediate_size"]},
            output_gate=gate,
            streams=streams,
            stream_rank=keys.integer("hc_lowrank", 320),
            index_heads=keys.integer("indexer_n_heads"),
            index_head_dim=keys.integer("indexer_head_dim"),
            index_block=keys.integer("indexer_compress_ratio"),
            index_topk=keys.integer("indexer_budget"),
            tie_embeddings=tied,
            **_ngrams(keys, fields, tensor_names),
        )
        keys.refuse_rest(_NEUTRAL, _NEUTRAL_VALUES)
        if whole is not None:
            # What the text model reads may be said twice, but not in two ways.
            twice = {key: (keys.values.get(key),) for key in keys.read} | {"tie_word_embeddings": (tied,)}
            whole.refuse_rest(BESIDE_TEXT, {**NEUTRAL_VALUES, **twice})
        return config


def _experts(keys: KeyReader) -> dict[str, Any]:
    """The fields of the mixture of experts."""
    experts, taken = keys.integer("num_experts", 512), keys.integer("num_experts_per_tok", 10)
    if taken > experts:
        raise ConfigError(f"{keys.subject}: num_experts_per_tok={taken} is more than num_experts={experts}")
    return {
        "num_experts": experts,
        "experts_per_token": taken,
        "moe_intermediate_size": keys.integer("moe_intermediate_size", 512),
        "shared_intermediate_size": keys.integer("shared_expert_intermediate_size", 512),
        "norm_routing_weights": keys.flag("norm_topk_prob", default=True),
    }


def _ngrams(keys: KeyReader, fields: Mapping[str, Any], tensor_names: Collection[str]) -> dict[str, Any]:
    """The fields of hashed n-grams; layers count from 1 in a file."""
    listed, layers = keys.get("ple_layer_ids", []), fields["num_layers"]
    if not isinstance(listed, list | tuple) or not all(type(one) is int and 0 < one <= layers for one in listed):
        raise ConfigError(f"{keys.subject}: ple_layer_ids must list layers from 1 to {layers}, got {shown(listed)}")
    sizes = {
        "ngram_size": keys.integer("ngram_size", 3, minimum=2),
        "ngram_heads": keys.integer("heads_per_ngram", 8),
        "ngram_least": keys.integer("ngram_vocab_size_base", 20_000_000),
        "ngram_multiple": keys.integer("make_ngram_vocab_size_divisible_by", 128),
        "ngram_seed": keys.integer("seed", 1234, minimum=0),
        "ngram_width": keys.integer("ple_embed_dim", fields["hidden_size"]),
        "ngram_taps": keys.integer("ple_conv_kernel_size", 4),
        "ngram_parts": keys.integer("split_ngram_parts", 512),
    }
    if not listed:
        return {}
    for key in ("ngram_size", "ngram_taps"):
        if sizes[key] > 64:
            raise ConfigError(f"{keys.subject}: {key} of n-grams must be 64 or less, got {sizes[key]}")
    ends = keys.get("eos_token_id")
    end = ends[0] if isinstance(ends, list | tuple) and ends else ends
    if type(end) is not int:
        raise ConfigError(
            f"{keys.subject}: eos_token_id must be the token that ends texts, behind which n-grams begin anew, got {shown(ends)}"
        )
    if any(name.endswith(".ngram_embedding.weight") for name in tensor_names):
        sizes["ngram_parts"] = 0
    return {**sizes, "ngram_layers": tuple(sorted({one - 1 for one in listed})), "ngram_end": end}


class ChosenAttention(GatedAttention):
    """Gated attention with an indexer of whole blocks, whose queries and key are rows of the projection after the gates'."""

    config: Qwen4ExpConfig

    def __init__(self, config: Qwen4ExpConfig, index: int, traits: LayerTraits):
        super().__init__(config, index, traits)
        n, k, h, e = config.num_heads, config.num_kv_heads, config.head_dim, config.index_head_dim
        self.main = 2 * (n + k) * h
        self.qkv_proj = Linear(self.main + (config.index_heads + 1) * e, config.hidden_size, bias=traits.bias != "none")
        self.index_q_norm, self.index_k_norm = (ZeroCenteredNorm(e, config.norm_eps) for _ in "qk")

    def block_keys(self, keys: Float[Array, "B S E"]) -> Float[Array, "B P E"]:
        """Index keys of whole blocks, of tokens' as they are projected; tokens behind the last one are left out."""
        config = self.config
        size, count = config.index_block, keys.shape[1] // config.index_block
        grouped = keys[:, : count * size].reshape(keys.shape[0], count, size, -1).astype(jnp.float32)
        normed = self.index_k_norm(jnp.mean(grouped, axis=2).astype(keys.dtype))
        begins = rotary_tables(jnp.arange(count) * size, config.rope, config.head_dim)
        return rotate(normed[:, :, None], Rotary(*(side[None] for side in begins)))[:, :, 0]

    def mix(self, projected: Array, rotary: Rotary, attend: Any, cache: Cache) -> tuple[Array, Cache]:
        """See `Mixer`.

        Raises:
          NotImplementedError: `attend` is no `WholeBlockAttend`.
        """
        if not hasattr(attend, "whole_blocks"):
            raise NotImplementedError(
                f"{type(attend).__name__} has no attention to whole blocks that an indexer chooses: take DenseAttend, or a "
                "HybridAttend"
            )
        e = self.config.index_head_dim
        qkv, q, k = jnp.split(projected, [self.main, projected.shape[-1] - e], axis=-1)
        q = rotate(self.index_q_norm(q.reshape(*q.shape[:-1], -1, e)), rotary)

        def chosen(layer: Any, qkv: Array, rotary: Rotary, cache: Cache) -> tuple[Array, Cache]:
            return attend.whole_blocks(layer, qkv, BlockRows(q, k), rotary, cache)

        return super().mix(qkv, rotary, chosen, cache)


def _embedding(config: Qwen4ExpConfig, index: int) -> NgramEmbedding:
    """That of layer `index`, whose state comes after those of mixers."""
    place = config.ngram_layers.index(index)
    sizes = config.streams, config.hidden_size
    return NgramEmbedding(config.ngrams[place], *sizes, config.state_layers + place, config.norm_eps)


class Qwen4ExpLayer(nnx.Module):
    """A mixer and experts, which read several residual streams `[B,T,S,D]` and write to them, behind n-grams in some layers."""

    attention_conv: Any = None
    mlp_conv: Any = None

    def __init__(self, config: Qwen4ExpConfig, index: int, traits: LayerTraits):
        d, eps, streams = config.hidden_size, config.norm_eps, config.streams
        attends, before = index in config.full_layers, sum(full < index for full in config.full_layers)
        self.ngrams: Any = None if index not in config.ngram_layers else _embedding(config, index)
        self.attn_streams, self.mlp_streams = (GatedResidual(streams, d, config.stream_rank, eps) for _ in range(2))
        self.attn: Any = ChosenAttention(config, index, traits) if attends else None
        self.delta: Any = None if attends else DeltaNet(d, config.delta, index - before, eps)
        self.mlp: Any = MoE(config, shared=config.shared_intermediate_size, gated=True)

    @property
    def mixer(self) -> Any:
        """Of this layer: attention, or a gated delta net."""
        return self.delta if self.attn is None else self.attn

    def __call__(
        self, x: Array, rotary: Rotary, attend: Any, cache: Cache = None, *, ids: Array | None = None
    ) -> tuple[Array, Cache]:
        if self.ngrams is not None:
            assert ids is not None
            added, cache = self.ngrams(x, ids, attend, cache)
            x = x + added
        read, factors = self.attn_streams.read(x)
        out, cache = self.mixer(read, rotary, attend, cache)
        x = self.attn_streams.write(x, out, factors)
        read, factors = self.mlp_streams.read(x)
        return self.mlp_streams.write(x, self.mlp(read), factors), cache


class Qwen4Exp(Decoder):
    """A Qwen3.8-Flash-Next decoder; see `Decoder` for how it is called, with a `WholeBlockAttend` that is also a `DeltaAttend`."""

    def __init__(self, config: Qwen4ExpConfig):
        traits = qwen4_exp_traits(config)
        layers = [Qwen4ExpLayer(config, i, traits) for i in range(config.num_layers)]
        norm = StreamMixer(config.streams, config.hidden_size, config.stream_rank, config.norm_eps)
        super().__init__(config, layers, tied=config.tie_embeddings, norm=norm)
        self.streams = config.streams

    def layers_for(self, ids: Int[Array, "B T"], x: Float[Array, "B T D"]) -> Sequence[Any]:
        """See `Decoder`: layers with n-grams are told the tokens."""
        del x
        layers: Any = self.layers
        return [layer if layer.ngrams is None else functools.partial(layer, ids=ids) for layer in layers]

    def spread(self, x: Float[Array, "B T D"]) -> Float[Array, "B T S D"]:
        """All streams begin with the embedding."""
        return jnp.repeat(x[:, :, None], self.streams, axis=2)

    def tapped(self, stream: Float[Array, "B T S D"], index: int) -> Float[Array, "B T D"]:
        """Drafters read what the next layer's mixer reads, or the head."""
        if index + 1 == len(self.layers):
            return self.norm(stream)
        following: Any = self.layers[index + 1]
        return following.attn_streams.read(stream)[0]


def qwen4_exp_traits(config: Qwen4ExpConfig) -> LayerTraits:
    """Qwen3.5's layers, over several streams, whose heads attend to chosen blocks."""
    return replace(qwen35_traits(config), streams=config.streams, block_sparse=True)


def qwen4_exp_parameters(config: Qwen4ExpConfig) -> tuple[Parameter, ...]:
    """Parameters of a Qwen3.8-Flash-Next checkpoint."""
    v, d, streams = config.vocab_size, config.hidden_size, config.streams
    sizes = streams, d, config.stream_rank
    table = [single("embed.weight", "model.embed_tokens.weight", (v, d))]
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        if i in config.ngram_layers:
            ngrams = config.ngrams[config.ngram_layers.index(i)]
            table += ngram_parameters(ngrams, streams, d, f"{ours}ngrams.", f"{theirs}ple.", parts=config.ngram_parts)
        for our, their in (("attn_streams", "attn"), ("mlp_streams", "mlp")):
            table += gated_residual_parameters(*sizes, f"{ours}{our}.", f"{theirs}{their}_hyper_connection.")
        if i in config.full_layers:
            table += _attention_parameters(config, f"{ours}attn.", f"{theirs}self_attn.")
        else:
            table += delta_parameters(config, f"{ours}delta.", f"{theirs}linear_attn.")
        table += expert_parameters(config, f"{ours}mlp.", f"{theirs}mlp.")
    table += gated_residual_parameters(*sizes, "norm.", "model.hyper_connection_mixer.", writes=False)
    if not config.tie_embeddings:
        table.append(single("lm_head.weight", "lm_head.weight", (v, d)))
    return tuple(replace(one, cut=None) for one in table)


def _attention_parameters(config: Qwen4ExpConfig, ours: str, theirs: str) -> list[Parameter]:
    """Parameters of one layer that attends: Qwen3.5's, with rows of the indexer behind those of the gates."""
    e, d = config.index_head_dim, config.hidden_size
    rows = (config.index_heads + 1) * e
    index = Source(f"{theirs}indexer.index_qk_proj.weight", (rows, d))
    table = [
        replace(one, sources=(*one.sources, index)) if one.name.endswith("qkv_proj.weight") else one
        for one in attention_parameters(config, ours, theirs)
    ]
    norms = (("index_q_norm", "q_layernorm"), ("index_k_norm", "k_layernorm"))
    return table + [
        single(f"{ours}{our}.offset", f"{theirs}indexer.{their}.weight", (e,)) for our, their in norms
    ]  # fmt: skip


_COMPUTED = re.compile(
    r".*\.ple_embedding\.(layer_multipliers|ngram_heads_(offsets|vocab_sizes)|token_lookup|hashstats_.*)$"
    r"|.*hyper_connection_mixer\.block_inject_weight\.weight$"
)


def qwen4_exp_computed(config: Qwen4ExpConfig) -> dict[str, tuple[int, ...]]:
    """What tells the rows of n-grams: a checkpoint made otherwise would give others."""
    found = dict[str, tuple[int, ...]]()
    for i, ngrams in zip(config.ngram_layers, config.ngrams, strict=True):
        names = {
            "layer_multipliers": ngrams.multipliers,
            "ngram_heads_vocab_sizes": ngrams.primes,
            "ngram_heads_offsets": ngrams.offsets,
        }
        found |= {f".layers.{i}.ple.ple_embedding.{name}": numbers for name, numbers in names.items()}
    return found


def qwen4_exp_canonical(name: str) -> str | None:
    """Checkpoint name as declared above: without `language_model.`; None for the vision tower, layers that predict further tokens
    (MTP), and what is computed here or never read."""
    return None if _COMPUTED.match(name) else qwen35_canonical(name)
