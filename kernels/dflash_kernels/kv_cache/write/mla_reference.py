"""The definition in jnp."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from dflash_kernels.kv_cache.latent.reference import encode_reference
from dflash_kernels.kv_cache.write.reference import latent_write_reference


def mla_write_reference(
    latent_pages: Shaped[Array, "P 1 p stored"],
    rows: Float[Array, "T C"],
    q: Float[Array, "T N H"],
    slots: Int[Array, "T"],
    cos: Float[Array, "T half"],
    sin: Float[Array, "T half"],
    norm: Float[Array, "R"],
    scale: Float[Array, ""],
    *,
    eps: float,
    interleaved: bool,
) -> tuple[Float[Array, "T N H"], Shaped[Array, "P 1 p stored"]]:
    """See `mla_write`."""
    kv_c, k_pe = jnp.split(rows, [norm.shape[0]], axis=-1)
    wide = kv_c.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    k_pe = turned(k_pe[:, None], cos, sin, interleaved)[:, 0]
    latents = jnp.concatenate([norm * wide.astype(rows.dtype), k_pe], axis=-1)
    stored = encode_reference(latents, latent_pages.dtype, kv_lora_rank=norm.shape[0], scale=scale)
    q_nope, q_pe = jnp.split(q, [q.shape[2] - 2 * cos.shape[1]], axis=-1)
    q = jnp.concatenate([q_nope, turned(q_pe, cos, sin, interleaved)], axis=-1)
    return q, latent_write_reference(latent_pages, stored, slots)


def turned(
    x: Float[Array, "T N r"], cos: Float[Array, "T half"], sin: Float[Array, "T half"], interleaved: bool
) -> Float[Array, "T N r"]:
    """Dims 2i and 2i + 1 turn together, or dims i and half + i."""
    wide = x.astype(jnp.float32)
    pairs = wide.reshape(*x.shape[:2], -1, 2) if interleaved else wide.reshape(*x.shape[:2], 2, -1).swapaxes(-1, -2)
    (first, second), (cos, sin) = (pairs[..., 0], pairs[..., 1]), (cos[:, None], sin[:, None])
    done = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return (done if interleaved else done.swapaxes(-1, -2)).reshape(x.shape).astype(x.dtype)
