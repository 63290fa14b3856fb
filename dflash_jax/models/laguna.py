"""Laguna targets, XS.2, XS 2.1, S 2.1 and M.1 among them: configuration, the Flax modules, parameters and Hugging Face names.

Layers differ in how many query heads they have. What a head gives is multiplied by a softplus of the layer's input, one number for
a head or one for each of its entries. Layers with a window rotate heads one way, the others another way and partly. Experts are
chosen by sigmoids with a correction, beside one that every token takes. Source: transformers' Laguna classes, whose defaults absent
keys mean, and vLLM's for files that were written before these.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.config import NEUTRAL_KEYS, NEUTRAL_VALUES, DecoderConfig, KeyReader, RopeConfig, decoder_fields, shown
from dflash_jax.errors import ConfigError
from dflash_jax.models.decoder import Decoder, target_parameters
from dflash_jax.models.gemma import FULL, SLIDING
from dflash_jax.models.layers import (
    Attend,
    Attention,
    Cache,
    DecoderLayer,
    Linear,
    Rotary,
    mlp_parameters,
    rope_frequencies,
    rotary_tables,
)
from dflash_jax.models.moe import MoE, Router, expert_traits, moe_parameters
from dflash_jax.models.parameters import Parameter, Source, single
from dflash_jax.models.qwen3 import qwen3_canonical
from dflash_jax.models.traits import LayerTraits, decoder_traits
from dflash_jax.parallel.cut import by_columns, by_rows

PER_HEAD, PER_ELEMENT = "per-head", "per-element"
# Of `rope_parameters`, beside the kinds of layers: without a meaning of their own.
_BESIDE = ("original_max_position_embeddings", "rope_theta", "rope_type")
_ROPES: Mapping[str, Mapping[str, Any]] = {
    FULL: {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
}
_NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    **NEUTRAL_VALUES, "moe_apply_router_weight_on_input": (None, False), "moe_router_score_func": (None, "sigmoid"),
    "moe_router_use_sigmoid": (None, True), "norm_topk_prob": (None, True), "rope_style": (None, "rotate-half"),
    "swa_attention_sink_enabled": (None, False),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LagunaConfig(DecoderConfig):
    """A Laguna target; `rope` is the rotation of layers without a window, `num_heads` the largest number of query heads.

    Attributes:
      local_rope: the rotation of layers with a window.
      layer_heads: query heads of each layer.
      gating: whether a gate is a head's or one of its entries'.
      num_experts, experts_per_token: experts of a layer, and how many a token takes.
      moe_intermediate_size, shared_intermediate_size: inner width of one of these, and of the one that all tokens take; 0 for none.
      routing_scale: factor on what the former give.
      router_softcap: c of `c * tanh(logit / c)` on the router's; 0 for no cap.
      dense_layers: layers without experts.
    """

    local_rope: RopeConfig
    layer_heads: tuple[int, ...]
    gating: str = PER_HEAD
    num_experts: int
    experts_per_token: int
    moe_intermediate_size: int
    shared_intermediate_size: int = 0
    routing_scale: float = 1.0
    router_softcap: float = 0.0
    dense_layers: tuple[int, ...] = ()
    tie_embeddings: bool = False
    cut_sizes: ClassVar[tuple[str, ...]] = (*DecoderConfig.cut_sizes, "layer_heads", "shared_intermediate_size")

    # What `models.moe` asks of every configuration, and this family has in one form only.
    routing = "noaux_tc"
    routing_eps = 0.0
    num_groups = groups_per_token = 1
    num_shared_experts = 0
    norm_routing_weights = True

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = [heads for heads in self.layer_heads if heads < 1 or heads % self.num_kv_heads]
        if wrong or len(self.layer_heads) != self.num_layers or self.gating not in (PER_HEAD, PER_ELEMENT):
            raise ConfigError(
                f"{type(self).__name__}: each of {self.num_layers} layers must have a multiple of num_key_value_heads="
                f"{self.num_kv_heads} as heads, and gating be {PER_HEAD} or {PER_ELEMENT}, got {shown(self.layer_heads)} and "
                f"{shown(self.gating)}"
            )

    def of_layer(self, index: int) -> "LagunaConfig":
        """The same model with the heads of layer `index` in all layers."""
        return replace(self, num_heads=self.layer_heads[index])

    @property
    def rotations(self) -> tuple[tuple[RopeConfig, int], ...]:
        """The rotation of layers with a window and that of layers without, and the size of the heads that turn by it."""
        return (self.local_rope, self.head_dim), (self.rope, self.head_dim)

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], notices: list[str] | None = None) -> "LagunaConfig":
        """Reads a `config.json` of LagunaForCausalLM.

        Args:
          notices: takes what was decided where the file leaves a choice, one sentence each.

        Raises:
          ConfigError: a needed key is missing or malformed, two keys contradict each other, the weights are quantised, or a key is
            present that this package does not implement.
        """
        subject = "config.json (Laguna)"
        file, turned = _rotations(KeyReader(subject, values))
        keys = KeyReader(subject, file, notices)
        fields: dict[str, Any] = decoder_fields(keys, windows=_windows)
        if fields["attention_bias"]:
            raise ConfigError(f"{subject}: attention_bias must be false, as the releases have it")
        if any(fields["windows"]) and turned is None:
            raise ConfigError(
                f"{subject}: layer_types has {SLIDING}, and neither rope_parameters ({SLIDING}) nor swa_rope_parameters says how "
                "these rotate; take them from the release"
            )
        local = fields["rope"]
        if turned is not None:
            local = RopeConfig.from_keys(KeyReader(f"{subject}, {SLIDING}", turned, notices), fields["max_position"])
        layers, experts = fields["num_layers"], keys.integer("num_experts", 256)
        taken, heads = keys.integer("num_experts_per_tok", 8), _layer_heads(keys, layers, fields["num_heads"])
        if taken > experts:
            raise ConfigError(f"{subject}: num_experts_per_tok={taken} is more than num_experts={experts}")
        config = cls(
            **{**fields, "num_heads": max(heads)},
            local_rope=local,
            layer_heads=heads,
            gating=_gating(keys, layers),
            num_experts=experts,
            experts_per_token=taken,
            moe_intermediate_size=keys.integer("moe_intermediate_size", 512),
            shared_intermediate_size=keys.integer("shared_expert_intermediate_size", 512, minimum=0),
            routing_scale=keys.number("moe_routed_scaling_factor", 1.0),
            router_softcap=keys.number("moe_router_logit_softcapping", 0.0),
            dense_layers=_dense_layers(keys, layers),
            tie_embeddings=keys.flag("tie_word_embeddings"),
        )
        keys.refuse_rest(NEUTRAL_KEYS, _NEUTRAL_VALUES)
        return config


def _rotations(keys: KeyReader) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The file with the rotation of layers without a window alone, and that of layers with one as `RopeConfig.from_keys` reads it,
    None where nothing says it.

    Files have both in `rope_parameters`, by kind of layer, or the former at the top and the latter in `swa_rope_parameters`. A
    `partial_rotary_factor` at the top is for what says none, as vLLM reads it.
    """
    given = KeyReader(f"{keys.subject}, rope_parameters", keys.get("rope_parameters", {})).values
    own, partial = keys.get("swa_rope_parameters"), keys.get("partial_rotary_factor")
    if not given and all(keys.get(name) is None for name in ("rope_theta", "rope_scaling")):
        given = _ROPES
    file = {key: value for key, value in keys.values.items() if key != "swa_rope_parameters"}
    if any(isinstance(value, Mapping) for value in given.values()):
        if set(given) - {*_ROPES, *_BESIDE} or not isinstance(given.get(FULL), Mapping):
            raise ConfigError(
                f"{keys.subject}: rope_parameters must say how layers of {FULL} and of {SLIDING} rotate, and nothing else, got "
                f"{shown(dict(given))}"
            )
        file["rope_parameters"], inside = given[FULL], given.get(SLIDING)
        if given[FULL].get("partial_rotary_factor") is not None:
            file.pop("partial_rotary_factor", None)
        if own is not None and inside not in (None, own):
            raise ConfigError(
                f"{keys.subject} says in two ways how layers of {SLIDING} rotate, in rope_parameters and in swa_rope_parameters: "
                "keep the one that the model was trained with"
            )
        own = own if inside is None else inside
    if own is None:
        return file, None
    own = KeyReader(f"{keys.subject}, {SLIDING}", own).values
    absent = partial is not None and own.get("partial_rotary_factor") is None
    return file, {"rope_parameters": own} | ({"partial_rotary_factor": partial} if absent else {})


def _windows(keys: KeyReader, layers: int) -> tuple[int | None, ...]:
    types = keys.get("layer_types", [FULL] * layers)
    if not isinstance(types, list) or len(types) != layers or not all(kind in _ROPES for kind in types):
        raise ConfigError(
            f"{keys.subject}: layer_types must list {SLIDING} or {FULL} for each of {layers} layers, got {shown(types)}"
        )
    window = keys.integer("sliding_window", 512, minimum=1 if SLIDING in types else 0)
    return tuple(window if kind == SLIDING else None for kind in types)


def _layer_heads(keys: KeyReader, layers: int, heads: int) -> tuple[int, ...]:
    given = keys.get("num_attention_heads_per_layer", [heads] * layers)
    if not isinstance(given, list) or len(given) != layers or not all(type(one) is int for one in given):
        raise ConfigError(
            f"{keys.subject}: num_attention_heads_per_layer must list a number for each of {layers} layers, got {shown(given)}"
        )
    return tuple(given)


def read_gating(keys: KeyReader, *, default: Any = True) -> str | None:
    """Whether gates are heads' or their entries', None where the file says that there are none.

    Raises:
      ConfigError: it says something else.
    """
    known: Mapping[Any, str | None] = {
        True: PER_HEAD,
        PER_HEAD: PER_HEAD,
        PER_ELEMENT: PER_ELEMENT,
        False: None,
        "disabled": None,
    }
    given = keys.get("gating", default)
    if not isinstance(given, bool | str) or given not in known:
        raise ConfigError(f"{keys.subject}: gating must be {PER_HEAD}, {PER_ELEMENT} or a flag, got {shown(given)}")
    return known[given]


def _gating(keys: KeyReader, layers: int) -> str:
    gating, types = read_gating(keys), keys.get("gating_types")
    if gating is None:
        raise ConfigError(
            f"{keys.subject}: gating={keys.get('gating')} of a target is read in two ways, by transformers as {PER_ELEMENT}, by "
            f"vLLM as none at all: say {PER_HEAD} or {PER_ELEMENT}"
        )
    if types is not None and types != [gating.replace("-", "_")] * layers:
        raise ConfigError(
            f"{keys.subject}: gating_types must be {gating.replace('-', '_')} for each of {layers} layers, as gating says, got "
            f"{shown(types)}"
        )
    return gating


def _dense_layers(keys: KeyReader, layers: int) -> tuple[int, ...]:
    """Layers with a plain feed-forward: `mlp_layer_types` lists them, or `mlp_only_layers` as the first files do; without either
    it is the first one alone."""
    named, step, dense = keys.get("mlp_only_layers"), keys.integer("decoder_sparse_step", 1), None
    if step != 1 or not (named is None or (isinstance(named, list) and all(type(i) is int for i in named))):
        raise ConfigError(
            f"{keys.subject}: decoder_sparse_step must be 1 and mlp_only_layers a list of layers, got {step} and {shown(named)}"
        )
    if named is not None:
        dense = tuple(sorted(set(named)))
    kinds = keys.get("mlp_layer_types")
    if kinds is not None:
        if (
            not isinstance(kinds, list)
            or len(kinds) != layers
            or not all(kind in ("dense", "sparse") for kind in kinds)
        ):
            raise ConfigError(
                f"{keys.subject}: mlp_layer_types must list dense or sparse for each of {layers} layers, got {shown(kinds)}"
            )
        listed = tuple(i for i, kind in enumerate(kinds) if kind == "dense")
        if dense not in (None, listed):
            raise ConfigError(
                f"{keys.subject}: mlp_only_layers={shown(named)} are not the dense ones of mlp_layer_types, {list(listed)}: keep "
                "what the model was trained with"
            )
        dense = listed
    return (0,) if dense is None else dense


class GatedAttention(Attention):
    """Attention whose heads are gated by softplus, in float32, of rows of the projection after the values'.

    Args:
      gating: whether each head has one gate, or each of its entries; None for none.
      turned: columns of the rotation that are the layer's own; None for all.
    """

    def __init__(
        self,
        config: DecoderConfig,
        index: int,
        traits: LayerTraits,
        *,
        gating: str | None,
        causal: bool = True,
        turned: tuple[int, int] | None = None,
    ):
        super().__init__(config, index, traits, causal=causal)
        n, k, h = config.num_heads, config.num_kv_heads, config.head_dim
        self.turned, self.gates = turned, gate_rows(gating, n, h)
        self.qkv_proj = Linear((n + 2 * k) * h + self.gates, config.hidden_size)

    def mix(self, projected: Array, rotary: Rotary, attend: Attend, cache: Cache) -> tuple[Array, Cache]:
        """See `Mixer`."""
        if self.turned is not None:
            first, end = self.turned
            rotary = Rotary(*(side[..., first:end] for side in rotary))
        qkv, gates = jnp.split(projected, [projected.shape[-1] - self.gates], axis=-1)
        out, cache = super().mix(qkv, rotary, attend, cache)
        if not self.gates:
            return out, cache
        opened = jax.nn.softplus(gates.astype(jnp.float32)).astype(out.dtype)
        return out * opened.reshape(*out.shape[:-1], -1), cache


def gate_rows(gating: str | None, heads: int, head_dim: int) -> int:
    """Rows of the projection to gates."""
    return 0 if gating is None else heads * (1 if gating == PER_HEAD else head_dim)


def gated_parameters(
    config: DecoderConfig, ours: str, theirs: str, gating: str | None, *, joined: bool = False
) -> list[Parameter]:
    """Parameters of one `GatedAttention`; `joined`: the checkpoint has queries, keys and values in one tensor."""
    d, n, k, h = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    rows, gates = (("q_proj", n * h), ("k_proj", k * h), ("v_proj", k * h)), gate_rows(gating, n, h)
    given = (("qkv_proj", (n + 2 * k) * h),) if joined else rows
    given = (*given, ("g_proj", gates)) if gates else given
    cuts = [(n * h, n), (k * h, k), (k * h, k), *([(gates, n)] if gates else [])]
    return [
        Parameter(
            f"{ours}qkv_proj.weight", tuple(Source(f"{theirs}{name}.weight", (count, d)) for name, count in given),
            cut=by_rows(*cuts),
        ),
        single(f"{ours}o_proj.weight", f"{theirs}o_proj.weight", (d, n * h), cut=by_columns((n * h, n))),
        *(single(f"{ours}{one}.weight", f"{theirs}{one}.weight", (h,)) for one in ("q_norm", "k_norm")),
    ]  # fmt: skip


class CappedRouter(Router):
    """Scores of experts that are capped before anything is chosen by them.

    Args:
      cap: c of `c * tanh(score / c)`; 0 for no cap.
    """

    def __init__(self, config: LagunaConfig):
        super().__init__(config)
        self.cap = config.router_softcap

    def choose(self, logits: Float[Array, "T E"]) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
        """See `Router`."""
        return super().choose(jnp.tanh(logits / self.cap) * self.cap if self.cap else logits)


class Laguna(Decoder):
    """A Laguna decoder; see `Decoder` for how it is called."""

    def __init__(self, config: LagunaConfig):
        traits, layers = laguna_traits(config), []
        local, full = (rope_frequencies(rope, dim)[0].size for rope, dim in config.rotations)
        for i, window in enumerate(config.windows):
            mixture = None if i in config.dense_layers else MoE(config, shared=config.shared_intermediate_size)
            if mixture is not None:
                mixture.router = CappedRouter(config)
            layer = DecoderLayer(config, i, traits, feed_forward=mixture)
            turned = (local, local + full) if window is None else (0, local)
            layer.attn = GatedAttention(config.of_layer(i), i, traits, gating=config.gating, turned=turned)
            layers.append(layer)
        super().__init__(config, layers, tied=config.tie_embeddings)
        self.rotations = config.rotations

    def rotary(self, positions: Int[Array, "B T"]) -> Rotary:
        """The rotations at `positions`, side by side: that of layers with a window, then that of the others."""
        both = [rotary_tables(positions, rope, dim) for rope, dim in self.rotations]
        return Rotary(*(jnp.concatenate(sides, axis=-1) for sides in zip(*both, strict=True)))


def laguna_traits(config: LagunaConfig) -> LayerTraits:
    """Layers with heads of their own, and experts in all of them or in some."""
    kind = "mixed" if config.dense_layers else "moe"
    if len(config.dense_layers) == config.num_layers:
        return decoder_traits(config, uneven_heads=True)
    return decoder_traits(config, uneven_heads=True, feed_forward=kind, experts=expert_traits(config))


def laguna_parameters(config: LagunaConfig) -> tuple[Parameter, ...]:
    """Parameters of a Laguna checkpoint."""
    table = []
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        table += [
            single(f"{ours}input_norm.weight", f"{theirs}input_layernorm.weight", (config.hidden_size,)),
            *gated_parameters(config.of_layer(i), f"{ours}attn.", f"{theirs}self_attn.", config.gating),
            single(f"{ours}post_norm.weight", f"{theirs}post_attention_layernorm.weight", (config.hidden_size,)),
            *(mlp_parameters if i in config.dense_layers else _mixture)(config, f"{ours}mlp.", f"{theirs}mlp."),
        ]
    return target_parameters(config, table, tied=config.tie_embeddings)


def _mixture(config: LagunaConfig, ours: str, theirs: str) -> list[Parameter]:
    """Parameters of one layer's experts, and of the one that all tokens take."""
    width, table = config.shared_intermediate_size, []
    for one in moe_parameters(config, ours, theirs):
        if one.name.endswith("router.bias"):
            one = replace(one, sources=(replace(one.sources[0], name=f"{theirs}experts.{CORRECTION}"),))
        table.append(one)
    shared = mlp_parameters(replace(config, intermediate_size=width), f"{ours}shared.", f"{theirs}shared_expert.")
    return table + (shared if width else [])


CORRECTION = "e_score_correction_bias"
# Names of transformers' own classes, and those of the releases.
_RENAMED = ((f".mlp.gate.{CORRECTION}", f".mlp.experts.{CORRECTION}"), (".mlp.shared_experts.", ".mlp.shared_expert."))


def laguna_canonical(name: str) -> str | None:
    """Checkpoint name as declared; None for buffers that are computed here."""
    if (known := qwen3_canonical(name)) is None:
        return None
    for theirs, ours in _RENAMED:
        known = known.replace(theirs, ours)
    return known
