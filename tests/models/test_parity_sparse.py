"""Targets with an indexer against transformers' DeepSeek-V3.2 and GLM-MoE-DSA in float32 (see make_golden.py), choices too."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.attention.dense import DenseAttend
from dflash_jax.models import bind, parameter_names

from .golden_files import TOLERANCE, cases, difference, golden

CASES = cases("sparse")


class Recording(DenseAttend):
    """Dense attention that keeps which keys the queries of every layer see."""

    def __init__(self):
        super().__init__(None, None)
        self.seen: list[jax.Array] = []

    def indexed(self, *args: Any) -> tuple[jax.Array, Any]:
        out, visible = super().indexed(*args)
        self.seen.append(visible)
        return out, visible


def observed(case: str) -> tuple[np.ndarray, ...]:
    """Logits, residual streams after all layers but the last, and what queries see in each layer."""
    config, params, inputs, _ = golden(case)

    @jax.jit
    def run(params: Any, ids: jax.Array) -> tuple[jax.Array, ...]:
        model, attend, taps = bind(config, params), Recording(), tuple(range(config.num_layers - 1))
        hidden, streams, _ = model(ids, jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape), attend, taps)
        return model.logits(hidden), jnp.stack(jnp.split(streams, len(taps), axis=-1)), jnp.stack(attend.seen)

    return tuple(map(np.asarray, run(params, inputs["ids"])))


def test_cases_are_there() -> None:
    assert CASES == ["sparse_glm", "sparse_v32"]


@pytest.mark.few("sparse_glm")
@pytest.mark.parametrize("case", CASES)
def test_choices_and_logits_are_those_of_transformers(case: str) -> None:
    config, params, _, expected = golden(case)
    assert parameter_names(config) == set(params)
    logits, streams, seen = observed(case)
    assert np.array_equal(seen[np.array(config.indexers)], expected["chosen"] > 0)
    for layer in np.flatnonzero(~np.array(config.indexers)):
        assert np.array_equal(seen[layer], seen[layer - 1])
    assert (seen.sum(axis=-1) == np.minimum(np.arange(seen.shape[-1]) + 1, config.index_topk)).all()
    assert difference(logits, expected["logits"]) <= TOLERANCE
    assert difference(streams, expected["hidden"]) <= TOLERANCE
