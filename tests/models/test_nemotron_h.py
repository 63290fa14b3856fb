"""Nemotron-H: transformers' logits, taps and states, what its files say, what is refused, and the way through our format and back."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_convert.cli import main as dflash_convert
from safetensors.numpy import load_file

from dflash_jax.attention.dense import DenseAttend
from dflash_jax.cache.recurrent import zero_state
from dflash_jax.checkpoints.huggingface import open_checkpoint
from dflash_jax.checkpoints.opening import open_checkpoint as open_any
from dflash_jax.engine.sharing import sharing_refusals
from dflash_jax.errors import ConfigError
from dflash_jax.execution.plan import exact_refusals
from dflash_jax.models import bind, family_of, layer_traits
from dflash_jax.models.nemotron_h import NemotronHConfig

from ..published_layouts import TARGETS
from .golden_files import GOLDEN, TOLERANCE, difference
from .test_parity_llama import logits_and_taps

FOLDERS = [GOLDEN / f"{name}_folder" for name in ("nemotron_h", "nemotron_h_latent", "nemotron_h_dense")]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_transformers_logits_and_taps(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    with np.load(folder / "expected.npz") as file:
        ids, logits, taps = file["ids"], file["logits"], file["taps"]
    ours = logits_and_taps(checkpoint.config, checkpoint.load("float32"), ids.tolist())
    assert difference(ours[0], logits) <= TOLERANCE
    assert difference(ours[1], taps) <= TOLERANCE


class Recording(DenseAttend):
    """Its cache is the states of one text after its tokens, by layer."""

    def delta(self, layer: Any, projected: jax.Array, cache: Any = None) -> tuple[jax.Array, Any]:
        one, tokens = jnp.ones(1, bool), jnp.full(1, projected.shape[1])
        state = zero_state(1, layer.shape, projected.dtype)
        out, state = layer.prefill(projected, state, slots=jnp.arange(1), follows=~one, fresh=one, lengths=tokens)
        return out, {**(cache or {}), layer.index: state}


@pytest.mark.few("nemotron_h_folder")
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_transformers_states(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    with np.load(folder / "expected.npz") as file:
        ids, states, rows = file["ids"][None], file["states"], file["rows"]
    model = bind(checkpoint.config, checkpoint.load("float32"))
    _, _, kept = model(jnp.asarray(ids), jnp.arange(ids.shape[1])[None], Recording(None, None))
    assert difference(np.stack([kept[i].s[0] for i in range(len(kept))]), states) <= TOLERANCE
    assert difference(np.stack([kept[i].rows[0] for i in range(len(kept))]), rows) <= TOLERANCE


@pytest.mark.few("nemotron_h_latent_folder")
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_it_is_converted_there_and_back(tmp_path: Path, folder: Path) -> None:
    assert dflash_convert([str(folder), "--output", str(tmp_path / "out"), "--verify", "logits", "--quiet"]) == 0
    assert open_any(tmp_path / "out").config == open_checkpoint(folder).config
    assert dflash_convert([str(tmp_path / "out"), "--reverse", "--output", str(tmp_path / "back"), "--quiet"]) == 0
    first, last = (load_file(one / "model.safetensors") for one in (folder, tmp_path / "back"))
    assert first.keys() == last.keys()
    assert all(first[name].tobytes() == last[name].tobytes() for name in first)
