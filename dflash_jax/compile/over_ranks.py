"""A program over several GPUs: every rank runs it on its share, all in one `shard_map`.

Weights are cut as their shardings say, page pools by key heads, and everything else is the same on every rank. Inside, a `Setup` is
a rank's. What is donated comes back first, at the places where it was.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dflash_jax.cache.pages import Pages, pool_axes
from dflash_jax.parallel.collectives import AXIS
from dflash_jax.parallel.ranks import Ranks


@runtime_checkable
class Shared(Protocol):
    """A static argument that a rank has a share of."""

    def of_rank(self) -> Any:
        """What a rank is told."""
        ...


def static_of_rank(static: Sequence[Any]) -> tuple[Any, ...]:
    """Static arguments as each rank has them."""
    return tuple(part.of_rank() if isinstance(part, Shared) else part for part in static)


def over_ranks(
    ranks: Ranks,
    function: Callable,
    static: tuple,
    donate: tuple[int, ...],
    args: tuple,
    options: dict[str, Any] | None,
) -> Any:
    """`jax.jit` of `function(*static, *args)` in which every rank runs it.

    Args:
      donate: at most one argument; the function gives it back alone or as the first of a tuple.
      args: arrays or their shapes. The first one holds weights, with their shardings, or None.
    """
    static = static_of_rank(static)
    inputs, tree = jax.tree.flatten(args)
    specs = jax.tree.leaves((_weight_specs(args[0]), *map(_specs, args[1:])), is_leaf=_is_spec)
    given = args[donate[0]] if donate else None
    back, back_tree = jax.tree.flatten(given)
    back_specs = jax.tree.leaves(_specs(given), is_leaf=_is_spec)
    # Arrays of zero elements stay outside: donated and passed on they crash XLA's compiler (jaxlib 0.11.2).
    real, real_back = (tuple(i for i, leaf in enumerate(each) if leaf.size) for each in (inputs, back))
    alone = False

    def of_rank(*leaves: jax.Array) -> tuple[list[jax.Array], Any]:
        nonlocal alone
        whole: list[Any] = [jnp.zeros(leaf.shape, leaf.dtype) if not leaf.size else None for leaf in inputs]
        for place, leaf in zip(real, leaves, strict=True):
            whole[place] = leaf
        results = function(*static, *jax.tree.unflatten(tree, whole))
        if not donate:
            return [], results
        alone = jax.tree.structure(results) == back_tree
        first, *rest = (results,) if alone else results
        given_back = jax.tree.leaves(first)
        return [given_back[place] for place in real_back], tuple(rest)

    # One name for programs of one function, as `jax.jit` gives it.
    shared = jax.shard_map(
        of_rank, mesh=ranks.mesh, in_specs=tuple(specs[i] for i in real),
        out_specs=([back_specs[i] for i in real_back], P()), check_vma=False,
    )  # fmt: skip

    def program(*args: Any) -> Any:
        leaves = jax.tree.leaves(args)
        kept, results = shared(*(leaves[i] for i in real))
        if not donate:
            return results
        whole: list[Any] = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in back]
        for place, leaf in zip(real_back, kept, strict=True):
            whole[place] = leaf
        first = jax.tree.unflatten(back_tree, whole)
        return first if alone else (first, *results)

    program.__name__ = function.__name__
    shardings = jax.tree.unflatten(tree, [NamedSharding(ranks.mesh, spec) for spec in specs])
    return jax.jit(program, donate_argnums=donate, in_shardings=shardings, compiler_options=options)


def share_pools(ranks: Ranks, pools: Any) -> Any:
    """Shardings of page pools, which may be shapes."""
    return jax.tree.map(partial(NamedSharding, ranks.mesh), _specs(pools), is_leaf=_is_spec)


def _is_spec(value: Any) -> bool:
    return isinstance(value, P)


def _weight_specs(weights: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding.spec, weights)


def _specs(tree: Any) -> Any:
    """Of anything but weights: pools are cut by heads, the rest is whole."""

    def of(part: Any) -> Any:
        if not isinstance(part, Pages):
            return P()
        return jax.tree.map(lambda axis: P() if axis < 0 else P(*(None,) * axis, AXIS), pool_axes(part))

    return jax.tree.map(of, tree, is_leaf=lambda part: isinstance(part, Pages))
