"""Configuration of DeepSeek-V2, DeepSeek-V3 and Kimi-K2 targets: latent attention and mixture-of-experts layers.

Sources: DeepSeek-V2, arXiv 2405.04434 (latent attention, device-limited routing), DeepSeek-V3, arXiv 2412.19437 (routing without an
auxiliary loss). Absent keys mean what transformers' DeepseekV2Config and DeepseekV3Config take for them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_jax.config import (
    NEUTRAL_KEYS,
    NEUTRAL_VALUES,
    DecoderConfig,
    KeyReader,
    RopeConfig,
    architectures_of,
    refuse_quantised,
    shown,
)
from dflash_jax.errors import ConfigError

V2, V3 = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"
# Text models inside a vision-language checkpoint: everything about text is in `text_config`.
COMPOSITES = ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration")
ARCHITECTURES = (V2, V3, "KimiK2ForCausalLM", *COMPOSITES)
MODEL_TYPES = ("deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25")

# Training, bookkeeping, and a size that follows from others (transformers overwrites it).
_NEUTRAL = NEUTRAL_KEYS | {"aux_loss_alpha", "ep_size", "head_dim", "seq_aux"}
# Latent attention has norms on its latents, not on heads, and no windows.
_NEUTRAL_VALUES = {
    **NEUTRAL_VALUES,
    "layer_types": (None,), "num_experts": (None,), "num_local_experts": (None,), "qk_layernorm": (None, False),
    "sliding_window": (None,), "use_qk_norm": (None, False), "use_sliding_window": (None, False),
}  # fmt: skip
# What stands beside `text_config`: the vision tower, which is not loaded, and ids that stand for its inputs.
_BESIDE_TEXT = NEUTRAL_KEYS | {
    "ignore_index", "image_token_id", "image_token_index", "media_placeholder_token_id", "text_config",
    "use_unified_vision_chunk", "video_placeholder", "video_token_id", "vision_config", "vision_end_token_id",
    "vision_start_token_id",
}  # fmt: skip
_ROUTING = {V2: ("greedy", "group_limited_greedy"), V3: ("noaux_tc",)}
_SCORING = {"greedy": "softmax", "group_limited_greedy": "softmax", "noaux_tc": "sigmoid"}
_ABSENT: dict[str, dict[str, Any]] = {
    V2: {"n_shared_experts": 2, "first_k_dense_replace": 0, "routed_scaling_factor": 1.0, "mtp": 0},
    V3: {"n_shared_experts": 1, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "mtp": 1},
}


@dataclass(frozen=True, kw_only=True)
class DeepseekConfig(DecoderConfig):
    """A target with latent attention. `head_dim` is what queries and keys have: position-free and rotary dimensions together.

    Attributes:
      q_lora_rank: width of the queries' latent, or None where queries are projected directly.
      kv_lora_rank: width R of the latent that keys and values share.
      qk_nope_head_dim, qk_rope_head_dim, v_head_dim: P, r and V_h of one head.
      rope_interleaved: whether dimensions 2i and 2i+1 turn together (otherwise i and i + r/2).
      latent_norm_eps: epsilon of the norms of both latents. transformers takes 1e-6 here whatever `rms_norm_eps` says, others
        take `rms_norm_eps`; the two differ for Kimi-K2.5 only (1e-5). We follow transformers.
      num_experts, experts_per_token, num_shared_experts: routed experts, how many a token takes, and those every token takes.
      routing: greedy, group_limited_greedy or noaux_tc; see `models.moe.route`.
      num_groups, groups_per_token: the experts' groups, and how many of them a token may choose from.
      norm_routing_weights, routing_scale: whether a token's weights are made to sum to 1, and the factor on them after that.
      num_dense_layers: leading layers with a plain feed-forward of `intermediate_size`.
      moe_intermediate_size: inner width of one expert.
      num_mtp_layers: layers a checkpoint may hold past the last one, which predict further tokens and are left out here.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    num_experts: int
    experts_per_token: int
    num_shared_experts: int
    routing: str
    num_groups: int
    groups_per_token: int
    norm_routing_weights: bool
    routing_scale: float
    num_dense_layers: int
    moe_intermediate_size: int
    rope_interleaved: bool = True
    latent_norm_eps: float = 1e-6
    num_mtp_layers: int = 0
    tie_embeddings: bool = False

    @property
    def latent_width(self) -> int:
        """Numbers cached for one token and layer: the latent and the rotary key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def attention_scale(self) -> float:
        """Factor on the scores: head_dim**-0.5, times the square of YaRN's magnitude for all dimensions where that is set.

        YaRN's factor on cos and sin (`models.layers.rope_frequencies`) is the ratio of both magnitudes and reaches only the
        rotary dimensions; this one reaches all.
        """
        rope, scale = self.rope, self.head_dim**-0.5
        if rope.kind == "default" or not rope.mscale_all_dim or rope.factor <= 1:
            return scale
        return scale * (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], notices: list[str] | None = None) -> "DeepseekConfig":
        """Reads a `config.json` of one of `ARCHITECTURES`.

        Args:
          notices: takes what was decided where the file leaves a choice, one sentence each.

        Raises:
          ConfigError: a needed key is missing or malformed, the weights are quantised, or a key is present that this package does
            not implement.
        """
        names, whole = set(architectures_of(values)), None
        if names & set(COMPOSITES) or values.get("model_type") == "kimi_k25":
            refuse_quantised(values)
            whole = KeyReader("config.json (beside text_config)", values)
            values = KeyReader("config.json, text_config", whole.get("text_config")).values
            names = set(architectures_of(values))
        refuse_quantised(values)
        kind = V2 if V2 in names or (not names and values.get("model_type") == "deepseek_v2") else V3
        keys = KeyReader(f"config.json ({kind})", values, notices)
        config = cls(**_decoder(keys), **_attention(keys), **_experts(keys, kind))
        keys.refuse_rest(_NEUTRAL, _NEUTRAL_VALUES)
        if whole is not None:
            # What the text model reads may be said twice, but not in two ways.
            twice = {key: (values.get(key),) for key in keys.read} | {"tie_word_embeddings": (config.tie_embeddings,)}
            whole.refuse_rest(_BESIDE_TEXT, _NEUTRAL_VALUES | twice)
        return config


def _decoder(keys: KeyReader) -> dict[str, Any]:
    """The fields of `DecoderConfig`, and whether the head is the embedding."""
    layers, heads = keys.integer("num_hidden_layers"), keys.integer("num_attention_heads")
    if (kv_heads := keys.integer("num_key_value_heads", heads)) != heads:
        raise ConfigError(f"{keys.subject}: num_key_value_heads must be num_attention_heads={heads}, got {kv_heads}")
    if (activation := keys.get("hidden_act", "silu")) != "silu":
        raise ConfigError(f"{keys.subject}: hidden_act must be silu, got {shown(activation)}")
    max_position = keys.integer("max_position_embeddings")
    rope = RopeConfig.from_keys(keys, max_position)
    if rope.partial != 1:
        raise ConfigError(f"{keys.subject}: partial_rotary_factor must be 1 with latent attention, got {rope.partial}")
    return {
        "vocab_size": keys.integer("vocab_size"),
        "hidden_size": keys.integer("hidden_size"),
        "intermediate_size": keys.integer("intermediate_size"),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": keys.integer("qk_nope_head_dim") + keys.integer("qk_rope_head_dim"),
        "norm_eps": keys.number("rms_norm_eps", 1e-6, positive=True),
        "rope": rope,
        "max_position": rope.longest(max_position),
        "attention_bias": keys.flag("attention_bias"),
        "windows": (None,) * layers,
        "tie_embeddings": keys.flag("tie_word_embeddings"),
    }


def _attention(keys: KeyReader) -> dict[str, Any]:
    rotary, plain = keys.integer("qk_rope_head_dim"), keys.integer("qk_nope_head_dim")
    if (whole := keys.integer("qk_head_dim", plain + rotary)) != plain + rotary:
        raise ConfigError(
            f"{keys.subject}: qk_head_dim={whole} is not qk_nope_head_dim={plain} and qk_rope_head_dim={rotary} together"
        )
    if rotary % 2:
        raise ConfigError(f"{keys.subject}: qk_rope_head_dim must be even, got {rotary}")
    if "q_lora_rank" not in keys.values:
        raise ConfigError(f"{keys.subject}: q_lora_rank is missing; null says that queries are projected directly")
    return {
        "q_lora_rank": None if keys.get("q_lora_rank") is None else keys.integer("q_lora_rank"),
        "kv_lora_rank": keys.integer("kv_lora_rank"),
        "qk_nope_head_dim": keys.integer("qk_nope_head_dim"),
        "qk_rope_head_dim": rotary,
        "v_head_dim": keys.integer("v_head_dim"),
        "rope_interleaved": keys.flag("rope_interleave", default=True),
    }


def _experts(keys: KeyReader, kind: str) -> dict[str, Any]:
    """The fields of the mixture of experts; routing must be one that both the file and transformers' class for it mean."""
    absent = _ABSENT[kind]
    routing = keys.get("topk_method", _ROUTING[kind][0])
    if not isinstance(routing, str) or routing not in _ROUTING[kind]:
        raise ConfigError(f"{keys.subject}: topk_method must be {' or '.join(_ROUTING[kind])}, got {shown(routing)}")
    if (scoring := keys.get("scoring_func", _SCORING[routing])) != _SCORING[routing]:
        raise ConfigError(
            f"{keys.subject}: scoring_func must be {_SCORING[routing]} with {routing}, got {shown(scoring)}"
        )
    if (every := keys.integer("moe_layer_freq", 1)) != 1:
        raise ConfigError(f"{keys.subject}: moe_layer_freq must be 1, got {every}")
    normed = keys.flag("norm_topk_prob", default=kind == V3)
    if normed and kind == V2:
        raise ConfigError(
            f"{keys.subject}: norm_topk_prob must be false: what true means differs between programs, and no released model sets it"
        )
    experts, taken = keys.integer("n_routed_experts"), keys.integer("num_experts_per_tok")
    grouped = {"greedy": 1}.get(routing)
    groups, chosen = keys.integer("n_group", grouped), keys.integer("topk_group", grouped)
    if routing == "greedy":
        groups = chosen = 1
    size = experts // groups
    if experts % groups or chosen > groups or taken > chosen * size or (routing == "noaux_tc" and size < 2):
        raise ConfigError(
            f"{keys.subject}: n_routed_experts={experts}, n_group={groups}, topk_group={chosen} and num_experts_per_tok={taken} do "
            "not fit: groups must be of equal size, and those taken must hold the experts taken"
        )
    mtp = keys.integer("num_mtp_layers", absent["mtp"], minimum=0)
    return {
        "num_experts": experts,
        "experts_per_token": taken,
        "num_shared_experts": keys.integer("n_shared_experts", absent["n_shared_experts"]),
        "routing": routing,
        "num_groups": groups,
        "groups_per_token": chosen,
        "norm_routing_weights": normed,
        "routing_scale": keys.number("routed_scaling_factor", absent["routed_scaling_factor"]),
        "num_dense_layers": keys.integer("first_k_dense_replace", absent["first_k_dense_replace"], minimum=0),
        "moe_intermediate_size": keys.integer("moe_intermediate_size"),
        "num_mtp_layers": keys.integer("num_nextn_predict_layers", mtp, minimum=0),
    }
