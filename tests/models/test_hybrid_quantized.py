"""Hybrid targets with weights in eight bits: what is rounded and how far, logits against float64, texts, bytes, and ranks."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.checkpoints.weights import held_bytes, weight_shapes
from dflash_jax.decoding.prefill import prefill_chunk
from dflash_jax.decoding.state import Setup
from dflash_jax.models import family_for, init_params, to_huggingface
from dflash_jax.models.layers import linear
from dflash_jax.models.presets import HYBRID_TARGETS
from dflash_jax.models.qwen3_5 import Qwen35Config
from dflash_jax.options import WeightDtype
from dflash_jax.parallel.ranks import local_ranks
from dflash_jax.quantization.weights import Quantized, quantize, quantize_shares, quantize_weights
from dflash_jax.sampling_params import SamplingParams

from ..hybrid_pair import hybrid_config, hybrid_moe_config, hybrid_pair, quiet
from ..random_pair import random_prompts
from .golden_files import TOLERANCE, difference
from .hybrid_oracle import forward
from .test_hybrid_sizes import make_caches
from .test_quantized import dequantized
from .test_qwen3_5 import as_file, random_weights

KINDS: tuple[WeightDtype, ...] = ("int8", "fp8", "fp8_dynamic")
# Columns in sixteens, which are stored in pairs, and others.
SIZES: dict[str, Qwen35Config] = {
    "pairs": hybrid_config(hidden_size=48, linear_value_dim=8, tie_embeddings=False),
    "rows": hybrid_moe_config(num_layers=2, windows=(None,) * 2, full_layers=(1,), dense_layers=()),
}


@pytest.mark.few("24-int8", "48-fp8")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [24, 48])
def test_doubled_rows_are_two_numbers(kind: WeightDtype, width: int) -> None:
    """As exact as in bfloat16, where the row's largest is no more than 64 times as large; other rows are what they were."""
    true = np.random.default_rng(0).uniform(1, 64, (9, width)) * np.logspace(-6, 4, 9)[:, None]
    true[5] = 0
    matrix = jnp.asarray(true, jnp.float32)
    found, alone = quantize(matrix, kind, doubled=4), quantize(matrix, kind)
    assert (found.shape, found.values.shape, alone.values.shape) == ((9, width), (13, width), (9, width))
    np.testing.assert_array_equal(dequantized(found)[:5], dequantized(alone)[:5])
    error = np.abs(dequantized(found) - true)[5:]
    assert (error <= np.abs(true)[5:] * 2.0**-8).all()
    assert (np.abs(dequantized(alone) - true)[5:] > 4 * error).mean() > 0.9 * 3 / 4  # the row of zeros has no error
    x = np.random.default_rng(1).standard_normal((2, 3, width))
    expected = x @ dequantized(found).T
    y = np.asarray(linear(jnp.asarray(x, jnp.float32), found), np.float64)
    assert (np.abs(y - expected) <= 1e-5 * np.abs(expected).max(axis=(0, 1))).all()
    np.testing.assert_allclose(np.asarray(found[jnp.array([7, 1])], np.float64), dequantized(found)[[7, 1]], rtol=1e-6)


@pytest.mark.few("int8-rows")
@pytest.mark.parametrize("case", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_rounded_weights(kind: WeightDtype, case: str) -> None:
    """In float64 of what the rounded matrices stand for, and the states after a prompt in two pieces; of fewer tokens than a format
    rounds rows of."""
    config = SIZES[case]
    params = random_weights(config, 3)
    narrow = quantize_weights({name: jnp.asarray(array) for name, array in params.items()}, kind)
    rounded = [name for name, one in narrow.items() if isinstance(one, Quantized)]
    assert len([name for name in rounded if ".delta." in name]) == 2 * (config.num_layers - len(config.full_layers))
    assert all(narrow[name].doubled == (12 if name.endswith("in_proj.weight") else 0) for name in rounded)  # type: ignore[union-attr]
    wide = params | {name: dequantized(narrow[name]) for name in rounded}  # type: ignore[arg-type]
    tensors = to_huggingface(family_for(config).parameters(config), wide)
    ids = np.random.default_rng(5).integers(0, config.vocab_size, 40)
    logits, _, states = forward(as_file(config), tensors, ids)
    table, step = np.arange(5, dtype=np.int32)[None], jax.jit(partial(prefill_chunk, Setup(config)))
    caches, last = make_caches(config, 5), None
    for start, end in ((0, 23), (23, 40)):
        piece = np.zeros((1, 24), np.int64)
        piece[0, : end - start] = ids[start:end]
        where = np.array([start]), np.array([end - start]), np.array([1])
        caches, last = step({"target": narrow}, table, caches, piece, *where)
    assert difference(np.asarray(last)[0, 0], logits[-1]) < TOLERANCE
    for ours, theirs in zip(caches.recurrent, states, strict=True):
        assert difference(np.asarray(ours.s)[1], theirs) < TOLERANCE


def test_gates_in_two_numbers_keep_the_states() -> None:
    """After 300 tokens, of long memories: decays rounded as other rows are miss the states by several times as much."""
    config = hybrid_config(hidden_size=48, num_layers=2, windows=(None,) * 2, full_layers=(1,))
    params = random_weights(config, 1)
    for name in params:
        if name.endswith("a_log"):
            params[name] = np.full_like(params[name], -3.0)
    ids = np.random.default_rng(2).integers(0, config.vocab_size, 300)
    exact = forward(as_file(config), to_huggingface(family_for(config).parameters(config), params), ids)[2][0]
    missed = []
    for doubled in (12, 0):
        name = "layers.0.delta.in_proj.weight"
        gates = np.array(params[name])
        gates[-12:] = dequantized(quantize(jnp.asarray(params[name]), "fp8", doubled=doubled))[-12:]
        tensors = to_huggingface(family_for(config).parameters(config), params | {name: gates})
        missed.append(difference(forward(as_file(config), tensors, ids)[2][0], exact))
    assert missed[0] < 0.2 * missed[1]


@pytest.mark.few
@pytest.mark.parametrize("kind", KINDS)
def test_same_tokens_with_and_without_drafting(kind: WeightDtype) -> None:
    """And drafts stand now and then."""
    small = hybrid_config(num_layers=2, windows=(None,) * 2, full_layers=(1,))

    def edit(weights: Any) -> None:
        quiet(weights)
        weights["target"] = quantize_weights(weights["target"], kind)

    pair = hybrid_pair(small, max_chunk=48, draft={"target_layer_ids": (-1, 0, 1)}, edit=edit)
    assert isinstance(pair.engine.weights["target"]["layers.0.delta.in_proj.weight"], Quantized)
    prompts, params = random_prompts((1, 40, 9)), SamplingParams(max_tokens=24)
    drafted, counts, _ = pair.run(prompts, params)
    plain, ones, _ = pair.run(prompts, params, draft=False)
    assert drafted == plain
    assert set(np.concatenate(ones)) == {1}
    assert len(set(np.concatenate(counts))) > 1


@pytest.mark.parametrize(("name", "most"), [("Qwen3.5-9B", 9.05), ("Qwen3.5-27B", 27.1)])
def test_bytes_of_published_sizes(name: str, most: float) -> None:
    """A byte for each weight of a matrix, four for each of its rows, and what stays: the sum over the declared parameters."""
    config = HYBRID_TARGETS[name]
    family, dtype = family_for(config), jnp.dtype(jnp.bfloat16)
    expected = 0
    for one in family.parameters(config):
        shape, size = one.shape, {"float32": 4}.get(one.dtype or "", 2)
        matrix = len(shape) == 2 and not one.name.endswith(".conv")
        gates = 2 * config.linear_value_heads if one.name.endswith("in_proj.weight") else 0
        expected += (shape[0] + gates) * (shape[1] + 4) if matrix else size * int(np.prod(shape))
    for kind in KINDS:
        assert held_bytes(weight_shapes([(config, family)], dtype, kind)["target"]) == expected
    assert expected < most * 1e9 < 0.51 * held_bytes(weight_shapes([(config, family)], dtype)["target"])


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_ranks_round_as_if_nobody_shared(kind: WeightDtype) -> None:
    """Each has the gates of its own heads twice, and columns of the output share the scales of all."""
    config, ranks = hybrid_config(linear_value_heads=6), local_ranks(2)
    assert ranks is not None
    table = {one.name: one for one in family_for(config).parameters(config)}
    params = init_params(tuple(table.values()), jax.random.key(2))
    whole = quantize_weights(dict(params), kind)
    placed = {name: ranks.placed(table[name], np.asarray(array)) for name, array in params.items()}
    cut = quantize_shares(placed, kind, ranks)
    for name in ("layers.0.delta.in_proj.weight", "layers.0.delta.out_proj.weight"):
        expected, how, made = dequantized(whole[name]), ranks.cut_of(table[name]), cut[name]  # type: ignore[arg-type]
        assert how is not None
        assert isinstance(made, Quantized)
        assert made.doubled == (6 if name.endswith("in_proj.weight") else 0)
        for rank in range(2):
            values, scales = (
                jnp.asarray(np.asarray(one.addressable_shards[rank].data)) for one in (made.values, made.scales)
            )
            own = Quantized(values, scales, made.dtype, made.paired, doubled=made.doubled)
            np.testing.assert_array_equal(dequantized(own), how.share(expected, rank, 2))
