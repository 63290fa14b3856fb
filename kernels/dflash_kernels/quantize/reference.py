"""The definitions in plain jnp. Arithmetic is float32, rounding to nearest with ties to even, whatever the input's dtype."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped, UInt8

E4M3, E2M1 = jnp.float8_e4m3fn, jnp.float4_e2m1fn
E4M3_MAX, E2M1_MAX = 448.0, 6.0
# Smallest largest value a group is scaled by, so that a group of zeros has a scale.
GROUP_FLOOR = 1e-10
ROW_FLOOR = 2.0**-100  # the same for a row with a scale of its own
NVFP4_BLOCK = 16


def divide(x: Float[Array, "*s"], by: Float[Array, "..."]) -> Float[Array, "*s"]:
    """`x / by` as IEEE rounds it: a float32 quotient, corrected by its remainder in float64.

    Compiled float32 divisions are off in the last place, by reciprocals that are multiplied with or by fast instructions; a float64
    division between conversions from and to float32 is compiled into one of those.
    """
    with jax.enable_x64(True):
        near = x / by
        wide, wide_by = near.astype(jnp.float64), by.astype(jnp.float64)
        remainder = x.astype(jnp.float64) - wide * wide_by  # exact: a product of 24 bits by 24
        exact = (wide + remainder / wide_by).astype(jnp.float32)
        return jnp.where(jnp.isfinite(near) & (near != 0), exact, near)  # zeros keep their sign


def to_e4m3(x: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """The nearest e4m3 value; past 448 and at infinity it is 448, NaN stays NaN."""
    return to_float8(x, E4M3)


def to_float8(x: Float[Array, "*s"], dtype: Any) -> Float[Array, "*s"]:
    """The nearest value of a float8 dtype; past its largest one and at infinity it is that, NaN stays NaN."""
    most = float(jnp.finfo(dtype).max)
    return jnp.where(jnp.isnan(x), x, jnp.clip(x, -most, most)).astype(dtype)


def from_e4m3(x: Shaped[Array, "*s"]) -> Float[Array, "*s"]:
    """e4m3 values that are no NaN, in float32, from their bits: compilers drop a conversion to eight bits and back."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint8).astype(jnp.int32)
    exponent, mantissa = (bits >> 3) & 15, (bits & 7).astype(jnp.float32)
    power = jax.lax.bitcast_convert_type((exponent - 10 + 127) << 23, jnp.float32)
    size = jnp.where(exponent == 0, mantissa / 512, (8 + mantissa) * power)
    return jnp.where(bits < 128, size, -size)


def largest(x: Float[Array, "*s D"]) -> Float[Array, "*s 1"]:
    """Largest absolute value of each row, NaN where there is one: minima and maxima of compiled programs may lose it."""
    top = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    return jnp.where(jnp.isnan(x).any(axis=-1, keepdims=True), jnp.nan, top)


def power_of_two_above(x: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """The smallest power of two that is at least `x > 0`, from the bits: log2 rounds."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    up = (bits + 0x007F_FFFF) & 0x7F80_0000
    return jnp.where(jnp.isfinite(x), jax.lax.bitcast_convert_type(up, jnp.float32), x)


def quantize_tensor_reference(x: Float[Array, "*rows D"], scale: Float[Array, ""]) -> Float[Array, "*rows D"]:
    """See `quantize_tensor`."""
    return to_e4m3(x.astype(jnp.float32) * (1 / scale.astype(jnp.float32)))


def quantize_groups_reference(
    x: Float[Array, "*rows D"], *, group: int, power_of_two: bool
) -> tuple[Float[Array, "*rows D"], Float[Array, "*rows G"]]:
    """See `quantize_groups`."""
    wide = x.astype(jnp.float32).reshape(*x.shape[:-1], x.shape[-1] // group, group)
    top = largest(wide)
    scale = divide(jnp.where(top < GROUP_FLOOR, GROUP_FLOOR, top), jnp.float32(E4M3_MAX))
    scale = power_of_two_above(scale) if power_of_two else scale
    return to_e4m3(divide(wide, scale)).reshape(x.shape), scale[..., 0]


def quantize_nvfp4_reference(
    x: Float[Array, "*rows D"], global_scale: Float[Array, ""]
) -> tuple[UInt8[Array, "*rows D/2"], Shaped[Array, "*rows D/16"]]:
    """See `quantize_nvfp4`."""
    wide = x.astype(jnp.float32).reshape(*x.shape[:-1], x.shape[-1] // NVFP4_BLOCK, NVFP4_BLOCK)
    global_scale = global_scale.astype(jnp.float32)
    # A barrier, or the two factors would be multiplied first, whose product rounds ties of e4m3 elsewhere.
    share = jax.lax.optimization_barrier(largest(wide)[..., 0] * jnp.float32(1 / E2M1_MAX))
    scales = to_e4m3(global_scale * share)
    read = from_e4m3(scales)
    inverse = jnp.where(read > 0, divide(jnp.broadcast_to(global_scale, read.shape), jnp.where(read > 0, read, 1)), 0)
    # Infinity times 0 would be NaN, which four bits cannot hold.
    scaled = jnp.clip(wide, -jnp.finfo(jnp.float32).max, jnp.finfo(jnp.float32).max) * inverse[..., None]
    codes = e2m1_codes(scaled).reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
    return codes[..., 0] | (codes[..., 1] << 4), scales


def e2m1_codes(x: Float[Array, "*s"]) -> UInt8[Array, "*s"]:
    """Sign and index among 0, 0.5, 1, 1.5, 2, 3, 4 and 6 of the nearest value; a tie goes to the even index."""
    size = jnp.abs(x)
    index = jnp.zeros(x.shape, jnp.uint8)
    for border, tie_goes_up in zip((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), (False, True) * 4, strict=False):
        index += (size >= border) if tie_goes_up else (size > border)
    return index | (jnp.signbit(x).astype(jnp.uint8) << 3)
