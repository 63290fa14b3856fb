"""Quantized keys and values in plain jnp: what a pool keeps for a number. Scales and quotients are float32."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_kernels.quantize.reference import divide, to_float8

INT8_MAX = 127.0
INT8_FLOOR = 1e-12  # of a row's largest value, so that a row of zeros has a scale to divide by


def fp8(x: Float[Array, "T K H"], scale: Float[Array, "..."], dtype: Any = jnp.float8_e4m3fn) -> Float[Array, "T K H"]:
    """`x / scale` in a float8 dtype, cut to its range. `scale`: one number, or one for each head `[K]`."""
    return to_float8(divide(x.astype(jnp.float32), scale.astype(jnp.float32).reshape(-1, 1)), dtype)


def int8_by_row(x: Float[Array, "T K H"]) -> tuple[Int[Array, "T K H"], Float[Array, "T K"]]:
    """Symmetric int8 of each row and the scale it was divided by: its largest magnitude over 127. Ties round to even."""
    wide = x.astype(jnp.float32)
    scale = divide(jnp.maximum(jnp.max(jnp.abs(wide), axis=-1), INT8_FLOOR), jnp.float32(INT8_MAX))
    return _rounded(divide(wide, scale[..., None])), scale


def int8_by_channel(x: Float[Array, "T K H"], scale: Float[Array, "K H"]) -> Int[Array, "T K H"]:
    """Symmetric int8 of `x / scale` for a scale known beforehand; what is past 127 scales is cut."""
    return _rounded(divide(x.astype(jnp.float32), scale))


def _rounded(wide: Float[Array, "T K H"]) -> Int[Array, "T K H"]:
    return jnp.clip(jnp.round(wide), -INT8_MAX, INT8_MAX).astype(jnp.int8)
