"""Kernels of exchanges between Hopper GPUs: one warpgroup a place."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from dflash_kernels.core.rank_exchange import SUMMED, RankExchange
from dflash_kernels.mosaic_gpu import rank_mailbox
from dflash_kernels.mosaic_gpu.rows import load_piece, row_kernel, store_piece


def gather_ranks(words: jax.Array, exchange: RankExchange) -> jax.Array:
    """All ranks' `words`, int32, a whole number of places of them: `[ranks, words]`."""

    def body(words, counts, area, peers, found):
        rank_mailbox.gathered_words(words, found, counts, area, peers, lax.axis_index("row"))

    out = jax.ShapeDtypeStruct((exchange.ranks, *words.shape), words.dtype)
    return row_kernel(body, "gather_ranks", (words.shape[0] // exchange.area.shape[3],), out)(words, *exchange)


def reduce_ranks(x: jax.Array, exchange: RankExchange) -> jax.Array:
    """The sum of all ranks' `x [n]`, a whole number of vectors; a CTA for each place of the memory that they fill."""
    width = _width(x)

    def body(x, counts, area, peers, sums):
        place = lax.axis_index("row")
        total = rank_mailbox.summed_row(load_piece(x, place, width=width), counts, area, peers, place)
        store_piece(sums, total.astype(x.dtype), place)

    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return row_kernel(body, "reduce_ranks", (pl.cdiv(x.shape[0], width),), out)(x, *exchange)


def sum_ranks(parts: jax.Array, interpret: Any = None) -> jax.Array:
    """Interpreter form of `reduce_ranks` on all ranks' `parts [ranks, n]`. It has no other ranks."""
    width = _width(parts[0])

    def body(parts, sums):
        place = lax.axis_index("row")
        total = load_piece(parts.at[0], place, width=width).astype(jnp.float32)
        for rank in range(1, parts.shape[0]):
            total = total + load_piece(parts.at[rank], place, width=width).astype(jnp.float32)
        store_piece(sums, total.astype(parts.dtype), place)

    out = jax.ShapeDtypeStruct(parts.shape[1:], parts.dtype)
    return row_kernel(body, "sum_ranks", (pl.cdiv(parts.shape[1], width),), out, interpret)(parts)


def _width(x: jax.Array) -> int:
    """Numbers of a place."""
    return 4 * SUMMED // x.dtype.itemsize


def own_address(area: Any) -> jax.Array:
    """Address of a Ref in two words."""

    def body(area, found):
        rank_mailbox.own_address(area, found)

    return row_kernel(body, "own_address", (1,), jax.ShapeDtypeStruct((2,), jnp.int32))(area)
