"""Small random pairs: real architectures, sizes that compile in a second.

Two layers and one: each is compiled again in every program.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.engine import Engine
from dflash_jax.engine.requests import Request
from dflash_jax.models import DFlashConfig, Qwen3Config, family_for, fuse_context_projection, init_params
from dflash_jax.sampling_params import SamplingParams

VOCAB = 97


def target_config(**changes) -> Qwen3Config:
    base = Qwen3Config(
        vocab_size=VOCAB, hidden_size=40, intermediate_size=64, num_layers=2, num_heads=5, num_kv_heads=1, head_dim=16,
        windows=(None,) * 2, tie_embeddings=True,
    )  # fmt: skip
    return replace(base, **changes)


def draft_config(**changes) -> DFlashConfig:
    base = DFlashConfig(
        vocab_size=VOCAB, hidden_size=40, intermediate_size=64, num_layers=1, num_heads=5, num_kv_heads=1, head_dim=16,
        windows=(None,), causal=(False,), block_size=5, mask_token_id=VOCAB - 1, target_layer_ids=(-1, 0, 1),
        target_hidden_size=40,
    )  # fmt: skip
    return replace(base, **changes)


def random_params(config, seed: int, sharpen: float = 4.0) -> dict[str, jax.Array]:
    """Random weights whose logits are spread out enough for argmax to be stable."""
    params = init_params(family_for(config).parameters(config), jax.random.key(seed))
    return {name: _times(array, sharpen) if array.ndim > 1 else array for name, array in params.items()}


def _times(array: jax.Array, factor: float) -> jax.Array:
    """By NumPy where bits are the same: JAX would compile a product for each shape."""
    if array.dtype != jnp.float32:
        return array * factor
    return array if factor == 1.0 else jnp.asarray(np.asarray(array) * np.float32(factor))


class Pair:
    """An engine over a random pair, with what tests ask of it."""

    def __init__(self, target=None, draft=None, *, edit=None, draw=random_params, **engine):
        self.target, self.draft = target or target_config(), draft or draft_config()
        weights = {"target": draw(self.target, 0), "draft": draw(self.draft, 1, 1.0)}
        if edit is not None:
            edit(weights)
        weights["draft"] = fuse_context_projection(self.draft, weights["draft"])
        options = {"max_model_len": 160, "page_size": 16, "max_batch": 4, "dtype": jnp.dtype(jnp.float32)} | engine
        self.engine = Engine(target=self.target, draft=self.draft, weights=weights, **options)

    def run(self, prompts, params=None, *, draft=True, cycles=8, eos=()):
        """Token ids and acceptance lengths of each prompt; checks that every page is free afterwards."""
        params = params or SamplingParams(max_tokens=40)
        each = params if isinstance(params, list) else [params] * len(prompts)
        requests = [Request(i, tuple(p), s, eos) for i, (p, s) in enumerate(zip(prompts, each, strict=True))]
        tokens, counts, last = {i: [] for i in range(len(prompts))}, {i: [] for i in range(len(prompts))}, {}
        for update in self.engine.run(requests, draft=draft, cycles=cycles):
            tokens[update.index] += update.tokens
            counts[update.index] += update.counts
            last[update.index] = update
        self.assert_free()
        return list(tokens.values()), list(counts.values()), last

    def assert_free(self):
        for pool in self.engine.groups:
            pool.allocator.check_integrity()
            assert pool.allocator.num_free == pool.allocator.num_pages


def of_one_shape(engine: Engine) -> None:
    """Each program is compiled once, for all slots and the widest table: where a test is about something else."""
    engine.buckets = replace(engine.buckets, batch=engine.buckets.batch[-1:], width=engine.buckets.width[-1:])


def random_prompts(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB - 1, length).tolist() for length in lengths]


@pytest.fixture(scope="session")
def pair() -> Pair:
    """The default pair, shared so that its programs compile once."""
    return Pair()


@pytest.fixture(scope="session")
def make_pair():
    return Pair


@pytest.fixture(scope="session")
def make_prompts():
    return random_prompts


@pytest.fixture(scope="session")
def make_config():
    """Functions that make the default target and drafter configurations with changes."""
    return target_config, draft_config
