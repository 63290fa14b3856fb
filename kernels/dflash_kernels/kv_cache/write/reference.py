"""The definitions in plain jnp."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from dflash_kernels.kv_cache.latent.reference import encode_reference
from dflash_kernels.kv_cache.write.formats import fp8, int8_by_channel, int8_by_row


def qkv_write_reference(
    k_pages: Shaped[Array, "P K p H"],
    v_pages: Shaped[Array, "P K p V"],
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
    zero_centered: bool = False,
    beside: int = 0,
) -> tuple[Array, Array, Array, Array | None]:
    """See `qkv_write`."""
    (_, kv_heads, _, head_dim), value_dim = k_pages.shape, v_pages.shape[3]
    keys, values = kv_heads * head_dim, kv_heads * value_dim
    queries = qkv.shape[1] - beside * head_dim - keys - values
    q, k, v, _ = jnp.split(qkv, [queries, queries + keys, queries + keys + values], axis=1)
    q, k, v = (x.reshape(qkv.shape[0], -1, dim) for x, dim in ((q, head_dim), (k, head_dim), (v, value_dim)))
    q = _rotated(_normed(q, q_norm, eps, zero_centered), cos, sin)
    k = _rotated(_normed(k, k_norm, eps, zero_centered), cos, sin)
    return (q, *_write_layer(k_pages, v_pages, k, v, slots, k_scale, v_scale))


def kv_write_reference(
    k_pages: tuple[Shaped[Array, "P K p H"], ...],
    v_pages: tuple[Shaped[Array, "P K p V"], ...],
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
    heads, (head_dim, value_dim) = k_pages[0].shape[1], (pools[0].shape[3] for pools in (k_pages, v_pages))
    both = kv.reshape(kv.shape[0], len(k_pages), heads * (head_dim + value_dim))
    keys, values = jnp.split(both, [heads * head_dim], axis=2)
    keys, values = (x.reshape(*x.shape[:2], heads, -1) for x in (keys, values))
    written = []
    for i, pools in enumerate(zip(k_pages, v_pages, strict=True)):
        norm, *scales = (None if given is None else given[i] for given in (k_norm, k_scale, v_scale))
        k = _rotated(_normed(keys[:, i], norm, eps), cos, sin)
        written.append(_write_layer(*pools, k, values[:, i], slots, *scales))
    new_k, new_v, new_scales = zip(*written, strict=True)
    return new_k, new_v, None if k_scale is None else new_scales


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
    k_pe = _rotated_pairs(k_pe[:, None], cos, sin, interleaved)[:, 0]
    latents = jnp.concatenate([norm * wide.astype(rows.dtype), k_pe], axis=-1)
    stored = encode_reference(latents, latent_pages.dtype, kv_lora_rank=norm.shape[0], scale=scale)
    q_nope, q_pe = jnp.split(q, [q.shape[2] - 2 * cos.shape[1]], axis=-1)
    q = jnp.concatenate([q_nope, _rotated_pairs(q_pe, cos, sin, interleaved)], axis=-1)
    return q, latent_write_reference(latent_pages, stored, slots)


def cache_write_reference(
    k_pages: Shaped[Array, "P K p H"],
    v_pages: Shaped[Array, "P K p V"],
    k: Shaped[Array, "T K H"],
    v: Shaped[Array, "T K V"],
    slots: Int[Array, "T"],
) -> tuple[Shaped[Array, "P K p H"], Shaped[Array, "P K p V"]]:
    """See `cache_write`."""
    return write_rows(k_pages, k, slots), write_rows(v_pages, v, slots)


def latent_write_reference(
    latent_pages: Shaped[Array, "P 1 p C"], latents: Shaped[Array, "T C"], slots: Int[Array, "S"]
) -> Shaped[Array, "P 1 p C"]:
    """See `latent_write`."""
    return write_rows(latent_pages, latents[: slots.shape[0], None], slots)


def _normed(
    x: Float[Array, "T K H"], weight: Float[Array, "H"] | None, eps: float, zero_centered: bool = False
) -> Float[Array, "T K H"]:
    if weight is None:
        return x
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    if zero_centered:
        return (wide * (1.0 + weight.astype(jnp.float32))).astype(x.dtype)
    return weight * wide.astype(x.dtype)


def _rotated(
    x: Float[Array, "T K H"], cos: Float[Array, "T half"] | None, sin: Float[Array, "T half"] | None
) -> Float[Array, "T K H"]:
    if cos is None or sin is None:
        return x
    half, wide = cos.shape[1], x.astype(jnp.float32)
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1).astype(x.dtype)


def _write_layer(
    k_pages: Array, v_pages: Array, k: Array, v: Array, slots: Array, k_scale: Array | None, v_scale: Array | None
) -> tuple[Array, Array, Array | None]:
    if k_scale is not None and k_pages.dtype == jnp.int8:
        k, rows = int8_by_row(k)
        page, row = page_and_row(slots, k_pages)
        k_scale = k_scale.at[page, :, row].set(rows, mode="drop", unique_indices=True)
    elif k_scale is not None:
        k = fp8(k, k_scale, k_pages.dtype)
    if v_scale is not None:
        v = int8_by_channel(v, v_scale) if v_pages.dtype == jnp.int8 else fp8(v, v_scale, v_pages.dtype)
    return write_rows(k_pages, k, slots), write_rows(v_pages, v, slots), k_scale


def _rotated_pairs(
    x: Float[Array, "T N r"], cos: Float[Array, "T half"], sin: Float[Array, "T half"], interleaved: bool
) -> Float[Array, "T N r"]:
    """RoPE of interleaved pairs, dims 2i and 2i + 1, or of halves, dims i and half + i."""
    wide = x.astype(jnp.float32)
    pairs = wide.reshape(*x.shape[:2], -1, 2) if interleaved else wide.reshape(*x.shape[:2], 2, -1).swapaxes(-1, -2)
    (first, second), (cos, sin) = (pairs[..., 0], pairs[..., 1]), (cos[:, None], sin[:, None])
    done = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return (done if interleaved else done.swapaxes(-1, -2)).reshape(x.shape).astype(x.dtype)


def page_and_row(slots: Int[Array, "T"], pool: Array) -> tuple[Int[Array, "T"], Int[Array, "T"]]:
    """Indices of each slot in a pool `[P, K, p, ...]`; of a negative slot one that writes with mode "drop" leave out."""
    # jnp counts negative indices from the end; one past the end is what "drop" drops.
    return jnp.where(slots < 0, pool.shape[0], slots // pool.shape[2]), slots % pool.shape[2]


def write_rows(pool: Shaped[Array, "P K p H"], new: Shaped[Array, "T K H"], slots: Int[Array, "T"]) -> Array:
    """The pool with `new` at its slots, cast to the pool's dtype."""
    page, row = page_and_row(slots, pool)
    new = new.astype(pool.dtype)
    if pool.dtype != jnp.float8_e5m2:
        return pool.at[page, :, row].set(new, mode="drop", unique_indices=True)
    # As bytes: XLA would take the whole pool through float16, which changes NaN.
    held, rows = (lax.bitcast_convert_type(array, jnp.uint8) for array in (pool, new))
    held = held.at[page, :, row].set(rows, mode="drop", unique_indices=True)
    return lax.bitcast_convert_type(held, pool.dtype)
