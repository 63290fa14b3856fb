"""Fused decoder layer: `layer_chain` after its attention, `attention_chain` with it. Checks shapes, then dispatches."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from dflash_kernels.core.device import target
from dflash_kernels.core.dispatch import first_fitting
from dflash_kernels.core.layouts import EMPTY, ColumnBlocks
from dflash_kernels.core.rank_exchange import RankExchange
from dflash_kernels.core.validation import check_axes, check_floats
from dflash_kernels.fused.arguments import Heads
from dflash_kernels.fused.layer.arguments import Layer
from dflash_kernels.fused.layer.mosaic_gpu import (
    attention_chain_mosaic_gpu,
    layer_chain_mosaic_gpu,
    refuse_layer,
    refuse_products,
)
from dflash_kernels.fused.layer.reference import attention_chain_reference, layer_chain_reference
from dflash_kernels.fused.plan import HEAD_DIM, KEYS, LINE, ROWS, MailboxLayout, padded_rows
from dflash_kernels.ranks.api import rank_exchange

PRODUCTS = {"mosaic_gpu": layer_chain_mosaic_gpu, "xla": layer_chain_reference}
LAYERS = {"mosaic_gpu": attention_chain_mosaic_gpu, "xla": attention_chain_reference}


class Chained(NamedTuple):
    """Result of `attention_chain`: the stream after the layer, the next projection or None, and the pools."""

    stream: Array
    projected: Array | None
    k_pages: Array
    v_pages: Array


def layer_chain_refusal(
    rows: int, dtype: Any, *, hidden: int, heads_width: int, inner: int, next_width: int, itemsize: int = 2
) -> str | None:
    """Why `layer_chain` has nothing faster than separate operations for calls of these sizes; None where it has."""
    try:
        refuse_products(
            rows, dtype, hidden=hidden, heads_width=heads_width, inner=inner, next_width=next_width, itemsize=itemsize
        )
    except NotImplementedError as reason:
        return str(reason)
    return None


def chain_stream(x: Float[Array, "M D"]) -> Float[Array, "D n"]:
    """Residual stream as `layer_chain` keeps it: transposed, float32, a column for each token and columns of zeros up to `n`."""
    columns = padded_rows(x.shape[0])
    if x.shape[0] == 1:
        # No transpose: XLA would lay the row out by columns, and a copy of the embedding table that it comes from with it.
        first = jax.lax.broadcasted_iota(jnp.int32, (x.shape[1], columns), 1) == 0
        return jnp.where(first, x.reshape(-1).astype(jnp.float32)[:, None], 0.0)
    return jnp.pad(x.astype(jnp.float32), ((0, columns - x.shape[0]), (0, 0))).T


def chain_exchange(stream: Float[Array, "D n"], down: Shaped[Array, "D F"] | ColumnBlocks) -> Int[Array, "w"]:
    """First value of the cross-CTA mailbox of `layer_chain`, which the caller makes a Ref of: one for all layers of a step."""
    words = MailboxLayout(max(target().multiprocessors, 1), stream.shape[1], *down.shape)
    # Counts of launches are 0 at first, places of results are empty.
    return jnp.where(jnp.arange(words.words) < words.ctas * LINE, 0, EMPTY)


def chain_ranks(stream: Float[Array, "D n"], *, axis: str) -> RankExchange:
    """Memory in which the devices along `axis` meet in `layer_chain` and `attention_chain`: one for all layers of a step."""
    hidden, tokens = stream.shape
    return rank_exchange(2 * (hidden // ROWS), ROWS * tokens, axis=axis)


def layer_chain(
    x: Float[Array, "M A"],
    stream: Float[Array, "D n"],
    o: Shaped[Array, "D A"] | ColumnBlocks,
    post_norm: Float[Array, "D"],
    gate_up: Shaped[Array, "twoF D"] | ColumnBlocks,
    down: Shaped[Array, "D F"] | ColumnBlocks,
    next_norm: Float[Array, "D"] | None = None,
    following: Shaped[Array, "G D"] | ColumnBlocks | None = None,
    *,
    ahead: Shaped[Array, "D A"] | ColumnBlocks | None = None,
    exchange: Any,
    scales: Sequence[Array | None] | None = None,
    axis: str | None = None,
    ranks: RankExchange | None = None,
    eps: float = 1e-6,
    zero_centered: bool = False,
    implementation: str | Sequence[str] | None = None,
) -> tuple[Float[Array, "D n"], Float[Array, "M G"] | None]:
    """Fused decoder layer after its attention, for a few tokens: output projection, SwiGLU feed-forward, next QKV projection.

    `stream += o x`, then `stream += down (silu(gate) * up)` of the normed stream, then `following` times the normed stream.
    Norms are RMS norms. One persistent kernel, which holds every multiprocessor while it runs.

    Args:
      x: outputs of the attention heads, bfloat16, float16 or float32.
      stream: the residual stream, from `chain_stream` or the call before.
      o, gate_up, down, following: weights `[rows, columns]`, each an array or `ColumnBlocks`; gate rows lie before up rows.
      post_norm, next_norm: weights of the norms before `gate_up` and before `following`.
      ahead: `o` of the next call, prefetched to the L2 while other operations run.
      exchange: the mailbox, a Ref of `chain_exchange`, passed to one call after the other.
      scales: of the rows of o, gate_up, down and following, where these are int8 or float8 with interleaved columns
        (`quantized_linear`).
      axis: where several devices share the layer, the axis of the `shard_map` that this is called in: products of o and down are
        added up over it, in order of devices.
      ranks: memory for that, of `chain_ranks`, without which there is no kernel for it.
      eps: added to the mean square.
      zero_centered: weights of norms are offsets from 1, which are added to it in float32.
      implementation: a name, names to try in order, or None for the best that takes the call.

    Returns:
      The stream after the layer, and the projection in x's dtype, None without `following`.

    Raises:
      ValueError: shapes do not agree.
      NoImplementationError: nothing named takes these arguments.
    """
    layer = Layer(stream, o, post_norm, gate_up, down, next_norm, following, scales)
    check_axes(x=(x, "M A"))
    check_floats(x=x)
    layer.check(*x.shape)
    with jax.named_scope("layer_chain"):
        return first_fitting(
            "layer_chain", PRODUCTS, implementation, x, layer, ahead, exchange, ranks, eps=eps,
            zero_centered=zero_centered, axis=axis,
        )  # fmt: skip


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
        refuse_layer(
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
    """First values of the cross-CTA mailboxes of `attention_chain`: four, to make Refs of, for all layers of a step."""
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
    q_norm: Float[Array, "H"] | None,
    k_norm: Float[Array, "H"] | None,
    exchange: Any,
    scales: Sequence[Array | None] | None = None,
    k_scale: Float[Array, "K"] | None = None,
    v_scale: Float[Array, "K"] | None = None,
    causal: bool = True,
    scale: float | None = None,
    axis: str | None = None,
    ranks: RankExchange | None = None,
    eps: float = 1e-6,
    implementation: str | Sequence[str] | None = None,
) -> Chained:
    """Fused decoder layer for a few tokens, from its QKV projection to the next layer's: `qkv_write`, `paged_attention` and
    `layer_chain` in one persistent kernel.

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
      q_norm, k_norm: weights of the norms of queries and keys, or None both.
      exchange: the mailboxes, Refs of `attention_chain_exchange`, passed to one call after the other.
      scales: as for `layer_chain`.
      k_scale, v_scale: float32, what float8 pools' keys and values are to be multiplied with; None for other pools.
      causal: a token sees no key after its own position.
      scale: softmax scale, `H ** -0.5` where None.
      axis, ranks: as for `layer_chain`; heads and pools are this device's.
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
            "attention_chain", LAYERS, implementation, heads, layer, exchange, ranks, causal=causal,
            scale=head_dim**-0.5 if scale is None else scale, eps=eps, axis=axis,
        )  # fmt: skip
    return Chained(*out)
