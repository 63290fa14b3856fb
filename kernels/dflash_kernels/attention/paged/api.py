"""The public function: checks shapes, then hands over to the first implementation that takes the call."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int8

from dflash_kernels.attention.paged.mosaic_gpu import paged_attention_mosaic_gpu
from dflash_kernels.attention.paged.reference import paged_attention_reference
from dflash_kernels.attention.paged.schedule import PagedSchedule
from dflash_kernels.attention.paged.triton import paged_attention_triton
from dflash_kernels.core.dispatch import first_fitting
from dflash_kernels.core.validation import (
    check_axes,
    check_filled,
    check_of_heads,
    check_sequences,
    check_wide,
    fitting_options,
    fitting_scale,
)

IMPLEMENTATIONS = {
    "mosaic_gpu": paged_attention_mosaic_gpu,
    "triton": paged_attention_triton,
    "xla": paged_attention_reference,
}


def paged_attention(
    q: Float[Array, "B T N H"],
    k_pages: Float[Array, "P K p H"] | Int8[Array, "P K p H"],
    v_pages: Float[Array, "P K p V"] | Int8[Array, "P K p V"],
    page_table: Int[Array, "B W"],
    seq_lens: Int[Array, "B"],
    *,
    q_lens: Int[Array, "B"] | None = None,
    causal: bool = True,
    window: tuple[int | None, int | None] | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "N"] | None = None,
    alibi_slopes: Float[Array, "N"] | None = None,
    alibi_sqrt: bool = False,
    k_scale: float | Float[Array, ""] | Float[Array, "K"] | Float[Array, "P K p"] | None = None,
    v_scale: float | Float[Array, ""] | Float[Array, "K"] | Float[Array, "K V"] | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    schedule: PagedSchedule | None = None,
    batch_invariant: bool = False,
    implementation: str | Sequence[str] | None = None,
) -> Float[Array, "B T N V"] | tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Decode, verification and draft attention: T query tokens for each sequence over its pages.

    The key at position s of sequence b lies in page `page_table[b, s // p]` at row `s % p`; N is a multiple of K. Live query row i
    stands at position `seq_lens[b] - q_lens[b] + i` (bottom-right alignment over the live rows).

    Args:
      q: queries, bfloat16, float16 or float32.
      k_pages, v_pages: page pools in q's dtype, float8 (e4m3fn, e5m2) or int8. XLA and Triton take keys of one dtype and values of
        another, and values of another head dim V. Rows at or past `seq_lens` may hold anything, NaN included; a float8 NaN before
        that may count as 480.
      page_table: int32 page indices; entries past a sequence's last page may hold anything.
      seq_lens: int32 keys of each sequence, the query tokens' own included; 0 for an idle row.
      q_lens: int32 live query rows of each sequence, T where None. Rows past it give out 0 and lse -inf.
      causal: a query sees no key after its own position.
      window: keys seen to the left and right of the query's position, 0 and more, None on a side for all.
      soft_cap: c of `c * tanh(score / c)`, positive, applied after the scale.
      sinks: float32 logit per head added to the softmax denominator only.
      alibi_slopes: float32 slope per head: `slope * (key position - query position)` is added to the score, after the cap.
      alibi_sqrt: add `-slope * sqrt(distance)` for keys behind the query and nothing for keys ahead of it instead.
      k_scale: float32 factor of the keys. float8 pages: of all or of each KV head, 1 where None. int8 pages: of each token and KV
        head, in pages like the keys; a scale of a row past `seq_lens` may be NaN.
      v_scale: float32 factor of the values. float8 pages: as for the keys. int8 pages: of each KV head and channel.
      scale: softmax scale, `H ** -0.5` where None.
      return_lse: also return the natural-log sum of exponentials, float32, sinks included.
      schedule: from `paged_schedule` of the same lengths, for all layers of a step: which CTA takes which part. Changes speed and
        rounding only, and is ignored where nothing uses it.
      batch_invariant: a query's bits are the same in whatever slot and place of the block it stands and whatever the others
        hold, in calls of one shape: keys are added in parts by where they lie, and no schedule is followed. XLA's are so as far as
        its products are.
      implementation: a name, names to try in order, or None for the best that takes the call.

    Returns:
      Output in q's dtype; rows without a visible key are 0 and their lse is -inf (or the sink's logit).

    Raises:
      ValueError: shapes do not agree, scales do not fit the pages' dtype, or an array or number is of another kind than said.
      NoImplementationError: nothing named takes these arguments.
    """
    check_axes(q=(q, "B T N H"), k_pages=(k_pages, "P K p H"), v_pages=(v_pages, "P K p V"))
    check_filled(k_pages=k_pages, v_pages=v_pages)
    check_wide("only pages may have eight bits", q=q)
    b, _, n, h = q.shape
    kv_heads, head_dim = k_pages.shape[1], k_pages.shape[3]
    if n % kv_heads or head_dim != h or k_pages.shape[:3] != v_pages.shape[:3]:
        raise ValueError(f"q heads {n} x {h} do not fit pages of {k_pages.shape} and {v_pages.shape} [P, K, p, H]")
    check_sequences(b, page_table=page_table, seq_lens=seq_lens, q_lens=q_lens)
    check_filled(q=q, page_table=page_table)
    check_of_heads(n, sinks=sinks, alibi_slopes=alibi_slopes)
    if schedule is not None and schedule.arrived is not None and schedule.arrived.shape != (b * kv_heads,):
        raise ValueError(
            f"the schedule is for {schedule.arrived.shape[0]} sequences times KV heads, not {b} * {kv_heads}: make it from the "
            "lengths of this call"
        )
    if q_lens is None:
        q_lens = jnp.full((b,), q.shape[1], jnp.int32)
    schedule = None if batch_invariant else schedule
    with jax.named_scope("paged_attention"):
        out, lse = first_fitting(
            "paged_attention", IMPLEMENTATIONS, implementation, q, k_pages, v_pages, page_table, seq_lens, q_lens,
            **fitting_options(window, soft_cap, scale, h), causal=causal, sinks=sinks, alibi_slopes=alibi_slopes,
            alibi_sqrt=alibi_sqrt, k_scale=fitting_scale(k_scale, k_pages, "k_scale", k_pages.shape[:3]),
            v_scale=fitting_scale(v_scale, v_pages, "v_scale", v_pages.shape[1::2]), schedule=schedule,
            batch_invariant=batch_invariant,
        )  # fmt: skip
    return (out, lse) if return_lse else out
