"""LFM2: transformers' logits and taps, what its files say, what is refused, and the way through our own format and back."""

from pathlib import Path
from typing import Any

import pytest

from dflash_jax.engine.sharing import sharing_refusals
from dflash_jax.errors import ConfigError
from dflash_jax.execution.plan import exact_refusals
from dflash_jax.models import family_of, layer_traits
from dflash_jax.models.lfm2 import Lfm2Config

from ..published_layouts import TARGETS
from .golden_files import GOLDEN, TOLERANCE
from .golden_models import check_conversion, check_logits_and_taps

FOLDERS = [GOLDEN / "lfm2_folder", GOLDEN / "lfm2_moe_folder"]
DENSE, MIXTURE = TARGETS["LFM2.5"], TARGETS["LFM2.5 with experts"]


def read(file: dict[str, Any], **changes: Any) -> Lfm2Config:
    values = {key: value for key, value in (file | changes).items() if value != "left out"}
    config = family_of(values).config(values)
    assert isinstance(config, Lfm2Config)
    return config


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_transformers_logits_and_taps(folder: Path) -> None:
    check_logits_and_taps(folder, TOLERANCE)


@pytest.mark.few("lfm2_moe*")
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_it_is_converted_there_and_back(tmp_path: Path, folder: Path) -> None:
    check_conversion(folder, tmp_path)


def test_what_a_file_says() -> None:
    """In the words of the first releases and in transformers'; a width may be said as what it is two thirds of."""
    config = read(DENSE)
    assert (config.full_layers, config.cached_layers, config.intermediate_size, config.rope.theta) == ((2,), 1, 48, 1e6)
    newer = {
        "block_ff_dim": "left out",
        "tie_embedding": "left out",
        "intermediate_size": 48,
        "tie_word_embeddings": True,
    }
    newer |= {"rope_theta": "left out", "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    assert read(DENSE, layer_types="left out", **newer) == config
    assert read(DENSE, rope_theta="left out") == config
    assert read(DENSE, block_ff_dim=70, block_auto_adjust_ff_dim=True).intermediate_size == 48
    assert not read(DENSE, tie_embedding=False).tie_embeddings
    assert read(MIXTURE).has_experts(1)
    assert not read(MIXTURE).has_experts(0)
    assert Lfm2Config.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("file", "changes", "said"),
    [
        (DENSE, {"conv_bias": True}, "conv_bias=True"), (DENSE, {"conv_dim": 16}, "conv_dim must be 32"),
        (DENSE, {"block_use_swiglu": False}, "block_use_swiglu=False"), (DENSE, {"use_pos_enc": False}, "use_pos_enc=False"),
        (DENSE, {"tie_word_embeddings": False}, "tie_embedding say two things"), (DENSE, {"num_experts": 4}, "num_experts=4"),
        (DENSE, {"layer_types": ["conv"] * 4}, "no layer"), (DENSE, {"layer_types": ["mamba"] * 4}, "must list conv"),
        (DENSE, {"block_norm_eps": 1e-6}, "block_norm_eps must be"), (DENSE, {"num_key_value_heads": 3}, "a multiple"),
        (MIXTURE, {"use_expert_bias": False}, "use_expert_bias must be true"), (MIXTURE, {"num_experts_per_tok": 9}, "more than"),
        (DENSE, {"conv_L_cache": 1}, "conv_L_cache must be"),
    ],
)  # fmt: skip
def test_what_is_refused(file: dict[str, Any], changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read(file, **changes)


def test_what_its_layers_do_not_go_with() -> None:
    config = read(DENSE)
    assert any("short convolutions" in reason for reason in sharing_refusals(config, None, 2))
    assert any("short convolutions" in reason for reason in exact_refusals(layer_traits(config), 5))
