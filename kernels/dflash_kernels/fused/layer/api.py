"""The public functions: check shapes, then hand over to the first implementation that takes the call."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from dflash_kernels.core.device import target
from dflash_kernels.core.dispatch import first_fitting
from dflash_kernels.core.layouts import EMPTY, ColumnBlocks
from dflash_kernels.core.validation import check_axes, check_floats
from dflash_kernels.fused.layer.arguments import Layer
from dflash_kernels.fused.layer.mosaic_gpu import layer_chain_mosaic_gpu, refuse
from dflash_kernels.fused.layer.plan import LINE, Exchange, padded_rows
from dflash_kernels.fused.layer.reference import layer_chain_reference

IMPLEMENTATIONS = {"mosaic_gpu": layer_chain_mosaic_gpu, "xla": layer_chain_reference}


def layer_chain_refusal(
    rows: int, dtype: Any, *, hidden: int, heads_width: int, inner: int, next_width: int, itemsize: int = 2
) -> str | None:
    """Why `layer_chain` has nothing faster than separate operations for calls of these sizes; None where it has."""
    try:
        refuse(
            rows, dtype, hidden=hidden, heads_width=heads_width, inner=inner, next_width=next_width, itemsize=itemsize
        )
    except NotImplementedError as reason:
        return str(reason)
    return None


def chain_stream(x: Float[Array, "M D"]) -> Float[Array, "D n"]:
    """A residual stream as `layer_chain` keeps it: float32, a column for each token, and columns of zeros up to `n`."""
    columns = padded_rows(x.shape[0])
    if x.shape[0] == 1:
        # No transpose: XLA would lay the row out by columns, and a copy of the embedding table that it comes from with it.
        first = jax.lax.broadcasted_iota(jnp.int32, (x.shape[1], columns), 1) == 0
        return jnp.where(first, x.reshape(-1).astype(jnp.float32)[:, None], 0.0)
    return jnp.pad(x.astype(jnp.float32), ((0, columns - x.shape[0]), (0, 0))).T


def chain_exchange(stream: Float[Array, "D n"], down: Shaped[Array, "D F"] | ColumnBlocks) -> Int[Array, "w"]:
    """What the Ref starts with through which multiprocessors hand results to one another: one for all layers of a step."""
    words = Exchange(max(target().multiprocessors, 1), stream.shape[1], *down.shape)
    # Counts of launches are 0 at first, places of results are empty.
    return jnp.where(jnp.arange(words.words) < words.ctas * LINE, 0, EMPTY)


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
    eps: float = 1e-6,
    implementation: str | Sequence[str] | None = None,
) -> tuple[Float[Array, "D n"], Float[Array, "M G"] | None]:
    """From one layer's attention to the next layer's projection of queries, keys and values, for a few tokens.

    `stream += o x`, then `stream += down (silu(gate) * up)` of the normed stream, then `following` times the normed stream.
    Norms are root mean square norms.

    Args:
      x: outputs of the attention heads, bfloat16, float16 or float32.
      stream: the residual stream, from `chain_stream` or the call before.
      o, gate_up, down, following: weights `[rows, columns]`, each an array or `ColumnBlocks`; gate rows lie before up rows.
      post_norm, next_norm: weights of the norms before `gate_up` and before `following`.
      ahead: `o` of the next call, brought to the cache while other operations run.
      exchange: a Ref of `chain_exchange`, passed to one call after the other.
      scales: of the rows of o, gate_up, down and following, where these are eight bits with columns in pairs (`quantized_linear`).
      eps: added to the mean square.
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
        return first_fitting("layer_chain", IMPLEMENTATIONS, implementation, x, layer, ahead, exchange, eps=eps)
