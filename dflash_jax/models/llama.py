"""Llama targets: configuration, the Flax module, its parameters and their Hugging Face names.

A layer is that of Qwen3 without the norm of queries and keys. Source: "The Llama 3 Herd of Models", arXiv 2407.21783, section 3.2.
Absent keys mean what transformers' LlamaConfig takes for them.
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
from dflash_jax.models.decoder import Decoder, target_parameters
from dflash_jax.models.layers import DecoderLayer, decoder_parameters
from dflash_jax.models.parameters import Parameter
from dflash_jax.models.qwen3 import qwen3_canonical
from dflash_jax.models.traits import LayerTraits, decoder_traits

# Every layer sees every key: what other families say of windows must say that there are none.
_NEUTRAL_VALUES = {
    **NEUTRAL_VALUES, **NO_EXPERTS, **NO_HEAD_NORMS,
    "layer_types": (None,), "sliding_window": (None,), "use_sliding_window": (None, False),
}  # fmt: skip

llama_canonical = qwen3_canonical


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """A Llama target; `attention_bias` is of all four projections."""

    tie_embeddings: bool = False

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], notices: list[str] | None = None) -> "LlamaConfig":
        """Reads a `config.json` of LlamaForCausalLM.

        Args:
          notices: takes what was decided where the file leaves a choice, one sentence each.

        Raises:
          ConfigError: a needed key is missing or malformed, or a key is present that this package does not implement.
        """
        keys = KeyReader("config.json (Llama)", values, notices)
        fields = decoder_fields(keys, head_dim=None, windows=_no_windows)
        config = cls(**fields, tie_embeddings=keys.flag("tie_word_embeddings"))
        keys.refuse_rest(NEUTRAL_KEYS, _NEUTRAL_VALUES)
        return config


def _no_windows(keys: KeyReader, layers: int) -> tuple[None, ...]:
    del keys  # none of them says anything of windows here
    return (None,) * layers


def llama_traits(config: LlamaConfig) -> LayerTraits:
    """Heads that are not normed."""
    return decoder_traits(config, qk_norm=False)


class Llama(Decoder):
    """A Llama decoder; see `Decoder` for how it is called."""

    def __init__(self, config: LlamaConfig):
        traits = llama_traits(config)
        layers = [DecoderLayer(config, i, traits) for i in range(config.num_layers)]
        super().__init__(config, layers, tied=config.tie_embeddings)


def llama_parameters(config: LlamaConfig) -> tuple[Parameter, ...]:
    """Parameters of a Llama checkpoint."""
    layers = decoder_parameters(config, "model.", llama_traits(config))
    return target_parameters(config, layers, tied=config.tie_embeddings)
