"""The public function: checks shapes, then hands over to the first implementation that takes the call."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_kernels.dispatch import first_fitting
from dflash_kernels.paged_attention.mosaic_gpu import paged_attention_mosaic_gpu
from dflash_kernels.paged_attention.reference import paged_attention_reference

IMPLEMENTATIONS = {"mosaic_gpu": paged_attention_mosaic_gpu, "xla": paged_attention_reference}


def paged_attention(
    q: Float[Array, "B T N H"],
    k_pages: Float[Array, "P K p H"],
    v_pages: Float[Array, "P K p H"],
    page_table: Int[Array, "B W"],
    seq_lens: Int[Array, "B"],
    *,
    q_lens: Int[Array, "B"] | None = None,
    causal: bool = True,
    window: tuple[int | None, int | None] | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "N"] | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    implementation: str | Sequence[str] | None = None,
) -> Float[Array, "B T N H"] | tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Decode, verification and draft attention: T query tokens for each sequence over its pages.

    The key at position s of sequence b lies in page `page_table[b, s // p]` at row `s % p`; N is a multiple of K. Live query row i
    stands at position `seq_lens[b] - q_lens[b] + i` (bottom-right alignment over the live rows).

    Args:
      q: queries, bfloat16, float16 or float32.
      k_pages, v_pages: page pools. Rows at or past `seq_lens` may hold anything, NaN included.
      page_table: int32 page indices; entries past a sequence's last page may hold anything.
      seq_lens: int32 keys of each sequence, the query tokens' own included; 0 for an idle row.
      q_lens: int32 live query rows of each sequence, T where None. Rows past it give out 0 and lse -inf.
      causal: a query sees no key after its own position.
      window: keys seen to the left and right of the query's position, None on a side for all.
      soft_cap: c of `c * tanh(score / c)`, applied after the scale.
      sinks: float32 logit per head added to the softmax denominator only.
      scale: softmax scale, `H ** -0.5` where None.
      return_lse: also return the natural-log sum of exponentials, float32, sinks included.
      implementation: a name, names to try in order, or None for the best that takes the call.

    Returns:
      Output in q's dtype; rows without a visible key are 0 and their lse is -inf (or the sink's logit).

    Raises:
      ValueError: shapes do not agree.
      NoImplementationError: nothing named takes these arguments.
    """
    b, _, n, h = q.shape
    kv_heads, head_dim = k_pages.shape[1], k_pages.shape[3]
    if n % kv_heads or head_dim != h or k_pages.shape != v_pages.shape:
        raise ValueError(f"q heads {n} x {h} do not fit pages of {k_pages.shape} and {v_pages.shape} [P, K, p, H]")
    if page_table.shape[0] != b or seq_lens.shape != (b,) or (q_lens is not None and q_lens.shape != (b,)):
        raise ValueError(f"page_table {page_table.shape} and seq_lens {seq_lens.shape} must start with {b} sequences")
    if q_lens is None:
        q_lens = jnp.full((b,), q.shape[1], jnp.int32)
    with jax.named_scope("paged_attention"):
        out, lse = first_fitting(
            "paged_attention", IMPLEMENTATIONS, implementation, q, k_pages, v_pages, page_table, seq_lens, q_lens,
            causal=causal, window=window or (None, None), soft_cap=soft_cap, sinks=sinks,
            scale=h**-0.5 if scale is None else scale,
        )  # fmt: skip
    return (out, lse) if return_lse else out
