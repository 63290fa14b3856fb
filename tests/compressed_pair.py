"""Small random pairs with a target that attends to compressed keys: a layer of each kind, experts by a table and by choice."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.config import RopeConfig
from dflash_jax.models import family_for
from dflash_jax.models.deepseek_v4 import HEAVY, SLIDING, SPARSE, DeepseekV4Config

from .hybrid_pair import quiet
from .random_pair import VOCAB, Pair, draft_config

KINDS = (SLIDING, SPARSE, HEAVY)


def compressed_config(**changes: Any) -> DeepseekV4Config:
    """Stretches of three tokens that overlap, of which five are chosen, and of ten; windows of seven, over two streams."""
    base = DeepseekV4Config(
        vocab_size=VOCAB, hidden_size=20, intermediate_size=12, num_layers=3, num_heads=4, num_kv_heads=1, head_dim=10,
        rope=RopeConfig(theta=1e4), compress_rope=RopeConfig(theta=1.6e5), rotary_dim=4, max_position=1024, windows=(7,) * 3,
        kinds=KINDS, sparse_rate=3, heavy_rate=10, q_lora_rank=8, out_groups=2, out_rank=6, index_topk=5, index_heads=6,
        index_head_dim=6, streams=2, stream_rounds=3, stream_eps=1e-6, num_experts=4, experts_per_token=2, moe_intermediate_size=12,
        scoring="sqrtsoftplus", routing_scale=1.5, hashed=(True, False, False), swiglu_limit=0.7,
    )  # fmt: skip
    return replace(base, **changes)


def _drawn(config: Any, seed: int, sharpen: float = 4.0) -> dict[str, jax.Array]:
    """Weights of a model by NumPy, as JAX would compile a program for each shape: norms are 1, and nothing is 0."""
    rng, params = np.random.default_rng(seed), dict[str, jax.Array]()
    for one in family_for(config).parameters(config):
        if one.dtype == "int32":
            drawn = rng.integers(0, config.num_experts, one.shape)
        elif one.name.endswith("norm.weight"):
            drawn = np.ones(one.shape)
        else:
            scale = sharpen * (0.02 if one.name.startswith("embed") else one.shape[-1] ** -0.5)
            drawn = rng.normal(size=one.shape) * (scale if len(one.shape) > 1 else 1.0)
        params[one.name] = jnp.array(drawn, one.dtype or "float32")
    return params


def compressed_pair(target: DeepseekV4Config | None = None, **options: Any) -> Pair:
    """An engine over such a target, whose drafter's proposals stand now and then."""
    target = compressed_config() if target is None else target
    sizes = {
        "hidden_size": target.hidden_size,
        "target_hidden_size": target.feature_width,
        "target_layer_ids": (-1, 0, 1),
    }
    return Pair(target, draft_config(**sizes | options.pop("draft", {})), edit=quiet, draw=_drawn, **options)
