"""Fused mixture of experts: routed experts in one launch, added to the residual stream by the launch that norms it.

Called one after the other, they would be twice as many launches.
"""

from collections.abc import Sequence
from typing import Any

from dflash_kernels import add_norm, add_norm_scores, dense_parts, dense_refusal, routed_experts_exchange
from jaxtyping import Array, Float

from dflash_jax.execution.fused_dense import multiplied
from dflash_jax.models.layers import Linear, RMSNorm, Rotary
from dflash_jax.quantization.weights import Quantised


def run_fused_moe(
    layers: Sequence[Any],
    norm: RMSNorm,
    x: Float[Array, "B T D"],
    normed: Float[Array, "B T D"],
    rotary: Rotary,
    attend: Any,
) -> tuple[list[Float[Array, "B T D"]], Float[Array, "B T D"]]:
    """The residual stream after each layer, and the last one after `norm`; arguments as of a `Runner`."""
    rows = x.shape[0] * x.shape[1]
    exchange = routed_experts_exchange()
    stream, normed, streams = x.reshape(rows, -1), normed.reshape(rows, -1), []
    for layer, later in zip(layers, (*layers[1:], None), strict=True):
        projected = multiplied(layer.attn.qkv_proj, normed)
        heads = attend(layer.attn, projected.reshape(*x.shape[:-1], -1), rotary).reshape(rows, -1)
        heads = _projected(layer.attn.o_proj, heads)
        stream, parts = _fed(layer, heads, stream, exchange)
        following = norm if later is None else later.input_norm
        stream, normed = add_norm(parts, stream, following.weight[...], eps=following.eps)
        streams.append(stream.reshape(x.shape))
    return streams, normed.reshape(x.shape)


def _projected(layer: Linear, x: Float[Array, "M F"]) -> Float[Array, "S M D"]:
    """A product in parts where rows are many, else in one."""
    weight = layer.weight[...]
    if (
        isinstance(weight, Quantised)
        or layer.bias is not None
        or dense_refusal(x.shape[0], x.dtype, x.shape[1]) is not None
    ):
        return layer(x)[None]
    return dense_parts(x, weight)


def _fed(
    layer: Any, parts: Float[Array, "S M D"], stream: Float[Array, "M D"], exchange: Any
) -> tuple[Float[Array, "M D"], Float[Array, "n M D"]]:
    """The stream with what attention gave, and what the feed-forward adds to it, in parts."""
    feed, norm, eps = layer.mlp, layer.post_norm.weight[...], layer.post_norm.eps
    if not feed.routed:
        stream, normed = add_norm(parts, stream, norm, eps=eps)
        return stream, feed(normed)[None]
    stream, normed, scores = add_norm_scores(parts, stream, norm, feed.router.weight[...], eps=eps)
    return stream, feed.experts.parts(normed, feed.router, scores, exchange)
