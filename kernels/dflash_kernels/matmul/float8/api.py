"""W8A8 products: activations and weights in float8, each row with a scale. The first implementation that supports a call runs."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_kernels.core.device import require_hopper
from dflash_kernels.core.dispatch import first_fitting
from dflash_kernels.core.layouts import INTERLEAVE_BLOCK
from dflash_kernels.core.validation import check_axes, check_floats
from dflash_kernels.matmul.float8 import mosaic_gpu, reference
from dflash_kernels.matmul.float8.reference import Float8Rows

IMPLEMENTATIONS = {
    "float8_rows": {"mosaic_gpu": mosaic_gpu.float8_rows_mosaic_gpu, "xla": reference.float8_rows_reference},
    "float8_dense": {"mosaic_gpu": mosaic_gpu.float8_dense_mosaic_gpu, "xla": reference.float8_dense_reference},
    "float8_gated": {"mosaic_gpu": mosaic_gpu.float8_gated_mosaic_gpu, "xla": reference.float8_gated_reference},
    "float8_onto": {"mosaic_gpu": mosaic_gpu.float8_onto_mosaic_gpu, "xla": reference.float8_onto_reference},
    "float8_best": {"mosaic_gpu": mosaic_gpu.float8_best_mosaic_gpu, "xla": reference.float8_best_reference},
    "float8_candidates": {
        "mosaic_gpu": mosaic_gpu.float8_candidates_mosaic_gpu,
        "xla": reference.float8_candidates_reference,
    },
}

type Implementation = str | Sequence[str] | None


def float8_rows(x: Float[Array, "M D"], *, paired: bool = False, implementation: Implementation = None) -> Float8Rows:
    """Dynamic row-wise quantization to float8_e4m3fn: a scale for each row brings its largest number to 448.

    A row of zeros stays one, NaN stays where it is; a row that holds an infinity becomes zeros and NaN.
    Source: the scale of a tensor, "FP8 Formats for Deep Learning", arXiv 2209.05433, section 3, taken of each row as it comes
    (as for activations in eight bits in arXiv 2206.01861, section 4).

    Args:
      paired: values have interleaved columns (`interleave_columns`), D a multiple of 16.
      implementation: a name, names to try in order, or None for the best that takes the call.

    Raises:
      ValueError: x is of another kind than said.
      NoImplementationError: nothing named takes these arguments.
    """
    check_axes(x=(x, "M D"))
    check_floats(x=x)
    if paired and x.shape[1] % INTERLEAVE_BLOCK:
        raise ValueError(f"columns are interleaved where there are a multiple of {INTERLEAVE_BLOCK}, not {x.shape[1]}")
    with jax.named_scope("float8_rows"):
        return first_fitting("float8_rows", IMPLEMENTATIONS["float8_rows"], implementation, x, paired=paired)


def float8_dense(
    x: Float8Rows,
    weight: Float[Array, "F D"],
    scales: Float[Array, "F"],
    dtype: Any = jnp.bfloat16,
    *,
    live: Int[Array, ""] | None = None,
    implementation: Implementation = None,
) -> Float[Array, "M F"]:
    """W8A8 matrix product `y_mf = scale_m scales_f sum_d x_md weight_fd` in `dtype`, scaled before it is rounded.

    On Hopper the accumulator is that of its float8 matrix units, which keep about 14 bits.

    Args:
      x: of `float8_rows`; columns in the weight's order.
      weight: float8_e4m3fn.
      scales: float32 row scales of the weight.
      live: rows that are asked for, from the first on; the others are undefined. None for all.
      implementation: a name, names to try in order, or None for the best that takes the call.

    Raises:
      ValueError: shapes do not agree, or an array is of another kind than said.
      NoImplementationError: nothing named takes these arguments.
    """
    return _call("float8_dense", implementation, x, weight, scales, jnp.dtype(dtype), live=live)


def float8_gated(
    x: Float8Rows,
    weight: Float[Array, "twoF D"],
    scales: Float[Array, "twoF"],
    dtype: Any = jnp.bfloat16,
    *,
    implementation: Implementation = None,
) -> Float[Array, "M F"]:
    """W8A8 SwiGLU: `silu(gate) * up` for a weight of gate rows before up rows. Arguments and errors: see `float8_dense`."""
    check_axes(weight=(weight, "twoF D"))
    if weight.shape[0] % 2:
        raise ValueError(f"gate and up must have as many rows each, not {weight.shape[0]} together")
    return _call("float8_gated", implementation, x, weight, scales, jnp.dtype(dtype))


def float8_onto(
    x: Float8Rows, weight: Float[Array, "D F"], scales: Float[Array, "D"], stream: Float[Array, "M D"],
    norm: Float[Array, "D"], *, eps: float, paired: bool = False, zero_centered: bool = False,
    implementation: Implementation = None,
) -> tuple[Float[Array, "M D"], Float8Rows]:  # fmt: skip
    """W8A8 product with residual, RMS norm and quantization: the stream with the product added, and `float8_rows` of its norm.

    `zero_centered`: weights of the norm are offsets from 1, which are added to it in float32. Other arguments and errors: see
    `float8_dense`, `float8_rows`.
    """
    check_axes(weight=(weight, "D F"), stream=(stream, "M D"), norm=(norm, "D"))
    check_floats(stream=stream, norm=norm)
    if stream.shape != (x.values.shape[0], weight.shape[0]) or norm.shape != weight.shape[:1]:
        raise ValueError(
            f"a stream {stream.shape} and a norm {norm.shape} do not fit {x.values.shape} @ {weight.shape}.T"
        )
    if paired and stream.shape[1] % INTERLEAVE_BLOCK:
        raise ValueError(
            f"columns are interleaved where there are a multiple of {INTERLEAVE_BLOCK}, not {stream.shape[1]}"
        )
    named = {"eps": eps, "paired": paired, "zero_centered": zero_centered}
    return _call("float8_onto", implementation, x, weight, scales, stream, norm, **named)


def float8_best(
    x: Float8Rows,
    weight: Float[Array, "F D"],
    scales: Float[Array, "F"],
    dtype: Any = jnp.bfloat16,
    *,
    implementation: Implementation = None,
) -> Int[Array, "M"]:
    """Argmax of a W8A8 product in `dtype`, as for an LM head; the first of equal ones. Errors: see `float8_dense`."""
    return _call("float8_best", implementation, x, weight, scales, jnp.dtype(dtype))


def float8_candidates(
    x: Float8Rows,
    weight: Float[Array, "F D"],
    scales: Float[Array, "F"],
    count: int,
    *,
    implementation: Implementation = None,
) -> Int[Array, "M C"]:
    """Shortlist of an LM head: the best row of the weight in each of `count` groups, the argmax of all rows among them.

    Which rows form a group is the implementation's choice. Products are compared in float32. Where there are fewer groups than
    `count`, row 0 stands for the missing ones.

    Raises:
      ValueError: `count` is less than 1; and see `float8_dense`.
      NoImplementationError: nothing named takes these arguments.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, not {count}")
    return _call("float8_candidates", implementation, x, weight, scales, count)


def float8_refusal(rows: int, dtype: Any, depth: int) -> str | None:
    """Why there is nothing faster than XLA for products of these sizes, rows of `dtype`; None where there is."""
    try:
        require_hopper()
        mosaic_gpu.require_product(rows, dtype, depth)
    except NotImplementedError as reason:
        return str(reason)
    return None


def _call(
    op: str, implementation: Implementation, x: Float8Rows, weight: Any, scales: Any, *rest: Any, **named: Any
) -> Any:
    check_axes(values=(x.values, "M D"), of_rows=(x.scales, "M"), weight=(weight, "F D"), scales=(scales, "F"))
    check_floats(of_rows=x.scales, scales=scales)
    for name, array in (("values", x.values), ("weight", weight)):
        if array.dtype != jnp.float8_e4m3fn:
            raise ValueError(f"{name} must be float8_e4m3fn, not {array.dtype}")
    sizes = x.values.shape, x.scales.shape, weight.shape, scales.shape
    if (x.values.shape[1], *x.scales.shape, *scales.shape) != (weight.shape[1], x.values.shape[0], weight.shape[0]):
        raise ValueError(f"x {sizes[:2]} and a weight {sizes[2:]} must be [M, D], [M], [F, D] and [F]")
    with jax.named_scope(op):
        return first_fitting(op, IMPLEMENTATIONS[op], implementation, x, weight, scales, *rest, **named)
