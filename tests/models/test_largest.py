"""The largest numbers of rows as `jax.lax.top_k` gives them, ties included, and log-probabilities made with them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.decoding.cycle import log_probabilities
from dflash_jax.decoding.state import Setup
from dflash_jax.models import largest as module
from dflash_jax.models.largest import CHUNK, FEW, LONG_CHUNK, largest, largest_of_chunks
from dflash_jax.sampling_params import MAX_LOGPROBS

from ..devices import h200
from ..random_pair import target_config

jitted = jax.jit(largest_of_chunks, static_argnums=1)


@pytest.mark.parametrize("size", [1, 63, FEW, FEW + 1, 20_011])
@pytest.mark.parametrize("levels", [3, 10**6], ids=["few values", "many"])
def test_is_top_k(size: int, levels: int) -> None:
    """With three values nearly all are equal: the first of them come, from however few chunks."""
    rows = jnp.asarray(np.random.default_rng(size + levels).integers(-levels, levels, (2, 3, size)), jnp.float32)
    for count in {1, min(20, size), min(size, 200)}:
        for found, expected in zip(jitted(rows, count), jax.lax.top_k(rows, count), strict=True):
            np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))
            assert found.dtype == expected.dtype


def test_rows_with_little_in_them() -> None:
    """All of one chunk, at a row's two ends, and rows of -inf."""
    size = 20 * FEW + 5
    for places in ([7, 9, 3], [0, size - 1, size - 2], [], list(range(CHUNK, 2 * CHUNK))):
        rows = jnp.full((1, size), -jnp.inf).at[0, jnp.array(places, jnp.int32)].set(jnp.arange(len(places)) % 5 - 2.0)
        for found, expected in zip(jitted(rows, 20), jax.lax.top_k(rows, 20), strict=True):
            np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


def test_whole_rows_are_not_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, before = [], jax.lax.top_k
    monkeypatch.setattr(module.jax.lax, "top_k", lambda rows, count: seen.append(rows.shape[-1]) or before(rows, count))
    rows = jax.ShapeDtypeStruct((8, 16, 151_936), jnp.float32)
    jax.eval_shape(lambda rows: largest(rows, 20), rows)
    assert seen == [151_936], "on a CPU"
    seen.clear()
    with h200():
        jax.eval_shape(lambda rows: largest(rows, 20), rows)
        assert seen == []
        jax.eval_shape(lambda rows: largest(rows, 512), rows)
    assert seen == [151_936 // LONG_CHUNK, 512 * LONG_CHUNK]


@pytest.mark.parametrize("size", [11, 9000])
def test_log_probabilities_are_those_of_float64(size: int) -> None:
    rng = np.random.default_rng(size)
    raw, tokens = rng.normal(size=(3, 2, size)) * 20 + 300, rng.integers(0, size, (3, 2))
    setup = Setup(target_config(), logprobs=True)
    exact = raw.astype(np.float32).astype(np.float64)
    table = (
        exact
        - np.log(np.exp(exact - exact.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - exact.max(-1, keepdims=True)
    )
    chosen, ids, top = log_probabilities(setup, jnp.asarray(raw, jnp.float32), jnp.asarray(tokens, jnp.int32))
    np.testing.assert_allclose(chosen, np.take_along_axis(table, tokens[..., None], -1)[..., 0], rtol=1e-5, atol=1e-4)
    count = min(MAX_LOGPROBS, size)
    assert ids.shape == (3, 2, count)
    np.testing.assert_allclose(top, -np.sort(-table, axis=-1)[..., :count], rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(
        np.take_along_axis(np.asarray(exact), np.asarray(ids), -1).argsort(-1, kind="stable"),
        np.arange(count)[::-1] * np.ones((3, 2, 1)),
    )
