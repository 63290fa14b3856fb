"""Small Hugging Face folders with random weights, made from the families' own parameter tables."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tokenizers
from dflash_convert.cli import main
from safetensors.numpy import save_file

from dflash_jax.models import family_of

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 96, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 128, "tie_word_embeddings": False,
    "eos_token_id": 1, "torch_dtype": "bfloat16",
}  # fmt: skip
DFLASH: dict[str, Any] = {
    **QWEN3, "architectures": ["DFlashDraftModel"], "num_hidden_layers": 2, "block_size": 4, "num_target_layers": 3,
    "dflash_config": {"mask_token_id": 95, "target_layer_ids": [0, 2]},
}  # fmt: skip

TOKENIZER = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))


class Folders:
    """Makes source folders below one temporary folder, and runs the command on them."""

    qwen3_config, dflash_config = QWEN3, DFLASH

    def __init__(self, root: Path):
        self.root = root

    def tensors(
        self, config: Mapping[str, Any], dtype: str = "bfloat16", extra: Mapping[str, np.ndarray] | None = None
    ) -> dict[str, np.ndarray]:
        """Random tensors for every row of the family's table; `extra` replaces or adds some, by Hugging Face names."""
        extra, random, tensors = dict(extra or {}), np.random.default_rng(0), {}
        family = family_of(config)
        for parameter in family.parameters(family.config(config, extra.keys())):
            for source in parameter.sources:
                values = random.normal(size=source.shape) * source.shape[-1] ** -0.5
                tensors[source.name] = (values + (len(source.shape) == 1)).astype(DTYPES[dtype])
        return tensors | extra

    def write(
        self, name: str, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], *, shards: int = 1
    ) -> Path:
        """A folder as the hub has it: configuration, one safetensors file or several with an index, a tokenizer file."""
        folder = self.root / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "tokenizer.json").write_text(TOKENIZER.to_str())
        (folder / "generation_config.json").write_text('{"eos_token_id": 1}')
        if shards == 1:
            save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
            return folder
        names, weight_map = list(tensors), {}
        for index in range(shards):
            shard, part = f"model-{index + 1:05}-of-{shards:05}.safetensors", names[index::shards]
            save_file({name: tensors[name] for name in part}, folder / shard, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(part, shard)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        return folder

    def qwen3(self, name: str = "target", *, dtype: str = "bfloat16", shards: int = 1, **changes: Any) -> Path:
        config = QWEN3 | changes
        return self.write(name, config, self.tensors(config, dtype), shards=shards)

    def dflash(self, name: str = "drafter", *, dtype: str = "bfloat16", **changes: Any) -> Path:
        config = DFLASH | changes
        return self.write(name, config, self.tensors(config, dtype))

    def convert(self, *arguments: str | Path) -> int:
        """The command's exit code."""
        return main([*map(str, arguments), "--quiet"])


@pytest.fixture
def hf(tmp_path: Path) -> Folders:
    return Folders(tmp_path)


@pytest.fixture
def bits():
    """An array's bytes, for comparisons that NaNs and signed zeros cannot pass by accident."""

    def as_bytes(array: Any) -> bytes:
        return np.asarray(array).tobytes()

    return as_bytes
