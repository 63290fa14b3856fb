"""Fused QK norm, RoPE, KV-cache write and paged attention. Checks shapes, then dispatches."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float, Int

from dflash_kernels.core.dispatch import first_fitting
from dflash_kernels.fused.arguments import Heads
from dflash_kernels.fused.qkv_attention.mosaic_gpu import qkv_attention_mosaic_gpu, refuse
from dflash_kernels.fused.qkv_attention.reference import qkv_attention_reference

IMPLEMENTATIONS = {"mosaic_gpu": qkv_attention_mosaic_gpu, "xla": qkv_attention_reference}


class QkvAttended(NamedTuple):
    """Result of `qkv_attention`: heads `[B, T, N, H]`, and the pools."""

    out: Array
    k_pages: Array
    v_pages: Array


def qkv_attention_refusal(
    sequences: int, tokens: int, dtype: Any, *, group: int, kv_heads: int, head_dim: int, turned: int, page_size: int,
    table_width: int, causal: bool,
) -> str | None:  # fmt: skip
    """Why `qkv_attention` has nothing faster than `qkv_write` and `paged_attention` for calls of these sizes; None where it has.

    Args:
      group: query heads of a KV head.
      turned: columns of a head that turn with the position.
      table_width: pages that a row of the page table has room for.
    """
    try:
        refuse(
            sequences, tokens, dtype, group=group, kv_heads=kv_heads, head_dim=head_dim, turned=turned, page_size=page_size,
            table_width=table_width, causal=causal,
        )  # fmt: skip
    except NotImplementedError as reason:
        return str(reason)
    return None


def qkv_attention(
    k_pages: Float[Array, "P K p H"],
    v_pages: Float[Array, "P K p H"],
    qkv: Float[Array, "M E"],
    page_table: Int[Array, "B W"],
    seq_lens: Int[Array, "B"],
    q_lens: Int[Array, "B"],
    cos: Float[Array, "M half"],
    sin: Float[Array, "M half"],
    *,
    q_norm: Float[Array, "H"] | None,
    k_norm: Float[Array, "H"] | None,
    causal: bool = True,
    scale: float | None = None,
    eps: float = 1e-6,
    implementation: str | Sequence[str] | None = None,
) -> QkvAttended:
    """Fused QK norm, RoPE, KV-cache write and paged attention from a QKV projection: `qkv_write`, then `paged_attention`.

    There are M = B * T tokens, a sequence's one after the other.

    Token i of sequence b stands at position `seq_lens[b] - q_lens[b] + i`; its key and value go to that place in the sequence's
    pages. Tokens past `q_lens` and places before the sequence or past the table write nothing.

    Args:
      k_pages, v_pages, page_table, seq_lens, q_lens, causal, scale: as of `paged_attention`; donate the pools to the surrounding
        jit and the write happens in place. No two sequences may share a page that is written.
      qkv, cos, sin, eps: as of `qkv_write`.
      q_norm, k_norm: weights of the norms of queries and keys, or None both.
      implementation: a name, names to try in order, or None for the best that takes the call.

    Raises:
      ValueError: shapes do not agree.
      NoImplementationError: nothing named takes these arguments.
    """
    heads = Heads(k_pages, v_pages, qkv, page_table, seq_lens, q_lens, cos, sin, q_norm, k_norm)
    heads.check()
    scale = k_pages.shape[3] ** -0.5 if scale is None else scale
    with jax.named_scope("qkv_attention"):
        written = first_fitting(
            "qkv_attention", IMPLEMENTATIONS, implementation, heads, causal=causal, scale=scale, eps=eps
        )
    return QkvAttended(*written)
