"""A model's layers through operations of several steps against the same layers called one by one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.attention.dense import dense_attend
from dflash_jax.config import Qwen3Config
from dflash_jax.models import bind
from dflash_jax.models.chain import run_layers
from dflash_jax.models.rows import fits, run_rows

from .golden_files import cases, golden

CASES = cases("qwen3")


class Decodes:
    """An `attend` that nobody takes gradients of."""

    decodes = True

    def __init__(self) -> None:
        self.attend = dense_attend()

    def __call__(self, *args: Any) -> jax.Array:
        return self.attend(*args)


@pytest.mark.parametrize("case", CASES)
def test_agrees_with_layers_called_one_by_one(case: str) -> None:
    config, params, inputs, _ = golden(case)
    model: Any = bind(config, params)
    ids, positions = jnp.asarray(inputs["ids"]), jnp.asarray(inputs["positions"])
    x, rotary = model.embed(ids), model.rotary(positions)
    plain = run_layers(model.layers, x, rotary, dense_attend())
    chained = run_layers(model.layers, x, rotary, Decodes(), implementation="xla")
    fitting = type(config) is Qwen3Config and not config.attention_bias
    assert fits(model.layers, x, "xla") == fitting
    rows = run_rows(model.layers, x, rotary, Decodes(), "xla") if fitting else plain
    assert len(plain) == len(chained) == len(rows) == config.num_layers
    for theirs, *ours in zip(plain, chained, rows, strict=True):
        for found in ours:
            np.testing.assert_allclose(np.asarray(found), np.asarray(theirs), atol=1e-5 * float(jnp.abs(theirs).max()))


@pytest.mark.parametrize("case", CASES)
def test_the_best_token_is_that_of_the_greatest_logit(case: str) -> None:
    config, params, inputs, _ = golden(case)
    model: Any = bind(config, params)
    hidden = model(jnp.asarray(inputs["ids"]), jnp.asarray(inputs["positions"]), dense_attend())[0]
    np.testing.assert_array_equal(np.asarray(model.best(hidden)), np.argmax(np.asarray(model.logits(hidden)), axis=-1))
