"""RMS norms at a model's two ends and after a sum over devices: shapes, dtypes and errors; the first implementation that supports
the call runs."""

from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from dflash_kernels.core.device import require_hopper
from dflash_kernels.core.dispatch import first_fitting
from dflash_kernels.core.rank_exchange import RankExchange
from dflash_kernels.core.validation import check_axes, check_count, check_filled, check_floats, check_integers
from dflash_kernels.norm import mosaic_gpu, reference

EMBED = {"mosaic_gpu": mosaic_gpu.embed_norm_mosaic_gpu, "xla": reference.embed_norm_reference}
REDUCE = {"mosaic_gpu": mosaic_gpu.reduce_add_norm_mosaic_gpu, "xla": reference.reduce_add_norm_xla}
STREAM = {"mosaic_gpu": mosaic_gpu.stream_norm_mosaic_gpu, "xla": reference.stream_norm_reference}


def embed_norm(
    table: Float[Array, "V D"],
    ids: Int[Array, "M"],
    weight: Float[Array, "D"],
    *,
    eps: float,
    zero_centered: bool = False,
    implementation: str | Sequence[str] | None = None,
) -> tuple[Float[Array, "M D"], Float[Array, "M D"]]:
    """Embedding lookup with RMS norm: rows of a table, and their norms times `weight`. Ids outside the table give some row of it.

    Args:
      zero_centered: the weight is an offset from 1, which is added to it in float32, and rows are rounded after both, not before.
      implementation: a name, names to try in order, or None for the best that takes the call.

    Raises:
      ValueError: shapes do not agree, or an array is of another kind than said.
      NoImplementationError: nothing named takes these arguments.
    """
    check_axes(table=(table, "V D"), ids=(ids, "M"), weight=(weight, "D"))
    check_filled(table=table)
    check_floats(table=table, weight=weight)
    check_integers(ids=ids)
    if weight.shape != table.shape[1:]:
        raise ValueError(f"table {table.shape}, ids {ids.shape} and weight {weight.shape} must be [V, D], [M] and [D]")
    with jax.named_scope("embed_norm"):
        return first_fitting(
            "embed_norm", EMBED, implementation, table, ids, weight, eps=eps, zero_centered=zero_centered
        )  # fmt: skip


def stream_norm(
    stream: Float[Array, "D n"],
    rows: int,
    weight: Float[Array, "D"],
    *,
    eps: float,
    zero_centered: bool = False,
    implementation: str | Sequence[str] | None = None,
) -> Float[Array, "M D"]:
    """RMS norm of a transposed residual stream: its first `rows` columns, as `layer_chain` keeps it, as rows in weight's dtype.

    Arguments and errors: see `embed_norm`.
    """
    check_axes(stream=(stream, "D n"), weight=(weight, "D"))
    check_floats(stream=stream, weight=weight)
    check_count(rows=rows)
    if weight.shape != stream.shape[:1] or not 0 < rows <= stream.shape[1]:
        raise ValueError(f"{rows} rows of a stream {stream.shape} and weight {weight.shape} must be of [D, n] and [D]")
    with jax.named_scope("stream_norm"):
        return first_fitting(
            "stream_norm", STREAM, implementation, stream, rows, weight, eps=eps, zero_centered=zero_centered
        )  # fmt: skip


def reduce_add_norm_refusal(width: int, dtype: Any) -> str | None:
    """Why `reduce_add_norm` has no kernel for streams of this width and dtype, with bfloat16 weights; None where it has."""
    try:
        require_hopper()
    except NotImplementedError as reason:
        return str(reason)
    return mosaic_gpu.rows_refusal(width, dtype)


def reduce_add_norm(
    parts: Float[Array, "S M D"],
    stream: Float[Array, "M D"],
    weight: Float[Array, "D"],
    *,
    eps: float,
    axis: str | None = None,
    exchange: RankExchange | None = None,
    zero_centered: bool = False,
    implementation: str | Sequence[str] | None = None,
) -> tuple[Float[Array, "M D"], Float[Array, "M D"]]:
    """`add_norm` of what all devices along a mesh's axis have: `stream + sum(parts of all)` and its norm times `weight`.

    Each device adds up its own parts and rounds to stream's dtype; the devices' sums are added in float32, in order of devices: so
    all have the same bits, and those of a row do not depend on how many rows there are.

    Args:
      parts: of this device.
      stream: the same on all devices.
      axis: of the `shard_map` that this is called in; None on one device.
      exchange: of `row_exchange`, for the kernel that writes to the other devices' memory itself.
      zero_centered, implementation: see `embed_norm`.

    Raises:
      ValueError: shapes do not agree, or an array is of another kind than said.
      NoImplementationError: nothing named takes these arguments.
    """
    check_axes(parts=(parts, "S M D"), stream=(stream, "M D"), weight=(weight, "D"))
    check_floats(parts=parts, stream=stream, weight=weight)
    if parts.shape[1:] != stream.shape or weight.shape != stream.shape[1:]:
        raise ValueError(f"parts {parts.shape} and weight {weight.shape} do not fit a stream {stream.shape}")
    with jax.named_scope("reduce_add_norm"):
        return first_fitting(
            "reduce_add_norm", REDUCE, implementation, parts, stream, weight, eps=eps, axis=axis, exchange=exchange,
            zero_centered=zero_centered
        )  # fmt: skip
