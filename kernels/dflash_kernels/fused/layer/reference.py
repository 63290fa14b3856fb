"""References of `layer_chain` and `attention_chain` in jnp: each result rounded to the activations' dtype as separate operations
round it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dflash_kernels.core.layouts import deinterleave_columns
from dflash_kernels.fused.arguments import Heads
from dflash_kernels.fused.layer.arguments import Layer
from dflash_kernels.fused.qkv_attention.reference import qkv_attention_reference
from dflash_kernels.matmul.dense.reference import dense_reference


def layer_chain_reference(
    x: Float[Array, "M A"],
    layer: Layer,
    ahead: Any,
    exchange: Any,
    ranks: Any = None,
    *,
    eps: float,
    zero_centered: bool = False,
    axis: str | None = None,
) -> tuple[Float[Array, "D n"], Float[Array, "M G"] | None]:
    """See `layer_chain`."""
    del ahead, exchange, ranks
    stream, o, post_norm, gate_up, down, next_norm, following, scales = layer
    if scales is not None:
        o, gate_up, down = (_dequantized(w, s, x.dtype) for w, s in zip((o, gate_up, down), scales[:3], strict=True))
        following = None if following is None else _dequantized(following, scales[3], x.dtype)
    rows, wide = x.shape[0], stream[:, : x.shape[0]].T
    wide = wide + _over(dense_reference(x, o), axis)
    gate, up = jnp.split(dense_reference(_norm(wide, post_norm, eps, zero_centered), gate_up), 2, axis=-1)
    wide = wide + _over(dense_reference(jax.nn.silu(gate) * up, down), axis)
    projected = None
    if next_norm is not None and following is not None:
        projected = dense_reference(_norm(wide, next_norm, eps, zero_centered), following)
    return jnp.pad(wide.T, ((0, 0), (0, stream.shape[1] - rows))), projected


def attention_chain_reference(
    heads: Heads,
    layer: Layer,
    exchange: Any,
    ranks: Any = None,
    *,
    causal: bool,
    scale: float,
    eps: float,
    axis: str | None = None,
) -> tuple[Float[Array, "D n"], Float[Array, "M G"] | None, Array, Array]:
    """See `attention_chain`."""
    del exchange, ranks
    out, k_pages, v_pages = qkv_attention_reference(heads, causal=causal, scale=scale, eps=eps)
    x = out.reshape(heads.qkv.shape[0], -1)
    return *layer_chain_reference(x, layer, None, None, eps=eps, axis=axis), k_pages, v_pages


def _over(product: Array, axis: str | None) -> Array:
    """The sum of all devices' products, added in order of devices."""
    if axis is None:
        return product
    first, *others = jax.lax.all_gather(product, axis).astype(jnp.float32)
    return functools.reduce(jnp.add, others, first)


def _dequantized(weight: Any, scales: Array | None, dtype: Any) -> Array:
    """8-bit rows with interleaved columns, times their scales."""
    wide = deinterleave_columns(weight).astype(jnp.float32)
    return (wide if scales is None else wide * scales[:, None]).astype(dtype)


def _norm(wide: Array, weight: Array, eps: float, zero_centered: bool) -> Array:
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    if zero_centered:
        return (normed * (1.0 + weight.astype(jnp.float32))).astype(weight.dtype)
    return weight * normed.astype(weight.dtype)
