"""Qwen2 and Qwen2.5 dense targets: configuration, the Flax module, its parameters and their Hugging Face names.

A layer is that of Qwen3 with biases of queries, keys and values in place of their norms. Source: "Qwen2 Technical Report", arXiv
2407.10671, section 2.2.1. Absent keys mean what transformers' Qwen2Config takes for them.
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

_NEUTRAL_VALUES = {**NEUTRAL_VALUES, **NO_EXPERTS, **NO_HEAD_NORMS, "qkv_bias": (None, True)}

qwen2_canonical = qwen3_canonical


@dataclass(frozen=True, kw_only=True)
class Qwen2Config(DecoderConfig):
    """A dense Qwen2 target; `attention_bias` is of queries, keys and values alone, and always true."""

    attention_bias: bool = True
    tie_embeddings: bool = False

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], notices: list[str] | None = None) -> "Qwen2Config":
        """Reads a `config.json` of Qwen2ForCausalLM.

        Args:
          notices: takes what was decided where the file leaves a choice, one sentence each.

        Raises:
          ConfigError: a needed key is missing or malformed, or a key is present that this package does not implement.
        """
        keys = KeyReader("config.json (Qwen2)", values, notices)
        fields: dict[str, Any] = decoder_fields(keys, head_dim=None) | {"attention_bias": True}
        if not keys.flag("attention_bias", default=True):
            raise ConfigError(
                f"{keys.subject}: attention_bias must be true or absent: queries, keys and values have biases here"
            )
        config = cls(**fields, tie_embeddings=keys.flag("tie_word_embeddings"))
        keys.refuse_rest(NEUTRAL_KEYS, _NEUTRAL_VALUES)
        return config


def qwen2_traits(config: Qwen2Config) -> LayerTraits:
    """Heads that are not normed, and biases in front of them."""
    return decoder_traits(config, qk_norm=False, bias="qkv")


class Qwen2(Decoder):
    """A Qwen2 decoder; see `Decoder` for how it is called."""

    def __init__(self, config: Qwen2Config):
        traits = qwen2_traits(config)
        layers = [DecoderLayer(config, i, traits) for i in range(config.num_layers)]
        super().__init__(config, layers, tied=config.tie_embeddings)


def qwen2_parameters(config: Qwen2Config) -> tuple[Parameter, ...]:
    """Parameters of a dense Qwen2 checkpoint."""
    layers = decoder_parameters(config, "model.", qwen2_traits(config))
    return target_parameters(config, layers, tied=config.tie_embeddings)
