"""The public function: checks shapes, then hands over to the first implementation that takes the call."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_kernels.attention.mla.mosaic_gpu import mla_attention_mosaic_gpu
from dflash_kernels.attention.mla.reference import mla_attention_reference
from dflash_kernels.attention.mla.triton import mla_attention_triton
from dflash_kernels.core.dispatch import first_fitting
from dflash_kernels.core.validation import (
    check_axes,
    check_filled,
    check_latent_pages,
    check_sequences,
    check_wide,
    is_wide,
    plain,
)
from dflash_kernels.quantize.api import dequantize_tensor

IMPLEMENTATIONS = {
    "mosaic_gpu": mla_attention_mosaic_gpu,
    "triton": mla_attention_triton,
    "xla": mla_attention_reference,
}


def mla_attention(
    q: Float[Array, "B T N C"],
    latent_pages: Float[Array, "P 1 p C"],
    page_table: Int[Array, "B W"],
    seq_lens: Int[Array, "B"],
    *,
    kv_lora_rank: int,
    scale: float,
    q_lens: Int[Array, "B"] | None = None,
    causal: bool = True,
    limits: tuple[Int[Array, "B"], Int[Array, "B"]] | None = None,
    latent_scale: float | Float[Array, ""] | None = None,
    q_scale: float | Float[Array, ""] | None = None,
    dtype: Any = None,
    return_lse: bool = False,
    implementation: str | Sequence[str] | None = None,
) -> Float[Array, "B T N R"] | tuple[Float[Array, "B T N R"], Float[Array, "B T N"]]:
    """Absorbed multi-head latent attention: T query tokens for each sequence over its latent rows.

    A row is `[latent (R) | rotated key part (r)]`, C = R + r; it is the key of every head, and its first R entries are the value.
    The row of position s of sequence b lies in page `page_table[b, s // p]` at `s % p`. Pages have one head, so that they look
    like any other key pool: `[P, K, p, H]` with K = 1. Live query row i stands at position `seq_lens[b] - q_lens[b] + i`.

    Args:
      q: queries with the key up-projection absorbed, `[q_nope @ w_uk | q_pe]`; float8_e4m3fn for pages that are so.
      latent_pages: page pool in q's dtype or float8_e4m3fn. Rows at or past `seq_lens` may hold anything, NaN included.
      page_table: int32 page indices; entries past a sequence's last page may hold anything.
      seq_lens: int32 rows of each sequence, the query tokens' own included; 0 for an idle one.
      kv_lora_rank: R.
      scale: softmax scale. It belongs to the width of the heads before absorption, which this function does not see.
      q_lens: int32 live query rows of each sequence, T where None. Rows past it give out 0 and lse -inf.
      causal: a query sees no row after its own position.
      limits: int32, the fewest and the most rows that a sequence's live queries see, wherever they stand, for a causal call; a
        query sees what its position allows, brought between both. Then the most takes the place of `seq_lens` as the number of
        rows, and `seq_lens` only says where the queries stand, also before or behind the rows. So a part of a sequence's rows is
        attended to by queries that are not all behind it.
      latent_scale: float32 factor of float8_e4m3fn rows, rotated part included; 1 where None.
      q_scale: float32 factor of float8_e4m3fn queries; 1 where None.
      dtype: of the output for float8_e4m3fn queries, bfloat16 where None. They are widened to it before they are multiplied,
        which is exact where `q_scale` is a power of two: no implementation multiplies float8.
      return_lse: also return the natural-log sum of exponentials, at least float32.
      implementation: a name, names to try in order, or None for the best that takes the call.

    Returns:
      Attention-weighted latents in q's dtype or `dtype`, to be up-projected by the caller; rows without a visible key are 0, their
      lse -inf.

    Raises:
      ValueError: shapes do not agree, a scale is given for pages that have none, or an array is of another kind than said.
      NoImplementationError: nothing named takes these arguments.
    """
    check_axes(q=(q, "B T N C"), latent_pages=(latent_pages, "P 1 p C"))
    if q.dtype == latent_pages.dtype == jnp.float8_e4m3fn:
        q = dequantize_tensor(q, 1.0 if q_scale is None else q_scale, dtype or jnp.bfloat16)
    elif q_scale is not None or dtype is not None:
        raise ValueError(
            f"q_scale and dtype are for queries and pages in float8_e4m3fn, these are {q.dtype} and {latent_pages.dtype}"
        )
    check_wide("only pages, and queries beside float8_e4m3fn ones, may have eight bits", q=q)
    b, t, _, width = q.shape
    check_latent_pages(latent_pages, width)
    if not 0 < kv_lora_rank <= width:
        raise ValueError(f"kv_lora_rank {kv_lora_rank} must be at least 1 and at most the rows' width {width}")
    fewest, most = (None, None) if limits is None else limits
    check_sequences(b, page_table=page_table, seq_lens=seq_lens, q_lens=q_lens, fewest=fewest, most=most)
    if limits is not None and not causal:
        raise ValueError("limits bound what causal queries see: leave them out, or causal=False, which sees all rows")
    check_filled(q=q, latent_pages=latent_pages, page_table=page_table)
    quantized = latent_pages.dtype == jnp.float8_e4m3fn
    if not quantized and not is_wide(latent_pages):
        raise ValueError(f"latent pages are bfloat16, float16, float32 or float8_e4m3fn, not {latent_pages.dtype}")
    if latent_scale is not None and (not quantized or jnp.shape(latent_scale) != ()):
        raise ValueError(
            f"latent_scale is one number for float8_e4m3fn pages; these are {latent_pages.dtype}, it is {jnp.shape(latent_scale)}"
        )
    if quantized:
        latent_scale = jnp.asarray(1.0 if latent_scale is None else latent_scale, jnp.float32)
    if q_lens is None:
        q_lens = jnp.full((b,), t, jnp.int32)
    with jax.named_scope("mla_attention"):
        out, lse = first_fitting(
            "mla_attention", IMPLEMENTATIONS, implementation, q, latent_pages, page_table, seq_lens, q_lens,
            kv_lora_rank=kv_lora_rank, scale=plain(scale), causal=causal, limits=limits,
            latent_scale=latent_scale,
        )  # fmt: skip
    return (out, lse) if return_lse else out
