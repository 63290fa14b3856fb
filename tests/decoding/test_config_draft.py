"""What a drafter's configuration adds: blocks, taps, causality, windows, and what the checkpoint brings itself."""

import json
from typing import Any

import jax.numpy as jnp
import pytest

from dflash_jax.checkpoints.weights import check_draft_vocabulary
from dflash_jax.config import FINAL_HIDDEN
from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.models import DFlashConfig, default_target_layer_ids, family_named
from dflash_jax.models.heads import MarkovConfig, SelectorConfig

from .config_files import DRAFT, REMOVE, SLIDING, changed, draft


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
    with pytest.raises(ConfigError, match=r"dflash_config sets keys .*conv_heads=2"):
        draft(nested={"conv_heads": 2})


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
        (
            {},
            {"mask_token_id": REMOVE},
            "mask_token_id must be an integer of at least 0, got nothing: the key is missing",
        ),
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
        ({}, {"use_aux_hidden_state": False}, "use_aux_hidden_state=false leaves no use for tapped layers"),
        ({}, {"projector_type": "tree"}, "projector_type must be linear, dspark or domino, got 'tree'"),
        ({"markov_rank": -1}, {}, "markov_rank must be an integer of at least 0, got -1"),
        ({"draft_vocab_size": 65}, {}, "draft_vocab_size=65"),
    ],
)
def test_drafters_that_cannot_be(changes: dict[str, Any], nested: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        draft(nested=nested, **changes)


def test_the_targets_last_hidden_states_alone() -> None:
    """vLLM's key: no stream between layers is read, and no projection comes before the norm of what is."""
    nested = {"target_layer_ids": REMOVE, "use_aux_hidden_state": False}
    config = draft(nested=nested)
    assert (config.target_layer_ids, config.projects) == ((FINAL_HIDDEN,), False)
    assert "fc.weight" not in {one.name for one in family_named("dflash").parameters(config)}
    for changes, message in (
        ({"tensors": ("fc.weight",)}, "beside fc.weight, which projects"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4]}, r"leaves no use for tapped layers, here \[2, 4\]"),
        ({"target_hidden_size": 32}, "target_hidden_size=32 must be hidden_size=16"),
    ):
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


# Later members of the family.

CONV, SELECTOR = {"conv_kernel_size": 2, "conv_group_size": 4}, {"selector_rank": 8, "selector_top_k": 5}
MARKOV = {"markov_rank": 8, "sample_from_anchor": True}
SELECTS, MIXES = ("candidate_selector.hidden_projection.weight",), ("markov_head.markov_w1.weight",)


@pytest.mark.parametrize("place", ["nested", "top"])
@pytest.mark.parametrize("name", ["DFlash2DraftModel", "DFlashDraftModel", "Qwen3DFlash2Model"])
def test_dflash_2_is_told_by_its_keys(name: str, place: str) -> None:
    changes: dict[str, Any] = {"nested": CONV | SELECTOR} if place == "nested" else CONV | SELECTOR
    config = draft(SELECTS, architectures=[name], **changes)
    assert config.head == SelectorConfig(rank=8, top_k=5)
    assert (config.conv_taps, config.conv_group, config.num_drafts, config.sample_from_anchor) == (2, 4, 15, False)
    assert DFlashConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_parts_of_dflash_2_stand_alone() -> None:
    assert draft(nested=CONV).head is None
    assert draft(nested=SELECTOR).conv_taps == 0


@pytest.mark.parametrize(
    ("changes", "head"),
    [
        ({}, MarkovConfig(rank=8)),
        ({"markov_head_type": "gated", "dspark_draft_topk": 12}, MarkovConfig(rank=8, form="gated", top_k=12)),
        (
            {"markov_head_type": "rnn", "enable_confidence_head": True},
            MarkovConfig(rank=8, form="rnn", confidence="hidden_and_token", confidence_bias=True),
        ),
        (
            {"enable_confidence_head": True, "confidence_head_with_markov": False},
            MarkovConfig(rank=8, confidence="hidden", confidence_bias=True),
        ),
        ({"enable_confidence_head": False, "confidence_head_with_markov": True}, MarkovConfig(rank=8)),
    ],
)
def test_dspark_is_told_by_its_keys(changes: dict[str, Any], head: MarkovConfig) -> None:
    for name in ("Qwen3DSparkModel", "DSparkDraftModel", "DFlashDraftModel"):
        config = draft(architectures=[name], block_size=7, **MARKOV, **changes)
        assert (config.head, config.num_drafts) == (head, 7)
    forge = draft(architectures=["DSparkDraftModel"], nested={**MARKOV, **changes, "projector_type": "dspark"})
    assert forge.head == head
    assert DFlashConfig.from_dict(json.loads(json.dumps(forge.to_dict()))) == forge


def test_a_confidence_head_without_a_bias_is_told_by_its_tensors() -> None:
    tensors = (*MIXES, "confidence_head.proj.weight")
    found = draft(tensors, **MARKOV).head
    assert found == MarkovConfig(rank=8, confidence="hidden_and_token", confidence_bias=False)


@pytest.mark.parametrize(
    ("changes", "anchored", "told"),
    [
        ({"architectures": ["Qwen3DSparkModel"]}, True, True),
        ({"architectures": ["Qwen3DSparkModel"], "sample_from_anchor": False}, False, False),
        ({"architectures": ["DSparkDraftModel"], "dspark_bonus_anchor": True}, False, False),
        ({"architectures": ["DSparkDraftModel"], "dspark_bonus_anchor": False}, True, False),
        ({"dspark_bonus_anchor": False, "sample_from_anchor": False}, False, False),
        ({"projector_type": "dspark"}, True, True),
    ],
)
def test_where_dspark_predicts_from(changes: dict[str, Any], anchored: bool, told: bool) -> None:
    """Every engine reads files of these trainers alike, and one that is not said is told."""
    notices: list[str] = []
    config = DFlashConfig.from_hf(changed(DRAFT, markov_rank=8, block_size=7, **changes), (), notices)
    assert (config.sample_from_anchor, config.num_drafts) == (anchored, 6 + anchored)
    assert [notice.startswith("sample_from_anchor is absent") for notice in notices] == [True] * told


def test_taps_may_also_be_counted_from_one() -> None:
    assert draft(eagle_aux_hidden_state_layer_ids=[2, 18, 34]) == draft()


@pytest.mark.parametrize(
    ("tensors", "changes", "message"),
    [
        (
            SELECTS,
            {},
            "selector_rank, selector_top_k missing, though other keys or the tensors are those of a candidate selector",
        ),
        ((), {"selector_rank": 8}, "selector_top_k missing"),
        ((), {"selector_rank": 0, "selector_top_k": 4}, "selector_rank must be an integer of at least 1, got 0"),
        ((), SELECTOR | {"selector_top_k": 65}, "selector_top_k=65 candidates are more than the 64 tokens"),
        (
            (),
            {"architectures": ["DFlash2DraftModel"]},
            "names DFlash2DraftModel, but neither its keys .* nor its tensors",
        ),
        ((), {"conv_kernel_size": 2}, "conv_group_size missing"),
        ((), {"conv_kernel_size": 2, "conv_group_size": 5}, "conv_group_size=5 divide hidden_size=16"),
        (("layers.0.mlp_conv.base_kernel",), {}, "conv_kernel_size, conv_group_size missing"),
        (MIXES, {}, "markov_rank missing"),
        ((), MARKOV | {"markov_head_type": "bigram"}, "markov_head_type must be vanilla, gated or rnn, got 'bigram'"),
        ((), MARKOV | {"dspark_draft_topk": 65}, "dspark_draft_topk=65 is more than the 64 tokens"),
        ((), MARKOV | {"final_logit_softcapping": 20.0}, "final_logit_softcapping=20.0 and .* head of kind markov"),
        (
            (),
            {"xpress_rank": 8, "output_multiplier": 0.5},
            "factor of 0.5 on logits beside a draft head of kind xpress",
        ),
        ((), {"xpress_rank": 8, "xpress_block_size": 8}, "needs xpress_block_size=8 to be block_size=16"),
        ((), {"xpress_rank": 8, "sample_from_anchor": True}, "sample_from_anchor must be false with .* kind xpress"),
        ((), {"projector_type": "domino"}, "emb_dim, gru_hidden_dim missing"),
        ((), {"lilicorr_num_layers": 2}, "lilicorr_candidate_topk, .* missing"),
        ((), MARKOV | SELECTOR, "two draft heads, selector and markov"),
        ((), {"markov_rank": 8}, "sample_from_anchor is missing, and engines differ .* set it to true"),
        (
            (),
            MARKOV | {"dspark_bonus_anchor": True},
            "sample_from_anchor=True and dspark_bonus_anchor=True cannot both be",
        ),
        ((), {"eagle_aux_hidden_state_layer_ids": [1, 17, 33]}, "are not target_layer_ids .* counted from 1"),
        ((), {"enable_confidence_head": True}, "enable_confidence_head=True"),
    ],
)
def test_heads_that_cannot_be(tensors: tuple[str, ...], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        draft(tensors, **changes)


def test_our_own_form_of_a_head() -> None:
    """A folder that was converted before there were heads holds a v1 drafter."""
    values = draft().to_dict()
    for name in ("head", "conv_taps", "conv_group"):
        del values[name]
    assert DFlashConfig.from_dict(values) == draft()
    for head in ({"kind": "tree"}, {"kind": "selector", "rank": 4}, [1], {"kind": "selector", "rank": 0, "top_k": 2}):
        with pytest.raises(ConfigError, match=r"head must be one of|expected the fields|rank must be 1 to"):
            DFlashConfig.from_dict(values | {"head": head})
