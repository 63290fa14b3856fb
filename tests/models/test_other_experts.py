"""Mellum 2, MiniMax-M2 and Mistral Small 4: transformers' logits and taps, texts in pages, under a drafter and on several devices,
what files say, and the way through our own format and back."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_convert.cli import main as dflash_convert
from safetensors.numpy import load_file

from dflash_jax.attention.dense import dense_attend
from dflash_jax.checkpoints.huggingface import open_checkpoint
from dflash_jax.checkpoints.opening import open_checkpoint as open_any
from dflash_jax.checkpoints.weights import read_weights
from dflash_jax.engine.sharing import sharing_refusals
from dflash_jax.errors import ConfigError
from dflash_jax.models import bind, family_of, layer_traits
from dflash_jax.parallel.ranks import local_ranks, share_config

from ..published_layouts import TARGETS
from .dense_texts import check_texts
from .golden_files import GOLDEN, TOLERANCE, difference
from .test_parity_llama import logits_and_taps

NAMES = ("mellum", "minimax_m2", "mistral4", "laguna")
MELLUM, MINIMAX, MISTRAL = (TARGETS[name] for name in ("Mellum 2", "MiniMax-M2.5 and M2.7", "Mistral Small 4"))


def read(file: dict[str, Any], **changes: Any) -> Any:
    if "text_config" in file:
        file, changes = file | {"text_config": file["text_config"] | changes}, {}
    return family_of(file).config(file | changes)


def expected(folder: Path) -> tuple[list[int], np.ndarray, np.ndarray]:
    with np.load(folder / "expected.npz") as file:
        return file["ids"].tolist(), file["logits"], file["taps"]


@pytest.mark.parametrize("name", NAMES)
def test_transformers_logits_and_taps(name: str) -> None:
    checkpoint = open_checkpoint(GOLDEN / f"{name}_folder")
    ids, logits, taps = expected(checkpoint.folder)
    ours = logits_and_taps(checkpoint.config, checkpoint.load("float32"), ids)
    assert difference(ours[0], logits) <= TOLERANCE
    assert difference(ours[1], taps) <= TOLERANCE


@pytest.mark.few("minimax_m2")
@pytest.mark.parametrize("name", NAMES)
def test_devices_that_share_it(name: str) -> None:
    """Two of them: of MiniMax-M2 each has half of the heads that are normed together."""
    checkpoint, shared = open_checkpoint(GOLDEN / f"{name}_folder"), local_ranks(2)
    assert shared is not None
    config: Any = checkpoint.config
    ids, logits, _ = expected(checkpoint.folder)

    def run(own: Any) -> jax.Array:
        model, tokens = bind(share_config(config, 2), own), jnp.array([ids])
        hidden, *_ = model(tokens, jnp.arange(len(ids))[None], dense_attend())
        return model.logits(hidden)[0]

    weights = read_weights(checkpoint, None, jnp.dtype("float32"), ranks=shared)["target"]
    assert difference(shared.each(run, weights, axis=None), logits) <= TOLERANCE
    if name == "minimax_m2":
        assert any("normed together" in reason for reason in sharing_refusals(config, None, 4))


@pytest.mark.few
@pytest.mark.parametrize("name", NAMES)
def test_texts_in_pages_and_with_a_drafter_are_the_dense_models(name: str) -> None:
    check_texts(GOLDEN / f"{name}_folder", (0, 1, 2))


@pytest.mark.few("mistral4")
@pytest.mark.parametrize("name", NAMES)
def test_it_is_converted_there_and_back(tmp_path: Path, name: str) -> None:
    folder = GOLDEN / f"{name}_folder"
    assert dflash_convert([str(folder), "--output", str(tmp_path / "out"), "--verify", "logits", "--quiet"]) == 0
    assert open_any(tmp_path / "out").config == open_checkpoint(folder).config
    assert dflash_convert([str(tmp_path / "out"), "--reverse", "--output", str(tmp_path / "back"), "--quiet"]) == 0
    first, last = (load_file(one / "model.safetensors") for one in (folder, tmp_path / "back"))
    assert first.keys() == last.keys()
    assert all(first[key].tobytes() == last[key].tobytes() for key in first)


def test_what_files_say() -> None:
    mellum, minimax = read(MELLUM), read(MINIMAX)
    assert (mellum.rope.theta, mellum.local_rope.theta, mellum.windows) == (5e5, 1e4, (9, None, 9, None))
    assert mellum == read(MELLUM, rope_parameters=None)
    assert mellum.dense_layers == (0,)
    assert (minimax.rope.partial, minimax.moe_intermediate_size) == (0.5, 48)
    assert minimax == read(MINIMAX, rotary_dim=None, rope_parameters={"rope_theta": 5e6, "partial_rotary_factor": 0.5})
    assert layer_traits(minimax).rotary_dim == 8
    mistral = read(MISTRAL)
    assert (mistral.rope.kind, mistral.rope.factor, mistral.query_growth) == ("yarn", 4.0, 0.1)
    assert (mistral.num_dense_layers, mistral.norm_routing_weights, mistral.routing) == (0, True, "greedy")
    alone = MISTRAL["text_config"] | {"architectures": ["Mistral4ForCausalLM"]}
    assert read(alone) == mistral
    assert read(alone, rope_parameters=None).rope.original_max_position == 8192
    for config in (mellum, minimax, mistral):
        assert type(config).from_dict(config.to_dict()) == config
        assert replace(config, norm_eps=1e-5) != config


@pytest.mark.parametrize(
    ("file", "changes", "said"),
    [
        (MELLUM, {"mlp_layer_types": ["dense"]}, "mlp_layer_types must list"), (MELLUM, {"num_experts_per_tok": 9}, "is more than"),
        (MELLUM, {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}, "rope_theta=10000.0"),
        (MELLUM, {"layer_types": ["linear_attention"] * 4}, "layer_types must list"),
        (MINIMAX, {"attn_type_list": [1, 0, 1, 1]}, "attn_type_list must be 1"), (MINIMAX, {"rotary_dim": 7}, "=7 must be even"),
        (MISTRAL, {"n_group": 2}, "n_group and topk_group must be 1"), (MISTRAL, {"model_type": "mistral"}, "must be mistral4"),
        (MISTRAL, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor must be 0.25"),
        (MINIMAX, {"scoring_func": "softmax"}, "scoring_func='softmax'"), (MINIMAX, {"qk_norm_type": "per_head"}, "qk_norm_type="),
        (MINIMAX, {"shared_intermediate_size": 8}, "shared_intermediate_size=8"), (MINIMAX, {"num_experts_per_tok": 9}, "more"),
    ],
)  # fmt: skip
def test_what_is_refused(file: dict[str, Any], changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read(file, **changes)
