"""The definition in jnp: gather the named rows as they are stored, unpack them, softmax in float32."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from dflash_kernels.kv_cache.latent.reference import decode_reference

WORKSPACE = 256 * 2**20  # bytes of gathered rows and scores that are alive at a time


def named_rows(
    latent_pages: Shaped[Array, "P 1 p stored"],
    slots: Int[Array, "B T K"],
    dtype: Any,
    *,
    kv_lora_rank: int,
    scale: Float[Array, ""],
) -> tuple[Float[Array, "B T K C"], Bool[Array, "B T K"]]:
    """Rows of the pool as numbers, any row where none is named, and which are."""
    pages, _, p, stored = latent_pages.shape
    held = (slots >= 0) & (slots < pages * p)
    rows = latent_pages.reshape(pages * p, stored)[jnp.where(held, slots, 0)]
    return decode_reference(rows, dtype, kv_lora_rank=kv_lora_rank, scale=scale), held


def mla_selected_reference(
    q: Float[Array, "B T N C"],
    latent_pages: Shaped[Array, "P 1 p stored"],
    slots: Int[Array, "B T K"],
    *,
    kv_lora_rank: int,
    scale: float | Float[Array, ""],
    latent_scale: Float[Array, ""],
) -> tuple[Float[Array, "B T N R"], Float[Array, "B T N"]]:
    """See `mla_selected_attention`."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    precision = jax.lax.Precision.HIGHEST if q.dtype == wide else None
    latents, held = named_rows(latent_pages, slots, q.dtype, kv_lora_rank=kv_lora_rank, scale=latent_scale)
    # A row that is named by nobody can hold NaN, and 0 * NaN is NaN: it is replaced, not weighted.
    latents = jnp.where(held[..., None], latents, jnp.zeros((), latents.dtype))
    scores = jnp.einsum("btnc,btkc->btnk", q, latents, precision=precision, preferred_element_type=wide) * scale
    scores = jnp.where(held[:, :, None], scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    share = (weights / jnp.where(total > 0, total, 1.0)).astype(latents.dtype)
    values = latents[..., :kv_lora_rank]
    out = jnp.einsum("btnk,btkr->btnr", share, values, precision=precision, preferred_element_type=wide)
    return out.astype(q.dtype), (top + jnp.log(total))[..., 0]
