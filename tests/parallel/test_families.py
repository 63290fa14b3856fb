"""Experts by expert, latent attention and gated delta nets by heads: devices that share them emit what one emits."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.compile.programs import Programs
from dflash_jax.engine import Engine
from dflash_jax.models import family_for
from dflash_jax.models.deepseek import DeepseekConfig
from dflash_jax.models.deepseek_sparse import SparseDeepseekConfig
from dflash_jax.models.moe import own_choices
from dflash_jax.models.qwen3_moe import Qwen3MoeConfig
from dflash_jax.parallel import collectives
from dflash_jax.parallel.ranks import local_ranks
from dflash_jax.quantization.weights import quantize_shares, quantize_weights

from ..hybrid_pair import hybrid_config
from ..random_pair import Pair, draft_config, random_params
from ..shared_weights import shared_weights

SIZES: Any = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "windows": (None,) * 2}
EXPERTS: Any = {"num_experts": 8, "experts_per_token": 3, "moe_intermediate_size": 16, "norm_routing_weights": True}
TARGETS = {
    "experts": Qwen3MoeConfig(**SIZES, **EXPERTS, num_heads=4, num_kv_heads=2, head_dim=16),
    "latents": DeepseekConfig(
        **SIZES, **EXPERTS, num_heads=4, num_kv_heads=4, head_dim=24, q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16,
        qk_rope_head_dim=8, v_head_dim=16, num_shared_experts=1, routing="noaux_tc", num_groups=2, groups_per_token=1,
        routing_scale=1.0, num_dense_layers=1,
    ),
    "indexed": SparseDeepseekConfig(
        **SIZES, **EXPERTS, num_heads=4, num_kv_heads=4, head_dim=24, q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16,
        qk_rope_head_dim=8, v_head_dim=16, num_shared_experts=1, routing="noaux_tc", num_groups=2, groups_per_token=1,
        routing_scale=1.0, num_dense_layers=1, index_topk=8, index_heads=5, index_head_dim=16, index_interleaved=True,
        indexers=(True, False),
    ),
    "states": replace(hybrid_config(), **SIZES, full_layers=(1,)),
    "shared": replace(
        hybrid_config(), **SIZES, full_layers=(1,), num_experts=8, experts_per_token=3, moe_intermediate_size=16,
        shared_intermediate_size=16,
    ),
}  # fmt: skip
DRAFT = replace(
    draft_config(vocab_size=96, mask_token_id=95, num_heads=4, num_kv_heads=2, num_layers=1, windows=(None,), causal=(False,)),
    hidden_size=32, target_hidden_size=32, target_layer_ids=(-1, 1), block_size=4,
)  # fmt: skip
OPTIONS: Any = {"max_model_len": 64, "page_size": 16, "max_batch": 1, "dtype": jnp.dtype("float32")}


@pytest.mark.few
@pytest.mark.parametrize(("kind", "weight_dtype"), [*((kind, None) for kind in TARGETS), ("states", "fp8")])
def test_greedy(kind, weight_dtype):
    target, ranks = TARGETS[kind], local_ranks(2)
    assert ranks is not None
    pair: Any = Pair(target, DRAFT, **OPTIONS)
    if weight_dtype is not None:
        pair.engine.weights["target"] = quantize_weights(random_params(target, 0), weight_dtype)
    prompts = [np.random.default_rng(2).integers(0, 90, 12).tolist()]
    expected = pair.run(prompts)[:2]
    weights = {"target": random_params(target, 0), "draft": random_params(DRAFT, 1, 1.0)}
    shared: Any = shared_weights([(target, family_for(target)), (DRAFT, family_for(DRAFT))], weights, ranks)
    if weight_dtype is not None:
        shared["target"] = quantize_shares(shared["target"], weight_dtype, ranks)
    pair.engine = Engine(target, DRAFT, shared, programs=Programs(ranks=ranks), **OPTIONS)
    assert pair.run(prompts)[:2] == expected
    if kind == "states":
        return
    experts: Any = shared["target"]["layers.1.mlp.experts.down_proj.weight"]
    assert experts.addressable_shards[1].data.shape == ((4 + (kind == "shared")) * 32, 16)
    pool = pair.engine.take_pools()[0].k[0]
    assert {shard.data.shape[1] for shard in pool.addressable_shards} == {1}


def test_own_choices(monkeypatch):
    """Rank 1 of 2 has experts 4 to 7 of 8: what others have counts for nothing, and stands at one of its own."""
    monkeypatch.setattr("dflash_jax.models.moe.own_rank", lambda: jnp.int32(1))
    experts, weights = jnp.array([[4, 1, 6], [0, 1, 2], [7, 6, 5]]), jnp.array([[0.5, 0.3, 0.2]] * 3)
    own, kept = own_choices(experts, weights, 4)
    np.testing.assert_array_equal(own, [[0, 0, 2], [0, 1, 2], [3, 2, 1]])
    np.testing.assert_allclose(kept, [[0.5, 0, 0.2], [0, 0, 0], [0.5, 0.3, 0.2]])
    # The last one is all tokens', here the fifth: another rank has added it.
    own, kept = own_choices(experts.at[:, -1].set(8), weights, 5, shared=True)
    np.testing.assert_array_equal(own[::2], [[0, 0, 0], [3, 2, 3]])
    np.testing.assert_allclose(kept, [[0.5, 0, 0], [0, 0, 0], [0.5, 0.3, 0]])
    monkeypatch.setattr("dflash_jax.models.moe.own_rank", lambda: jnp.int32(0))
    own, kept = own_choices(experts.at[:, -1].set(8), weights, 5, shared=True)
    np.testing.assert_array_equal(own[:2], [[1, 1, 4], [0, 1, 4]])
    np.testing.assert_allclose(kept, [[0, 0.3, 0.2], [0.5, 0.3, 0.2], [0, 0, 0.2]])
    assert collectives.ranks_here() == 1
