"""A pair with heads that two, four and eight devices share, as a folder."""

import json
from pathlib import Path

import pytest
import tokenizers

from ..convert.conftest import DFLASH, QWEN3, Folders

SIZES = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 2}
# Tokens whose logits are far greater than the others', of different ranks' rows: so a drafter is right now and then.
LIKELY = [5, 60, 90]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target's folder with its drafter in it, in float32."""
    made = Folders(tmp_path_factory.mktemp("shared"))
    config = QWEN3 | SIZES
    tensors = made.tensors(config, "float32")
    tensors["lm_head.weight"][LIKELY] *= 6
    target = made.write("target", config, tensors)
    words = tokenizers.models.WordLevel({f"w{token}": token for token in range(96)}, unk_token="w0")
    (target / "tokenizer.json").write_text(tokenizers.Tokenizer(words).to_str())
    drafter = DFLASH | SIZES | {"num_hidden_layers": 1, "num_target_layers": 2}
    drafter["dflash_config"] = {"mask_token_id": 95, "target_layer_ids": [0, 1]}
    made.write("target/draft", drafter, made.tensors(drafter, "float32"))
    assert json.loads((target / "draft" / "config.json").read_text())["block_size"] == 4
    return target
