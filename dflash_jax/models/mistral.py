"""Mistral targets: configuration, the Flax module, its parameters and their Hugging Face names.

A layer is that of Qwen3 without the norm of queries and keys; either all layers have a window or none. Source: "Mistral 7B", arXiv
2310.06825, section 2. Absent keys mean what transformers' MistralConfig takes for them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_jax.config import (
    NEUTRAL_KEYS,
    NEUTRAL_VALUES,
    NO_EXPERTS,
    NO_HEAD_NORMS,
    DecoderConfig,
    KeyReader,
    decoder_fields,
)
from dflash_jax.errors import ConfigError
from dflash_jax.models.decoder import Decoder, target_parameters
from dflash_jax.models.layers import DecoderLayer, decoder_parameters
from dflash_jax.models.parameters import Parameter
from dflash_jax.models.qwen3 import qwen3_canonical
from dflash_jax.models.traits import LayerTraits, decoder_traits

# `use_sliding_window` says nothing in transformers, and switches windows off in vLLM: where it says the same, it may stand.
_NEUTRAL_VALUES = {
    **NEUTRAL_VALUES, **NO_EXPERTS, **NO_HEAD_NORMS, "layer_types": (None,), "use_sliding_window": (None, True),
}  # fmt: skip

mistral_canonical = qwen3_canonical


@dataclass(frozen=True, kw_only=True)
class MistralConfig(DecoderConfig):
    """A Mistral target."""

    tie_embeddings: bool = False

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], notices: list[str] | None = None) -> "MistralConfig":
        """Reads a `config.json` of MistralForCausalLM.

        Args:
          notices: takes what was decided where the file leaves a choice, one sentence each.

        Raises:
          ConfigError: a needed key is missing or malformed, or a key is present that this package does not implement.
        """
        keys = KeyReader("config.json (Mistral)", values, notices)
        config = cls(
            **decoder_fields(keys, head_dim=None, windows=_windows), tie_embeddings=keys.flag("tie_word_embeddings")
        )
        if config.attention_bias:
            raise ConfigError(f"{keys.subject}: attention_bias must be false: no projection has a bias here")
        keys.refuse_rest(NEUTRAL_KEYS, _NEUTRAL_VALUES)
        return config


def _windows(keys: KeyReader, layers: int) -> tuple[int | None, ...]:
    """An absent window is the first release's, an explicit null means none."""
    if "sliding_window" in keys.values and keys.get("sliding_window") is None:
        return (None,) * layers
    return (keys.integer("sliding_window", 4096),) * layers


def mistral_traits(config: MistralConfig) -> LayerTraits:
    """Heads that are not normed."""
    return decoder_traits(config, qk_norm=False)


class Mistral(Decoder):
    """A Mistral decoder; see `Decoder` for how it is called."""

    def __init__(self, config: MistralConfig):
        traits = mistral_traits(config)
        layers = [DecoderLayer(config, i, traits) for i in range(config.num_layers)]
        super().__init__(config, layers, tied=config.tie_embeddings)


def mistral_parameters(config: MistralConfig) -> tuple[Parameter, ...]:
    """Parameters of a Mistral checkpoint."""
    layers = decoder_parameters(config, "model.", mistral_traits(config))
    return target_parameters(config, layers, tied=config.tie_embeddings)
