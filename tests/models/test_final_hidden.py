"""A drafter that reads the target's hidden states after the final norm (`use_aux_hidden_state` false)."""

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.attention.dense import dense_attend
from dflash_jax.config import FINAL_HIDDEN
from dflash_jax.models import bind

from ..random_pair import draft_config, random_params, target_config


def test_its_features_are_normed_and_not_projected() -> None:
    """Against float64, and beside a tap of the last block, which is what comes before the target's norm."""
    config, reads = target_config(), draft_config(target_layer_ids=(FINAL_HIDDEN,))
    target, draft = random_params(config, 0), random_params(reads, 1)
    target["norm.weight"] = 1.0 + 0.1 * jax.random.normal(jax.random.key(2), (40,))
    draft["hidden_norm.weight"] = 1.0 + 0.1 * jax.random.normal(jax.random.key(3), (40,))
    assert "fc.weight" not in draft
    ids, positions = jnp.asarray([[5, 9, 30, 7]]), jnp.arange(4)[None]
    hidden, features, _ = bind(config, target)(ids, positions, dense_attend(), (FINAL_HIDDEN,))
    np.testing.assert_array_equal(np.asarray(features), np.asarray(hidden))
    _, raw, _ = bind(config, target)(ids, positions, dense_attend(), (1,))

    def normed(x: np.ndarray, weight: jax.Array) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * np.asarray(weight, np.float64)

    after = normed(np.asarray(raw, np.float64), target["norm.weight"])
    np.testing.assert_allclose(np.asarray(features), after, rtol=1e-5, atol=1e-6)
    context = bind(reads, draft).context(features)
    np.testing.assert_allclose(np.asarray(context), normed(after, draft["hidden_norm.weight"]), rtol=1e-5, atol=1e-5)
