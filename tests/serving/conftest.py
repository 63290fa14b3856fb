"""The pair that ships, loaded once for all tests of a process, with a chat template of its own."""

import json
import shutil
from pathlib import Path

import pytest

import dflash_jax as dj

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> dj.Model:
    folder = tmp_path_factory.mktemp("served") / "pair"
    shutil.copytree(Path(dj.__file__).parent / "pair" / "target", folder)
    shutil.copytree(Path(dj.__file__).parent / "pair" / "draft", folder / "draft")
    settings = folder / "tokenizer_config.json"
    known = json.loads(settings.read_text()) if settings.exists() else {}
    settings.write_text(json.dumps(known | {"chat_template": TEMPLATE}))
    return dj.load(folder, dtype="float32", max_batch=4, max_model_len=256)
