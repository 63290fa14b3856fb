"""The public function: checks shapes, then hands over to the first implementation that takes the call."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from dflash_kernels.attention.mla.mosaic_gpu import mla_selected_mosaic_gpu
from dflash_kernels.attention.mla.selected_xla import mla_selected_xla
from dflash_kernels.core.dispatch import first_fitting
from dflash_kernels.core.validation import (
    check_axes,
    check_filled,
    check_integers,
    check_latent_pages,
    check_wide,
    is_wide,
    plain,
)
from dflash_kernels.kv_cache.latent.reference import packed_latent_width

IMPLEMENTATIONS = {"mosaic_gpu": mla_selected_mosaic_gpu, "xla": mla_selected_xla}


def mla_selected_attention(
    q: Float[Array, "B T N C"],
    latent_pages: Shaped[Array, "P 1 p stored"],
    slots: Int[Array, "B T K"],
    *,
    kv_lora_rank: int,
    scale: float,
    latent_scale: float | Float[Array, ""] | None = None,
    return_lse: bool = False,
    implementation: str | Sequence[str] | None = None,
) -> Float[Array, "B T N R"] | tuple[Float[Array, "B T N R"], Float[Array, "B T N"]]:
    """Absorbed multi-head latent attention of every query token to rows that it names, as of `mla_attention`.

    There is no order among rows, and none is looked past: what a query may not see it must not name. A row that is named twice
    counts twice. Rows are unpacked one by one, never pages.

    Args:
      q: queries with the key up-projection absorbed, `[q_nope @ w_uk | q_pe]`.
      latent_pages: page pool in any format of `latent_encode`; rows that are not named may hold anything, NaN included.
      slots: int32 rows, `page * p + row`, the same for all heads; a negative one, or one past the pool, names none.
      kv_lora_rank: R.
      scale: softmax scale.
      latent_scale: float32 factor of float8_e4m3fn rows, rotated part included; 1 where None.
      return_lse: also return the natural-log sum of exponentials, at least float32.
      implementation: a name, names to try in order, or None for the best that takes the call.

    Returns:
      Attention-weighted latents in q's dtype, to be up-projected by the caller; queries without a row give 0, their lse -inf.

    Raises:
      ValueError: shapes do not agree, a scale is given for pages that have none, or an array is of another kind than said.
      NoImplementationError: nothing named takes these arguments.
    """
    check_axes(q=(q, "B T N C"), latent_pages=(latent_pages, "P 1 p stored"), slots=(slots, "B T K"))
    check_wide("only pages may have eight bits", q=q)
    check_integers(slots=slots)
    width = q.shape[3]
    if not 0 < kv_lora_rank <= width:
        raise ValueError(f"kv_lora_rank {kv_lora_rank} must be at least 1 and at most the rows' width {width}")
    packed = latent_pages.dtype == jnp.uint8
    check_latent_pages(latent_pages, packed_latent_width(kv_lora_rank, width - kv_lora_rank) if packed else width)
    check_filled(q=q, latent_pages=latent_pages, slots=slots)
    if slots.shape[:2] != q.shape[:2]:
        raise ValueError(f"slots {slots.shape} must start with {q.shape[:2]}, the queries of q {q.shape}")
    quantized = latent_pages.dtype == jnp.float8_e4m3fn
    if not (quantized or packed or is_wide(latent_pages)):
        raise ValueError(
            f"latent pages are bfloat16, float16, float32, float8_e4m3fn or packed bytes (uint8), not {latent_pages.dtype}"
        )
    if latent_scale is not None and (not quantized or jnp.shape(latent_scale) != ()):
        raise ValueError(
            f"latent_scale is one number for float8_e4m3fn pages; these are {latent_pages.dtype}, it is {jnp.shape(latent_scale)}"
        )
    latent_scale = jnp.asarray(1.0 if latent_scale is None else latent_scale, jnp.float32)
    with jax.named_scope("mla_selected_attention"):
        out, lse = first_fitting(
            "mla_selected_attention", IMPLEMENTATIONS, implementation, q, latent_pages, slots,
            kv_lora_rank=kv_lora_rank, scale=plain(scale), latent_scale=latent_scale,
        )  # fmt: skip
    return (out, lse) if return_lse else out
