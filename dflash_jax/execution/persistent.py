"""Persistent kernels for few rows: all between two layers' attention, or a whole layer with its attention, in one launch.

A layer's projection to queries, keys and values is made by the launch that ends the layer before; the residual stream stays in
float32 between layers.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, cast

import jax
import jax.numpy as jnp
from dflash_kernels import (
    RankExchange,
    attention_chain_exchange,
    chain_exchange,
    chain_ranks,
    chain_stream,
    layer_chain,
    row_exchange,
    stream_norm,
    sum_exchange,
)
from jaxtyping import Array, Float

from dflash_jax.execution.plan import ExecutionPlan
from dflash_jax.models.layers import Attention, Cache, Norm, Rotary
from dflash_jax.parallel.ranks import AXIS
from dflash_jax.quantization.weights import Quantized, Weight


class Workspace(NamedTuple):
    """Device memory of a runner's kernels.

    Attributes:
      mailboxes: Refs through which CTAs of one launch hand results over; None where no kernel has such.
      ranks: through which devices that share the layers do; None where none do.
    """

    mailboxes: Any = None
    ranks: RankExchange | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Options of operations that add up over devices."""
        return {} if self.ranks is None else {"axis": AXIS, "ranks": self.ranks}


class AttendsInLayer(Protocol):
    """An `Attend` that can also be part of a layer's own kernel: what a plan with attention "in_layer" asks of it."""

    def in_layer(
        self,
        layer: Attention,
        qkv: Array,
        rotary: Rotary,
        stream: Array,
        weights: tuple[Any, ...],
        scales: Any,
        workspace: Workspace,
        cache: Cache,
    ) -> tuple[Array, Array | None, Cache]:
        """Attention and all that follows up to the next layer's projection: the stream, that projection, and the cache.

        Args:
          qkv: the layer's projection.
          stream: the residual stream as `chain_stream` makes it.
          weights, scales: from the output projection on, the next layer's norm and projection included.
          workspace: of `make_workspace`.
        """
        ...


def make_workspace(plan: ExecutionPlan, layers: Sequence[Any], x: Any) -> Workspace | None:
    """Refs through which the kernels of a plan hand results over, or None where its runner has none.

    Made before a loop, they are filled once and not in every cycle: kernels leave them ready for the next one.

    Args:
      layers: whose matrices' shapes count.
      x: `[B, T, D]`, the first layer's input or its shape; `[B, T, S, D]` of several streams, of which sums have one's shape.
    """
    rows = x.shape[0] * x.shape[1]
    if plan.workspace is None:
        return None
    if plan.workspace == "rows":
        return Workspace(ranks=row_exchange(rows, x.shape[2], x.dtype, axis=AXIS))
    if plan.workspace == "sums":
        return Workspace(ranks=sum_exchange(plan.sums * rows * x.shape[-1], x.dtype, axis=AXIS))
    down, _ = _stored(layers[0].mlp.down_proj.weight[...])
    stream = chain_stream(jnp.zeros((rows, x.shape[2]), x.dtype))  # only its shape counts
    ranks = chain_ranks(stream, axis=AXIS) if plan.exchange else None
    if plan.workspace == "layer":
        return Workspace(jax.new_ref(chain_exchange(stream, down)), ranks)
    config = layers[0].attn.config
    heads = {"heads": config.num_heads, "kv_heads": config.num_kv_heads}
    starts = attention_chain_exchange(stream, down, *x.shape[:2], **heads)
    return Workspace(tuple(map(jax.new_ref, starts)), ranks)


def run_persistent(
    plan: ExecutionPlan,
    layers: Sequence[Any],
    norm: Norm,
    x: Float[Array, "B T D"],
    normed: Float[Array, "B T D"],
    rotary: Rotary,
    attend: Any,
    cache: Cache,
    workspace: Workspace | None = None,
    implementation: str | None = None,
) -> tuple[list[Float[Array, "B T D"]], Float[Array, "B T D"], Cache]:
    """The residual stream after each layer, the last one after `norm`, and the cache; arguments as of a `Runner`.

    Args:
      normed: x after the first layer's norm.
      workspace: of `make_workspace`, where it outlives this call.
      implementation: of `layer_chain`.
    """
    rows = x.shape[0] * x.shape[1]
    stream = chain_stream(x.reshape(rows, -1))
    projected: Any = layers[0].mixer.projections[0](normed)
    workspace = workspace or make_workspace(plan, layers, x) or Workspace()
    streams = []
    for layer, later in zip(layers, (*layers[1:], None), strict=True):
        if plan.attention == "in_layer":
            whole = cast(AttendsInLayer, attend).in_layer
            weights = _weights(layer, later)
            stream, projected, cache = whole(layer.mixer, projected, rotary, stream, *weights, workspace, cache)
            projected = None if later is None else later.mixer.projections[0].of_product(projected)
            streams.append(stream)
            continue
        mixed, cache = layer.mixer.mix(projected.reshape(*x.shape[:-1], -1), rotary, attend, cache)
        weights, scales = _weights(layer, later)
        ahead = None if later is None else _stored(later.mixer.projections[1].weight[...])[0]
        ahead = ahead if ahead is not None and ahead.shape == weights[0].shape else None
        stream, projected = layer_chain(
            mixed.reshape(rows, -1), stream, *weights, ahead=ahead, exchange=workspace.mailboxes, scales=scales,
            eps=layer.post_norm.eps, zero_centered=layer.post_norm.zero_centered, implementation=implementation,
            **workspace.options,
        )  # fmt: skip
        projected = None if later is None else later.mixer.projections[0].of_product(projected)
        streams.append(stream)
    hidden = stream_norm(stream, rows, norm.weight[...], eps=norm.eps, zero_centered=norm.zero_centered)
    streams = [_rows(stream, rows).astype(x.dtype).reshape(x.shape) for stream in streams]
    return streams, hidden.reshape(x.shape), cache


def _stored(weight: Weight | None) -> tuple[Any, Array | None]:
    """A matrix as operations take it, and the scales of its rows where it has such."""
    return (weight.values, weight.scales) if isinstance(weight, Quantized) else (weight, None)


def _weights(layer: Any, later: Any) -> tuple[tuple[Any, ...], tuple[Array | None, ...] | None]:
    """Weights of a layer's operation from `o` on, with the next layer's projection, and the scales of its matrices."""
    names = (layer.mixer.projections[1], layer.mlp.gate_up_proj, layer.mlp.down_proj)
    following = None if later is None else later.mixer.projections[0].weight[...]
    matrices = [*(part.weight[...] for part in names), following]
    (o, gate_up, down, following), scales = zip(*map(_stored, matrices), strict=True)
    norms = layer.post_norm.weight[...], None if later is None else later.input_norm.weight[...]
    return (o, norms[0], gate_up, down, norms[1], following), None if scales[0] is None else scales


def _rows(stream: Array, rows: int) -> Array:
    """`[rows, D]`. One row is no transpose: XLA would lay the hidden state out by columns, and a copy of the head with it."""
    return stream[:, 0][None] if rows == 1 else stream[:, :rows].T
