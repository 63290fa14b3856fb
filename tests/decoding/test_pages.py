"""Page pools and the slots of positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.cache import Pages, make_pages, page_bytes, slots_of
from dflash_jax.config import Qwen3Config

CONFIG = Qwen3Config(
    vocab_size=8, hidden_size=4, intermediate_size=4, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=6
)


def test_slots_follow_the_page_table() -> None:
    rng = np.random.default_rng(0)
    size, table = 5, rng.permutation(12).astype(np.int32).reshape(3, 4)
    positions = rng.integers(0, 20, (3, 7)).astype(np.int32)
    live = rng.random((3, 7)) < 0.7
    slots = np.asarray(slots_of(jnp.asarray(table), jnp.asarray(positions), jnp.asarray(live), size))
    for row in range(3):
        for column in range(7):
            at = positions[row, column]
            expected = table[row, at // size] * size + at % size if live[row, column] else -1
            assert slots[row, column] == expected


def test_what_has_no_page_has_no_slot() -> None:
    table = jnp.array([[3, -1], [2, 2_147_480_000]], jnp.int32)
    positions, live = jnp.array([[0, 3, 4, 7, 8, 900]] * 2, jnp.int32), jnp.ones((2, 6), bool)
    slots = np.asarray(slots_of(table, positions, live, 4))
    assert slots[0, :2].tolist() == [12, 15]
    assert (slots[0, 2:] < 0).all()  # a table entry of -1 is no page
    assert slots[1, :2].tolist() == [8, 11]
    assert (slots[1, 4:] == -1).all()  # past the table


def test_pools_have_one_array_for_each_layer() -> None:
    pages = make_pages(CONFIG, 7, 16, jnp.dtype(jnp.bfloat16))
    assert pages.page_size == 16
    assert [leaf.shape for leaf in jax.tree.leaves(pages)] == [(7, 2, 16, 6)] * 6
    assert {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(pages)}.__len__() == 6
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(pages)) == 7 * page_bytes(CONFIG, 16, jnp.dtype(jnp.bfloat16))


def test_pools_are_a_pytree() -> None:
    pages = make_pages(CONFIG, 2, 4, jnp.dtype(jnp.float32))
    doubled = jax.jit(lambda pools: jax.tree.map(lambda leaf: leaf + 1, pools))(pages)
    assert isinstance(doubled, Pages)
    assert float(doubled.v[2].sum()) == doubled.v[2].size
    empty = Pages((), ())
    assert jax.tree.leaves(empty) == []
    with pytest.raises(IndexError):
        _ = empty.page_size
