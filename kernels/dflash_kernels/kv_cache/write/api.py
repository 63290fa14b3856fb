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
    v_pages: Shaped[Array, "P K p V"],
    k: Shaped[Array, "T K H"],
    v: Shaped[Array, "T K V"],
    slots: Int[Array, "T"],
    *,
    implementation: str | Sequence[str] | None = None,
) -> tuple[Shaped[Array, "P K p H"], Shaped[Array, "P K p V"]]:
    """KV-cache write: the pools with token t's key and value at slot `slots[t] = page * p + row`.

    Args:
      k_pages, v_pages: page pools; donate them to the surrounding jit and the write happens in place. The head dim of values may
        differ.
      k, v: new keys and values, of the pools' dtype, or cast where both have 16 or 32 bits. Pages in eight bits take what
        `quantize_tensor` makes; `kv_write` and `qkv_write` quantize while they write.
      slots: int32; a negative slot, or one past the pool, writes nothing. No two tokens may share a slot.
      implementation: a name, names to try in order, or None for the best that takes the call.

    Raises:
      ValueError: shapes do not agree, or numbers in 16 or 32 bits are to be stored in eight.
      NoImplementationError: nothing named takes these arguments.
    """
    check_axes(
        k_pages=(k_pages, "P K p H"), v_pages=(v_pages, "P K p V"), k=(k, "T K H"), v=(v, "T K V"), slots=(slots, "T")
    )
    check_integers(slots=slots)
    if k.shape[0] != v.shape[0] or any(x.shape[1:] != pool.shape[1::2] for x, pool in ((k, k_pages), (v, v_pages))):
        raise ValueError(
            f"k {k.shape} [T, K, H] and v {v.shape} [T, K, V] do not fit pages of {k_pages.shape} and {v_pages.shape}"
        )
    if k_pages.shape[:3] != v_pages.shape[:3]:
        raise ValueError(f"pools {k_pages.shape} and {v_pages.shape} must agree in all but the head dim [P, K, p, ...]")
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
