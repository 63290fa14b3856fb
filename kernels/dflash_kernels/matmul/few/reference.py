"""The definition in plain jnp."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def few_linear_reference(
    x: Float[Array, "M D"], weight: Float[Array, "F D"], bias: Float[Array, "F"] | None, *, parts: bool
) -> Float[Array, "M F"] | Float[Array, "S M F"]:
    """See `few_linear`."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    product = jnp.einsum("md,fd->mf", x, weight, precision=precision, preferred_element_type=jnp.float32)
    product = product if bias is None else product + bias.astype(jnp.float32)
    return product[None] if parts else product.astype(x.dtype)
