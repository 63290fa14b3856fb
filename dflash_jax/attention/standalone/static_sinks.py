"""Sink tokens of fixed keys and values that every sequence sees ahead of its own: pages of their own, written once.

    k_pages, v_pages = write_static_sinks(k_pages, v_pages, sink_k, sink_v, sink_pages)
    table, lens = with_static_sinks(page_table, seq_lens, sink_pages, page_size)         # for attention alone
    out = paged_attention(q, k_pages, v_pages, table, lens)

Positions, slots and lengths of the tokens themselves stay as they are: only what attention gets has the sinks in it. Queries are
aligned at a sequence's end, so a causal one sees all sinks; a window counts them as the keys farthest to the left.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def write_static_sinks(
    k_pages: Float[Array, "P K p H"],
    v_pages: Float[Array, "P K p V"],
    sink_k: Float[Array, "S K H"],
    sink_v: Float[Array, "S K V"],
    sink_pages: Int[Array, "n"],
) -> tuple[Float[Array, "P K p H"], Float[Array, "P K p V"]]:
    """The pools with the sinks in `sink_pages`, in order; cast to the pools' dtype, 16 bits or more.

    Args:
      sink_v: the head dim may differ from the keys'.
      sink_pages: int32, pages the caller keeps out of the allocator's hands.

    Raises:
      ValueError: the sinks do not fill whole pages, or do not fit the pools.
    """
    page_size, filled = k_pages.shape[2], sink_pages.shape[0] * k_pages.shape[2]
    if sink_k.shape[0] != filled or sink_v.shape[0] != filled:
        raise ValueError(
            f"{sink_k.shape[0]} sink keys and {sink_v.shape[0]} values must fill {sink_pages.shape[0]} pages of {page_size} tokens"
        )
    for pool, rows in ((k_pages, sink_k), (v_pages, sink_v)):
        if rows.shape[1:] != (pool.shape[1], pool.shape[3]) or pool.dtype.itemsize < 2:
            raise ValueError(
                f"sinks of {rows.shape} [S, K, H] do not fit {pool.dtype} pages of {pool.shape} [P, K, p, H]"
            )

    def written(pool: Array, rows: Array) -> Array:
        paged = jnp.swapaxes(rows.reshape(-1, page_size, *rows.shape[1:]), 1, 2)
        return pool.at[sink_pages].set(paged.astype(pool.dtype), unique_indices=True)

    return written(k_pages, sink_k), written(v_pages, sink_v)


def with_static_sinks(
    page_table: Int[Array, "B W"], seq_lens: Int[Array, "B"], sink_pages: Int[Array, "n"], page_size: int
) -> tuple[Int[Array, "B n+W"], Int[Array, "B"]]:
    """Table and lengths that attention gets: the sinks' pages ahead of each sequence's own, idle rows still of length 0.

    Give it the sequences' own table and lengths each time: what it returns has the sinks already.
    """
    sinks = jnp.broadcast_to(sink_pages.astype(page_table.dtype), (page_table.shape[0], sink_pages.shape[0]))
    lens = jnp.where(seq_lens > 0, seq_lens + sink_pages.shape[0] * page_size, 0)
    return jnp.concatenate([sinks, page_table], axis=1), lens.astype(seq_lens.dtype)
