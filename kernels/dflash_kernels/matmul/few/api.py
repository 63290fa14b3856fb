"""Products of a few rows with a bias in one launch: shapes and errors; the first implementation that supports the call runs."""

from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array, Float

from dflash_kernels.core.dispatch import first_fitting
from dflash_kernels.core.validation import check_axes, check_floats
from dflash_kernels.matmul.few.mosaic_gpu import few_linear_mosaic_gpu, refuse
from dflash_kernels.matmul.few.reference import few_linear_reference

IMPLEMENTATIONS = {"mosaic_gpu": few_linear_mosaic_gpu, "xla": few_linear_reference}


def few_linear_refusal(rows: int, dtype: Any, features: int, depth: int) -> str | None:
    """Why `few_linear` has no kernel for these sizes; None where it has."""
    try:
        refuse(rows, dtype, features, depth)
    except NotImplementedError as reason:
        return str(reason)
    return None


def few_linear(
    x: Float[Array, "M D"],
    weight: Float[Array, "F D"],
    bias: Float[Array, "F"] | None = None,
    *,
    parts: bool = False,
    implementation: str | Sequence[str] | None = None,
) -> Float[Array, "M F"] | Float[Array, "S M F"]:
    """Matrix product of a few rows, `x @ weight.T + bias`, accumulated in float32 and rounded once.

    Args:
      parts: the result comes in float32, in parts that whoever wants it adds (`add_norm`).
      implementation: a name, names to try in order, or None for the best that takes the call.

    Returns:
      In x's dtype, or parts of it `[S, M, F]`.

    Raises:
      ValueError: shapes do not agree.
      NoImplementationError: nothing named takes these arguments.
    """
    check_axes(x=(x, "M D"), weight=(weight, "F D"))
    check_floats(x=x, weight=weight)
    if x.shape[1] != weight.shape[1]:
        raise ValueError(f"x {x.shape} and weight {weight.shape} must have as many columns")
    if bias is not None:
        check_axes(bias=(bias, "F"))
        check_floats(bias=bias)
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"bias {bias.shape} does not fit a weight {weight.shape}")
    with jax.named_scope("few_linear"):
        return first_fitting("few_linear", IMPLEMENTATIONS, implementation, x, weight, bias, parts=parts)
