"""Llama, Qwen2 and Mistral: what `config.json` means, conversion both ways, plans, and DFlash over them without a changed token."""

import functools
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from dflash_jax.checkpoints.converted import open_converted
from dflash_jax.checkpoints.huggingface import open_checkpoint
from dflash_jax.cli.info import collect, lines
from dflash_jax.errors import ConfigError
from dflash_jax.models import DFlashConfig, family_for, family_of, layer_traits, parameter_names
from dflash_jax.models.presets import LLAMA_TARGETS, MISTRAL_TARGETS, QWEN2_TARGETS
from dflash_jax.sampling_params import SamplingParams
from dflash_jax.text.tokenizer import end_token_ids

from ..convert.conftest import Folders
from ..random_pair import Pair, random_prompts
from .llama_reference import forward, random_file, random_tensors

PUBLISHED = {
    "attention_dropout": 0.0, "bos_token_id": 128_000, "eos_token_id": [128_001, 128_008, 128_009], "hidden_act": "silu",
    "initializer_range": 0.02, "torch_dtype": "bfloat16", "transformers_version": "4.42.3", "use_cache": True,
}  # fmt: skip
LLAMA = PUBLISHED | {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "hidden_size": 4096, "intermediate_size": 14_336,
    "max_position_embeddings": 131_072, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": False, "vocab_size": 128_256,
}  # fmt: skip
QWEN2 = PUBLISHED | {
    "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584, "intermediate_size": 18_944, "max_position_embeddings": 32_768,
    "max_window_layers": 28, "model_type": "qwen2", "num_attention_heads": 28, "num_hidden_layers": 28,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0, "sliding_window": 131_072,
    "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 152_064,
}  # fmt: skip
MISTRAL = PUBLISHED | {
    "architectures": ["MistralForCausalLM"], "hidden_size": 4096, "intermediate_size": 14_336, "max_position_embeddings": 32_768,
    "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 32_768,
}  # fmt: skip
FILES = {"Llama-3.1-8B": LLAMA, "Qwen2.5-7B": QWEN2, "Mistral-7B-v0.3": MISTRAL}


def read(file: dict[str, Any], **changes: Any) -> Any:
    return family_of(file | changes).config(file | changes)


@pytest.mark.parametrize("name", FILES)
def test_published_files_read_as_their_presets(name: str) -> None:
    preset = {**LLAMA_TARGETS, **QWEN2_TARGETS, **MISTRAL_TARGETS}[name]
    assert read(FILES[name]) == preset
    assert type(preset).from_dict(preset.to_dict()) == preset
    assert family_for(preset).name == FILES[name]["model_type"]
    without = {key: value for key, value in FILES[name].items() if key != "architectures"}
    assert family_of(without) is family_for(preset)


def test_a_file_of_transformers_5_reads_as_the_one_before() -> None:
    rope = LLAMA["rope_scaling"] | {"rope_theta": 500_000.0}
    written = {key: value for key, value in LLAMA.items() if key not in ("rope_scaling", "rope_theta", "torch_dtype")}
    assert read(written | {"rope_parameters": rope, "dtype": "bfloat16", "head_dim": 128}) == read(LLAMA)


def test_heads_without_a_size_share_the_hidden_size() -> None:
    assert [read(file, head_dim=None, hidden_size=1792).head_dim for file in FILES.values()] == [56, 64, 56]
    assert [read(file, head_dim=80).head_dim for file in FILES.values()] == [80] * 3


def test_which_projections_have_biases() -> None:
    found = [
        layer_traits(read(*one)).bias for one in ((LLAMA,), (LLAMA | {"attention_bias": True},), (QWEN2,), (MISTRAL,))
    ]
    assert found == ["none", "all", "qkv", "none"]
    assert not any(layer_traits(read(file)).qk_norm for file in FILES.values())
    small = {"num_hidden_layers": 1, "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "head_dim": 2}
    names = [parameter_names(read(file, **small)) for file in (LLAMA | {"attention_bias": True}, QWEN2, MISTRAL)]
    assert [sorted(name for name in each if name.endswith(".bias")) for each in names] == [
        ["layers.0.attn.o_proj.bias", "layers.0.attn.qkv_proj.bias"], ["layers.0.attn.qkv_proj.bias"], []
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("file", "changes", "windows"),
    [
        (LLAMA, {}, {None}), (LLAMA, {"sliding_window": None, "use_sliding_window": False}, {None}),
        (QWEN2, {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 7}, {7}),
        (QWEN2, {"use_sliding_window": True, "sliding_window": 7}, {None}),
        (QWEN2, {"use_sliding_window": True, "max_window_layers": 27, "sliding_window": 7}, {None, 7}),
        (MISTRAL, {"sliding_window": 7}, {7}), (MISTRAL, {"sliding_window": 7, "use_sliding_window": True}, {7}),
    ],
)  # fmt: skip
def test_which_layers_slide(file: dict[str, Any], changes: dict[str, Any], windows: set[int | None]) -> None:
    assert set(read(file, **changes).windows) == windows


def test_an_absent_window_is_the_first_mistrals() -> None:
    file = {key: value for key, value in MISTRAL.items() if key != "sliding_window"}
    assert read(file | {"vocab_size": 32_000, "rope_theta": 1e4}) == MISTRAL_TARGETS["Mistral-7B-v0.1"]


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        (LLAMA, {"mlp_bias": True}, "does not implement: mlp_bias=True"), (LLAMA, {"sliding_window": 4096}, "sliding_window=4096"),
        (LLAMA, {"layer_types": ["full_attention"]}, "layer_types"), (LLAMA, {"use_qk_norm": True}, "use_qk_norm=True"),
        (LLAMA, {"num_local_experts": 4}, "num_local_experts=4"), (LLAMA, {"attention_bias": None, "qkv_bias": True}, "qkv_bias"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act must be silu"), (LLAMA, {"no_rope_layers": [1]}, "no_rope_layers"),
        (QWEN2, {"attention_bias": False}, "attention_bias must be true or absent"), (QWEN2, {"use_mrope": True}, "use_mrope"),
        (QWEN2, {"qkv_bias": False}, "qkv_bias=False"), (MISTRAL, {"attention_bias": True}, "attention_bias must be false"),
        (MISTRAL, {"sliding_window": 7, "use_sliding_window": False}, "use_sliding_window=False"),
        (MISTRAL, {"layer_types": ["sliding_attention"]}, "layer_types"),
    ],
)  # fmt: skip
def test_what_is_refused(file: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(file, **changes)


@pytest.mark.few("1")
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_round_trip_keeps_every_bit(seed: int, tmp_path: Path) -> None:
    """One of each family, with biases and without, tied and not."""
    hf, file = Folders(tmp_path), random_file(seed)
    folder = hf.write("target", file, random_tensors(file, seed), shards=2)
    assert hf.convert(folder, "--output", tmp_path / "out", "--verify", "logits") == 0
    assert open_converted(tmp_path / "out").config == open_checkpoint(folder).config == read(file)
    assert hf.convert(tmp_path / "out", "--reverse", "--output", tmp_path / "back") == 0
    before, after = (
        {name: value for path in sorted(where.glob("*.safetensors")) for name, value in load_file(path).items()}
        for where in (folder, tmp_path / "back")
    )
    assert before.keys() == after.keys()
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)


def test_info_tells_the_family_and_its_plan(tmp_path: Path) -> None:
    hf, file = Folders(tmp_path), random_file(0)
    text = "\n".join(lines(collect(hf.write("target", file, random_tensors(file)), draft=None)))
    assert f"llama from {tmp_path}/target" in text
    assert "no drafter: none lies in" in text


@pytest.mark.few
def test_every_end_token_ends_a_text(tmp_path: Path) -> None:
    """Llama's files list several: each of them ends a text, wherever it comes in a block."""
    hf, file = Folders(tmp_path), random_file(0, eos_token_id=[4, 8, 9])
    folder = hf.write("target", file, random_tensors(file))
    (folder / "generation_config.json").unlink()
    assert set(end_token_ids(folder, None)) == {4, 8, 9}
    pair, prompt = make_pair(0), random_prompts([9])[0]
    text = pair.run([prompt], SamplingParams(max_tokens=30))[0][0]
    for end in set(text):
        cut = pair.run([prompt], SamplingParams(max_tokens=30), eos=(96, end, 95))
        assert cut[0][0] == text[: text.index(end) + 1]
        assert cut[2][0].finish_reason == "eos"


KNOWN = (3, 40)


@functools.cache
def make_pair(seed: int) -> Pair:
    """A random target whose head knows two tokens, so that a random drafter is often right: blocks of 10 as Llama's drafter."""
    file = random_file(seed, tie_word_embeddings=False)
    config: Any = read(file)
    draft = DFlashConfig(
        vocab_size=97, hidden_size=config.hidden_size, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
        windows=(None,) * 2, causal=(False,) * 2, block_size=10, mask_token_id=96, target_layer_ids=(0, 2),
        target_hidden_size=config.hidden_size,
    )  # fmt: skip

    def edit(weights: dict[str, Any]) -> None:
        tensors = tensors_of(file, seed)
        for parameter in family_for(config).parameters(config):
            rows = np.concatenate([tensors[source.name] for source in parameter.sources])
            weights["target"][parameter.name] = jnp.asarray(rows)

    return Pair(config, draft, edit=edit)


def tensors_of(file: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    tensors = random_tensors(file, seed)
    head = np.zeros_like(tensors["lm_head.weight"])
    head[list(KNOWN)] = tensors["lm_head.weight"][list(KNOWN)]
    return tensors | {"lm_head.weight": head}


@pytest.mark.few
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_greedy_text_with_a_drafter_is_that_without(seed: int) -> None:
    """Prompts of several lengths, together and alone, in pages: every token is the float64 model's choice."""
    pair, file = make_pair(seed), random_file(seed, tie_word_embeddings=False)
    prompts, params = random_prompts([1, 5, 33, 70], seed), SamplingParams(max_tokens=40)
    drafted, counts, _ = pair.run(prompts, params)
    plain, _, _ = pair.run(prompts, params, draft=False)
    assert drafted == plain
    assert drafted[3] == pair.run(prompts[3:], params)[0][0]
    taken = {count for each in counts for count in each}
    assert taken >= {1, 2, 3}
    tensors = tensors_of(file, seed)
    for prompt, tokens in zip(prompts, plain, strict=True):
        logits = forward(file, tensors, [*prompt, *tokens])[0][len(prompt) - 1 : -1]
        assert tokens == np.argmax(logits, axis=-1).tolist()
