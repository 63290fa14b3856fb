"""Launches of exchanges between Hopper GPUs."""

import ctypes
import functools
import itertools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from dflash_kernels.core.device import require_hopper
from dflash_kernels.core.rank_exchange import RankExchange, first_values

GATHERED = 512  # words that one CTA hands over: the size of a place
MOST_RANKS = 8  # of one host


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
