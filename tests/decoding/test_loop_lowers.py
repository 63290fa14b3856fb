"""The decode loop lowers for GPUs that are not here, with the attention kernel of each."""

import re

import jax
import jax.numpy as jnp
import pytest

from dflash_jax.decoding.loop import loop
from dflash_jax.engine import MAX_CYCLES, STOP_WIDTH
from dflash_jax.requests import empty_state

from ..devices import on
from ..kernels.test_cross_lowering import CALLS, HAS_JAX_TRITON
from .conftest import draft_config, target_config


@pytest.mark.parametrize("draft", [True, False])
@pytest.mark.parametrize("kind", CALLS)
def test_loop_lowers(make_pair, kind, draft):
    heads = {"num_heads": 4, "head_dim": 64}
    pair = make_pair(target_config(**heads), draft_config(**heads), dtype=jnp.dtype(jnp.bfloat16))
    engine = pair.engine
    engine.weights = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), engine.weights)
    setup = engine.setup(mode="greedy", draft=draft)
    state = empty_state(setup, 2, STOP_WIDTH, engine.dtype, engine.take_pools())
    call = (engine.weights, jnp.zeros((2, 4), jnp.int32), state, jnp.int32(4), jnp.bool_(False), jnp.zeros(2, bool))
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), call)
    with on(kind):
        traced = jax.jit(loop, static_argnums=(0, 1)).trace(setup, MAX_CYCLES, *shapes)
        calls = re.findall(r"custom_call @(\w+)", traced.lower(lowering_platforms=("cuda",)).as_text())
    assert set(calls) == ({CALLS[kind]} if HAS_JAX_TRITON or kind == "NVIDIA H200" else set())
