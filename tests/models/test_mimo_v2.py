"""MiMo-V2: what files of both kinds say, projections in one tensor, releases in float8 and MXFP4, and drafters' files.

Logits, taps, texts and the way back are held with those of other families with experts in `test_other_experts`.
"""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from dflash_convert.cli import main as dflash_convert
from safetensors.numpy import load_file

import dflash_jax as dj
from dflash_jax.cache.specs import layer_specs
from dflash_jax.checkpoints.huggingface import open_checkpoint
from dflash_jax.checkpoints.opening import open_checkpoint as open_any
from dflash_jax.checkpoints.pair import open_pair
from dflash_jax.execution.plan import CallShape, choose, exact_refusals
from dflash_jax.models import count, family_for, family_of, layer_traits, to_huggingface
from dflash_jax.parallel.ranks import share_config

from ..decoding.test_published_drafters import write
from ..published_layouts import LAYOUTS, TARGETS
from ..quantized_folders import BLOCKS, drawn_float8, save
from .golden_files import GOLDEN
from .test_parity_llama import opened

FILE, DRAFTER = TARGETS["MiMo-V2.5"], LAYOUTS["MiMo"]
FULL, SLIDING = "full_attention", "sliding_attention"


def read(file: dict[str, Any], names: Any = (), /, notices: list[str] | None = None, **changes: Any) -> Any:
    values = {key: value for key, value in (file | changes).items() if value is not ...}
    return family_of(values).config(values, names, notices)


def test_what_files_say() -> None:
    config = read(FILE)
    assert (config.windows, config.key_shapes) == ((None, 9, 9, None), ((1, 12), (2, 12), (2, 12), (1, 12)))
    assert (config.value_dims, config.value_scale, config.row_groups) == ((8,) * 4, 0.612, 1)
    assert [config.has_sinks(i) for i in range(4)] == [False, True, True, False]
    assert (config.rope.theta, config.local_rope.theta, int(12 * config.rope.partial)) == (5e6, 1e4, 4)
    assert (config.dense_layers, config.routing_scale, config.norm_eps) == ((0,), 1.0, 1e-6)
    assert type(config).from_dict(config.to_dict()) == config
    specs = layer_specs(config)
    assert [(one.heads, one.dim, one.value_dim) for one in specs] == [(1, 12, 8), (2, 12, 8), (2, 12, 8), (1, 12, 8)]
    # The tensors tell how projections are stored, before the file does.
    for name, groups in (("q", 0), ("qkv", 1)):
        names = [f"model.layers.0.self_attn.{name}_proj.weight"]
        assert (
            read(FILE, names).row_groups == groups == read(FILE, names, attention_projection_layout="split").row_groups
        )
    assert read(FILE, add_full_attention_sink_bias=True).has_sinks(0)
    assert read(FILE, attention_value_scale=None).value_scale == 1.0
    # What transformers writes of the same model.
    ropes = {"rope_type": "default", "partial_rotary_factor": 0.334}
    theirs = {key: value for key, value in FILE.items() if not key.startswith(("swa_", "add_", "hybrid_", "rope_"))}
    theirs |= {
        "layer_types": [FULL, SLIDING, SLIDING, FULL], "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "rms_norm_eps": 1e-6, "rope_parameters": {FULL: ropes | {"rope_theta": 5e6}, SLIDING: ropes | {"rope_theta": 1e4}},
    }  # fmt: skip
    gone = ("layernorm_epsilon", "moe_layer_freq", "partial_rotary_factor", "sliding_window_size")
    assert read({key: value for key, value in theirs.items() if key not in gone}) == config


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attention_value_scale": ...}, "attention_value_scale be there"), ({"attention_bias": True}, "attention_bias must"),
        ({"swa_head_dim": 16}, "swa_head_dim=16 must be head_dim=12"), ({"v_head_dim": ...}, "v_head_dim"),
        ({"swa_num_attention_heads": 8}, "swa_num_attention_heads=8 must be"), ({"scoring_func": "softmax"}, "scoring_func="),
        ({"swa_num_key_value_heads": 3}, "must be a multiple of the key heads"), ({"n_shared_experts": 1}, "n_shared_experts=1"),
        ({"hybrid_layer_pattern": [0, 2, 1, 0]}, "hybrid_layer_pattern must list 0 or 1"), ({"n_group": 3}, "of n_group=3"),
        ({"layer_types": [SLIDING] * 4}, "alike"),
        ({"hybrid_layer_pattern": ..., "layer_types": [FULL, {}] * 2, "rope_parameters": {FULL: {}, SLIDING: {}}}, "alike"),
        ({"moe_layer_freq": [0, 1]}, "moe_layer_freq must list 0 or 1"),
        ({"mlp_layer_types": ["sparse"] * 4}, "differ in which layers"), ({"sliding_window_size": 8}, "must be one number"),
        ({"rms_norm_eps": 1e-5}, "layernorm_epsilon=1e-06 and rms_norm_eps=1e-05"), ({"use_qk_norm": True}, "use_qk_norm=True"),
        ({"hybrid_block_size": 4}, "hybrid_block_size=4"), ({"num_experts_per_tok": 9}, "at most as many"),
        ({"num_key_value_heads": 2, "swa_num_key_value_heads": 1}, "need a multiple of these"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 4.0}}, "rope_type must be default"),
        ({"hybrid_layer_pattern": ..., "rope_parameters": {FULL: {}}}, "must say how layers of"),
    ],
)  # fmt: skip
def test_what_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(dj.ConfigError, match=said):
        read(FILE | {"rms_norm_eps": None}, **changes)


def test_published_sizes() -> None:
    """V2-Flash: 309B of weights."""
    config = read(
        FILE, hidden_size=4096, intermediate_size=16_384, moe_intermediate_size=2048, vocab_size=152_576, num_hidden_layers=48,
        num_attention_heads=64, swa_num_attention_heads=64, num_key_value_heads=4, swa_num_key_value_heads=8, head_dim=192,
        swa_head_dim=192, v_head_dim=128, swa_v_head_dim=128, n_routed_experts=256, num_experts_per_tok=8, rms_norm_eps=...,
        hybrid_layer_pattern=[0 if i == 0 or (i + 1) % 6 == 0 else 1 for i in range(48)], moe_layer_freq=[0] + [1] * 47,
    )  # fmt: skip
    table = family_for(config).parameters(config)
    assert 308e9 < count(table) < 310e9
    rows = {row.name: row for row in table}["layers.0.attn.qkv_proj.weight"]
    assert (config.row_groups, rows.shape) == (4, (13_568, 4096))
    # A device's piece of what was cut for four: 16 queries, a key and a value.
    assert [source.runs[1] for source in rows.sources if source.runs] == [(3392, 3072), (6464, 192), (6656, 128)]
    # Devices that share it have so many key heads each, and rows that were cut for fewer devices.
    shares = [
        (one.full_kv_heads, one.num_kv_heads, one.row_groups) for one in (share_config(config, n) for n in (2, 4, 8))
    ]
    assert shares == [(2, 4, 2), (1, 2, 1), (1, 1, 0)]


def joined(tensors: dict[str, np.ndarray], groups: int) -> dict[str, np.ndarray]:
    """The same with queries, keys and values in one tensor, each cut for so many devices."""
    found = dict(tensors)
    for name in [one for one in found if one.endswith(".q_proj.weight")]:
        parts = [np.split(found.pop(name.replace("q_proj", one)), groups) for one in ("q_proj", "k_proj", "v_proj")]
        found[name.replace("q_proj", "qkv_proj")] = np.concatenate([part[i] for i in range(groups) for part in parts])
    return found


@pytest.mark.few
def test_projections_in_one_tensor(tmp_path: Path) -> None:
    """Cut for two devices: the same model, and the same file on the way back. What is no text's is left out."""
    rng = np.random.default_rng(0)
    file = FILE | {"num_key_value_heads": 2, "swa_num_key_value_heads": 4, "rms_norm_eps": None, "vision_config": None}
    apart = read(file, ["model.layers.0.self_attn.q_proj.weight"])
    table = family_for(apart).parameters(apart)
    params = {row.name: (rng.normal(size=row.shape) * 0.3).astype(np.float32) for row in table}
    tensors = {name: np.ascontiguousarray(array) for name, array in to_huggingface(table, params).items()}
    (tmp_path / "in").mkdir()
    beside = {
        "model.mtp.layers.0.norm.weight": np.ones(3, np.float32),
        "visual.blocks.0.norm1.weight": np.ones(3, np.float32),
    }
    checkpoint = opened(tmp_path / "in", file, joined(tensors, 2) | beside)
    assert checkpoint.config.row_groups == 2
    loaded = checkpoint.load("float32")
    assert all(np.array_equal(loaded[name], params[name]) for name in params)
    assert dflash_convert([str(tmp_path / "in"), "--output", str(tmp_path / "out"), "--quiet"]) == 0
    assert open_any(tmp_path / "out").config == checkpoint.config
    assert dflash_convert([str(tmp_path / "out"), "--reverse", "--output", str(tmp_path / "back"), "--quiet"]) == 0
    back, first = load_file(tmp_path / "back" / "model.safetensors"), joined(tensors, 2)
    assert back.keys() == first.keys()
    assert all(back[name].tobytes() == first[name].tobytes() for name in first)


def test_a_release_in_float8_and_mxfp4(tmp_path: Path) -> None:
    """Every number: pieces of rows that blocks begin anew with, where the whole had fewer; experts in four bits."""
    rng, folder = np.random.default_rng(1), GOLDEN / "mimo_v2_folder"
    file = json.loads((folder / "config.json").read_text()) | {"num_key_value_heads": 2, "hidden_size": 32}
    apart = family_of(file).config(file, ["model.layers.0.self_attn.q_proj.weight"])
    table = family_for(apart).parameters(apart)
    params = {row.name: (rng.normal(size=row.shape) * 0.3).astype(np.float32) for row in table}
    tensors = joined({name: np.ascontiguousarray(one) for name, one in to_huggingface(table, params).items()}, 2)
    stored, exact, more = {}, {}, list[int]()
    e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for name, tensor in tensors.items():
        rows, width = (*tensor.shape, 0)[:2]
        if name.endswith("qkv_proj.weight"):
            codes, scales, whole = drawn_float8((2, rows // 2, width), (8, 16), rng)
            stored[name], exact[name] = codes.reshape(rows, width), whole.reshape(rows, width)
            stored[f"{name}_scale_inv"] = scales.reshape(-1, scales.shape[-1])
            more.append(len(stored[f"{name}_scale_inv"]) - -(-rows // 8))
        elif ".experts." in name and width % 32 == 0:
            codes, powers = rng.integers(0, 16, tensor.shape), rng.integers(118, 124, (rows, width // 32))
            stored[name] = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
            stored[f"{name}_scale"] = powers.astype(np.uint8)
            signs = np.where(codes > 7, -1.0, 1.0) * e2m1[codes & 7]
            exact[name] = signs * np.repeat(2.0 ** (powers - 127), 32, axis=1)
        else:
            stored[name] = tensor.astype(ml_dtypes.bfloat16)
            exact[name] = stored[name].astype(np.float64)
    said = BLOCKS | {
        "weight_block_size": [8, 16], "store_dtype": "mxfp4", "mxfp4_block_size": 32,
        "ignored_layers": ["model.decoder.self_attn.o_proj"],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(file | {"quantization_config": said}))
    save(tmp_path / "model.safetensors", stored)
    checkpoint = open_checkpoint(tmp_path)
    found = to_huggingface(checkpoint.family.parameters(checkpoint.config), checkpoint.load("float32"))
    assert found.keys() == exact.keys()
    assert set(more) == {0, 1}  # of layers without a window the scales tell
    assert any(f"{name}_scale" in stored for name in stored)
    for name, value in found.items():
        np.testing.assert_array_equal(value, exact[name].astype(np.float32), err_msg=name)


def test_what_drafters_say() -> None:
    """Of V2.5, with `use_swa`, and of later ones, with `layer_types`: windows on both sides, sinks, a factor on values."""
    notices: list[str] = []
    config = read(DRAFTER, ("mask_embedding",), notices)
    assert (config.windows, config.causal, config.mask_embedding) == ((9, 9), (False, False), True)
    assert (config.sinks, config.value_scale, config.rope.partial, config.rope.theta) == (True, 0.612, 0.5, 1e4)
    assert any("backbone_rotary_base=5000000 is left alone" in one for one in notices)
    later = DRAFTER | {
        "layer_types": [SLIDING] * 2, "use_sliding_window": True, "is_causal": False, "add_swa_attention_sink_bias": True,
        "target_hidden_size": 32, "dflash_config": {
            key: value for key, value in DRAFTER["dflash_config"].items() if "swa" not in key and "rotary" not in key
        },
    }  # fmt: skip
    notices.clear()
    assert read(later, ("mask_embedding",), notices) == config
    assert not notices
    with pytest.raises(dj.ConfigError, match="v_head_dim=8"):
        read(DRAFTER, v_head_dim=8)


def test_kernels_that_lack_its_heads_are_refused() -> None:
    traits = layer_traits(read(FILE))
    plan = choose(traits, CallShape(1, 8, jnp.dtype("bfloat16")))
    assert plan.runner == "plain"
    assert any("values of another size" in one.reason for one in plan.refusals)
    assert exact_refusals(traits, 4)


def test_a_drafter_lies_beside_its_target(tmp_path: Path) -> None:
    """In `dflash/`, as the releases have it: it is found there, and the mask comes along."""
    target = write(tmp_path / "target", FILE, (), 0)
    write(target / "dflash", DRAFTER, ("mask_embedding",), 1)
    found = open_pair(target)[1]
    assert found is not None
    assert found.config == read(DRAFTER, ("mask_embedding",))
