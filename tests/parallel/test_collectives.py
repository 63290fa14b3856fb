"""Sums and choices of ranks against NumPy, and the same bits on all of them."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import RankExchange
from jax.sharding import PartitionSpec as P

from dflash_jax.parallel.collectives import (
    GATHERED_BYTES,
    added_in_order,
    adding_in,
    best_of_ranks,
    gathered,
    own_rank,
    ranks_here,
    reduced,
    reduced_together,
)
from dflash_jax.parallel.ranks import AXIS, local_ranks


def each(count: int, function: Callable, *arrays: Any) -> np.ndarray:
    """What every rank makes of its entry of the arrays, ranks first."""
    ranks = local_ranks(count)
    assert ranks is not None

    def own(*shares: Any) -> Any:
        return function(*(share[0] for share in shares))[None]

    shared = jax.shard_map(own, mesh=ranks.mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False)
    return np.asarray(jax.jit(shared)(*arrays))


@pytest.mark.parametrize(
    ("count", "dtype", "rows"),
    [(2, "float32", 3), (4, "float32", 3), (4, "bfloat16", 3), (4, "bfloat16", GATHERED_BYTES // 64)],
)
def test_sums(count, dtype, rows):
    """Large messages in sixteen bits are added in shares."""
    parts = np.random.default_rng(0).normal(size=(count, rows, 64)).astype(jnp.dtype(dtype))
    sums = each(count, reduced, parts)
    assert sums.dtype == dtype
    assert len({one.tobytes() for one in sums}) == 1
    tolerance = 1e-6 if dtype == "float32" else 3e-2
    np.testing.assert_allclose(sums[0].astype(float), parts.astype(float).sum(axis=0), rtol=tolerance, atol=tolerance)


def test_large_messages_are_added_in_order_where_that_is_promised():
    """Nothing is added in shares, and the sum is that of ranks one after the other, rounded once."""
    rows = GATHERED_BYTES // 64
    parts = np.random.default_rng(0).normal(size=(4, rows, 64)).astype(jnp.bfloat16)

    def ordered(own):
        with added_in_order(True):
            return reduced(own)

    total = functools.reduce(np.add, parts.astype(np.float32))
    np.testing.assert_array_equal(each(4, ordered, parts)[0], total.astype(jnp.bfloat16))
    ranks = local_ranks(4)
    assert ranks is not None
    for function, shared in ((ordered, False), (reduced, True)):
        program = jax.shard_map(function, mesh=ranks.mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False)
        text = jax.jit(program).trace(jnp.zeros((4 * rows, 64), jnp.bfloat16)).lower().as_text()
        assert ("reduce_scatter" in text) == shared


@pytest.mark.parametrize("count", [2, 4])
def test_memory_for_sums_changes_no_bits(count):
    """Where nothing else reaches other devices the operation gathers. What has no room in the memory is left to collectives."""
    parts = np.random.default_rng(2).normal(size=(count, 2, 3, 64)).astype(jnp.bfloat16)

    def added(own):
        with adding_in(sums):
            return reduced_together(*own)[1]

    def without_room(own):
        with adding_in(sums), added_in_order(True):
            return reduced(jnp.tile(own[1], (9, 1)))[:3]

    sums = RankExchange(jnp.zeros(1, jnp.int32), jax.ShapeDtypeStruct((3, count, 1, 512), jnp.int32), None)
    expected = each(count, lambda own: reduced_together(*own)[1], parts)
    for function in (added, without_room):
        np.testing.assert_array_equal(each(count, function, parts), expected)


def test_a_sum_of_float32_does_not_depend_on_the_rows_beside_it():
    parts = np.random.default_rng(1).normal(size=(4, 16, 64)).astype(np.float32)
    np.testing.assert_array_equal(each(4, reduced, parts)[0, :1], each(4, reduced, parts[:, :1])[0])


def test_shares_of_columns_are_put_side_by_side():
    columns = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    found = each(4, lambda share: gathered(share, 12), columns)
    assert {one.tobytes() for one in found} == {np.concatenate(columns, axis=1).tobytes()}


def test_the_first_of_equal_choices_is_taken():
    """Of four ranks with ten places each: one is best, three are equal, and all are minus infinity."""
    values = np.array([[1.0, 5, -np.inf], [2, 7, -np.inf], [9, 7, -np.inf], [3, 7, -np.inf]], np.float32)
    places = np.array([[1, 2, 0], [3, 4, 0], [5, 6, 0], [7, 8, 0]], np.int32)
    found = each(4, lambda value, place: best_of_ranks(value, place, 10), values, places)
    np.testing.assert_array_equal(found, [[25, 14, 0]] * 4)


def test_one_device_has_nobody_to_ask():
    assert ranks_here() == 1
    assert int(own_rank()) == 0
    x = jnp.ones(3)
    assert reduced(x) is x
    assert gathered(x, 3) is x
