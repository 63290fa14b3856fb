"""MiniMax-M2 targets, M2.5 and M2.7 among them: configuration, the Flax module, its parameters and their Hugging Face names.

Layers of experts chosen by sigmoids with a correction. Queries, and keys, are normed over all their heads at once, and half of a
head rotates. Source: transformers' MiniMaxM2 classes; the keys of the published files are those of MiniMax's own configuration.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dflash_jax.config import NEUTRAL_KEYS, NEUTRAL_VALUES, DecoderConfig, KeyReader, decoder_fields, shown
from dflash_jax.errors import ConfigError
from dflash_jax.models.decoder import Decoder, target_parameters
from dflash_jax.models.layers import Attend, Attention, Cache, DecoderLayer, RMSNorm, Rotary, decoder_parameters, rotate
from dflash_jax.models.moe import ExpertsConfig, MoE, expert_traits
from dflash_jax.models.parameters import Parameter, Source, single
from dflash_jax.models.qwen3 import qwen3_canonical
from dflash_jax.models.traits import LayerTraits, decoder_traits
from dflash_jax.parallel.collectives import ranks_here, reduced_together
from dflash_jax.parallel.cut import by_rows

minimax_m2_canonical = qwen3_canonical
# Layers that predict further tokens are left out, and experts are as wide as `intermediate_size`.
_NEUTRAL = NEUTRAL_KEYS | {
    "max_model_len", "mlp_intermediate_size", "mtp_transformer_layers", "num_mtp_modules", "router_jitter_noise", "shared_moe_mode",
    "use_mtp",
}  # fmt: skip
_ONE: tuple[Any, ...] = (None, 1, 1.0)
_NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    **NEUTRAL_VALUES, "attn_window_size": (None,), "layernorm_full_attention_beta": _ONE, "layernorm_linear_attention_beta": _ONE,
    "layernorm_mlp_beta": _ONE, "norm_topk_prob": (None, True), "num_expert_group": (None, 1), "qk_norm_type": (None, "per_layer"),
    "routed_scaling_factor": _ONE, "scoring_func": (None, "sigmoid"), "shared_intermediate_size": (None, 0),
    "swa_rope_theta": (None, -1.0), "topk_group": (None, 1), "use_grouped_topk": (None, False, True), "use_qk_norm": (None, True),
    "use_routing_bias": (None, True),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MiniMaxM2Config(DecoderConfig):
    """A MiniMax-M2 target, whose layers all have experts.

    Attributes:
      num_experts, experts_per_token: experts of a layer, and how many a token takes.
      moe_intermediate_size: inner width of one expert.
    """

    num_experts: int
    experts_per_token: int
    moe_intermediate_size: int
    tie_embeddings: bool = False

    # What `models.moe` asks of every configuration, and this family has in one form only.
    routing = "noaux_tc"
    num_groups = groups_per_token = 1
    num_shared_experts = 0
    norm_routing_weights = True
    routing_scale = 1.0

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], notices: list[str] | None = None) -> "MiniMaxM2Config":
        """Reads a `config.json` of MiniMaxM2ForCausalLM.

        Args:
          notices: takes what was decided where the file leaves a choice, one sentence each.

        Raises:
          ConfigError: a needed key is missing or malformed, the weights are quantized, or a key is present that this package does
            not implement.
        """
        keys = KeyReader("config.json (MiniMax-M2)", values, notices)
        fields: dict[str, Any] = decoder_fields(keys)
        layers, rope = fields["num_layers"], fields["rope"]
        if (turned := keys.get("rotary_dim")) is not None:
            partial = keys.integer("rotary_dim") / fields["head_dim"]
            if rope.partial not in (1.0, partial) or not 0 < partial <= 1 or turned % 2:
                raise ConfigError(
                    f"{keys.subject}: rotary_dim={turned} must be even, at most head_dim={fields['head_dim']}, and what "
                    f"partial_rotary_factor says, here {rope.partial}"
                )
            fields["rope"] = replace(rope, partial=partial)
        if (kinds := keys.get("attn_type_list", [1] * layers)) != [1] * layers:
            raise ConfigError(
                f"{keys.subject}: attn_type_list must be 1 for each of {layers} layers, got {shown(kinds)}"
            )
        experts, taken = (
            keys.integer("num_local_experts", keys.integer("num_experts", 256)),
            keys.integer("num_experts_per_tok", 8),
        )
        if taken > experts:
            raise ConfigError(f"{keys.subject}: num_experts_per_tok={taken} is more than num_local_experts={experts}")
        config = cls(
            **fields,
            num_experts=experts,
            experts_per_token=taken,
            moe_intermediate_size=fields["intermediate_size"],
            tie_embeddings=keys.flag("tie_word_embeddings"),
        )
        keys.refuse_rest(_NEUTRAL, _NEUTRAL_VALUES)
        return config


class MiniMaxM2Attention(Attention):
    """Attention whose queries, and keys, are normed over all heads at once before it hands them on."""

    def __init__(self, config: MiniMaxM2Config, index: int, traits: LayerTraits):
        super().__init__(config, index, traits)
        n, k, h, eps = config.num_heads, config.num_kv_heads, config.head_dim, config.norm_eps
        self.query_norm, self.key_norm = RMSNorm(n * h, eps), RMSNorm(k * h, eps)

    def mix(self, projected: Array, rotary: Rotary, attend: Attend, cache: Cache) -> tuple[Array, Cache]:
        """See `Mixer`. Of several devices each has some of the heads that are normed together."""
        n, k, h = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        parts = jnp.split(projected, [n * h, (n + k) * h], axis=-1)
        wide = [part.astype(jnp.float32) for part in parts[:2]]
        sums = reduced_together(*(jnp.sum(part * part, axis=-1, keepdims=True) for part in wide))
        for place, norm in enumerate((self.query_norm, self.key_norm)):
            mean = sums[place] / (wide[place].shape[-1] * ranks_here())
            parts[place] = norm.weight[...] * (wide[place] * jax.lax.rsqrt(mean + norm.eps)).astype(projected.dtype)
        return super().mix(jnp.concatenate(parts, axis=-1), rotary, attend, cache)

    def heads(self, qkv: Array, rotary: Rotary) -> tuple[Array, Array, Array]:
        """Queries and keys, rotated, and values of heads that are normed; see `Attention`."""
        n, k = self.config.num_heads, self.config.num_kv_heads
        q, keys, values = jnp.split(qkv.reshape(*qkv.shape[:-1], -1, self.config.head_dim), [n, n + k], axis=-2)
        return rotate(q, rotary), rotate(keys, rotary), values


class MiniMaxM2(Decoder):
    """A MiniMax-M2 decoder; see `Decoder` for how it is called."""

    def __init__(self, config: MiniMaxM2Config):
        traits, layers = minimax_m2_traits(config), []
        for i in range(config.num_layers):
            layer = DecoderLayer(config, i, traits, feed_forward=MoE(config))
            layer.attn = MiniMaxM2Attention(config, i, traits)
            layers.append(layer)
        super().__init__(config, layers, tied=config.tie_embeddings)


def minimax_m2_traits(config: MiniMaxM2Config) -> LayerTraits:
    """Layers of experts, whose heads are normed together before attention is asked."""
    return decoder_traits(
        config, qk_norm=False, normed_together=True, feed_forward="moe", experts=expert_traits(config)
    )


def minimax_m2_parameters(config: MiniMaxM2Config) -> tuple[Parameter, ...]:
    """Parameters of a MiniMax-M2 checkpoint."""
    n, k, h = config.num_heads, config.num_kv_heads, config.head_dim

    def feed_forward(index: int, ours: str, theirs: str) -> list[Parameter]:
        attn, theirs_attn = ours.replace("mlp.", "attn."), theirs.replace("mlp.", "self_attn.")
        return [
            single(f"{attn}query_norm.weight", f"{theirs_attn}q_norm.weight", (n * h,), cut=by_rows((n * h, n))),
            single(f"{attn}key_norm.weight", f"{theirs_attn}k_norm.weight", (k * h,), cut=by_rows((k * h, k))),
            *expert_parameters(config, ours, theirs.replace("mlp.", "block_sparse_moe.")),
        ]

    layers = decoder_parameters(config, "model.", minimax_m2_traits(config), feed_forward=feed_forward)
    return target_parameters(config, layers, tied=config.tie_embeddings)


def expert_parameters(config: ExpertsConfig, ours: str, theirs: str) -> list[Parameter]:
    """Parameters of one layer's routed experts and their router, by the names of MiniMax's releases."""
    e, d, f = config.num_experts, config.hidden_size, config.moe_intermediate_size
    experts = [f"{theirs}experts.{index}." for index in range(e)]
    gates = tuple(Source(f"{one}{name}.weight", (f, d)) for one in experts for name in ("w1", "w3"))
    downs = tuple(Source(f"{one}w2.weight", (d, f)) for one in experts)
    return [
        single(f"{ours}router.weight", f"{theirs}gate.weight", (e, d)),
        single(f"{ours}router.bias", f"{theirs}e_score_correction_bias", (e,), "float32"),
        Parameter(f"{ours}experts.gate_up_proj.weight", gates, cut=by_rows((2 * e * f, e))),
        Parameter(f"{ours}experts.down_proj.weight", downs, cut=by_rows((e * d, e))),
    ]
