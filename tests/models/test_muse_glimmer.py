"""Muse Glimmer: transformers' logits and taps, texts in pages and under a drafter, what its files and its assistant's say, what is
refused, and the way through our own format and back."""

from pathlib import Path
from typing import Any

import pytest

from dflash_jax.errors import ConfigError
from dflash_jax.models import DFlashConfig, family_of
from dflash_jax.models.muse_glimmer import MuseGlimmerConfig

from ..published_layouts import LAYOUTS, TARGETS
from .golden_files import GOLDEN, TOLERANCE
from .golden_models import check_conversion, check_logits_and_taps, check_texts

FOLDER = GOLDEN / "muse_glimmer_folder"
FILE, ASSISTANT = TARGETS["Muse Glimmer"], LAYOUTS["Muse assistant"]


def read(**changes: Any) -> MuseGlimmerConfig:
    values = FILE | {"text_config": FILE["text_config"] | changes}
    config = family_of(values).config(values)
    assert isinstance(config, MuseGlimmerConfig)
    return config


def test_transformers_logits_and_taps() -> None:
    check_logits_and_taps(FOLDER, TOLERANCE)


@pytest.mark.few
def test_texts_in_pages_and_with_a_drafter_are_the_dense_models() -> None:
    check_texts(FOLDER, (0, 2, 4))


@pytest.mark.few
def test_it_is_converted_there_and_back(tmp_path: Path) -> None:
    """The text model's tensors come back; the tower's are left out."""
    check_conversion(FOLDER, tmp_path, left_out="vision")


def test_what_a_file_says() -> None:
    config = read()
    assert config.turned == (True, True, True, False)
    assert config.windows == (9, 9, 9, None)
    assert (config.logit_scale, config.logit_softcap, config.query_factor) == (0.6, 20.0, 3.87)
    assert read(layer_types=None, layer_rope_theta=None) == config
    assert MuseGlimmerConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layer_types": ["linear_attention"] * 4}, "layer_types must list"), ({"layer_rope_theta": [1e4] * 4}, "must be 0 or"),
        ({"hidden_activation": "gelu"}, "must be silu"), ({"attention_bias": True}, "attention_bias=True"),
        ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping=30.0"), ({"num_key_value_heads": 3}, "a multiple"),
    ],
)  # fmt: skip
def test_what_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read(**changes)


def test_its_assistant_is_v1_under_other_names() -> None:
    """Its windows hold a key more than they say, on both sides; the file of the published one names no vocabulary."""
    names = ("encoder.fc.weight", "encoder.output_norm_enc.weight", "layers.0.mlp.up_proj.weight")
    config = family_of(ASSISTANT).config(ASSISTANT, names)
    assert isinstance(config, DFlashConfig)
    assert (config.windows, config.causal, config.num_drafts) == ((10, 10), (False, False), 3)
    without = {key: value for key, value in ASSISTANT.items() if key not in ("vocab_size", "rope_parameters")}
    published = family_of(without).config(without, names)
    assert isinstance(published, DFlashConfig)
    assert (published.vocab_size, published.rope.theta) == (202_048, 5e5)
    fitted = config.fitted(read())
    assert (fitted.logit_scale, fitted.logit_softcap) == (0.6, 20.0)
