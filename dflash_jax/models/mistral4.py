"""Mistral Small 4 targets: configuration, the Flax module, its parameters and their Hugging Face names.

Latent attention as DeepSeek-V3's, whose queries grow with the logarithm of their position beyond the original length, and experts
chosen by a softmax whose best shares are made to sum to 1. The text model is read by itself and out of a vision-language
checkpoint. Source: transformers' Mistral4 classes, whose defaults absent keys mean.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from dflash_jax.config import KeyReader, architectures_of, refuse_quantized, shown
from dflash_jax.errors import ConfigError
from dflash_jax.models.decoder import Decoder
from dflash_jax.models.deepseek import (
    LATENT_VALUES,
    NEUTRAL,
    DeepseekConfig,
    DeepseekLayer,
    MLAttention,
    attention_keys,
    decoder_keys,
    deepseek_parameters,
    deepseek_traits,
)
from dflash_jax.models.gemma import gemma_canonical
from dflash_jax.models.layers import Cache, LatentAttend, Rotary, rotary_tables
from dflash_jax.models.parameters import Parameter, Source

TEXT, COMPOSITE = "Mistral4ForCausalLM", "Mistral3ForConditionalGeneration"
ARCHITECTURES = (TEXT, COMPOSITE)
_BESIDE_TEXT = NEUTRAL | {
    "image_token_index", "multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size", "text_config",
    "vision_config", "vision_feature_layer",
}  # fmt: skip
_ROPE: Mapping[str, Any] = {
    "type": "yarn", "rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 8192, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip

mistral4_canonical, mistral4_traits = gemma_canonical, deepseek_traits


@dataclass(frozen=True, kw_only=True)
class Mistral4Config(DeepseekConfig):
    """A Mistral Small 4 target.

    Attributes:
      query_growth: a query at position p is `1 + query_growth * log(1 + p // original length)` times as large.
      experts_in_one: whether a checkpoint has all experts of a layer in one tensor.
    """

    query_growth: float = 0.0
    experts_in_one: bool = False

    @classmethod
    def from_hf(  # pyright: ignore[reportIncompatibleMethodOverride] (the registry gives names where a family reads them)
        cls, values: Mapping[str, Any], tensor_names: Collection[str] = (), notices: list[str] | None = None
    ) -> "Mistral4Config":
        """Reads a `config.json` of one of `ARCHITECTURES`.

        Args:
          tensor_names: canonical ones of the checkpoint, which tell how experts are stored.
          notices: takes what was decided where the file leaves a choice, one sentence each.

        Raises:
          ConfigError: a needed key is missing or malformed, the weights are quantized, or a key is present that this package does
            not implement.
        """
        refuse_quantized(values)
        whole = None
        if COMPOSITE in architectures_of(values):
            whole = KeyReader("config.json (beside text_config)", values)
            values = KeyReader("config.json, text_config", whole.get("text_config", {})).values
            if values.get("model_type") != "mistral4":
                raise ConfigError(
                    f"{COMPOSITE}: text_config's model_type must be mistral4, got {shown(values.get('model_type'))}: of other "
                    "text models give the checkpoint of the text model alone"
                )
            refuse_quantized(values)
        rope, growth = _rope(values)
        keys = KeyReader("config.json (Mistral4)", {**values, "rope_parameters": rope}, notices)
        config = cls(
            **decoder_keys(keys), **attention_keys(keys), **_experts(keys), query_growth=growth,
            experts_in_one=any(name.endswith(".experts.gate_up_proj") for name in tensor_names),
        )  # fmt: skip
        keys.refuse_rest(NEUTRAL, LATENT_VALUES)
        if whole is not None:
            twice = {key: (values.get(key),) for key in keys.read} | {
                "tie_word_embeddings": (None, config.tie_embeddings)
            }
            whole.refuse_rest(_BESIDE_TEXT, {**LATENT_VALUES, **twice})
        return config


def _rope(values: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
    """The rotation as `decoder_keys` reads it, of the part of a head that turns, and how queries grow."""
    given = KeyReader("config.json (Mistral4), rope_parameters", values.get("rope_parameters") or _ROPE)
    growth, partial = given.number("llama_4_scaling_beta", 0.0), given.get("partial_rotary_factor")
    turned, plain = (int(values.get(f"qk_{name}_head_dim") or 64) for name in ("rope", "nope"))
    if partial is not None and partial != turned / (turned + plain):
        raise ConfigError(
            f"{given.subject}: partial_rotary_factor must be {turned / (turned + plain)}, the part of a head that turns, got "
            f"{shown(partial)}"
        )
    own = ("llama_4_scaling_beta", "max_position_embeddings", "partial_rotary_factor")
    return {key: value for key, value in given.values.items() if key not in own}, growth


def _experts(keys: KeyReader) -> dict[str, Any]:
    """The fields of the mixture of experts, which has one group."""
    experts, taken = keys.integer("n_routed_experts", 128), keys.integer("num_experts_per_tok", 4)
    groups = keys.integer("n_group", 1), keys.integer("topk_group", 1)
    if groups != (1, 1) or taken > experts:
        raise ConfigError(
            f"{keys.subject}: n_group and topk_group must be 1, as the release has them, and num_experts_per_tok={taken} at most "
            f"n_routed_experts={experts}, got {groups[0]} and {groups[1]}"
        )
    return {
        "num_experts": experts,
        "experts_per_token": taken,
        "num_shared_experts": keys.integer("n_shared_experts", 1),
        "routing": "greedy",
        "num_groups": 1,
        "groups_per_token": 1,
        "norm_routing_weights": keys.flag("norm_topk_prob", default=True),
        "routing_scale": keys.number("routed_scaling_factor", 1.0),
        "num_dense_layers": keys.integer("first_k_dense_replace", 0, minimum=0),
        "moe_intermediate_size": keys.integer("moe_intermediate_size", 2048),
    }


class Mistral4Attention(MLAttention):
    """Latent attention whose queries are multiplied by a factor of their position, the last column of its rotation."""

    def __call__(self, x: Array, rotary: Rotary, attend: LatentAttend, cache: Cache = None) -> tuple[Array, Cache]:
        queries, row = self.project(x)
        grown = queries * rotary.cos[..., -1:, None].astype(x.dtype)
        turned = Rotary(*(side[..., :-1] for side in rotary))
        out, cache = attend.latent(self, grown, row, turned, cache)
        return self.o_proj(out.reshape(*out.shape[:-2], -1)), cache


class Mistral4(Decoder):
    """A Mistral Small 4 decoder; see `Decoder` for how it is called, with a `LatentAttend`."""

    def __init__(self, config: Mistral4Config):
        layers = [DeepseekLayer(config, i, Mistral4Attention) for i in range(config.num_layers)]
        self.rotary_dim, self.growth = config.qk_rope_head_dim, config.query_growth
        super().__init__(config, layers, tied=config.tie_embeddings)

    def rotary(self, positions: Int[Array, "B T"]) -> Rotary:
        """The rotation at `positions`, and in a last column of both sides the factor on queries there."""
        rope = self.config.rope
        turned = rotary_tables(positions, rope, self.rotary_dim)
        reached = (positions // rope.original_max_position).astype(jnp.float32)
        factor = 1 + self.growth * jnp.log(1 + reached)[..., None]
        return Rotary(*(jnp.concatenate([side, factor.astype(side.dtype)], axis=-1) for side in turned))


def mistral4_parameters(config: Mistral4Config) -> tuple[Parameter, ...]:
    """Parameters of a Mistral Small 4 checkpoint, which has experts one by one or all of a layer in one tensor."""
    table = deepseek_parameters(config)
    if not config.experts_in_one:
        return table
    e, d, f = config.num_experts, config.hidden_size, config.moe_intermediate_size
    shapes = {"gate_up_proj": (e, 2 * f, d), "down_proj": (e, d, f)}

    def whole(one: Parameter) -> Parameter:
        layer, _, kind = one.name.removesuffix(".weight").rpartition(".mlp.experts.")
        if not layer:
            return one
        source = Source(f"model.{layer}.mlp.experts.{kind}", shapes[kind], kept=one.shape)
        return replace(one, sources=(source,))

    return tuple(map(whole, table))
