"""Llama, Qwen2 and Mistral against transformers: module by module (make_golden.py), and a folder that transformers wrote."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from dflash_jax.attention.dense import dense_attend
from dflash_jax.checkpoints.huggingface import open_checkpoint
from dflash_jax.models import bind

from .golden_files import GOLDEN, TOLERANCE, cases, difference, golden
from .test_parity_qwen3 import observed

CASES = [*cases("llama"), *cases("qwen2"), *cases("mistral")]
FOLDER = GOLDEN / "llama_folder"


def logits_and_taps(config: Any, params: dict[str, jax.Array], ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Logits `[T, V]` and the residual streams after every layer `[L, T, D]`, in one compiled program."""

    @jax.jit
    def run(params, ids):
        model = bind(config, params)
        hidden, taps, _ = model(ids, jnp.arange(ids.shape[1])[None], dense_attend(), tuple(range(config.num_layers)))
        return model.logits(hidden)[0], jnp.stack(jnp.split(taps[0], config.num_layers, axis=-1))

    logits, taps = run(params, jnp.array([ids]))
    return np.asarray(logits), np.asarray(taps)


@pytest.mark.parametrize("case", CASES)
def test_every_module_agrees(case: str) -> None:
    _, _, _, expected = golden(case)
    ours = observed(case)
    assert set(ours) == set(expected)
    errors = {name: difference(ours[name], value) for name, value in expected.items()}
    assert all(error <= TOLERANCE for error in errors.values()), errors


def test_a_folder_that_transformers_wrote_gives_its_logits_and_taps() -> None:
    """100 tokens over a rotation whose original length is 64; `taps` are all layers' but the last one's."""
    checkpoint = open_checkpoint(FOLDER)
    assert checkpoint.family.name == "llama"
    with np.load(FOLDER / "expected.npz") as file:
        ids, theirs, taps = file["ids"], file["logits"], file["taps"]
    logits, ours = logits_and_taps(checkpoint.config, checkpoint.load("float32"), ids.tolist())
    assert difference(logits, theirs) <= TOLERANCE
    assert difference(ours[:-1], taps) <= TOLERANCE


def opened(folder: Path, file: dict[str, Any], tensors: dict[str, np.ndarray]) -> Any:
    """The checkpoint of a folder written here."""
    (folder / "config.json").write_text(json.dumps(file))
    save_file(tensors, folder / "model.safetensors")
    return open_checkpoint(folder)
