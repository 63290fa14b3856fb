"""The definition in plain jnp."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from dflash_kernels.core.layouts import interleave_columns


def quantized_linear_reference(
    x: Float[Array, "M D"], values: Shaped[Array, "F D"], scales: Float[Array, "F"], *, paired: bool = False
) -> Float[Array, "M F"]:
    """See `quantized_linear`."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    x = interleave_columns(x) if paired else x
    wide = jnp.einsum("md,fd->mf", x, values.astype(x.dtype), precision=precision, preferred_element_type=jnp.float32)
    return (wide * scales).astype(x.dtype)
