"""Nemotron-H: transformers' logits, taps and states, what files say, what is refused, the way through our format and back."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.attention.dense import DenseAttend
from dflash_jax.cache.recurrent import state_bytes, zero_state
from dflash_jax.checkpoints.huggingface import open_checkpoint
from dflash_jax.engine.sharing import sharing_refusals
from dflash_jax.errors import ConfigError
from dflash_jax.execution.plan import exact_refusals
from dflash_jax.models import bind, count, family_for, family_of, layer_traits
from dflash_jax.models.nemotron_h import NemotronHConfig
from dflash_jax.models.presets import NEMOTRON_TARGETS

from ..published_layouts import TARGETS
from ..quantized_folders import drawn_float8, load, modelopt, nvfp4_of_modelopt, put, released
from .golden_files import GOLDEN, TOLERANCE, difference
from .golden_models import check_conversion, check_logits_and_taps

FOLDERS = [GOLDEN / f"{name}_folder" for name in ("nemotron_h", "nemotron_h_latent", "nemotron_h_dense")]


@pytest.mark.few("*_h_folder", "*_latent_folder")
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_transformers_logits_and_taps(folder: Path) -> None:
    check_logits_and_taps(folder, TOLERANCE)


class Recording(DenseAttend):
    """Its cache is the states of one text after its tokens, by layer."""

    def delta(self, layer: Any, projected: jax.Array, cache: Any = None) -> tuple[jax.Array, Any]:
        one, tokens = jnp.ones(1, bool), jnp.full(1, projected.shape[1])
        state = zero_state(1, layer.shape, projected.dtype)
        out, state = layer.prefill(projected, state, slots=jnp.arange(1), follows=~one, fresh=one, lengths=tokens)
        return out, {**(cache or {}), layer.index: state}


@pytest.mark.few
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_transformers_states(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    with np.load(folder / "expected.npz") as file:
        ids, states, rows = file["ids"][None], file["states"], file["rows"]

    @jax.jit
    def run(params: Any, ids: jax.Array) -> Any:
        return bind(checkpoint.config, params)(ids, jnp.arange(ids.shape[1])[None], Recording(None, None))[2]

    kept = run(checkpoint.load("float32"), ids)
    assert difference(np.stack([kept[i].s[0] for i in range(len(kept))]), states) <= TOLERANCE
    assert difference(np.stack([kept[i].rows[0] for i in range(len(kept))]), rows) <= TOLERANCE


@pytest.mark.few
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_it_is_converted_there_and_back(tmp_path: Path, folder: Path) -> None:
    check_conversion(folder, tmp_path)


def test_nvidia_s_mixed_release(tmp_path: Path) -> None:
    """Projections of Mamba 2 in float8 with scales of activations, experts and the head in NVFP4, and scales of float8 pages."""
    tensors, layers = load(FOLDERS[0] / "model.safetensors"), {}

    def in_four_bits(name: str, tensor: np.ndarray) -> bool:
        return tensor.ndim == 2 and ("experts" in name or "lm_head" in name)

    stored, exact = released(tensors, nvfp4_of_modelopt, in_four_bits)
    for name, tensor in tensors.items():
        if name.endswith(("in_proj.weight", "out_proj.weight")):
            module = name.removesuffix(".weight")
            stored[name], stored[f"{name}_scale"], exact[name] = drawn_float8(
                tensor.shape, None, np.random.default_rng(1)
            )
            stored[f"{module}.input_scale"] = np.ones(1, np.float32)
            layers[module] = {"quant_algo": "FP8"}
        elif in_four_bits(name, tensor):
            layers[name.removesuffix(".weight")] = {"quant_algo": "NVFP4", "group_size": 16}
        elif name.endswith("k_proj.weight"):
            stored |= {
                name.replace("k_proj.weight", f"{side}_proj.{side}_scale"): np.ones(1, np.float32) for side in "kv"
            }
    stored["mtp.layers.0.eh_proj.weight"] = np.ones((2, 4), np.float32)
    file = json.loads((FOLDERS[0] / "config.json").read_text())
    said = modelopt("MIXED_PRECISION", quantized_layers=layers, kv_cache_scheme={"num_bits": 8, "type": "float"})
    for name, config, of in (("release", file | {"quantization_config": said}, stored), ("plain", file, exact)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        put(
            tmp_path / name,
            {key: one.astype(np.float32) if one.dtype == np.float64 else one for key, one in of.items()},
        )
    release, plain = (open_checkpoint(tmp_path / name) for name in ("release", "plain"))
    assert release.config == plain.config
    ours, theirs = release.load("float32"), plain.load("float32")
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)


FILE, PICTURES = TARGETS["Nemotron 3 and 3.5"], TARGETS["Nemotron 3.5 with pictures"]


def read(file: dict[str, Any], **changes: Any) -> NemotronHConfig:
    values = {key: value for key, value in (file | changes).items() if value != "left out"}
    config = family_of(values).config(values)
    assert isinstance(config, NemotronHConfig)
    return config


def test_what_a_file_says() -> None:
    """A pattern of signs or a list, in old names or new ones; limits of the time step in every way that they are written."""
    config = read(FILE)
    kinds = config.mamba_layers, config.expert_layers, config.full_layers
    assert kinds == ((0, 3), (1,), (2,))
    assert (config.state_layers, config.cached_layers, config.greatest_step) == (2, 1, 1e30)
    for name, listed in (
        ("layers_block_type", ["mamba", "moe", "attention", "mamba"]),
        ("layer_types", ["linear_attention", "moe", "full_attention", "linear_attention"]),
    ):
        assert read(FILE, hybrid_override_pattern="left out", num_hidden_layers="left out", **{name: listed}) == config
        assert read(FILE, **{name: listed}) == config
    unbounded = read(FILE, time_step_limit="left out")
    for limit in ("Infinity", {"__float__": "Infinity"}, math.inf):
        assert read(FILE, time_step_limit=[0.0, limit]) == unbounded
    assert read(FILE, time_step_limit=[0.1, 0.5]) == replace(config, least_step=0.1, greatest_step=0.5)
    assert read(FILE, layer_norm_epsilon="left out", norm_eps=1e-6).norm_eps == 1e-6
    assert NemotronHConfig.from_dict(config.to_dict()) == config
    dense = read(FILE, hybrid_override_pattern="M-*-")
    assert (dense.expert_layers, dense.num_experts) == ((), 0)


def test_a_file_with_infinity_is_read(tmp_path: Path) -> None:
    """Python writes it, though it is no JSON."""
    file = json.loads((FOLDERS[2] / "config.json").read_text()) | {"time_step_limit": [0.0, math.inf]}
    put(tmp_path, load(FOLDERS[2] / "model.safetensors"))
    (tmp_path / "config.json").write_text(json.dumps(file))
    assert "Infinity" in (tmp_path / "config.json").read_text()
    assert open_checkpoint(tmp_path).config == open_checkpoint(FOLDERS[2]).config


def test_of_a_file_with_pictures_the_text_model_is_read() -> None:
    config = read(PICTURES)
    assert config == read(FILE, moe_latent_size=16, time_step_limit="left out")
    assert read(PICTURES, text_config=PICTURES["llm_config"], llm_config="left out") == config
    assert read(PICTURES, hidden_size=32, chunk_size=8) == config
    canonical = family_of(PICTURES).canonical
    assert (
        canonical("language_model.backbone.norm_f.weight")
        == "backbone.norm_f.weight"
        == canonical("model.norm_f.weight")
    )
    assert all(
        canonical(name) is None
        for name in ("vision_model.a", "mlp1.0.weight", "language_model.mtp.layers.0.norm.weight")
    )


@pytest.mark.parametrize(
    ("file", "changes", "said"),
    [
        (FILE, {"hybrid_override_pattern": "MEEM"}, "is full_attention"), (FILE, {"hybrid_override_pattern": "E**E"}, "is linear"),
        (FILE, {"hybrid_override_pattern": "ME*O"}, "got 'O'"), (FILE, {"hybrid_override_pattern": "left out"}, "got neither"),
        (FILE, {"layers_block_type": ["mamba"] * 4}, "say two things"), (FILE, {"num_hidden_layers": 5}, "tells the kinds of 4"),
        (FILE, {"n_groups": 3}, "a multiple of n_groups"), (FILE, {"num_key_value_heads": 3}, "a multiple"),
        (FILE, {"attention_head_dim": 16}, "must be head_dim"), (FILE, {"norm_eps": 1e-6}, "norm_eps must be"),
        (FILE, {"time_step_limit": [0.5, 0.1]}, "in order"), (FILE, {"time_step_limit": 0.1}, "two numbers"),
        (FILE, {"num_experts_per_tok": 5}, "cannot take"), (FILE, {"n_group": 3}, "cannot take"),
        (FILE, {"n_group": 4, "topk_group": 2}, "of two at least"), (FILE, {"n_shared_experts": 2}, "n_shared_experts must be 1"),
        (FILE, {"moe_router_dtype": "bfloat16"}, "must be float32"), (FILE, {"mlp_hidden_act": "silu"}, "mlp_hidden_act"),
        (FILE, {"mamba_proj_bias": True}, "mamba_proj_bias"), (FILE, {"use_conv_bias": False}, "use_conv_bias"),
        (FILE, {"tie_word_embeddings": True}, "tie_word_embeddings"), (FILE, {"residual_in_fp32": True}, "residual_in_fp32"),
        (FILE, {"block_configs": []}, "block_configs"), (PICTURES, {"hidden_size": 64}, "keep one"),
        (PICTURES, {"llm_config": "left out"}, "must be a JSON object"),
    ],
)  # fmt: skip
def test_what_is_refused(file: dict[str, Any], changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read(file, **changes)


def test_what_its_layers_do_not_go_with() -> None:
    config = read(FILE)
    assert any("Mamba 2" in reason for reason in sharing_refusals(config, None, 2))
    assert any("Mamba 2" in reason for reason in exact_refusals(layer_traits(config), 5))


@pytest.mark.parametrize("name", NEMOTRON_TARGETS)
def test_published_sizes(name: str) -> None:
    """llama.cpp counts as many weights in them."""
    config = NEMOTRON_TARGETS[name]
    counts = {"NVIDIA-Nemotron-3-Nano-30B-A3B": 31_577_940_288, "NVIDIA-Nemotron-3-Super-120B-A12B": 120_668_707_840}
    assert count(family_for(config).parameters(config)) == counts[name]
    assert state_bytes(config, jnp.dtype("bfloat16")) == config.state_layers * (
        4 * config.mamba_heads * 64 * 128 + 2 * 3 * config.mamba2.channels
    )
