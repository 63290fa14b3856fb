"""The definition in plain jnp."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def grouped_linear_reference(
    x: Float[Array, "M D"],
    weight: Float[Array, "G F D"],
    groups: Int[Array, "blocks"],
    count: Int[Array, ""],
    *,
    gated: bool,
) -> Float[Array, "M out"]:
    """See `grouped_linear`; what lies in unused blocks is multiplied too."""
    del count
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    blocks = x.reshape(groups.shape[0], -1, x.shape[1])
    wide = jnp.einsum("brd,bfd->brf", blocks, weight[groups], precision=precision, preferred_element_type=jnp.float32)
    if gated:
        gate, up = jnp.split(wide, 2, axis=-1)
        wide = jax.nn.silu(gate) * up
    return wide.reshape(x.shape[0], -1).astype(x.dtype)
