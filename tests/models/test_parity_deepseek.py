"""Latent attention and experts against transformers' DeepSeek-V2 and V3, module by module in float32 (see make_golden.py)."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.attention.dense import dense_attend, masked_attention
from dflash_jax.models import bind, parameter_names

from .golden_files import TOLERANCE, cases, difference, golden

CASES = cases("deepseek")


class Recording:
    """An `attend` that keeps what every layer hands to it."""

    def __init__(self):
        self.seen: dict[int, tuple[Any, ...]] = {}
        self.dense = dense_attend()

    def latent(self, layer: Any, q: Any, row: Any, rotary: Any, cache: Any) -> Any:
        self.seen[layer.index] = layer.parts(q, row, rotary)
        return self.dense.latent_parts(layer, *self.seen[layer.index]), cache


class Absorbed:
    """Attention to the latent rows themselves: one key of R + r numbers for all heads, whose first R are the value."""

    def latent(self, layer: Any, q: Any, row: Any, rotary: Any, cache: Any) -> Any:
        q_nope, q_pe, kv_c, k_pe = layer.parts(q, row, rotary)
        rows = jnp.concatenate([kv_c, k_pe], axis=-1)[:, :, None]
        mask = jnp.tril(jnp.ones((1, rows.shape[1], rows.shape[1]), bool))
        out = masked_attention(layer.absorb(q_nope, q_pe), rows, rows, mask, layer.scale)
        return layer.up(out[..., : layer.config.kv_lora_rank]), cache


def halves(x: Any) -> Any:
    """Interleaved rotary dimensions in the order transformers' V3 leaves them in: even ones, then odd ones."""
    return jnp.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)


@functools.cache
def observed(case: str) -> dict[str, Any]:
    """Our value for every name a golden file holds."""
    config, params, inputs, _ = golden(case)
    model, attend = bind(config, params), Recording()
    ids, positions = jnp.asarray(inputs["ids"]), jnp.asarray(inputs["positions"])
    taps = tuple(range(-1, config.num_layers))
    hidden, features, _ = model(ids, positions, attend, taps)
    embed, *blocks = jnp.split(features, len(taps), axis=-1)
    first, sparse = model.layers[0], model.layers[1]
    ours = {"embed": embed, "norm0": first.input_norm(embed), "final_norm": hidden, "logits": model.logits(hidden)}
    ours["attn0"] = first.attn(ours["norm0"], model.rotary(positions), attend)[0]
    ours["mlp0"] = first.mlp(first.post_norm(embed + ours["attn0"]))
    ours["attn1"] = sparse.attn(sparse.input_norm(blocks[0]), model.rotary(positions), attend)[0]
    x = sparse.post_norm(blocks[0] + ours["attn1"])
    rows = x.reshape(-1, x.shape[-1])
    experts, weights = sparse.mlp.router(rows)
    ours["routing1"] = (jax.nn.one_hot(experts, config.num_experts) * weights[..., None]).sum(axis=1)
    ours["experts1"], ours["shared1"] = sparse.mlp.experts(rows, experts, weights), sparse.mlp.shared(x)
    ours["mlp1"] = sparse.mlp(x)
    q_nope, q_pe, kv_c, k_pe = attend.seen[0]
    k_nope, v = first.attn.expand(kv_c)
    if case.startswith(("deepseek_v3", "deepseek_kimi")) and config.rope_interleaved:
        q_pe, k_pe = halves(q_pe), halves(k_pe)
    k_pe = jnp.broadcast_to(k_pe[:, :, None], q_pe.shape)
    ours |= {"q0": jnp.concatenate([q_nope, q_pe], -1), "k0": jnp.concatenate([k_nope, k_pe], -1), "v0": v}
    ours["scale0"] = np.asarray(first.attn.scale)
    return ours | {f"block{index}": block for index, block in enumerate(blocks)}


def test_cases_are_there() -> None:
    assert CASES == [
        "deepseek_kimi", "deepseek_v2_groups", "deepseek_v2_lite", "deepseek_v3", "deepseek_v3_halves"
    ]  # fmt: skip


@pytest.mark.few("deepseek_v*")
@pytest.mark.parametrize("case", CASES)
def test_every_module_agrees(case: str) -> None:
    config, params, _, expected = golden(case)
    assert parameter_names(config) == set(params)
    ours = observed(case)
    expected = {name: value.reshape(ours[name].shape) for name, value in expected.items()}
    assert set(ours) == set(expected)
    errors = {name: difference(ours[name], value) for name, value in expected.items()}
    assert all(error <= TOLERANCE for error in errors.values()), errors


@pytest.mark.parametrize("case", CASES)
def test_absorbed_and_expanded_forms_agree(case: str) -> None:
    config, params, inputs, expected = golden(case)
    model = bind(config, params)
    hidden, _, _ = model(jnp.asarray(inputs["ids"]), jnp.asarray(inputs["positions"]), Absorbed())
    assert difference(model.logits(hidden), expected["logits"]) <= TOLERANCE


def logits_with(case: str, params: dict[str, Any] | None = None, **changes: Any) -> Any:
    config, ours, inputs, _ = golden(case)
    model = bind(dataclasses.replace(config, **changes), ours if params is None else params)
    hidden, _, _ = model(jnp.asarray(inputs["ids"]), jnp.asarray(inputs["positions"]), dense_attend())
    return model.logits(hidden)


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("deepseek_v2_groups", {"routing": "greedy", "num_groups": 1}),
        ("deepseek_v2_groups", {"latent_norm_eps": 1e-2}),
        ("deepseek_v3", {"num_groups": 1, "groups_per_token": 1}),
        ("deepseek_v3", {"norm_routing_weights": False}),
        ("deepseek_v3", {"rope_interleaved": False}),
        ("deepseek_kimi", {"routing_scale": 2.5}),
    ],
)
def test_a_wrong_setting_is_noticed(case: str, changes: dict[str, Any]) -> None:
    _, _, _, expected = golden(case)
    assert difference(logits_with(case, **changes), expected["logits"]) > 100 * TOLERANCE


@pytest.mark.parametrize("name", ["mscale", "mscale_all_dim"])
@pytest.mark.parametrize("case", ["deepseek_v2_lite", "deepseek_v2_groups", "deepseek_v3"])
def test_both_magnitudes_are_noticed(case: str, name: str) -> None:
    config, _, _, expected = golden(case)
    rope = dataclasses.replace(config.rope, **{name: getattr(config.rope, name) + 0.1})
    assert difference(logits_with(case, rope=rope), expected["logits"]) > 100 * TOLERANCE


@pytest.mark.parametrize("case", ["deepseek_v3", "deepseek_kimi", "deepseek_v3_halves"])
def test_the_correction_bias_chooses_but_does_not_weigh(case: str) -> None:
    config, params, _, expected = golden(case)
    without = params | {name: jnp.zeros_like(value) for name, value in params.items() if name.endswith("router.bias")}
    assert difference(logits_with(case, params=without), expected["logits"]) > 100 * TOLERANCE
    if config.norm_routing_weights:
        np.testing.assert_allclose(expected["routing1"].sum(axis=-1), config.routing_scale, rtol=1e-5)
    else:
        assert expected["routing1"].max() < config.routing_scale


def test_half_precision_stays_half_precision() -> None:
    """Routing is float32, with a bias that is float32 in every checkpoint; what comes out has the model's dtype again."""
    config, params, inputs, _ = golden("deepseek_v3")
    narrow = {
        name: value if name.endswith("router.bias") else value.astype(jnp.bfloat16) for name, value in params.items()
    }
    ids, positions = jnp.asarray(inputs["ids"]), jnp.asarray(inputs["positions"])
    model = bind(config, narrow)
    hidden, features, _ = model(ids, positions, dense_attend(), (0, 1, 2))
    assert (hidden.dtype, features.dtype, model.logits(hidden).dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    assert np.isfinite(model.logits(hidden)).all()


def test_views_of_the_up_projection() -> None:
    config, params, _, _ = golden("deepseek_v3")
    attention = bind(config, params).layers[0].attn
    latent = jax.random.normal(jax.random.key(0), (3, config.kv_lora_rank))
    keys, values = attention.expand(latent)
    np.testing.assert_allclose(keys, jnp.einsum("tr,npr->tnp", latent, attention.w_uk), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(values, jnp.einsum("tr,nvr->tnv", latent, attention.w_uv), rtol=1e-4, atol=1e-5)
    assert attention.w_uk.shape == (config.num_heads, config.qk_nope_head_dim, config.kv_lora_rank)
    assert attention.w_uv.shape == (config.num_heads, config.v_head_dim, config.kv_lora_rank)
