"""Configurations of published models with latent attention by name; see `models.presets` for what they are for."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from dflash_jax.config import RopeConfig
from dflash_jax.models.deepseek_config import DeepseekConfig


def _rope(*, mscale: float, theta: float = 1e4, factor: float = 40.0, beta_fast: float = 32.0) -> RopeConfig:
    return RopeConfig(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_max_position=4096,
        beta_fast=beta_fast,
        beta_slow=1.0,
        mscale=mscale,
        mscale_all_dim=mscale,
    )


def _target(
    hidden: int, layers: int, heads: int, inner: tuple[int, int], experts: tuple[int, int, int], *, dense: int
) -> DeepseekConfig:
    """A target of the V2 kind; `inner` widths are of dense layers and experts, `experts` are routed, taken and shared ones."""
    return DeepseekConfig(
        vocab_size=102_400,
        hidden_size=hidden,
        intermediate_size=inner[0],
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=192,
        rope=_rope(mscale=0.707),
        max_position=163_840,
        windows=(None,) * layers,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        num_experts=experts[0],
        experts_per_token=experts[1],
        num_shared_experts=experts[2],
        routing="greedy",
        num_groups=1,
        groups_per_token=1,
        norm_routing_weights=False,
        routing_scale=1.0,
        num_dense_layers=dense,
        moe_intermediate_size=inner[1],
    )


_V2_LITE = dataclasses.replace(
    _target(2048, 27, 16, (10_944, 1408), (64, 6, 2), dense=1),
    q_lora_rank=None,
)
_V2 = dataclasses.replace(
    _target(5120, 60, 128, (12_288, 1536), (160, 6, 2), dense=1),
    routing="group_limited_greedy",
    num_groups=8,
    groups_per_token=3,
    routing_scale=16.0,
)
_V3 = dataclasses.replace(
    _target(7168, 61, 128, (18_432, 2048), (256, 8, 1), dense=3),
    vocab_size=129_280,
    rope=_rope(mscale=1.0),
    routing="noaux_tc",
    num_groups=8,
    groups_per_token=4,
    norm_routing_weights=True,
    routing_scale=2.5,
    num_mtp_layers=1,
)
_K2 = dataclasses.replace(
    _V3,
    vocab_size=163_840,
    num_heads=64,
    num_kv_heads=64,
    num_experts=384,
    num_groups=1,
    groups_per_token=1,
    routing_scale=2.827,
    num_dense_layers=1,
    num_mtp_layers=0,
    rope=_rope(mscale=1.0, theta=5e4, factor=32.0, beta_fast=1.0),
    max_position=131_072,
)
_K25 = dataclasses.replace(_K2, norm_eps=1e-5, rope=_rope(mscale=1.0, theta=5e4, factor=64.0), max_position=262_144)

DEEPSEEK_TARGETS: Mapping[str, DeepseekConfig] = MappingProxyType(
    {
        "DeepSeek-V2-Lite": _V2_LITE,
        "DeepSeek-V2": _V2,
        # DeepSeek-R1 has the same configuration.
        "DeepSeek-V3": _V3,
        "Kimi-K2": _K2,
        # The text model, without its vision tower.
        "Kimi-K2.5": _K25,
    }
)
