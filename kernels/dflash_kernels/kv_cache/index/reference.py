"""The definition in plain jnp."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dflash_kernels.quantize.reference import E4M3_MAX, divide, largest, power_of_two_above, to_e4m3

FLOOR = 1e-4  # smallest largest value that a row is scaled by


def hadamard(width: int) -> Float[np.ndarray, "E E"]:
    """Sylvester's matrix of 1 and -1, its own inverse but for a factor of `width`."""
    matrix = np.ones((1, 1), np.float32)
    while matrix.shape[0] < width:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def index_encode_reference(x: Float[Array, "*rows E"]) -> tuple[Float[Array, "*rows E"], Float[Array, "*rows"]]:
    """See `index_encode`."""
    width = x.shape[-1]
    turned = jnp.einsum("...e,ef->...f", x.astype(jnp.float32), hadamard(width), precision=jax.lax.Precision.HIGHEST)
    # Signs first, then the factor: products with signs alone are exact.
    turned = jax.lax.optimization_barrier(turned) * jnp.float32(width**-0.5)
    top = largest(turned)
    scale = power_of_two_above(divide(jnp.where(top < FLOOR, FLOOR, top), jnp.float32(E4M3_MAX)))
    return to_e4m3(turned / scale), scale[..., 0]
