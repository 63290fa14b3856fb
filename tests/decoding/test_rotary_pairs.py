"""Heads whose neighbouring entries turn together: the same model in another order of rows drafts, verifies and emits the same."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from dflash_jax.config import RopeConfig
from dflash_jax.sampling_params import SamplingParams

from ..random_pair import Pair, draft_config, random_prompts, target_config

HALVES = RopeConfig(partial=0.5)
DIM, TURNING = 16, 8


def neighbours(heads: jax.Array) -> jax.Array:
    """`[..., H]` in which what turned with an entry half of the turning ones away lies beside it."""
    first, second, rest = jnp.split(heads, [TURNING // 2, TURNING], axis=-1)
    return jnp.concatenate([jnp.stack([first, second], axis=-1).reshape(*first.shape[:-1], TURNING), rest], axis=-1)


def reordered(weights: dict[str, dict[str, jax.Array]]) -> None:
    """Rows of queries and keys, their biases and their norms."""
    for params in weights.values():
        for name, array in params.items():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                params[name] = neighbours(array)
            elif "attn.qkv_proj" in name:
                heads = jnp.moveaxis(array.reshape(-1, DIM, array.size // len(array)), 1, -1)
                turned = jnp.concatenate([neighbours(heads[:-1]), heads[-1:]])  # one head of values
                params[name] = jnp.moveaxis(turned, -1, 1).reshape(array.shape)


def edit(weights: dict[str, dict[str, jax.Array]]) -> None:
    """Biases and norms that tell entries apart."""
    for params in weights.values():
        for seed, name in enumerate(sorted(params)):
            if name.endswith(("q_norm.weight", "k_norm.weight", "qkv_proj.bias")):
                noise = jax.random.uniform(jax.random.key(seed), params[name].shape, minval=-0.5, maxval=0.5)
                params[name] = params[name] + noise


def test_the_same_model_in_another_order() -> None:
    prompts, params = random_prompts((23, 17)), SamplingParams(max_tokens=24)
    configs = target_config(attention_bias=True), draft_config(attention_bias=True)

    def served(rope: RopeConfig, change) -> tuple:
        target, draft = (replace(config, rope=rope) for config in configs)
        pair = Pair(target, draft, edit=lambda weights: (edit(weights), change(weights)), max_batch=2, max_model_len=64)
        pair.engine.buckets = replace(pair.engine.buckets, batch=(2,), width=pair.engine.buckets.width[-1:])
        return pair.run(prompts, params)[:2]

    expected = served(HALVES, lambda weights: None)
    paired = replace(HALVES, paired=True)
    assert served(paired, reordered) == expected
    # The order matters: rows as they were are another model.
    assert served(paired, lambda weights: None) != expected
