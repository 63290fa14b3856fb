"""Mellum 2 targets: configuration, the Flax module, its parameters and their Hugging Face names.

Qwen3's layers with experts, of which some see a window of keys and rotate heads their own way. Source: transformers' Mellum
classes, whose defaults absent keys mean.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxtyping import Array

from dflash_jax.config import HEAD_NORMS, NEUTRAL_KEYS, NEUTRAL_VALUES, KeyReader, RopeConfig, decoder_fields
from dflash_jax.errors import ConfigError
from dflash_jax.models.gemma import FULL, SLIDING
from dflash_jax.models.layers import (
    Attend,
    Attention,
    Cache,
    DecoderLayer,
    Rotary,
)
from dflash_jax.models.moe import MoE
from dflash_jax.models.qwen3_moe import Qwen3MoeConfig, qwen3_moe_canonical, qwen3_moe_parameters, qwen3_moe_traits
from dflash_jax.models.traits import LayerTraits
from dflash_jax.models.two_rotations import TwoRotationsDecoder, own_columns, own_rotation

_THETAS = {SLIDING: 1e4, FULL: 5e5}

mellum_canonical, mellum_parameters, mellum_traits = qwen3_moe_canonical, qwen3_moe_parameters, qwen3_moe_traits


@dataclass(frozen=True, kw_only=True)
class MellumConfig(Qwen3MoeConfig):
    """A Mellum target; `rope` is the rotation of layers without a window.

    Attributes:
      local_rope: the rotation of layers with one.
    """

    local_rope: RopeConfig

    @property
    def rotations(self) -> tuple[tuple[RopeConfig, int], ...]:
        """The rotation of layers with a window and that of layers without, and the size of the heads that turn by it."""
        return (self.local_rope, self.head_dim), (self.rope, self.head_dim)

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], notices: list[str] | None = None) -> "MellumConfig":
        """Reads a `config.json` of MellumForCausalLM.

        Args:
          notices: takes what was decided where the file leaves a choice, one sentence each.

        Raises:
          ConfigError: a needed key is missing or malformed, the weights are quantized, or a key is present that this package does
            not implement.
        """
        subject = "config.json (Mellum)"
        given = KeyReader(f"{subject}, rope_parameters", values.get("rope_parameters") or {}, notices)
        turns = {
            kind: dict(KeyReader(subject, given.get(kind, {"rope_theta": _THETAS[kind]})).values) for kind in _THETAS
        }
        given.refuse_rest((), {"rope_theta": (None,), "rope_type": (None, "default")})
        keys = KeyReader(subject, {**values, "rope_parameters": turns[FULL]}, notices)
        fields: dict[str, Any] = decoder_fields(keys)
        local = KeyReader(f"{subject}, {SLIDING}", {"rope_parameters": turns[SLIDING]}, notices)
        layers, experts = fields["num_layers"], keys.integer("num_experts", keys.integer("num_local_experts", 64))
        taken = keys.integer("num_experts_per_tok", 8)
        if taken > experts:
            raise ConfigError(f"{keys.subject}: num_experts_per_tok={taken} is more than num_experts={experts}")
        config = cls(
            **fields,
            local_rope=RopeConfig.from_keys(local, fields["max_position"], pairs=True),
            num_experts=experts,
            experts_per_token=taken,
            moe_intermediate_size=keys.integer("moe_intermediate_size", 896),
            norm_routing_weights=keys.flag("norm_topk_prob", default=True),
            dense_layers=_dense_layers(keys, layers),
            tie_embeddings=keys.flag("tie_word_embeddings"),
        )
        keys.refuse_rest(NEUTRAL_KEYS, {**NEUTRAL_VALUES, **HEAD_NORMS})
        return config


def _dense_layers(keys: KeyReader, layers: int) -> tuple[int, ...]:
    """Layers with a plain feed-forward, as `mlp_layer_types` lists them."""
    kinds = keys.kinds("mlp_layer_types", layers, ("dense", "sparse"), ["sparse"] * layers)
    return tuple(i for i, kind in enumerate(kinds) if kind == "dense")


class MellumAttention(Attention):
    """Attention that turns heads by one of two rotations; see `models.two_rotations`."""

    def __init__(self, config: MellumConfig, index: int, traits: LayerTraits):
        super().__init__(config, index, traits)
        self.turned = own_columns(config.rotations, config.windows[index])

    def mix(self, projected: Array, rotary: Rotary, attend: Attend, cache: Cache) -> tuple[Array, Cache]:
        """See `Mixer`."""
        return super().mix(projected, own_rotation(rotary, self.turned), attend, cache)

    def mix_rows(
        self, x: Array, rotary: Rotary, attend: Attend, cache: Cache, added: Any = None
    ) -> tuple[Array, Array, Cache] | None:
        """See `Attention`."""
        return super().mix_rows(x, own_rotation(rotary, self.turned), attend, cache, added)

    def mix_token(
        self, x: Array, rotary: Rotary, attend: Attend, cache: Cache, added: Any, exchange: Callable[[int], Any]
    ) -> tuple[Array, Array, Cache] | None:
        """See `Attention`."""
        return super().mix_token(x, own_rotation(rotary, self.turned), attend, cache, added, exchange)


class Mellum(TwoRotationsDecoder):
    """A Mellum decoder; see `Decoder` for how it is called."""

    def __init__(self, config: MellumConfig):
        traits, layers = mellum_traits(config), []
        for i in range(config.num_layers):
            layer = DecoderLayer(config, i, traits, feed_forward=None if i in config.dense_layers else MoE(config))
            layer.attn = MellumAttention(config, i, traits)
            layers.append(layer)
        super().__init__(config, layers, tied=config.tie_embeddings)
