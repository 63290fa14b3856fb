"""The definitions in plain jnp."""

import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped, UInt8

from dflash_kernels.quantize.reference import E4M3, E4M3_MAX, divide, largest, to_e4m3

LATENT_TILE = 128
_SMALLEST_SCALE = jnp.finfo(jnp.float32).tiny


def packed_latent_width(kv_lora_rank: int, rotated: int) -> int:
    """Bytes of a packed row: e4m3 latent, a float32 scale for each 128 of it, bfloat16 rotated part. 656 for 512 and 64."""
    return kv_lora_rank + 4 * (kv_lora_rank // LATENT_TILE) + 2 * rotated


def pack_reference(latents: Float[Array, "*rows C"], *, kv_lora_rank: int) -> UInt8[Array, "*rows bytes"]:
    """See `latent_pack`."""
    rows = latents.shape[:-1]
    tiles = latents[..., :kv_lora_rank].astype(jnp.float32).reshape(*rows, kv_lora_rank // LATENT_TILE, LATENT_TILE)
    scales = divide(largest(tiles), jnp.float32(E4M3_MAX))
    scales = jnp.where(scales < _SMALLEST_SCALE, _SMALLEST_SCALE, scales)
    parts = to_e4m3(divide(tiles, scales)), scales[..., 0], latents[..., kv_lora_rank:].astype(jnp.bfloat16)
    return jnp.concatenate([_bytes(part, rows) for part in parts], axis=-1)


def _bytes(part: Array, rows: tuple[int, ...]) -> UInt8[Array, "*rows bytes"]:
    """Sizes in full: nothing follows from the rest where there are no rows."""
    width = math.prod(part.shape[len(rows) :]) * part.dtype.itemsize
    return jax.lax.bitcast_convert_type(part, jnp.uint8).reshape(*rows, width)


def unpack_reference(packed: UInt8[Array, "*rows bytes"], *, kv_lora_rank: int) -> Float[Array, "*rows C"]:
    """See `latent_unpack`; float32."""
    rows, end = packed.shape[:-1], kv_lora_rank + 4 * (kv_lora_rank // LATENT_TILE)
    tiles = kv_lora_rank // LATENT_TILE
    codes = jax.lax.bitcast_convert_type(packed[..., :kv_lora_rank], E4M3).reshape(*rows, tiles, LATENT_TILE)
    scales = jax.lax.bitcast_convert_type(packed[..., kv_lora_rank:end].reshape(*rows, tiles, 4), jnp.float32)
    rotated = jax.lax.bitcast_convert_type(
        packed[..., end:].reshape(*rows, (packed.shape[-1] - end) // 2, 2), jnp.bfloat16
    )
    latent = (codes.astype(jnp.float32) * scales[..., None]).reshape(*rows, kv_lora_rank)
    return jnp.concatenate([latent, rotated.astype(jnp.float32)], axis=-1)


def encode_reference(
    latents: Float[Array, "*rows C"], pool_dtype: DTypeLike, *, kv_lora_rank: int, scale: Float[Array, ""]
) -> Shaped[Array, "*rows stored"]:
    """See `latent_encode`."""
    if pool_dtype == jnp.uint8:
        return pack_reference(latents, kv_lora_rank=kv_lora_rank)
    if pool_dtype == E4M3:
        return to_e4m3(divide(latents.astype(jnp.float32), scale.astype(jnp.float32)))
    return latents.astype(pool_dtype)


def decode_reference(
    stored: Shaped[Array, "*rows stored"], dtype: DTypeLike, *, kv_lora_rank: int, scale: Float[Array, ""]
) -> Float[Array, "*rows C"]:
    """See `latent_decode`."""
    if stored.dtype == jnp.uint8:
        return unpack_reference(stored, kv_lora_rank=kv_lora_rank).astype(dtype)
    if stored.dtype == E4M3:
        return (stored.astype(jnp.float32) * scale.astype(jnp.float32)).astype(dtype)
    return stored.astype(dtype)


def latent_gather_reference(
    latent_pages: Shaped[Array, "P 1 p stored"],
    page_table: Int[Array, "B W"],
    starts: Int[Array, "B"],
    lens: Int[Array, "B"],
    *,
    rows: int,
) -> Shaped[Array, "rows stored"]:
    """See `latent_gather`."""
    pages, _, p, _ = latent_pages.shape
    ends = jnp.cumsum(lens)
    row = jnp.arange(rows)
    sequence = jnp.minimum(jnp.searchsorted(ends, row, side="right"), lens.shape[0] - 1)
    position = starts[sequence] + row - (ends - lens)[sequence]
    page = page_table[sequence, jnp.clip(position // p, 0, page_table.shape[1] - 1)]
    held = (row < ends[-1])[:, None]
    # A row no sequence has may hold NaN in the page it would come from: it is replaced, not weighted.
    return jnp.where(
        held, latent_pages[jnp.clip(page, 0, pages - 1), 0, position % p], jnp.zeros((), latent_pages.dtype)
    )
