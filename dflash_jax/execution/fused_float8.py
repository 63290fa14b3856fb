"""Fused W8A8 GEMMs: float8 weights times rows rounded to float8, each product with its epilogue as one launch.

Rows are rounded by the operation that norms them, and by one of its own after attention and after the gate.
"""

from collections.abc import Sequence
from typing import Any

from dflash_kernels import float8_dense, float8_gated, float8_onto
from jaxtyping import Array, Float

from dflash_jax.models.layers import Cache, Norm, Rotary
from dflash_jax.quantization.weights import rounded


def run_fused_float8(
    layers: Sequence[Any],
    norm: Norm,
    x: Float[Array, "B T D"],
    normed: Float[Array, "B T D"],
    rotary: Rotary,
    attend: Any,
    cache: Cache,
) -> tuple[list[Float[Array, "B T D"]], Float[Array, "B T D"], Cache]:
    """The residual stream after each layer, the last one after `norm`, and the cache; arguments as of a `Runner`."""
    streams: list[Array] = []
    stream = x.reshape(-1, x.shape[-1])
    rows = rounded(normed.reshape(stream.shape), layers[0].mixer.projections[0].weight[...])
    for layer, later in zip(layers, (*layers[1:], None), strict=True):
        first, last, gate_up, down = (projection.weight[...] for projection in _projections(layer))
        projected = float8_dense(rows, first.values, first.scales, x.dtype)
        projected = layer.mixer.projections[0].of_product(projected)
        mixed, cache = layer.mixer.mix(projected.reshape(*x.shape[:-1], -1), rotary, attend, cache)
        stream, rows = _onto(rounded(mixed.reshape(stream.shape[0], -1), last), last, stream, layer.post_norm)
        inner = rounded(float8_gated(rows, gate_up.values, gate_up.scales, x.dtype), down)
        if later is None:
            stream = stream + float8_dense(inner, down.values, down.scales, x.dtype)
        else:
            stream, rows = _onto(inner, down, stream, later.input_norm)
        streams.append(stream.reshape(x.shape))
    return streams, norm(streams[-1]), cache


def _projections(layer: Any) -> tuple[Any, ...]:
    return *layer.mixer.projections, layer.mlp.gate_up_proj, layer.mlp.down_proj


def _onto(rows: Any, weight: Any, stream: Array, norm: Norm) -> tuple[Array, Any]:
    """The stream with a product added, and its norm's rows."""
    return float8_onto(
        rows, weight.values, weight.scales, stream, norm.weight[...], eps=norm.eps, paired=weight.paired,
        zero_centered=norm.zero_centered,
    )  # fmt: skip
