"""Random configurations of hybrid targets against float64: odd heads, tied and not, prompts that end anywhere around a chunk.

`HYBRID_SIZES` of each family; a few in the suite, as every one is compiled.
"""

import os
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.cache import make_pages
from dflash_jax.cache.recurrent import make_states
from dflash_jax.config import RopeConfig
from dflash_jax.decoding.prefill import Caches, prefill_chunk
from dflash_jax.decoding.state import Setup
from dflash_jax.models import family_for, to_huggingface
from dflash_jax.models.qwen3_5 import Qwen35Config

from ..hybrid_pair import hybrid_config, hybrid_moe_config
from .golden_files import TOLERANCE, difference
from .hybrid_oracle import forward
from .test_qwen3_5 import as_file, random_weights

FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
COUNT = int(os.environ.get("HYBRID_SIZES", "3"))
# Most prompts: over several chunks of 64 and rows of 40.
LONGEST, ROW = 300, 40


def drawn(family: str, seed: int) -> Qwen35Config:
    """A configuration of two to four layers, at least one of them with attention and one without. In two of three models with
    experts the shared one is as wide as the others.
    """
    rng = np.random.default_rng(FAMILIES.index(family) * 100 + seed)
    layers, kv, keys = int(rng.integers(2, 5)), int(rng.integers(1, 4)), int(rng.integers(1, 4))
    full = tuple(sorted(rng.choice(layers, int(rng.integers(1, layers)), replace=False).tolist()))
    sizes: dict[str, Any] = {
        "hidden_size": int(rng.integers(3, 7)) * 8, "num_layers": layers, "windows": (None,) * layers, "full_layers": full,
        "num_heads": kv * int(rng.integers(1, 4)), "num_kv_heads": kv, "head_dim": int(rng.choice([8, 16])),
        "rope": RopeConfig(theta=float(rng.choice([1e4, 1e7])), partial=float(rng.choice([0.25, 0.5]))),
        "linear_key_heads": keys, "linear_value_heads": keys * (seed % 3 + 1), "linear_key_dim": int(rng.choice([4, 8, 12])),
        "linear_value_dim": int(rng.choice([4, 8, 12])), "tie_embeddings": bool(seed % 2), "dense_layers": (),
    }  # fmt: skip
    if family == "qwen3_5":
        return hybrid_config(**sizes)
    experts = int(rng.integers(3, 7))
    routed = {
        "num_experts": experts, "experts_per_token": int(rng.integers(1, experts)),
        "shared_intermediate_size": 24 if seed % 3 else 20,
    }  # fmt: skip
    if family == "qwen3_5_moe":
        return hybrid_moe_config(**sizes | routed, grouped_projections=False, experts_in_one=bool(seed % 2))
    return hybrid_moe_config(**sizes | routed)


def model_of(config: Qwen35Config, seed: int) -> tuple[dict[str, np.ndarray], Any]:
    """Parameters, and what the oracle makes of a prompt. In every third model queries and keys are so small that what is added
    to the sum of their squares counts."""
    params = random_weights(config, seed)
    if seed % 3 == 0:
        for name in params:
            if "conv" in name:
                params[name] = params[name] * 1e-3
    tensors = to_huggingface(family_for(config).parameters(config), params)
    return params, partial(forward, as_file(config), tensors)


def make_caches(config: Qwen35Config, pages: int) -> Caches:
    """Two slots whose states are NaN."""
    dtype = jnp.dtype("float32")
    states = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), make_states(config, 2, dtype))
    return Caches(make_pages(config, pages, 16, dtype), make_pages(config, 1, 16, dtype), states)


@pytest.mark.few("qwen3_5_moe-2")
@pytest.mark.parametrize("seed", range(COUNT))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_drawn_model_is_that_of_float64(family: str, seed: int) -> None:
    """Prompts of 1 to 300 tokens in pieces: logits after the last token, and all states."""
    config = drawn(family, seed)
    params, oracle = model_of(config, seed)
    rng, rows = np.random.default_rng(seed), -(-LONGEST // ROW)
    ids = rng.integers(0, config.vocab_size, LONGEST)
    table, step = np.tile(np.arange(20, dtype=np.int32), (rows, 1)), jax.jit(partial(prefill_chunk, Setup(config)))
    for count in (LONGEST, int(rng.integers(1, 64)), int(rng.integers(64, LONGEST))):
        logits, _, states = oracle(ids[:count])
        pieces, starts = np.full((rows, ROW), config.vocab_size - 1), np.arange(rows) * ROW
        pieces.reshape(-1)[:count] = ids[:count]
        lengths = np.clip(count - starts, 0, ROW)
        slots = np.where(lengths > 0, 1, 2)
        found, last = step({"target": params}, table, make_caches(config, 20), pieces, starts, lengths, slots)
        assert difference(np.asarray(last)[(count - 1) // ROW, 0], logits[-1]) < TOLERANCE
        for ours, theirs in zip(found.recurrent, states, strict=True):
            assert difference(np.asarray(ours.s)[1], theirs) < TOLERANCE


def test_a_prompt_cut_anywhere_around_a_chunk_or_the_convolution() -> None:
    """The second call begins 1 to 3 tokens after the beginning, or 1 to 7 before or after a chunk's end."""
    config = hybrid_config(num_layers=2, windows=(None,) * 2, full_layers=(1,))
    params, oracle = model_of(config, 1)
    ids = np.random.default_rng(8).integers(0, config.vocab_size, 80)
    logits, _, states = oracle(ids)
    table, step = np.arange(5, dtype=np.int32)[None], jax.jit(partial(prefill_chunk, Setup(config)))
    for cut in (1, 2, 3, *range(57, 72)):
        caches, last = make_caches(config, 5), None
        for start, end in ((0, cut), (cut, 80)):
            piece = np.full((1, 80), config.vocab_size - 1)
            piece[0, : end - start] = ids[start:end]
            where = np.array([start]), np.array([end - start]), np.array([1])
            caches, last = step({"target": params}, table, caches, piece, *where)
        assert difference(np.asarray(last)[0, 0], logits[-1]) < TOLERANCE
        for ours, theirs in zip(caches.recurrent, states, strict=True):
            assert difference(np.asarray(ours.s)[1], theirs) < TOLERANCE
