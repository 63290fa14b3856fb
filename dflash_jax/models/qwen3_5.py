"""Qwen3.5, Qwen3.6, Qwen3-Next and Qwen3-Coder-Next: targets with gated delta nets beside gated full attention.

Three of four layers are gated delta nets (`models.delta_net`), the others attend to all keys with heads of 256 of which a quarter
rotates, and gate what attention gives. Norms are zero-centered. Feed-forwards are dense, or experts with a gated shared one.
Source: transformers' Qwen3_5 and Qwen3Next classes; absent keys mean what their configurations take for them. A token of a text has
one position; a row of a picture (`models.qwen3_5_vision`) has one in time, one by its row and one by its column.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from dflash_kernels import DeltaShape
from jaxtyping import Array, Int

from dflash_jax.config import (
    NEUTRAL_KEYS,
    NEUTRAL_VALUES,
    DecoderConfig,
    KeyReader,
    RopeConfig,
    architectures_of,
    refuse_quantized,
    shown,
)
from dflash_jax.errors import ConfigError
from dflash_jax.models.decoder import Decoder
from dflash_jax.models.delta_net import DeltaNet
from dflash_jax.models.layers import (
    MLP,
    Attend,
    Attention,
    Cache,
    PreNormLayer,
    Rotary,
    ZeroCenteredNorm,
    mlp_parameters,
    rope_frequencies,
    rotate,
)
from dflash_jax.models.moe import MoE, expert_traits, moe_parameters, shared_among_routed
from dflash_jax.models.parameters import Parameter, Source, grouped, single
from dflash_jax.models.traits import DeltaTraits, LayerTraits, decoder_traits
from dflash_jax.parallel.cut import by_columns, by_rows

DENSE, MIXTURE, NEXT = "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM"
# Text models inside a vision-language checkpoint: everything about text is in `text_config`.
COMPOSITES = {"Qwen3_5ForConditionalGeneration": DENSE, "Qwen3_5MoeForConditionalGeneration": MIXTURE}
ARCHITECTURES = (DENSE, MIXTURE, NEXT, *COMPOSITES)
_KIND_OF_TYPE = {
    "qwen3_5": DENSE, "qwen3_5_text": DENSE, "qwen3_5_moe": MIXTURE, "qwen3_5_moe_text": MIXTURE, "qwen3_next": NEXT
}  # fmt: skip
MODEL_TYPES = tuple(_KIND_OF_TYPE)

# Layers that predict further tokens are left out.
_NEUTRAL = NEUTRAL_KEYS | {
    "full_attention_interval", "language_model_only", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"
}  # fmt: skip
# The mixer's dtype is what the state is kept in; the gate is the one that the family has, whatever a file calls it.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    **NEUTRAL_VALUES,
    "attn_output_gate": (None, True), "mamba_ssm_dtype": (None, "float32"), "output_gate_type": (None, "silu", "swish"),
    "decoder_sparse_step": (None, 1), "mlp_only_layers": (None, []), "sliding_window": (None,),
    "use_sliding_window": (None, False),
}  # fmt: skip
_NO_EXPERTS: dict[str, tuple[Any, ...]] = dict.fromkeys(
    ("moe_intermediate_size", "num_experts", "num_experts_per_tok", "shared_expert_intermediate_size"), (None, 0)
)
BESIDE_TEXT = NEUTRAL_KEYS | {
    "image_token_id", "language_model_only", "text_config", "video_token_id", "vision_config", "vision_end_token_id",
    "vision_start_token_id",
}  # fmt: skip
_MROPE = ("mrope_interleaved", "mrope_section")


@dataclass(frozen=True, kw_only=True)
class Qwen35Config(DecoderConfig):
    """A hybrid target. `num_heads`, `num_kv_heads` and `head_dim` are those of layers with full attention.

    Attributes:
      full_layers: layers with full attention; all others are gated delta nets.
      linear_key_heads, linear_value_heads, linear_key_dim, linear_value_dim: Hk, Hv, dk and dv of the gated delta nets.
      grouped_projections: whether a checkpoint has the projections of a gated delta net by key head in two tensors (Qwen3-Next),
        not in four.
      num_experts, experts_per_token, moe_intermediate_size: experts of a layer, how many a token takes, inner width of one; 0
        where all feed-forwards are dense.
      shared_intermediate_size: inner width of the expert that every token takes.
      norm_routing_weights: whether a token's weights are made to sum to 1.
      experts_in_one: whether a checkpoint has all experts of a layer in one tensor.
      dense_layers: layers with a dense feed-forward in a model with experts.
      mrope_section: pairs of a head that turn by time, row and column, one after the other by turns; () for a model of texts alone.
    """

    full_layers: tuple[int, ...]
    linear_key_heads: int
    linear_value_heads: int
    linear_key_dim: int
    linear_value_dim: int
    grouped_projections: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    moe_intermediate_size: int = 0
    shared_intermediate_size: int = 0
    norm_routing_weights: bool = True
    experts_in_one: bool = False
    dense_layers: tuple[int, ...] = ()
    tie_embeddings: bool = False
    mrope_section: tuple[int, ...] = ()
    cut_sizes: ClassVar[tuple[str, ...]] = ("num_heads", "intermediate_size", "linear_key_heads", "linear_value_heads")

    # What `models.moe` asks of every configuration, and this family has in one form only.
    routing = "greedy"
    num_groups = groups_per_token = 1
    num_shared_experts = 0
    routing_scale = 1.0

    @property
    def delta(self) -> DeltaShape:
        """The shape of every gated delta net."""
        return DeltaShape(self.linear_key_heads, self.linear_value_heads, self.linear_key_dim, self.linear_value_dim)

    @property
    def cached_layers(self) -> int:
        return len(self.full_layers)

    def has_experts(self, index: int) -> bool:
        """Whether layer `index` has experts."""
        return self.num_experts > 0 and index not in self.dense_layers

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Qwen35Config":
        """See `DecoderConfig.from_dict`. Folders that were converted before there were pictures are of texts alone."""
        return cast(Qwen35Config, super().from_dict({"mrope_section": ()} | dict(values)))

    @classmethod
    def from_hf(
        cls, values: Mapping[str, Any], tensor_names: Collection[str] = (), notices: list[str] | None = None
    ) -> "Qwen35Config":
        """Reads a `config.json` of one of `ARCHITECTURES`.

        Args:
          tensor_names: canonical ones of the checkpoint, which tell how experts are stored.
          notices: takes what was decided where the file leaves a choice, one sentence each.

        Raises:
          ConfigError: a needed key is missing or malformed, the weights are quantized, or a key is present that this package does
            not implement.
        """
        refuse_quantized(values)
        kind, whole = _kind(values), None
        if isinstance(values.get("text_config"), Mapping):
            whole = KeyReader("config.json (beside text_config)", values)
            values = KeyReader("config.json, text_config", whole.get("text_config")).values
            refuse_quantized(values)
        keys = KeyReader(f"config.json ({kind})", values, notices)
        fields = decoder_keys(keys, kind) | delta_fields(keys)
        neutral_values = {**_NEUTRAL_VALUES, **(_NO_EXPERTS if kind == DENSE else {})}
        if kind != DENSE:
            fields |= _experts(keys, kind, fields["num_layers"])
            fields["experts_in_one"] = any(name.endswith(".experts.gate_up_proj") for name in tensor_names)
        tied = keys.flag("tie_word_embeddings")
        if whole is not None and "tie_word_embeddings" not in values:
            tied = whole.flag("tie_word_embeddings")
        config = cls(**fields, grouped_projections=kind == NEXT, tie_embeddings=tied)
        keys.refuse_rest(_NEUTRAL, neutral_values)
        if whole is not None:
            # What the text model reads may be said twice, but not in two ways.
            twice = {key: (values.get(key),) for key in keys.read} | {"tie_word_embeddings": (tied,)}
            whole.refuse_rest(BESIDE_TEXT, {**NEUTRAL_VALUES, **twice})
        return config


def _kind(values: Mapping[str, Any]) -> str:
    """The class of the text model that a file means."""
    for name in architectures_of(values):
        if name in ARCHITECTURES:
            return COMPOSITES.get(name, name)
    return _KIND_OF_TYPE.get(str(values.get("model_type")), DENSE)


def decoder_keys(keys: KeyReader, kind: str, *, partial: float = 0.25) -> dict[str, Any]:
    """The fields of `DecoderConfig`, and which layers attend; `partial`: what of a head rotates where the file does not say."""
    layers, heads = keys.integer("num_hidden_layers"), keys.integer("num_attention_heads")
    kv_heads = keys.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(
            f"{keys.subject}: num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}"
        )
    head_dim = keys.integer("head_dim", 256)
    if (activation := keys.get("hidden_act", "silu")) != "silu":
        raise ConfigError(f"{keys.subject}: hidden_act must be silu, got {shown(activation)}")
    max_position = keys.integer("max_position_embeddings", 32_768)
    rope = RopeConfig.from_keys(keys, max_position, partial=partial, neutral=_MROPE)
    if int(head_dim * rope.partial) % 2 or int(head_dim * rope.partial) < 2:
        raise ConfigError(
            f"{keys.subject}: partial_rotary_factor={rope.partial} of head_dim={head_dim} is no even number of entries"
        )
    # A model whose feed-forwards are all experts has no use for the dense width, and its file often none for the key.
    inner = keys.integer("intermediate_size", None if kind == DENSE else 5632)
    return {
        "vocab_size": keys.integer("vocab_size"),
        "hidden_size": keys.integer("hidden_size"),
        "intermediate_size": inner,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "norm_eps": keys.number("rms_norm_eps", 1e-6, positive=True),
        "rope": rope,
        "max_position": rope.longest(max_position),
        "attention_bias": keys.flag("attention_bias"),
        "windows": (None,) * layers,
        "full_layers": _full_layers(keys, layers),
    }


def _full_layers(keys: KeyReader, layers: int) -> tuple[int, ...]:
    """Layers with full attention: as `layer_types` lists them, otherwise the last one of every `full_attention_interval`."""
    every = keys.integer("full_attention_interval", 4)
    named = ("linear_attention", "full_attention")
    types = keys.kinds("layer_types", layers, named, [named[(i + 1) % every == 0] for i in range(layers)])
    full = tuple(i for i, kind in enumerate(types) if kind == "full_attention")
    if not full:
        raise ConfigError(
            f"{keys.subject}: no layer of layer_types is full_attention; expected one at least, as every release has"
        )
    return full


def delta_fields(keys: KeyReader) -> dict[str, Any]:
    """The fields of the gated delta nets."""
    key_heads, value_heads = keys.integer("linear_num_key_heads", 16), keys.integer("linear_num_value_heads", 32)
    if value_heads % key_heads:
        raise ConfigError(
            f"{keys.subject}: linear_num_value_heads={value_heads} is not a multiple of linear_num_key_heads={key_heads}"
        )
    if (taps := keys.integer("linear_conv_kernel_dim", 4)) != 4:
        raise ConfigError(f"{keys.subject}: linear_conv_kernel_dim must be 4, got {taps}")
    return {
        "linear_key_heads": key_heads,
        "linear_value_heads": value_heads,
        "linear_key_dim": keys.integer("linear_key_head_dim", 128),
        "linear_value_dim": keys.integer("linear_value_head_dim", 128),
    }


def _experts(keys: KeyReader, kind: str, layers: int) -> dict[str, Any]:
    """The fields of the mixture of experts."""
    experts, taken = (
        keys.integer("num_experts", 256 if kind == MIXTURE else 512),
        keys.integer("num_experts_per_tok", 8),
    )
    if taken > experts:
        raise ConfigError(f"{keys.subject}: num_experts_per_tok={taken} is more than num_experts={experts}")
    fields: dict[str, Any] = {
        "num_experts": experts,
        "experts_per_token": taken,
        "moe_intermediate_size": keys.integer("moe_intermediate_size", 512),
        "shared_intermediate_size": keys.integer("shared_expert_intermediate_size", 512),
    }
    if kind == MIXTURE:
        if not keys.flag("norm_topk_prob", default=True):
            raise ConfigError(f"{keys.subject}: norm_topk_prob must be true, as this family always norms its weights")
        return fields
    step, named = keys.integer("decoder_sparse_step", 1), keys.get("mlp_only_layers", [])
    if not isinstance(named, list | tuple) or not all(type(index) is int and 0 <= index < layers for index in named):
        raise ConfigError(
            f"{keys.subject}: mlp_only_layers must be a list of layer indices below {layers}, got {shown(named)}"
        )
    dense = tuple(index for index in range(layers) if index in named or (index + 1) % step)
    return fields | {"norm_routing_weights": keys.flag("norm_topk_prob", default=True), "dense_layers": dense}


class GatedAttention(Attention):
    """Attention whose queries and keys have zero-centered norms, and whose result is gated by head and channel.

    The projection's rows are those of queries, keys, values and gates.
    """

    zero_centered = True

    def __init__(self, config: Qwen35Config, index: int, traits: LayerTraits):
        super().__init__(config, index, traits, beside=config.num_heads)
        self.index = config.full_layers.index(index)  # of its pages
        self.query_norm, self.key_norm = (ZeroCenteredNorm(config.head_dim, config.norm_eps) for _ in range(2))

    @property
    def norms(self) -> tuple[Array, Array]:
        """Offsets of the norms of every head's queries and keys."""
        return self.query_norm.weight[...], self.key_norm.weight[...]

    def heads(self, qkv: Array, rotary: Rotary) -> tuple[Array, Array, Array]:
        """Queries and keys, normed and rotated, and values; see `Attention`."""
        q, k, v, _ = self.parts(qkv)
        return rotate(self.query_norm(q), rotary), rotate(self.key_norm(k), rotary), v

    def parts(self, projected: Array) -> list[Array]:
        """Queries, keys, values and gates, by head."""
        config = self.config
        heads = projected.reshape(*projected.shape[:-1], -1, config.head_dim)
        keys = config.num_heads + config.num_kv_heads
        return jnp.split(heads, [config.num_heads, keys, keys + config.num_kv_heads], axis=-2)

    def mix(self, projected: Array, rotary: Rotary, attend: Attend, cache: Cache) -> tuple[Array, Cache]:
        """See `Mixer`."""
        out, cache = attend(self, projected, rotary, cache)
        gate = self.parts(projected)[-1]
        return (out * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(out.dtype), cache


class HybridLayer(PreNormLayer):
    """Pre-norm mixer and feed-forward, each added to the residual stream; the mixer attends or is a gated delta net."""

    def __init__(self, config: Qwen35Config, index: int, traits: LayerTraits):
        d, eps = config.hidden_size, config.norm_eps
        self.input_norm, self.post_norm = ZeroCenteredNorm(d, eps), ZeroCenteredNorm(d, eps)
        attends, before = index in config.full_layers, sum(full < index for full in config.full_layers)
        self.attn: Any = GatedAttention(config, index, traits) if attends else None
        self.delta: Any = None if attends else DeltaNet(d, config.delta, index - before, eps)
        shared = config.shared_intermediate_size
        self.mlp: Any = (
            MoE(config, shared=shared, gated=True) if config.has_experts(index) else MLP(d, config.intermediate_size)
        )

    @property
    def mixer(self) -> Any:
        return self.delta if self.attn is None else self.attn


class Qwen35(Decoder):
    """A hybrid decoder; see `Decoder` for how it is called. `attend` is also a `DeltaAttend`."""

    def __init__(self, config: Qwen35Config):
        traits = qwen35_traits(config)
        layers = [HybridLayer(config, i, traits) for i in range(config.num_layers)]
        norm = ZeroCenteredNorm(config.hidden_size, config.norm_eps)
        super().__init__(config, layers, tied=config.tie_embeddings, norm=norm)

    def rotary(self, positions: Int[Array, "B T *axes"]) -> Rotary:
        """The rotation at `[B, T]` positions, or at `[B, T, 3]` on three axes."""
        if positions.ndim == 2:
            return super().rotary(positions)
        config = cast(Qwen35Config, self.config)
        freqs, factor = rope_frequencies(config.rope, config.head_dim)
        axes = axes_of_pairs(config.mrope_section, len(freqs))
        angles = positions[:, :, axes].astype(jnp.float32) * freqs
        return Rotary(jnp.cos(angles) * factor, jnp.sin(angles) * factor)


def axes_of_pairs(sections: Sequence[int], pairs: int) -> np.ndarray:
    """Rotary axis of each pair of entries: 0, 1, 2 by turns as long as an axis has pairs left, 0 where not."""
    axes = np.arange(pairs) % 3
    for axis in (1, 2):
        axes[(axes == axis) & (np.arange(pairs) >= 3 * sections[axis])] = 0
    return axes


def qwen35_traits(config: Qwen35Config) -> LayerTraits:
    """Layers of two kinds; norms of heads are no part of what attention is asked for, being zero-centered."""
    dense = sum(not config.has_experts(i) for i in range(config.num_layers))
    kind = "dense" if dense == config.num_layers else "mixed" if dense else "moe"
    shape, experts = config.delta, None
    if kind != "dense":
        experts = expert_traits(config, shared=shared_among_routed(config, config.shared_intermediate_size))
    delta = DeltaTraits(shape.columns, shape.value_heads * shape.value_dim, gates=2 * shape.value_heads)
    return decoder_traits(
        config, qk_norm=False, gated=True, zero_centered=True, delta=delta, feed_forward=kind, experts=experts
    )  # fmt: skip


def qwen35_parameters(config: Qwen35Config) -> tuple[Parameter, ...]:
    """Parameters of a hybrid checkpoint."""
    v, d = config.vocab_size, config.hidden_size
    table = [single("embed.weight", "model.embed_tokens.weight", (v, d))]
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        table.append(single(f"{ours}input_norm.offset", f"{theirs}input_layernorm.weight", (d,)))
        if i in config.full_layers:
            table += attention_parameters(config, f"{ours}attn.", f"{theirs}self_attn.")
        else:
            table += delta_parameters(config, f"{ours}delta.", f"{theirs}linear_attn.")
        table.append(single(f"{ours}post_norm.offset", f"{theirs}post_attention_layernorm.weight", (d,)))
        feed_forward = expert_parameters if config.has_experts(i) else mlp_parameters
        table += feed_forward(config, f"{ours}mlp.", f"{theirs}mlp.")
    table.append(single("norm.offset", "model.norm.weight", (d,)))
    if not config.tie_embeddings:
        table.append(single("lm_head.weight", "lm_head.weight", (v, d), cut=by_rows((v, v), optional=True)))
    return tuple(table)


def attention_parameters(config: Qwen35Config, ours: str, theirs: str) -> list[Parameter]:
    """Parameters of one layer with full attention. A checkpoint has each head's gate after its query, in one tensor."""
    d, n, k, h = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim

    def sources(kind: str, *columns: int) -> tuple[Source, ...]:
        q, gate = grouped(f"{theirs}q_proj.{kind}", (2 * n * h, *columns), n, (h, h))
        kv = (Source(f"{theirs}{name}.{kind}", (k * h, *columns)) for name in ("k_proj", "v_proj"))
        return q, *kv, gate

    heads = by_rows((n * h, n), (k * h, k), (k * h, k), (n * h, n))
    table = [
        Parameter(f"{ours}qkv_proj.weight", sources("weight", d), cut=heads),
        single(f"{ours}o_proj.weight", f"{theirs}o_proj.weight", (d, n * h), cut=by_columns((n * h, n))),
        single(f"{ours}query_norm.offset", f"{theirs}q_norm.weight", (h,)),
        single(f"{ours}key_norm.offset", f"{theirs}k_norm.weight", (h,)),
    ]
    if config.attention_bias:
        table += [
            Parameter(f"{ours}qkv_proj.bias", sources("bias"), cut=heads),
            single(f"{ours}o_proj.bias", f"{theirs}o_proj.bias", (d,)),
        ]
    return table


def delta_parameters(config: Qwen35Config, ours: str, theirs: str) -> list[Parameter]:
    """Parameters of one gated delta net: rows of queries, keys, values, output gates, write strengths and decays in one matrix."""
    d, shape = config.hidden_size, config.delta
    values, repeat = shape.value_heads * shape.value_dim, shape.value_heads // shape.key_heads
    if config.grouped_projections:
        sizes = (shape.key_dim, shape.key_dim, repeat * shape.value_dim, repeat * shape.value_dim)
        qkvz = grouped(f"{theirs}in_proj_qkvz.weight", (shape.channels + values, d), shape.key_heads, sizes)
        ba = grouped(f"{theirs}in_proj_ba.weight", (2 * shape.value_heads, d), shape.key_heads, (repeat, repeat))
        sources = (*qkvz, *ba)
    else:
        rows = {"qkv": shape.channels, "z": values, "b": shape.value_heads, "a": shape.value_heads}
        sources = tuple(Source(f"{theirs}in_proj_{name}.weight", (count, d)) for name, count in rows.items())
    keys, of_values = (shape.key_heads * shape.key_dim, shape.key_heads), (values, shape.value_heads)
    numbers = (shape.value_heads, shape.value_heads)
    conv = Source(f"{theirs}conv1d.weight", (shape.channels, 1, 4), kept=(shape.channels, 4))
    return [
        Parameter(f"{ours}in_proj.weight", sources, cut=by_rows(keys, keys, of_values, of_values, numbers, numbers)),
        Parameter(f"{ours}conv", (conv,), cut=by_rows(keys, keys, of_values)),
        # Rounded, the decay would be wrong by a factor to the power of the context's length.
        single(f"{ours}a_log", f"{theirs}A_log", (shape.value_heads,), "float32", cut=by_rows(numbers)),
        single(f"{ours}dt_bias", f"{theirs}dt_bias", (shape.value_heads,), "float32", cut=by_rows(numbers)),
        single(f"{ours}norm.weight", f"{theirs}norm.weight", (shape.value_dim,)),
        single(f"{ours}out_proj.weight", f"{theirs}out_proj.weight", (d, values), cut=by_columns(of_values)),
    ]


def expert_parameters(config: Qwen35Config, ours: str, theirs: str) -> list[Parameter]:
    """Parameters of routed experts, one by one in a checkpoint or all in one tensor, and of the gated shared one; see `MoE`."""
    e, d, f, shared = (
        config.num_experts,
        config.hidden_size,
        config.moe_intermediate_size,
        config.shared_intermediate_size,
    )
    table = moe_parameters(config, ours, theirs)
    if config.experts_in_one:
        gate_up = Source(f"{theirs}experts.gate_up_proj", (e, 2 * f, d), kept=(e * 2 * f, d))
        down = Source(f"{theirs}experts.down_proj", (e, d, f), kept=(e * d, f))
        table = [
            table[0],
            replace(table[1], sources=(gate_up,)),
            replace(table[2], sources=(down,)),
        ]
    gates = tuple(Source(f"{theirs}shared_expert.{name}.weight", (shared, d)) for name in ("gate_proj", "up_proj"))
    last = Source(f"{theirs}shared_expert.down_proj.weight", (d, shared))
    gate = Source(f"{theirs}shared_expert_gate.weight", (1, d))
    if shared_among_routed(config, shared):
        more = ((gate,), gates, (last,))
        cuts = (None, by_rows((2 * e * f, e), (2 * f, 1)), by_rows((e * d, e), (d, 1)))
        return [
            replace(one, sources=(*one.sources, *beside), cut=cut)
            for one, beside, cut in zip(table, more, cuts, strict=True)
        ]
    return [
        *table,
        Parameter(f"{ours}shared.gate_up_proj.weight", gates, cut=by_rows((shared, shared), (shared, shared))),
        Parameter(f"{ours}shared.down_proj.weight", (last,), cut=by_columns((shared, shared))),
        Parameter(f"{ours}shared_gate.weight", (gate,)),
    ]


LEFT_OUT = re.compile(r"(model\.)?(visual|vision_tower)\.|(model\.)?mtp\.|.*rotary_emb\.inv_freq$")


def qwen35_canonical(name: str) -> str | None:
    """Checkpoint name as declared above: without `language_model.`; None for vision towers, layers that predict further tokens
    (MTP) and buffers computed here."""
    if LEFT_OUT.match(name):
        return None
    return name.replace("model.language_model.", "model.", 1) if name.startswith("model.language_model.") else name
