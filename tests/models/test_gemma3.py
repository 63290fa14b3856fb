"""Gemma 3 targets: published files, a folder of transformers', checkpoints with towers, the engine.

Tokens that the engine decodes are held against `gemma_reference`, a float64 model written from the published descriptions.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from dflash_jax.checkpoints.converted import open_converted
from dflash_jax.checkpoints.huggingface import open_checkpoint
from dflash_jax.errors import ConfigError
from dflash_jax.execution.plan import CallShape, choose
from dflash_jax.models import DFlashConfig, Gemma3Config, count, family_for, family_of, layer_traits
from dflash_jax.models.presets import GEMMA3_TARGETS
from dflash_jax.sampling_params import SamplingParams

from ..convert.conftest import Folders
from ..random_pair import Pair, random_prompts
from .gemma_reference import FULL, SLIDING, forward, random_file, random_tensors
from .golden_files import GOLDEN, TOLERANCE, difference
from .test_parity_llama import logits_and_taps

FOLDER = GOLDEN / "gemma3_folder"
# As published with the 4B: nearly all of the text model is what its configuration takes for absent keys.
PUBLISHED: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255_999, "eoi_token_index": 256_000,
    "eos_token_id": [1, 106], "image_token_index": 262_144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10_240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
    "vision_config": {"hidden_size": 1152, "image_size": 896, "model_type": "siglip_vision_model"},
}  # fmt: skip
SMALLEST: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attn_logit_softcapping": None,
    "cache_implementation": "hybrid", "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152, "intermediate_size": 6912, "max_position_embeddings": 32_768, "model_type": "gemma3_text",
    "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1, "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6, "rope_local_base_freq": 10_000, "rope_scaling": None, "rope_theta": 1_000_000, "sliding_window": 512,
    "sliding_window_pattern": 6, "use_cache": True, "vocab_size": 262_144,
}  # fmt: skip
SIZES = {  # of text models: published sizes without the vision tower's 416,866,032, which is the same in all of them
    "gemma-3-1b": 999_885_952, "gemma-3-4b": 3_880_263_168, "gemma-3-12b": 11_766_034_176, "gemma-3-27b": 27_009_346_304,
}  # fmt: skip


def read(file: dict[str, Any] = SMALLEST, /, **changes: Any) -> Gemma3Config:
    config = family_of(file).config({key: value for key, value in (file | changes).items() if value is not ...})
    assert isinstance(config, Gemma3Config)
    return config


def test_published_files_read_as_their_presets() -> None:
    for name, file in (("gemma-3-1b", SMALLEST), ("gemma-3-4b", PUBLISHED)):
        preset = GEMMA3_TARGETS[name]
        assert read(file) == preset
        assert type(preset).from_dict(preset.to_dict()) == preset
    rotations = {
        FULL: {"rope_type": "default", "rope_theta": 1e6}, SLIDING: {"rope_type": "default", "rope_theta": 1e4}
    }  # fmt: skip
    newer = {"rope_local_base_freq": ..., "rope_theta": ..., "rope_scaling": ..., "sliding_window_pattern": ...}
    newer |= {"rope_parameters": rotations, "layer_types": [FULL if i % 6 == 5 else SLIDING for i in range(26)]}
    assert read(**newer) == GEMMA3_TARGETS["gemma-3-1b"]
    assert family_of({"model_type": "gemma3"}) is family_of({"model_type": "gemma3_text"}) is family_of(PUBLISHED)


@pytest.mark.parametrize("name", GEMMA3_TARGETS)
def test_presets_have_their_published_size(name: str) -> None:
    config = GEMMA3_TARGETS[name]
    assert count(family_for(config).parameters(config)) == SIZES[name]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_activation": "gelu"}, "must be gelu_pytorch_tanh"), ({"attention_bias": True}, "attention_bias"),
        ({"layer_types": [FULL]}, "layer_types must list"), ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"final_logit_softcapping": -1.0}, "must be positive, or null"), ({"num_key_value_heads": 3}, "not a multiple"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_type='default'"), ({"sliding_window": 0}, "sliding_window must be"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized .'awq'."), ({"num_experts": 8}, "num_experts=8"),
    ],
)  # fmt: skip
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(**changes)


def test_what_stands_beside_the_text_model_may_not_contradict_it() -> None:
    assert read(PUBLISHED, hidden_size=2560) == read(PUBLISHED)
    with pytest.raises(ConfigError, match=r"beside text_config sets .* hidden_size=2048"):
        read(PUBLISHED, hidden_size=2048)
    assert not read(PUBLISHED, tie_word_embeddings=False).tie_embeddings


def test_a_folder_that_transformers_wrote_gives_its_logits_and_taps() -> None:
    """100 tokens over windows of 20; `taps` are all layers' but the last one's."""
    checkpoint = open_checkpoint(FOLDER)
    with np.load(FOLDER / "expected.npz") as file:
        ids, theirs, taps = file["ids"], file["logits"], file["taps"]
    logits, ours = logits_and_taps(checkpoint.config, checkpoint.load("float32"), ids.tolist())
    assert difference(logits, theirs) <= TOLERANCE
    assert difference(ours[:-1], taps) <= TOLERANCE


@pytest.mark.few
def test_round_trip_keeps_every_bit(tmp_path: Path) -> None:
    """A vision-language checkpoint: its text model is converted, its towers are left out."""
    hf, file = Folders(tmp_path), random_file("gemma3", 1)
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": file}
    tensors = random_tensors(file)
    inside = {name.replace("model.", "language_model.model.", 1): array for name, array in tensors.items()}
    tower = {"vision_tower.vision_model.post_layernorm.weight": np.ones(4, np.float32)}
    folder = hf.write("target", whole, inside | tower, shards=2)
    assert hf.convert(folder, "--output", tmp_path / "out", "--verify", "logits") == 0
    assert open_converted(tmp_path / "out").config == open_checkpoint(folder).config == read(file)
    assert hf.convert(tmp_path / "out", "--reverse", "--output", tmp_path / "back") == 0
    back = {
        name: value for path in (tmp_path / "back").glob("*.safetensors") for name, value in load_file(path).items()
    }
    assert back.keys() == inside.keys()
    assert all(back[name].tobytes() == inside[name].tobytes() for name in inside)


def test_no_fused_runner_takes_its_layers() -> None:
    plan = choose(layer_traits(GEMMA3_TARGETS["gemma-3-4b"]), CallShape(1, 8, jnp.dtype("bfloat16")))
    assert plan.runner == "plain"
    assert "normed before it is added" in (plan.refused("fused_dense") or "")


@pytest.mark.few
def test_greedy_text_with_a_drafter_is_that_without() -> None:
    """Prompts of several lengths in pages and across windows, with both soft caps: every token is the float64 model's choice."""
    file = random_file(
        "gemma3", 3, num_hidden_layers=2, layer_types=[SLIDING, FULL], sliding_window=9, tie_word_embeddings=False
    )
    config: Any = read(file)
    assert config.score_softcap > 0
    tensors = random_tensors(file, 3, scale=2.0)
    head = np.zeros_like(tensors["lm_head.weight"])
    head[[3, 40]] = tensors["lm_head.weight"][[3, 40]]  # a random drafter is often right between two tokens
    tensors["lm_head.weight"] = head
    stored = {
        parameter.name: jnp.asarray(np.concatenate([tensors[source.name] for source in parameter.sources]))
        for parameter in family_for(config).parameters(config)
    }
    draft = DFlashConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8,
        windows=(None,), causal=(False,), block_size=6, mask_token_id=96, target_layer_ids=(0, 1), target_hidden_size=32,
    )  # fmt: skip
    pair = Pair(config, draft, edit=lambda weights: weights.update(target=stored))
    prompts, params = random_prompts([1, 33, 70]), SamplingParams(max_tokens=40)
    drafted, counts, _ = pair.run(prompts, params)
    plain, _, _ = pair.run(prompts, params, draft=False)
    assert drafted == plain
    assert {count for each in counts for count in each} >= {1, 2, 3}
    for prompt, tokens in zip(prompts, plain, strict=True):
        logits = forward(file, tensors, [*prompt, *tokens])[0][len(prompt) - 1 : -1]
        assert tokens == np.argmax(logits, axis=-1).tolist()


def test_a_file_without_caps_is_its_preset() -> None:
    assert replace(read(attn_logit_softcapping=50.0), score_softcap=0.0) == read()
