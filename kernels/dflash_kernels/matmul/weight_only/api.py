"""The weight-only quantized product: shapes, dtypes and errors; the first implementation that supports the call runs."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from dflash_kernels.core.dispatch import first_fitting
from dflash_kernels.core.layouts import INTERLEAVE_BLOCK
from dflash_kernels.core.validation import check_axes, check_floats
from dflash_kernels.matmul.weight_only.mosaic_gpu import quantized_linear_mosaic_gpu
from dflash_kernels.matmul.weight_only.reference import quantized_linear_reference

IMPLEMENTATIONS = {"mosaic_gpu": quantized_linear_mosaic_gpu, "xla": quantized_linear_reference}


def quantized_linear(
    x: Float[Array, "M D"],
    values: Shaped[Array, "F D"],
    scales: Float[Array, "F"],
    *,
    paired: bool = False,
    implementation: str | Sequence[str] | None = None,
) -> Float[Array, "M F"]:
    """W8A16 linear map `y_mf = scales_f * sum_d x_md values_fd`: weights in eight bits with row scales, activations as they are.

    Source: row-wise quantization of weights as in LLM.int8(), arXiv 2208.07339, section 2.1.

    Args:
      x: activations.
      values: int8 or float8_e4m3fn.
      scales: float32 row scales of `values`.
      paired: `values` has interleaved columns (`interleave_columns`), D a multiple of 16. Spares the Hopper kernel a launch that
        orders x.
      implementation: a name, names to try in order, or None for the best that takes the call.

    Returns:
      In x's dtype; sums are float32 and are scaled before they are rounded.

    Raises:
      ValueError: shapes do not agree, or an array is of another kind than said.
      NoImplementationError: nothing named takes these arguments.
    """
    check_axes(x=(x, "M D"), values=(values, "F D"), scales=(scales, "F"))
    check_floats(x=x, scales=scales)
    if values.dtype not in (jnp.int8, jnp.float8_e4m3fn):
        raise ValueError(f"values must be int8 or float8_e4m3fn, not {values.dtype}")
    if x.shape[1:] != values.shape[1:] or scales.shape != values.shape[:1]:
        raise ValueError(f"x {x.shape}, values {values.shape} and scales {scales.shape} must be [M, D], [F, D] and [F]")
    if paired and x.shape[1] % INTERLEAVE_BLOCK:
        raise ValueError(f"columns are interleaved where there are a multiple of {INTERLEAVE_BLOCK}, not {x.shape[1]}")
    with jax.named_scope("quantized_linear"):
        return first_fitting("quantized_linear", IMPLEMENTATIONS, implementation, x, values, scales, paired=paired)
