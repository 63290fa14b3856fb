"""Settings with which people look for mistakes in their own programs leave these ones as they are."""

import jax
import jax.numpy as jnp
import pytest

from dflash_jax.sampling_params import SamplingParams


@pytest.mark.few("numpy_rank_promotion")
@pytest.mark.parametrize("setting", ["debug_nans", "debug_infs", "numpy_rank_promotion"])
def test_requests_run_under_every_setting(pair, make_pair, make_prompts, setting):
    prompts = make_prompts((5, 21))
    kinds = [SamplingParams(max_tokens=9), SamplingParams(max_tokens=9, temperature=0.8, seed=3, logprobs=2)]
    expected = [pair.run(prompts, params)[:2] for params in kinds]
    watched = make_pair()
    with getattr(jax, setting)("raise" if setting == "numpy_rank_promotion" else True):
        for params, found in zip(kinds, expected, strict=True):
            assert watched.run(prompts, params)[:2] == found


def test_nans_are_found_and_forgotten(pair, make_pair, make_prompts):
    """What `jax_debug_nans` is for: weights that give NaN stop a request, and the model goes on with good ones."""
    prompts = make_prompts((5, 21))
    expected = pair.run(prompts)[:2]
    other = make_pair()
    good = other.engine.weights
    bad = {name: dict(params) for name, params in good.items()}
    name = "norm.weight"
    bad["target"][name] = jnp.full_like(bad["target"][name], jnp.nan)
    other.engine.weights = bad
    with jax.debug_nans(True), pytest.raises(Exception, match="nan"):
        other.run(prompts)
    other.engine.weights = good
    other.assert_free()
    assert other.run(prompts)[:2] == expected
