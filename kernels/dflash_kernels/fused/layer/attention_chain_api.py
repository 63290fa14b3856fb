"""The public functions: check shapes, then hand over to the first implementation that takes the call."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from dflash_kernels.core.device import target
from dflash_kernels.core.dispatch import first_fitting
from dflash_kernels.core.layouts import EMPTY, ColumnBlocks
from dflash_kernels.fused.arguments import Heads
from dflash_kernels.fused.layer.api import chain_exchange
from dflash_kernels.fused.layer.arguments import Layer
from dflash_kernels.fused.layer.attention_chain_mosaic_gpu import attention_chain_mosaic_gpu, refuse
from dflash_kernels.fused.layer.attention_chain_reference import attention_chain_reference
from dflash_kernels.fused.layer.mosaic_gpu_plan import HEAD_DIM, KEYS

IMPLEMENTATIONS = {"mosaic_gpu": attention_chain_mosaic_gpu, "xla": attention_chain_reference}


class Chained(NamedTuple):
    """What `attention_chain` returns: the stream after the layer, the next projection or None, and the pools."""

    stream: Array
    projected: Array | None
    k_pages: Array
    v_pages: Array


def attention_chain_refusal(
    sequences: int, tokens: int, dtype: Any, *, group: int, kv_heads: int, head_dim: int, page_size: int, table_width: int,
    hidden: int, heads_width: int, inner: int, next_width: int, itemsize: int = 2, page_dtype: Any = None,
) -> str | None:  # fmt: skip
    """Why `attention_chain` has nothing faster than separate operations for calls of these sizes; None where it has.

    Args:
      group: query heads of a KV head.
      table_width: pages that a row of the page table has room for.
      itemsize: bytes of a weight.
      page_dtype: of the pools, `dtype` where None.
    """
    try:
        refuse(
            sequences, tokens, dtype, group=group, kv_heads=kv_heads, head_dim=head_dim, page_size=page_size,
            table_width=table_width, hidden=hidden, heads_width=heads_width, inner=inner, next_width=next_width,
            itemsize=itemsize, page_dtype=page_dtype,
        )  # fmt: skip
    except NotImplementedError as reason:
        return str(reason)
    return None


def attention_chain_exchange(
    stream: Float[Array, "D n"], down: Shaped[Array, "D F"] | ColumnBlocks, sequences: int, tokens: int, *, heads: int,
    kv_heads: int,
) -> tuple[Int[Array, "..."], ...]:  # fmt: skip
    """What the Refs start with through which multiprocessors hand results to one another: four, for all layers of a step."""
    ctas, rows = max(target().multiprocessors, 1), tokens * heads // kv_heads
    shapes = ((ctas, rows, HEAD_DIM), (ctas, KEYS), (sequences * tokens, heads * HEAD_DIM // 2))
    return chain_exchange(stream, down), *(jnp.full(shape, EMPTY, jnp.int32) for shape in shapes)


def attention_chain(
    k_pages: Shaped[Array, "P K p H"],
    v_pages: Shaped[Array, "P K p H"],
    qkv: Float[Array, "M E"],
    page_table: Int[Array, "B W"],
    seq_lens: Int[Array, "B"],
    q_lens: Int[Array, "B"],
    cos: Float[Array, "M half"],
    sin: Float[Array, "M half"],
    stream: Float[Array, "D n"],
    o: Shaped[Array, "D A"] | ColumnBlocks,
    post_norm: Float[Array, "D"],
    gate_up: Shaped[Array, "twoF D"] | ColumnBlocks,
    down: Shaped[Array, "D F"] | ColumnBlocks,
    next_norm: Float[Array, "D"] | None = None,
    following: Shaped[Array, "G D"] | ColumnBlocks | None = None,
    *,
    q_norm: Float[Array, "H"],
    k_norm: Float[Array, "H"],
    exchange: Any,
    scales: Sequence[Array | None] | None = None,
    k_scale: Float[Array, "K"] | None = None,
    v_scale: Float[Array, "K"] | None = None,
    causal: bool = True,
    scale: float | None = None,
    eps: float = 1e-6,
    implementation: str | Sequence[str] | None = None,
) -> Chained:
    """One layer for a few tokens, from its projection of queries, keys and values to the next layer's: `qkv_write`,
    `paged_attention` and `layer_chain` in one.

    Args:
      k_pages, v_pages: page pools, of the activations' dtype or float8_e4m3fn; donate them to the surrounding jit and the write
        happens in place.
      qkv: the projection, `E = (N + 2 K) * H`: query heads, key heads, value heads; `M = B * T` tokens, those of a sequence
        together.
      page_table: int32 page indices; entries past a sequence's last page may hold anything.
      seq_lens: int32 keys of each sequence, the new tokens' own included; 0 for an idle row.
      q_lens: int32 new tokens that are real, at most `seq_lens`: token i stands at position `seq_lens - q_lens + i` and is written
        there. The rest write nothing, and their attention is 0.
      cos, sin: float32, of each token's angles and times any factor.
      stream: the residual stream, from `chain_stream` or the call before.
      o, post_norm, gate_up, down, next_norm, following: as for `layer_chain`.
      q_norm, k_norm: weights of the norms of queries and keys.
      exchange: Refs of `attention_chain_exchange`, passed to one call after the other.
      scales: as for `layer_chain`.
      k_scale, v_scale: float32, what float8 pools' keys and values are to be multiplied with; None for other pools.
      causal: a token sees no key after its own position.
      scale: softmax scale, `H ** -0.5` where None.
      eps: added to the mean squares of all norms.
      implementation: a name, names to try in order, or None for the best that takes the call.

    Raises:
      ValueError: shapes do not agree.
      NoImplementationError: nothing named takes these arguments.
    """
    heads = Heads(k_pages, v_pages, qkv, page_table, seq_lens, q_lens, cos, sin, q_norm, k_norm, k_scale, v_scale)
    layer = Layer(stream, o, post_norm, gate_up, down, next_norm, following, scales)
    heads.check()
    (rows, width), (_, kv_heads, _, head_dim) = qkv.shape, k_pages.shape
    layer.check(rows, width - 2 * kv_heads * head_dim)
    with jax.named_scope("attention_chain"):
        out = first_fitting(
            "attention_chain", IMPLEMENTATIONS, implementation, heads, layer, exchange, causal=causal,
            scale=head_dim**-0.5 if scale is None else scale, eps=eps,
        )  # fmt: skip
    return Chained(*out)
