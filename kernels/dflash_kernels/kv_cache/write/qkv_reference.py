"""The definition in jnp."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from dflash_kernels.kv_cache.write.formats import fp8, int8_by_channel, int8_by_row
from dflash_kernels.kv_cache.write.reference import page_and_row, write_rows


def qkv_write_reference(
    k_pages: Shaped[Array, "P K p H"],
    v_pages: Shaped[Array, "P K p H"],
    qkv: Float[Array, "T F"],
    slots: Int[Array, "T"],
    cos: Float[Array, "T half"] | None,
    sin: Float[Array, "T half"] | None,
    q_norm: Float[Array, "H"] | None,
    k_norm: Float[Array, "H"] | None,
    k_scale: Float[Array, "..."] | None,
    v_scale: Float[Array, "..."] | None,
    *,
    eps: float,
) -> tuple[Array, Array, Array, Array | None]:
    """See `qkv_write`."""
    kv_heads, head_dim = k_pages.shape[1], k_pages.shape[3]
    heads = qkv.reshape(qkv.shape[0], -1, head_dim)
    q, k, v = jnp.split(heads, [heads.shape[1] - 2 * kv_heads, heads.shape[1] - kv_heads], axis=1)
    q = _turned(_normed(q, q_norm, eps), cos, sin)
    k = _turned(_normed(k, k_norm, eps), cos, sin)
    return (q, *_write(k_pages, v_pages, k, v, slots, k_scale, v_scale))


def kv_write_reference(
    k_pages: tuple[Shaped[Array, "P K p H"], ...],
    v_pages: tuple[Shaped[Array, "P K p H"], ...],
    kv: Float[Array, "T F"],
    slots: Int[Array, "T"],
    cos: Float[Array, "T half"] | None,
    sin: Float[Array, "T half"] | None,
    k_norm: tuple[Float[Array, "H"], ...] | None,
    k_scale: tuple[Float[Array, "..."], ...] | None,
    v_scale: tuple[Float[Array, "..."], ...] | None,
    *,
    eps: float,
) -> tuple[tuple[Array, ...], tuple[Array, ...], tuple[Array, ...] | None]:
    """See `kv_write`."""
    both = kv.reshape(kv.shape[0], len(k_pages), 2, *k_pages[0].shape[1::2])
    written = []
    for i, pools in enumerate(zip(k_pages, v_pages, strict=True)):
        norm, *scales = (None if given is None else given[i] for given in (k_norm, k_scale, v_scale))
        k = _turned(_normed(both[:, i, 0], norm, eps), cos, sin)
        written.append(_write(*pools, k, both[:, i, 1], slots, *scales))
    new_k, new_v, new_scales = zip(*written, strict=True)
    return new_k, new_v, None if k_scale is None else new_scales


def _normed(x: Float[Array, "T K H"], weight: Float[Array, "H"] | None, eps: float) -> Float[Array, "T K H"]:
    if weight is None:
        return x
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return weight * wide.astype(x.dtype)


def _turned(
    x: Float[Array, "T K H"], cos: Float[Array, "T half"] | None, sin: Float[Array, "T half"] | None
) -> Float[Array, "T K H"]:
    if cos is None or sin is None:
        return x
    half, wide = cos.shape[1], x.astype(jnp.float32)
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1).astype(x.dtype)


def _write(
    k_pages: Array, v_pages: Array, k: Array, v: Array, slots: Array, k_scale: Array | None, v_scale: Array | None
) -> tuple[Array, Array, Array | None]:
    if k_scale is not None and v_scale is not None:
        if k_pages.dtype == jnp.int8:
            k, rows = int8_by_row(k)
            v = int8_by_channel(v, v_scale)
            page, row = page_and_row(slots, k_pages)
            k_scale = k_scale.at[page, :, row].set(rows, mode="drop", unique_indices=True)
        else:
            k, v = fp8(k, k_scale), fp8(v, v_scale)
    return write_rows(k_pages, k, slots), write_rows(v_pages, v, slots), k_scale
