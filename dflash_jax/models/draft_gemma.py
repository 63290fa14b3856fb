"""Layers of Gemma 4 in a drafter: DeepSpec's drafters of Gemma 4 targets, v1 and DSpark.

Each layer is one of `models.gemma4` that sees everything, with that family's rotation of such layers. The context's keys and values
are made as a slot's own: keys are normed with the layer's weight and turned, values are normed without one, and where the file says
that keys are taken for values both come from one projection. All slots of a block see one another.
Source: DeepSpec's Gemma4DSparkModel (deepseek-ai/DeepSpec, deepspec/modeling/dspark/gemma4); vLLM reads its files alike (pull
request 47216).
"""

from collections.abc import Collection, Mapping
from typing import Any

from dflash_jax.config import DecoderConfig, KeyReader, refuse_quantized, shown
from dflash_jax.errors import ConfigError
from dflash_jax.models.gemma import NEUTRAL_OF_TEXT, gemma_fields
from dflash_jax.models.gemma4 import ROPE, Gemma4Config, Gemma4Layer, full_heads, gemma4_traits, layer_parameters
from dflash_jax.models.layers import rope_frequencies
from dflash_jax.models.parameters import Parameter

# What a file copies from its target's and a dense layer that sees everything has no use for.
NEUTRAL_OF_GEMMA4: Mapping[str, tuple[Any, ...]] = {
    **NEUTRAL_OF_TEXT, "enable_moe_block": (None, False), "hidden_size_per_layer_input": (None, 0),
    "num_kv_shared_layers": (None, 0), "top_k_experts": (None, 0), "use_double_wide_mlp": (None, False),
}  # fmt: skip
NEUTRAL_BESIDE_GEMMA4 = ("vocab_size_per_layer_input",)
_TENSORS = ("pre_feedforward_layernorm.weight", "layer_scalar")


def has_gemma4_layers(keys: KeyReader, names: Collection[str]) -> bool:
    """Whether a drafter's layers are Gemma 4's: its tensors tell, or where none are given the size of heads that see everything.

    Raises:
      ConfigError: layers have a norm after each sublayer, but no number on their output, as Gemma 3's: no trainer of such is known,
        so that nobody says how heads are scaled and values normed.
    """
    if not any(name.startswith("layers.") for name in names):
        return keys.values.get("global_head_dim") is not None
    normed, scaled = (f"layers.0.{name}" in names for name in _TENSORS)
    if normed != scaled:
        there, lacking = _TENSORS if normed else reversed(_TENSORS)
        raise ConfigError(
            f"{keys.subject}: the drafter's layers have {there} but no {lacking}; expected both, as Gemma 4's layers have them, or "
            "neither, as Qwen3's. Of drafters with layers of another family it is not known how they are computed"
        )
    return normed


def gemma4_draft_fields(keys: KeyReader) -> dict[str, Any]:
    """The fields of `DFlashConfig` that describe layers, of a file with the keys of Gemma 4's text model.

    Raises:
      ConfigError: a key is malformed, or some layer has a window: DeepSpec's trainer gives none, its model reads no `layer_types`,
        and engines that do differ in what such a layer's heads and causality are.
    """
    refuse_quantized(keys.values)
    fields = gemma_fields(keys, layers=30, vocab=262_144, window=512, max_position=131_072, full_rope=ROPE)
    if any(window is not None for window in fields["windows"]):
        raise ConfigError(
            f"{keys.subject}: layer_types must be full_attention for every layer of a drafter with layers of Gemma 4, got "
            f"{shown(keys.get('layer_types'))}: of layers with a window engines read heads and causality in different ways"
        )
    full = full_heads(keys, fields)
    shape = {"num_kv_heads": full["full_kv_heads"], "head_dim": full["full_head_dim"]}
    for name in ("local_rope", "logit_softcap"):
        del fields[name]
    return fields | shape | {"layer_kind": "gemma4", "keys_as_values": full["keys_as_values"]}


def gemma4_of(config: DecoderConfig, *, keys_as_values: bool) -> Gemma4Config:
    """A Gemma 4 decoder with a drafter's layers."""
    return Gemma4Config(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
        num_layers=config.num_layers, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim,
        norm_eps=config.norm_eps, rope=config.rope, local_rope=config.rope, max_position=config.max_position,
        windows=(None,) * config.num_layers, full_kv_heads=config.num_kv_heads, full_head_dim=config.head_dim,
        keys_as_values=keys_as_values,
    )  # fmt: skip


def gemma4_draft_layers(config: Gemma4Config, causal: tuple[bool, ...]) -> list[Gemma4Layer]:
    """The layers of `gemma4_of`, which are called with one rotation, the drafter's; `causal`: of each, within a block."""
    turned = rope_frequencies(config.rope, config.full_head_dim)[0].size
    layers = [Gemma4Layer(config, i, gemma4_traits(config)) for i in range(config.num_layers)]
    for layer, one in zip(layers, causal, strict=True):
        layer.attn.causal, layer.attn.turned = one, (0, turned)
    return layers


def gemma4_draft_parameters(config: Gemma4Config) -> list[Parameter]:
    """Parameters of all layers."""
    return [
        one for i in range(config.num_layers) for one in layer_parameters(config, i, f"layers.{i}.", f"layers.{i}.")
    ]
