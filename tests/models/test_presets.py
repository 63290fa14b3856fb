"""Presets against published parameter counts and against what the published files read as."""

import dataclasses
from typing import Any

import pytest

from dflash_jax.checkpoints.pair import KNOWN_DRAFTERS, check_pair
from dflash_jax.config import Qwen3Config
from dflash_jax.errors import PairError
from dflash_jax.models import DFlashConfig, count, default_target_layer_ids, family_for, family_named
from dflash_jax.models.presets import (
    DRAFTERS,
    FLASH_NEXT_TARGETS,
    GEMMA4_TARGETS,
    GPT_OSS_TARGETS,
    HYBRID_TARGETS,
    INKLING_TARGETS,
    LLAMA_TARGETS,
    MISTRAL_TARGETS,
    MOE_TARGETS,
    QWEN2_TARGETS,
    TARGETS,
)

PUBLISHED_COUNTS = {
    "Qwen3-0.6B": 596_049_920, "Qwen3-1.7B": 1_720_574_976, "Qwen3-4B": 4_022_468_096, "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200, "Qwen3-32B": 32_762_123_264,
    "Llama-3.1-8B": 8_030_261_248, "Llama-3.2-1B": 1_235_814_400, "Llama-3.2-3B": 3_212_749_824, "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-7B": 7_615_616_512, "Mistral-7B-v0.1": 7_241_732_096, "Mistral-7B-v0.3": 7_248_023_552,
}  # fmt: skip
TARGET_OF = {
    "Qwen3-4B-DFlash-b16": "Qwen3-4B", "Qwen3-8B-DFlash-b16": "Qwen3-8B", "dflash_qwen3_4b_block7": "Qwen3-4B",
    "dflash_qwen3_8b_block7": "Qwen3-8B", "dflash_qwen3_14b_block7": "Qwen3-14B",
    "Qwen3-Coder-30B-A3B-DFlash": "Qwen3-Coder-30B-A3B-Instruct", "LLaMA3.1-8B-Instruct-DFlash-UltraChat": "Llama-3.1-8B",
    "Qwen2.5-0.5B-DFlash": "Qwen2.5-0.5B", "Qwen3.5-4B-DFlash": "Qwen3.5-4B", "Qwen3.5-9B-DFlash": "Qwen3.5-9B",
    "Qwen3.5-27B-DFlash": "Qwen3.5-27B",
    "Qwen3.5-35B-A3B-DFlash": "Qwen3.5-35B-A3B", "gpt-oss-20b-DFlash": "gpt-oss-20b",
    "gemma-4-31B-it-DFlash": "gemma-4-31B",
}  # fmt: skip
DENSE_TARGETS = {**TARGETS, **LLAMA_TARGETS, **QWEN2_TARGETS, **MISTRAL_TARGETS}


def parameters(config: Any) -> int:
    return count(family_for(config).parameters(config))


def by_formula(config: DFlashConfig) -> int:
    """L (2 D N H + 2 D K H + 3 D F + 2 D + 2 H) + n D^2 + 2 D, and 2 V D for own embeddings and head."""
    d, h = config.hidden_size, config.head_dim
    layer = (
        2 * d * config.num_heads * h
        + 2 * d * config.num_kv_heads * h
        + 3 * d * config.intermediate_size
        + 2 * d
        + 2 * h
    )
    own = 2 * config.vocab_size * d if config.own_head else 0
    return config.num_layers * layer + len(config.target_layer_ids) * d * d + 2 * d + own


@pytest.mark.parametrize("name", DENSE_TARGETS)
def test_targets_have_their_published_size(name: str) -> None:
    assert parameters(DENSE_TARGETS[name]) == PUBLISHED_COUNTS[name]


def test_a_target_with_experts_has_its_published_size() -> None:
    assert count(family_named("qwen3_moe").parameters(MOE_TARGETS["Qwen3-30B-A3B"])) == 30_532_122_624


def test_a_target_with_ngrams_has_the_size_that_transformers_gives() -> None:
    """Of its class at these sizes; a table of n-grams has as many rows as its heads' primes say, and the next multiple."""
    config = FLASH_NEXT_TARGETS["Qwen3.8-Flash-Next"]
    assert parameters(config) == 176_943_899_520
    assert [one.rows for one in config.ngrams] == [320_001_536]


@pytest.mark.parametrize(("name", "weights"), [("Inkling", 947_025_564_226), ("Inkling-Small", 263_655_199_274)])
def test_a_target_with_convolutions_has_the_size_that_transformers_gives(name: str, weights: int) -> None:
    """Of the text model's class at these sizes, with the corrections of experts' scores."""
    assert parameters(INKLING_TARGETS[name]) == weights


def test_qwen3_4b_takes_eight_gigabytes() -> None:
    assert round(2 * parameters(TARGETS["Qwen3-4B"]) / 1e9, 2) == 8.04


def test_published_drafters_have_their_published_size() -> None:
    assert parameters(DRAFTERS["Qwen3-4B-DFlash-b16"]) == 537_427_200
    assert parameters(DRAFTERS["Qwen3-8B-DFlash-b16"]) == 1_048_626_432
    assert round(parameters(DRAFTERS["Qwen3.5-27B-DFlash"]) / 1e9, 3) == 1.730
    assert round(2 * parameters(DRAFTERS["gpt-oss-20b-DFlash"]) / 2**30, 2) == 1.46


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafters_have_the_size_their_shape_gives(name: str) -> None:
    config = DRAFTERS[name]
    assert parameters(config) == by_formula(config)
    tensors = [source.name for parameter in family_named("dflash").parameters(config) for source in parameter.sources]
    assert len(tensors) == len(set(tensors)) == 3 + 11 * config.num_layers + (2 if config.own_head else 0)


@pytest.mark.parametrize("name", DRAFTERS)
def test_taps_are_those_of_the_paper(name: str) -> None:
    config = DRAFTERS[name]
    assert config.target_layer_ids == default_target_layer_ids(config.num_target_layers, len(config.target_layer_ids))
    assert config.mask_token_id < config.vocab_size
    assert len(config.windows) == len(config.causal) == config.num_layers


@pytest.mark.parametrize("name", TARGET_OF)
def test_drafters_fit_their_targets_and_no_other(name: str) -> None:
    for target, config in {
        **DENSE_TARGETS,
        **MOE_TARGETS,
        **HYBRID_TARGETS,
        **GPT_OSS_TARGETS,
        **GEMMA4_TARGETS,
    }.items():
        # Three targets have one shape to a drafter; which of them it was trained with is not for shapes to say.
        if target == TARGET_OF[name] or {target, TARGET_OF[name]} <= {*MOE_TARGETS, "Qwen3-Coder-Next"}:
            check_pair(config, DRAFTERS[name])
        else:
            with pytest.raises(PairError):
                check_pair(config, DRAFTERS[name])


def test_known_drafters_have_presets() -> None:
    for target, draft in KNOWN_DRAFTERS.items():
        if (name := draft.split("/")[1]) not in TARGET_OF:
            continue  # its configuration is not known here; a checkpoint's own file counts anyway
        preset = TARGET_OF[name]
        assert target.split("/")[1] in (preset, f"{preset}-Instruct", f"Meta-{preset}-Instruct", f"{preset}-it")


def as_file(config: Qwen3Config | DFlashConfig) -> dict[str, Any]:
    """The keys both kinds of published file share."""
    rope = config.rope
    scaling = None if rope.kind == "default" else {
        "rope_type": rope.kind, "factor": rope.factor, "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor, "original_max_position_embeddings": rope.original_max_position,
    }  # fmt: skip
    if scaling is not None and rope.kind == "yarn":
        scaling = {key: value for key, value in scaling.items() if not key.endswith("freq_factor")}
        scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
    return {
        "model_type": "qwen3", "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size, "num_hidden_layers": config.num_layers, "hidden_act": "silu",
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps, "rope_theta": rope.theta, "rope_scaling": scaling, "attention_bias": False,
        "max_position_embeddings": config.max_position, "use_sliding_window": False, "sliding_window": None,
        "max_window_layers": config.num_layers, "use_cache": True, "dtype": "bfloat16", "attention_dropout": 0.0,
        "bos_token_id": 151_643, "eos_token_id": 151_645, "initializer_range": 0.02,
    }  # fmt: skip


@pytest.mark.parametrize("name", TARGETS)
def test_a_targets_file_reads_as_its_preset(name: str) -> None:
    config = TARGETS[name]
    file = as_file(config) | {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": config.tie_embeddings}
    assert family_named("qwen3").config(file) == config


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafters_file_reads_as_its_preset(name: str) -> None:
    config = DRAFTERS[name]
    kinds = ["full_attention" if window is None else "sliding_attention" for window in config.windows]
    inner = {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.target_layer_ids)}
    file = as_file(config) | {
        "architectures": ["DFlashDraftModel"], "block_size": config.block_size, "tie_word_embeddings": False,
        "num_target_layers": config.num_target_layers, "layer_types": kinds,
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "dflash_config": inner,
    }  # fmt: skip
    if config.own_head:
        file |= inner | {"dflash_config": None, "sample_from_anchor": True, "markov_rank": 0, "num_anchors": 512}
    if config.logit_softcap:
        file |= {
            "final_logit_softcapping": config.logit_softcap,
            "sliding_window": config.windows[0],
            "use_sliding_window": True,
        }
    family = family_named("dflash")
    tensors = [source.name for parameter in family.parameters(config) for source in parameter.sources]
    assert family.config(file, tensors) == config


def test_presets_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        TARGETS["mine"] = TARGETS["Qwen3-4B"]  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        TARGETS["Qwen3-4B"].num_layers = 1  # type: ignore[misc]
