"""Gemma 3 targets: configuration, the Flax module, its parameters and their Hugging Face names.

Norms are zero-centered, those of queries and keys too. Scores are scaled by a number of their own and not by the size of a head.
Source: "Gemma 3 Technical Report", arXiv 2503.19786, section 2, and transformers' Gemma3 classes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_jax.models.gemma import (
    NEUTRAL_OF_TEXT,
    GemmaAttention,
    GemmaConfig,
    GemmaDecoder,
    GemmaLayer,
    attention_parameters,
    gemma_canonical,
    gemma_fields,
    gemma_traits,
    norm_parameters,
    refuse_rest,
    soft_cap,
    text_keys,
    tied,
)
from dflash_jax.models.layers import MLP, ZeroCenteredNorm, mlp_parameters
from dflash_jax.models.parameters import Parameter, single
from dflash_jax.models.traits import LayerTraits
from dflash_jax.parallel.cut import by_rows

TEXT, COMPOSITE = "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"
ARCHITECTURES = (TEXT, COMPOSITE)
MODEL_TYPES = ("gemma3_text", "gemma3")

gemma3_canonical = gemma_canonical


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(GemmaConfig):
    """A Gemma 3 target.

    Attributes:
      query_scalar: scores are divided by its square root.
      score_softcap: c of `c * tanh(score / c)`; 0 for no cap.
    """

    query_scalar: float = 256.0
    score_softcap: float = 0.0

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], notices: list[str] | None = None) -> "Gemma3Config":
        """Reads a `config.json` of one of `ARCHITECTURES`.

        Args:
          notices: takes what was decided where the file leaves a choice, one sentence each.

        Raises:
          ConfigError: a needed key is malformed, the weights are quantized, or a key is present that this package does not
            implement.
        """
        keys, whole = text_keys(values, (COMPOSITE,), notices)
        config = cls(
            **gemma_fields(keys, layers=26, vocab=262_208, window=4096, max_position=131_072, full_rope={}),
            query_scalar=keys.number("query_pre_attn_scalar", 256.0, positive=True),
            score_softcap=soft_cap(keys, "attn_logit_softcapping"),
            tie_embeddings=tied(keys, whole),
        )
        refuse_rest(keys, whole, NEUTRAL_OF_TEXT)
        return config


def gemma3_traits(config: Gemma3Config) -> LayerTraits:
    """Layers of Gemma with zero-centered norms."""
    return gemma_traits(config, zero_centered=True)


class Gemma3Attention(GemmaAttention):
    """Attention with zero-centered norms of queries and keys, and a scale of its own."""

    zero_centered = True

    def __init__(self, config: Gemma3Config, index: int, traits: LayerTraits):
        super().__init__(config, index, traits, ZeroCenteredNorm)
        self.scale, self.soft_cap = config.query_scalar**-0.5, config.score_softcap or None


class Gemma3(GemmaDecoder):
    """A Gemma 3 decoder; see `Decoder` for how it is called."""

    def __init__(self, config: Gemma3Config):
        traits = gemma3_traits(config)

        def layer(index: int) -> GemmaLayer:
            mlp = MLP(config.hidden_size, traits.inner, traits.activation)
            return GemmaLayer(config, Gemma3Attention(config, index, traits), mlp, ZeroCenteredNorm)

        super().__init__(config, layer, ZeroCenteredNorm)


def gemma3_parameters(config: Gemma3Config) -> tuple[Parameter, ...]:
    """Parameters of a Gemma 3 checkpoint."""
    v, d = config.vocab_size, config.hidden_size
    table = [single("embed.weight", "model.embed_tokens.weight", (v, d))]
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        table += norm_parameters(config, ours, theirs, "offset")
        table += attention_parameters(config, i, f"{ours}attn.", f"{theirs}self_attn.", "offset")
        table += mlp_parameters(config, f"{ours}mlp.", f"{theirs}mlp.")
    table.append(single("norm.offset", "model.norm.weight", (d,)))
    if not config.tie_embeddings:
        table.append(single("lm_head.weight", "lm_head.weight", (v, d), cut=by_rows((v, v), optional=True)))
    return tuple(table)
