"""Fused mixture of experts: routed experts in one launch, added to the residual stream by the launch that norms it.

Called one after the other, they would be twice as many launches.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from dflash_kernels import (
    AddNorm,
    ColumnBlocks,
    RankExchange,
    add_norm,
    add_norm_dense,
    add_norm_dense_refusal,
    add_norm_scores,
    dense_parts,
    dense_refusal,
    dense_scores,
    few_linear,
    few_linear_refusal,
    routed_experts_exchange,
    token_attention_exchange,
)
from jaxtyping import Array, Float

from dflash_jax.execution import switches
from dflash_jax.execution.fused_dense import multiplied, summed_norm
from dflash_jax.models.layers import Cache, Linear, Mixer, Norm, Rotary, linear
from dflash_jax.parallel.collectives import ranks_here, reduced
from dflash_jax.quantization.weights import Quantized


def run_fused_moe(
    layers: Sequence[Any],
    norm: Norm,
    x: Float[Array, "B T D"],
    normed: Float[Array, "B T D"],
    rotary: Rotary,
    attend: Any,
    cache: Cache,
    ranks: RankExchange | None = None,
) -> tuple[list[Float[Array, "B T D"]], Float[Array, "B T D"], Cache]:
    """The residual stream after each layer, the last one after `norm`, and the cache; arguments as of a `Runner`.

    `ranks`: where ranks that share the layers exchange; without it they do by collectives of JAX's.
    """
    rows = x.shape[0] * x.shape[1]
    exchange = routed_experts_exchange(max(layer.mlp.experts.count if layer.mlp.routed else 0 for layer in layers))
    stream, normed, streams = x.reshape(rows, -1), normed.reshape(rows, -1), []
    meeting = functools.cache(token_attention_exchange)
    projected: Array | None = None
    mixed: Any = None  # by the launch that normed, too
    given: Array | None = None  # parts of what attention adds to the stream, by the launch that normed, too
    if ranks is None:
        nothing = jnp.zeros((1, *stream.shape), jnp.float32)
        first = _attended(layers[0], nothing, stream, x.shape, rotary, attend, cache, meeting)
        if first is not None:
            stream, given, cache = first
    for layer, later in zip(layers, (*layers[1:], None), strict=True):
        if given is None:
            if projected is not None:
                mixed, cache = layer.mixer.mix(projected.reshape(*x.shape[:-1], -1), rotary, attend, cache)
            elif mixed is None:
                mixed, cache = _mixed(layer.mixer, normed.reshape(x.shape), rotary, attend, cache)
            given = _projected(layer.mixer.projections[1], mixed.reshape(rows, -1), meets=ranks is None)
        stream, parts = _fed(layer, given, stream, exchange, ranks)
        after = norm if later is None else later.input_norm
        projected = mixed = given = added = attended = None
        if ranks is None:
            attended = _attended(later, parts, stream, x.shape, rotary, attend, cache, meeting)
        if ranks is None and attended is None:
            added = _added_and_mixed(later, parts, stream, x.shape, rotary, attend, cache)
        if ranks is not None:
            stream, normed = summed_norm(parts, stream, after, ranks)
        elif attended is not None:
            stream, given, cache = attended
        elif added is not None:
            stream, mixed, cache = added
        elif later is not None and _together(later.mixer.projections[0], rows, x.dtype):
            matrix = later.mixer.projections[0].weight[...]
            stream, projected = add_norm_dense(parts, stream, matrix=matrix, **_weight(after))
        else:
            stream, normed = add_norm(parts, stream, **_weight(after))
        streams.append(stream.reshape(x.shape))
    return streams, normed.reshape(x.shape), cache


def _together(projection: Linear, rows: int, dtype: Any) -> bool:
    """Whether a norm and the projection after it are one launch."""
    weight = projection.weight[...]
    plain = projection.bias is None and isinstance(weight, jax.Array) and weight.dtype == dtype
    if not switches.NORM_PRODUCT or not plain:
        return False
    return add_norm_dense_refusal(rows, dtype, features=weight.shape[0], depth=weight.shape[1]) is None


def _mixed(
    mixer: Mixer, x: Float[Array, "B T D"], rotary: Rotary, attend: Any, cache: Cache
) -> tuple[Float[Array, "B T ..."], Cache]:
    """Mixer of a layer, from the normed stream on: in one launch up to the write where attention offers that."""
    whole = getattr(mixer, "mix_rows", None)
    found = None if whole is None else whole(x, rotary, attend, cache)
    if found is not None:
        return found[1:]
    projected = _biased(mixer.projections[0], x.reshape(-1, x.shape[-1]))
    return mixer.mix(projected.reshape(*x.shape[:-1], -1), rotary, attend, cache)


def _added_and_mixed(
    layer: Any,
    parts: Float[Array, "S M D"],
    stream: Float[Array, "M D"],
    shape: tuple[int, ...],
    rotary: Rotary,
    attend: Any,
    cache: Cache,
) -> tuple[Float[Array, "M D"], Float[Array, "B T ..."], Cache] | None:
    """The stream with `parts` added, and what mixes tokens in the next layer, where both begin with one launch; else None."""
    if layer is None or not switches.NORM_HEADS or not hasattr(layer.mixer, "mix_rows"):
        return None
    whole = layer.mixer.mix_rows
    found = whole(stream.reshape(shape), rotary, attend, cache, AddNorm(parts, **_weight(layer.input_norm)))
    return None if found is None else (found[0].reshape(stream.shape), *found[1:])


def _attended(
    layer: Any,
    parts: Float[Array, "S M D"],
    stream: Float[Array, "M D"],
    shape: tuple[int, ...],
    rotary: Rotary,
    attend: Any,
    cache: Cache,
    meeting: Callable[[int], Any],
) -> tuple[Float[Array, "M D"], Float[Array, "S M D"], Cache] | None:
    """The stream with `parts` added, and parts of what the next layer's attention adds, where that is one launch; else None."""
    if layer is None or not hasattr(layer.mixer, "mix_token"):
        return None
    added = AddNorm(parts, **_weight(layer.input_norm))
    found = layer.mixer.mix_token(stream.reshape(shape), rotary, attend, cache, added, meeting)
    return None if found is None else (found[0].reshape(stream.shape), *found[1:])


def _biased(layer: Linear, x: Float[Array, "M D"], *, parts: bool = False) -> Float[Array, "... M F"]:
    """A product, in one launch where few rows have a bias; or `parts` of it."""
    if not _few(layer, x):
        return layer(x)[None] if parts else multiplied(layer, x)
    weight, bias = layer.weight[...], layer.bias
    return few_linear(x, weight, None if bias is None else bias[...], parts=parts)


def _few(layer: Linear, x: Float[Array, "M D"]) -> bool:
    weight = layer.weight[...]
    plain = layer.bias is not None and not isinstance(weight, Quantized | ColumnBlocks) and ranks_here() == 1
    return switches.FEW and plain and few_linear_refusal(x.shape[0], x.dtype, *weight.shape) is None


def _projected(layer: Linear, x: Float[Array, "M F"], *, meets: bool) -> Float[Array, "S M D"]:
    """A product in parts where rows are many, else in one; where it `meets`, of all ranks' shares."""
    weight = layer.weight[...]
    if meets and _few(layer, x):
        return _biased(layer, x, parts=True)
    if (
        isinstance(weight, Quantized)
        or layer.bias is not None
        or dense_refusal(x.shape[0], x.dtype, x.shape[1]) is not None
    ):
        return (layer(x) if meets else linear(x, weight))[None]
    parts = dense_parts(x, weight)
    return parts if ranks_here() == 1 or not meets else reduced(jnp.sum(parts, axis=0).astype(x.dtype))[None]


def _weight(norm: Norm) -> dict[str, Any]:
    """A norm, as operations take it."""
    how = {"eps": norm.eps, "zero_centered": norm.zero_centered, "rounds_last": norm.rounds_last}
    return {"weight": norm.weight[...], **how}


def _fed(
    layer: Any,
    parts: Float[Array, "S M D"],
    stream: Float[Array, "M D"],
    exchange: Any,
    ranks: RankExchange | None,
) -> tuple[Float[Array, "M D"], Float[Array, "n M D"]]:
    """The stream with what attention gave, and what the feed-forward adds to it, in parts."""
    feed, norm = layer.mlp, _weight(layer.post_norm)
    if ranks is not None:
        stream, normed = summed_norm(parts, stream, layer.post_norm, ranks)
        if not feed.routed:
            return stream, feed.of_rank(normed)[None]
        scores = dense_scores(normed, feed.router.weight[...])
    elif not feed.routed:
        stream, normed = add_norm(parts, stream, **norm)
        return stream, feed(normed)[None]
    else:
        scorer, bias = feed.router.weight[...], feed.router.score_bias
        stream, normed, scores = add_norm_scores(parts, stream, scorer=scorer, bias=bias, **norm)
    parts = feed.experts.parts(normed, feed.router, scores, exchange)
    shared = feed.beside(normed)
    if ranks is None and ranks_here() > 1:
        # One all-reduce for both.
        own = parts.sum(axis=0) if shared is None else parts.sum(axis=0) + shared.astype(parts.dtype)
        return stream, reduced(own.astype(stream.dtype))[None].astype(parts.dtype)
    if shared is None:
        return stream, parts
    # A product that XLA computes inside the concatenation takes 16 us of one row, 3 by itself (an H100, 512 to 2048).
    shared = jax.lax.optimization_barrier(shared)
    return stream, jnp.concatenate([parts, shared[None].astype(parts.dtype)])
