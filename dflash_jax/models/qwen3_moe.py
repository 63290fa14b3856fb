"""Qwen3 targets with a mixture of experts (Qwen3-30B-A3B and its kin): configuration, the Flax module, parameters and names.

Attention is the dense model's; feed-forwards choose experts by the largest of a softmax, without groups and without shared experts.
Source: "Qwen3 Technical Report", arXiv 2505.09388, section 2. Absent keys mean what transformers' Qwen3MoeConfig takes for them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_jax.config import HEAD_NORMS, NEUTRAL_KEYS, NEUTRAL_VALUES, DecoderConfig, KeyReader, decoder_fields, shown
from dflash_jax.errors import ConfigError
from dflash_jax.models.decoder import Decoder, target_parameters
from dflash_jax.models.layers import DecoderLayer, decoder_parameters, mlp_parameters
from dflash_jax.models.moe import MoE, expert_traits, moe_parameters
from dflash_jax.models.parameters import Parameter
from dflash_jax.models.qwen3 import qwen3_canonical
from dflash_jax.models.traits import LayerTraits, decoder_traits

# A shared expert of no width, and of no number, is none.
_NEUTRAL_VALUES = {
    **NEUTRAL_VALUES, **HEAD_NORMS,
    "kv_lora_rank": (None,), "n_shared_experts": (None, 0), "num_nextn_predict_layers": (None, 0),
    "num_shared_experts": (None, 0), "q_lora_rank": (None,), "shared_expert_intermediate_size": (None, 0),
}  # fmt: skip

qwen3_moe_canonical = qwen3_canonical


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(DecoderConfig):
    """A Qwen3 target whose feed-forwards are experts, all or some of them.

    Attributes:
      num_experts, experts_per_token: experts of a layer, and how many a token takes.
      moe_intermediate_size: inner width of one expert.
      norm_routing_weights: whether a token's weights are made to sum to 1.
      dense_layers: layers with a plain feed-forward of `intermediate_size`.
    """

    num_experts: int
    experts_per_token: int
    moe_intermediate_size: int
    norm_routing_weights: bool
    dense_layers: tuple[int, ...] = ()
    tie_embeddings: bool = False

    # What `models.moe` asks of every configuration, and this family has in one form only.
    routing = "greedy"
    num_groups = groups_per_token = 1
    num_shared_experts = 0
    routing_scale = 1.0

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], notices: list[str] | None = None) -> "Qwen3MoeConfig":
        """Reads a `config.json` of Qwen3MoeForCausalLM.

        Args:
          notices: takes what was decided where the file leaves a choice, one sentence each.

        Raises:
          ConfigError: a needed key is missing or malformed, or a key is present that this package does not implement.
        """
        keys = KeyReader("config.json (Qwen3-MoE)", values, notices)
        fields: dict[str, Any] = decoder_fields(keys, head_dim=None)
        fields["windows"] = _windows(keys, fields["num_layers"])
        # transformers wrote the first name up to its version 4 and writes the second.
        experts = keys.integer("num_experts", keys.integer("num_local_experts", 128))
        taken = keys.integer("num_experts_per_tok", 8)
        if taken > experts:
            raise ConfigError(f"{keys.subject}: num_experts_per_tok={taken} is more than num_experts={experts}")
        config = cls(
            **fields,
            num_experts=experts,
            experts_per_token=taken,
            moe_intermediate_size=keys.integer("moe_intermediate_size", 768),
            norm_routing_weights=keys.flag("norm_topk_prob"),
            dense_layers=_dense_layers(keys, fields["num_layers"]),
            tie_embeddings=keys.flag("tie_word_embeddings"),
        )
        keys.refuse_rest(NEUTRAL_KEYS, _NEUTRAL_VALUES)
        return config


def _windows(keys: KeyReader, layers: int) -> tuple[int | None, ...]:
    """All layers slide or none does: unlike the dense family's, `max_window_layers` says nothing here."""
    if not keys.flag("use_sliding_window") or ("sliding_window" in keys.values and keys.get("sliding_window") is None):
        return (None,) * layers
    return (keys.integer("sliding_window", 4096),) * layers


def _dense_layers(keys: KeyReader, layers: int) -> tuple[int, ...]:
    step, named = keys.integer("decoder_sparse_step", 1), keys.get("mlp_only_layers", [])
    if not isinstance(named, list | tuple) or not all(type(index) is int and 0 <= index < layers for index in named):
        raise ConfigError(
            f"{keys.subject}: mlp_only_layers must be a list of layer indices below {layers}, got {shown(named)}"
        )
    named = set(named)
    return tuple(index for index in range(layers) if index in named or (index + 1) % step)


def qwen3_moe_traits(config: Qwen3MoeConfig) -> LayerTraits:
    """The dense family's attention; experts in all layers, in some, or in none."""
    dense = len(config.dense_layers)
    kind = "dense" if dense == config.num_layers else "mixed" if dense else "moe"
    return decoder_traits(config, feed_forward=kind, experts=None if kind == "dense" else expert_traits(config))


class Qwen3Moe(Decoder):
    """A Qwen3 decoder with experts; see `Decoder` for how it is called."""

    def __init__(self, config: Qwen3MoeConfig):
        traits = qwen3_moe_traits(config)
        feeds = [None if i in config.dense_layers else MoE(config) for i in range(config.num_layers)]
        layers = [DecoderLayer(config, i, traits, feed_forward=feed) for i, feed in enumerate(feeds)]
        super().__init__(config, layers, tied=config.tie_embeddings)


def qwen3_moe_parameters(config: Qwen3MoeConfig) -> tuple[Parameter, ...]:
    """Parameters of a Qwen3-MoE checkpoint."""

    def feed_forward(index: int, ours: str, theirs: str) -> list[Parameter]:
        parameters = mlp_parameters if index in config.dense_layers else moe_parameters
        return parameters(config, ours, theirs)

    layers = decoder_parameters(config, "model.", feed_forward=feed_forward)
    return target_parameters(config, layers, tied=config.tie_embeddings)
