"""Layers of Laguna in a drafter: heads gated by softplus, and a context that is normed twice more than v1's.

Every tapped feature is normed by itself before the projection of all of them, and what that gives once more by every layer's input
norm before keys and values are made of it, as a slot's own are. All layers have as many heads and one rotation.
Source: poolside's drafters (Laguna-S-2.1-DFlash) as vLLM (`laguna_dflash.py`) and SGLang (`DFlashLagunaForCausalLM`) read them.
"""

from collections.abc import Collection
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from dflash_jax.config import DecoderConfig, KeyReader, architectures_of, shown
from dflash_jax.errors import ConfigError
from dflash_jax.models.laguna import GatedAttention, gated_parameters, read_gating
from dflash_jax.models.layers import DecoderLayer, mlp_parameters, unit_norm
from dflash_jax.models.parameters import Parameter, Source, single
from dflash_jax.models.traits import LayerTraits, decoder_traits

ARCHITECTURE, UNGATED = "DFlashLagunaForCausalLM", "disabled"
_NORM = "aux_hidden_norms.0.weight"


def has_laguna_layers(keys: KeyReader, names: Collection[str]) -> bool:
    """Whether a drafter's layers are Laguna's: its tensors tell, or where none are given the name of its architecture.

    Raises:
      ConfigError: the name promises them, and the tensors are of other layers.
    """
    named = ARCHITECTURE in architectures_of(keys.values)
    if not any(name.startswith("layers.") for name in names):
        return named
    if named and _NORM not in names:
        raise ConfigError(
            f"{keys.subject} names {ARCHITECTURE}, but there is no {_NORM}; name DFlashDraftModel for layers of Qwen3, or take the "
            "tensors from the drafter's training run"
        )
    return _NORM in names


def laguna_draft_fields(keys: KeyReader, fields: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The fields of `DFlashConfig` that describe layers, of those of Qwen3's.

    Raises:
      ConfigError: a key is malformed, or layers differ in heads, which no published drafter's do.
    """
    heads, layers = fields["num_heads"], fields["num_layers"]
    given = keys.get("num_attention_heads_per_layer", [heads] * layers)
    if given != [heads] * layers or fields["attention_bias"]:
        raise ConfigError(
            f"{keys.subject}: num_attention_heads_per_layer must be {heads} for each of {layers} layers of a drafter, and "
            f"attention_bias false, got {shown(given)} and {fields['attention_bias']}"
        )
    joined = any(name.endswith(".self_attn.qkv_proj.weight") for name in names)
    return fields | {"layer_kind": "laguna", "gating": read_gating(keys) or UNGATED, "joined_rows": joined}


class FeatureNorms(nnx.Module):
    """A norm of each tapped feature; the weights lie side by side, as features do."""

    def __init__(self, features: int, dim: int, eps: float):
        self.weight = nnx.Param(jnp.ones((features * dim,)))
        self.features, self.eps = features, eps

    def __call__(self, features: Float[Array, "... nD"]) -> Float[Array, "... nD"]:
        apart = features.reshape(*features.shape[:-1], self.features, -1)
        normed = unit_norm(apart, self.eps) * self.weight[...].reshape(self.features, -1)
        return normed.reshape(features.shape)


def laguna_draft_traits(config: DecoderConfig) -> LayerTraits:
    """Layers with gated heads."""
    return decoder_traits(config, uneven_heads=True)


def laguna_draft_layers(config: DecoderConfig, gating: str, causal: tuple[bool, ...]) -> list[DecoderLayer]:
    """The layers; `causal`: of each, within a block."""
    traits, layers = laguna_draft_traits(config), []
    for i, one in enumerate(causal):
        layer = DecoderLayer(config, i, traits, causal=one)
        layer.attn = GatedAttention(config, i, traits, gating=_gates(gating), causal=one)
        layers.append(layer)
    return layers


def laguna_draft_parameters(
    config: DecoderConfig, features: int, width: int, gating: str, *, joined: bool
) -> list[Parameter]:
    """Parameters of all layers, and of the norms of so many features of this width."""
    d, sources = config.hidden_size, tuple(Source(f"aux_hidden_norms.{i}.weight", (width,)) for i in range(features))
    table = [Parameter("feature_norms.weight", sources)]
    for i in range(config.num_layers):
        at = f"layers.{i}."
        table += [
            single(f"{at}input_norm.weight", f"{at}input_layernorm.weight", (d,)),
            *gated_parameters(config, f"{at}attn.", f"{at}self_attn.", _gates(gating), joined=joined),
            single(f"{at}post_norm.weight", f"{at}post_attention_layernorm.weight", (d,)),
            *mlp_parameters(config, f"{at}mlp.", f"{at}mlp."),
        ]
    return table


def _gates(gating: str) -> str | None:
    return None if gating == UNGATED else gating
