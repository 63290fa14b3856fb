"""From the projections of latent attention (MLA) to attention in one operation: RMS norm, RoPE, and the write to the pages."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from dflash_kernels.core.dispatch import first_fitting
from dflash_kernels.core.validation import check_axes, check_floats, check_integers, check_latent_pages, is_wide
from dflash_kernels.kv_cache.write.mosaic_gpu import mla_write_mosaic_gpu
from dflash_kernels.kv_cache.write.reference import mla_write_reference

MLA_IMPLEMENTATIONS = {"mosaic_gpu": mla_write_mosaic_gpu, "xla": mla_write_reference}


class MlaWritten(NamedTuple):
    """Result of `mla_write`: the queries `[T, N, H]`, and the pool."""

    q: Array
    latent_pages: Array


def mla_write(
    latent_pages: Shaped[Array, "P 1 p stored"],
    rows: Float[Array, "T C"],
    q: Float[Array, "T N H"],
    slots: Int[Array, "T"],
    cos: Float[Array, "T half"],
    sin: Float[Array, "T half"],
    norm: Float[Array, "R"],
    *,
    eps: float = 1e-6,
    interleaved: bool = True,
    latent_scale: Float[Array, ""] | None = None,
    implementation: str | Sequence[str] | None = None,
) -> MlaWritten:
    """Fused RMS norm, RoPE and latent-cache write of MLA: writes latent rows to their slots, and returns the queries rotated.

    A row's first R numbers are normed (root mean square in float32, rounded to the projection's dtype, then times the weight). RoPE
    applies to the `r = C - R` after them and to the last r of every head's query (products in float32, rounded to the projection's
    dtype).

    Args:
      latent_pages: page pool in any format of `latent_encode`; donate it to the surrounding jit and the write happens in place.
      rows: the projection's output `[kv_c | k_pe]`.
      q: the queries' projection, `H = nope + r`.
      slots: int32, `page * p + row`; a negative slot, or one past the pool, writes nothing. No two tokens may share a slot.
      cos, sin: float32, of each token's angles and times any factor, `r = 2 * half`.
      norm: weight of the latent's norm.
      eps: added to the mean square.
      interleaved: RoPE rotates dims 2i and 2i + 1 together, else dims i and `half + i`.
      latent_scale: of float8_e4m3fn pools, 1 where None.
      implementation: a name, names to try in order, or None for the best that takes the call.

    Raises:
      ValueError: shapes do not agree.
      NoImplementationError: nothing named takes these arguments.
    """
    check_axes(latent_pages=(latent_pages, "P 1 p stored"), rows=(rows, "T C"), q=(q, "T N H"), slots=(slots, "T"))
    check_axes(cos=(cos, "T half"), sin=(sin, "T half"), norm=(norm, "R"))
    check_floats(rows=rows, q=q, cos=cos, sin=sin, norm=norm)
    check_integers(slots=slots)
    if not is_wide(latent_pages) and latent_pages.dtype not in (jnp.float8_e4m3fn, jnp.uint8):
        raise ValueError(
            f"latent_pages are bfloat16, float16, float32, float8_e4m3fn or packed bytes (uint8), not {latent_pages.dtype}"
        )
    t, c = rows.shape
    check_latent_pages(latent_pages, None if latent_pages.dtype == jnp.uint8 else c)
    if slots.shape != (t,) or q.shape[0] != t or cos.shape[0] != t or cos.shape != sin.shape:
        raise ValueError(
            f"q {q.shape}, slots {slots.shape}, cos {cos.shape} and sin {sin.shape} must start with {t} tokens"
        )
    if c - norm.shape[0] != 2 * cos.shape[1] or not 0 < 2 * cos.shape[1] <= q.shape[2]:
        raise ValueError(
            f"rows of {c} with a latent of {norm.shape[0]}, and queries of {q.shape[2]}, do not end in {2 * cos.shape[1]} "
            f"rotary dims"
        )
    scale = jnp.ones((), jnp.float32) if latent_scale is None else latent_scale
    with jax.named_scope("mla_write"):
        written = first_fitting(
            "mla_write", MLA_IMPLEMENTATIONS, implementation, latent_pages, rows, q, slots, cos, sin, norm, scale,
            eps=eps, interleaved=interleaved,
        )  # fmt: skip
    return MlaWritten(*written)
