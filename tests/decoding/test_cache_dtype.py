"""The shipped pair with its target's pages in float8, on scales found on Python text."""

import jax.numpy as jnp
import numpy as np
import pytest

import dflash_jax as dj
from dflash_jax.errors import ParameterError

TEXTS = [
    "import numpy as np\n\n\ndef normalise(x):\n    return x / x.sum()\n",
    "class Stack:\n    def __init__(self):\n",
]
OPTIONS = {"dtype": "float32", "max_batch": 2, "max_model_len": 96, "page_size": 16}


def test_the_shipped_pair_with_pages_in_float8() -> None:
    """Drafting changes no token; the target's pages take a quarter of float32's, the drafter's stay."""
    model = dj.load(cache_dtype="fp8", calibration=TEXTS, **OPTIONS)
    target, draft = model.engine.take_pools()
    assert {pool.dtype for pool in (*target.k, *target.v)} == {jnp.dtype(jnp.float8_e4m3fn)}
    assert {pool.dtype for pool in (*draft.k, *draft.v)} == {jnp.dtype(jnp.float32)}
    for scale in (*target.k_scale, *target.v_scale):
        assert scale.shape == (model.target.num_kv_heads,)
        assert (np.log2(scale) % 1 == 0).all()
        assert (np.asarray(scale) < 1).all()  # nothing in this model's cache comes near 200
    prompts, params = ["def test_", "class Stack("], dj.SamplingParams(max_tokens=32)
    drafted, plain = (dj.generate(model, prompts, params, draft=draft) for draft in (True, False))
    assert [out.token_ids for out in drafted] == [out.token_ids for out in plain]
    assert max(length for out in drafted for length in out.acceptance_lengths) > 3


def test_what_the_shipped_pair_cannot_have() -> None:
    with pytest.raises(ParameterError, match="needs latent rows"):
        dj.load(cache_dtype="fp8_packed", **OPTIONS)
