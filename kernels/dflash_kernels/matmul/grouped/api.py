"""The grouped matrix product: shapes, dtypes and errors; the first implementation that supports the call runs."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_kernels.core.dispatch import first_fitting
from dflash_kernels.core.validation import check_axes, check_filled, check_floats, check_integers
from dflash_kernels.matmul.grouped.mosaic_gpu import grouped_linear_mosaic_gpu, require_experts
from dflash_kernels.matmul.grouped.reference import grouped_linear_reference

IMPLEMENTATIONS = {"mosaic_gpu": grouped_linear_mosaic_gpu, "xla": grouped_linear_reference}


def grouped_linear_refusal(dtype: Any, *, hidden: int, inner: int) -> str | None:
    """Why `grouped_linear` has nothing faster than XLA for experts of these widths; None where it has."""
    try:
        require_experts(dtype, hidden, inner, gated=True)
        require_experts(dtype, inner, hidden, gated=False)
    except NotImplementedError as reason:
        return str(reason)
    return None


def grouped_linear(
    x: Float[Array, "M D"],
    weight: Float[Array, "G F D"],
    groups: Int[Array, "blocks"],
    count: Int[Array, ""],
    *,
    gated: bool = False,
    implementation: str | Sequence[str] | None = None,
) -> Float[Array, "M out"]:
    """Grouped matrix product, as of experts: each block of rows times its group's matrix, `y_m = weight[groups[m // rows]] x_m`.

    Args:
      x: rows sorted into blocks of `M / blocks`. A group may have any number of blocks, and padding fills up its last one.
      weight: a matrix of each group; with `gated`, `F / 2` gate rows before as many up rows.
      groups: int32, of each block, from 0 to G - 1 in used blocks.
      count: int32, used blocks, the first ones. Rows of the others may hold anything in x, and are undefined in the result.
      gated: the result is `silu(gate) * up`, as in SwiGLU (arXiv 2002.05202, section 2).
      implementation: a name, names to try in order, or None for the best that takes the call.

    Returns:
      `[M, F]`, or `[M, F / 2]` with `gated`, in x's dtype; sums and the gate are float32.

    Raises:
      ValueError: shapes do not agree, or an array is of another kind than said.
      NoImplementationError: nothing named takes these arguments.
    """
    check_axes(x=(x, "M D"), weight=(weight, "G F D"), groups=(groups, "blocks"))
    check_floats(x=x, weight=weight)
    count = count if count is None else jnp.asarray(count)
    check_axes(count=(count, ""))
    check_integers(groups=groups, count=count)
    if 0 in (x.shape[0], groups.shape[0]) or x.shape[0] % groups.shape[0]:
        raise ValueError(f"{x.shape[0]} rows do not make {groups.shape[0]} blocks of one size")
    check_filled(weight=weight)
    if weight.shape[2] != x.shape[1] or (gated and weight.shape[1] % 2):
        raise ValueError(f"weight {weight.shape} must be [G, F, {x.shape[1]}], F even where it is gated")
    with jax.named_scope("grouped_linear"):
        return first_fitting(
            "grouped_linear", IMPLEMENTATIONS, implementation, x, weight, groups, count, gated=gated
        )  # fmt: skip
