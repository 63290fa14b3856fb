"""A layer's quantized output and the product that reads it: the format is told by dtype and scales of what it is put into.

    output            scale          block_scales                  format
    float8 [M, D]     one number     -                             float8, `value * scale`
    float8 [M, D]     -              float32 or uint8 [M, D / g]   float8 in groups of g = 64 or 128; uint8: bare exponents (E8M0)
    uint8 [M, D / 2]  one number     float8, swizzled              nvfp4, `value * block scale / scale`

Every row is on its own scales or on a given one: what padding rows hold does not reach the others.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dflash_kernels.core.layouts import interleave_columns
from dflash_kernels.core.validation import check_axes, check_floats
from dflash_kernels.matmul.float8.api import float8_dense
from dflash_kernels.matmul.float8.reference import Float8Rows
from dflash_kernels.matmul.weight_only.api import quantized_linear
from dflash_kernels.quantize.api import (
    column_scales,
    dequantize_tensor,
    quantize_groups,
    quantize_nvfp4,
    quantize_tensor,
    swizzle_scales,
)
from dflash_kernels.quantize.reference import E4M3, NVFP4_BLOCK

GROUPS = (64, 128)
# Rows from which on a product of float8 with float8 is worth more than one that widens both: fewer wait for the weights alone.
_MANY_ROWS = 64

type Kind = Literal["fp8", "fp8_groups", "nvfp4"]


class QuantizedOutput(NamedTuple):
    """Rows in eight or four bits with their scales, as the table of the module says."""

    values: Array
    scale: Array | None = None
    block_scales: Array | None = None


def output_format(width: int, output: Any, scale: Any, block_scales: Any, *, column_order: bool) -> tuple[Kind, int]:
    """The format that is told, and how many neighbours of a row of `width` share a scale.

    Raises:
      ValueError: these dtypes and scales tell none.
    """
    told = f"an output of {output.dtype} {output.shape} for rows of {width}"
    if block_scales is None:
        if scale is None or output.dtype != E4M3:
            raise ValueError(f"{told} tells no format: float8_e4m3fn takes a scale or block_scales, uint8 both")
        return "fp8", width
    if output.dtype == E4M3:
        if scale is not None:
            raise ValueError(f"{told} takes block_scales without a scale, or a scale alone")
        groups = block_scales.shape[0 if column_order else -1]
        if width % max(groups, 1) or width // max(groups, 1) not in GROUPS:
            raise ValueError(f"{told} must have groups of 64 or 128, block_scales {block_scales.shape} are of {groups}")
        if block_scales.dtype not in (jnp.float32, jnp.uint8):
            raise ValueError(f"block_scales are float32, or uint8 for bare exponents, not {block_scales.dtype}")
        return "fp8_groups", width // groups
    if output.dtype != jnp.uint8 or scale is None:
        raise ValueError(f"{told} with block_scales must be float8_e4m3fn, or uint8 with a scale (nvfp4)")
    return "nvfp4", NVFP4_BLOCK


def quantize_output(
    x: Float[Array, "M D"],
    output: Any,
    *,
    scale: Float[Array, ""] | float | None = None,
    block_scales: Any = None,
    column_order: bool = False,
) -> QuantizedOutput:
    """Quantizes rows into the format that an output and its scales tell; see the module's table.

    Args:
      output: an array or `jax.ShapeDtypeStruct`, read for shape and dtype alone.
      scale: of float8 values, or the global scale of nvfp4, above 0.
      block_scales: as `output`, of scales that are found here.
      column_order: scales of groups are `[D / g, m]`, see `column_scales`.

    Raises:
      ValueError: dtypes and scales tell no format, or shapes do not agree.
    """
    check_axes(x=(x, "M D"), output=(output, "M D"))
    check_floats(x=x)
    kind, group = output_format(x.shape[1], output, scale, block_scales, column_order=column_order)
    given = jnp.asarray(1.0 if scale is None else scale, jnp.float32)
    with jax.named_scope("quantize_output"):
        if kind == "fp8":
            made = QuantizedOutput(quantize_tensor(x, given), given)
        elif kind == "nvfp4":
            values, scales = quantize_nvfp4(x, given)
            made = QuantizedOutput(values, given, swizzle_scales(scales))
        else:
            bare = block_scales.dtype == jnp.uint8
            values, scales = quantize_groups(x, group=group, power_of_two=bare)
            if bare:  # the exponent's byte of a float32 is E8M0, NaN's and infinity's its NaN
                scales = (jax.lax.bitcast_convert_type(scales, jnp.uint32) >> 23).astype(jnp.uint8)
            made = QuantizedOutput(values, None, column_scales(scales) if column_order else scales)
    wanted = output.shape, None if block_scales is None else block_scales.shape
    found = made.values.shape, None if made.block_scales is None else made.block_scales.shape
    if wanted != found:
        raise ValueError(
            f"rows {x.shape} as {kind} are {found[0]} with block_scales {found[1]}, not {wanted[0]} and {wanted[1]}"
        )
    return made


def dequantize_output(x: QuantizedOutput, width: int, *, column_order: bool = False) -> Float[Array, "M D"]:
    """Values of `quantize_output`'s rows in float32, without nvfp4's global scale: exact, also in bfloat16 where scales are
    bare exponents or e4m3."""
    kind, group = output_format(width, *x, column_order=column_order)
    rows = x.values.shape[0]
    if kind == "fp8":
        return dequantize_tensor(x.values)
    assert x.block_scales is not None
    if kind == "nvfp4":
        tiles = x.block_scales.transpose(0, 3, 2, 1, 4)
        scales = tiles.reshape(tiles.shape[0] * 128, -1)[:rows, : width // group]
        scales = dequantize_tensor(scales)
        codes = jnp.stack([x.values & 15, x.values >> 4], axis=-1).reshape(rows, width)
        size = jnp.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], jnp.float32)[codes & 7]
        values = jnp.where(codes < 8, size, -size)
    else:
        scales = x.block_scales[:, :rows].T if column_order else x.block_scales
        if scales.dtype == jnp.uint8:
            power = jax.lax.bitcast_convert_type(scales.astype(jnp.uint32) << 23, jnp.float32)
            scales = jnp.where(scales == 255, jnp.nan, power)
        values = dequantize_tensor(x.values)
    return (values.reshape(rows, -1, group) * scales[..., None]).reshape(rows, width)


def output_linear(
    x: QuantizedOutput,
    weight: Float[Array, "F D"],
    scales: Float[Array, "F"],
    dtype: Any = jnp.bfloat16,
    *,
    paired: bool = False,
    column_order: bool = False,
) -> Float[Array, "M F"]:
    """W8A8 and W8A4 product of `quantize_output`'s rows: `y_mf = scales_f sum_d x_md weight_fd` in `dtype`, sums in float32.

    Many float8 rows on one scale go through `float8_dense`. Others are widened first, which is exact but for float32 scales of
    groups in sixteen bits, and multiplied by `quantized_linear`: Hopper has no matrix unit for four bits, and no product here takes
    a scale for each group.

    Args:
      weight: float8_e4m3fn, with interleaved columns where `paired`.
      scales: float32 row scales of the weight.
      column_order: as of `quantize_output`.

    Raises:
      ValueError: as `quantize_output`, or the weight does not fit.
    """
    check_axes(weight=(weight, "F D"), scales=(scales, "F"))
    kind, _ = output_format(weight.shape[1], *x, column_order=column_order)
    scale = jnp.float32(1) if x.scale is None else x.scale
    with jax.named_scope("output_linear"):
        if kind == "fp8" and len(x.values) >= _MANY_ROWS:
            values = interleave_columns(x.values) if paired else x.values
            return float8_dense(Float8Rows(values, jnp.broadcast_to(scale, values.shape[:1])), weight, scales, dtype)
        wide = dequantize_output(x, weight.shape[1], column_order=column_order)
        exact = x.block_scales is None or x.block_scales.dtype != jnp.float32
        wide = wide.astype(jnp.bfloat16) if dtype == jnp.bfloat16 and exact else wide
        scales = scales / scale if kind == "nvfp4" else scales * scale
        return quantized_linear(wide, weight, scales, paired=paired).astype(dtype)
