"""Kernels of exchanges between Hopper GPUs: one warpgroup a place."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dflash_kernels.core.rank_exchange import RankExchange
from dflash_kernels.mosaic_gpu import rank_mailbox
from dflash_kernels.mosaic_gpu.rows import row_kernel


def gather_ranks(words: jax.Array, exchange: RankExchange) -> jax.Array:
    """All ranks' `words`, int32, a whole number of places of them: `[ranks, words]`."""

    def body(words, counts, area, peers, found):
        rank_mailbox.gathered_words(words, found, counts, area, peers, lax.axis_index("row"))

    out = jax.ShapeDtypeStruct((exchange.ranks, *words.shape), words.dtype)
    return row_kernel(body, "gather_ranks", (words.shape[0] // exchange.area.shape[3],), out)(words, *exchange)


def own_address(area: Any) -> jax.Array:
    """Address of a Ref in two words."""

    def body(area, found):
        rank_mailbox.own_address(area, found)

    return row_kernel(body, "own_address", (1,), jax.ShapeDtypeStruct((2,), jnp.int32))(area)
