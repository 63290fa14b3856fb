"""Devices that share the rows of a step train as one does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.errors import ParameterError
from dflash_jax.models import Qwen3Config, family_for, init_params
from dflash_jax.training import fit
from dflash_jax.training.answers import Answer
from dflash_jax.training.fit_settings import FitSettings, drafter_config
from dflash_jax.training.replicas import AXIS, Replicas
from dflash_jax.training.stages import Clock

TARGET = Qwen3Config(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, windows=(None,),
    tie_embeddings=True,
)  # fmt: skip
SETTINGS = FitSettings(
    kind="v1", block_size=4, layers=1, length=16, rows=4, anchors=2, steps=4, chunk=4, warmup=0.5, teacher="tokens"
)


def test_weights_are_those_of_one_device(tmp_path, monkeypatch):
    """In float32: in bfloat16 each device would round its own sum over rows."""
    monkeypatch.setattr(fit, "working", lambda config, params: params)
    frozen = init_params(family_for(TARGET).parameters(TARGET), jax.random.key(0))
    rng = np.random.default_rng(0)
    answers = [Answer(tuple(rng.integers(0, 60, length).tolist()), 3) for length in (9, 16, 12, 7, 14, 16)]
    config, found = drafter_config(TARGET, SETTINGS), []
    for devices in (1, 2):
        folder = tmp_path / str(devices)
        clock = Clock(folder, lambda line: None)
        params = fit.fit_drafter(SETTINGS, TARGET, config, frozen, answers, folder / "drafter", clock, devices=devices)
        found.append((params, clock.log["drafter"]["history"][-1]["loss"]))
    (one, loss), (two, other) = found
    np.testing.assert_allclose(other, loss, rtol=1e-6)
    began = fit.damped(fit.initial_weights(config, SETTINGS.seed), SETTINGS.layers)
    assert max(float(jnp.abs(one[name] - began[name]).max()) for name in one) > 1e-4
    for name in one:
        # Adam's first steps are as long where a gradient is next to nothing, all rounding.
        np.testing.assert_allclose(np.asarray(two[name]), np.asarray(one[name]), atol=3e-6, err_msg=name)


def test_each_device_keeps_a_part_of_the_moments():
    state = {
        "params": {"a": np.ones((8, 3))},
        "moments": {"a": np.ones((8, 3)), "b": np.ones((3, 4)), "count": np.ones(())},
    }
    kept = Replicas(4).shardings(state)
    assert tuple(kept["params"]["a"].spec) == ()
    assert [tuple(kept["moments"][name].spec) for name in ("a", "b", "count")] == [(AXIS,), (None, AXIS), ()]


def test_refusals(tmp_path):
    with pytest.raises(ParameterError, match="devices must be from 1 to the 8 that JAX sees, got 9"):
        Replicas(9)
    with pytest.raises(ParameterError, match="devices must divide rows=4, got 3"):
        fit.fit_drafter(
            SETTINGS, TARGET, drafter_config(TARGET, SETTINGS), {}, [], tmp_path, Clock(tmp_path, print), devices=3
        )
