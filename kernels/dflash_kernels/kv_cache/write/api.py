"""Cache writes of finished rows: shapes, dtypes and errors; the first implementation that supports the call runs."""

from collections.abc import Sequence

import jax
from jaxtyping import Array, Int, Shaped

from dflash_kernels.core.dispatch import first_fitting
from dflash_kernels.core.validation import check_axes, check_integers, check_latent_pages, check_stored
from dflash_kernels.kv_cache.write.mosaic_gpu import cache_write_mosaic_gpu, latent_write_mosaic_gpu
from dflash_kernels.kv_cache.write.reference import cache_write_reference, latent_write_reference

IMPLEMENTATIONS = {"mosaic_gpu": cache_write_mosaic_gpu, "xla": cache_write_reference}
LATENT_IMPLEMENTATIONS = {"mosaic_gpu": latent_write_mosaic_gpu, "xla": latent_write_reference}


def cache_write(
    k_pages: Shaped[Array, "P K p H"],
    v_pages: Shaped[Array, "P K p H"],
    k: Shaped[Array, "T K H"],
    v: Shaped[Array, "T K H"],
    slots: Int[Array, "T"],
    *,
    implementation: str | Sequence[str] | None = None,
) -> tuple[Shaped[Array, "P K p H"], Shaped[Array, "P K p H"]]:
    """KV-cache write: the pools with token t's key and value at slot `slots[t] = page * p + row`.

    Args:
      k_pages, v_pages: page pools; donate them to the surrounding jit and the write happens in place.
      k, v: new keys and values, of the pools' dtype, or cast where both have 16 or 32 bits. Pages in eight bits take what
        `quantize_tensor` makes; `kv_write` and `qkv_write` quantize while they write.
      slots: int32; a negative slot, or one past the pool, writes nothing. No two tokens may share a slot.
      implementation: a name, names to try in order, or None for the best that takes the call.

    Raises:
      ValueError: shapes do not agree, or numbers in 16 or 32 bits are to be stored in eight.
      NoImplementationError: nothing named takes these arguments.
    """
    check_axes(
        k_pages=(k_pages, "P K p H"), v_pages=(v_pages, "P K p H"), k=(k, "T K H"), v=(v, "T K H"), slots=(slots, "T")
    )
    check_integers(slots=slots)
    if k.shape != v.shape or k_pages.shape != v_pages.shape or k.shape[1:] != (k_pages.shape[1], k_pages.shape[3]):
        raise ValueError(f"k {k.shape} and v {v.shape} [T, K, H] do not fit pages of {k_pages.shape} [P, K, p, H]")
    if slots.shape != k.shape[:1]:
        raise ValueError(f"slots {slots.shape} must hold one slot for each of {k.shape[0]} tokens")
    advice = "quantize them first, or write with kv_write, which takes k_scale and v_scale"
    check_stored(k_pages, advice, k=k)
    check_stored(v_pages, advice, v=v)
    with jax.named_scope("cache_write"):
        return first_fitting("cache_write", IMPLEMENTATIONS, implementation, k_pages, v_pages, k, v, slots)


def latent_write(
    latent_pages: Shaped[Array, "P 1 p C"],
    latents: Shaped[Array, "T C"],
    slots: Int[Array, "S"],
    *,
    implementation: str | Sequence[str] | None = None,
) -> Shaped[Array, "P 1 p C"]:
    """Latent-cache write: the pool with latent row t at slot `slots[t] = page * p + row`.

    Args:
      latent_pages: page pool; donate it to the surrounding jit and the write happens in place.
      latents: new rows as the pool keeps them (`latent_encode`), or cast where both have 16 or 32 bits. Rows past the
        last slot are padding and written nowhere.
      slots: int32, at most as many as rows; a negative slot, or one past the pool, writes nothing. No two rows may share a slot.
      implementation: a name, names to try in order, or None for the best that takes the call.

    Raises:
      ValueError: shapes do not agree, or numbers in 16 or 32 bits are to be stored in eight.
      NoImplementationError: nothing named takes these arguments.
    """
    check_axes(latent_pages=(latent_pages, "P 1 p C"), latents=(latents, "T C"), slots=(slots, "S"))
    check_integers(slots=slots)
    check_latent_pages(latent_pages, latents.shape[1])
    if slots.shape[0] > latents.shape[0]:
        raise ValueError(f"slots {slots.shape} must hold one slot for each of {latents.shape[0]} rows, or fewer")
    check_stored(latent_pages, "encode them first (latent_encode)", latents=latents)
    with jax.named_scope("latent_write"):
        return first_fitting("latent_write", LATENT_IMPLEMENTATIONS, implementation, latent_pages, latents, slots)
