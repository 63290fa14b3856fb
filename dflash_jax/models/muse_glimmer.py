"""Muse Glimmer targets: configuration, the Flax module, its parameters and their Hugging Face names.

Three of four layers see a window of keys and rotate their heads, the fourth sees all keys and rotates none. Queries and keys are
normed without weights, queries times a number then, and what attention gives is gated by channel. Layers norm both ends of a
sublayer, zero-centered; embeddings are normed without a weight, and logits scaled before their soft cap. The text model is read
out of the vision-language checkpoint, whose tower is left out. Source: transformers' MuseGlimmer classes, whose defaults absent
keys mean.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from dflash_jax.config import (
    NEUTRAL_KEYS,
    NEUTRAL_VALUES,
    NO_EXPERTS,
    DecoderConfig,
    KeyReader,
    RopeConfig,
    shown,
)
from dflash_jax.errors import ConfigError
from dflash_jax.models.decoder import Decoder
from dflash_jax.models.gemma import FULL, SLIDING, norm_parameters, text_keys
from dflash_jax.models.gemma4 import times
from dflash_jax.models.layers import (
    MLP,
    Attend,
    Attention,
    Cache,
    Rotary,
    WideNorm,
    ZeroCenteredNorm,
    mlp_parameters,
    rotate,
    unit_norm,
)
from dflash_jax.models.parameters import Parameter, Source, single
from dflash_jax.models.traits import LayerTraits, decoder_traits
from dflash_jax.parallel.cut import by_columns, by_rows

TEXT, COMPOSITE = "MuseGlimmerForCausalLM", "MuseGlimmerForConditionalGeneration"
ARCHITECTURES = (TEXT, COMPOSITE)
MODEL_TYPES = ("muse_glimmer_text", "muse_glimmer")
_PATTERN = 4  # layers from one that sees everything to the next, counted from the last one
_BESIDE_TEXT = NEUTRAL_KEYS | {
    "image_token_id", "out_hidden_size", "projector_hidden_act", "projector_hidden_size", "text_config", "video_token_id",
    "vision_config",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MuseGlimmerConfig(DecoderConfig):
    """A Muse Glimmer target.

    Attributes:
      turned: of each layer, whether its heads rotate.
      out_norm_eps: epsilon of the norms of what comes out of sublayers.
      query_factor: on normed queries, beside the scale of scores.
      logit_scale, logit_softcap: logits are `c * tanh(scale * product / c)`.
    """

    turned: tuple[bool, ...]
    out_norm_eps: float = 1e-8
    query_factor: float = 3.87
    logit_scale: float = 1.0
    logit_softcap: float = 20.0
    tie_embeddings: bool = False

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], notices: list[str] | None = None) -> "MuseGlimmerConfig":
        """Reads a `config.json` of one of `ARCHITECTURES`.

        Args:
          notices: takes what was decided where the file leaves a choice, one sentence each.

        Raises:
          ConfigError: a needed key is malformed, the weights are quantized, or a key is present that this package does not
            implement.
        """
        keys, whole = text_keys(values, (COMPOSITE,), notices)
        tied = keys.flag("tie_word_embeddings")
        config = cls(
            **_decoder(keys),
            out_norm_eps=keys.number("post_norm_eps", 1e-8, positive=True),
            query_factor=keys.number("qk_scale_factor", 3.87, positive=True),
            logit_scale=keys.number("output_multiplier", 0.19611613513818404, positive=True),
            logit_softcap=keys.number("final_logit_softcapping", 20.0, positive=True),
            tie_embeddings=tied,
        )
        keys.refuse_rest(NEUTRAL_KEYS, {**NEUTRAL_VALUES, **NO_EXPERTS, "attention_bias": (None, False)})
        if whole is not None:
            twice = {key: (keys.values.get(key),) for key in keys.read} | {"tie_word_embeddings": (None, tied)}
            whole.refuse_rest(_BESIDE_TEXT, {**NEUTRAL_VALUES, **twice})
        return config


def _decoder(keys: KeyReader) -> dict[str, Any]:
    """The fields of `DecoderConfig`, and which layers rotate."""
    layers, heads = keys.integer("num_hidden_layers", 52), keys.integer("num_attention_heads", 32)
    kv_heads, head_dim = keys.integer("num_key_value_heads", 2), keys.integer("head_dim", 128)
    if heads % kv_heads or head_dim % 2:
        raise ConfigError(
            f"{keys.subject}: num_attention_heads={heads} must be a multiple of num_key_value_heads={kv_heads}, and heads of an "
            f"even size, got {head_dim}"
        )
    for name in ("hidden_activation", "hidden_act"):
        if (found := keys.get(name, "silu")) != "silu":
            raise ConfigError(f"{keys.subject}: {name} must be silu, got {shown(found)}")
    max_position = keys.integer("max_position_embeddings", 131_072)
    rope = RopeConfig.from_keys(keys, max_position)
    sees_all = [(layers - 1 - i) % _PATTERN == 0 for i in range(layers)]
    types = keys.kinds("layer_types", layers, (SLIDING, FULL), [FULL if one else SLIDING for one in sees_all])
    thetas = keys.get("layer_rope_theta", [0 if one else rope.theta for one in sees_all])
    if not isinstance(thetas, list) or len(thetas) != layers or not all(theta in (0, rope.theta) for theta in thetas):
        raise ConfigError(
            f"{keys.subject}: layer_rope_theta must be 0 or rope_theta={rope.theta} for each of {layers} layers, got "
            f"{shown(thetas)}"
        )
    window = keys.integer("sliding_window", 2048)
    return {
        "vocab_size": keys.integer("vocab_size", 202_048),
        "hidden_size": keys.integer("hidden_size", 6656),
        "intermediate_size": keys.integer("intermediate_size", 19_968),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "norm_eps": keys.number("rms_norm_eps", 1e-5, positive=True),
        "rope": rope,
        "max_position": rope.longest(max_position),
        "windows": tuple(window if kind == SLIDING else None for kind in types),
        "turned": tuple(theta != 0 for theta in thetas),
    }


class MuseGlimmerAttention(Attention):
    """Attention that norms queries and keys before it hands them on, so that only turning is left to the caller's, and gates what
    it gives. The projection's rows are those of queries, keys, values and gates."""

    def __init__(self, config: MuseGlimmerConfig, index: int, traits: LayerTraits):
        super().__init__(config, index, traits, beside=config.num_heads)
        self.turned, self.factor = config.turned[index], config.query_factor

    def mix(self, projected: Array, rotary: Rotary, attend: Attend, cache: Cache) -> tuple[Array, Cache]:
        """See `Mixer`."""
        n, k, eps = self.config.num_heads, self.config.num_kv_heads, self.config.norm_eps
        heads = projected.reshape(*projected.shape[:-1], -1, self.config.head_dim)
        q, keys, rest = jnp.split(heads, [n, n + k], axis=-2)
        parts = [times(unit_norm(q, eps), self.factor), unit_norm(keys, eps), rest]
        normed = jnp.concatenate(parts, axis=-2).reshape(projected.shape)
        if not self.turned:
            rotary = Rotary(jnp.ones_like(rotary.cos), jnp.zeros_like(rotary.sin))
        out, cache = attend(self, normed, rotary, cache)
        return out * jax.nn.sigmoid(rest[..., k:, :]), cache

    def heads(self, qkv: Array, rotary: Rotary) -> tuple[Array, Array, Array]:
        """Queries and keys, rotated, and values of heads that are normed; see `Attention`."""
        n, k = self.config.num_heads, self.config.num_kv_heads
        heads = qkv.reshape(*qkv.shape[:-1], -1, self.config.head_dim)
        q, keys, values, _ = jnp.split(heads, [n, n + k, n + 2 * k], axis=-2)
        return rotate(q, rotary), rotate(keys, rotary), values


class MuseGlimmerLayer(nnx.Module):
    """Attention and feed-forward, normed before and after, each added to the residual stream."""

    def __init__(self, config: MuseGlimmerConfig, index: int, traits: LayerTraits):
        d = config.hidden_size
        self.input_norm, self.post_norm = (ZeroCenteredNorm(d, config.norm_eps) for _ in range(2))
        self.attn_out_norm, self.mlp_out_norm = (ZeroCenteredNorm(d, config.out_norm_eps) for _ in range(2))
        self.attn, self.mlp = MuseGlimmerAttention(config, index, traits), MLP(d, config.intermediate_size)

    @property
    def mixer(self) -> MuseGlimmerAttention:
        return self.attn

    def __call__(self, x: Array, rotary: Rotary, attend: Attend, cache: Cache = None) -> tuple[Array, Cache]:
        attended, cache = self.attn(self.input_norm(x), rotary, attend, cache)
        x = x + self.attn_out_norm(attended)
        return x + self.mlp_out_norm(self.mlp(self.post_norm(x))), cache


class MuseGlimmer(Decoder):
    """A Muse Glimmer decoder; see `Decoder` for how it is called."""

    def __init__(self, config: MuseGlimmerConfig):
        traits = muse_glimmer_traits(config)
        super().__init__(
            config, [MuseGlimmerLayer(config, i, traits) for i in range(config.num_layers)], tied=config.tie_embeddings,
            norm=WideNorm(config.hidden_size, config.norm_eps), logit_softcap=config.logit_softcap, logit_scale=config.logit_scale,
            normed_embeddings=True,
        )  # fmt: skip


def muse_glimmer_traits(config: MuseGlimmerConfig) -> LayerTraits:
    """Layers that norm both ends of sublayers, zero-centered, and heads before attention is asked."""
    return decoder_traits(config, qk_norm=False, gated=True, zero_centered=True, normed_out=True)


def muse_glimmer_parameters(config: MuseGlimmerConfig) -> tuple[Parameter, ...]:
    """Parameters of a Muse Glimmer checkpoint."""
    v, d, n, k, h = config.vocab_size, config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    rows = {"q_proj": n, "k_proj": k, "v_proj": k, "gate_proj": n}
    table = [single("embed.weight", "model.embed_tokens.weight", (v, d))]
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        heads = tuple(Source(f"{theirs}self_attn.{name}.weight", (count * h, d)) for name, count in rows.items())
        table += norm_parameters(config, ours, theirs, "offset")
        table += [
            Parameter(
                f"{ours}attn.qkv_proj.weight", heads, cut=by_rows(*((count * h, count) for count in rows.values()))
            ),
            single(
                f"{ours}attn.o_proj.weight", f"{theirs}self_attn.o_proj.weight", (d, n * h), cut=by_columns((n * h, n))
            ),
        ]
        table += mlp_parameters(config, f"{ours}mlp.", f"{theirs}mlp.")
    table.append(single("norm.weight", "model.norm.weight", (d,)))
    if not config.tie_embeddings:
        table.append(single("lm_head.weight", "lm_head.weight", (v, d), cut=by_rows((v, v), optional=True)))
    return tuple(table)


def muse_glimmer_canonical(name: str) -> str | None:
    """Checkpoint name as declared, as of a text model by itself; None for the tower and buffers computed here."""
    name = name.removeprefix("model.")
    if name.startswith(("vision_", "vision.")) or "rotary_emb." in name:
        return None
    return name if name == "lm_head.weight" else f"model.{name.removeprefix('language_model.')}"
