"""The public functions: check shapes, then hand over to the first implementation that takes the call."""

from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array, Float, Int, Int8

from dflash_kernels.attention.ragged.mosaic_gpu import ragged_attention_mosaic_gpu, ragged_paged_attention_mosaic_gpu
from dflash_kernels.attention.ragged.reference import ragged_attention_reference, ragged_paged_attention_reference
from dflash_kernels.core.dispatch import first_fitting
from dflash_kernels.core.validation import (
    check_axes,
    check_filled,
    check_integers,
    check_of_heads,
    check_sequences,
    check_wide,
    fitting_options,
    fitting_scale,
)

DENSE = {"mosaic_gpu": ragged_attention_mosaic_gpu, "xla": ragged_attention_reference}
UNPACKED = (
    "multiply it with its scale and cast it; keys and values in pages may have eight bits (ragged_paged_attention)"
)
PAGED = {"mosaic_gpu": ragged_paged_attention_mosaic_gpu, "xla": ragged_paged_attention_reference}


def ragged_attention(
    q: Float[Array, "T N H"],
    k: Float[Array, "S K H"],
    v: Float[Array, "S K V"],
    cu_q_lens: Int[Array, "C"],
    cu_kv_lens: Int[Array, "C"] | None = None,
    *,
    causal: bool = True,
    window: tuple[int | None, int | None] | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "N"] | None = None,
    alibi_slopes: Float[Array, "N"] | None = None,
    alibi_sqrt: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    implementation: str | Sequence[str] | None = None,
) -> Float[Array, "T N V"] | tuple[Float[Array, "T N V"], Float[Array, "T N"]]:
    """Attention of B sequences packed one after the other, with the keys packed likewise.

    Queries of sequence b are rows `cu_q_lens[b]` to `cu_q_lens[b + 1]`, its keys rows `cu_kv_lens[b]` to `cu_kv_lens[b + 1]`; N is
    a multiple of K. Query row i of a sequence stands at position `keys - queries + i` of it (bottom-right alignment).

    Args:
      q: queries, bfloat16, float16 or float32. Rows past the last sequence are padding and may hold anything.
      k, v: keys and values in q's dtype; the head dim of the values may differ. Rows past the last sequence may hold anything.
      cu_q_lens, cu_kv_lens: `[B + 1]` int32, starting with 0 and not decreasing; sequences may be empty. `cu_kv_lens` None: as the
        queries.
      causal: a query sees no key after its own position.
      window: keys seen to the left and right of the query's position, 0 and more, None on a side for all.
      soft_cap: c of `c * tanh(score / c)`, positive, applied after the scale.
      sinks: float32 logit per head added to the softmax denominator only.
      alibi_slopes: float32 slope per head: `slope * (key position - query position)` is added to the score, after the cap.
      alibi_sqrt: add `-slope * sqrt(distance)` for keys behind the query and nothing for keys ahead of it instead.
      scale: softmax scale, `H ** -0.5` where None.
      return_lse: also return the natural-log sum of exponentials, float32, sinks included.
      implementation: a name, names to try in order, or None for the best that takes the call.

    Returns:
      Output in q's dtype; rows without a visible key are 0 and their lse is -inf (or the sink's logit), padding is 0 and -inf.

    Raises:
      ValueError: shapes do not agree, something is in eight bits, or an array or number is of another kind than said.
      NoImplementationError: nothing named takes these arguments.
    """
    check_axes(q=(q, "T N H"), k=(k, "S K H"), v=(v, "S K V"), cu_q_lens=(cu_q_lens, "B+1"))
    check_wide(UNPACKED, q=q, k=k, v=v)
    if cu_kv_lens is None:
        cu_kv_lens = cu_q_lens
        if k.shape[0] != q.shape[0]:
            raise ValueError(f"{k.shape[0]} keys for {q.shape[0]} queries; pass cu_kv_lens where they differ")
    if k.shape[:2] != v.shape[:2]:
        raise ValueError(f"keys {k.shape} and values {v.shape} must agree in rows and heads [S, K, ...]")
    check_axes(cu_kv_lens=(cu_kv_lens, "B+1"))
    check_integers(cu_kv_lens=cu_kv_lens)
    if cu_kv_lens.shape != cu_q_lens.shape:
        raise ValueError(f"cu_kv_lens {cu_kv_lens.shape} must have one entry for each of cu_q_lens {cu_q_lens.shape}")
    _check_queries(q, k.shape[1], k.shape[2], cu_q_lens, sinks=sinks, alibi_slopes=alibi_slopes)
    with jax.named_scope("ragged_attention"):
        out, lse = first_fitting(
            "ragged_attention", DENSE, implementation, q, k, v, cu_q_lens, cu_kv_lens,
            **fitting_options(window, soft_cap, scale, q.shape[-1]), causal=causal, sinks=sinks, alibi_slopes=alibi_slopes,
            alibi_sqrt=alibi_sqrt,
        )  # fmt: skip
    return (out, lse) if return_lse else out


def ragged_paged_attention(
    q: Float[Array, "T N H"],
    k_pages: Float[Array, "P K p H"] | Int8[Array, "P K p H"],
    v_pages: Float[Array, "P K p V"] | Int8[Array, "P K p V"],
    cu_q_lens: Int[Array, "C"],
    page_table: Int[Array, "B W"],
    seq_lens: Int[Array, "B"],
    *,
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
    implementation: str | Sequence[str] | None = None,
) -> Float[Array, "T N V"] | tuple[Float[Array, "T N V"], Float[Array, "T N"]]:
    """Attention of B sequences packed one after the other, with the keys in pages.

    The key at position s of sequence b lies in page `page_table[b, s // p]` at row `s % p`. The queries' own keys are already
    there: query row i of a sequence stands at position `seq_lens[b] - queries + i`.

    Args:
      q, cu_q_lens: as in `ragged_attention`.
      k_pages, v_pages: page pools in q's dtype, float8 (e4m3fn, e5m2) or int8; the head dim of the values may differ. Rows at or
        past `seq_lens` may hold anything, even NaN.
      page_table: int32 page indices; entries past a sequence's last page may hold anything.
      seq_lens: int32 keys of each sequence.
      causal, window, soft_cap, sinks, alibi_slopes, alibi_sqrt, scale, return_lse, implementation: as in `ragged_attention`.
      k_scale, v_scale: float32 factors of pages in eight bits, as in `paged_attention`.

    Returns:
      As `ragged_attention`.

    Raises:
      ValueError: shapes do not agree, scales do not fit the pages' dtype, or an array or number is of another kind than said.
      NoImplementationError: nothing named takes these arguments.
    """
    check_axes(q=(q, "T N H"), k_pages=(k_pages, "P K p H"), v_pages=(v_pages, "P K p V"), cu_q_lens=(cu_q_lens, "B+1"))
    check_filled(k_pages=k_pages, v_pages=v_pages)
    check_wide("only pages may have eight bits", q=q)
    if k_pages.shape[:3] != v_pages.shape[:3]:
        raise ValueError(f"pages {k_pages.shape} and {v_pages.shape} must agree in all but the head dim [P, K, p, ...]")
    _check_queries(q, k_pages.shape[1], k_pages.shape[3], cu_q_lens, sinks=sinks, alibi_slopes=alibi_slopes)
    check_sequences(cu_q_lens.shape[0] - 1, page_table=page_table, seq_lens=seq_lens)
    check_filled(page_table=page_table)
    with jax.named_scope("ragged_paged_attention"):
        out, lse = first_fitting(
            "ragged_paged_attention", PAGED, implementation, q, k_pages, v_pages, cu_q_lens, page_table, seq_lens,
            **fitting_options(window, soft_cap, scale, q.shape[-1]), causal=causal, sinks=sinks, alibi_slopes=alibi_slopes,
            alibi_sqrt=alibi_sqrt, k_scale=fitting_scale(k_scale, k_pages, "k_scale", k_pages.shape[:3]),
            v_scale=fitting_scale(v_scale, v_pages, "v_scale", v_pages.shape[1::2]),
        )  # fmt: skip
    return (out, lse) if return_lse else out


def _check_queries(q: Array, kv_heads: int, head_dim: int, cu_q_lens: Array, **of_heads: Any) -> None:
    n, h = q.shape[1:]
    if 0 in (n, h, kv_heads) or n % kv_heads or head_dim != h:
        raise ValueError(f"q heads {n} x {h} do not fit keys of {kv_heads} heads x {head_dim}")
    if cu_q_lens.shape[0] < 2:
        raise ValueError(
            f"cu_q_lens {cu_q_lens.shape} must have the start of every sequence and the end: [B + 1], B at least 1"
        )
    check_integers(cu_q_lens=cu_q_lens)
    check_of_heads(n, **of_heads)
