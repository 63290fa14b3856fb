"""A token's attention has the same bits wherever its block begins and whoever is beside it: in Pallas's interpreter."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels.attention.paged.launch import Tuning
from dflash_kernels.attention.paged.mosaic_gpu import tuned
from jax.experimental.pallas import mosaic_gpu as plgpu

WIDTH, PAGE, HEADS, DIM = 6, 64, 8, 64


def attend(q: Any, pools: Any, tables: Any, lengths: list[int], splits: int, window: tuple[int | None, int | None]):
    options: Any = {"causal": True, "window": window, "soft_cap": None, "sinks": None, "scale": 0.3}
    lens, live = jnp.array(lengths, jnp.int32), jnp.full((q.shape[0],), q.shape[1], jnp.int32)
    tuning, interpret = Tuning(splits=splits), plgpu.InterpretGPUParams()
    out, lse = tuned(
        q, *pools, jnp.asarray(tables, jnp.int32), lens, live, tuning=tuning, interpret=interpret, **options
    )
    return np.asarray(out.astype(jnp.float32)), np.asarray(lse)


# First position of the block, splits, window. The block that begins six tokens later ends in another tile.
@pytest.mark.parametrize(
    ("first", "splits", "window"), [(240, 4, (None, None)), (240, 4, (300, None)), (240, 2, (None, None))]
)
def test_a_token_has_the_same_bits_wherever_its_block_begins(first: int, splits: int, window: Any) -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    pools = [jax.random.normal(key, (2 * WIDTH, 1, PAGE, DIM), jnp.bfloat16) for key in keys[:2]]
    q = jax.random.normal(keys[2], (2, 16, HEADS, DIM), jnp.bfloat16)
    tables = np.random.default_rng(0).permutation(2 * WIDTH).reshape(2, WIDTH)
    block = attend(q, pools, tables, [first + 16, 77], splits, window)
    moved = attend(jnp.roll(q[::-1], -6, 1), pools, tables[::-1], [90, first + 22], splits, window)
    for whole, later in zip(block, moved, strict=True):
        np.testing.assert_array_equal(whole[0, 6:], later[1, :10])
