"""Qwen3.5 and Qwen3-Next: what `config.json` means, logits, taps and states against transformers and float64, conversion."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from dflash_jax.attention.dense import dense_attend
from dflash_jax.cache import make_pages
from dflash_jax.cache.recurrent import make_states, state_bytes
from dflash_jax.checkpoints.converted import open_converted
from dflash_jax.checkpoints.huggingface import open_checkpoint
from dflash_jax.decoding.prefill import Caches, prefill_chunk
from dflash_jax.decoding.state import Setup
from dflash_jax.errors import ConfigError
from dflash_jax.models import bind, count, family_for, family_of, init_params, to_huggingface
from dflash_jax.models.presets import HYBRID_TARGETS
from dflash_jax.models.qwen3_5 import Qwen35Config, qwen35_canonical

from ..convert.conftest import Folders
from ..hybrid_pair import hybrid_config, hybrid_moe_config
from .golden_files import GOLDEN, TOLERANCE, difference
from .hybrid_oracle import forward

CASES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
COUNTS = {
    "Qwen3.5-4B": 4_205_751_296, "Qwen3.5-9B": 8_953_803_264, "Qwen3.5-27B": 26_895_998_464,
    "Qwen3.5-35B-A3B": 34_660_610_688, "Qwen3-Coder-Next": 79_674_391_296,
}  # fmt: skip
# As far as the published file of the 27B is known, with the vision tower cut short.
PUBLISHED: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "image_token_id": 248_056, "model_type": "qwen3_5",
    "text_config": {
        "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "bos_token_id": 248_044,
        "dtype": "bfloat16", "eos_token_id": 248_044, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu",
        "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 17_408,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 16, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32", "max_position_embeddings": 262_144, "mlp_only_layers": [], "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "num_attention_heads": 24,
        "num_hidden_layers": 64, "num_key_value_heads": 4, "output_gate_type": "swish", "pad_token_id": None,
        "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25, "rope_theta": 10_000_000,
            "rope_type": "default",
        },
        "tie_word_embeddings": False, "use_cache": True, "vocab_size": 248_320,
    },
    "tie_word_embeddings": False, "transformers_version": "5.2.0", "video_token_id": 248_057,
    "vision_config": {"depth": 27}, "vision_end_token_id": 248_054, "vision_start_token_id": 248_053,
}  # fmt: skip


def read(values: dict[str, Any], **changes: Any) -> Qwen35Config:
    config = family_of(values | changes).config(values | changes)
    assert isinstance(config, Qwen35Config)
    return config


def text(case: str = "qwen3_5", **changes: Any) -> dict[str, Any]:
    """The configuration of a folder in `golden/hybrid`, changed."""
    return json.loads((GOLDEN / "hybrid" / case / "config.json").read_text()) | changes


@partial(jax.jit, static_argnums=(0, 3))
def dense(config: Any, params: Any, ids: jax.Array, taps: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    model = bind(config, params)
    hidden, features, _ = model(ids, jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape), dense_attend(), taps)
    return model.logits(hidden), features


@pytest.mark.few("qwen3_5_moe", "qwen3_next")
@pytest.mark.parametrize("case", CASES)
def test_logits_and_taps_are_those_of_transformers(case: str) -> None:
    checkpoint, expected = open_checkpoint(GOLDEN / "hybrid" / case), np.load(GOLDEN / "hybrid" / case / "expected.npz")
    taps = tuple(range(len(expected["taps"])))
    logits, features = dense(checkpoint.config, checkpoint.load("float32"), jnp.asarray(expected["ids"])[None], taps)
    assert difference(logits[0], expected["logits"]) < TOLERANCE
    theirs = expected["taps"].transpose(1, 0, 2).reshape(len(expected["ids"]), -1)
    assert difference(features[0], theirs) < TOLERANCE


@pytest.mark.few("qwen3_next")
@pytest.mark.parametrize("case", CASES)
def test_states_after_a_prompt_in_pieces_are_those_of_transformers(case: str) -> None:
    """Three rows of one prompt into a slot that held NaN, beside a row that nobody needs."""
    checkpoint, expected = open_checkpoint(GOLDEN / "hybrid" / case), np.load(GOLDEN / "hybrid" / case / "expected.npz")
    config, params, ids = checkpoint.config, checkpoint.load("float32"), expected["ids"]
    rows, lengths = np.full((4, 40), 96, np.int32), np.array([40, 40, len(ids) - 80, 0])
    rows.reshape(-1)[: len(ids)] = ids
    states = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), make_states(config, 3, jnp.dtype("float32")))
    caches = Caches(
        make_pages(config, 8, 16, jnp.dtype("float32")), make_pages(config, 1, 16, jnp.dtype("float32")), states
    )
    table = np.full((4, 8), -1, np.int32)
    table[:3] = np.arange(8)[::-1]
    step = jax.jit(partial(prefill_chunk, Setup(config)))
    starts, slots = np.array([0, 40, 80, 0]), np.array([1, 1, 1, 3])
    found, logits = step({"target": params}, table, caches, rows, starts, lengths, slots)
    assert difference(logits[2, 0], expected["logits"][-1]) < TOLERANCE
    for i, state in enumerate(found.recurrent):
        assert difference(state.s[1], expected[f"state_{i}"]) < 3e-6  # of about 1e-2: 3e-8
        assert difference(state.conv[1], expected[f"conv_{i}"][:, 1:].T) < TOLERANCE
        assert all(np.isnan(np.asarray(leaf)[[0, 2]]).all() for leaf in state), "another slot was written"


# Beside those that `test_hybrid_sizes` draws.
SIZES: list[tuple[Qwen35Config, int]] = [
    (hybrid_config(num_heads=5, num_kv_heads=1, tie_embeddings=False), 65),
    (hybrid_config(linear_value_heads=2, full_layers=(0, 2), attention_bias=False), 1),
    (hybrid_moe_config(), 77),
]


def as_file(config: Qwen35Config) -> dict[str, Any]:
    """What the oracle reads of a configuration."""
    return {
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps, "num_experts_per_tok": config.experts_per_token,
        "rope_parameters": {"rope_theta": config.rope.theta, "partial_rotary_factor": config.rope.partial},
        "linear_num_key_heads": config.linear_key_heads, "linear_num_value_heads": config.linear_value_heads,
        "linear_key_head_dim": config.linear_key_dim, "linear_value_head_dim": config.linear_value_dim,
        "layer_types": [
            "full_attention" if i in config.full_layers else "linear_attention" for i in range(config.num_layers)
        ],
    }  # fmt: skip


def random_weights(config: Qwen35Config, seed: int) -> dict[str, np.ndarray]:
    """Norms away from 1 as well: a weight that is taken for its offset, or left out, is seen. Projections are small beside the
    residual stream, as in trained models, so that float32 is right to 1e-5 in any implementation."""
    rng, found = np.random.default_rng(seed), {}
    for name, array in init_params(family_for(config).parameters(config), jax.random.key(seed)).items():
        vector = array.ndim == 1
        found[name] = np.asarray(array) * (1 if vector or name.startswith(("embed", "lm_head")) else 0.4)
        if vector:
            found[name] += (0.3 * rng.standard_normal(array.shape)).astype(np.float32)
    return found


@pytest.mark.few("1")
@pytest.mark.parametrize(("config", "tokens"), SIZES, ids=range(len(SIZES)))
def test_other_sizes_against_float64(config: Qwen35Config, tokens: int) -> None:
    params = random_weights(config, tokens)
    tensors = to_huggingface(family_for(config).parameters(config), params)
    ids = np.random.default_rng(tokens).integers(0, config.vocab_size, tokens)
    logits, streams, _ = forward(as_file(config), tensors, ids)
    found, features = dense(config, params, jnp.asarray(ids)[None], (0, config.num_layers - 1))
    assert difference(found[0], logits) < TOLERANCE
    assert difference(features[0], np.concatenate([streams[0], streams[-1]], -1)) < TOLERANCE


@pytest.mark.few("Qwen3.5-35B-A3B")
@pytest.mark.parametrize("name", COUNTS)
def test_published_sizes(name: str) -> None:
    config = HYBRID_TARGETS[name]
    assert count(family_for(config).parameters(config)) == COUNTS[name]
    assert Qwen35Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_the_published_file_reads_as_its_preset() -> None:
    assert read(PUBLISHED) == HYBRID_TARGETS["Qwen3.5-27B"]


def test_bytes_of_a_slot() -> None:
    """As facts of the published sizes have them: S in float32, three rows in bfloat16."""
    found = {name: state_bytes(config, jnp.dtype("bfloat16")) for name, config in HYBRID_TARGETS.items()}
    assert found == {
        "Qwen3.5-4B": 51_511_296, "Qwen3.5-9B": 51_511_296, "Qwen3.5-27B": 153_944_064, "Qwen3.5-35B-A3B": 64_389_120,
        "Qwen3-Coder-Next": 77_266_944,
    }  # fmt: skip


def test_what_absent_keys_mean() -> None:
    values = text(layer_types=None, linear_num_key_heads=None, linear_num_value_heads=None)
    values["rope_parameters"] = {"rope_theta": 1e7}
    config = read(values)
    assert (config.full_layers, config.linear_key_heads, config.linear_value_heads) == ((3,), 16, 32)
    assert config.rope.partial == 0.25
    assert read(text(layer_types=None, full_attention_interval=2)).full_layers == (1, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_output_gate": False}, "attn_output_gate=False"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type='sigmoid'"),
        ({"linear_num_value_heads": 5}, "linear_num_value_heads=5 is not a multiple"),
        ({"linear_conv_kernel_dim": 3}, "linear_conv_kernel_dim must be 4, got 3"),
        ({"layer_types": ["linear_attention"] * 4}, "no layer of layer_types is full_attention"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types must list linear_attention or full_attention"),
        ({"hidden_act": "gelu"}, "hidden_act must be silu"),
        ({"num_experts": 8}, "num_experts=8"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.2}}, "no even number of entries"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(text(**changes))


def test_text_said_twice_must_agree() -> None:
    with pytest.raises(ConfigError, match="vocab_size=5"):
        read(PUBLISHED | {"vocab_size": 5})


def test_names_of_both_kinds_of_checkpoint() -> None:
    names = {
        "model.language_model.layers.0.mlp.up_proj.weight": "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.mlp.up_proj.weight": "model.layers.0.mlp.up_proj.weight", "lm_head.weight": "lm_head.weight",
        "model.visual.blocks.0.attn.qkv.weight": None, "mtp.layers.0.mlp.up_proj.weight": None,
    }  # fmt: skip
    assert {name: qwen35_canonical(name) for name in names} == names


def test_a_vision_tower_is_left_out_with_a_notice(tmp_path: Path) -> None:
    hf, composite = Folders(tmp_path), {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text()}
    inside = {
        name.replace("model.", "model.language_model.", 1): array
        for name, array in hf.tensors(text(), "float32").items()
    }
    beside = {f"{name}.weight": np.ones((2, 2), np.float32) for name in ("model.visual.merger", "mtp.fc")}
    checkpoint = open_checkpoint(hf.write("vision", composite, inside | beside))
    assert checkpoint.config == read(text())
    said = "\n".join(checkpoint.notices)
    assert "model.visual.merger.weight" in said
    assert "mtp.fc.weight" in said


def stacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same checkpoint with all experts of a layer in one tensor."""
    found, per = {}, dict[str, dict[int, dict[str, np.ndarray]]]()
    for name, array in tensors.items():
        head, _, rest = name.partition(".experts.")
        if not rest:
            found[name] = array
            continue
        expert, kind, _ = rest.split(".")
        per.setdefault(head, {}).setdefault(int(expert), {})[kind] = array
    for head, experts in per.items():
        each = [experts[i] for i in range(len(experts))]
        found[f"{head}.experts.gate_up_proj"] = np.stack([np.concatenate([e["gate_proj"], e["up_proj"]]) for e in each])
        found[f"{head}.experts.down_proj"] = np.stack([e["down_proj"] for e in each])
    return found


@pytest.mark.parametrize("case", ["qwen3_5", "qwen3_next", "qwen3_5_moe", "experts_in_one", "shared_among_them"])
def test_round_trip_keeps_every_bit(tmp_path: Path, case: str) -> None:
    in_one, among = case in ("experts_in_one", "shared_among_them"), case == "shared_among_them"
    hf, name = Folders(tmp_path), "qwen3_5_moe" if in_one else case
    values = text(name, eos_token_id=1, **{"shared_expert_intermediate_size": 24} if among else {})
    tensors = hf.tensors(values) if among else load_file(GOLDEN / "hybrid" / name / "model.safetensors")
    folder = hf.write("target", values, stacked(tensors) if in_one else tensors, shards=2)
    assert hf.convert(folder, "--output", tmp_path / "out", "--verify", "hash") == 0
    config = open_converted(tmp_path / "out").config
    assert config == open_checkpoint(folder).config
    assert isinstance(config, Qwen35Config)
    assert config.experts_in_one == in_one
    assert hf.convert(tmp_path / "out", "--reverse", "--output", tmp_path / "back", "--verify", "none") == 0
    before, after = (
        {name: array for path in sorted(where.glob("*.safetensors")) for name, array in load_file(path).items()}
        for where in (folder, tmp_path / "back")
    )
    assert before.keys() == after.keys()
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)


def test_both_ways_to_store_experts_are_the_same_model(tmp_path: Path) -> None:
    hf, tensors = Folders(tmp_path), load_file(GOLDEN / "hybrid" / "qwen3_5_moe" / "model.safetensors")
    folders = [hf.write(str(i), text("qwen3_5_moe"), one) for i, one in enumerate((tensors, stacked(tensors)))]
    apart, together = (open_checkpoint(folder) for folder in folders)
    assert replace(together.config, experts_in_one=False) == apart.config
    ours, theirs = apart.load("float32"), together.load("float32")
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


def test_decays_stay_float32_in_a_model_of_bfloat16(tmp_path: Path) -> None:
    hf = Folders(tmp_path)
    params = open_checkpoint(hf.write("target", text(), hf.tensors(text()))).load("bfloat16")
    wide = {name for name, array in params.items() if array.dtype == jnp.float32}
    assert wide == {f"layers.{i}.delta.{one}" for i in range(3) for one in ("a_log", "dt_bias")}
