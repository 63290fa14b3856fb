"""A program over several GPUs: every rank runs it on its share, all in one `shard_map`.

Weights are cut as their shardings say, pools and states by heads, and everything else is the same on every rank. Inside, a `Setup`
is a rank's. What is donated comes back first, at the places where it was.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
from dflash_kernels import DeltaState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dflash_jax.cache.pages import Pages, pool_axes
from dflash_jax.parallel.ranks import AXIS, Ranks


@runtime_checkable
class Shared(Protocol):
    """A static argument that a rank has a share of."""

    def of_rank(self) -> Any:
        """Arguments of a rank."""
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
      donate: at most one argument; the function gives it back alone or as the first of a tuple. Where there is none it gives back
        what has the structure of the argument after the weights.
      args: arrays or their shapes. The first one holds weights, with their shardings, or None.
    """
    static = static_of_rank(static)
    inputs, tree = jax.tree.flatten(args)
    specs = jax.tree.leaves((_weight_specs(args[0]), *(_specs(arg, ranks) for arg in args[1:])), is_leaf=_is_spec)
    given = args[donate[0] if donate else 1]
    back, back_tree = jax.tree.flatten(given)
    back_specs = jax.tree.leaves(_specs(given, ranks), is_leaf=_is_spec)
    # Arrays of zero elements stay outside: donated and passed on they crash XLA's compiler (jaxlib 0.11.2).
    inside, outcome = _Filled(inputs), _Filled(back)
    others, others_tree = _Filled(()), jax.tree.structure(None)
    alone = False

    def of_rank(*leaves: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        nonlocal alone, outcome, others, others_tree
        results = function(*static, *jax.tree.unflatten(tree, inside.all_of(leaves)))
        alone = jax.tree.structure(results) == back_tree
        first, *rest = (results,) if alone else results
        first, (rest, others_tree) = jax.tree.leaves(first), jax.tree.flatten(tuple(rest))
        outcome, others = _Filled(first), _Filled(rest)
        return outcome.some_of(first), others.some_of(rest)

    shared = jax.shard_map(
        of_rank, mesh=ranks.mesh, in_specs=tuple(inside.some_of(specs)), out_specs=(outcome.some_of(back_specs), P()),
        check_vma=False,
    )  # fmt: skip

    def program(*args: Any) -> Any:
        kept, found = shared(*inside.some_of(jax.tree.leaves(args)))
        first = jax.tree.unflatten(back_tree, outcome.all_of(kept))
        return first if alone else (first, *jax.tree.unflatten(others_tree, others.all_of(found)))

    # As `jax.jit` names programs of the function itself.
    program.__name__ = function.__name__
    shardings = jax.tree.unflatten(tree, [NamedSharding(ranks.mesh, spec) for spec in specs])
    return jax.jit(program, donate_argnums=donate, in_shardings=shardings, compiler_options=options)


class _Filled:
    """Mask of the arrays or shapes that have elements: those are passed, the others are made inside."""

    def __init__(self, leaves: Sequence[Any]):
        self.shapes = [(leaf.shape, leaf.dtype) for leaf in leaves]
        self.places = [place for place, leaf in enumerate(leaves) if leaf.size]

    def some_of(self, leaves: Sequence[Any]) -> list[Any]:
        return [leaves[place] for place in self.places]

    def all_of(self, some: Sequence[jax.Array]) -> list[jax.Array]:
        found = dict(zip(self.places, some, strict=True))
        return [
            found[place] if place in found else jnp.zeros(shape, dtype)
            for place, (shape, dtype) in enumerate(self.shapes)
        ]


def share_pools(ranks: Ranks, pools: Any) -> Any:
    """Shardings of page pools and recurrent states, which may be shapes."""
    return jax.tree.map(partial(NamedSharding, ranks.mesh), _specs(pools, ranks), is_leaf=_is_spec)


def _is_spec(value: Any) -> bool:
    return isinstance(value, P)


def _weight_specs(weights: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding.spec, weights)


def _specs(tree: Any, ranks: Ranks) -> Any:
    """Partition specs of everything but weights.

    Pools and recurrent states are cut by heads, latent pages by tokens where those are dealt out, and the rest is whole.
    """

    def of(part: Any) -> Any:
        if isinstance(part, DeltaState):
            heads, channels = cast(Any, P(None, AXIS)), cast(Any, P(None, None, AXIS))
            return DeltaState(heads, channels)
        if not isinstance(part, Pages):
            return P()
        axes = pool_axes(part, deal=ranks.dealt > 1)
        return jax.tree.map(lambda axis: P() if axis < 0 else P(*(None,) * axis, AXIS), axes)

    return jax.tree.map(of, tree, is_leaf=lambda part: isinstance(part, Pages | DeltaState))
