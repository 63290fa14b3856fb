"""Formats of latent rows. A pool's dtype says how its rows are kept:

    float32, bfloat16, float16     as they are, `[kv_c (R) | k_pe (r)]`
    float8_e4m3fn                  every number divided by one scale for the whole pool, saturated at 448
    uint8                          packed: R e4m3 numbers, a float32 scale for each 128 of them, r bfloat16 numbers (never scaled);
                                   656 bytes for R 512 and r 64

Scales of packed rows are `max(largest absolute value / 448, smallest normal float32)`, so that a row of zeros reads back as zeros.
Readers take any scale; a writer elsewhere may have rounded it up to a power of two.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped, UInt8

from dflash_kernels.core.dispatch import first_fitting
from dflash_kernels.core.validation import check_count, check_rows
from dflash_kernels.kv_cache.latent.reference import (
    LATENT_TILE,
    decode_reference,
    encode_reference,
    pack_reference,
    packed_latent_width,
    unpack_reference,
)

PACK_IMPLEMENTATIONS = {"xla": pack_reference}
UNPACK_IMPLEMENTATIONS = {"xla": unpack_reference}
ENCODE_IMPLEMENTATIONS = {"xla": encode_reference}
DECODE_IMPLEMENTATIONS = {"xla": decode_reference}


def latent_pack(
    latents: Float[Array, "*rows C"], *, kv_lora_rank: int, implementation: str | Sequence[str] | None = None
) -> UInt8[Array, "*rows bytes"]:
    """Packs latent rows as float8 with a scale for each 128 numbers.

    Bytes are `[0, R)` e4m3, then R / 128 float32 scales, then r bfloat16 numbers, all little-endian.

    Raises:
      ValueError: `kv_lora_rank` is not a multiple of 128 or wider than the rows.
    """
    check_rows(latents=latents)
    _check_rank(kv_lora_rank, latents.shape[-1])
    with jax.named_scope("latent_pack"):
        return first_fitting("latent_pack", PACK_IMPLEMENTATIONS, implementation, latents, kv_lora_rank=kv_lora_rank)


def latent_unpack(
    packed: UInt8[Array, "*rows bytes"], *, kv_lora_rank: int, implementation: str | Sequence[str] | None = None
) -> Float[Array, "*rows C"]:
    """Dequantizes packed latent rows to float32; see `latent_pack`.

    Raises:
      ValueError: `kv_lora_rank` is not a multiple of 128, or the rows cannot be packed rows of it.
    """
    _check_stored(packed, "packed")
    if packed.dtype != jnp.uint8:
        raise ValueError(f"packed rows are bytes, uint8, not {packed.dtype}")
    rest = packed.shape[-1] - packed_latent_width(kv_lora_rank, 0)
    _check_rank(kv_lora_rank, packed.shape[-1])
    if rest < 0 or rest % 2:
        raise ValueError(f"rows of {packed.shape[-1]} bytes are no packed rows of kv_lora_rank {kv_lora_rank}")
    with jax.named_scope("latent_unpack"):
        return first_fitting("latent_unpack", UNPACK_IMPLEMENTATIONS, implementation, packed, kv_lora_rank=kv_lora_rank)


def latent_encode(
    latents: Float[Array, "*rows C"],
    pool_dtype: DTypeLike,
    *,
    kv_lora_rank: int,
    scale: Float[Array, ""] | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Shaped[Array, "*rows stored"]:
    """Quantizes latent rows to the format of a pool of `pool_dtype`. `scale` is read for float8_e4m3fn only; None is 1.

    Raises:
      ValueError: packed rows (uint8) and a `kv_lora_rank` that is not a multiple of 128 or wider than the rows.
    """
    check_rows(latents=latents)
    if pool_dtype == jnp.uint8:
        _check_rank(kv_lora_rank, latents.shape[-1])
    with jax.named_scope("latent_encode"):
        return first_fitting(
            "latent_encode", ENCODE_IMPLEMENTATIONS, implementation, latents, jnp.dtype(pool_dtype),
            kv_lora_rank=kv_lora_rank, scale=_one(scale),
        )  # fmt: skip


def latent_decode(
    stored: Shaped[Array, "*rows stored"],
    dtype: DTypeLike,
    *,
    kv_lora_rank: int,
    scale: Float[Array, ""] | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Float[Array, "*rows C"]:
    """Dequantizes latent rows of a pool to `dtype`: the inverse of `latent_encode` up to its rounding."""
    _check_stored(stored, "stored")
    with jax.named_scope("latent_decode"):
        return first_fitting(
            "latent_decode", DECODE_IMPLEMENTATIONS, implementation, stored, jnp.dtype(dtype),
            kv_lora_rank=kv_lora_rank, scale=_one(scale),
        )  # fmt: skip


def _check_stored(stored: Any, name: str) -> None:
    if not getattr(stored, "shape", None):
        came = stored.shape if hasattr(stored, "shape") else f"a {type(stored).__name__}"
        raise ValueError(f"{name} must be an array [..., stored], not {came}")


def _check_rank(kv_lora_rank: int, width: int) -> None:
    check_count(kv_lora_rank=kv_lora_rank)
    if kv_lora_rank < 1 or kv_lora_rank % LATENT_TILE or kv_lora_rank > width:
        raise ValueError(
            f"packed rows need a kv_lora_rank that is a multiple of {LATENT_TILE} and at most the rows' width {width}, got "
            f"{kv_lora_rank}: keep this model's rows as float8_e4m3fn or unquantized"
        )


def _one(scale: Array | None) -> Array:
    return jnp.ones((), jnp.float32) if scale is None else scale
