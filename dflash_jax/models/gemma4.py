"""Gemma 4 targets: configuration, the Flax modules, their parameters and Hugging Face names.

Layers without a window have heads of another size and number, of which a quarter turns, and may take what they project to keys for
values as well: keys are normed and turned, values normed without a weight. Scores have no scale. Every layer's output is multiplied
by a number of its own. Some releases have experts beside every dense feed-forward. The small ones let their last layers attend to
the keys of earlier ones, and add to every layer a gated embedding of the token that is that layer's own.
Source: transformers' Gemma4 and Gemma4Unified classes.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from dflash_kernels import dense_scores
from flax import nnx
from jaxtyping import Array, Float, Int

from dflash_jax.config import KeyReader, architectures_of, shown
from dflash_jax.errors import ConfigError
from dflash_jax.models.decoder import Embedding
from dflash_jax.models.gemma import (
    NEUTRAL_OF_TEXT,
    GemmaAttention,
    GemmaConfig,
    GemmaDecoder,
    GemmaLayer,
    gemma_canonical,
    gemma_fields,
    gemma_traits,
    norm_parameters,
    refuse_rest,
    text_keys,
    tied,
)
from dflash_jax.models.layers import MLP, Attend, Cache, Linear, Rotary, WideNorm, mlp_parameters, rotate, unit_norm
from dflash_jax.models.moe import Experts, expert_traits
from dflash_jax.models.parameters import Parameter, Source, single
from dflash_jax.models.traits import LayerTraits
from dflash_jax.parallel.collectives import reduced_together
from dflash_jax.parallel.cut import by_columns, by_rows

COMPOSITES = ("Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration")
ARCHITECTURES = ("Gemma4ForCausalLM", "Gemma4UnifiedForCausalLM", *COMPOSITES)
MODEL_TYPES = ("gemma4_text", "gemma4", "gemma4_unified_text", "gemma4_unified")

ROPE = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {**NEUTRAL_OF_TEXT, "top_k_experts": (None, 0)}

gemma4_canonical = gemma_canonical


@dataclass(frozen=True, kw_only=True)
class Gemma4Config(GemmaConfig):
    """A Gemma 4 target; `num_kv_heads` and `head_dim` are those of layers with a window.

    Attributes:
      full_kv_heads, full_head_dim: the same of layers without one.
      keys_as_values: whether the latter have no projection to values.
      shared_layers: last layers that have no keys and attend to those of the last layer before them that is of their kind.
      wide_shared_mlp: whether feed-forwards of these are twice as wide.
      per_layer_width, per_layer_vocab: of the embeddings that each layer has of its own, and rows of their table; 0 for none.
      num_experts, experts_per_token, moe_intermediate_size: experts beside the dense feed-forward, how many a token takes, inner
        width of one; 0 for none.
    """

    full_kv_heads: int
    full_head_dim: int
    keys_as_values: bool = False
    shared_layers: int = 0
    wide_shared_mlp: bool = False
    per_layer_width: int = 0
    per_layer_vocab: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    moe_intermediate_size: int = 0
    key_head_counts: ClassVar[tuple[str, ...]] = ("num_kv_heads", "full_kv_heads")

    # What `models.moe` asks of every configuration, and this family has in one form only.
    routing = "greedy"
    num_groups = groups_per_token = 1
    num_shared_experts = 0
    norm_routing_weights = True
    routing_scale = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        kinds, own = (
            [window is None for window in part] for part in (self.windows, self.windows[: self.cached_layers])
        )
        if self.shared_layers and not set(kinds) <= set(own):
            raise ConfigError(
                f"{type(self).__name__}: the last {self.shared_layers} of {self.num_layers} layers share keys of layers of their "
                "kind before them, of which there are none; expected one with a window and one without"
            )
        if self.num_heads % self.full_kv_heads or self.full_head_dim % 2:
            raise ConfigError(
                f"{type(self).__name__}: {self.num_heads} heads must be a multiple of {self.full_kv_heads} key heads, and "
                f"{self.full_head_dim}, the size of one, even"
            )
        if self.experts_per_token > self.num_experts:
            raise ConfigError(
                f"{type(self).__name__}: top_k_experts={self.experts_per_token} is more than num_experts={self.num_experts}"
            )

    @property
    def cached_layers(self) -> int:
        return self.num_layers - self.shared_layers

    @property
    def key_shapes(self) -> tuple[tuple[int, int], ...]:
        return tuple(self.head_shape(i) for i in range(self.cached_layers))

    def head_shape(self, index: int) -> tuple[int, int]:
        """Key heads of layer `index` and the size of all its heads."""
        if self.windows[index] is None:
            return self.full_kv_heads, self.full_head_dim
        return self.num_kv_heads, self.head_dim

    def keys_of(self, index: int) -> int:
        """The layer whose keys layer `index` attends to: itself, or the last one of its kind that has keys."""
        if index < self.cached_layers:
            return index
        alike = [i for i in range(self.cached_layers) if (self.windows[i] is None) == (self.windows[index] is None)]
        return alike[-1]

    def has_values(self, index: int) -> bool:
        """Whether layer `index` projects to values."""
        return index < self.cached_layers and not (self.keys_as_values and self.windows[index] is None)

    def inner(self, index: int) -> int:
        """Inner width of the dense feed-forward of layer `index`."""
        return self.intermediate_size * (2 if self.wide_shared_mlp and index >= self.cached_layers else 1)

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], notices: list[str] | None = None) -> "Gemma4Config":
        """Reads a `config.json` of one of `ARCHITECTURES`.

        Args:
          notices: takes what was decided where the file leaves a choice, one sentence each.

        Raises:
          ConfigError: a needed key is missing or malformed, the weights are quantized, or a key is present that this package does
            not implement.
        """
        keys, whole = text_keys(values, COMPOSITES, notices)
        unified = "unified" in "".join((*architectures_of(values), str(values.get("model_type")))).lower()
        assumed = {"window": 1024, "max_position": 262_144} if unified else {"window": 512, "max_position": 131_072}
        fields = gemma_fields(keys, layers=30, vocab=262_144, full_rope=ROPE, **assumed)
        if fields["windows"][-1] is not None:
            fields["windows"] = (*fields["windows"][:-1], None)
            keys.notices.append("layer_types has a window for the last layer, which sees everything in this family")
        fields |= full_heads(keys, fields) | _experts(keys) | _per_layer(keys, absent=0 if unified else 256)
        config = cls(
            **fields,
            shared_layers=keys.integer("num_kv_shared_layers", 0, minimum=0),
            wide_shared_mlp=keys.flag("use_double_wide_mlp"),
            tie_embeddings=tied(keys, whole),
        )
        refuse_rest(keys, whole, _NEUTRAL_VALUES)
        return config


def full_heads(keys: KeyReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Heads of layers without a window: `global_head_dim` and `num_global_key_value_heads` as published, or `per_layer_config`
    as transformers 5 writes it."""
    base = {"num_key_value_heads": fields["num_kv_heads"], "head_dim": fields["head_dim"]}
    shared = keys.flag("attention_k_eq_v")
    kv_heads = keys.integer("num_global_key_value_heads", base["num_key_value_heads"])
    full = {
        "num_key_value_heads": kv_heads if shared else base["num_key_value_heads"],
        "head_dim": keys.integer("global_head_dim", 512),
    }
    listed = KeyReader(f"{keys.subject}, per_layer_config", keys.get("per_layer_config", {})).values
    if listed:
        own = {i: listed.get(str(i), listed.get(i, {})) for i in range(fields["num_layers"])}
        of = {i: KeyReader(f"{keys.subject}, per_layer_config of layer {i}", one).values for i, one in own.items()}
        shapes = {
            kind: [{**base, **of[i]} for i, window in enumerate(fields["windows"]) if (window is None) == kind]
            for kind in (True, False)
        }
        full = shapes[True][0]
        if (
            any(one != full for one in shapes[True])
            or any(one != base for one in shapes[False])
            or set(full) != set(base)
        ):
            raise ConfigError(
                f"{keys.subject}: per_layer_config must give all layers without a window the same num_key_value_heads and head_dim "
                f"and nothing to others, got {shown(listed)}"
            )
        full = {name: KeyReader(f"{keys.subject}, per_layer_config", full).integer(name) for name in base}
    return {
        "full_kv_heads": full["num_key_value_heads"], "full_head_dim": full["head_dim"], "keys_as_values": shared,
    }  # fmt: skip


def _experts(keys: KeyReader) -> dict[str, int]:
    """The fields of the mixture of experts."""
    if not keys.flag("enable_moe_block"):
        return {}
    return {
        "num_experts": keys.integer("num_experts"),
        "experts_per_token": keys.integer("top_k_experts"),
        "moe_intermediate_size": keys.integer("moe_intermediate_size"),
    }


def _per_layer(keys: KeyReader, absent: int) -> dict[str, int]:
    """The fields of embeddings that each layer has of its own."""
    width = keys.integer("hidden_size_per_layer_input", absent, minimum=0)
    rows = keys.integer("vocab_size_per_layer_input", 262_144)
    return {"per_layer_width": width, "per_layer_vocab": rows if width else 0}


def gemma4_traits(config: Gemma4Config) -> LayerTraits:
    """Layers with heads of two shapes, and experts beside dense feed-forwards where there are such."""
    full = config.full_kv_heads, config.full_head_dim
    if not config.num_experts:
        return gemma_traits(config, full_heads=full, normed_values=True)
    mixed: dict[str, Any] = {"feed_forward": "mixed", "experts": expert_traits(config), "summed_together": 2}
    return gemma_traits(config, full_heads=full, normed_values=True, **mixed)


def times(x: Float[Array, "..."], factor: float) -> Float[Array, "..."]:
    """`x * factor` in float32: the factor is not rounded to x's dtype."""
    return (x.astype(jnp.float32) * factor).astype(x.dtype)


class Gemma4Attention(GemmaAttention):
    """Attention that norms queries, keys and values before it hands them on, so that only turning is left to the caller's.

    Its projection has rows of queries, keys and values, without the last where keys are taken for them, and queries alone where the
    keys of another layer are attended to.
    """

    def __init__(self, config: Gemma4Config, index: int, traits: LayerTraits):
        super().__init__(config, index, traits, WideNorm)
        self.scale, (k, h) = 1.0, config.head_shape(index)
        self.index, self.keeps = config.keys_of(index), index < config.cached_layers
        self.reused = any(config.keys_of(i) == index for i in range(config.cached_layers, config.num_layers))
        self.values = config.has_values(index)
        if not self.keeps:
            self.k_norm = None
        if not self.values:
            self.qkv_proj = Linear((config.num_heads + (k if self.keeps else 0)) * h, config.hidden_size)

    @property
    def norms(self) -> tuple[None, None]:
        """None: heads are normed before."""
        return None, None

    def mix(self, projected: Array, rotary: Rotary, attend: Attend, cache: Cache) -> tuple[Array, Cache]:
        """See `Mixer`."""
        n, eps = self.config.num_heads, self.config.norm_eps
        heads = projected.reshape(*projected.shape[:-1], -1, self.config.head_dim)
        assert self.q_norm is not None
        parts = [self.q_norm(heads[..., :n, :])]
        if self.k_norm is not None:
            k, v = jnp.split(heads[..., n:, :], 2, axis=-2) if self.values else (heads[..., n:, :],) * 2
            parts += [self.k_norm(k), unit_norm(v, eps)]
        normed = jnp.concatenate(parts, axis=-2).reshape(*projected.shape[:-1], -1)
        return super().mix(normed, rotary, attend, cache)

    def heads(self, qkv: Array, rotary: Rotary) -> tuple[Array, Array, Array]:
        """Queries and keys, rotated, and values of heads that are normed; see `Attention`."""
        heads = qkv.reshape(*qkv.shape[:-1], -1, self.config.head_dim)
        n, k = self.config.num_heads, self.config.num_kv_heads
        return rotate(heads[..., :n, :], rotary), rotate(heads[..., n : n + k, :], rotary), heads[..., n + k :, :]


class Gemma4Router(nnx.Module):
    """Scores of the experts, in float32, of a token that is normed and scaled; its weights are scaled by expert."""

    def __init__(self, config: Gemma4Config):
        self.taken, self.eps, self.factor = config.experts_per_token, config.norm_eps, config.hidden_size**-0.5
        self.weight = nnx.Param(jnp.zeros((config.num_experts, config.hidden_size)))
        self.scale = nnx.Param(jnp.ones((config.hidden_size,)))
        self.expert_scale = nnx.Param(jnp.ones((config.num_experts,)))

    def __call__(self, x: Float[Array, "T D"]) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
        rows = times(unit_norm(x, self.eps) * self.scale[...], self.factor)
        shares = jax.nn.softmax(dense_scores(rows, self.weight[...]), axis=-1)
        best, experts = jax.lax.top_k(shares, self.taken)
        weights = best / best.sum(axis=-1, keepdims=True)
        return experts, weights * self.expert_scale[...].astype(jnp.float32)[experts]


class Gemma4Mixture(nnx.Module):
    """Experts beside a dense feed-forward, both of the residual stream; what either gives is normed before it is added."""

    def __init__(self, config: Gemma4Config):
        d, eps = config.hidden_size, config.norm_eps
        self.router, self.experts = Gemma4Router(config), Experts(config, activation="gelu_tanh")
        self.input_norm, self.out_norm, self.dense_norm = (WideNorm(d, eps) for _ in range(3))

    def __call__(self, x: Float[Array, "... D"], dense: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Both feed-forwards of the stream x, of which `dense` is what the dense one gives, of ranks each one's part."""
        rows = x.reshape(-1, x.shape[-1])
        routed = self.experts(self.input_norm(rows), *self.router(rows)).reshape(x.shape)
        # One all-reduce for both, which are normed apart.
        dense, routed = reduced_together(dense, routed)
        return self.dense_norm(dense) + self.out_norm(routed)


class LayerInput(nnx.Module):
    """A layer's own embedding of the token, gated by the stream and projected onto it."""

    def __init__(self, config: Gemma4Config):
        d, p = config.hidden_size, config.per_layer_width
        self.gate, self.proj, self.norm = Linear(p, d), Linear(d, p), WideNorm(d, config.norm_eps)

    def __call__(self, x: Float[Array, "... D"], own: Float[Array, "... P"]) -> Float[Array, "... D"]:
        return self.norm(self.proj(jax.nn.gelu(self.gate(x)) * own))


class LayerInputs(nnx.Module):
    """The embeddings that layers have of their own: from a table, and from the embedding that all of them share."""

    def __init__(self, config: Gemma4Config):
        self.shape = config.num_layers, config.per_layer_width
        width = config.num_layers * config.per_layer_width
        self.embed, self.proj = Embedding(config.per_layer_vocab, width), Linear(width, config.hidden_size)
        self.norm = WideNorm(config.per_layer_width, config.norm_eps)

    def __call__(self, ids: Int[Array, "B T"], x: Float[Array, "B T D"]) -> Float[Array, "B T L P"]:
        """Per-layer embeddings of tokens whose shared embedding is x."""
        token = self.embed(ids) * jnp.asarray(self.shape[1] ** 0.5, x.dtype)
        shared = times(self.proj(x), x.shape[-1] ** -0.5)
        token, shared = (rows.reshape(*ids.shape, *self.shape) for rows in (token, shared))
        return times(self.norm(shared) + token, 2**-0.5)


class Gemma4Layer(GemmaLayer):
    """A layer of Gemma 4; `own` is its own embedding of the tokens, where layers have such."""

    def __init__(self, config: Gemma4Config, index: int, traits: LayerTraits):
        mlp = MLP(config.hidden_size, config.inner(index), traits.activation, summed=not config.num_experts)
        super().__init__(config, Gemma4Attention(config, index, traits), mlp, WideNorm)
        self.scalar = nnx.Param(jnp.ones((1,)))
        self.mixture = Gemma4Mixture(config) if config.num_experts else None
        self.beside = LayerInput(config) if config.per_layer_width else None

    def fed(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Feed-forwards of the stream x."""
        dense = super().fed(x)
        return dense if self.mixture is None else self.mixture(x, dense)

    def __call__(
        self, x: Array, rotary: Rotary, attend: Attend, cache: Cache = None, *, own: Array | None = None
    ) -> tuple[Array, Cache]:
        x, cache = super().__call__(x, rotary, attend, cache)
        if self.beside is not None and own is not None:
            x = x + self.beside(x, own)
        return x * self.scalar[...], cache


class Gemma4(GemmaDecoder):
    """A Gemma 4 decoder; see `Decoder` for how it is called."""

    def __init__(self, config: Gemma4Config):
        traits = gemma4_traits(config)
        super().__init__(config, lambda index: Gemma4Layer(config, index, traits), WideNorm)
        self.inputs = LayerInputs(config) if config.per_layer_width else None

    def layers_for(self, ids: Int[Array, "B T"], x: Float[Array, "B T D"]) -> Sequence[Any]:
        """See `Decoder`: each layer with its own embeddings of the tokens."""
        if self.inputs is None:
            return self.layers
        own = self.inputs(ids, x)
        return [functools.partial(layer, own=own[..., i, :]) for i, layer in enumerate(self.layers)]


def gemma4_parameters(config: Gemma4Config) -> tuple[Parameter, ...]:
    """Parameters of a Gemma 4 checkpoint."""
    v, d, p = config.vocab_size, config.hidden_size, config.per_layer_width
    table = [single("embed.weight", "model.embed_tokens.weight", (v, d))]
    if p:
        rows = config.num_layers * p
        table += [
            single("inputs.embed.weight", "model.embed_tokens_per_layer.weight", (config.per_layer_vocab, rows)),
            single("inputs.proj.weight", "model.per_layer_model_projection.weight", (rows, d)),
            single("inputs.norm.weight", "model.per_layer_projection_norm.weight", (p,)),
        ]
    for i in range(config.num_layers):
        table += layer_parameters(config, i, f"layers.{i}.", f"model.layers.{i}.")
    table.append(single("norm.weight", "model.norm.weight", (d,)))
    if not config.tie_embeddings:
        table.append(single("lm_head.weight", "lm_head.weight", (v, d), cut=by_rows((v, v), optional=True)))
    return tuple(table)


def layer_parameters(config: Gemma4Config, index: int, ours: str, theirs: str) -> list[Parameter]:
    """Parameters of one layer, under our prefix and the checkpoint's."""
    d, p = config.hidden_size, config.per_layer_width
    table = norm_parameters(config, ours, theirs, "weight")
    table += _attention_parameters(config, index, f"{ours}attn.", f"{theirs}self_attn.")
    table += mlp_parameters(replace(config, intermediate_size=config.inner(index)), f"{ours}mlp.", f"{theirs}mlp.")
    table.append(single(f"{ours}scalar", f"{theirs}layer_scalar", (1,)))
    if config.num_experts:
        table += _mixture_parameters(config, f"{ours}mixture.", theirs)
    if p:
        table += [
            single(f"{ours}beside.gate.weight", f"{theirs}per_layer_input_gate.weight", (p, d)),
            single(f"{ours}beside.proj.weight", f"{theirs}per_layer_projection.weight", (d, p)),
            single(f"{ours}beside.norm.weight", f"{theirs}post_per_layer_input_norm.weight", (d,)),
        ]
    return table


def _attention_parameters(config: Gemma4Config, index: int, ours: str, theirs: str) -> list[Parameter]:
    """Parameters of one layer's attention."""
    d, n, (k, h) = config.hidden_size, config.num_heads, config.head_shape(index)
    keeps = index < config.cached_layers
    rows = {"q_proj": n} | ({"k_proj": k} if keeps else {}) | ({"v_proj": k} if config.has_values(index) else {})
    heads = tuple(Source(f"{theirs}{name}.weight", (count * h, d)) for name, count in rows.items())
    return [
        Parameter(f"{ours}qkv_proj.weight", heads, cut=by_rows(*((count * h, count) for count in rows.values()))),
        single(f"{ours}o_proj.weight", f"{theirs}o_proj.weight", (d, n * h), cut=by_columns((n * h, n))),
        *(single(f"{ours}{one}.weight", f"{theirs}{one}.weight", (h,)) for one in ("q_norm", "k_norm")[: 1 + keeps]),
    ]


def _mixture_parameters(config: Gemma4Config, ours: str, theirs: str) -> list[Parameter]:
    """Parameters of one layer's experts, which a checkpoint has all in one tensor, and what stands around them."""
    e, d, f = config.num_experts, config.hidden_size, config.moe_intermediate_size
    norms = {
        "input_norm": "pre_feedforward_layernorm_2", "out_norm": "post_feedforward_layernorm_2",
        "dense_norm": "post_feedforward_layernorm_1",
    }  # fmt: skip
    gate_up = Source(f"{theirs}experts.gate_up_proj", (e, 2 * f, d), kept=(e * 2 * f, d))
    down = Source(f"{theirs}experts.down_proj", (e, d, f), kept=(e * d, f))
    return [
        single(f"{ours}router.weight", f"{theirs}router.proj.weight", (e, d)),
        single(f"{ours}router.scale", f"{theirs}router.scale", (d,)),
        single(f"{ours}router.expert_scale", f"{theirs}router.per_expert_scale", (e,)),
        Parameter(f"{ours}experts.gate_up_proj.weight", (gate_up,), cut=by_rows((e * 2 * f, e))),
        Parameter(f"{ours}experts.down_proj.weight", (down,), cut=by_rows((e * d, e))),
        *(single(f"{ours}{own}.weight", f"{theirs}{name}.weight", (d,)) for own, name in norms.items()),
    ]


def gemma4_is_shared(config: Gemma4Config, name: str) -> bool:
    """Whether a tensor is of keys or values of a layer that attends to those of another one; checkpoints may have such."""
    parts = name.split(".")
    if len(parts) < 5 or parts[1] != "layers" or not parts[2].isdigit():
        return False
    return int(parts[2]) >= config.cached_layers and parts[4] in ("k_proj", "v_proj", "k_norm", "v_norm")
