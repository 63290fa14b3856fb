"""Drafters with layers of Gemma 4: the published file, drawn sizes against float64, folders, the engine, what is refused.

Module by module DeepSpec's own model is held against ours in `test_parity_dflash`.
"""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import dflash_jax as dj
from dflash_jax.attention.dense import dense_attend
from dflash_jax.checkpoints.converted import open_converted
from dflash_jax.checkpoints.huggingface import open_checkpoint
from dflash_jax.checkpoints.pair import check_pair
from dflash_jax.cli.info import collect, lines
from dflash_jax.engine.sharing import sharing_refusals
from dflash_jax.execution.plan import CallShape, PageShape, choose, choose_context
from dflash_jax.models import DFlashConfig, bind, count, family_for, family_of, layer_traits
from dflash_jax.models.heads import MarkovConfig
from dflash_jax.models.presets import GEMMA4_DRAFTERS, GEMMA4_TARGETS, TARGETS

from ..convert.conftest import Folders
from ..decoding.chi_square import count as counted
from ..decoding.chi_square import p_value
from ..devices import on
from ..random_pair import Pair, random_prompts
from . import gemma_reference
from .gemma_draft_reference import draft, random_file, random_tensors
from .gemma_reference import FULL, SLIDING

# The text of dspark_gemma4_12b_block7's config.json.
PUBLISHED: dict[str, Any] = {
    "architectures": ["Gemma4DSparkModel"], "attention_bias": False, "attention_dropout": 0.0, "attention_k_eq_v": True,
    "block_size": 7, "bos_token_id": 2, "confidence_head_with_markov": True, "dtype": "bfloat16", "enable_confidence_head": True,
    "enable_moe_block": False, "eos_token_id": 1, "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 3840, "hidden_size_per_layer_input": 0, "initializer_range": 0.02,
    "intermediate_size": 15_360, "layer_types": [FULL] * 5, "markov_head_type": "vanilla", "markov_rank": 256,
    "mask_token_id": 4, "max_position_embeddings": 262_144, "model_type": "gemma4_text", "moe_intermediate_size": None,
    "num_anchors": 512, "num_attention_heads": 16, "num_experts": None, "num_global_key_value_heads": 1, "num_hidden_layers": 5,
    "num_key_value_heads": 8, "num_kv_shared_layers": 0, "num_target_layers": 48, "pad_token_id": 0, "rms_norm_eps": 1e-6,
    "rope_parameters": {
        FULL: {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"}, "rope_theta": None,
        "rope_type": "default", SLIDING: {"rope_theta": 1e4, "rope_type": "default"},
    },
    "sliding_window": 1024, "target_layer_ids": [5, 17, 29, 41, 46], "target_model_type": "gemma4_unified",
    "target_text_model_type": "gemma4_unified_text", "tie_word_embeddings": False, "top_k_experts": None,
    "transformers_version": "5.10.2", "use_bidirectional_attention": "vision", "use_cache": True, "use_double_wide_mlp": False,
    "vocab_size": 262_144, "vocab_size_per_layer_input": 262_144,
}  # fmt: skip
SIZES = int(os.environ.get("FAMILY_SIZES", "2"))
BOTH = ("embed_tokens.weight", "lm_head.weight")


def read(file: dict[str, Any] = PUBLISHED, names: Any = BOTH, /, **changes: Any) -> DFlashConfig:
    values = {key: value for key, value in (file | changes).items() if value is not ...}
    config = family_of(values).config(values, names)
    assert isinstance(config, DFlashConfig)
    return config


def as_parameters(config: Any, tensors: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """Tensors under their published names as ours; every one must have its place."""
    table = family_for(config).parameters(config)
    assert {source.name for row in table for source in row.sources} == set(tensors)
    return {
        row.name: jnp.asarray(np.concatenate([tensors[source.name].reshape(source.taken) for source in row.sources]))
        for row in table
    }


def test_the_published_file_reads_as_its_preset() -> None:
    preset = GEMMA4_DRAFTERS["dspark_gemma4_12b_block7"]
    assert read() == preset
    assert DFlashConfig.from_dict(json.loads(json.dumps(preset.to_dict()))) == preset
    # The name alone decides nothing; keys do where no tensors are there, and transformers 5.15 has other keys for heads.
    assert read(architectures=["DFlashDraftModel"], sample_from_anchor=True) == preset
    written = {str(i): {"head_dim": 512, "num_key_value_heads": 1} for i in range(5)}
    names = (*BOTH, "layers.0.layer_scalar", "layers.0.pre_feedforward_layernorm.weight")
    assert (
        read(PUBLISHED, names, global_head_dim=..., num_global_key_value_heads=..., per_layer_config=written) == preset
    )
    plain = read(markov_rank=0, enable_confidence_head=False, markov_head_type=..., confidence_head_with_markov=...)
    assert plain == GEMMA4_DRAFTERS["dflash_gemma4_12b_block7"] == replace(preset, head=None)
    assert preset.head == MarkovConfig(rank=256, confidence="hidden_and_token", confidence_bias=True)
    assert (preset.key_shapes, preset.num_drafts, preset.input_scale) == (((1, 512),) * 5, 7, 3840**0.5)


def test_the_published_drafter_has_its_size_and_fits_its_target() -> None:
    """6.86 GB of bfloat16."""
    sizes = {name: count(family_for(config).parameters(config)) for name, config in GEMMA4_DRAFTERS.items()}
    assert sizes == {"dspark_gemma4_12b_block7": 3_430_444_550, "dflash_gemma4_12b_block7": 3_296_222_725}
    for name, target in {**GEMMA4_TARGETS, "Qwen3-8B": TARGETS["Qwen3-8B"]}.items():
        if name == "gemma-4-12B":
            check_pair(target, GEMMA4_DRAFTERS["dspark_gemma4_12b_block7"])
        else:
            with pytest.raises(dj.PairError):
                check_pair(target, GEMMA4_DRAFTERS["dspark_gemma4_12b_block7"])


@pytest.mark.parametrize(
    ("changes", "names", "message"),
    [
        ({"layer_types": [FULL] * 4 + [SLIDING]}, BOTH, "layer_types must be full_attention for every layer"),
        ({"layer_types": ...}, BOTH, "layer_types must be full_attention for every layer"),
        ({"enable_moe_block": True}, BOTH, "enable_moe_block=True"),
        ({"hidden_size_per_layer_input": 256}, BOTH, "hidden_size_per_layer_input=256"),
        ({"num_kv_shared_layers": 1}, BOTH, "num_kv_shared_layers=1"), ({"attention_bias": True}, BOTH, "attention_bias=True"),
        ({"is_neox_style": False}, BOTH, "is_neox_style=False"), ({"use_swa": True}, BOTH, "use_swa=True"),
        ({"hidden_activation": "silu"}, BOTH, "hidden_activation must be"), ({"global_head_dim": 511}, BOTH, "even"),
        ({"attention_value_scale": 0.5}, BOTH, "not known of drafters with layers of gemma4"),
        ({"conv_kernel_size": 2, "conv_group_size": 16}, BOTH, "not known of drafters with layers of gemma4"),
        ({}, BOTH[:1], "must bring embed_tokens and lm_head, or neither"),
        ({}, (*BOTH, "layers.0.layer_scalar"), "have layer_scalar but no pre_feedforward_layernorm.weight"),
        ({}, (*BOTH, "layers.0.pre_feedforward_layernorm.weight"), "have pre_feedforward_layernorm.weight but no layer_scalar"),
        ({}, (*BOTH, "layers.0.input_layernorm.weight"), r"neither its keys \(global_head_dim\) nor its tensors"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 12_345.0}}, BOTH, "rope_theta=12345.0"),
    ],
)  # fmt: skip
def test_what_is_refused(changes: dict[str, Any], names: tuple[str, ...], message: str) -> None:
    with pytest.raises(dj.ConfigError, match=message):
        read(PUBLISHED, names, **changes)


def test_other_layers_have_no_such_parts() -> None:
    plain = TARGETS["Qwen3-4B"]
    sizes = {
        name: getattr(plain, name)
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads")
    }
    for wrong in ({"keys_as_values": True}, {"layer_kind": "gemma3"}):
        with pytest.raises(dj.ConfigError, match="layer_kind must be qwen3, gemma4, laguna"):
            DFlashConfig(**sizes, num_layers=1, head_dim=128, **wrong)


@pytest.mark.few("0")
@pytest.mark.parametrize("seed", range(SIZES))
def test_a_drawn_drafter_is_that_of_float64(seed: int) -> None:
    """Hidden states of a block after contexts of three lengths, and the tokens that it proposes."""
    file = random_file(seed)
    tensors = random_tensors(file, seed)
    config = read(file, tensors.keys())
    params, rng = as_parameters(config, tensors), np.random.default_rng(seed)
    for length in (1, 9, 40):
        features = rng.standard_normal((length, 2 * 32)).astype(np.float32)
        hidden, proposals = proposed(config, params, features, 5)
        expected, wanted = draft(file, tensors, features, 5)
        assert np.abs(hidden - expected).max() <= 3e-5 * np.abs(expected).max()
        assert proposals == wanted


def proposed(
    config: DFlashConfig, params: dict[str, jax.Array], features: np.ndarray, pending: int
) -> tuple[np.ndarray, list[int]]:
    length, anchor, unused = len(features), jnp.array([pending]), jnp.full((97, 32), jnp.nan)

    @jax.jit
    def run(params, features):
        model = bind(config, params)
        context = model.context_kv(model.context(features[None]), jnp.arange(length)[None])
        x, slots = model.block_embeddings(anchor, unused), length + jnp.arange(config.block_size)[None]
        hidden, _ = model(x, slots, dense_attend(context=context))
        if model.head is None:
            return hidden[0], model.best(hidden, unused)[0]
        judged = model.judged(hidden, config.num_drafts, anchor, unused, unused, jnp.zeros((1, 64)))
        return hidden[0], model.head.propose(judged, greedy)[0][0]

    hidden, tokens = run(params, features)
    return np.asarray(hidden), np.asarray(tokens).tolist()


def greedy(first: int, scores: jax.Array, tokens: Any) -> tuple[jax.Array, jax.Array]:
    return jnp.argmax(scores, axis=-1).astype(jnp.int32), scores


# A pair of folders, loaded, converted and used.

TARGET_FILE = gemma_reference.random_file("gemma4", 1, tie_word_embeddings=False, sliding_window=9)
DRAFT_FILE = random_file(3, num_hidden_layers=2, markov_rank=5)
GREEDY = dj.SamplingParams(max_tokens=24, ignore_eos=True)
PROMPTS = random_prompts([1, 2, 5, 16, 17, 33, 64, 90])


def weights_of_both() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Of a target that says two tokens alone, and of a drafter that proposes them."""
    target, drafter = gemma_reference.random_tensors(TARGET_FILE, 3), random_tensors(DRAFT_FILE, 4)
    for head in (target["lm_head.weight"], drafter["lm_head.weight"], drafter["markov_head.markov_w2.weight"]):
        head *= np.isin(np.arange(97), [3, 40])[:, None]
    return target, drafter


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    hf, (target, drafter) = Folders(tmp_path_factory.mktemp("gemma4_pair")), weights_of_both()
    return hf.write("target", TARGET_FILE, target), hf.write("draft", DRAFT_FILE, drafter)


@pytest.fixture(scope="module")
def alone(folders: tuple[Path, Path]) -> list[list[int]]:
    """What the target says without a drafter."""
    model = dj.load(folders[0], draft=False, dtype="float32", max_batch=4, max_model_len=160)
    return [one.token_ids for one in dj.generate(model, PROMPTS, GREEDY)]


@pytest.mark.few
def test_round_trip_keeps_every_bit(folders: tuple[Path, Path], tmp_path: Path) -> None:
    hf, folder = Folders(tmp_path), folders[1]
    assert hf.convert(folder, "--output", tmp_path / "out", "--verify", "logits") == 0
    assert open_converted(tmp_path / "out").config == open_checkpoint(folder).config
    assert hf.convert(tmp_path / "out", "--reverse", "--output", tmp_path / "back") == 0
    there, back = (
        {name: value for path in one.glob("*.safetensors") for name, value in load_file(path).items()}
        for one in (folder, tmp_path / "back")
    )
    assert there.keys() == back.keys()
    assert all(there[name].tobytes() == back[name].tobytes() for name in there)


def test_info_tells_whose_layers_it_has(folders: tuple[Path, Path]) -> None:
    text = "\n".join(lines(collect(folders[0], draft=folders[1])))
    assert "draft head markov, layers of gemma4" in text


@pytest.mark.few
@pytest.mark.parametrize("few", [3, None], ids=["three verified", "all verified"])
@pytest.mark.parametrize(
    "options", [{}, {"draft_window": 16}, {"draft_cache_dtype": "fp8"}, {"draft_weight_dtype": "int8"}],
    ids=["plain", "window", "float8", "int8"],
)  # fmt: skip
def test_it_drafts_what_the_target_says(
    folders: tuple[Path, Path], alone: list[list[int]], options: dict[str, Any], few: int | None
) -> None:
    """With every option of a drafter's, on prompts of many lengths; and proposals stand."""
    sizes: dict[str, Any] = {"dtype": "float32", "max_batch": 4, "max_model_len": 160}
    found = dj.generate(dj.load(folders[0], draft=folders[1], verify_length=few, **sizes, **options), PROMPTS, GREEDY)
    assert [one.token_ids for one in found] == alone
    assert np.mean([one.stats.tokens_per_cycle for one in found]) > 1.1


def test_its_blocks_in_pages_are_those_of_float64() -> None:
    """What the engine proposes after a prompt and after cycles that rejected, of the features that its target tapped."""
    target: Any = family_of(TARGET_FILE).config(TARGET_FILE)
    tensors, drafted = weights_of_both()
    config = read(DRAFT_FILE, drafted.keys())
    weights = {"target": as_parameters(target, tensors), "draft": as_parameters(config, drafted)}
    pair = Pair(target, config, edit=lambda given: given.update(weights))
    prompts, params = random_prompts([3, 40]), dj.SamplingParams(max_tokens=12, ignore_eos=True)
    texts, counts, _ = pair.run(prompts, params)
    for prompt, tokens, lengths in zip(prompts, texts, counts, strict=True):
        place = 1  # the first token is the prompt's own
        for length in lengths:
            known = [*prompt, *tokens[: place - 1]]
            streams = gemma_reference.forward(TARGET_FILE, tensors, known)[1]
            features = np.concatenate([streams[tap] for tap in DRAFT_FILE["target_layer_ids"]], axis=-1)
            proposals = draft(DRAFT_FILE, drafted, features, tokens[place - 1])[1]
            stood = next((i for i, (a, b) in enumerate(zip(proposals, tokens[place:], strict=False)) if a != b), None)
            if place + length < len(tokens):
                assert stood == length - 1
            place += length
        assert {1, 2} <= set(lengths)


@pytest.mark.few
def test_sampled_text_has_the_targets_law() -> None:
    """Two tokens of cycles that judge a drafter's own samples; told apart from the law of another temperature."""
    vocab, samples = 7, 400
    target_file = gemma_reference.random_file("gemma4", 1, vocab_size=vocab, tie_word_embeddings=False)
    draft_file = random_file(3, vocab_size=vocab, mask_token_id=6, num_hidden_layers=1, block_size=3, markov_rank=4)
    tensors, drafted = gemma_reference.random_tensors(target_file, 3, 0.7), random_tensors(draft_file, 4)
    target: Any = family_of(target_file).config(target_file)
    config = read(draft_file, drafted.keys())
    weights = {"target": as_parameters(target, tensors), "draft": as_parameters(config, drafted)}
    pair = Pair(
        target, config, edit=lambda given: given.update(weights), proposals="rejection", max_batch=16, max_model_len=32
    )
    prompt = [1, 4, 2, 5]
    asked = [dj.SamplingParams(max_tokens=3, temperature=1.0, seed=i, ignore_eos=True) for i in range(samples)]
    texts, counts, _ = pair.run([prompt] * samples, asked)
    assert np.mean([max(each) for each in counts]) > 1.2

    def law(temperature: float) -> np.ndarray:
        """Of the second and the third token."""
        found = np.zeros((vocab, vocab))
        for first in range(vocab):
            for second in range(vocab):
                logits = gemma_reference.forward(target_file, tensors, [*prompt, first, second])[0][-3:] / temperature
                chances = np.exp(logits - logits.max(-1, keepdims=True))
                chances /= chances.sum(-1, keepdims=True)
                found[second] += chances[0, first] * chances[1, second] * chances[2]
        return found

    pairs = counted(np.array(texts)[:, 1:], vocab)
    assert p_value(pairs, law(1.0)) > 1e-3
    assert p_value(pairs, law(1.6)) < 1e-6


def test_how_it_runs() -> None:
    """No fused runner and no projection in one launch; heads of 512 are attended to by a kernel."""
    config, kind = GEMMA4_DRAFTERS["dspark_gemma4_12b_block7"], jnp.dtype("bfloat16")
    params = {one.name: jax.ShapeDtypeStruct(one.shape, kind) for one in family_for(config).parameters(config)}
    params["context_kv_proj.weight"] = jax.ShapeDtypeStruct((5 * 512, 3840), kind)
    with on("NVIDIA H100 80GB HBM3"):
        plan = choose(layer_traits(config), CallShape(1, 7, kind, PageShape(64, 16, kind)))
        context = choose_context(params, 8, kind)
    assert plan.runner == "plain"
    assert plan.refused("paged_attention") is None
    assert (context.form, context.refusals[-1].reason[:31]) == ("apart", "the norm's weight is applied in")
    assert not sharing_refusals(GEMMA4_TARGETS["gemma-4-12B"], config, 4)


@pytest.mark.few  # tests/parallel shares both of other pairs
def test_two_devices_share_both(tmp_path: Path) -> None:
    """Texts and acceptance are one device's, with key heads that both hold and ones that they divide."""
    for seed, shared in ((3, 1), (4, 2)):
        sizes: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
        target = TARGET_FILE | sizes | {"num_global_key_value_heads": shared, "vocab_size": 96}
        drafter = random_file(seed, num_hidden_layers=1, markov_rank=5, mask_token_id=95, vocab_size=96)
        drafter |= sizes | {"num_global_key_value_heads": shared, "attention_k_eq_v": shared == 1}
        hf, tensors = Folders(tmp_path / str(seed)), gemma_reference.random_tensors(target, 3)
        tensors["lm_head.weight"][[5, 60, 90]] *= 6  # so a random drafter is right now and then
        folders = hf.write("target", target, tensors), hf.write("draft", drafter, random_tensors(drafter, 4))
        found = []
        for devices in (1, 2):
            model = dj.load(folders[0], draft=folders[1], dtype="float32", max_batch=2, max_model_len=64, tp=devices)
            texts = dj.generate(model, PROMPTS[2:5], GREEDY)
            found.append([(one.token_ids, one.stats.tokens_per_cycle) for one in texts])
        assert found[0] == found[1]
