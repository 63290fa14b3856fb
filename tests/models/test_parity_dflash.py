"""The DFlash drafter against transformers' MuseGlimmerAssistant, and with layers of Gemma 4 against DeepSpec's model, module by
module in float32 (see make_golden.py)."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.attention.dense import dense_attend
from dflash_jax.models import DFlash, DFlashConfig, bind

from .golden_files import TOLERANCE, cases, difference, golden

CASES = cases("dflash")


def observed(config: DFlashConfig, params: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
    """Our value for every name a golden file holds."""
    model: DFlash = bind(config, params)
    queries: dict[str, Any] = {}
    context = model.context(inputs["features"])
    keys_values = model.context_kv(context, inputs["context_positions"])
    dense = dense_attend(context=keys_values)

    def attend(layer: Any, qkv: Any, rotary: Any, cache: Any) -> Any:
        queries[f"q{layer.index}"] = layer.heads(qkv, rotary)[0]
        return dense(layer, qkv, rotary, cache)

    # A drafter with tables of its own must not look at the target's.
    unused = jnp.full((config.vocab_size, config.target_hidden_size), jnp.nan)
    x = model.block_embeddings(inputs["pending"], inputs.get("embed", unused))
    hidden, _ = model(x, inputs["block_positions"], attend)
    ours = {
        "context": context,
        "context_k": keys_values[0],
        "context_v": keys_values[1],
        "block_embeddings": x,
        "hidden": hidden,
    }
    ours |= queries | {"logits": model.logits(hidden, inputs.get("head", unused))}
    if model.head is not None:
        features = jnp.zeros_like(inputs["features"][:, 0])
        block = model.judged(hidden, config.num_drafts, inputs["pending"], unused, unused, features)
        path, law = model.head.propose(block, greedy)
        ours |= {"proposals": path, "proposal_logits": law.logits}
    return ours


def greedy(first: int, scores: Any, tokens: Any) -> tuple[Any, Any]:
    return jnp.argmax(scores, axis=-1).astype(jnp.int32), scores


def test_cases_are_there() -> None:
    assert len(CASES) >= 6


@pytest.mark.few(
    "dflash_gemma4*", "dflash_yarn", "dflash_sinks", "dflash_window_*", "dflash_draft_vocabulary", "dflash_causal_inner"
)
@pytest.mark.parametrize("case", CASES)
def test_every_module_agrees(case: str) -> None:
    config, params, inputs, expected = golden(case)
    ours = observed(config, params, inputs)
    assert set(ours) == set(expected)
    errors = {name: difference(ours[name], value) for name, value in expected.items()}
    assert all(error <= TOLERANCE for error in errors.values()), errors


@pytest.mark.parametrize("case", CASES)
def test_features_one_tap_off_are_noticed(case: str) -> None:
    config, params, inputs, expected = golden(case)
    shifted = jnp.roll(inputs["features"], config.target_hidden_size, axis=-1)
    assert difference(bind(config, params).context(shifted), expected["context"]) > 0.1


@pytest.mark.parametrize("case", CASES)
def test_context_one_position_off_is_noticed(case: str) -> None:
    config, params, inputs, expected = golden(case)
    late = observed(config, params, inputs | {"context_positions": inputs["context_positions"] + 1})
    assert difference(late["context_k"], expected["context_k"]) > 1e-2
    assert difference(late["hidden"], expected["hidden"]) > 10 * TOLERANCE


@pytest.mark.parametrize("case", CASES)
def test_wrong_visibility_in_the_block_is_noticed(case: str) -> None:
    config, params, inputs, expected = golden(case)
    flipped = dataclasses.replace(config, causal=tuple(not causal for causal in config.causal))
    assert difference(observed(flipped, params, inputs)["hidden"], expected["hidden"]) > 1e-2


def test_window_one_token_wider_is_noticed() -> None:
    for case in CASES:
        config, params, inputs, expected = golden(case)
        if set(config.windows) != {None}:
            wider = dataclasses.replace(config, windows=tuple(w and w + 1 for w in config.windows))
            assert difference(observed(wider, params, inputs)["hidden"], expected["hidden"]) > 1e-3


@pytest.mark.parametrize("case", CASES)
def test_the_best_token_is_that_of_the_greatest_logit(case: str) -> None:
    """In the target's ids, whatever head and vocabulary the drafter brings."""
    config, params, inputs, expected = golden(case)
    unused = jnp.full((config.vocab_size, config.target_hidden_size), jnp.nan)
    best = bind(config, params).best(jnp.asarray(expected["hidden"]), inputs.get("head", unused))
    np.testing.assert_array_equal(np.asarray(best), np.argmax(expected["logits"], axis=-1))


def test_only_the_anchor_slot_is_left_out_of_the_proposal() -> None:
    config, params, _, expected = golden("dflash_full")
    assert bind(config, params).proposing(jnp.asarray(expected["hidden"])).shape[1] == config.num_drafts == 7
    config, params, _, expected = golden("dflash_anchor")
    assert bind(config, params).proposing(jnp.asarray(expected["hidden"])).shape[1] == config.num_drafts == 7
