"""Small random hybrid pairs: gated delta nets beside gated attention, in every arrangement of heads, short convolutions, Mamba
2, Kimi delta attention beside latent attention to pools, gated delta nets with hashed n-grams beside attention to blocks, and
convolutions around attention with a bias by distance."""

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array

from dflash_jax.config import RopeConfig
from dflash_jax.models.glm5_next import Glm5NextConfig
from dflash_jax.models.inkling import InklingConfig
from dflash_jax.models.kimi_linear import KimiLinearConfig
from dflash_jax.models.lfm2 import Lfm2Config
from dflash_jax.models.nemotron_h import NemotronHConfig
from dflash_jax.models.qwen3_5 import Qwen35Config
from dflash_jax.models.qwen4_exp import Qwen4ExpConfig

from .random_pair import VOCAB, Pair, draft_config


def hybrid_config(**changes) -> Qwen35Config:
    """Four layers, three of them gated delta nets with three value heads to a key head."""
    base = Qwen35Config(
        vocab_size=VOCAB, hidden_size=40, intermediate_size=64, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16,
        rope=RopeConfig(theta=1e4, partial=0.5), windows=(None,) * 4, full_layers=(3,), linear_key_heads=2,
        linear_value_heads=6, linear_key_dim=8, linear_value_dim=12, tie_embeddings=True,
    )  # fmt: skip
    return replace(base, **changes)


def hybrid_moe_config(**changes) -> Qwen35Config:
    """The same with experts, a gated shared one among them, in all layers but one."""
    experts = {
        "num_experts": 4, "experts_per_token": 2, "moe_intermediate_size": 24, "shared_intermediate_size": 20,
        "dense_layers": (2,), "grouped_projections": True,
    }  # fmt: skip
    return hybrid_config(**experts | changes)


def conv_config(**changes) -> Lfm2Config:
    """Four layers, three of them short convolutions, the last two with experts."""
    base = Lfm2Config(
        vocab_size=VOCAB, hidden_size=40, intermediate_size=64, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16,
        rope=RopeConfig(theta=1e4), windows=(None,) * 4, full_layers=(2,), conv_taps=3, num_experts=4, experts_per_token=2,
        moe_intermediate_size=24, num_dense_layers=2,
    )  # fmt: skip
    return replace(base, **changes)


def mamba2_config(**changes) -> NemotronHConfig:
    """Four layers: Mamba 2, experts of a narrower projection, attention, Mamba 2."""
    base = NemotronHConfig(
        vocab_size=VOCAB, hidden_size=40, intermediate_size=64, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16,
        windows=(None,) * 4, full_layers=(2,), mamba_layers=(0, 3), expert_layers=(1,), mamba_heads=6, mamba_head_dim=8,
        mamba_groups=2, state_dim=12, chunk=16, num_experts=4, experts_per_token=2, moe_intermediate_size=24,
        shared_intermediate_size=32, expert_width=16,
    )  # fmt: skip
    return replace(base, **changes)


def pooled_config(**changes) -> Glm5NextConfig:
    """Four layers over two streams, three of them Kimi delta attention, the last two with experts. Queries see 16 tokens in pools
    of four, and those behind them."""
    base = Glm5NextConfig(
        vocab_size=VOCAB, hidden_size=40, intermediate_size=64, num_layers=4, num_heads=4, num_kv_heads=4, head_dim=12,
        windows=(None,) * 4, full_layers=(2,), linear_heads=3, linear_head_dim=8, linear_lower_bound=-5.0, q_lora_rank=16,
        kv_lora_rank=16, qk_nope_head_dim=12, qk_rope_head_dim=0, v_head_dim=12, index_topk=16, index_pool=4, index_heads=6,
        index_head_dim=8, streams=2, stream_rounds=4, stream_eps=1e-6, swiglu_limit=10.0, num_experts=4, experts_per_token=2,
        num_shared_experts=1, routing="noaux_tc", num_groups=1, groups_per_token=1, norm_routing_weights=True, routing_scale=1.5,
        num_dense_layers=2, moe_intermediate_size=24, tie_embeddings=True,
    )  # fmt: skip
    return replace(base, **changes)


def kimi_config(**changes) -> KimiLinearConfig:
    """Four layers, three of them Kimi delta attention, the last two with experts."""
    base = KimiLinearConfig(
        vocab_size=VOCAB, hidden_size=40, intermediate_size=64, num_layers=4, num_heads=4, num_kv_heads=4, head_dim=16,
        windows=(None,) * 4, full_layers=(2,), linear_heads=3, linear_head_dim=8, q_lora_rank=None, kv_lora_rank=16,
        qk_nope_head_dim=12, qk_rope_head_dim=4, v_head_dim=12, num_experts=4, experts_per_token=2, num_shared_experts=1,
        routing="noaux_tc", num_groups=1, groups_per_token=1, norm_routing_weights=True, routing_scale=1.5, num_dense_layers=2,
        moe_intermediate_size=24, tie_embeddings=True, rope_interleaved=False,
    )  # fmt: skip
    return replace(base, **changes)


def chosen_config(**changes) -> Qwen4ExpConfig:
    """Four layers over two streams, three of them gated delta nets, of which the first begins with hashed n-grams. Queries see 16
    tokens in blocks of four, and those behind them."""
    base = Qwen4ExpConfig(
        vocab_size=VOCAB, hidden_size=40, intermediate_size=20, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16,
        rope=RopeConfig(theta=1e4, partial=0.5), windows=(None,) * 4, full_layers=(2,), linear_key_heads=2,
        linear_value_heads=6, linear_key_dim=8, linear_value_dim=12, num_experts=4, experts_per_token=2,
        moe_intermediate_size=24, shared_intermediate_size=20, output_gate="sigmoid", streams=2, stream_rank=6, index_heads=6,
        index_head_dim=8, index_block=4, index_topk=16, ngram_layers=(0,), ngram_end=3, ngram_size=3, ngram_heads=2,
        ngram_least=50, ngram_multiple=8, ngram_seed=9, ngram_width=12, ngram_taps=3, tie_embeddings=True,
    )  # fmt: skip
    return replace(base, **changes)


def relative_config(**changes) -> InklingConfig:
    """Four layers with convolutions along the tokens, two of them with a window of 12 and heads of their own, the last two with
    experts. Biases reach 20 tokens back, scores grow from the tenth position on, and three of the tokens are none."""
    base = InklingConfig(
        vocab_size=VOCAB, hidden_size=40, intermediate_size=64, num_layers=4, num_heads=4, num_kv_heads=1, head_dim=16,
        windows=(12, None, 12, None), local_heads=6, local_kv_heads=2, local_head_dim=8, bias_width=3, bias_extent=20,
        growth_floor=10, growth_alpha=0.3, conv_taps=4, dense_layers=(0, 1), num_experts=4, experts_per_token=2,
        moe_intermediate_size=24, num_shared_experts=2, routing_scale=2.0, logit_divisor=1.5, true_vocab=VOCAB - 3,
    )  # fmt: skip
    return replace(base, **changes)


def nothing(leaf: Array) -> float:
    """What an array of a state may hold that nobody reads: NaN, or a token that is none of the text's."""
    return jnp.nan if jnp.issubdtype(leaf.dtype, jnp.floating) else 41


def quiet(weights) -> None:
    """A drafter that is right now and then: it shares the target's embedding, which is the head too, and its own layers say
    little."""
    for name in weights["draft"]:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights["draft"][name] = weights["draft"][name] * 0.0
    if "lm_head.weight" in weights["target"]:
        weights["target"]["lm_head.weight"] = weights["target"]["embed.weight"]


def hybrid_pair(
    target: Qwen35Config
    | Lfm2Config
    | NemotronHConfig
    | Glm5NextConfig
    | KimiLinearConfig
    | Qwen4ExpConfig
    | InklingConfig
    | None = None,
    **options,
) -> Pair:
    """An engine over a hybrid target whose drafter's proposals stand now and then."""
    draft = draft_config(**options.pop("draft", {}))
    return Pair(hybrid_config() if target is None else target, draft, edit=options.pop("edit", quiet), **options)
