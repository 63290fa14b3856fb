"""Sink tokens of fixed keys and values that every sequence sees ahead of its own: pages of their own, written once.

    k_pages, v_pages, k_scale = write_static_sinks(k_pages, v_pages, sink_k, sink_v, sink_pages)
    out = sink_attention(q, k_pages, v_pages, page_table, seq_lens, sink_pages, sinks=sink_k.shape[0])

Any number of sinks in pages of any format: all queries see them as one sequence, each its own keys as ever, and both parts are
joined through their lse (`attention.cascade`). Positions, slots and lengths of the tokens themselves stay as they are.

Sinks that fill whole pages can stand in the page table as well, for attention that takes one: packed queries, values of another
width than their keys, windows, which count sinks as the keys farthest to the left.

    table, lens = with_static_sinks(page_table, seq_lens, sink_pages, page_size)         # for attention alone
    out = paged_attention(q, k_pages, v_pages, table, lens)
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from dflash_kernels import kv_write
from jaxtyping import Array, Float, Int, Shaped

from dflash_jax.attention.cascade import SharedPages, cascade_attention


class SinksWritten(NamedTuple):
    """Pools with sinks in them.

    Attributes:
      k_scale: scales of int8 keys, those of the sinks among them; as given for other pools.
    """

    k_pages: Shaped[Array, "P K p H"]
    v_pages: Shaped[Array, "P K p V"]
    k_scale: Any = None


def write_static_sinks(
    k_pages: Shaped[Array, "P K p H"],
    v_pages: Shaped[Array, "P K p V"],
    sink_k: Float[Array, "S K H"],
    sink_v: Float[Array, "S K V"],
    sink_pages: Int[Array, "n"],
    *,
    k_scale: float | Float[Array, "..."] | None = None,
    v_scale: float | Float[Array, "..."] | None = None,
) -> SinksWritten:
    """The pools with the sinks in `sink_pages`, in order, from the first row on. What a last page has room for besides stays.

    Args:
      k_pages, v_pages: bfloat16, float16 or float32, to which sinks are cast; float8 or int8, by scales as of `kv_write`.
      sink_v: the head dim may differ from the keys', but not in eight bits.
      sink_pages: int32, pages the caller keeps out of the allocator's hands.

    Raises:
      ValueError: the sinks do not fit their pages or the pools, or scales do not fit these.
    """
    count, page_size = sink_k.shape[0], k_pages.shape[2]
    room = sink_pages.shape[0] * page_size
    if sink_v.shape[0] != count or not 0 < count <= room:
        raise ValueError(
            f"{count} sink keys and {sink_v.shape[0]} values must be equally many, from 1 to the {room} tokens of "
            f"{sink_pages.shape[0]} pages"
        )
    for pool, rows in ((k_pages, sink_k), (v_pages, sink_v)):
        if rows.shape[1:] != (pool.shape[1], pool.shape[3]):
            raise ValueError(
                f"sinks of {rows.shape} [S, K, H] do not fit {pool.dtype} pages of {pool.shape} [P, K, p, H]"
            )
    place = jnp.arange(count)
    pages, rows = sink_pages[place // page_size], place % page_size
    if min(k_pages.dtype.itemsize, v_pages.dtype.itemsize) > 1:
        if k_scale is not None or v_scale is not None:
            raise ValueError(f"{k_pages.dtype} pages have no scales")

        def written(pool: Array, new: Array) -> Array:
            return pool.at[pages, :, rows].set(new.astype(pool.dtype), unique_indices=True)

        return SinksWritten(written(k_pages, sink_k), written(v_pages, sink_v))
    # As tokens of a sequence are written that are neither normed nor rotated.
    kv = jnp.concatenate([sink_k.reshape(count, -1), sink_v.reshape(count, -1)], axis=1)
    keys, values = (None if scale is None else (scale,) for scale in (k_scale, v_scale))
    k, v, of_keys = kv_write((k_pages,), (v_pages,), kv, pages * page_size + rows, k_scale=keys, v_scale=values)
    return SinksWritten(k[0], v[0], k_scale if of_keys is None else of_keys[0])


def sink_attention(
    q: Float[Array, "B T N H"],
    k_pages: Shaped[Array, "P K p H"],
    v_pages: Shaped[Array, "P K p V"],
    page_table: Int[Array, "B W"],
    seq_lens: Int[Array, "B"],
    sink_pages: Int[Array, "n"],
    *,
    sinks: int,
    **options: Any,
) -> Float[Array, "B T N V"] | tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """`paged_attention` of queries that see `sinks` sink tokens besides, which are in `sink_pages`.

    Args:
      seq_lens: of the sequences alone; 0 for an idle row, which sees no sink either.
      options: of `attention.cascade.cascade_attention`.

    Raises:
      ValueError: shapes do not agree, or so many sinks are in no pages.
      NoImplementationError: no implementation takes these arguments.
    """
    room = sink_pages.shape[0] * k_pages.shape[2]
    if not 0 < sinks <= room:
        raise ValueError(f"{sinks} sinks must be from 1 to the {room} tokens of {sink_pages.shape[0]} pages")
    nothing = jnp.zeros_like(seq_lens)
    parts = SharedPages(
        sink_pages[None], jnp.full((1,), sinks, jnp.int32), page_table, nothing, jnp.ones_like(seq_lens, bool)
    )
    return cascade_attention(q, k_pages, v_pages, parts, seq_lens, **options)


def with_static_sinks(
    page_table: Int[Array, "B W"], seq_lens: Int[Array, "B"], sink_pages: Int[Array, "n"], page_size: int
) -> tuple[Int[Array, "B n+W"], Int[Array, "B"]]:
    """Table and lengths that attention gets: the sinks' pages, which they fill, ahead of each sequence's own, idle rows still of
    length 0.

    Give it the sequences' own table and lengths each time: what it returns has the sinks already.
    """
    sinks = jnp.broadcast_to(sink_pages.astype(page_table.dtype), (page_table.shape[0], sink_pages.shape[0]))
    lens = jnp.where(seq_lens > 0, seq_lens + sink_pages.shape[0] * page_size, 0)
    return jnp.concatenate([sinks, page_table], axis=1), lens.astype(seq_lens.dtype)
