"""LFM2 and LFM2.5 targets, dense or with experts: configuration, the Flax module, its parameters and their Hugging Face names.

Most layers are short convolutions (`models.short_conv`), the others attend to all keys with normed heads as Qwen3's do. Source:
transformers' Lfm2 and Lfm2Moe classes, whose defaults absent keys mean.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dflash_kernels.recurrent.short_conv import ConvShape

from dflash_jax.config import (
    NEUTRAL_KEYS,
    NEUTRAL_VALUES,
    NO_EXPERTS,
    DecoderConfig,
    KeyReader,
    RopeConfig,
    architectures_of,
    refuse_quantized,
)
from dflash_jax.errors import ConfigError
from dflash_jax.models.decoder import Decoder
from dflash_jax.models.layers import MLP, Attention, PreNormLayer, RMSNorm
from dflash_jax.models.moe import MoE, expert_traits
from dflash_jax.models.parameters import Parameter, Source, single
from dflash_jax.models.short_conv import ShortConv
from dflash_jax.models.traits import LayerTraits, decoder_traits

DENSE, MIXTURE = "Lfm2ForCausalLM", "Lfm2MoeForCausalLM"
ARCHITECTURES = (DENSE, MIXTURE)
MODEL_TYPES = ("lfm2", "lfm2_moe")
# Of how weights began, and names of sizes that no class of transformers reads.
_NEUTRAL = NEUTRAL_KEYS | {
    "block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init", "full_attn_idxs", "theta",
}  # fmt: skip
_NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    **NEUTRAL_VALUES, "block_use_swiglu": (None, True), "conv_bias": (None, False), "use_pos_enc": (None, True),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Lfm2Config(DecoderConfig):
    """An LFM2 target. `num_heads`, `num_kv_heads` and `head_dim` are those of layers that attend.

    Attributes:
      full_layers: layers that attend; all others are short convolutions.
      conv_taps: tokens that a convolution reaches over, the newest included.
      num_experts, experts_per_token, moe_intermediate_size: experts of a layer, how many a token takes, inner width of one; 0 where
        all feed-forwards are dense.
      norm_routing_weights, routing_scale: whether a token's weights are made to sum to 1, and the factor on them then.
      num_dense_layers: leading layers with a dense feed-forward in a model with experts.
    """

    full_layers: tuple[int, ...]
    conv_taps: int
    num_experts: int = 0
    experts_per_token: int = 0
    moe_intermediate_size: int = 0
    norm_routing_weights: bool = True
    routing_scale: float = 1.0
    num_dense_layers: int = 0
    tie_embeddings: bool = True

    # What `models.moe` asks of every configuration, and this family has in one form only.
    routing = "noaux_tc"
    routing_eps = 1e-6
    num_groups = groups_per_token = 1
    num_shared_experts = 0

    @property
    def short_conv(self) -> ConvShape:
        """The shape of every short convolution."""
        return ConvShape(self.hidden_size, self.conv_taps)

    @property
    def cached_layers(self) -> int:
        return len(self.full_layers)

    def has_experts(self, index: int) -> bool:
        """Whether layer `index` has experts."""
        return self.num_experts > 0 and index >= self.num_dense_layers

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], notices: list[str] | None = None) -> "Lfm2Config":
        """Reads a `config.json` of one of `ARCHITECTURES`.

        Args:
          notices: takes what was decided where the file leaves a choice, one sentence each.

        Raises:
          ConfigError: a needed key is missing or malformed, the weights are quantized, or a key is present that this package does
            not implement.
        """
        refuse_quantized(values)
        named = architectures_of(values)
        mixture = MIXTURE in named or (not named and values.get("model_type") == MODEL_TYPES[1])
        keys = KeyReader(f"config.json ({MIXTURE if mixture else DENSE})", values, notices)
        config = cls(
            **_decoder(keys, mixture=mixture),
            **(_experts(keys) if mixture else {}),
            tie_embeddings=_said(keys, ("tie_word_embeddings", "tie_embedding"), default=True),
        )
        keys.refuse_rest(_NEUTRAL, {**_NEUTRAL_VALUES, **({} if mixture else NO_EXPERTS)})
        return config


def _said(keys: KeyReader, names: tuple[str, str], *, default: bool) -> bool:
    """A flag with two names. Raises ConfigError where both are given and disagree."""
    given = {name: keys.flag(name) for name in names if keys.get(name) is not None}
    if len(set(given.values())) > 1:
        raise ConfigError(f"{keys.subject}: {' and '.join(given)} say two things; keep one")
    return next(iter(given.values()), default)


def _decoder(keys: KeyReader, *, mixture: bool) -> dict[str, Any]:
    """The fields of `DecoderConfig`, which layers attend, and how far convolutions reach."""
    hidden = keys.integer("hidden_size")
    layers, heads = keys.integer("num_hidden_layers"), keys.integer("num_attention_heads")
    kv_heads = keys.integer("num_key_value_heads", 8)
    head_dim = keys.integer("head_dim", hidden // heads)
    if heads % kv_heads or head_dim % 2:
        raise ConfigError(
            f"{keys.subject}: num_attention_heads={heads} must be a multiple of num_key_value_heads={kv_heads}, and heads of an "
            f"even size, got {head_dim}"
        )
    for name, size in {"block_dim": hidden, "conv_dim": hidden, "conv_dim_out": hidden, "num_heads": heads}.items():
        if (found := keys.integer(name, size)) != size:
            raise ConfigError(f"{keys.subject}: {name} must be {size}, as the model's other keys say, got {found}")
    eps = keys.number("norm_eps", 1e-5, positive=True)
    if (found := keys.number("block_norm_eps", eps)) != eps:
        raise ConfigError(f"{keys.subject}: block_norm_eps must be norm_eps={eps}, got {found}")
    max_position = keys.integer("max_position_embeddings", 128_000)
    rope = RopeConfig.from_keys(keys, max_position)
    if "rope_theta" not in keys.values and "rope_theta" not in (keys.get("rope_parameters") or {}):
        rope = replace(rope, theta=1e6)  # which transformers takes for this family
    return {
        "vocab_size": keys.integer("vocab_size", 65_536),
        "hidden_size": hidden,
        "intermediate_size": keys.integer("intermediate_size", 7168) if mixture else _inner(keys),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "norm_eps": eps,
        "rope": rope,
        "max_position": rope.longest(max_position),
        "windows": (None,) * layers,
        "full_layers": _full_layers(keys, layers),
        "conv_taps": keys.integer("conv_L_cache", 3, minimum=2),
    }


def _inner(keys: KeyReader) -> int:
    """Width of a dense feed-forward: as the file says, which it may mean to be two thirds of, rounded up to a multiple."""
    inner = keys.integer("block_ff_dim", keys.integer("intermediate_size", 12_288))
    multiple, factor = (
        keys.integer("block_multiple_of", 256),
        keys.number("block_ffn_dim_multiplier", 1.0, positive=True),
    )
    if not keys.flag("block_auto_adjust_ff_dim", default=True):
        return inner
    return multiple * -(-int(factor * int(2 * inner / 3)) // multiple)


def _full_layers(keys: KeyReader, layers: int) -> tuple[int, ...]:
    """Layers that attend, as `layer_types` lists them or `full_attn_idxs` counts them."""
    named = keys.get("full_attn_idxs", list(range(layers)))
    kinds = ("conv", "full_attention")
    counted = [kinds[i in named] for i in range(layers)] if isinstance(named, list) else named
    types = keys.kinds("layer_types", layers, kinds, counted)
    full = tuple(i for i, kind in enumerate(types) if kind == "full_attention")
    if not full:
        raise ConfigError(
            f"{keys.subject}: no layer of layer_types is full_attention; expected one at least, as every release has"
        )
    return full


def _experts(keys: KeyReader) -> dict[str, Any]:
    """The fields of the mixture of experts."""
    experts, taken = keys.integer("num_experts", 32), keys.integer("num_experts_per_tok", 4)
    if taken > experts:
        raise ConfigError(f"{keys.subject}: num_experts_per_tok={taken} is more than num_experts={experts}")
    if not keys.flag("use_expert_bias", default=True):
        raise ConfigError(f"{keys.subject}: use_expert_bias must be true, as every release has it")
    return {
        "num_experts": experts,
        "experts_per_token": taken,
        "moe_intermediate_size": keys.integer("moe_intermediate_size", 1792),
        "norm_routing_weights": keys.flag("norm_topk_prob", default=True),
        "routing_scale": keys.number("routed_scaling_factor", 1.0),
        "num_dense_layers": keys.integer("num_dense_layers", 2, minimum=0),
    }


class Lfm2Layer(PreNormLayer):
    """Pre-norm mixer and feed-forward, each added to the residual stream; the mixer attends or is a short convolution."""

    def __init__(self, config: Lfm2Config, index: int, traits: LayerTraits):
        d, eps = config.hidden_size, config.norm_eps
        self.input_norm, self.post_norm = RMSNorm(d, eps), RMSNorm(d, eps)
        before = sum(full < index for full in config.full_layers)
        attends = index in config.full_layers
        self.attn: Any = Attention(config, index, traits) if attends else None
        if attends:
            self.attn.index = before  # of its pages
        self.conv: Any = None if attends else ShortConv(d, config.short_conv, index - before)
        self.mlp: Any = MoE(config) if config.has_experts(index) else MLP(d, config.intermediate_size)

    @property
    def mixer(self) -> Any:
        return self.conv if self.attn is None else self.attn


class Lfm2(Decoder):
    """An LFM2 decoder; see `Decoder` for how it is called. `attend` is also a `DeltaAttend`."""

    def __init__(self, config: Lfm2Config):
        traits = lfm2_traits(config)
        layers = [Lfm2Layer(config, i, traits) for i in range(config.num_layers)]
        super().__init__(config, layers, tied=config.tie_embeddings)


def lfm2_traits(config: Lfm2Config) -> LayerTraits:
    """Layers of two kinds, with feed-forwards of one or two."""
    mixed = sum(config.has_experts(i) for i in range(config.num_layers))
    kind = "dense" if not mixed else "moe" if mixed == config.num_layers else "mixed"
    experts = None if kind == "dense" else expert_traits(config)
    return decoder_traits(config, short_conv=True, feed_forward=kind, experts=experts)


def lfm2_parameters(config: Lfm2Config) -> tuple[Parameter, ...]:
    """Parameters of an LFM2 checkpoint."""
    v, d = config.vocab_size, config.hidden_size
    table = [single("embed.weight", "model.embed_tokens.weight", (v, d))]
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        table.append(single(f"{ours}input_norm.weight", f"{theirs}operator_norm.weight", (d,)))
        if i in config.full_layers:
            table += _attention_parameters(config, f"{ours}attn.", f"{theirs}self_attn.")
        else:
            table += _conv_parameters(config.short_conv, d, f"{ours}conv.", f"{theirs}conv.")
        table.append(single(f"{ours}post_norm.weight", f"{theirs}ffn_norm.weight", (d,)))
        feed_forward = _expert_parameters if config.has_experts(i) else _mlp_parameters
        table += feed_forward(config, f"{ours}mlp.", f"{theirs}feed_forward.")
    table.append(single("norm.weight", "model.embedding_norm.weight", (d,)))
    if not config.tie_embeddings:
        table.append(single("lm_head.weight", "lm_head.weight", (v, d)))
    return tuple(table)


def _attention_parameters(config: Lfm2Config, ours: str, theirs: str) -> list[Parameter]:
    d, n, k, h = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    rows = {"q_proj": n * h, "k_proj": k * h, "v_proj": k * h}
    return [
        Parameter(f"{ours}qkv_proj.weight", tuple(Source(f"{theirs}{one}.weight", (r, d)) for one, r in rows.items())),
        single(f"{ours}o_proj.weight", f"{theirs}out_proj.weight", (d, n * h)),
        single(f"{ours}q_norm.weight", f"{theirs}q_layernorm.weight", (h,)),
        single(f"{ours}k_norm.weight", f"{theirs}k_layernorm.weight", (h,)),
    ]


def _conv_parameters(shape: ConvShape, d: int, ours: str, theirs: str) -> list[Parameter]:
    c, taps = shape.channels, shape.taps
    return [
        single(f"{ours}in_proj.weight", f"{theirs}in_proj.weight", (shape.columns, d)),
        Parameter(f"{ours}taps", (Source(f"{theirs}conv.weight", (c, 1, taps), kept=(c, taps)),)),
        single(f"{ours}out_proj.weight", f"{theirs}out_proj.weight", (d, c)),
    ]


def _mlp_parameters(config: Lfm2Config, ours: str, theirs: str) -> list[Parameter]:
    d, f = config.hidden_size, config.intermediate_size
    gates = tuple(Source(f"{theirs}{one}.weight", (f, d)) for one in ("w1", "w3"))
    return [
        Parameter(f"{ours}gate_up_proj.weight", gates),
        single(f"{ours}down_proj.weight", f"{theirs}w2.weight", (d, f)),
    ]


def _expert_parameters(config: Lfm2Config, ours: str, theirs: str) -> list[Parameter]:
    e, d, f = config.num_experts, config.hidden_size, config.moe_intermediate_size
    experts = [f"{theirs}experts.{index}." for index in range(e)]
    gates = tuple(Source(f"{expert}{one}.weight", (f, d)) for expert in experts for one in ("w1", "w3"))
    return [
        single(f"{ours}router.weight", f"{theirs}gate.weight", (e, d)),
        single(f"{ours}router.bias", f"{theirs}expert_bias", (e,), "float32"),
        Parameter(f"{ours}experts.gate_up_proj.weight", gates),
        Parameter(f"{ours}experts.down_proj.weight", tuple(Source(f"{one}w2.weight", (d, f)) for one in experts)),
    ]


def lfm2_canonical(name: str) -> str | None:
    """Checkpoint name as declared above; None for what is computed here."""
    return None if name.endswith("rotary_emb.inv_freq") else name
