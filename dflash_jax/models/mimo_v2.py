"""MiMo-V2 targets, V2-Flash, V2.5 and V2.5-Pro among them: configuration, the Flax modules, parameters and Hugging Face names.

Values of heads are smaller than their keys, and multiplied by a constant. A third of a head turns. Layers with a window have their
own number of key heads, another rotation, and a sink for each head. Experts are chosen by sigmoids with a correction. Texts alone
are read: towers of other inputs and layers that predict further tokens are left out. Source: transformers' MiMoV2Flash classes, and
XiaomiMiMo's configuration, whose keys the published files have.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from dflash_jax.config import NEUTRAL_KEYS, NEUTRAL_VALUES, DecoderConfig, KeyReader, RopeConfig, decoder_fields, shown
from dflash_jax.errors import ConfigError
from dflash_jax.models.decoder import target_parameters
from dflash_jax.models.gemma import FULL, SLIDING
from dflash_jax.models.gemma4 import times
from dflash_jax.models.layers import (
    Attend,
    Attention,
    Cache,
    DecoderLayer,
    Linear,
    Rotary,
    SummedLinear,
    mlp_parameters,
    rotate,
)
from dflash_jax.models.moe import MoE, expert_traits, moe_parameters
from dflash_jax.models.parameters import Parameter, Source, grouped, single
from dflash_jax.models.qwen3 import qwen3_canonical
from dflash_jax.models.traits import LayerTraits, decoder_traits
from dflash_jax.models.two_rotations import TwoRotationsDecoder, own_columns, own_rotation
from dflash_jax.parallel.cut import by_columns, by_rows

ARCHITECTURES = ("MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM")
MODEL_TYPES = ("mimo_v2_flash", "mimo_v2")
# What layers with a window have as the others do.
_ALIKE = ("head_dim", "v_head_dim", "num_attention_heads")
_ROPES: Mapping[str, Mapping[str, Any]] = {
    FULL: {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.334},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.334},
}
# `attention_chunk_size` is a leftover that no implementation reads; the router is in float32 whatever it was trained in.
_NEUTRAL = NEUTRAL_KEYS | {
    "attention_chunk_size", "attention_projection_layout", "audio_config", "audio_end_token_id", "audio_start_token_id",
    "audio_token_id", "image_token_id", "moe_router_dtype", "num_nextn_predict_layers", "processor_config", "video_end_token_id",
    "video_start_token_id", "video_token_id", "vision_config", "vision_end_token_id", "vision_model_type",
    "vision_start_token_id",
}  # fmt: skip
_NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    **NEUTRAL_VALUES, "hybrid_block_size": (None,), "n_shared_experts": (None, 0), "scoring_func": (None, "sigmoid"),
    "topk_method": (None, "noaux_tc"), "use_qk_norm": (None, False),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MimoV2Config(DecoderConfig):
    """A MiMo-V2 target; `rope` is the rotation of layers without a window, `num_kv_heads` are key heads of layers with one.

    Attributes:
      local_rope: the rotation of layers with a window.
      full_kv_heads: key heads of layers without one.
      value_dim: size of a head's value; `head_dim` is its query's and key's.
      value_scale: factor on values.
      window_sinks, full_sinks: whether layers with a window have sinks, and those without.
      row_groups: devices for which a checkpoint's projections to queries, keys and values were cut before they were put into one
        tensor; 0 where they are apart.
      num_experts, experts_per_token, moe_intermediate_size: experts of a layer, how many a token takes, inner width of one.
      num_groups, groups_per_token, norm_routing_weights, routing_scale: see `models.deepseek.DeepseekConfig`.
      dense_layers: layers without experts.
    """

    local_rope: RopeConfig
    full_kv_heads: int
    value_dim: int
    value_scale: float = 1.0
    window_sinks: bool = True
    full_sinks: bool = False
    row_groups: int = 0
    num_experts: int
    experts_per_token: int
    moe_intermediate_size: int
    num_groups: int = 1
    groups_per_token: int = 1
    norm_routing_weights: bool = True
    routing_scale: float = 1.0
    dense_layers: tuple[int, ...] = ()
    tie_embeddings: bool = False
    key_head_counts: ClassVar[tuple[str, ...]] = ("num_kv_heads", "full_kv_heads")
    cut_sizes: ClassVar[tuple[str, ...]] = (*DecoderConfig.cut_sizes, "row_groups")

    # What `models.moe` asks of every configuration, and this family has in one form only.
    routing = "noaux_tc"
    num_shared_experts = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        counts = self.num_kv_heads, self.full_kv_heads
        if any(self.num_heads % count for count in counts):
            raise ConfigError(
                f"{type(self).__name__}: {self.num_heads} heads must be a multiple of the key heads of layers with a window and of "
                f"others, {counts[0]} and {counts[1]}"
            )
        if self.row_groups and any(count % self.row_groups for count in counts):
            raise ConfigError(
                f"{type(self).__name__}: rows that were cut for {self.row_groups} devices need a multiple of these as key heads, "
                f"got {counts[0]} and {counts[1]}"
            )
        fit = self.num_groups >= 1 and self.num_experts % self.num_groups == 0
        if not fit or not 1 <= self.groups_per_token <= self.num_groups or self.experts_per_token > self.num_experts:
            raise ConfigError(
                f"{type(self).__name__}: n_routed_experts={self.num_experts} must be a multiple of n_group={self.num_groups}, and "
                f"topk_group={self.groups_per_token} and num_experts_per_tok={self.experts_per_token} at most as many"
            )

    def kv_heads(self, index: int) -> int:
        """Key heads of layer `index`."""
        return self.full_kv_heads if self.windows[index] is None else self.num_kv_heads

    def has_sinks(self, index: int) -> bool:
        """Whether layer `index` has sinks."""
        return self.full_sinks if self.windows[index] is None else self.window_sinks

    def of_layer(self, index: int) -> "MimoV2Config":
        """The same model with the key heads of layer `index` in layers of both kinds."""
        kv_heads = self.kv_heads(index)
        return replace(self, num_kv_heads=kv_heads, full_kv_heads=kv_heads)

    @property
    def key_shapes(self) -> tuple[tuple[int, int], ...]:
        return tuple((self.kv_heads(i), self.head_dim) for i in range(self.num_layers))

    @property
    def value_dims(self) -> tuple[int, ...]:
        return (self.value_dim,) * self.num_layers

    @property
    def rotations(self) -> tuple[tuple[RopeConfig, int], ...]:
        """The rotation of layers with a window and that of layers without, and the size of the heads that turn by it."""
        return (self.local_rope, self.head_dim), (self.rope, self.head_dim)

    @classmethod
    def from_hf(
        cls, values: Mapping[str, Any], tensor_names: Collection[str] = (), notices: list[str] | None = None
    ) -> "MimoV2Config":
        """Reads a `config.json` of one of `ARCHITECTURES`, with XiaomiMiMo's keys (`hybrid_layer_pattern`) or transformers'
        (`layer_types`).

        Args:
          tensor_names: canonical ones of the checkpoint, which tell whether projections are in one tensor.
          notices: takes what was decided where the file leaves a choice, one sentence each.

        Raises:
          ConfigError: a needed key is missing or malformed, two keys contradict each other, the weights are quantized, or a key is
            present that this package does not implement.
        """
        subject = "config.json (MiMo-V2)"
        own = values.get("hybrid_layer_pattern") is not None
        file, turned = _rotations(KeyReader(subject, values), own=own)
        keys = KeyReader(subject, file, notices)
        fields: dict[str, Any] = decoder_fields(keys, windows=_windows)
        if fields["attention_bias"] or "attention_value_scale" not in values:
            raise ConfigError(
                f"{subject}: attention_bias must be false, as the releases have it, and attention_value_scale be there, null for "
                "none: transformers and XiaomiMiMo's code differ in what its absence means"
            )
        layers, full = fields["num_layers"], fields["num_kv_heads"]
        for name in _ALIKE:
            if (found := keys.get(f"swa_{name}", keys.get(name))) != keys.get(name):
                raise ConfigError(
                    f"{subject}: swa_{name}={shown(found)} must be {name}={keys.get(name)}, as the releases have it"
                )
        local = RopeConfig.from_keys(KeyReader(f"{subject}, {SLIDING}", turned, notices), fields["max_position"])
        if own and fields["rope"].kind != "default":
            raise ConfigError(
                f"{subject}: rope_type must be default, as the releases have it, got {fields['rope'].kind}: it is not known "
                f"whether layers of {SLIDING} turn so as well"
            )
        named = {"q": False, "qkv": False} | {
            kind: any(name.endswith(f".self_attn.{kind}_proj.weight") for name in tensor_names) for kind in ("q", "qkv")
        }
        joined = named["qkv"] or (not named["q"] and keys.get("attention_projection_layout") == "fused_qkv")
        config = cls(
            **{**fields, "num_kv_heads": keys.integer("swa_num_key_value_heads", full if own else 2 * full)},
            local_rope=local,
            full_kv_heads=full,
            value_dim=keys.integer("v_head_dim"),
            value_scale=keys.number("attention_value_scale", 1.0),
            window_sinks=keys.flag("add_swa_attention_sink_bias", default=not own),
            full_sinks=keys.flag("add_full_attention_sink_bias"),
            row_groups=full if joined else 0,
            num_experts=keys.integer("n_routed_experts", keys.integer("num_local_experts", 256)),
            experts_per_token=keys.integer("num_experts_per_tok", 8),
            moe_intermediate_size=keys.integer("moe_intermediate_size"),
            num_groups=keys.integer("n_group", 1),
            groups_per_token=keys.integer("topk_group", 1),
            norm_routing_weights=keys.flag("norm_topk_prob", default=True),
            routing_scale=keys.number("routed_scaling_factor", 1.0),
            dense_layers=_dense_layers(keys, layers),
            tie_embeddings=keys.flag("tie_word_embeddings"),
        )
        keys.refuse_rest(_NEUTRAL, _NEUTRAL_VALUES)
        return config


def _rotations(keys: KeyReader, *, own: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The file with the rotation of layers without a window alone and with one name for the norms' epsilon, and the rotation of
    layers with a window as `RopeConfig.from_keys` reads it.

    Args:
      own: whether the file has XiaomiMiMo's keys, with `swa_rope_theta`, not transformers' by kind of layer.
    """
    file = {key: value for key, value in keys.values.items() if key not in ("layernorm_epsilon", "swa_rope_theta")}
    if (epsilon := keys.get("layernorm_epsilon")) is not None:
        if keys.get("rms_norm_eps", epsilon) != epsilon:
            raise ConfigError(
                f"{keys.subject} says layernorm_epsilon={epsilon} and rms_norm_eps={keys.get('rms_norm_eps')}: keep the one "
                "that the model was trained with"
            )
        file["rms_norm_eps"] = epsilon
    given = KeyReader(f"{keys.subject}, rope_parameters", keys.get("rope_parameters", {})).values
    if own:
        partial = keys.get("partial_rotary_factor", given.get("partial_rotary_factor", 1.0))
        theta = keys.get("swa_rope_theta", keys.get("rope_theta", given.get("rope_theta")))
        return file, {"rope_theta": theta, "partial_rotary_factor": partial}
    given = given or _ROPES
    if set(given) != set(_ROPES):
        raise ConfigError(
            f"{keys.subject}: rope_parameters must say how layers of {FULL} and of {SLIDING} rotate, and nothing else, got "
            f"{shown(dict(given))}"
        )
    # An absent part means transformers'.
    turns = {
        kind: {"partial_rotary_factor": 0.334, **KeyReader(f"{keys.subject}, {kind}", one).values}
        for kind, one in given.items()
    }
    return {**file, "rope_parameters": turns[FULL]}, {"rope_parameters": turns[SLIDING]}


def _windows(keys: KeyReader, layers: int) -> tuple[int | None, ...]:
    """Each layer's window: as `hybrid_layer_pattern` (1 for one) or `layer_types` lists them, otherwise the first layer and every
    sixth have none."""
    types, pattern = keys.get("layer_types"), keys.get("hybrid_layer_pattern")
    if pattern is None:
        kinds = [FULL if i == 0 or (i + 1) % 6 == 0 else SLIDING for i in range(layers)] if types is None else types
    else:
        numbered = isinstance(pattern, list) and all(type(kind) is int and kind in (0, 1) for kind in pattern)
        kinds = [(FULL, SLIDING)[kind] for kind in pattern] if numbered else []
    fits = isinstance(kinds, list) and len(kinds) == layers and all(kind in (FULL, SLIDING) for kind in kinds)
    if not fits or types not in (None, kinds):
        raise ConfigError(
            f"{keys.subject}: hybrid_layer_pattern must list 0 or 1 for each of {layers} layers, or layer_types {FULL} or "
            f"{SLIDING} alike, got {shown(pattern)} and {shown(types)}"
        )
    window = keys.integer("sliding_window", keys.integer("sliding_window_size", 128))
    if keys.integer("sliding_window_size", window) != window:
        raise ConfigError(f"{keys.subject}: sliding_window={window} and sliding_window_size must be one number")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _dense_layers(keys: KeyReader, layers: int) -> tuple[int, ...]:
    """Layers with a plain feed-forward: as `moe_layer_freq` (0 for one) or `mlp_layer_types` lists them, otherwise the first."""
    names: Mapping[str, tuple[Any, Any]] = {"moe_layer_freq": (0, 1), "mlp_layer_types": ("dense", "sparse")}
    found = [tuple(range(min(1, layers)))]
    for name, known in names.items():
        if keys.get(name) is not None:
            kinds = keys.kinds(name, layers, known)
            found.append(tuple(i for i, kind in enumerate(kinds) if kind == known[0]))
    if len(set(found[1:])) > 1:
        raise ConfigError(
            f"{keys.subject}: moe_layer_freq and mlp_layer_types differ in which layers have experts; keep one"
        )
    return found[-1]


class MimoV2Attention(Attention):
    """Attention whose values have a size of their own and a factor, and which turns heads by one of two rotations; see
    `models.two_rotations`."""

    def __init__(self, config: MimoV2Config, index: int, traits: LayerTraits):
        own = config.of_layer(index)
        super().__init__(own, index, traits)
        n, k, h, self.values = own.num_heads, own.num_kv_heads, own.head_dim, own.value_dim
        self.qkv_proj = Linear((n + k) * h + k * self.values, own.hidden_size)
        self.o_proj = SummedLinear(own.hidden_size, n * self.values)
        self.sinks = nnx.Param(jnp.zeros((n,))) if config.has_sinks(index) else None
        self.turned = own_columns(config.rotations, config.windows[index])
        self.value_scale = config.value_scale

    def mix(self, projected: Array, rotary: Rotary, attend: Attend, cache: Cache) -> tuple[Array, Cache]:
        """See `Mixer`. The factor is on what attention gives, which is linear in the values."""
        out, cache = attend(self, projected, own_rotation(rotary, self.turned), cache)
        return times(out, self.value_scale), cache

    def heads(self, qkv: Array, rotary: Rotary) -> tuple[Array, Array, Array]:
        """Queries and keys, rotated, and values, which are smaller; see `Attention`."""
        n, k, h = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        parts = jnp.split(qkv, [n * h, (n + k) * h], axis=-1)
        q, keys, values = (
            part.reshape(*qkv.shape[:-1], count, -1) for part, count in zip(parts, (n, k, k), strict=True)
        )
        return rotate(q, rotary), rotate(keys, rotary), values


class MimoV2(TwoRotationsDecoder):
    """A MiMo-V2 decoder; see `Decoder` for how it is called."""

    def __init__(self, config: MimoV2Config):
        traits, layers = mimo_v2_traits(config), []
        for i in range(config.num_layers):
            layer = DecoderLayer(config, i, traits, feed_forward=None if i in config.dense_layers else MoE(config))
            layer.attn = MimoV2Attention(config, i, traits)
            layers.append(layer)
        super().__init__(config, layers, tied=config.tie_embeddings)


def mimo_v2_traits(config: MimoV2Config) -> LayerTraits:
    """Layers with heads of two kinds that are not normed, and experts in all of them or in some."""
    own: dict[str, Any] = {"qk_norm": False, "sinks": config.window_sinks or config.full_sinks, "uneven_heads": True}
    own |= {"full_heads": (config.full_kv_heads, config.head_dim)}
    if len(config.dense_layers) == config.num_layers:
        return decoder_traits(config, **own)
    kind: Any = "mixed" if config.dense_layers else "moe"
    return decoder_traits(config, feed_forward=kind, experts=expert_traits(config), **own)


def mimo_v2_parameters(config: MimoV2Config) -> tuple[Parameter, ...]:
    """Parameters of a MiMo-V2 checkpoint."""
    d, table = config.hidden_size, []
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        feed_forward = mlp_parameters if i in config.dense_layers else moe_parameters
        table += [
            single(f"{ours}input_norm.weight", f"{theirs}input_layernorm.weight", (d,)),
            *_attention_parameters(config, i, f"{ours}attn.", f"{theirs}self_attn."),
            single(f"{ours}post_norm.weight", f"{theirs}post_attention_layernorm.weight", (d,)),
            *feed_forward(config, f"{ours}mlp.", f"{theirs}mlp."),
        ]
    return target_parameters(config, table, tied=config.tie_embeddings)


def _attention_parameters(config: MimoV2Config, index: int, ours: str, theirs: str) -> list[Parameter]:
    d, n, k, h, v = config.hidden_size, config.num_heads, config.kv_heads(index), config.head_dim, config.value_dim
    rows, groups = {"q_proj": n * h, "k_proj": k * h, "v_proj": k * v}, config.row_groups
    sources = tuple(Source(f"{theirs}{name}.weight", (count, d)) for name, count in rows.items())
    if groups:
        sizes = [count // groups for count in rows.values()]
        sources = grouped(f"{theirs}qkv_proj.weight", (sum(rows.values()), d), groups, sizes)
    table = [
        Parameter(f"{ours}qkv_proj.weight", sources, cut=by_rows((n * h, n), (k * h, k), (k * v, k))),
        single(f"{ours}o_proj.weight", f"{theirs}o_proj.weight", (d, n * v), cut=by_columns((n * v, n))),
    ]
    if config.has_sinks(index):
        table.append(single(f"{ours}sinks", f"{theirs}attention_sink_bias", (n,), cut=by_rows((n, n))))
    return table


_LEFT_OUT = re.compile(r"(model\.)?(mtp|visual|vision|audio_encoder|audio_tokenizer|speech_embeddings)\.")


def mimo_v2_canonical(name: str) -> str | None:
    """Checkpoint name as declared; None for towers of other inputs, layers of further tokens and buffers computed here."""
    known = None if _LEFT_OUT.match(name) else qwen3_canonical(name)
    return None if known is None else known.replace(".self_attn.sinks", ".self_attn.attention_sink_bias")
