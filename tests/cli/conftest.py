"""A random pair with a byte tokenizer, as two Hugging Face folders on disk."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dflash_jax.models import family_of, to_huggingface

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TARGET = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 258, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": True,
    "max_position_embeddings": 200, "eos_token_id": 256,
}  # fmt: skip
DRAFT = {key: TARGET[key] for key in TARGET if key not in ("eos_token_id", "tie_word_embeddings")} | {
    "architectures": ["DFlashDraftModel"], "block_size": 4, "dflash_config": {"mask_token_id": 257, "target_layer_ids": [0, 1]},
}  # fmt: skip


def write(folder: Path, config: dict, seed: int) -> None:
    folder.mkdir()
    family = family_of(config)
    table = family.parameters(family.config(config))
    rng = np.random.default_rng(seed)
    params = {row.name: (rng.normal(size=row.shape) * 0.5).astype(np.float32) for row in table}
    save_file(to_huggingface(table, params), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's folder, with its drafter in `draft`."""
    folder = tmp_path_factory.mktemp("pair") / "target"
    write(folder, TARGET, 0)
    write(folder / "draft", DRAFT, 1)
    tokenizer = Tokenizer(models.BPE({character: index for index, character in enumerate(ALPHABET)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
