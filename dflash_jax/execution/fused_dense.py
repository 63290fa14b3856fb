"""Layers for a few hundred rows: products with what follows them, the residual stream with its norm, each as one operation."""

import math
from collections.abc import Sequence
from typing import Any, TypedDict

import jax.numpy as jnp
from dflash_kernels import ColumnBlocks, dense, dense_gated, dense_onto, dense_parts, dense_refusal, float8_refusal
from flax import nnx
from jaxtyping import Array, Float, Int

from dflash_jax.models.layers import MLP, DecoderLayer, Linear, RMSNorm, Rotary
from dflash_jax.quantization.weights import Quantised, product, rounds

MOST = 256  # with more, XLA's products with nothing after them are faster
SOME_ROWS = 128  # multiplied at once where some rows are left out
# Fewer rows than a tile has: in layers of this width XLA's products take less. A step of 32 sequences of Qwen3-4B takes 3.99 ms by
# the kernels and 4.17 without, of Qwen3-8B 6.05 and 5.98 (medians of six and of nine calls, by turns on one H200).
TILE_ROWS, WIDE = 64, 4096


def multiplied(layer: Linear, x: Float[Array, "... D"], live: Int[Array, ""] | None = None) -> Float[Array, "... F"]:
    """`layer(x)` without gradients: for some hundred rows by a kernel, in parts where rows of the weight are long and few.

    `live`: so many rows from the first on are asked for: the others may be anything.
    """
    weight, rows = layer.weight[...], math.prod(x.shape[:-1])
    if layer.bias is None and isinstance(weight, Quantised) and rounds(weight, rows):
        return product(x, weight, live)
    if (rows > MOST and live is None) or not _takes(layer, rows, x.dtype):
        return layer(x)
    flat = x.reshape(rows, -1)
    if weight.shape[1] > weight.shape[0]:
        products = jnp.sum(dense_parts(flat, weight, live=live), axis=0).astype(x.dtype)
    else:
        products = dense(flat, weight, live=live)
    return products.reshape(*x.shape[:-1], -1)


def leaves_out(layer: Linear, rows: int, dtype: Any) -> bool:
    """Whether `multiplied` of more rows than `MOST` is faster where some are asked for alone."""
    if rows <= MOST or rows % SOME_ROWS:
        return False
    weight = layer.weight[...]
    if layer.bias is None and rounds(weight, rows):
        return float8_refusal(rows, dtype, weight.shape[1]) is None
    return _takes(layer, rows, dtype)


def _takes(layer: Linear, rows: int, dtype: Any) -> bool:
    """Whether there is a kernel."""
    weight = layer.weight[...]
    if isinstance(weight, Quantised | ColumnBlocks) or layer.bias is not None:
        return False
    return dense_refusal(rows, dtype, weight.shape[1]) is None


class Named(TypedDict):
    """What all operations here are called with."""

    implementation: str | None


def fits(layers: Sequence[nnx.Module], x: Any, implementation: str | None = None) -> bool:
    """Whether `run_rows` can stand for calling the layers one by one, and is faster or asked for by name."""
    if not all(type(layer) is DecoderLayer and type(layer.mlp) is MLP for layer in layers):
        return False
    first: Any = layers[0]
    weights = [
        part.weight[...]
        for part in (first.attn.qkv_proj, first.attn.o_proj, first.mlp.gate_up_proj, first.mlp.down_proj)
    ]
    if first.attn.config.attention_bias or any(isinstance(weight, Quantised) for weight in weights):
        return False
    if implementation is not None or isinstance(weights[-1], ColumnBlocks):
        return True
    rows = x.shape[0] * x.shape[1]
    if rows < TILE_ROWS and x.shape[-1] >= WIDE:
        return False
    return all(dense_refusal(rows, x.dtype, weight.shape[1]) is None for weight in weights)


def run_rows(
    layers: Sequence[Any],
    norm: RMSNorm,
    x: Float[Array, "B T D"],
    normed: Float[Array, "B T D"],
    rotary: Rotary,
    attend: Any,
    implementation: str | None = None,
) -> tuple[list[Float[Array, "B T D"]], Float[Array, "B T D"]]:
    """The residual stream after each layer, and the last one after `norm`; arguments as of `run_layers`."""
    rows, named = x.shape[0] * x.shape[1], Named(implementation=implementation)
    stream, normed, streams = x.reshape(rows, -1), normed.reshape(rows, -1), []
    for layer, later in zip(layers, (*layers[1:], None), strict=True):
        attn, mlp = layer.attn, layer.mlp
        qkv = dense(normed, attn.qkv_proj.weight[...], **named)
        heads = attend(attn, qkv.reshape(*x.shape[:-1], -1), rotary).reshape(rows, -1)
        stream, normed = _onto(heads, attn.o_proj, stream, layer.post_norm, named)
        inner = dense_gated(normed, mlp.gate_up_proj.weight[...], **named)
        stream, normed = _onto(inner, mlp.down_proj, stream, norm if later is None else later.input_norm, named)
        streams.append(stream.reshape(x.shape))
    return streams, normed.reshape(x.shape)


def _onto(
    x: Float[Array, "M F"], projection: Any, stream: Float[Array, "M D"], norm: RMSNorm, named: Named
) -> tuple[Float[Array, "M D"], Float[Array, "M D"]]:
    """The stream with a product added, and its norm."""
    return dense_onto(x, projection.weight[...], stream, norm.weight[...], eps=norm.eps, **named)
