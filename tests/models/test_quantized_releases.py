"""Whole models of quantized releases against float64 models of the numbers that their weights stand for."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.cache import make_pages
from dflash_jax.checkpoints.huggingface import open_checkpoint
from dflash_jax.decoding.prefill import Caches, prefill_chunk
from dflash_jax.decoding.state import Setup

from ..quantized_folders import BLOCKS, is_projection, near_float8, save
from . import llama_reference, sparse_reference
from .golden_files import TOLERANCE, difference
from .test_parity_llama import logits_and_taps

BLOCK = (20, 12)
FLOAT8 = {"quantization_config": BLOCKS | {"weight_block_size": list(BLOCK)}}


def float8_folder(
    folder: Path, file: dict[str, Any], tensors: dict[str, np.ndarray]
) -> tuple[Any, dict[str, np.ndarray]]:
    """The checkpoint of a folder with projections in float8, and what its tensors stand for."""
    stored, exact = {}, dict(tensors)
    for name, tensor in tensors.items():
        stored[name] = tensor
        if is_projection(name, tensor):
            stored[name], stored[f"{name}_scale_inv"], exact[name] = near_float8(tensor, BLOCK)
    (folder / "config.json").write_text(json.dumps(file | FLOAT8))
    save(folder / "model.safetensors", stored)
    return open_checkpoint(folder), exact


@pytest.mark.parametrize("kind", ["Qwen2", "Llama"])
def test_a_dense_model_in_float8_blocks(kind: str, tmp_path: Path) -> None:
    file = llama_reference.random_file(llama_reference.KINDS.index(kind), num_hidden_layers=2)
    tensors = {name: one / 2 if one.ndim > 1 else one for name, one in llama_reference.random_tensors(file).items()}
    checkpoint, exact = float8_folder(tmp_path, file, tensors)
    ids = np.random.default_rng(0).integers(0, 97, 60).tolist()
    logits, taps = llama_reference.forward(file, exact, ids)
    ours = logits_and_taps(checkpoint.config, checkpoint.load("float32"), ids)
    assert max(difference(ours[0], logits), difference(ours[1], taps)) < TOLERANCE
    apart, _ = llama_reference.forward(file, tensors, ids)
    assert difference(ours[0], apart) > 100 * TOLERANCE  # what the release has lost


def test_latent_attention_and_experts_in_float8_blocks(tmp_path: Path) -> None:
    """`kv_b_proj` is split into what absorbs queries and what values come out of, after it was dequantized."""
    file, ids, page = sparse_reference.random_file(0), np.random.default_rng(0).integers(0, 61, 32), 8
    checkpoint, exact = float8_folder(tmp_path, file, sparse_reference.random_tensors(file, 0))
    logits, _ = sparse_reference.forward(file, exact, ids, eight=False)
    config = checkpoint.config
    params = checkpoint.family.derived(config, checkpoint.load("float32"))
    pages = make_pages(config, 4, page, jnp.dtype("float32"))
    caches = Caches(*[jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan), pages)] * 2)
    step = jax.jit(partial(prefill_chunk, Setup(config)))
    table, starts = np.tile(np.arange(4, dtype=np.int32), (4, 1)), np.arange(4) * page
    _, after = step({"target": params}, table, caches, ids.reshape(4, page), starts, np.full(4, page), np.zeros(4, int))
    assert difference(np.asarray(after)[:, 0], logits[starts + page - 1]) < TOLERANCE
