"""A model's layers through `layer_chain` against the same layers called one by one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.attention.dense import dense_attend
from dflash_jax.models.chain import run_layers

from .test_parity_qwen3 import CASES, golden


class Decodes:
    """An `attend` that nobody takes gradients of."""

    decodes = True

    def __init__(self) -> None:
        self.attend = dense_attend()

    def __call__(self, *args: Any) -> jax.Array:
        return self.attend(*args)


@pytest.mark.parametrize("case", CASES)
def test_agrees_with_layers_called_one_by_one(case: str) -> None:
    config, model, inputs, _ = golden(case)
    ids, positions = jnp.asarray(inputs["ids"]), jnp.asarray(inputs["positions"])
    x, rotary = model.embed(ids), model.rotary(positions)
    plain = run_layers(model.layers, x, rotary, dense_attend())
    chained = run_layers(model.layers, x, rotary, Decodes(), implementation="xla")
    assert len(plain) == len(chained) == config.num_layers
    for ours, theirs in zip(chained, plain, strict=True):
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), atol=1e-5 * float(jnp.abs(theirs).max()))
