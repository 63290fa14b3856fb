"""The search behind filters: whole numbers in the order of logits, and the largest that enough of them reach."""

import jax.numpy as jnp
import numpy as np
from dflash_kernels.sampling.search import largest_reached, ordered


def test_whole_numbers_keep_the_order_of_logits() -> None:
    numbers = jnp.array([-jnp.inf, -3e38, -2.5, -2.0, -1e-37, -0.0, 0.0, 1e-37, 1.0, 1.5, 3e38, jnp.inf])
    for bits in (16, 20, 32):
        keys = np.asarray(ordered(numbers, bits)).astype(np.int64)
        assert (np.diff(keys) >= 0).all()
        assert keys[5] == keys[6]
        assert len(np.unique(keys)) >= (11 if bits == 32 else 9)
        assert 0 < keys[0] < keys[-1] < 2**bits


def test_the_largest_number_that_enough_reach() -> None:
    keys = jnp.array([[3, 9, 9, 200, 65_535, 0]], jnp.uint16)
    for enough, expected in ((1, 65_535), (2, 200), (3, 9), (4, 9), (5, 3), (6, 0), (7, 0)):
        found = largest_reached(keys, jnp.ones(keys.shape, jnp.int32), jnp.array([[enough]]), 16)
        assert found.tolist() == [[expected]]
    weights = jnp.array([[0.0, 0.5, 0.5, 1.0, 0.0, 4.0]])
    for share, expected in ((0.25, 200), (1.0, 200), (1.25, 9), (2.0, 9), (2.1, 0), (9.0, 0)):
        assert largest_reached(keys, weights, jnp.array([[share]]), 16).tolist() == [[expected]]
