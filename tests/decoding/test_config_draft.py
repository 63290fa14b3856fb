"""What a drafter's configuration adds: blocks, taps, causality, windows, and what the checkpoint brings itself."""

from typing import Any

import jax.numpy as jnp
import pytest

from dflash_jax.checkpoints.weights import check_draft_vocabulary
from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.models import default_target_layer_ids

from .config_files import REMOVE, SLIDING, draft


def test_a_drafter_is_read() -> None:
    config = draft()
    assert (config.block_size, config.mask_token_id, config.target_layer_ids, config.num_target_layers) == (
        16,
        60,
        (1, 17, 33),
        36,
    )
    assert (config.num_layers, config.num_drafts, config.target_hidden_size) == (3, 15, 16)
    assert config.causal == (False,) * 3
    brought = (config.own_embedding, config.own_head, config.mask_embedding, config.sinks)
    assert not any((*brought, config.sample_from_anchor))


def test_unknown_keys_inside_dflash_config_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"dflash_config sets keys .*conv_kernel_size=2"):
        draft(nested={"conv_kernel_size": 2})


@pytest.mark.parametrize(
    ("changes", "nested", "windows"),
    [
        ({}, {}, (None, None, None)),
        (SLIDING, {}, (9, 9, None)),
        (SLIDING, {"use_swa": True, "swa_window_size": 5}, (5, 5, None)),
        ({"layer_types": REMOVE}, {"use_swa": True, "swa_window_size": 5}, (5, 5, 5)),
        ({"layer_types": REMOVE}, {"use_swa": False, "swa_window_size": 5}, (None, None, None)),
        ({"layer_types": REMOVE, "use_swa": True, "swa_window_size": 5}, {}, (5, 5, 5)),
    ],
)
def test_windows_of_a_drafter(changes: dict[str, Any], nested: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert draft(nested=nested, **changes).windows == windows


def test_a_window_without_a_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="use_swa needs swa_window_size"):
        draft(nested={"use_swa": True}, layer_types=REMOVE)


@pytest.mark.parametrize(
    ("changes", "nested", "causal"),
    [
        ({}, {}, (True, True, False)),  # sliding layers are causal, full ones are not
        ({"causal": True}, {}, (True, True, True)),
        ({"causal": True}, {"causal": False}, (False, False, False)),
        ({}, {"causal": True}, (True, True, True)),
        ({}, {"causal": False, "is_causal": True}, (True, True, True)),
        ({"is_causal": False}, {"causal": True, "is_causal": True}, (False, False, False)),
        ({"is_causal": True, "causal": False}, {"causal": False}, (True, True, True)),
        ({"is_causal": True, "causal": False}, {}, (True, True, True)),
        ({"is_causal": None}, {"causal": None}, (True, True, False)),
    ],
)
def test_which_causality_counts(changes: dict[str, Any], nested: dict[str, Any], causal: tuple[bool, ...]) -> None:
    assert draft(nested=nested, **SLIDING | changes).causal == causal


@pytest.mark.parametrize(
    ("key", "first", "second", "field"),
    [
        ("block_size", 8, 12, "block_size"),
        ("mask_token_id", 11, 12, "mask_token_id"),
        ("target_layer_ids", [2, 4], [3, 5], "target_layer_ids"),
        ("num_target_layers", 40, 44, "num_target_layers"),
        ("target_hidden_size", 24, 32, "target_hidden_size"),
        ("input_embedding_scale", 2.0, 3.0, "embedding_scale"),
        ("output_multiplier", 0.5, 0.25, "logit_scale"),
        ("final_logit_softcapping", 20.0, 30.0, "logit_softcap"),
        ("attention_value_scale", 0.6, 0.7, "value_scale"),
        ("sample_from_anchor", True, False, "sample_from_anchor"),
        ("attention_sink_bias", True, False, "sinks"),
    ],
)
def test_keys_are_read_in_both_places_and_the_inner_one_counts(key: str, first: Any, second: Any, field: str) -> None:
    def value(nested: Any, top: Any) -> Any:
        found = getattr(draft(nested={key: nested}, **{key: top}), field)
        return list(found) if isinstance(found, tuple) else found

    assert value(first, REMOVE) == first
    assert value(REMOVE, first) == first
    assert value(first, second) == first
    assert value(None, first) == first


def test_a_block_proposes_one_token_less_than_it_has_slots_unless_the_anchor_predicts() -> None:
    assert draft(block_size=7).num_drafts == 6
    assert draft(block_size=7, sample_from_anchor=True).num_drafts == 7
    assert draft(block_size=REMOVE).block_size == 16
    spark = ["Qwen3DSparkModel"]  # always drafts from its anchor; its files do not say so
    assert draft(block_size=7, architectures=spark, markov_rank=0).num_drafts == 7
    assert draft(block_size=7, architectures=spark, sample_from_anchor=False).num_drafts == 6
    with pytest.raises(ConfigError, match="block_size must be an integer of at least 2, got 1"):
        draft(block_size=1)


@pytest.mark.parametrize(
    ("changes", "nested", "message"),
    [
        ({}, {"mask_token_id": REMOVE}, "mask_token_id must be an integer of at least 0, got None"),
        ({}, {"mask_token_id": -1}, "mask_token_id must be an integer of at least 0, got -1"),
        ({"num_target_layers": REMOVE}, {"target_layer_ids": REMOVE}, "target_layer_ids is missing"),
        ({}, {"target_layer_ids": []}, "target_layer_ids must be integers of at least -1"),
        ({}, {"target_layer_ids": [1, -2]}, "target_layer_ids must be integers of at least -1"),
        ({}, {"target_layer_ids": [1, "2"]}, "target_layer_ids must be integers"),
        ({}, {"target_layer_ids": 5}, "target_layer_ids must be integers of at least -1 and below 1024, got 5"),
        ({}, {"target_layer_ids": "1,2"}, "target_layer_ids must be integers"),
        ({"attention_sink_bias": "false"}, {}, "attention_sink_bias must be true or false"),
        ({"dflash_config": [1]}, {}, "dflash_config must be a JSON object, got list"),
        ({}, {"target_layer_ids": [1, 36]}, "reach past num_target_layers=36"),
        ({}, {"use_aux_hidden_state": False}, "use_aux_hidden_state=false is not DFlash"),
        ({}, {"projector_type": "domino"}, "projector_type must be linear, got 'domino'"),
        ({"markov_rank": 256}, {}, "markov_rank must be 0"),
        ({"draft_vocab_size": 65}, {}, "draft_vocab_size=65"),
    ],
)
def test_drafters_that_cannot_be(changes: dict[str, Any], nested: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        draft(nested=nested, **changes)


def test_embedding_output_may_be_tapped() -> None:
    assert draft(nested={"target_layer_ids": [-1, 0, 35]}).target_layer_ids == (-1, 0, 35)


def test_taps_may_be_called_layer_ids() -> None:
    assert draft(nested={"target_layer_ids": REMOVE, "layer_ids": [0, 3, 7]}).target_layer_ids == (0, 3, 7)
    assert draft(nested={"target_layer_ids": REMOVE}, layer_ids=[0, 3, 7]).target_layer_ids == (0, 3, 7)
    assert draft(nested={"target_layer_ids": [2, 5], "layer_ids": [0, 3]}).target_layer_ids == (2, 5)


def test_an_eagle_config_is_read_where_dflash_config_says_nothing() -> None:
    eagle = {"target_layer_ids": [2, 4], "mask_token_id": 11}
    config = draft(nested={"target_layer_ids": REMOVE, "mask_token_id": 12}, eagle_config=eagle)
    assert (config.target_layer_ids, config.mask_token_id) == ((2, 4), 12)
    with pytest.raises(ConfigError, match="aux_layers=3"):
        draft(eagle_config={"aux_layers": 3})
    with pytest.raises(ConfigError, match="eagle_config must be a JSON object, got list"):
        draft(eagle_config=[1])


def test_tensors_decide_what_a_drafter_brings_itself() -> None:
    config = draft(("fc.weight", "embed_tokens.weight", "lm_head.weight", "mask_embedding"))
    assert config.own_embedding
    assert config.own_head
    assert config.mask_embedding


def test_a_draft_vocabulary_needs_a_head_of_its_own() -> None:
    assert draft(draft_vocab_size=64).draft_vocab_size == 0
    assert draft(("fc.weight", "lm_head.weight", "d2t"), draft_vocab_size=40).draft_vocab_size == 40
    with pytest.raises(ConfigError, match="draft_vocab_size=40 needs a head of its own"):
        draft(("fc.weight",), draft_vocab_size=40)


@pytest.mark.parametrize("offsets", [[0, 0, 5], [5, 0, 0], [0, 10, 61]])
def test_a_draft_vocabulary_names_tokens_of_the_target(offsets: list[int]) -> None:
    config = draft(("lm_head.weight", "d2t"), draft_vocab_size=3)
    check_draft_vocabulary(config, {"d2t": jnp.array(offsets, jnp.int32)})


@pytest.mark.parametrize(
    "offsets", [[0, 0, 62], [-1, 0, 0], [1, 0, 0], [5, 4, 3]], ids=["past", "before", "twice", "all"]
)
def test_a_draft_vocabulary_that_does_not_fit_is_refused(offsets: list[int]) -> None:
    config = draft(("lm_head.weight", "d2t"), draft_vocab_size=3)
    with pytest.raises(CheckpointError, match="d2t must map each row to its own token below 64"):
        check_draft_vocabulary(config, {"d2t": jnp.array(offsets, jnp.int32)})


# Arguments (layers, features) and what published drafters tap.
TAPS = {
    (36, 5): (1, 9, 17, 25, 33), (32, 5): (1, 8, 15, 22, 29), (40, 5): (1, 10, 19, 28, 37), (64, 5): (1, 16, 31, 46, 61),
    (61, 6): (1, 12, 24, 35, 47, 58), (60, 6): (1, 12, 23, 35, 46, 57), (24, 5): (1, 6, 11, 16, 21), (28, 5): (1, 7, 13, 19, 25),
    (52, 5): (1, 13, 25, 37, 49), (48, 8): (1, 7, 14, 20, 26, 32, 39, 45), (48, 5): (1, 12, 23, 34, 45),
    (40, 8): (1, 6, 11, 16, 22, 27, 32, 37), (24, 1): (12,), (64, 2): (1, 61), (32, 4): (1, 10, 20, 29), (32, 3): (1, 15, 29),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "taps"), TAPS.items(), ids=str)
def test_default_taps(arguments: tuple[int, int], taps: tuple[int, ...]) -> None:
    assert default_target_layer_ids(*arguments) == taps


def test_default_taps_are_used_where_a_file_names_none() -> None:
    config = draft(nested={"target_layer_ids": REMOVE}, num_target_layers=32)
    assert config.target_layer_ids == (1, 15, 29)
