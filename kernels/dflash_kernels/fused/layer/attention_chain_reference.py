"""The definition in jnp: the operations one after the other."""

from typing import Any

from jaxtyping import Array, Float

from dflash_kernels.fused.arguments import Heads
from dflash_kernels.fused.layer.arguments import Layer
from dflash_kernels.fused.layer.reference import layer_chain_reference
from dflash_kernels.fused.qkv_attention.reference import qkv_attention_reference


def attention_chain_reference(
    heads: Heads, layer: Layer, exchange: Any, *, causal: bool, scale: float, eps: float
) -> tuple[Float[Array, "D n"], Float[Array, "M G"] | None, Array, Array]:
    """See `attention_chain`."""
    del exchange
    out, k_pages, v_pages = qkv_attention_reference(heads, causal=causal, scale=scale, eps=eps)
    x = out.reshape(heads.qkv.shape[0], -1)
    return *layer_chain_reference(x, layer, None, None, eps=eps), k_pages, v_pages
