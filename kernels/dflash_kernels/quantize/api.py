"""Quantization of activations: shapes, dtypes and errors; the first implementation that supports the call runs.

Every row is on its own scales or on a given one: what padding rows hold does not reach the others.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped, UInt8

from dflash_kernels.core.dispatch import first_fitting
from dflash_kernels.core.validation import check_axes, check_count, check_rows
from dflash_kernels.quantize.reference import (
    E4M3,
    NVFP4_BLOCK,
    from_e4m3,
    quantize_groups_reference,
    quantize_nvfp4_reference,
    quantize_tensor_reference,
)

TENSOR_IMPLEMENTATIONS = {"xla": quantize_tensor_reference}
GROUP_IMPLEMENTATIONS = {"xla": quantize_groups_reference}
NVFP4_IMPLEMENTATIONS = {"xla": quantize_nvfp4_reference}


def quantize_tensor(
    x: Float[Array, "*rows D"],
    scale: Float[Array, ""] | float,
    *,
    implementation: str | Sequence[str] | None = None,
) -> Float[Array, "*rows D"]:
    """Static per-tensor quantization to float8_e4m3fn: `x * (1 / scale)`, saturated at 448 (infinity too); NaN stays NaN.

    Args:
      scale: float32, above 0. A value reads back as itself times `scale`.
      implementation: a name, names to try in order, or None for the best that takes the call.

    Raises:
      ValueError: `scale` is not one number, or x of another kind than said.
      NoImplementationError: nothing named takes these arguments.
    """
    check_rows(x=x)
    scale = jnp.asarray(scale, jnp.float32)
    if scale.shape != ():
        raise ValueError(f"scale {scale.shape} must be one number; for a scale of each group see quantize_groups")
    with jax.named_scope("quantize_tensor"):
        return first_fitting("quantize_tensor", TENSOR_IMPLEMENTATIONS, implementation, x, scale)


def dequantize_tensor(
    x: Float[Array, "*rows D"], scale: Float[Array, ""] | float = 1.0, dtype: Any = jnp.float32
) -> Float[Array, "*rows D"]:
    """Inverse of `quantize_tensor`: `x * scale` in float32 and then in `dtype`; NaN stays NaN.

    Compilers drop a conversion to eight bits and back, so bits are read here.

    Raises:
      ValueError: x is not float8_e4m3fn.
    """
    check_rows(x=x)
    if x.dtype != E4M3:
        raise ValueError(f"x must be float8_e4m3fn, not {x.dtype}")
    return (jnp.where(jnp.isnan(x), jnp.nan, from_e4m3(x)) * scale).astype(dtype)


def quantize_groups(
    x: Float[Array, "*rows D"],
    *,
    group: int,
    power_of_two: bool = False,
    implementation: str | Sequence[str] | None = None,
) -> tuple[Float[Array, "*rows D"], Float[Array, "*rows G"]]:
    """Group-wise dynamic quantization to float8_e4m3fn: `x / scale`, a scale for each `group` neighbours of a row.

    The largest value of a group comes to 448. A group that holds a NaN has scale NaN, and reads back as NaN throughout. A
    group with an infinity has scale infinity.

    Args:
      group: 64 and 128 are in use; any divisor of D.
      power_of_two: round scales up to powers of two, which can be kept as bare exponents.
      implementation: a name, names to try in order, or None for the best that takes the call.

    Returns:
      Values, and float32 scales: max(largest absolute value, 1e-10) / 448, rounded up or not.

    Raises:
      ValueError: `group` does not divide D, or x is of another kind than said.
    """
    check_rows(x=x)
    check_count(group=group)
    if group < 1 or x.shape[-1] % group:
        raise ValueError(f"groups of {group} do not divide rows of {x.shape[-1]}")
    with jax.named_scope("quantize_groups"):
        options = {"group": group, "power_of_two": power_of_two}
        return first_fitting("quantize_groups", GROUP_IMPLEMENTATIONS, implementation, x, **options)


def quantize_nvfp4(
    x: Float[Array, "*rows D"],
    global_scale: Float[Array, ""] | float,
    *,
    implementation: str | Sequence[str] | None = None,
) -> tuple[UInt8[Array, "*rows D/2"], Shaped[Array, "*rows D/16"]]:
    """NVFP4 quantization: four-bit floats (0, 0.5, 1, 1.5, 2, 3, 4, 6 and negatives), an e4m3 scale for each 16 neighbours.

    A block's scale is e4m3 of `global_scale * (largest absolute value / 6)`, its codes those of `x * (global_scale / scale)`; a
    code reads back as its value times `scale / global_scale`. A block whose scale rounds to 0 is all zeros. A NaN, which four bits
    cannot hold, makes its block's scale NaN; infinity saturates.

    Args:
      global_scale: float32, usually 448 * 6 / (the tensor's largest absolute value).
      implementation: a name, names to try in order, or None for the best that takes the call.

    Returns:
      Two codes in a byte, the first in its low half; and scales, row by row (`swizzle_scales` gives the order matrix units read).

    Raises:
      ValueError: 16 does not divide D, `global_scale` is not one number, or x is of another kind than said.
    """
    check_rows(x=x)
    global_scale = jnp.asarray(global_scale, jnp.float32)
    if x.shape[-1] % NVFP4_BLOCK or global_scale.shape != ():
        raise ValueError(
            f"rows of {x.shape[-1]} must be multiples of 16, and global_scale {global_scale.shape} one number"
        )
    with jax.named_scope("quantize_nvfp4"):
        return first_fitting("quantize_nvfp4", NVFP4_IMPLEMENTATIONS, implementation, x, global_scale)


def swizzle_scales(scales: Shaped[Array, "M G"]) -> Shaped[Array, "m g 32 4 4"]:
    """Swizzles NVFP4 block scales to tiles of 128 rows by 4 columns, as newer GPUs' matrix units read them; ragged tiles get zeros.

    The scale of row i and column j comes to `[i // 128, j // 4, i % 32, i % 128 // 32, j % 4]`.
    """
    check_axes(scales=(scales, "M G"))
    rows, columns = scales.shape
    padded = jnp.pad(scales, ((0, -rows % 128), (0, -columns % 4)))
    return padded.reshape(-1, 4, 32, padded.shape[1] // 4, 4).transpose(0, 3, 2, 1, 4)


def column_scales(scales: Shaped[Array, "M G"]) -> Shaped[Array, "G m"]:
    """Scales of `quantize_groups` in column order: those of one group of all rows side by side, which a product of blocks copies at
    once.

    A column begins at a multiple of 16 bytes, as copies into shared memory do: zeros stand behind the last row.
    """
    check_axes(scales=(scales, "M G"))
    per_copy = 16 // scales.dtype.itemsize
    return jnp.pad(scales, ((0, -scales.shape[0] % per_copy), (0, 0))).T
