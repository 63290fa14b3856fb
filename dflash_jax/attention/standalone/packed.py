"""One batch of packed requests through a model with latent attention, some decoding and some in the middle of their prompts.

    attend = PackedAttend(page_table, query_lens, seq_lens, page_size=..., workspace=workspace_tokens(...))
    # ids [T]: the requests' new tokens one after the other
    hidden, _, pages = model(ids[None], attend.positions, attend, cache=pages)

Requests of few new tokens (decoding, verification) are absorbed, longer ones expanded with their context in chunks. Each request is
told apart by its own length, so they may come in any order. The engine does not need this: it prefills prompts between the cycles
of others, in programs of few shapes, while here the lengths are part of the program. It is for callers who schedule both
kinds together.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from dflash_kernels import latent_decode, latent_encode, latent_write
from jaxtyping import Array, Int

from dflash_jax.attention.mla import LatentLayer, absorbed_attention
from dflash_jax.attention.standalone.mla_metadata import plan_context
from dflash_jax.attention.standalone.mla_packed import packed_prefill, paged_chunks
from dflash_jax.cache.pages import Pages, slots_of
from dflash_jax.models.layers import Rotary


class PackedAttend:
    """A `LatentAttend` over packed requests; its cache is `Pages`, in any format.

    Args:
      page_table: `[n, W]` int32, one row for each request.
      query_lens: new tokens of each request, on the host; 0 for one that has none.
      seq_lens: all its tokens, the new ones included.
      page_size: tokens of a page.
      workspace: rows of context that are expanded at a time; see `workspace_tokens`.
      absorb_up_to: requests of at most so many new tokens are absorbed.
      tokens: rows of the batch; those past the requests are padding, write nothing and give 0. None: no padding.

    Raises:
      ValueError: the lengths do not fit each other or `tokens`.
      CapacityError: the workspace is too small; see `plan_context`.
    """

    def __init__(
        self,
        page_table: Int[Array, "n W"],
        query_lens: Int[np.ndarray, "n"],
        seq_lens: Int[np.ndarray, "n"],
        *,
        page_size: int,
        workspace: int,
        absorb_up_to: int = 16,
        tokens: int | None = None,
    ):
        self.page_table = page_table
        queries, lens, filled = np.asarray(query_lens), np.asarray(seq_lens), int(np.sum(query_lens))
        tokens = filled if tokens is None else tokens
        if tokens < filled:
            raise ValueError(f"{filled} new tokens do not fit a batch of {tokens}")
        starts = np.cumsum(queries) - queries
        decoding = queries <= absorb_up_to
        self._short, self._long = (np.flatnonzero(kind & (queries > 0)) for kind in (decoding, ~decoding))
        self._lens, self._queries, self._tokens = lens, queries, tokens
        # Rows of the batch by request; one past the end where a request has fewer than the longest.
        self._short_rows = _rows(starts[self._short], queries[self._short], tokens)
        self._long_rows = np.flatnonzero(np.repeat(~decoding, queries))
        self._plan = plan_context(queries[self._long], lens[self._long], workspace=workspace, page_size=page_size)
        owner = np.full(tokens, 0)
        owner[:filled] = np.repeat(np.arange(len(queries)), queries)
        positions = np.zeros(tokens, np.int32)
        positions[:filled] = np.arange(filled) - np.repeat(starts - (lens - queries), queries)
        self.positions = jnp.asarray(positions)[None]
        live = (np.arange(tokens) < filled)[:, None]
        self.slots = slots_of(page_table[owner], jnp.asarray(positions)[:, None], jnp.asarray(live), page_size)[:, 0]

    def latent(self, layer: Any, q: Array, row: Array, rotary: Rotary, cache: Pages) -> tuple[Array, Pages]:
        """`q [1,T,N,P+r]` and `row [1,T,R+r]` as projected to `[1,T,N,V_h]`, and the pools with the new rows."""
        q_nope, q_pe, kv_c, k_pe = layer.parts(q, row, rotary)
        return self.latent_parts(layer, q_nope, q_pe, kv_c, k_pe, cache)

    def latent_parts(
        self, layer: LatentLayer, q_nope: Array, q_pe: Array, kv_c: Array, k_pe: Array, cache: Pages
    ) -> tuple[Array, Pages]:
        """The same of rows that are normed and rotated: `q_nope [1,T,N,P]`, `q_pe [1,T,N,r]`, `kv_c [1,T,R]`, `k_pe [1,T,r]`."""
        i, rank = layer.index, kv_c.shape[-1]
        scale = cache.k_scale[i] if cache.k_scale else None
        latents = jnp.concatenate([kv_c, k_pe], axis=-1)[0]
        stored = latent_encode(latents, cache.k[i].dtype, kv_lora_rank=rank, scale=scale)
        pool = latent_write(cache.k[i], stored, self.slots)
        # As the pool holds them: both kinds of requests see the same rows.
        latents = latent_decode(stored, latents.dtype, kv_lora_rank=rank, scale=scale)
        out = jnp.zeros((self._tokens, q_nope.shape[2], layer.w_uv.shape[1]), q_nope.dtype)
        if len(self._short):
            nope, pe = (array[0].at[self._short_rows].get(mode="fill", fill_value=0) for array in (q_nope, q_pe))
            lens, counts = (jnp.asarray(x[self._short], jnp.int32) for x in (self._lens, self._queries))
            table = self.page_table[self._short]
            short = absorbed_attention(layer, nope, pe, pool, table, lens, counts, latent_scale=scale)
            out = out.at[self._short_rows].set(short, mode="drop")
        if len(self._long):
            context, with_context = (), 0
            if self._plan is not None:
                table, with_context = self.page_table[self._long], self._plan.tokens_with_context
                context = (
                    (latent_decode(rows, latents.dtype, kv_lora_rank=rank, scale=scale), owner)
                    for rows, owner in paged_chunks(self._plan, pool, table)
                )
            rows = self._long_rows
            new = q_nope[0][rows], q_pe[0][rows], latents[rows]
            out = out.at[rows].set(packed_prefill(layer, *new, self._queries[self._long], context, with_context))
        return out[None], cache.with_layer(i, k=pool)


def _rows(starts: Int[np.ndarray, "n"], counts: Int[np.ndarray, "n"], past: int) -> Int[np.ndarray, "n t"]:
    inside = np.arange(counts.max(initial=0))
    return np.where(inside < counts[:, None], starts[:, None] + inside, past)
