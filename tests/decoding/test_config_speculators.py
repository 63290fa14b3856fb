"""Drafters in the layout of the speculators library: the file as its version 0.9 writes it, and z-lab's for the same drafter."""

import dataclasses
from typing import Any

import pytest

from dflash_jax.errors import ConfigError
from dflash_jax.models import DFlashConfig, family_of, layer_traits

from ..published_layouts import LAYOUTS
from .config_files import DRAFT, REMOVE, SLIDING, changed, draft

LAYERS: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": None, "eos_token_id": None, "head_dim": 8,
    "hidden_act": "silu", "hidden_size": 16, "initializer_range": 0.02, "intermediate_size": 32,
    "layer_types": ["full_attention"] * 3, "max_position_embeddings": 512, "max_window_layers": 4, "model_type": "qwen3",
    "num_attention_heads": 4, "num_hidden_layers": 3, "num_key_value_heads": 2, "pad_token_id": None, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1_000_000, "rope_type": "default"}, "sliding_window": None,
    "tie_word_embeddings": False, "transformers_version": "5.23.0", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 64,
}  # fmt: skip
SPECULATORS: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"], "auto_map": {"": "config.DFlashSpeculatorConfig"},
    "aux_hidden_state_layer_ids": [2, 18, 34], "block_size": 16, "draft_vocab_size": 64, "dtype": "float32",
    "mask_token_id": 60, "max_anchors": 1024, "sample_from_anchor": False, "sliding_window_non_causal": False,
    "speculators_config": {
        "algorithm": "dflash", "default_proposal_method": "greedy",
        "proposal_methods": [
            {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 15, "verifier_accept_k": 1}
        ],
        "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "Qwen/Qwen3-8B"},
    },
    "speculators_model_type": "dflash", "speculators_version": "0.9.0", "target_hidden_size": None,
    "tie_word_embeddings": False, "transformer_layer_config": LAYERS, "transformers_version": "5.23.0",
}  # fmt: skip


def read(tensors: tuple[str, ...] = (), layers: dict[str, Any] | None = None, **changes: Any) -> DFlashConfig:
    inner = changed(LAYERS, **(layers or {}))
    file = changed(SPECULATORS, **{"transformer_layer_config": inner} | changes)
    config = family_of(file).config(file, tensors)
    assert isinstance(config, DFlashConfig)
    return config


# z-lab's files tell how many layers the target has, these do not.
ZLAB: dict[str, Any] = {"num_target_layers": REMOVE}


@pytest.mark.parametrize(
    ("layers", "changes", "same"),
    [
        ({}, {}, draft(**ZLAB)),
        ({}, {"architectures": ["DFlashSpeculator"]}, draft(**ZLAB)),
        ({}, {"block_size": 10}, draft(**ZLAB, block_size=10)),
        ({}, {"block_size": REMOVE}, draft(**ZLAB, block_size=8)),
        ({}, {"sample_from_anchor": True}, draft(**ZLAB, sample_from_anchor=True)),
        ({}, {"target_hidden_size": 24}, draft(**ZLAB, target_hidden_size=24)),
        ({}, {"aux_hidden_state_layer_ids": [0, 5]}, draft(**ZLAB, nested={"target_layer_ids": [-1, 4]})),
        ({"num_hidden_layers": 3, **SLIDING}, {}, draft(**ZLAB, **SLIDING)),
        (SLIDING, {"sliding_window_non_causal": True}, draft(**ZLAB, **SLIDING, is_causal=False)),
        ({"rope_parameters": REMOVE, "rope_theta": 5.0}, {}, draft(**ZLAB, rope_theta=5.0)),
    ],
)
def test_it_is_the_drafter_that_zlab_would_describe(
    layers: dict[str, Any], changes: dict[str, Any], same: DFlashConfig
) -> None:
    assert read(layers=layers, **changes) == same


HEADS = {
    "xpress": {"xpress_rank": 6, "xpress_block_size": 16, "xpress_mlp_hidden": 12},
    "dflash2": {"conv_kernel_size": 4, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5},
    "dspark": {
        "markov_rank": 6,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "sample_from_anchor": True,
    },
}


@pytest.mark.parametrize("kind", HEADS)
def test_later_members_of_the_family(kind: str) -> None:
    assert read(speculators_model_type=kind, **HEADS[kind]) == draft(**ZLAB, **HEADS[kind])


def test_what_the_library_takes_for_keys_that_are_absent() -> None:
    """DFlash 2's sliding layers see the whole block, where v1's do not."""
    file = {
        "speculators_model_type": "dflash2",
        "architectures": ["DFlash2DraftModel"],
        "sliding_window_non_causal": REMOVE,
    }
    keys = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
    assert read(layers=SLIDING, **file) == draft(**ZLAB, **SLIDING, is_causal=False, **keys)


def test_a_vocabulary_of_its_own() -> None:
    own = ("lm_head.weight", "d2t", "t2d", "embed_tokens.weight")
    assert read(own, draft_vocab_size=40) == draft(own, **ZLAB, draft_vocab_size=40)


@pytest.mark.parametrize(
    ("layers", "changes", "message"),
    [
        (
            {},
            {"speculators_model_type": "eagle3"},
            "speculators_model_type must be dflash, dflash2, dspark or xpress, got 'eagle3'",
        ),
        (
            {},
            {"speculators_model_type": REMOVE},
            "speculators_model_type must be dflash, dflash2, dspark or xpress, got None",
        ),
        ({}, {"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids must be a list of ids, got None"),
        ({}, {"aux_hidden_state_layer_ids": [-1, 3]}, "aux_hidden_state_layer_ids must be a list of ids"),
        ({}, {"aux_hidden_state_layer_ids": [True, 3]}, "aux_hidden_state_layer_ids must be a list of ids"),
        ({}, {"mask_token_id": None}, "mask_token_id must be an integer"),
        ({}, {"speculators_model_type": "dspark", "markov_rank": 4, "sample_from_anchor": REMOVE}, "set it to true"),
        ({}, {"conv_kernel_size": 2}, "conv_group_size missing"),
        ({"mlp_bias": True}, {}, "mlp_bias=True"),
        ({}, {"transformer_layer_config": [1]}, "transformer_layer_config must be a JSON object"),
    ],
)
def test_what_is_no_dflash_drafter_is_refused(layers: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(layers=layers, **changes)


def test_rotary_pairs_of_both_orders() -> None:
    """vLLM's key for drafters that were trained with pairs next to each other: false is no empty value here."""
    assert draft(is_neox_style=True) == draft()
    assert draft(is_neox_style=False) == dataclasses.replace(
        draft(), rope=dataclasses.replace(draft().rope, paired=True)
    )
    assert "is_neox_style" not in DRAFT


def test_what_the_trainer_copies_of_a_target() -> None:
    """GELU of Gemma's feed-forwards counts; how pictures turn and queries of Mistral Small 4 grow, Qwen3's layers do not read."""
    plain, gelu, pictures, mistral = (
        DFlashConfig.from_hf(LAYOUTS[name])
        for name in (
            "speculators", "speculators, of Gemma", "speculators, of a target with pictures", "speculators, of Mistral Small 4"
        )
    )  # fmt: skip
    assert gelu == dataclasses.replace(plain, activation="gelu_tanh")
    assert layer_traits(gelu).activation == "gelu_tanh"
    assert pictures == dataclasses.replace(plain, rope=dataclasses.replace(plain.rope, theta=1e7))
    assert (mistral.rope.kind, mistral.rope.factor) == ("yarn", 4.0)
    older = {key: value for key, value in plain.to_dict().items() if key != "activation"}
    assert DFlashConfig.from_dict(older) == plain
    with pytest.raises(ConfigError, match="hidden_act must be silu or gelu_pytorch_tanh, got 'relu'"):
        DFlashConfig.from_hf(LAYOUTS["z-lab"] | {"hidden_act": "relu"})
