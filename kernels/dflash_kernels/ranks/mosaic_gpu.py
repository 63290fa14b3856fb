"""Launches of exchanges between Hopper GPUs."""

import ctypes
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_kernels.core.device import require_hopper
from dflash_kernels.core.rank_exchange import SUMMED, RankExchange, first_values

GATHERED = 512  # words that one CTA hands over: the size of a place
MOST_RANKS = 8  # of one host
VECTOR = 4  # neighbouring numbers of one thread


@functools.cache
def reach_one_another(ranks: int) -> bool:
    """Whether the driver lets each of the first so many GPUs of this process write to the memory of all others."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    found = ctypes.c_int(0)
    return all(
        driver.cuDeviceCanAccessPeer(ctypes.byref(found), one, other) == 0 and found.value == 1
        for one, other in itertools.permutations(range(ranks), 2)
    )


def connected(places: int, words: int, axis: str) -> RankExchange:
    """See `rank_exchange`."""
    from dflash_kernels.ranks import mosaic_gpu_sm90 as kernel

    counts, area = map(jax.new_ref, first_values(jax.lax.axis_size(axis), places, words))
    # Nobody has all addresses before everybody's memory is filled: an address comes from a launch that follows the filling.
    everyones = jax.lax.all_gather(kernel.own_address(area), axis).reshape(-1)
    own = jnp.stack([jax.lax.axis_index(axis), 0])
    return RankExchange(counts, area, jnp.concatenate([everyones, own.astype(jnp.int32)]))


def gather_ranks_mosaic_gpu(
    words: Int[Array, "M"], *, axis: str | None, exchange: RankExchange | None
) -> Int[Array, "n M"]:
    """See `gather_ranks`."""
    del axis
    require_hopper()
    if exchange is None:
        raise NotImplementedError("needs memory for the exchange")
    _, _, places, size = exchange.area.shape
    if size != GATHERED or len(words) > places * GATHERED:
        raise NotImplementedError(
            f"takes {places} places of {GATHERED} words, not {len(words)} words in places of {size}"
        )
    from dflash_kernels.ranks import mosaic_gpu_sm90 as kernel

    return kernel.gather_ranks(jnp.pad(words, (0, -len(words) % GATHERED)), exchange)[:, : len(words)]


def reduce_ranks_mosaic_gpu(
    x: Float[Array, "M D"], *, axis: str | None, exchange: RankExchange | None
) -> Float[Array, "M D"]:
    """See `reduce_ranks`."""
    del axis
    require_hopper()
    if exchange is None:
        raise NotImplementedError("needs memory for the exchange")
    _require_numbers(x.dtype)
    _, _, places, size = exchange.area.shape
    if size != SUMMED or x.size * x.dtype.itemsize > exchange.room:
        raise NotImplementedError(
            f"takes {places} places of {SUMMED} words, not {x.size} numbers of {x.dtype} in places of {size}"
        )
    return _reduce_ranks(x, exchange)


def launch_reduce_ranks(parts: Float[Array, "n M D"], *, interpret: Any) -> Float[Array, "M D"]:
    """`reduce_ranks` of what all ranks have in the interpreter, which has one device."""
    _require_numbers(parts.dtype)
    from dflash_kernels.ranks import mosaic_gpu_sm90 as kernel

    flat = jnp.stack([_whole_vectors(own) for own in parts])
    return kernel.sum_ranks(flat, interpret)[: parts[0].size].reshape(parts.shape[1:])


# Compiled as a function of its own, so that the layers of a model share one trace and one lowering of the kernel.
@jax.jit
def _reduce_ranks(x: Array, exchange: RankExchange) -> Array:
    from dflash_kernels.ranks import mosaic_gpu_sm90 as kernel

    return kernel.reduce_ranks(_whole_vectors(x), exchange)[: x.size].reshape(x.shape)


def _whole_vectors(x: Array) -> Array:
    """All numbers in a row, and zeros up to a whole number of a thread's vectors."""
    return jnp.pad(x.reshape(-1), (0, -x.size % VECTOR))


def _require_numbers(dtype: Any) -> None:
    if dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"adds up bfloat16 or float32, not {dtype}")
