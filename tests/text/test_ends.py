"""How texts of a whole model end: the same text by every way of ending at a token, at once and in pieces."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import dflash_jax as dj
from dflash_jax.models import family_of, to_huggingface

from .tokenizers_for_tests import byte_level

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True,
    "max_position_embeddings": 128,
}  # fmt: skip


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dj.Model]:
    """A random target of so many tokens that ends texts at `eos`; the weights are the same for one size."""

    def loaded(vocabulary: int, eos: int | None = None) -> dj.Model:
        folder: Path = tmp_path_factory.mktemp("target")
        config = CONFIG | {"vocab_size": vocabulary} | ({} if eos is None else {"eos_token_id": eos})
        family = family_of(config)
        table = family.parameters(family.config(config))
        rng = np.random.default_rng(0)
        arrays = {row.name: (rng.normal(size=row.shape) * 0.3).astype(np.float32) for row in table}
        save_file(to_huggingface(table, arrays), folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
        if vocabulary >= byte_level().backend.get_vocab_size():
            byte_level().backend.save(str(folder / "tokenizer.json"))
        return dj.load(folder, max_model_len=64, max_batch=1)

    return loaded


def test_a_text_is_one_whichever_way_its_last_token_ended_it(make: Callable[..., dj.Model]) -> None:
    """The end token is an ordinary letter, which the tokenizer does not call special."""
    free = dj.generate(make(300), "hello", dj.SamplingParams(max_tokens=24))
    place, end = next(
        (place, token) for place, token in enumerate(free.token_ids)
        if place > 1 and 32 < token < 127 and token not in free.token_ids[:place]
    )  # fmt: skip
    assert chr(end) in free.text
    model, several = make(300, end), {"max_tokens": 24, "stop_token_ids": [end]}
    ways: list[dict[str, Any]] = [{"max_tokens": 24}, several, several | {"ignore_eos": True}]
    tokenizer = model.tokenizer
    assert tokenizer is not None
    for include, kept in ((False, place), (True, place + 1)):
        text = tokenizer.decode(free.token_ids[:kept])
        for options in ways:
            params = dj.SamplingParams(**options, include_stop=include)
            pieces = list(dj.stream(model, "hello", params, cycles=1))
            done = [dj.generate(model, "hello", params), pieces[-1].completion]
            assert "".join(piece.text for piece in pieces) == text
            assert [one and (one.text, one.token_ids) for one in done] == [(text, free.token_ids[: place + 1])] * 2


def test_min_tokens_that_forbid_every_token_are_refused(make: Callable[..., dj.Model]) -> None:
    """One that is left is chosen again and again."""
    model = make(12, 3)
    options: dict[str, Any] = {"max_tokens": 5, "min_tokens": 5}
    left = dj.generate(model, [1, 2], dj.SamplingParams(**options, stop_token_ids=[*range(3), *range(4, 11)]))
    assert left.token_ids == [11] * 5
    for eos in ({"stop_token_ids": range(12)}, {"stop_token_ids": [*range(3), *range(4, 12)]}):
        with pytest.raises(dj.ParameterError, match="min_tokens=5 forbids every one of the target's 12 tokens"):
            dj.generate(model, [1, 2], dj.SamplingParams(**options, **eos))
    ended = dj.generate(model, [1, 2], dj.SamplingParams(max_tokens=5, stop_token_ids=range(12)))
    assert (len(ended.token_ids), ended.text) == (1, "")
