"""Drafters beyond v1 from folders as their trainers write them: loaded, converted there and back, and used."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dflash_convert.cli import main as dflash_convert
from safetensors.numpy import load_file, save_file

import dflash_jax as dj
from dflash_jax.checkpoints.opening import open_checkpoint
from dflash_jax.models import DFlashConfig, family_named, family_of, to_huggingface
from dflash_jax.models.heads import DominoConfig, LiLiCorrConfig, MarkovConfig, SelectorConfig, XPressConfig

SIZES = {
    "model_type": "qwen3", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 128,
}  # fmt: skip
TARGET = SIZES | {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True}
ZLAB: dict[str, Any] = SIZES | {"num_hidden_layers": 1, "block_size": 4, "num_target_layers": 2}
TAPS = {"mask_token_id": 96, "target_layer_ids": [0, 1]}
DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}
DRAFTERS: dict[str, dict[str, Any]] = {
    "dflash2": ZLAB | {"architectures": ["DFlash2DraftModel"], "dflash_config": TAPS | DFLASH2},
    "dflash2 of speculators": {
        "architectures": ["DFlash2DraftModel"], "speculators_model_type": "dflash2", "block_size": 4, "mask_token_id": 96,
        "aux_hidden_state_layer_ids": [1, 2], "draft_vocab_size": 40, "transformer_layer_config": SIZES, **DFLASH2,
    },
    "dspark": ZLAB | TAPS | {
        "architectures": ["Qwen3DSparkModel"], "markov_rank": 6, "markov_head_type": "vanilla", "enable_confidence_head": True,
        "confidence_head_with_markov": True, "num_anchors": 512,
    },
    "gated dspark": ZLAB | {
        "architectures": ["DSparkDraftModel"], "draft_vocab_size": 40,
        "dflash_config": TAPS | {"projector_type": "dspark", "markov_rank": 6, "markov_head_type": "gated",
            "attention_mode": "gqa"},
    },
    "rnn dspark": ZLAB | TAPS | {
        "architectures": ["DFlashDraftModel"], "markov_rank": 6, "markov_head_type": "rnn", "dspark_draft_topk": 20,
        "sample_from_anchor": False,
    },
    "xpress": ZLAB | {
        "architectures": ["Qwen3XPressModel"],
        "dflash_config": TAPS | {"xpress_rank": 6, "xpress_topc": 20, "xpress_num_passes": 2, "xpress_block_size": 4},
    },
    "lilicorr": ZLAB | {
        "architectures": ["LiLiCorrDraftModel"],
        "dflash_config": TAPS | {
            "lilicorr_enabled": True, "lilicorr_hidden_size": 16, "lilicorr_candidate_topk": 4, "lilicorr_num_heads": 2,
            "lilicorr_mlp_ratio": 2.0, "lilicorr_factor_dim": 6, "lilicorr_vector_eps": 1e-6, "lilicorr_logit_scale": 8.0,
            "lilicorr_num_layers": 2, "conv_kernel_size": 2, "conv_group_size": 8,
        },
    },
    "domino": ZLAB | {
        "architectures": ["DFlashDraftModel"],
        "dflash_config": TAPS | {
            "projector_type": "domino", "shift_label": True, "pure_draft_prefix_len": 1, "gru_hidden_dim": 10, "emb_dim": 6,
        },
    },
}  # fmt: skip
KINDS = {
    "dflash2": SelectorConfig(rank=6, top_k=5), "dflash2 of speculators": SelectorConfig(rank=6, top_k=5),
    "dspark": MarkovConfig(rank=6, confidence="hidden_and_token", confidence_bias=True),
    "gated dspark": MarkovConfig(rank=6, form="gated"), "rnn dspark": MarkovConfig(rank=6, form="rnn", top_k=20),
    "xpress": XPressConfig(rank=6, top_k=20, inner=12, passes=2), "domino": DominoConfig(rank=6, state=10, kept=1),
    "lilicorr": LiLiCorrConfig(
        rank=6, top_k=4, hidden=16, layers=2, heads=2, inner=32, vector_eps=1e-6, score_scale=8.0
    ),
}  # fmt: skip
GREEDY = dj.SamplingParams(max_tokens=24, ignore_eos=True)


def prompts(count: int = int(os.environ.get("HEAD_TEXTS", "2"))) -> list[list[int]]:
    """Drawn ones of 1 to 30 tokens, behind a short and a long one."""
    rng = np.random.default_rng(1)
    drawn = [rng.integers(0, 96, rng.integers(1, 31)).tolist() for _ in range(count - 2)]
    return [[5, 6, 7], list(range(9, 30)), *drawn]


def write(folder: Path, config: dict[str, Any]) -> Path:
    """A Hugging Face folder with random weights, with a head and a map of its own where the vocabulary is smaller."""
    folder.mkdir(parents=True)
    rng, family, own = np.random.default_rng(0), family_of(config), {}
    if "draft_vocab_size" in config:
        own = {"lm_head.weight": None, "d2t": np.sort(rng.integers(0, 57, 40))}
    table = family.parameters(family.config(config, own))
    params = {row.name: (rng.normal(size=row.shape) * 0.3).astype(np.float32) for row in table}
    tensors = {name: np.ascontiguousarray(array) for name, array in to_huggingface(table, params).items()}
    save_file(tensors | {name: array for name, array in own.items() if array is not None}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("target") / "target", TARGET)


@pytest.fixture(scope="module")
def plain(target: Path) -> list[list[int]]:
    """What the target says alone."""
    found = dj.generate(dj.load(target, draft=False, max_batch=2), prompts(), GREEDY)
    return [one.token_ids for one in found]


@pytest.mark.parametrize("kind", DRAFTERS)
def test_keys_tell_what_it_is(kind: str) -> None:
    """As tensors do: a file without its keys is refused, whatever it calls itself."""
    config: Any = family_of(DRAFTERS[kind]).config(DRAFTERS[kind])
    assert config.head == KINDS[kind]
    convolved, anchored = kind.startswith(("dflash2", "lilicorr")), kind in ("dspark", "gated dspark", "domino")
    assert (config.conv_taps, config.num_drafts) == (2 * convolved, 3 + anchored)
    assert DFlashConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    names = [source.name for row in family_named("dflash").parameters(config) for source in row.sources]
    with pytest.raises(dj.ConfigError, match="missing, though other keys or the tensors are those of"):
        DFlashConfig.from_hf(ZLAB | {"dflash_config": TAPS}, names)


@pytest.mark.few("dflash2*", "lilicorr", "xpress", "dspark", "domino")
@pytest.mark.filterwarnings("ignore:the drafter's tokens are hardly ever accepted")  # which begins after 200 cycles
@pytest.mark.parametrize(
    "kind", ["dflash2 of speculators", "dspark", "gated dspark", "rnn dspark", "xpress", "lilicorr", "domino"]
)
def test_it_drafts_what_the_target_says(tmp_path: Path, target: Path, plain: list[list[int]], kind: str) -> None:
    model = dj.load(target, draft=write(tmp_path / "draft", DRAFTERS[kind]), max_batch=2)
    found = dj.generate(model, prompts(), GREEDY)
    assert [one.token_ids for one in found] == plain


@pytest.mark.few("gated dspark")
@pytest.mark.parametrize("kind", ["dflash2 of speculators", "gated dspark", "lilicorr"])
def test_it_is_converted_there_and_back(tmp_path: Path, kind: str) -> None:
    """Every tensor comes back under its name with its bits, and our own form of the configuration is the same."""
    folder = write(tmp_path / "draft", DRAFTERS[kind])
    assert dflash_convert([str(folder), "--output", str(tmp_path / "out"), "--verify", "logits", "--quiet"]) == 0
    assert open_checkpoint(tmp_path / "out").config == open_checkpoint(folder).config
    assert dflash_convert([str(tmp_path / "out"), "--reverse", "--output", str(tmp_path / "back"), "--quiet"]) == 0
    first, last = (load_file(one / "model.safetensors") for one in (folder, tmp_path / "back"))
    assert first.keys() == last.keys()
    assert all(first[name].tobytes() == last[name].tobytes() for name in first)


def test_a_head_without_its_tensors_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "draft", DRAFTERS["dflash2"])
    tensors = load_file(folder / "model.safetensors")
    del tensors["candidate_selector.successor_codebook"], tensors["layers.0.mlp_conv.base_kernel"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(dj.CheckpointError) as error:
        open_checkpoint(folder)
    missing = ("candidate_selector.successor_codebook", "layers.0.mlp_conv.base_kernel")
    assert list(error.value.problems) == [f"tensor {name} is missing" for name in missing]
