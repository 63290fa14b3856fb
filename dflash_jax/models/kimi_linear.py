"""Kimi-Linear targets: Kimi delta attention beside latent attention that nothing rotates, with experts.

Source: "Kimi Linear", arXiv 2510.26692; transformers' KimiLinear classes, 5.17, whose defaults absent keys mean. Attention is
DeepSeek-V3's, with a part of keys that all heads share, but no position turns it: layers with a state tell the order of tokens.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from dflash_kernels.recurrent.kda import KdaShape
from jaxtyping import Array, Int

from dflash_jax.config import KeyReader, RopeConfig, refuse_quantized, shown
from dflash_jax.errors import ConfigError
from dflash_jax.models.decoder import Decoder, target_parameters
from dflash_jax.models.deepseek import (
    LATENT_VALUES,
    NEUTRAL,
    DeepseekConfig,
    MLAttention,
    attention_keys,
    deepseek_traits,
    latent_parameters,
)
from dflash_jax.models.deepseek_sparse import dense_layers
from dflash_jax.models.kimi_delta import KimiDelta, delta_keys, kda_parameters, kda_traits
from dflash_jax.models.layers import MLP, PreNormLayer, RMSNorm, Rotary, mlp_parameters
from dflash_jax.models.moe import MoE, moe_parameters
from dflash_jax.models.parameters import Parameter, single
from dflash_jax.models.traits import LayerTraits

_NEUTRAL = NEUTRAL | {"rope_parameters", "rope_scaling", "rope_theta"}
_VALUES: dict[str, tuple[Any, ...]] = {
    **{key: said for key, said in LATENT_VALUES.items() if key not in ("layer_types", "num_experts", "num_local_experts")},
    "mla_use_nope": (None, True), "moe_layer_freq": (None, 1), "moe_router_activation_func": (None, "sigmoid"),
    "num_nextn_predict_layers": (None, 0), "topk_method": (None, "noaux_tc"), "use_grouped_topk": (None, True),
}  # fmt: skip
_LINEAR, _FULL = "linear_attention", "full_attention"


@dataclass(frozen=True, kw_only=True)
class KimiLinearConfig(DeepseekConfig):
    """A Kimi-Linear target. Sizes of heads and latents are those of layers with latent attention.

    Attributes:
      full_layers: layers with latent attention; all others keep a state.
      linear_heads, linear_head_dim: of these, see `KdaShape`.
    """

    full_layers: tuple[int, ...]
    linear_heads: int
    linear_head_dim: int

    @property
    def rotations(self) -> tuple[tuple[RopeConfig, int], ...]:
        return ()

    @property
    def kda(self) -> KdaShape:
        """The shape of every layer that keeps a state."""
        return KdaShape(self.linear_heads, self.linear_head_dim)

    @property
    def cached_layers(self) -> int:
        return len(self.full_layers)

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], notices: list[str] | None = None) -> "KimiLinearConfig":
        """Reads a `config.json` of KimiLinearForCausalLM.

        Args:
          notices: takes what was decided where the file leaves a choice, one sentence each.

        Raises:
          ConfigError: a needed key is missing or malformed, the weights are quantized, or a key is present that this package does
            not implement.
        """
        refuse_quantized(values)
        keys = KeyReader("config.json (KimiLinearForCausalLM)", values, notices)
        layers, heads = keys.integer("num_hidden_layers"), keys.integer("num_attention_heads")
        if (kv_heads := keys.integer("num_key_value_heads", heads)) != heads:
            raise ConfigError(
                f"{keys.subject}: num_key_value_heads must be num_attention_heads={heads}, got {kv_heads}"
            )
        if (activation := keys.get("hidden_act", "silu")) != "silu":
            raise ConfigError(f"{keys.subject}: hidden_act must be silu, got {shown(activation)}")
        latent, full = attention_keys(keys), _full_layers(keys, layers)
        config = cls(
            vocab_size=keys.integer("vocab_size"),
            hidden_size=keys.integer("hidden_size"),
            intermediate_size=keys.integer("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=latent["qk_nope_head_dim"] + latent["qk_rope_head_dim"],
            norm_eps=keys.number("rms_norm_eps", 1e-5, positive=True),
            max_position=keys.integer("model_max_length", keys.integer("max_position_embeddings", 1 << 20)),
            attention_bias=keys.flag("attention_bias"),
            windows=(None,) * layers,
            tie_embeddings=keys.flag("tie_word_embeddings"),
            full_layers=full,
            num_dense_layers=dense_layers(keys, layers, keys.integer("first_k_dense_replace", 1, minimum=0)),
            **latent | {"rope_interleaved": False},
            **_experts(keys),
            **delta_keys(keys, full, layers, heads=32, bound=None, first=1),
        )
        keys.refuse_rest(_NEUTRAL, _VALUES)
        return config


def _full_layers(keys: KeyReader, layers: int) -> tuple[int, ...]:
    """Layers with latent attention: as `layer_types` lists them, otherwise as `linear_attn_config` counts them from 1."""
    absent = None
    if keys.get("layer_types") is None:
        listed = keys.get("linear_attn_config", {}) if isinstance(keys.get("linear_attn_config", {}), Mapping) else {}
        counted = listed.get("full_attn_layers")
        if not isinstance(counted, list | tuple):
            raise ConfigError(
                f"{keys.subject}: layer_types or full_attn_layers of linear_attn_config must list which layers attend"
            )
        absent = [_FULL if i + 1 in counted else _LINEAR for i in range(layers)]
    kinds = keys.kinds("layer_types", layers, (_LINEAR, _FULL), absent)
    full = tuple(i for i, kind in enumerate(kinds) if kind == _FULL)
    if not 0 < len(full) < layers:
        raise ConfigError(
            f"{keys.subject}: layers must be of both kinds, as every release has, got {shown(list(kinds))}"
        )
    return full


def _experts(keys: KeyReader) -> dict[str, Any]:
    """The fields of the mixture of experts."""
    experts, taken = keys.integer("num_experts", 256), keys.integer("num_experts_per_token", 8)
    groups, chosen = keys.integer("num_expert_group", 1), keys.integer("topk_group", 1)
    size = experts // groups
    if experts % groups or chosen > groups or taken > chosen * size or size < 2:
        raise ConfigError(
            f"{keys.subject}: num_experts={experts}, num_expert_group={groups}, topk_group={chosen} and "
            f"num_experts_per_token={taken} do not fit: groups must be of equal size, and those taken must hold the experts taken"
        )
    return {
        "num_experts": experts,
        "experts_per_token": taken,
        "num_shared_experts": keys.integer("num_shared_experts", 1),
        "routing": "noaux_tc",
        "num_groups": groups,
        "groups_per_token": chosen,
        "norm_routing_weights": keys.flag("moe_renormalize", default=True),
        "routing_scale": keys.number("routed_scaling_factor", 2.446),
        "moe_intermediate_size": keys.integer("moe_intermediate_size", 1024),
    }


class KimiLinearLayer(PreNormLayer):
    """Pre-norm mixer and feed-forward, each added to the residual stream; the mixer attends or keeps a state."""

    def __init__(self, config: KimiLinearConfig, index: int):
        d, eps = config.hidden_size, config.norm_eps
        self.input_norm, self.post_norm = RMSNorm(d, eps), RMSNorm(d, eps)
        before, attends = sum(full < index for full in config.full_layers), index in config.full_layers
        self.attn: Any = MLAttention(config, before) if attends else None  # by its place among layers with pages
        self.kda: Any = None if attends else KimiDelta(d, config.kda, index - before, eps)
        self.mlp: Any = MLP(d, config.intermediate_size) if index < config.num_dense_layers else MoE(config)

    @property
    def mixer(self) -> Any:
        return self.kda if self.attn is None else self.attn


class KimiLinear(Decoder):
    """A Kimi-Linear decoder; see `Decoder` for how it is called, with a `LatentAttend` that is also a `DeltaAttend`."""

    def __init__(self, config: KimiLinearConfig):
        layers = [KimiLinearLayer(config, i) for i in range(config.num_layers)]
        super().__init__(config, layers, tied=config.tie_embeddings)
        self.pairs = config.qk_rope_head_dim // 2

    def rotary(self, positions: Int[Array, "B T"]) -> Rotary:
        """By nothing: all layers attend by operations that rotate."""
        ones = jnp.ones((*positions.shape, self.pairs), jnp.float32)
        return Rotary(ones, jnp.zeros_like(ones))


def kimi_linear_traits(config: KimiLinearConfig) -> LayerTraits:
    """Layers of two kinds; experts in all but the first ones."""
    return replace(deepseek_traits(config), delta=kda_traits(config.kda))


def kimi_linear_parameters(config: KimiLinearConfig) -> tuple[Parameter, ...]:
    """Parameters of a Kimi-Linear checkpoint, by the released names."""
    d, table = config.hidden_size, list[Parameter]()
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        table.append(single(f"{ours}input_norm.weight", f"{theirs}input_layernorm.weight", (d,)))
        if i in config.full_layers:
            table += latent_parameters(config, f"{ours}attn.", f"{theirs}self_attn.")
        else:
            rates = (1, 1, config.linear_heads, 1)
            table += kda_parameters(d, config.kda, f"{ours}kda.", f"{theirs}self_attn.", rates=rates)
        table.append(single(f"{ours}post_norm.weight", f"{theirs}post_attention_layernorm.weight", (d,)))
        if i < config.num_dense_layers:
            table += mlp_parameters(config, f"{ours}mlp.", f"{theirs}mlp.")
        else:
            names = ("w1", "w3", "w2")
            table += moe_parameters(config, f"{ours}mlp.", f"{theirs}block_sparse_moe.", names=names)
    return target_parameters(config, table, tied=config.tie_embeddings)


# transformers writes a dense feed-forward under the name of the mixture.
_DENSE = re.compile(r"(model\.layers\.\d+\.)block_sparse_moe\.((?:gate|up|down)_proj\.)")


def kimi_linear_canonical(name: str) -> str | None:
    """Checkpoint name as declared above."""
    return _DENSE.sub(r"\1mlp.\2", name)
