"""The small Qwen3.5 with a vision tower of `models/golden`, a drafter that is right now and then, words and a chat template."""

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

import dflash_jax as dj
from dflash_jax.models import family_of, init_params, to_huggingface

from .models.golden.film_words import TEMPLATE, tokenizer
from .models.golden_files import GOLDEN

FOLDER = GOLDEN / "qwen3_5_vision"
DRAFT: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "vocab_size": 110, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "max_position_embeddings": 512, "tie_word_embeddings": False, "torch_dtype": "float32",
    "block_size": 4, "num_target_layers": 4, "dflash_config": {"mask_token_id": 13, "target_layer_ids": [0, 3]},
}  # fmt: skip


@functools.cache
def picture_folder() -> Path:
    """A model's folder with a tokenizer and a drafter, as a release has them."""
    folder = Path(tempfile.mkdtemp(prefix="dflash-jax-pictures-")) / "model"
    atexit.register(shutil.rmtree, folder.parent, ignore_errors=True)
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("*.npz"))
    tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "draft").mkdir()
    (folder / "draft" / "config.json").write_text(json.dumps(DRAFT))
    family = family_of(DRAFT)
    parameters = family.parameters(family.config(DRAFT))
    params = init_params(parameters, jax.random.key(1))
    for name in params:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            params[name] = params[name] * 0.0  # it proposes the token that it begins with, which is right now and then
    save_file(to_huggingface(parameters, params), folder / "draft" / "model.safetensors")
    return folder


def load_pictures(**options: Any) -> dj.Model:
    return dj.load(
        picture_folder(), **{"dtype": "float32", "max_batch": 4, "max_model_len": 160, "page_size": 16} | options
    )


@functools.cache
def picture_model() -> dj.Model:
    """Loaded once for all tests of a process, with pages for one request of full length and a little more."""
    return load_pictures(num_pages=12)


def expected(name: str = "expected.npz") -> dict[str, np.ndarray]:
    with np.load(FOLDER / name) as file:
        return {name: file[name] for name in file}


def film_message(**changed: Any) -> list[dict[str, Any]]:
    """The prompt that the golden file of films is of; `changed` are other films by "first" and "second"."""
    found, shown = expected("films.npz"), expected()["picture_0"]
    films = [
        {"type": "video", "video": changed.get(name, found[f"film_{number}"]), "fps": float(found["fps"][number])}
        for name, number in (("first", 1), ("second", 0))
    ]
    texts = [{"type": "text", "text": text} for text in found["text"].tolist() if text]
    picture = {"type": "image", "image": shown}
    return [{"role": "user", "content": [texts[0], films[0], texts[1], picture, texts[2], films[1], texts[3]]}]


def words(ids: Any) -> str:
    return " ".join(f"w{one}" for one in ids)


def golden_message(**changed: Any) -> list[dict[str, Any]]:
    """The prompt that the golden file is of, as a message; `changed` are other pictures by "first" and "second"."""
    found = expected()
    ids, pictures = found["ids"].tolist(), [found["picture_0"], found["picture_2"]]
    text, texts = list[int](), list[list[int]]()
    for one in ids:
        if one < 100:
            text.append(one)
        elif one == 102:
            texts.append(text)
            text = []
    first, second = changed.get("first", pictures[0]), changed.get("second", pictures[1])
    parts: list[dict[str, Any]] = [
        {"type": "text", "text": words(texts[0])}, {"type": "image", "image": first}, {"type": "text", "text": words(texts[1])},
        {"type": "image", "image": second}, {"type": "text", "text": words(text)},
    ]  # fmt: skip
    return [{"role": "user", "content": parts}]
