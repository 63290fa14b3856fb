"""What `generation_config.json` says of sampling, and what holds where it says nothing."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_jax.checkpoints.generation_config import sampling_defaults
from dflash_jax.errors import ConfigError
from dflash_jax.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0, "eos_token_id": 3},
         {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0}),
        ({"repetition_penalty": 1.05, "temperature": None}, {"repetition_penalty": 1.05}),
        ({"do_sample": True, "top_k": -1}, {"top_k": 0, "temperature": 1.0}),
        ({"do_sample": False}, {}),
    ],
)  # fmt: skip
def test_what_a_file_says_is_taken(tmp_path: Path, values: dict[str, Any], found: dict[str, Any]) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    assert sampling_defaults(tmp_path) == (found, [])
    model: Any = SimpleNamespace(sampling_defaults=found)
    assert SamplingParams.from_model(model, max_tokens=5) == SamplingParams(max_tokens=5, **found)
    assert SamplingParams.from_model(model, temperature=0.2).temperature == 0.2


def test_what_cannot_be_is_told_and_left_out(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == ({}, [])
    (tmp_path / "generation_config.json").write_text('{"temperature": "hot", "top_p": 2, "top_k": 5}')
    found, notices = sampling_defaults(tmp_path)
    assert found == {"top_k": 5}
    assert ["temperature must be" in notices[0], "top_p must be" in notices[1]] == [True, True]
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(ConfigError, match="generation_config"):
        sampling_defaults(tmp_path)
