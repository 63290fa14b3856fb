"""Reference of `qkv_attention` in jnp: the two operations one after the other."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from dflash_kernels.attention.paged.reference import paged_attention_reference
from dflash_kernels.fused.arguments import Heads
from dflash_kernels.kv_cache.write.reference import qkv_write_reference


def qkv_attention_reference(
    heads: Heads, *, causal: bool, scale: float, eps: float
) -> tuple[Float[Array, "B T N H"], Array, Array]:
    """See `qkv_attention`."""
    k_pages, v_pages, qkv, page_table, seq_lens, q_lens, cos, sin, q_norm, k_norm, k_scale, v_scale = heads
    b, page_size = page_table.shape[0], k_pages.shape[2]
    tokens = qkv.shape[0] // b
    token = jnp.arange(tokens)
    position = (seq_lens - q_lens)[:, None] + token
    column = position // page_size
    inside = (token < q_lens[:, None]) & (position >= 0) & (column < page_table.shape[1])
    page = jnp.take_along_axis(page_table, jnp.clip(column, 0, page_table.shape[1] - 1), axis=1)
    slots = jnp.where(inside, page * page_size + position % page_size, -1).reshape(-1)
    q, k_pages, v_pages, _ = qkv_write_reference(
        k_pages, v_pages, qkv, slots, cos, sin, q_norm, k_norm, k_scale, v_scale, eps=eps
    )
    out, _ = paged_attention_reference(
        q.reshape(b, tokens, *q.shape[1:]), k_pages, v_pages, page_table, seq_lens, q_lens, causal=causal,
        window=(None, None), soft_cap=None, sinks=None, scale=scale, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    return out, k_pages, v_pages
