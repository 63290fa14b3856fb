"""Routing by hand, and all ways through the experts against loops over tokens in float64."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dflash_jax.models.moe import Experts, MoE, Router, _blocks, route
from dflash_jax.models.presets import DEEPSEEK_TARGETS, MOE_TARGETS

from ..devices import custom_calls

SMALL = dataclasses.replace(
    DEEPSEEK_TARGETS["DeepSeek-V3"], hidden_size=24, moe_intermediate_size=10, num_experts=8, experts_per_token=3,
    num_groups=4, groups_per_token=2,
)  # fmt: skip


def experts_with(config: Any, dtype: Any = jnp.float32) -> Experts:
    module = Experts(config)
    for index, linear in enumerate((module.gate_up_proj, module.down_proj)):
        shape = linear.weight[...].shape
        values = jax.random.normal(jax.random.key(index), shape) * shape[-1] ** -0.5
        linear.weight = nnx.Param(values.astype(dtype))
    return module


def one_by_one(config: Any, module: Experts, x: Any, experts: Any, weights: Any) -> np.ndarray:
    """Token after token through its own experts."""
    e, f = config.num_experts, config.moe_intermediate_size
    gate_up = np.asarray(module.gate_up_proj.weight[...], np.float64).reshape(e, 2 * f, -1)
    down = np.asarray(module.down_proj.weight[...], np.float64).reshape(e, -1, f)
    x, weights, out = np.asarray(x, np.float64), np.asarray(weights, np.float64), np.zeros(x.shape)
    for token, row in enumerate(np.asarray(experts)):
        for expert, weight in zip(row, weights[token], strict=True):
            gate, up = np.split(gate_up[expert] @ x[token], 2)
            out[token] += weight * (down[expert] @ (gate / (1 + np.exp(-gate)) * up))
    return out


@pytest.mark.few("float32-*-1", "float32-*-33")
@pytest.mark.parametrize("tokens", [1, 2, 33])
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)])
def test_each_token_goes_through_its_own_experts(tokens: int, dtype: Any, tolerance: float) -> None:
    x = jax.random.normal(jax.random.key(2), (tokens, SMALL.hidden_size)).astype(dtype)
    chosen, weights = route(SMALL, jax.random.normal(jax.random.key(3), (tokens, SMALL.num_experts)) * 2)
    module = experts_with(SMALL, dtype)
    theirs = one_by_one(SMALL, module, x, chosen, weights)
    for way in (module, module.chosen, module.every, module.grouped):
        ours = way(x, chosen, weights)
        assert ours.dtype == dtype
        assert np.abs(np.asarray(ours, np.float64) - theirs).max() <= tolerance * np.abs(theirs).max()


@pytest.mark.parametrize(("count", "rows", "tokens"), [(8, 4, 1), (8, 4, 50), (5, 16, 33)])
def test_blocks_hold_every_row_once_and_one_expert_each(count: int, rows: int, tokens: int) -> None:
    experts = jax.vmap(lambda key: jax.random.permutation(key, count)[:3])(
        jax.random.split(jax.random.key(tokens), tokens)
    )
    blocks = _blocks(experts, count, rows)
    places = np.asarray(blocks.places)
    assert len(np.unique(places)) == places.size
    assert (np.asarray(blocks.tokens)[places] == np.arange(tokens)[:, None]).all()
    assert (np.asarray(blocks.experts)[places // rows] == np.asarray(experts)).all()
    full = -(-np.bincount(np.asarray(experts).ravel(), minlength=count) // rows)
    assert int(blocks.used) == full.sum() <= len(blocks.experts)
    assert len(blocks.tokens) == rows * len(blocks.experts)


def test_few_tokens_read_their_experts_alone() -> None:
    """Two tokens of three experts among eight gather them; three tokens go through all eight."""
    module = experts_with(SMALL)
    for tokens, gathers in ((2, True), (3, False)):
        arguments = jnp.ones((tokens, 24)), jnp.zeros((tokens, 3), jnp.int32), jnp.ones((tokens, 3))
        assert ("gather" in str(jax.make_jaxpr(module)(*arguments))) == gathers


@pytest.mark.parametrize(("tokens", "kernels"), [(1, 0), (2, 1), (576, 1), (577, 2)])
def test_ways_on_an_h200(tokens: int, kernels: int) -> None:
    """One token gathers its experts, some hundred stream them in one launch, more go in blocks, a launch for each product."""
    config = MOE_TARGETS["Qwen3-30B-A3B"]

    def call(gate_up: jax.Array, down: jax.Array, *args: jax.Array) -> jax.Array:
        module = nnx.eval_shape(lambda: Experts(config))
        module.gate_up_proj.weight, module.down_proj.weight = nnx.Param(gate_up), nnx.Param(down)
        return module(*args)

    rows = [(128 * 2 * 768, 2048), (128 * 2048, 768), (tokens, 2048)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in rows]
    routes = [jax.ShapeDtypeStruct((tokens, 8), dtype) for dtype in (jnp.int32, jnp.float32)]
    assert custom_calls(call, *arrays, *routes).count("mosaic_gpu_v2") == kernels


def test_an_expert_that_overflows_harms_only_its_own_tokens() -> None:
    module = experts_with(SMALL)
    weight = module.down_proj.weight[...].reshape(8, 24, -1).at[5].set(jnp.inf).reshape(-1, 10)
    module.down_proj.weight = nnx.Param(weight)
    chosen, weights = jnp.array([[0, 1, 2], [3, 5, 7], [6, 7, 0]]), jnp.full((3, 3), 0.5)
    x = jax.random.normal(jax.random.key(2), (3, SMALL.hidden_size))
    assert np.isfinite(module.every(x, chosen, weights)).all(axis=-1).tolist() == [True, False, True]


def test_no_token_is_dropped_when_all_take_the_same_experts() -> None:
    x = jax.random.normal(jax.random.key(2), (50, SMALL.hidden_size))
    chosen, weights = jnp.tile(jnp.array([[7, 0, 3]]), (50, 1)), jnp.full((50, 3), 0.5)
    module = experts_with(SMALL)
    theirs = one_by_one(SMALL, module, x, chosen, weights)
    np.testing.assert_allclose(module(x, chosen, weights), theirs, rtol=1e-4, atol=1e-5)


def test_a_token_does_not_depend_on_its_batch() -> None:
    module = MoE(SMALL)
    module.experts = experts_with(SMALL)
    module.router.weight = nnx.Param(jax.random.normal(jax.random.key(4), (SMALL.num_experts, SMALL.hidden_size)))
    x = jax.random.normal(jax.random.key(2), (40, SMALL.hidden_size))
    whole = module(x)
    order = jax.random.permutation(jax.random.key(5), 40)
    np.testing.assert_allclose(module(x[order]), whole[order], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(module(x[11:12]), whole[11:12], rtol=1e-5, atol=1e-6)


def test_gradients_reach_router_and_experts() -> None:
    module = MoE(SMALL)
    module.experts = experts_with(SMALL)
    x = jax.random.normal(jax.random.key(2), (9, SMALL.hidden_size))
    grads = nnx.grad(lambda m: (m(x) ** 2).sum())(module)
    for leaf in (grads.router.weight, grads.experts.gate_up_proj.weight, grads.experts.down_proj.weight):
        assert np.isfinite(leaf[...]).all()
        assert np.abs(leaf[...]).max() > 0


def routed(logits: list[float], bias: list[float] | None = None, **changes: Any) -> dict[int, float]:
    config = dataclasses.replace(SMALL, routing_scale=2.0, norm_routing_weights=False, **changes)
    offsets = None if bias is None else jnp.asarray(bias)
    chosen, weights = route(config, jnp.asarray([logits]), offsets)
    return dict(zip(chosen[0].tolist(), weights[0].tolist(), strict=True))


def softmax(logits: list[float]) -> np.ndarray:
    powers = np.exp(np.asarray(logits))
    return powers / powers.sum()


LOGITS = [3.0, -3.0, 2.0, 1.9, 2.1, -3.0, 0.0, 0.5]


def test_greedy_takes_the_largest() -> None:
    found = routed(LOGITS, routing="greedy", num_groups=1, groups_per_token=1)
    assert found == pytest.approx({index: 2 * softmax(LOGITS)[index] for index in (0, 4, 2)}, rel=1e-5)


def test_groups_are_ranked_by_their_best_expert() -> None:
    """Groups of two: 0-1 and 4-5 have the best experts, so 2 and 3 stay out although they beat all others there."""
    found = routed(LOGITS, routing="group_limited_greedy")
    assert set(found) in ({0, 4, 1}, {0, 4, 5})
    assert found[0] == pytest.approx(2 * softmax(LOGITS)[0], rel=1e-5)


def test_without_auxiliary_loss_groups_are_ranked_by_their_two_best() -> None:
    """2-3 has the highest sum of two, then 0-1 by its first; the bias moves the choice and leaves the weights alone."""
    scores = 1 / (1 + np.exp(-np.asarray(LOGITS)))
    assert routed(LOGITS) == pytest.approx({index: 2 * scores[index] for index in (2, 3, 7)}, rel=1e-5)
    bias = [0.0] * 6 + [-5.0, -5.0]
    assert routed(LOGITS, bias) == pytest.approx({index: 2 * scores[index] for index in (0, 2, 3)}, rel=1e-5)


def test_negative_choices_do_not_lose_to_closed_groups() -> None:
    """A closed group counts as minus infinity, not as zero, which would beat every expert of negative choice."""
    assert set(routed(LOGITS, [-5.0] * 6 + [-9.0] * 2)) <= {0, 1, 2, 3}


def test_weights_add_up_to_the_scale() -> None:
    config = dataclasses.replace(SMALL, routing_scale=2.5)
    _, weights = route(config, jax.random.normal(jax.random.key(0), (20, SMALL.num_experts)))
    np.testing.assert_allclose(weights.sum(axis=-1), 2.5, rtol=1e-5)


def test_scores_are_float32_in_a_model_of_half_precision() -> None:
    """Against float64: rounded to bfloat16 anywhere on the way, weights would be off by thousandths."""
    router = Router(SMALL)
    router.weight = nnx.Param((jax.random.normal(jax.random.key(0), (8, 24)) / 3).astype(jnp.bfloat16))
    x = jax.random.normal(jax.random.key(1), (50, 24)).astype(jnp.bfloat16)
    experts, weights = router(x)
    scores = 1 / (1 + np.exp(-np.asarray(x, np.float64) @ np.asarray(router.weight[...], np.float64).T))
    chosen = np.take_along_axis(scores, np.asarray(experts), axis=-1)
    assert weights.dtype == jnp.float32
    np.testing.assert_allclose(weights, SMALL.routing_scale * chosen / chosen.sum(-1, keepdims=True), rtol=2e-6)
