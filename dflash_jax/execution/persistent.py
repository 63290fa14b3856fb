"""Layers one after the other; while decoding, everything between two layers' attention as one operation where there is one."""

from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from dflash_kernels import (
    attention_chain_exchange,
    attention_chain_refusal,
    chain_exchange,
    chain_stream,
    embed_norm,
    layer_chain,
    layer_chain_refusal,
    stream_norm,
)
from flax import nnx
from jaxtyping import Array, Float, Int

from dflash_jax.execution.fused_dense import fits, run_rows
from dflash_jax.execution.fused_float8 import fits as rounded_fits
from dflash_jax.execution.fused_float8 import run_rounded
from dflash_jax.execution.fused_moe import fits as routed_fits
from dflash_jax.execution.fused_moe import run_routed
from dflash_jax.models.layers import MLP, DecoderLayer, RMSNorm, Rotary
from dflash_jax.quantization.weights import Quantised, Weight

CHAIN_LAYERS = True  # False for separate operations: for comparisons
# Attention over pages in one operation with what stands before or after it, where there is one; False for comparisons.
CHAIN_ATTENTION = True
# Products with what follows them as one launch, for a few hundred rows (`dflash_jax.execution.fused_dense`).
DENSE_ROWS = True


def embedded(
    layers: Sequence[nnx.Module], table: Float[Array, "V D"] | Quantised, ids: Int[Array, "B T"], attend: Any
) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"] | None]:
    """Rows of a table as input of `run_layers`, and after the first layer's norm where they are few and `attend` decodes."""
    first: Any = layers[0]
    shape = jax.eval_shape(lambda: table[ids])
    few = getattr(attend, "decodes", False) and (
        _chains(layers, shape, None)
        or _in_rows(layers, shape)
        or rounded_fits(layers, shape)
        or routed_fits(layers, shape)
    )
    if isinstance(table, Quantised) or not few:
        return table[ids], None
    x, normed = embed_norm(table, ids.reshape(-1), first.input_norm.weight[...], eps=first.input_norm.eps)
    return x.reshape(*ids.shape, -1), normed.reshape(*ids.shape, -1)


def run_layers(
    layers: Sequence[nnx.Module],
    norm: RMSNorm,
    x: Float[Array, "B T D"],
    rotary: Rotary,
    attend: Any,
    *,
    normed: Float[Array, "B T D"] | None = None,
    implementation: str | None = None,
) -> tuple[list[Float[Array, "B T D"]], Float[Array, "B T D"]]:
    """The residual stream after each layer, and the last one after `norm`.

    Where `CHAIN_LAYERS` is on, `attend` decodes (`attend.decodes`: nobody takes gradients), rows are few and `layer_chain` knows
    the layers, the stream stays in float32 between layers; where `CHAIN_ATTENTION` is on and `attention_chain` knows the call, a
    layer is one operation. Where `DENSE_ROWS` is on, `attend` decodes and there are some hundred rows, products take what follows
    them along (`models.rows`); in float8 where weights round rows (`models.rounded_rows`). Otherwise each layer is called.

    Args:
      layers, norm: of one model.
      x: input of the first layer.
      rotary: the rotation that all layers share.
      attend: attention of the caller's. `attend.exchange`, if there, is what `layers_exchange` gave for these arguments.
      normed: x after the first layer's norm, where the caller has it.
      implementation: of `layer_chain`, then used wherever the layers allow it.
    """
    decodes, first = getattr(attend, "decodes", False), cast(Any, layers[0])
    if decodes and _chains(layers, x, implementation):
        entered: Array = first.input_norm(x) if normed is None else normed
        return _chained(layers, norm, x, entered, rotary, attend, implementation)
    if decodes and _in_rows(layers, x):
        return run_rows(layers, norm, x, first.input_norm(x) if normed is None else normed, rotary, attend)
    if decodes and rounded_fits(layers, x):
        return run_rounded(layers, norm, x, first.input_norm(x) if normed is None else normed, rotary, attend)
    if decodes and routed_fits(layers, x):
        return run_routed(layers, norm, x, first.input_norm(x) if normed is None else normed, rotary, attend)
    streams = []
    for layer in layers:
        x = layer(x, rotary, attend)
        streams.append(x)
    return streams, norm(x)


def _in_rows(layers: Sequence[nnx.Module], x: Any) -> bool:
    return DENSE_ROWS and fits(layers, x)


def _chains(layers: Sequence[nnx.Module], x: Any, implementation: str | None) -> bool:
    if implementation is None and not CHAIN_LAYERS:
        return False
    if not all(type(layer) is DecoderLayer and type(layer.mlp) is MLP for layer in layers):
        return False
    first: Any = layers[0]
    qkv, o, down = (part.weight[...] for part in (first.attn.qkv_proj, first.attn.o_proj, first.mlp.down_proj))
    if first.attn.config.attention_bias or not _alike(qkv, o, first.mlp.gate_up_proj.weight[...], down):
        return False
    if implementation is not None:
        return True
    sizes = {"hidden": o.shape[0], "heads_width": o.shape[1], "inner": down.shape[1], "next_width": qkv.shape[0]}
    sizes["itemsize"] = _itemsize(o)
    return layer_chain_refusal(x.shape[0] * x.shape[1], x.dtype, **sizes) is None


def layers_exchange(layers: Sequence[nnx.Module], x: Any, rotary: Rotary, attend: Any) -> Any:
    """What `run_layers` of the same arguments takes as `attend.exchange`: Refs, or None where its operations need none.

    Made before a loop, they are filled once and not in every round: operations leave them ready for the next one.

    Args:
      x, rotary: arrays or their shapes.
    """
    if not (getattr(attend, "decodes", False) and _chains(layers, x, None)):
        return None
    return _exchange(layers, x, whole=CHAIN_ATTENTION and _attends(layers, x, rotary, attend))


def _exchange(layers: Sequence[Any], x: Any, *, whole: bool) -> Any:
    """For operations of a whole layer, or of what is between two layers' attention."""
    (down, _), config = _stored(layers[0].mlp.down_proj.weight[...]), layers[0].attn.config
    stream = chain_stream(jnp.zeros((x.shape[0] * x.shape[1], x.shape[2]), x.dtype))  # only its shape counts
    if not whole:
        return jax.new_ref(chain_exchange(stream, down))
    heads = {"heads": config.num_heads, "kv_heads": config.num_kv_heads}
    return tuple(map(jax.new_ref, attention_chain_exchange(stream, down, *x.shape[:2], **heads)))


def _chained(
    layers: Sequence[Any],
    norm: RMSNorm,
    x: Array,
    normed: Array,
    rotary: Rotary,
    attend: Any,
    implementation: str | None,
) -> tuple[list[Array], Array]:
    """A layer's projection of queries, keys and values is made by the operation that ends the layer before."""
    rows = x.shape[0] * x.shape[1]
    stream = chain_stream(x.reshape(rows, -1))
    projected: Any = layers[0].attn.qkv_proj(normed)
    whole = implementation is None and CHAIN_ATTENTION and _attends(layers, x, rotary, attend)
    exchange = getattr(attend, "exchange", None)
    exchange = _exchange(layers, x, whole=whole) if exchange is None else exchange
    streams = []
    for layer, later in zip(layers, (*layers[1:], None), strict=True):
        if whole:
            stream, projected = attend.chain(layer.attn, projected, rotary, stream, *_weights(layer, later), exchange)
            streams.append(stream)
            continue
        heads = attend(layer.attn, projected.reshape(*x.shape[:-1], -1), rotary).reshape(rows, -1)
        weights, scales = _weights(layer, later)
        ahead = None if later is None else _stored(later.attn.o_proj.weight[...])[0]
        stream, projected = layer_chain(
            heads, stream, *weights, ahead=ahead, exchange=exchange, scales=scales, eps=layer.post_norm.eps,
            implementation=implementation,
        )  # fmt: skip
        streams.append(stream)
    hidden = stream_norm(stream, rows, norm.weight[...], eps=norm.eps)
    return [_rows(stream, rows).astype(x.dtype).reshape(x.shape) for stream in streams], hidden.reshape(x.shape)


def _attends(layers: Sequence[Any], x: Any, rotary: Rotary, attend: Any) -> bool:
    """Whether attention goes into the same operation."""
    pools, attn, mlp = getattr(attend, "chained_pools", None), layers[0].attn, layers[0].mlp
    if pools is None or any(layer.attn.window is not None or layer.attn.sinks is not None for layer in layers):
        return False
    pool, width = pools
    _, kv_heads, page_size, head_dim = pool.shape
    if 2 * rotary.cos.shape[-1] != head_dim:
        return False
    qkv, o, down = (part.weight[...] for part in (attn.qkv_proj, attn.o_proj, mlp.down_proj))
    reason = attention_chain_refusal(
        x.shape[0], x.shape[1], x.dtype, group=attn.config.num_heads // kv_heads, kv_heads=kv_heads, head_dim=head_dim,
        page_size=page_size, table_width=width, hidden=o.shape[0], heads_width=o.shape[1], inner=down.shape[1],
        next_width=qkv.shape[0], itemsize=_itemsize(o), page_dtype=pool.dtype,
    )  # fmt: skip
    return reason is None


def _alike(*weights: Weight) -> bool:
    """Whether all are two bytes, or all eight bits in columns that the kernels read."""
    kinds = {weight.values.dtype if isinstance(weight, Quantised) else None for weight in weights}
    return len(kinds) == 1 and all(weight.paired for weight in weights if isinstance(weight, Quantised))


def _itemsize(weight: Weight) -> int:
    return (weight.values if isinstance(weight, Quantised) else weight).dtype.itemsize


def _stored(weight: Weight | None) -> tuple[Any, Array | None]:
    """A matrix as operations take it, and the scales of its rows where it has such."""
    return (weight.values, weight.scales) if isinstance(weight, Quantised) else (weight, None)


def _weights(layer: Any, later: Any) -> tuple[tuple[Any, ...], tuple[Array | None, ...] | None]:
    """What a layer's operation takes from `o` on, the next layer's projection included, and the scales of its matrices."""
    names = (layer.attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj)
    matrices = [part.weight[...] for part in names] + [None if later is None else later.attn.qkv_proj.weight[...]]
    (o, gate_up, down, following), scales = zip(*map(_stored, matrices), strict=True)
    norms = layer.post_norm.weight[...], None if later is None else later.input_norm.weight[...]
    return (o, norms[0], gate_up, down, norms[1], following), None if scales[0] is None else scales


def _rows(stream: Array, rows: int) -> Array:
    """`[rows, D]`. One row is no transpose: XLA would lay the hidden state out by columns, and a copy of the head with it."""
    return stream[:, 0][None] if rows == 1 else stream[:, :rows].T
