"""Fused GEMMs for a few hundred rows: each product with its epilogue, SwiGLU or the residual add and the norm, as one launch."""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import jax.numpy as jnp
from dflash_kernels import (
    ColumnBlocks,
    RankExchange,
    add_norm,
    dense,
    dense_gated,
    dense_onto,
    dense_parts,
    dense_refusal,
    reduce_add_norm,
)
from jaxtyping import Array, Float, Int

from dflash_jax.execution.plan import MOST_DENSE_ROWS
from dflash_jax.models.layers import Cache, Linear, Norm, Rotary
from dflash_jax.parallel.collectives import ranks_here, reduced
from dflash_jax.parallel.ranks import AXIS
from dflash_jax.quantization.weights import Quantized, product, rounds


def multiplied(layer: Linear, x: Float[Array, "... D"], live: Int[Array, ""] | None = None) -> Float[Array, "... F"]:
    """`layer(x)` without gradients: for some hundred rows by a kernel, in parts where rows of the weight are long and few.

    `live`: so many rows from the first on are asked for: the others may be anything.
    """
    weight, rows = layer.weight[...], math.prod(x.shape[:-1])
    if layer.bias is None and isinstance(weight, Quantized) and rounds(weight, rows):
        return product(x, weight, live)
    if (rows > MOST_DENSE_ROWS and live is None) or not _takes(layer, rows, x.dtype):
        return layer(x)
    flat = x.reshape(rows, -1)
    if weight.shape[1] > weight.shape[0]:
        products = jnp.sum(dense_parts(flat, weight, live=live), axis=0).astype(x.dtype)
    else:
        products = dense(flat, weight, live=live)
    return products.reshape(*x.shape[:-1], -1)


def _takes(layer: Linear, rows: int, dtype: Any) -> bool:
    """Whether there is a kernel."""
    weight = layer.weight[...]
    if isinstance(weight, Quantized | ColumnBlocks) or layer.bias is not None:
        return False
    return dense_refusal(rows, dtype, weight.shape[1]) is None


class Named(TypedDict):
    """Arguments of all operations here."""

    implementation: str | None


def run_fused_dense(
    layers: Sequence[Any],
    norm: Norm,
    x: Float[Array, "B T D"],
    normed: Float[Array, "B T D"],
    rotary: Rotary,
    attend: Any,
    cache: Cache,
    implementation: str | None = None,
    ranks: RankExchange | None = None,
) -> tuple[list[Float[Array, "B T D"]], Float[Array, "B T D"], Cache]:
    """The residual stream after each layer, the last one after `norm`, and the cache; arguments as of a `Runner`.

    Where sublayers are convolved along the block, what comes out of one is added to the stream after its product, not with it.

    Args:
      normed: x after the first layer's norm.
      implementation: of the products.
      ranks: where ranks that share the layers exchange; without it they do by collectives of JAX's.
    """
    rows, named = x.shape[0] * x.shape[1], Named(implementation=implementation)
    stream, normed, streams = x.reshape(rows, -1), normed.reshape(rows, -1), []
    for layer, later in zip(layers, (*layers[1:], None), strict=True):
        mixer, mlp = layer.mixer, layer.mlp
        first, last = mixer.projections
        given, own = _convolved(layer.attention_conv, normed, x.shape)
        projected = first.of_product(dense(given, first.weight[...], **named))
        mixed, cache = mixer.mix(projected.reshape(*x.shape[:-1], -1), rotary, attend, cache)
        stream, normed = _onto(mixed.reshape(rows, -1), last, stream, layer.post_norm, named, own, ranks)
        given, own = _convolved(layer.mlp_conv, normed, x.shape)
        inner = dense_gated(given, mlp.gate_up_proj.weight[...], **named)
        after = norm if later is None else later.input_norm
        stream, normed = _onto(inner, mlp.down_proj, stream, after, named, own, ranks)
        streams.append(stream.reshape(x.shape))
    return streams, normed.reshape(x.shape), cache


def summed_norm(
    parts: Float[Array, "S M D"], stream: Float[Array, "M D"], norm: Norm, ranks: RankExchange
) -> tuple[Float[Array, "M D"], Float[Array, "M D"]]:
    """The stream with the parts of all ranks added, exchanged in `ranks`, and its norm."""
    return reduce_add_norm(
        parts, stream, norm.weight[...], eps=norm.eps, axis=AXIS, exchange=ranks, zero_centered=norm.zero_centered
    )


type _After = Callable[[Float[Array, "M D"]], Float[Array, "M D"]]


def _convolved(
    conv: Any, normed: Float[Array, "M D"], shape: tuple[int, ...]
) -> tuple[Float[Array, "M D"], _After | None]:
    """Input of a sublayer, and the function applied to its output; None for none.

    Args:
      shape: of the rows as blocks, which no convolution leaves.
    """
    if conv is None:
        return normed, None
    blocks = normed.reshape(shape)
    own = conv.own(blocks)
    return conv(blocks, own, 0).reshape(normed.shape), lambda out: conv(out.reshape(shape), own, 1).reshape(out.shape)


def _onto(
    x: Float[Array, "M F"],
    projection: Any,
    stream: Float[Array, "M D"],
    norm: Norm,
    named: Named,
    after: _After | None,
    ranks: RankExchange | None,
) -> tuple[Float[Array, "M D"], Float[Array, "M D"]]:
    """The stream with a product added, and its norm; the product of all ranks' shares, and what comes `after` it."""
    if ranks is not None and after is None:
        parts = dense_parts(x, projection.weight[...], **named)
        return summed_norm(parts, stream, norm, ranks)
    if ranks_here() > 1 or after is not None:
        product = reduced(jnp.sum(dense_parts(x, projection.weight[...], **named), axis=0).astype(x.dtype))
        product = product if after is None else after(product)
        return add_norm(
            product[None], stream, norm.weight[...], eps=norm.eps, zero_centered=norm.zero_centered, **named
        )
    return dense_onto(
        x, projection.weight[...], stream, norm.weight[...], eps=norm.eps, zero_centered=norm.zero_centered, **named
    )  # fmt: skip
