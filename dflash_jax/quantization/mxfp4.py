"""MXFP4: numbers of four bits (E2M1) in blocks of 32 with a power of two (E8M0) for each block, as gpt-oss's experts are released.

A block is 32 numbers along a matrix's columns in 16 bytes, the first of each two in the lower half of its byte. A number is a sign
and one of 0, 0.5, 1, 1.5, 2, 3, 4 and 6; a block's numbers are multiplied with 2 to the power of its scale minus 127. Source: "OCP
Microscaling Formats (MX) Specification", version 1.0, sections 5.3 and 6.3.
"""

from dataclasses import dataclass, field
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

BLOCK = 32  # numbers that share a scale
_INFINITE = 255  # float32's exponent of numbers that are too large


@no_type_check  # JAX rebuilds pytrees with shapes and placeholders in place of arrays
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mxfp4:
    """A matrix `[F, D]` in four bits, as it was released.

    Attributes:
      blocks: two numbers in a byte.
      scales: of each block.
      dtype: of what is read from it.
    """

    blocks: UInt8[Array, "F D/32 16"]
    scales: UInt8[Array, "F D/32"]
    dtype: jnp.dtype = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        return self.scales.shape[0], self.scales.shape[1] * BLOCK

    def __getitem__(self, which: Any) -> Any:
        """The matrix itself, as a module's parameter is read: `...` alone."""
        if which is not Ellipsis:
            raise TypeError(
                f"a matrix in MXFP4 is read whole, with [...], got {which!r}; dequantize it for some of its rows"
            )
        return self


def dequantize(blocks: UInt8[Array, "*F n 16"], scales: UInt8[Array, "*F n"], dtype: Any) -> Float[Array, "*F D"]:
    """The numbers, exactly; those beyond `dtype` are infinite, and in float16 those below it are rounded.

    Bits are put together as integers: XLA may flush the smallest numbers of a product to zero.
    """
    codes = jnp.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, BLOCK).astype(jnp.int32)
    sign, size = codes >> 3, codes & 7
    # 0.5 is 2 ** -1; from 1 on two bits of exponent and one of mantissa are in their places.
    mantissa = jnp.where(size > 1, size & 1, 0)
    exponent = (size >> 1) - 1 + scales[..., None].astype(jnp.int32)  # both biases are float32's
    normal = (exponent << 23) | (mantissa << 22)
    # Exponents of 0 and -1: a shorter mantissa with its leading one.
    small = ((2 | mantissa) << 21) >> jnp.clip(-exponent, 0, 1)
    bits = jnp.where(exponent > 0, normal, small)
    bits = jnp.where(exponent >= _INFINITE, _INFINITE << 23, bits)
    bits = jnp.where(size == 0, 0, bits) | (sign << 31)
    bits = bits.reshape(*scales.shape[:-1], -1)
    if jnp.dtype(dtype) == jnp.bfloat16:
        return jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
    return jax.lax.bitcast_convert_type(bits, jnp.float32).astype(dtype)


_whole = jax.jit(dequantize, static_argnames="dtype")


def dequantize_weights(params: dict[str, Any]) -> dict[str, Any]:
    """A model's parameters with its matrices in MXFP4 as numbers of their dtype, in `params` itself: no two copies at a time."""
    for name in [name for name, one in params.items() if isinstance(one, Mxfp4)]:
        matrix: Mxfp4 = params.pop(name)
        params[name] = _whole(matrix.blocks, matrix.scales, matrix.dtype)
        del matrix  # gone before the next one is made
    return params
