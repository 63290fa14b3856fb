"""The definition in jnp."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_kernels.quantize.reference import quantize_tensor_reference


def merge_states_reference(
    prefix_out: Float[Array, "*rows H"],
    prefix_lse: Float[Array, "*rows"],
    suffix_out: Float[Array, "*rows H"],
    suffix_lse: Float[Array, "*rows"],
    *,
    prefix_rows: int | Int[Array, ""] | None = None,
    out_scale: Float[Array, ""] | None = None,
) -> tuple[Float[Array, "*rows H"], Float[Array, "*rows"]]:
    """See `merge_states`."""
    wide = jnp.promote_types(prefix_out.dtype, jnp.float32)
    lses = [_empty_as_minus_inf(lse.astype(wide)) for lse in (prefix_lse, suffix_lse)]
    if prefix_rows is not None:
        rows = jnp.arange(prefix_lse.shape[0]).reshape(-1, *[1] * (prefix_lse.ndim - 1))
        lses[0] = jnp.where(rows < prefix_rows, lses[0], -jnp.inf)
    top = jnp.maximum(*lses)
    top = jnp.where(top == -jnp.inf, 0.0, top)
    weights = [jnp.exp(lse - top) for lse in lses]
    total = weights[0] + weights[1]
    out = jnp.zeros(prefix_out.shape, wide)
    for part, weight in zip((prefix_out, suffix_out), weights, strict=True):
        share = (weight / jnp.where(total > 0, total, 1.0))[..., None]
        # Chosen, not multiplied: an empty part may hold NaN, and 0 * NaN is NaN.
        out += jnp.where(share > 0, part.astype(wide) * share, 0.0)
    out = out.astype(prefix_out.dtype) if out_scale is None else quantize_tensor_reference(out, out_scale)
    return out, (top + jnp.log(total)).astype(prefix_lse.dtype)


def _empty_as_minus_inf(lse: Float[Array, "*rows"]) -> Float[Array, "*rows"]:
    return jnp.where(jnp.isnan(lse) | (lse == jnp.inf), -jnp.inf, lse)
