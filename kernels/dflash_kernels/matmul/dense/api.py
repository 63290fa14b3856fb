"""Matrix products with an epilogue: shapes, dtypes and errors; the first implementation that supports the call runs."""

from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from dflash_kernels.core.device import require_hopper, target
from dflash_kernels.core.dispatch import first_fitting
from dflash_kernels.core.layouts import ColumnBlocks
from dflash_kernels.core.validation import check_axes, check_floats
from dflash_kernels.matmul.dense import mosaic_gpu, reference

IMPLEMENTATIONS = {
    "dense": {"mosaic_gpu": mosaic_gpu.dense_mosaic_gpu, "xla": reference.dense_reference},
    "dense_gated": {"mosaic_gpu": mosaic_gpu.dense_gated_mosaic_gpu, "xla": reference.dense_gated_reference},
    "dense_parts": {"mosaic_gpu": mosaic_gpu.dense_parts_mosaic_gpu, "xla": reference.dense_parts_reference},
    "dense_onto": {"mosaic_gpu": mosaic_gpu.dense_onto_mosaic_gpu, "xla": reference.dense_onto_reference},
    "dense_best": {"mosaic_gpu": mosaic_gpu.dense_best_mosaic_gpu, "xla": reference.dense_best_reference},
    "add_norm": {"mosaic_gpu": mosaic_gpu.add_norm_mosaic_gpu, "xla": reference.add_norm_reference},
    "add_norm_scores": {
        "mosaic_gpu": mosaic_gpu.add_norm_scores_mosaic_gpu,
        "xla": reference.add_norm_scores_reference,
    },
    "add_norm_dense": {"mosaic_gpu": mosaic_gpu.add_norm_dense_mosaic_gpu, "xla": reference.add_norm_dense_reference},
}

type Implementation = str | Sequence[str] | None


def dense(
    x: Float[Array, "M D"],
    weight: Float[Array, "F D"] | ColumnBlocks,
    *,
    live: Int[Array, ""] | None = None,
    implementation: Implementation = None,
) -> Float[Array, "M F"]:
    """Matrix product `x @ weight.T`, accumulated in float32.

    Args:
      weight: an array, or `ColumnBlocks`, which `dense_gated`, `dense_parts` and `dense_onto` take as well.
      live: rows that are asked for, from the first on; the others are undefined. None for all.
      implementation: a name, names to try in order, or None for the best that takes the call.

    Returns:
      In x's dtype.

    Raises:
      ValueError: shapes do not agree.
      NoImplementationError: nothing named takes these arguments.
    """
    return _call("dense", implementation, x, weight, live=live)


def dense_gated(
    x: Float[Array, "M D"],
    weight: Float[Array, "twoF D"] | ColumnBlocks,
    *,
    implementation: Implementation = None,
) -> Float[Array, "M F"]:
    """SwiGLU `silu(x @ gate.T) * (x @ up.T)` for a weight of gate rows before up rows. Arguments and errors: see `dense`."""
    check_axes(weight=(weight, "twoF D"))
    if weight.shape[0] % 2:
        raise ValueError(f"gate and up must have as many rows each, not {weight.shape[0]} together")
    return _call("dense_gated", implementation, x, weight)


def dense_parts(
    x: Float[Array, "M D"],
    weight: Float[Array, "F D"] | ColumnBlocks,
    *,
    live: Int[Array, ""] | None = None,
    implementation: Implementation = None,
) -> Float[Array, "S M F"]:
    """Split-K partial products whose sum is `x @ weight.T`, for `add_norm`, each rounded to x's dtype.

    Arguments and errors: see `dense`.
    """
    return _call("dense_parts", implementation, x, weight, live=live)


def dense_onto(
    x: Float[Array, "M F"], weight: Float[Array, "D F"] | ColumnBlocks, stream: Float[Array, "M D"], norm: Float[Array, "D"], *,
    eps: float, zero_centered: bool = False, implementation: Implementation = None,
) -> tuple[Float[Array, "M D"], Float[Array, "M D"]]:  # fmt: skip
    """Matrix product with residual and RMS norm: `stream + x @ weight.T` in stream's dtype, and its norm times `norm`.

    On Hopper up to four split-K partial products are rounded to x's dtype before they are added. Arguments and errors: see `dense`
    and, for `zero_centered`, `embed_norm`.
    """
    check_axes(x=(x, "M F"), weight=(weight, "D F"), stream=(stream, "M D"), norm=(norm, "D"))
    check_floats(stream=stream, norm=norm)
    if stream.shape != (x.shape[0], weight.shape[0]) or norm.shape != weight.shape[:1]:
        raise ValueError(f"a stream {stream.shape} and a norm {norm.shape} do not fit {x.shape} @ {weight.shape}.T")
    return _call("dense_onto", implementation, x, weight, stream, norm, eps=eps, zero_centered=zero_centered)


def dense_best(
    x: Float[Array, "M D"], weight: Float[Array, "F D"], *, implementation: Implementation = None
) -> Int[Array, "M"]:
    """Argmax of `x @ weight.T` in x's dtype, as for an LM head; the first of equal ones. Errors: see `dense`."""
    return _call("dense_best", implementation, x, weight)


def add_norm(
    parts: Float[Array, "S M D"], stream: Float[Array, "M D"], weight: Float[Array, "D"], *, eps: float,
    zero_centered: bool = False, rounds_last: bool = False, implementation: Implementation = None,
) -> tuple[Float[Array, "M D"], Float[Array, "M D"]]:  # fmt: skip
    """Split-K reduction with residual and RMS norm: `stream + sum(parts)` in stream's dtype, and its norm times `weight`.

    Args:
      zero_centered: see `embed_norm`.
      rounds_last: rows are rounded after the weight, not before.

    Raises:
      ValueError: shapes do not agree.
      NoImplementationError: nothing named takes these arguments.
    """
    check_axes(parts=(parts, "S M D"), stream=(stream, "M D"), weight=(weight, "D"))
    check_floats(parts=parts, stream=stream, weight=weight)
    if parts.shape[1:] != stream.shape or weight.shape != stream.shape[1:]:
        raise ValueError(f"parts {parts.shape} and weight {weight.shape} do not fit a stream {stream.shape}")
    with jax.named_scope("add_norm"):
        return first_fitting(
            "add_norm", IMPLEMENTATIONS["add_norm"], implementation, parts, stream, weight, eps=eps,
            zero_centered=zero_centered, rounds_last=rounds_last,
        )  # fmt: skip


def add_norm_scores(
    parts: Float[Array, "S M D"], stream: Float[Array, "M D"], weight: Float[Array, "D"], scorer: Float[Array, "E D"],
    bias: Float[Array, "E"] | None = None, *, eps: float, zero_centered: bool = False, rounds_last: bool = False,
    implementation: Implementation = None,
) -> tuple[Float[Array, "M D"], Float[Array, "M D"], Float[Array, "M E"]]:  # fmt: skip
    """`add_norm` and router logits: the norm's products with the rows of `scorer` in float32, plus `bias` where there is one.

    Raises:
      ValueError: shapes do not agree.
      NoImplementationError: nothing named takes these arguments.
    """
    check_axes(parts=(parts, "S M D"), stream=(stream, "M D"), weight=(weight, "D"), scorer=(scorer, "E D"))
    check_floats(parts=parts, stream=stream, weight=weight, scorer=scorer)
    if parts.shape[1:] != stream.shape or weight.shape != stream.shape[1:] or scorer.shape[1:] != weight.shape:
        raise ValueError(
            f"parts {parts.shape}, weight {weight.shape} and scorer {scorer.shape} do not fit a stream {stream.shape}"
        )
    if bias is not None:
        check_axes(bias=(bias, "E"))
        check_floats(bias=bias)
        if bias.shape != scorer.shape[:1]:
            raise ValueError(f"bias {bias.shape} does not fit a scorer {scorer.shape}")
    implementations = IMPLEMENTATIONS["add_norm_scores"]
    with jax.named_scope("add_norm_scores"):
        return first_fitting(
            "add_norm_scores", implementations, implementation, parts, stream, weight, scorer, bias, eps=eps,
            zero_centered=zero_centered, rounds_last=rounds_last,
        )  # fmt: skip


def add_norm_dense(
    parts: Float[Array, "S M D"], stream: Float[Array, "M D"], weight: Float[Array, "D"], matrix: Float[Array, "F D"], *,
    eps: float, zero_centered: bool = False, rounds_last: bool = False, implementation: Implementation = None,
) -> tuple[Float[Array, "M D"], Float[Array, "M F"]]:  # fmt: skip
    """`add_norm` and `dense` of the norm: the stream, and the norm's products with the rows of `matrix` in stream's dtype.

    Raises:
      ValueError: shapes do not agree.
      NoImplementationError: nothing named takes these arguments.
    """
    check_axes(parts=(parts, "S M D"), stream=(stream, "M D"), weight=(weight, "D"), matrix=(matrix, "F D"))
    check_floats(parts=parts, stream=stream, weight=weight, matrix=matrix)
    if parts.shape[1:] != stream.shape or weight.shape != stream.shape[1:] or matrix.shape[1:] != weight.shape:
        raise ValueError(
            f"parts {parts.shape}, weight {weight.shape} and matrix {matrix.shape} do not fit a stream {stream.shape}"
        )
    implementations = IMPLEMENTATIONS["add_norm_dense"]
    with jax.named_scope("add_norm_dense"):
        return first_fitting(
            "add_norm_dense", implementations, implementation, parts, stream, weight, matrix, eps=eps,
            zero_centered=zero_centered, rounds_last=rounds_last,
        )  # fmt: skip


def add_norm_dense_refusal(rows: int, dtype: Any, *, features: int, depth: int) -> str | None:
    """Why `add_norm_dense` has nothing faster than its two operations for these sizes; None where it has."""
    try:
        require_hopper()
        mosaic_gpu.require_row(
            rows, dtype, features=features, depth=depth, multiprocessors=target().multiprocessors
        )  # fmt: skip
    except NotImplementedError as reason:
        return str(reason)
    return None


def dense_refusal(rows: int, dtype: Any, depth: int) -> str | None:
    """Why `dense` and its variants have nothing faster than XLA for products of these sizes; None where they have."""
    try:
        require_hopper()
        mosaic_gpu.require_product(rows, dtype, depth)
    except NotImplementedError as reason:
        return str(reason)
    return None


def _call(op: str, implementation: Implementation, x: Any, weight: Any, *rest: Any, **named: Any) -> Any:
    check_axes(x=(x, "M D"), weight=(weight, "F D"))
    if x.shape[1] != weight.shape[1]:
        raise ValueError(f"x must be [M, D] and the weight [F, D], not {x.shape} and {weight.shape}")
    check_floats(x=x, weight=weight)
    with jax.named_scope(op):
        return first_fitting(op, IMPLEMENTATIONS[op], implementation, x, weight, *rest, **named)
