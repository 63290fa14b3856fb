"""Gemma 4 targets: published files, a folder of transformers' with all that layers may have, conversion, the engine, the plan.

Tokens that the engine decodes are held against `gemma_reference`, a float64 model written from the published descriptions.
"""

import functools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from dflash_jax.attention.paged import PagedAttend
from dflash_jax.cache import make_pages
from dflash_jax.checkpoints.calibration import calibrate
from dflash_jax.checkpoints.converted import open_converted
from dflash_jax.checkpoints.huggingface import open_checkpoint
from dflash_jax.checkpoints.pair import KNOWN_DRAFTERS
from dflash_jax.cli.info import collect, lines
from dflash_jax.errors import ConfigError
from dflash_jax.execution import switches
from dflash_jax.execution.plan import CallShape, PageShape, choose
from dflash_jax.models import DFlashConfig, Gemma4Config, bind, count, family_for, family_of, layer_traits
from dflash_jax.models.presets import DRAFTERS, GEMMA4_TARGETS, TARGETS
from dflash_jax.sampling_params import SamplingParams

from ..convert.conftest import Folders
from ..devices import custom_calls, on
from ..random_pair import Pair, random_prompts
from .gemma_reference import FULL, SLIDING, forward, random_file, random_tensors
from .golden_files import GOLDEN, difference
from .test_parity_llama import logits_and_taps

FOLDER = GOLDEN / "gemma4_folder"
TOLERANCE = (
    3e-5  # scores have no scale, so float32 is further from float64 than elsewhere: transformers' is by up to 1.8e-5
)
TYPES = [FULL if i % 6 == 5 else SLIDING for i in range(60)]
ROPE = {
    FULL: {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
    SLIDING: {"rope_theta": 1e4, "rope_type": "default"},
}  # fmt: skip
TEXT: dict[str, Any] = {
    "attention_bias": False, "attention_k_eq_v": True, "enable_moe_block": False, "final_logit_softcapping": 30.0,
    "global_head_dim": 512, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 5376,
    "hidden_size_per_layer_input": 0, "intermediate_size": 21_504, "layer_types": TYPES, "max_position_embeddings": 262_144,
    "model_type": "gemma4_text", "num_attention_heads": 32, "num_global_key_value_heads": 4, "num_hidden_layers": 60,
    "num_key_value_heads": 16, "num_kv_shared_layers": 0, "rms_norm_eps": 1e-6, "rope_parameters": ROPE, "sliding_window": 1024,
    "tie_word_embeddings": True, "use_bidirectional_attention": "vision", "use_double_wide_mlp": False, "vocab_size": 262_144,
    "vocab_size_per_layer_input": 262_144,
}  # fmt: skip
FILE: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"], "audio_config": None, "boi_token_id": 255_999, "eos_token_id": [1, 106],
    "model_type": "gemma4", "text_config": TEXT, "vision_config": {"model_type": "gemma4_vision"},
}  # fmt: skip
MIXED = {
    "enable_moe_block": True, "hidden_size": 2816, "intermediate_size": 2112, "moe_intermediate_size": 704, "num_experts": 128,
    "num_attention_heads": 16, "num_global_key_value_heads": 2, "num_hidden_layers": 30, "num_key_value_heads": 8,
    "layer_types": TYPES[:30], "top_k_experts": 8,
}  # fmt: skip
# A layer with a window, one without that takes keys for values, and one that attends to that one's keys.
SHARING = {
    "num_hidden_layers": 3, "layer_types": [SLIDING, FULL, FULL], "num_kv_shared_layers": 1, "attention_k_eq_v": True,
    "use_double_wide_mlp": True,
}  # fmt: skip
EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8}


def read(file: dict[str, Any] = FILE, /, **changes: Any) -> Gemma4Config:
    text = {key: value for key, value in (TEXT | changes).items() if value is not ...}
    config = family_of(file).config(file | {"text_config": text})
    assert isinstance(config, Gemma4Config)
    return config


def test_published_files_read_as_their_presets() -> None:
    preset = GEMMA4_TARGETS["gemma-4-31B"]
    assert read() == preset
    assert type(preset).from_dict(preset.to_dict()) == preset
    assert read(**MIXED) == GEMMA4_TARGETS["gemma-4-26B-A4B"]
    written = {str(i): {"head_dim": 512, "num_key_value_heads": 4} for i in range(5, 60, 6)}
    assert read(global_head_dim=..., num_global_key_value_heads=..., per_layer_config=written) == preset
    assert family_of({"model_type": "gemma4_unified"}) is family_of(FILE) is family_for(preset)
    assert preset.key_shapes[4:6] == ((16, 256), (4, 512))


def test_absent_keys_are_those_of_a_release() -> None:
    """Of the unified one layers have no embeddings of their own; a last layer with a window has none after all."""
    unified = {"architectures": ["Gemma4UnifiedForConditionalGeneration"], "text_config": {}}
    config = family_of(unified).config(unified)
    assert isinstance(config, Gemma4Config)
    assert (config.per_layer_width, config.max_position, config.windows[0]) == (0, 262_144, 1024)
    notices: list[str] = []
    small = {"architectures": ["Gemma4ForCausalLM"], "layer_types": [SLIDING] * 30, "num_kv_shared_layers": 0}
    config = family_of(small).config(small, notices=notices)
    assert isinstance(config, Gemma4Config)
    assert (config.per_layer_width, config.windows[-2:]) == (256, (512, None))
    assert "layer_types has a window for the last layer" in notices[0]


def test_presets_have_their_published_size() -> None:
    sizes = {name: count(family_for(config).parameters(config)) for name, config in GEMMA4_TARGETS.items()}
    assert sizes == {
        "gemma-4-31B": 30_697_345_340, "gemma-4-12B": 11_907_350_320, "gemma-4-26B-A4B": 25_233_141_790
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_head_dim": 511}, "even"), ({"num_global_key_value_heads": 3}, "multiple of 3"), ({"top_k_experts": 8}, "top_k"),
        ({"per_layer_config": {"5": {"head_dim": 512}}}, "per_layer_config must give all"), ({"num_experts": 8}, "num_experts=8"),
        ({"num_kv_shared_layers": 56}, "share keys of layers"), (MIXED | {"top_k_experts": 129}, "more than num_experts=128"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional"), ({"per_layer_config": {"5": 1}}, "must be a JSON object"),
        (MIXED | {"moe_intermediate_size": None}, "moe_intermediate_size must be"), ({"num_kv_shared_layers": 60}, "share keys"),
    ],
)  # fmt: skip
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(**changes)


def test_a_folder_that_transformers_wrote_gives_its_logits_and_taps() -> None:
    """All that layers may have; 40 tokens over windows of 9."""
    checkpoint = open_checkpoint(FOLDER)
    with np.load(FOLDER / "expected.npz") as file:
        ids, theirs, taps = file["ids"], file["logits"], file["taps"]
    logits, ours = logits_and_taps(checkpoint.config, checkpoint.load("float32"), ids.tolist())
    assert difference(logits, theirs) <= TOLERANCE
    assert difference(ours, taps) <= TOLERANCE


def test_calibration_sees_every_layer_that_keeps_keys() -> None:
    """Of heads of both shapes; layers that attend to another's have no pools and no scales."""
    checkpoint = open_checkpoint(FOLDER)
    config: Any = checkpoint.config
    scales = calibrate(config, checkpoint.load("float32"), [[1, 2, 3], [4]], cache_dtype="int8")
    assert tuple(one.shape for one in scales.v) == config.key_shapes == ((2, 8), (1, 16), (2, 8))
    assert all((one > 0).all() for one in scales.v)


def test_round_trip_keeps_every_bit(tmp_path: Path) -> None:
    """A checkpoint with a tower, and with the keys' projection of a layer that has no use for it: both are left out."""
    hf, file = Folders(tmp_path), random_file("gemma4_small", 1, **SHARING, **EXPERTS)
    whole = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "text_config": file}
    tensors = random_tensors(file)
    inside = {name.replace("model.", "model.language_model.", 1): array for name, array in tensors.items()}
    more = {
        "model.vision_tower.patch_embedder.input_proj.weight": np.ones((4, 4), np.float32),
        "model.language_model.layers.2.self_attn.k_proj.weight": np.ones((4, 4), np.float32),
    }
    folder = hf.write("target", whole, inside | more, shards=2)
    assert hf.convert(folder, "--output", tmp_path / "out") == 0
    assert open_converted(tmp_path / "out").config == open_checkpoint(folder).config
    assert hf.convert(tmp_path / "out", "--reverse", "--output", tmp_path / "back") == 0
    back = {
        name: value for path in (tmp_path / "back").glob("*.safetensors") for name, value in load_file(path).items()
    }
    assert back.keys() == inside.keys()
    assert all(back[name].tobytes() == inside[name].tobytes() for name in inside)
    text = "\n".join(lines(collect(folder, draft=False)))
    assert re.search(r"gemma4 from", text)
    assert f"of {file['global_head_dim']} in layers without a window" in text
    assert "2 of 4 experts a token" in text


def test_no_fused_runner_takes_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no kernel the attention of layers with heads of 512 over pages in eight bits, or where that is switched off."""

    def plan_of(name: str, stored: str) -> Any:
        pages = PageShape(64, 16, jnp.dtype(stored))
        with on("NVIDIA H100 80GB HBM3"):
            return choose(layer_traits(GEMMA4_TARGETS[name]), CallShape(1, 8, jnp.dtype("bfloat16"), pages))

    for name in GEMMA4_TARGETS:
        monkeypatch.setattr(switches, "WIDE_HEADS", True)
        plan = plan_of(name, "bfloat16")
        assert plan.runner == "plain"
        assert plan.refused("paged_attention") is None
        assert "not 512" in (plan_of(name, "int8").refused("paged_attention") or "")
        monkeypatch.setattr(switches, "WIDE_HEADS", False)
        assert plan_of(name, "bfloat16").refused("paged_attention") == "switched off"
        assert "normed before it is added" in (plan.refused("fused_moe") or "")


@pytest.mark.few("16-False-3", "256-True-4")
@pytest.mark.parametrize(("tokens", "wide", "launches"), [(16, True, 4), (16, False, 3), (256, True, 4)])
def test_attention_is_lowered_for_an_h100(
    tokens: int, wide: bool, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads of 256 and of 512 are written and attended to by kernels, in blocks and in prompts; where that is switched off, XLA
    attends to the latter."""
    monkeypatch.setattr(switches, "WIDE_HEADS", wide)
    small = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 64}
    config: Any = read(**small, num_hidden_layers=2, layer_types=[SLIDING, FULL])
    array = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    params = {one.name: jax.ShapeDtypeStruct(one.shape, jnp.bfloat16) for one in family_for(config).parameters(config)}
    pages = jax.eval_shape(lambda: make_pages(config, 9, 64, jnp.dtype("bfloat16")))
    assert [pool.shape for pool in pages.k] == [(9, 16, 64, 256), (9, 4, 64, 512)]

    def step(params, pages, ids, positions, lengths, table):
        hidden, _, cache = bind(config, params)(ids, positions, PagedAttend(table, positions, lengths, 64), cache=pages)
        return hidden, cache

    ids, rows = array((4, tokens)), array((4,))
    found = custom_calls(step, params, pages, ids, ids, rows, array((4, 16)), kind="NVIDIA H100 80GB HBM3")
    assert found.count("mosaic_gpu_v2") == launches


def test_a_drafter_takes_from_its_target_what_its_file_leaves_out() -> None:
    """The factor on embeddings and the soft cap, where it borrows the embedding and the head; what the file says counts."""
    target, drafter = GEMMA4_TARGETS["gemma-4-31B"], DRAFTERS["gemma-4-31B-it-DFlash"]
    fitted = drafter.fitted(target)
    assert fitted == replace(drafter, embedding_scale=5376**0.5)
    assert fitted.fitted(target) is fitted
    assert replace(drafter, logit_softcap=0.0).fitted(target) == fitted
    assert drafter.fitted(TARGETS["Qwen3-8B"]) is drafter
    own = replace(drafter, own_embedding=True, own_head=True, logit_softcap=0.0)
    assert own.fitted(target) is own
    assert replace(drafter, embedding_scale=1.0).fitted(target).input_scale == drafter.input_scale == 1.0
    assert KNOWN_DRAFTERS["google/gemma-4-31B-it"] == "z-lab/gemma-4-31B-it-DFlash"


def test_greedy_text_with_a_drafter_is_that_without(all_cases: bool) -> None:
    """Prompts of several lengths in pages and across windows, with keys that two layers share: every token is the float64 model's
    choice."""
    file = random_file("gemma4_small", 3, **SHARING, sliding_window=9, tie_word_embeddings=False)
    config: Any = family_of(file).config(file)
    tensors = random_tensors(file, 3)
    head = np.zeros_like(tensors["lm_head.weight"])
    head[[3, 40]] = tensors["lm_head.weight"][[3, 40]]  # a random drafter is often right between two tokens
    tensors["lm_head.weight"] = head
    stored = {
        parameter.name: jnp.asarray(
            np.concatenate([tensors[source.name].reshape(source.taken) for source in parameter.sources])
        )
        for parameter in family_for(config).parameters(config)
    }
    draft = DFlashConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8,
        windows=(None,), causal=(False,), block_size=6, mask_token_id=96, target_layer_ids=(0, 2), target_hidden_size=32,
    )  # fmt: skip
    pair = Pair(config, draft, edit=lambda weights: weights.update(target=stored))
    fitted = pair.engine.draft
    assert fitted is not None
    assert (fitted.embedding_scale, fitted.logit_softcap) == (32**0.5, config.logit_softcap)
    prompts, params = random_prompts([1, 33, 70]), SamplingParams(max_tokens=40)
    drafted, counts, _ = pair.run(prompts, params)
    if all_cases:
        assert drafted == pair.run(prompts, params, draft=False)[0]
    assert {count for each in counts for count in each} >= {1, 2}
    for prompt, tokens in zip(prompts, drafted, strict=True):
        logits = forward(file, tensors, [*prompt, *tokens])[0][len(prompt) - 1 : -1]
        assert tokens == np.argmax(logits, axis=-1).tolist()
