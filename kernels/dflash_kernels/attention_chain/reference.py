"""The definition in jnp: the three operations one after the other."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from dflash_kernels.cache_write.qkv_reference import qkv_write_reference
from dflash_kernels.layer_chain.reference import layer_chain_reference
from dflash_kernels.paged_attention.reference import paged_attention_reference


def attention_chain_reference(
    k_pages: Float[Array, "P K p H"],
    v_pages: Float[Array, "P K p H"],
    qkv: Float[Array, "M E"],
    page_table: Int[Array, "B W"],
    seq_lens: Int[Array, "B"],
    q_lens: Int[Array, "B"],
    cos: Float[Array, "M half"],
    sin: Float[Array, "M half"],
    q_norm: Float[Array, "H"],
    k_norm: Float[Array, "H"],
    stream: Float[Array, "D n"],
    o: Shaped[Array, "D A"],
    post_norm: Float[Array, "D"],
    gate_up: Shaped[Array, "twoF D"],
    down: Shaped[Array, "D F"],
    next_norm: Float[Array, "D"] | None,
    following: Shaped[Array, "G D"] | None,
    exchange: Any,
    *,
    scales: Sequence[Array | None] | None = None,
    causal: bool,
    scale: float,
    eps: float,
) -> tuple[Float[Array, "D n"], Float[Array, "M G"] | None, Array, Array]:
    """See `attention_chain`."""
    del exchange
    rows, page_size, b = qkv.shape[0], k_pages.shape[2], page_table.shape[0]
    token = jnp.arange(rows // b)
    position = (seq_lens - q_lens)[:, None] + token
    column = position // page_size
    inside = (token < q_lens[:, None]) & (column < page_table.shape[1])
    page = jnp.take_along_axis(page_table, jnp.clip(column, 0, page_table.shape[1] - 1), axis=1)
    slots = jnp.where(inside, page * page_size + position % page_size, -1).reshape(-1)
    q, k_pages, v_pages, _ = qkv_write_reference(
        k_pages, v_pages, qkv, slots, cos, sin, q_norm, k_norm, None, None, eps=eps
    )
    out, _ = paged_attention_reference(
        q.reshape(b, rows // b, *q.shape[1:]), k_pages, v_pages, page_table, seq_lens, q_lens, causal=causal,
        window=(None, None), soft_cap=None, sinks=None, scale=scale,
    )  # fmt: skip
    stream, projected = layer_chain_reference(
        out.reshape(rows, -1),
        stream,
        o,
        post_norm,
        gate_up,
        down,
        next_norm,
        following,
        None,
        None,
        scales=scales,
        eps=eps,
    )
    return stream, projected, k_pages, v_pages
