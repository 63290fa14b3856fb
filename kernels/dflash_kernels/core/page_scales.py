"""Scales of pages in eight bits, as operations take them and as their implementations get them."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from dflash_kernels.core.validation import is_wide


def fitting_scale(
    scale: float | Array | None, pages: Array, name: str, int8_shape: tuple[int, ...]
) -> Float[Array, "..."] | None:
    """Float32 scales: `[K]` with float8_e4m3fn pages, `int8_shape` with int8 pages, None with others.

    Raises:
      ValueError: they do not fit the pages' dtype, or it is none that pages have.
    """
    kv_heads = pages.shape[1]
    shape = None if scale is None else jnp.shape(scale)
    if pages.dtype == jnp.int8:
        if scale is None or shape != int8_shape:
            raise ValueError(f"int8 pages need {name} of {int8_shape}, not {shape}")
        return jnp.asarray(scale, jnp.float32)
    if pages.dtype == jnp.float8_e4m3fn:
        if shape not in (None, (), (kv_heads,)):
            raise ValueError(f"float8_e4m3fn pages take a scalar {name} or one of ({kv_heads},), not {shape}")
        return jnp.broadcast_to(jnp.asarray(1.0 if scale is None else scale, jnp.float32), (kv_heads,))
    if not is_wide(pages):
        raise ValueError(f"pages are bfloat16, float16, float32, float8_e4m3fn or int8, not {pages.dtype}")
    if scale is not None:
        raise ValueError(f"{name} is for float8_e4m3fn and int8 pages; these are {pages.dtype}")
    return None
