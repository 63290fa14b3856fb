"""Launches of exchanges between Hopper GPUs."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from dflash_kernels.core.device import require_hopper
from dflash_kernels.core.rank_exchange import RankExchange, first_values

GATHERED = 512  # words that one CTA hands over: the size of a place
MOST_RANKS = 8  # of one host


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
