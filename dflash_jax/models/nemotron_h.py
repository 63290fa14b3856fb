"""Nemotron-H targets, Nemotron 3 and 3.5 among them: configuration, the Flax module, its parameters and their Hugging Face names.

A layer has one sublayer: Mamba 2 (`models.mamba2`), attention without rotation, or a feed-forward without a gate
(`models.ungated`), dense or of experts. Source: transformers' NemotronH classes, whose defaults absent keys mean.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from dflash_kernels.recurrent.mamba2 import Mamba2Shape
from flax import nnx
from jaxtyping import Array, Int

from dflash_jax.config import (
    NEUTRAL_KEYS,
    NEUTRAL_VALUES,
    DecoderConfig,
    KeyReader,
    architectures_of,
    refuse_quantized,
    shown,
)
from dflash_jax.errors import ConfigError
from dflash_jax.models.decoder import Decoder
from dflash_jax.models.layers import Attention, Cache, RMSNorm, Rotary
from dflash_jax.models.mamba2 import Mamba2, mamba2_parameters
from dflash_jax.models.moe import expert_traits
from dflash_jax.models.parameters import Parameter, Source, single
from dflash_jax.models.traits import LayerTraits, decoder_traits
from dflash_jax.models.ungated import (
    ACTIVATION,
    UngatedMLP,
    UngatedMoE,
    ungated_moe_parameters,
    ungated_parameters,
)

TEXT = "NemotronHForCausalLM"
# Vision-language files, whose text model's keys are in `llm_config` or `text_config`; names are those of vLLM's registry.
COMPOSITES = (
    "NemotronH_Nano_VL_V2",
    "NemotronH_Nano_Omni_Reasoning_V3",
    "NemotronH_Omni_Reasoning_V3",
    "NemotronH_Super_Omni_Reasoning_V3",
)
ARCHITECTURES = (TEXT, *COMPOSITES)
_INSIDE = ("llm_config", "text_config")

MAMBA, ATTENTION, DENSE, EXPERTS = "linear_attention", "full_attention", "mlp", "moe"
_KIND_OF_SIGN = {"M": MAMBA, "*": ATTENTION, "-": DENSE, "E": EXPERTS}
_OLD_NAMES = {"mamba": MAMBA, "attention": ATTENTION}
# The largest float32: what no time step exceeds.
_UNBOUNDED = float(jnp.finfo(jnp.float32).max)

# Of how weights began, of rotation, which no layer has, of layers that predict further tokens, and of other software's kernels.
_NEUTRAL = NEUTRAL_KEYS | {
    "expand", "keep_mtp_spec_in_bf16", "moe_shared_expert_overlap", "mtp_hybrid_override_pattern", "mtp_layers_block_type",
    "num_logits_to_keep", "num_nextn_predict_layers", "partial_rotary_factor", "rescale_prenorm_residual", "rope_parameters",
    "rope_theta", "time_step_floor", "time_step_max", "time_step_min", "use_mamba_kernels",
}  # fmt: skip
_NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    **NEUTRAL_VALUES, "attention_bias": (None, False), "mamba_hidden_act": (None, "silu"), "mamba_proj_bias": (None, False),
    "mamba_ssm_cache_dtype": (None, "float32"), "mlp_hidden_act": (None, "relu2"), "residual_in_fp32": (None, False),
    "rope_scaling": (None,), "sliding_window": (None,), "tie_word_embeddings": (None, False), "use_conv_bias": (None, True),
}  # fmt: skip
_EXPERT_KEYS = """moe_intermediate_size moe_latent_size moe_router_dtype moe_shared_expert_intermediate_size n_group
    n_routed_experts n_shared_experts norm_topk_prob num_experts_per_tok routed_scaling_factor topk_group""".split()


@dataclass(frozen=True, kw_only=True)
class NemotronHConfig(DecoderConfig):
    """A Nemotron-H target. `num_heads`, `num_kv_heads` and `head_dim` are those of layers that attend, `intermediate_size` is the
    inner width of dense feed-forwards.

    Attributes:
      full_layers, mamba_layers, expert_layers: layers that attend, those with Mamba 2, and those with experts; all others have a
        dense feed-forward.
      mamba_heads, mamba_head_dim, mamba_groups, state_dim, conv_taps, chunk: H, P, G, N, taps and chunk of `Mamba2Shape`.
      least_step, greatest_step: limits of its time step.
      num_experts, experts_per_token, moe_intermediate_size: experts of a layer, how many a token takes, inner width of one; 0 where
        no layer has any.
      shared_intermediate_size: inner width of the expert that every token takes.
      expert_width: columns that routed experts take and give, where the stream is projected for them; 0 for the stream's.
      num_groups, groups_per_token, norm_routing_weights, routing_scale: see `models.moe.route`.
    """

    full_layers: tuple[int, ...]
    mamba_layers: tuple[int, ...]
    mamba_heads: int
    mamba_head_dim: int
    mamba_groups: int
    state_dim: int
    expert_layers: tuple[int, ...] = ()
    conv_taps: int = 4
    chunk: int = 128
    least_step: float = 0.0
    greatest_step: float = _UNBOUNDED
    num_experts: int = 0
    experts_per_token: int = 0
    moe_intermediate_size: int = 0
    shared_intermediate_size: int = 0
    expert_width: int = 0
    num_groups: int = 1
    groups_per_token: int = 1
    norm_routing_weights: bool = True
    routing_scale: float = 1.0

    # What `models.moe` asks of every configuration, and this family has in one form only.
    routing = "noaux_tc"
    num_shared_experts = 1

    @property
    def mamba2(self) -> Mamba2Shape:
        """The shape of every layer of Mamba 2."""
        return Mamba2Shape(
            self.mamba_heads, self.mamba_head_dim, self.mamba_groups, self.state_dim, self.conv_taps, self.chunk,
            (self.least_step, self.greatest_step),
        )  # fmt: skip

    @property
    def cached_layers(self) -> int:
        return len(self.full_layers)

    @property
    def state_layers(self) -> int:
        return len(self.mamba_layers)

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], notices: list[str] | None = None) -> "NemotronHConfig":
        """Reads a `config.json` of one of `ARCHITECTURES`.

        Args:
          notices: takes what was decided where the file leaves a choice, one sentence each.

        Raises:
          ConfigError: a needed key is missing or malformed, the weights are quantized, or a key is present that this package does
            not implement.
        """
        refuse_quantized(values)
        named = architectures_of(values)
        keys, beside = KeyReader(f"config.json ({TEXT})", values, notices), None
        inside = [key for key in _INSIDE if key in values]
        if inside or set(named) & set(COMPOSITES):
            beside, inside = values, inside or [_INSIDE[0]]
            keys = KeyReader(f"config.json, {inside[0]}", values.get(inside[0]), notices)
            refuse_quantized(keys.values)
        kinds = _kinds(keys)
        config = cls(**_decoder(keys, kinds), **_mamba2(keys), **(_experts(keys) if EXPERTS in kinds else {}))
        keys.refuse_rest(_NEUTRAL | (set() if EXPERTS in kinds else set(_EXPERT_KEYS)), _NEUTRAL_VALUES)
        if beside is not None:
            _agree(keys, beside)
        return config


def _agree(keys: KeyReader, beside: Mapping[str, Any]) -> None:
    """Raises ConfigError where a vision-language file says of its text model one thing inside and another beside; whatever else it
    has beside is of its towers."""
    twice = {
        key
        for key in keys.read | _NEUTRAL_VALUES.keys()
        if key in beside and key not in ("vision_config", "audio_config")
    }
    for key in sorted(twice):
        if (
            beside[key] is not None
            and beside[key] != keys.values.get(key)
            and beside[key] not in _NEUTRAL_VALUES.get(key, ())
        ):
            raise ConfigError(
                f"{keys.subject} says {key}={shown(keys.values.get(key))}, and beside it stands {shown(beside[key])}; keep one"
            )


def _kinds(keys: KeyReader) -> tuple[str, ...]:
    """The kind of every layer, as a list or a pattern of signs says; both may be there and agree."""
    said: dict[str, tuple[str, ...]] = {}
    for name in ("layers_block_type", "layer_types"):
        if (listed := keys.get(name)) is not None:
            rows = listed if isinstance(listed, list | tuple) else [listed]
            said[name] = tuple(_OLD_NAMES.get(one, one) if isinstance(one, str) else shown(one) for one in rows)
    if (pattern := keys.get("hybrid_override_pattern")) is not None:
        said["hybrid_override_pattern"] = tuple(_KIND_OF_SIGN.get(sign, sign) for sign in str(pattern))
    if not said:
        raise ConfigError(
            f"{keys.subject}: layers_block_type or hybrid_override_pattern must tell the kind of every layer, got neither"
        )
    if len(set(said.values())) > 1:
        raise ConfigError(f"{keys.subject}: {' and '.join(said)} say two things; keep one")
    name, kinds = next(iter(said.items()))
    known = tuple(_KIND_OF_SIGN.values())
    if unknown := [kind for kind in kinds if kind not in known]:
        raise ConfigError(
            f"{keys.subject}: {name} must list {', '.join(known)}, or {' '.join(_KIND_OF_SIGN)} in a pattern, got "
            f"{shown(unknown[0])}"
        )
    if (layers := keys.integer("num_hidden_layers", len(kinds))) != len(kinds):
        raise ConfigError(f"{keys.subject}: num_hidden_layers={layers}, but {name} tells the kinds of {len(kinds)}")
    for kind in (MAMBA, ATTENTION):
        if kind not in kinds:
            raise ConfigError(
                f"{keys.subject}: no layer of {name} is {kind}; expected one at least, as every release has"
            )
    return kinds


def _decoder(keys: KeyReader, kinds: tuple[str, ...]) -> dict[str, Any]:
    """The fields of `DecoderConfig`, and the kinds of layers."""
    heads = keys.integer("num_attention_heads", 32)
    kv_heads, head_dim = keys.integer("num_key_value_heads", 8), keys.integer("head_dim", 128)
    if heads % kv_heads or head_dim % 2:
        raise ConfigError(
            f"{keys.subject}: num_attention_heads={heads} must be a multiple of num_key_value_heads={kv_heads}, and heads of an "
            f"even size, got {head_dim}"
        )
    if (found := keys.integer("attention_head_dim", head_dim)) != head_dim:
        raise ConfigError(f"{keys.subject}: attention_head_dim={found} must be head_dim={head_dim}")
    eps = keys.number("layer_norm_epsilon", keys.number("norm_eps", 1e-5, positive=True), positive=True)
    if (found := keys.number("norm_eps", eps)) != eps:
        raise ConfigError(f"{keys.subject}: norm_eps must be layer_norm_epsilon={eps}, got {found}")
    return {
        "vocab_size": keys.integer("vocab_size", 131_072),
        "hidden_size": keys.integer("hidden_size", 4096),
        "intermediate_size": keys.integer("intermediate_size", 21_504),
        "num_layers": len(kinds),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "norm_eps": eps,
        "max_position": keys.integer("max_position_embeddings", 4096),
        "windows": (None,) * len(kinds),
        "full_layers": _places(kinds, ATTENTION),
        "mamba_layers": _places(kinds, MAMBA),
        "expert_layers": _places(kinds, EXPERTS),
    }


def _places(kinds: tuple[str, ...], kind: str) -> tuple[int, ...]:
    return tuple(i for i, one in enumerate(kinds) if one == kind)


def _mamba2(keys: KeyReader) -> dict[str, Any]:
    """The fields of Mamba 2."""
    heads, groups = keys.integer("mamba_num_heads", 128), keys.integer("n_groups", 8)
    if heads % groups:
        raise ConfigError(f"{keys.subject}: mamba_num_heads={heads} must be a multiple of n_groups={groups}")
    least, greatest = _limits(keys)
    return {
        "mamba_heads": heads,
        "mamba_head_dim": keys.integer("mamba_head_dim", 64),
        "mamba_groups": groups,
        "state_dim": keys.integer("ssm_state_size", 128),
        "conv_taps": keys.integer("conv_kernel", 4, minimum=2),
        "chunk": keys.integer("chunk_size", 128),
        "least_step": least,
        "greatest_step": greatest,
    }


def _limits(keys: KeyReader) -> tuple[float, float]:
    """The limits of the time step. `time_step_min` and `time_step_max` are of how weights began: transformers takes the first for
    the limit of prompts, and of decoded tokens no limit; NVIDIA's own code, vLLM and training take `time_step_limit` for all."""
    limits = keys.get("time_step_limit", [0.0, {"__float__": "Infinity"}])
    if not isinstance(limits, list | tuple) or len(limits) != 2:
        raise ConfigError(f"{keys.subject}: time_step_limit must be two numbers, got {shown(limits)}")
    places = KeyReader(f"{keys.subject}, time_step_limit", dict(zip(("least", "greatest"), limits, strict=True)))
    if limits[1] in ({"__float__": "Infinity"}, "Infinity", float("inf")):
        greatest = _UNBOUNDED
    else:
        greatest = min(places.number("greatest"), _UNBOUNDED)
    least = places.number("least")
    if not 0 <= least <= greatest:
        raise ConfigError(
            f"{keys.subject}: time_step_limit must be two numbers of at least 0 in order, got {shown(limits)}"
        )
    return least, greatest


def _experts(keys: KeyReader) -> dict[str, Any]:
    """The fields of the mixture of experts."""
    experts, taken = keys.integer("n_routed_experts", 8), keys.integer("num_experts_per_tok", 2)
    groups, of_token = keys.integer("n_group", 1), keys.integer("topk_group", 1)
    if (
        experts % groups
        or of_token > groups
        or taken > experts // groups * of_token
        or (groups > 1 and experts == groups)
    ):
        raise ConfigError(
            f"{keys.subject}: a token cannot take num_experts_per_tok={taken} of n_routed_experts={experts} in "
            f"topk_group={of_token} of n_group={groups} groups, each of two at least where there are several"
        )
    if (shared := keys.integer("n_shared_experts", 1)) != 1:
        raise ConfigError(f"{keys.subject}: n_shared_experts must be 1, as every release has, got {shared}")
    if (dtype := keys.get("moe_router_dtype", "float32")) not in ("float32", "fp32"):
        raise ConfigError(f"{keys.subject}: moe_router_dtype must be float32, got {shown(dtype)}")
    return {
        "num_experts": experts,
        "experts_per_token": taken,
        "moe_intermediate_size": keys.integer("moe_intermediate_size", 7688),
        "shared_intermediate_size": keys.integer("moe_shared_expert_intermediate_size", 7688),
        "expert_width": 0 if keys.get("moe_latent_size") is None else keys.integer("moe_latent_size"),
        "num_groups": groups,
        "groups_per_token": of_token,
        "norm_routing_weights": keys.flag("norm_topk_prob", default=True),
        "routing_scale": keys.number("routed_scaling_factor", 1.0),
    }


class NemotronHLayer(nnx.Module):
    """One sublayer behind a norm, added to the residual stream."""

    def __init__(self, config: NemotronHConfig, index: int, traits: LayerTraits):
        d, eps = config.hidden_size, config.norm_eps
        self.norm = RMSNorm(d, eps)
        attends, decays = index in config.full_layers, index in config.mamba_layers
        self.attn: Any = Attention(config, index, traits) if attends else None
        if attends:
            self.attn.index = config.full_layers.index(index)  # of its pages
        self.mamba: Any = Mamba2(d, config.mamba2, config.mamba_layers.index(index), eps) if decays else None
        self.mlp: Any = None if attends or decays else _feed_forward(config, index)

    def __call__(self, x: Array, rotary: Rotary, attend: Any, cache: Cache = None) -> tuple[Array, Cache]:
        normed = self.norm(x)
        if self.mlp is not None:
            return x + self.mlp(normed), cache
        mixer = self.mamba if self.attn is None else self.attn
        mixed, cache = mixer(normed, rotary, attend, cache)
        return x + mixed, cache


def _feed_forward(config: NemotronHConfig, index: int) -> nnx.Module:
    return (
        UngatedMoE(config)
        if index in config.expert_layers
        else UngatedMLP(config.hidden_size, config.intermediate_size)
    )


class NemotronH(Decoder):
    """A Nemotron-H decoder; see `Decoder` for how it is called. `attend` is also a `DeltaAttend`."""

    def __init__(self, config: NemotronHConfig):
        traits = nemotron_h_traits(config)
        layers = [NemotronHLayer(config, i, traits) for i in range(config.num_layers)]
        super().__init__(config, layers, tied=False)

    def rotary(self, positions: Int[Array, "B T *axes"]) -> Rotary:
        """By no angle: Mamba 2 tells the order of tokens, heads do not turn."""
        shape = (*positions.shape[:2], self.config.head_dim // 2)
        return Rotary(jnp.ones(shape, jnp.float32), jnp.zeros(shape, jnp.float32))


def nemotron_h_traits(config: NemotronHConfig) -> LayerTraits:
    """Layers of one sublayer each."""
    experts = expert_traits(config, gated=False, width=config.expert_width or None) if config.expert_layers else None
    dense = len(config.expert_layers) + config.state_layers + config.cached_layers < config.num_layers
    kind = "mixed" if dense and experts else "moe" if experts else "dense"
    return decoder_traits(config, qk_norm=False, mamba2=True, feed_forward=kind, activation=ACTIVATION, experts=experts)


def nemotron_h_parameters(config: NemotronHConfig) -> tuple[Parameter, ...]:
    """Parameters of a Nemotron-H checkpoint."""
    v, d = config.vocab_size, config.hidden_size
    table = [single("embed.weight", "backbone.embeddings.weight", (v, d))]
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}.", f"backbone.layers.{i}."
        table.append(single(f"{ours}norm.weight", f"{theirs}norm.weight", (d,)))
        theirs = f"{theirs}mixer."
        if i in config.full_layers:
            table += _attention_parameters(config, f"{ours}attn.", theirs)
        elif i in config.mamba_layers:
            table += mamba2_parameters(config.mamba2, d, f"{ours}mamba.", theirs)
        elif i in config.expert_layers:
            table += ungated_moe_parameters(config, f"{ours}mlp.", theirs)
        else:
            table += ungated_parameters(d, config.intermediate_size, f"{ours}mlp.", theirs)
    table.append(single("norm.weight", "backbone.norm_f.weight", (d,)))
    table.append(single("lm_head.weight", "lm_head.weight", (v, d)))
    return tuple(table)


def _attention_parameters(config: NemotronHConfig, ours: str, theirs: str) -> list[Parameter]:
    d, n, k, h = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    rows = {"q_proj": n * h, "k_proj": k * h, "v_proj": k * h}
    return [
        Parameter(f"{ours}qkv_proj.weight", tuple(Source(f"{theirs}{one}.weight", (r, d)) for one, r in rows.items())),
        single(f"{ours}o_proj.weight", f"{theirs}o_proj.weight", (d, n * h)),
    ]


_LEFT_OUT = re.compile(r"mtp\.|vision_model\.|mlp1\.|sound_(encoder|projection)\.|.*rotary_emb\.inv_freq$")


def nemotron_h_canonical(name: str) -> str | None:
    """Checkpoint name as declared above, as transformers or NVIDIA's code writes it; None for towers, for layers that predict
    further tokens (MTP) and for buffers computed here."""
    name = name.removeprefix("language_model.")
    if _LEFT_OUT.match(name):
        return None
    return name.replace("model.", "backbone.", 1) if name.startswith("model.") else name
