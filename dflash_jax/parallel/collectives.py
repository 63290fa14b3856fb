"""Collectives of ranks inside a program: sums of partial products, gathered shares, the best of all ranks.

Each function gives its argument back where a program runs on one device, which then is the same program as without them. All give
the same bits on every rank: ranks that part would wait for one another for ever.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax
import jax.numpy as jnp
from dflash_kernels import GATHERED, RankExchange, gather_ranks, rank_exchange, reduce_ranks
from jaxtyping import Array, Float, Int

from dflash_jax.parallel.ranks import AXIS

# Of a sum in sixteen bits: up to so many bytes all ranks' parts go to every rank, which takes no longer and adds in one order.
GATHERED_BYTES = 1 << 20

_ORDERED: ContextVar[bool] = ContextVar("ordered", default=False)
_WORDS: ContextVar[RankExchange | None] = ContextVar("words", default=None)
_SUMS: ContextVar[RankExchange | None] = ContextVar("sums", default=None)


def pair_exchange(count: int) -> RankExchange:
    """Memory in which kernels exchange for `best_of_ranks` of so many values, instead of JAX's collectives."""
    return rank_exchange(-(-2 * count // GATHERED), GATHERED, axis=AXIS)


@contextmanager
def exchanging_in(exchange: RankExchange | None) -> Iterator[None]:
    """Context in which traced code exchanges through the memory of `pair_exchange`; None leaves it to collectives."""
    token = _WORDS.set(exchange)
    try:
        yield
    finally:
        _WORDS.reset(token)


@contextmanager
def adding_in(exchange: RankExchange | None) -> Iterator[None]:
    """Context in which traced code adds up through memory of `sum_exchange`, what has room there; None leaves it to collectives."""
    token = _SUMS.set(exchange)
    try:
        yield
    finally:
        _SUMS.reset(token)


@contextmanager
def added_in_order(ordered: bool) -> Iterator[None]:
    """Context in which traced code adds up in order of ranks, however large a message is, if `ordered`.

    So a row's bits do not depend on its place among the rows.
    """
    token = _ORDERED.set(ordered)
    try:
        yield
    finally:
        _ORDERED.reset(token)


def ranks_here() -> int:
    """Ranks that share the program being traced; 1 outside of `compile.over_ranks`."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape[AXIS] if AXIS in mesh.manual_axes else 1


def own_rank() -> Int[Array, ""]:
    """The rank that runs the program."""
    return jax.lax.axis_index(AXIS) if ranks_here() > 1 else jnp.int32(0)


def reduced(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """The sum over ranks, added in order of ranks: by a kernel where there is memory for it (`adding_in`), else by collectives.

    Two numbers have one sum. More are gathered and added one after the other: the order in which a ring adds depends on where in a
    message a number stands, and so on the number of rows. Large messages in sixteen bits, which promise nothing of that kind, are
    added up in shares, each by one rank, which every rank then has from it; inside of `added_in_order` they are gathered as well.
    """
    ranks = ranks_here()
    if ranks == 1:
        return x
    exchange, size = _SUMS.get(), x.size * x.dtype.itemsize
    if exchange is not None and size <= exchange.room:
        return reduce_ranks(x.reshape(-1, x.shape[-1]), axis=AXIS, exchange=exchange).reshape(x.shape)
    if ranks == 2:
        return jax.lax.psum(x, AXIS)
    large = x.dtype != jnp.float32 and size > GATHERED_BYTES and x.size % ranks == 0
    if large and not _ORDERED.get():
        share = jax.lax.psum_scatter(x.reshape(ranks, -1), AXIS)
        return jax.lax.all_gather(share, AXIS).reshape(x.shape)
    parts = jax.lax.all_gather(x, AXIS)
    total = parts[0].astype(jnp.float32)
    for part in parts[1:]:
        total = total + part.astype(jnp.float32)
    return total.astype(x.dtype)


def reduced_together(*parts: Float[Array, "..."]) -> tuple[Float[Array, "..."], ...]:
    """`reduced` of each of several arrays of one shape, as one sum."""
    return parts if ranks_here() == 1 else tuple(reduced(jnp.stack(parts)))


def largest_of_ranks(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """The largest number at each place among all ranks'."""
    return jax.lax.pmax(x, AXIS) if ranks_here() > 1 else x


def gathered(x: Float[Array, "... F"], width: int) -> Float[Array, "... V"]:
    """All `width` columns, of which each rank has its share; x itself where it has all of them."""
    if x.shape[-1] == width:
        return x
    return jax.lax.all_gather(x, AXIS, axis=x.ndim - 1, tiled=True)


def best_of_ranks(values: Float[Array, "..."], places: Int[Array, "..."], count: int) -> Int[Array, "..."]:
    """The places of the largest values among all ranks', the first of equal ones, where each rank has `count` places."""
    pairs = jnp.stack([jax.lax.bitcast_convert_type(values.astype(jnp.float32), jnp.int32), places])
    exchange = _WORDS.get()
    if exchange is None or pairs.size > exchange.area.shape[2] * GATHERED:
        everyones = jax.lax.all_gather(pairs, AXIS)
    else:
        everyones = gather_ranks(pairs.reshape(-1), axis=AXIS, exchange=exchange).reshape(-1, *pairs.shape)
    best, place = jax.lax.bitcast_convert_type(everyones[0, 0], jnp.float32), everyones[0, 1]
    for rank in range(1, ranks_here()):
        value, its = jax.lax.bitcast_convert_type(everyones[rank, 0], jnp.float32), everyones[rank, 1] + rank * count
        place = jnp.where(value > best, its, place)
        best = jnp.maximum(best, value)
    return place
