"""Latent attention over pages to the rows that an indexer chooses: what sparse targets are called with.

New tokens' latent rows and index keys are written first, to the same slots of both pools, so that a rejected token leaves both by
being written over. Then every query scores its own past, the best rows are chosen, and it attends to those alone.

Where the page table has room for no more than `index_topk` tokens, that is everything: nothing is scored, and latent attention is
that of `PagedAttend`. The table's width is the same for all layers and known when a program is compiled (`engine.buckets` has one
that ends there), so no layer looks for a choice that nobody made, and a decode loop has no branch that its CUDA graph lacks.
"""

from dataclasses import dataclass
from typing import Any, no_type_check

import jax
from dflash_kernels import index_encode, index_scores, index_select, latent_write, mla_selected_attention
from jaxtyping import Array, Int

from dflash_jax.attention.paged import PagedAttend
from dflash_jax.cache.pages import Pages
from dflash_jax.execution import switches
from dflash_jax.models.layers import IndexRows, Rotary


@no_type_check  # JAX rebuilds pytrees with shapes and placeholders in place of arrays
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class IndexedCache:
    """Cache of a sparse target's layers, and the indexer's choice that later layers reuse.

    Attributes:
      pages: latent rows and index keys.
      slots: rows that the last indexer chose for each query, -1 behind them; None before the first one, and where the page table
        has room for no more than may be chosen.
    """

    pages: Pages
    slots: Int[Array, "B T K"] | None


class IndexedPages:
    """An `IndexedAttend` over page pools; its cache is an `IndexedCache`.

    Args:
      paged: what writes latent rows, and attends where everything is chosen.
    """

    def __init__(self, paged: PagedAttend):
        self.paged = paged

    def indexed(
        self, layer: Any, q: Array, row: Array, index: IndexRows | None, rotary: Rotary, cache: IndexedCache
    ) -> tuple[Array, IndexedCache]:
        """See `IndexedAttend`."""
        paged, count, place = self.paged, layer.config.index_topk, layer.config.index_place(layer.index)
        q_nope, q_pe, pages = paged.write_latents(layer, q, row, rotary, cache.pages)
        if index is not None:
            index, pages = self._write(index, place, pages)
        if paged.page_table.shape[1] * pages.page_size <= count:
            return paged.over_latents(layer, q_nope, q_pe, pages), IndexedCache(pages, None)
        slots = cache.slots if index is None else self._chosen(index, place, pages, count)
        assert slots is not None, "the first layer has an indexer"
        return self._over_chosen(layer, q_nope, q_pe, pages, slots), IndexedCache(pages, slots)

    def _write(self, index: IndexRows, place: int, pages: Pages) -> tuple[IndexRows, Pages]:
        """The rows as the pool keeps them, and pages with the new tokens' keys; scales of queries go into the heads' weights."""
        pool, slots = pages.index[place], self.paged.slots
        if pages.index_scale:
            (q, q_scale), (k, k_scale) = index_encode(index.q), index_encode(index.k)
            rows = pages.index_scale[place].reshape(-1)
            rows = rows.at[slots].set(k_scale.reshape(-1), mode="drop", wrap_negative_indices=False)
            pages = pages.with_layer(place, index_scale=rows.reshape(pool.shape[:3]))
            index = IndexRows(q, k, index.weights * q_scale)
        keys = latent_write(pool, index.k.reshape(-1, pool.shape[3]), slots)
        return index, pages.with_layer(place, index=keys)

    def _chosen(self, index: IndexRows, place: int, pages: Pages, count: int) -> Int[Array, "B T K"]:
        """Slots of the best rows of each query, in ascending order of their positions."""
        table, options = self.paged.page_table, {"implementation": _implementation()}
        scores = index_scores(
            index.q, index.weights, pages.index[place], table, self.paged.seq_lens, q_lens=self.paged.q_lens,
            index_scale=pages.index_scale[place] if pages.index_scale else None, **options,
        )  # fmt: skip
        return index_select(scores, count=count, page_table=table, page_size=pages.page_size, **options)

    def _over_chosen(self, layer: Any, q_nope: Array, q_pe: Array, pages: Pages, slots: Int[Array, "B T K"]) -> Array:
        o_latent = mla_selected_attention(
            layer.absorb(q_nope, q_pe), pages.k[layer.index], slots, kv_lora_rank=layer.config.kv_lora_rank,
            scale=layer.scale, latent_scale=pages.k_scale[layer.index] if pages.k_scale else None,
            implementation=_implementation(),
        )  # fmt: skip
        return layer.up(o_latent)


def _implementation() -> str | None:
    """Name of the implementation of sparse attention; None for the best that takes the call."""
    return None if switches.SPARSE else "xla"
