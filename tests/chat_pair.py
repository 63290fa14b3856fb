"""The pair that ships with a chat template of its own, loaded once for all tests of a process that serve or chat."""

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path

import dflash_jax as dj

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@functools.cache
def chat_pair() -> dj.Model:
    folder = Path(tempfile.mkdtemp(prefix="dflash-jax-pair-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shutil.copytree(Path(dj.__file__).parent / "pair" / "target", folder / "pair")
    shutil.copytree(Path(dj.__file__).parent / "pair" / "draft", folder / "pair" / "draft")
    settings = folder / "pair" / "tokenizer_config.json"
    known = json.loads(settings.read_text()) if settings.exists() else {}
    settings.write_text(json.dumps(known | {"chat_template": TEMPLATE}))
    return dj.load(folder / "pair", dtype="float32", max_batch=4, max_model_len=256)
