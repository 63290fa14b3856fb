"""The definition in jnp: gather the pages, mask, softmax in float32. Every other implementation is judged against it."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int8

from dflash_kernels.attention.paged.schedule import PagedSchedule


def paged_attention_reference(
    q: Float[Array, "B T N H"],
    k_pages: Float[Array, "P K p H"] | Int8[Array, "P K p H"],
    v_pages: Float[Array, "P K p V"] | Int8[Array, "P K p V"],
    page_table: Int[Array, "B W"],
    seq_lens: Int[Array, "B"],
    q_lens: Int[Array, "B"],
    *,
    causal: bool,
    window: tuple[int | None, int | None],
    soft_cap: float | Float[Array, ""] | None,
    sinks: Float[Array, "N"] | None,
    scale: float | Float[Array, ""],
    alibi_slopes: Float[Array, "N"] | None = None,
    alibi_sqrt: bool = False,
    k_scale: Float[Array, "K"] | Float[Array, "P K p"] | None = None,
    v_scale: Float[Array, "K"] | Float[Array, "K V"] | None = None,
    schedule: PagedSchedule | None = None,
    batch_invariant: bool = False,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """See `paged_attention`. Quantized pages widen to q's dtype, which is exact; their scales multiply in float32.

    `schedule` and `batch_invariant` are ignored. In float32 one sequence goes after the other: XLA picks a product's code by its
    size, and a request is to have the same bits alone and in a batch.
    """
    attend = functools.partial(
        _attend, k_pages=k_pages, v_pages=v_pages, causal=causal, window=window, soft_cap=soft_cap, sinks=sinks, scale=scale,
        alibi_slopes=alibi_slopes, alibi_sqrt=alibi_sqrt, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    rows = (q, page_table, seq_lens, q_lens)
    if q.dtype != jnp.float32 or q.shape[0] == 1:
        return attend(rows)
    out, lse = jax.lax.map(lambda row: attend(tuple(x[None] for x in row)), rows)
    return out[:, 0], lse[:, 0]


def _attend(
    rows: tuple[Array, Array, Array, Array], *, k_pages: Array, v_pages: Array, causal: bool, window: tuple[int | None, int | None],
    soft_cap: float | Array | None, sinks: Array | None, scale: float | Array, alibi_slopes: Array | None, alibi_sqrt: bool,
    k_scale: Array | None, v_scale: Array | None,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:  # fmt: skip
    """Queries, table rows and lengths of some sequences."""
    q, page_table, seq_lens, q_lens = rows
    b, t, n, h = q.shape
    pages, kv_heads, p, _ = k_pages.shape
    table = jnp.clip(page_table, 0, pages - 1)
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None

    keys = jnp.arange(table.shape[1] * p)
    token = jnp.arange(t)
    behind = (seq_lens - q_lens)[:, None, None] + token[:, None] - keys  # [B, T, S], query position minus key position
    visible = (keys < seq_lens[:, None])[:, None] & (token < q_lens[:, None])[:, :, None]
    if causal:
        visible &= behind >= 0
    if window[0] is not None:
        visible &= behind <= window[0]
    if window[1] is not None:
        visible &= behind >= -window[1]

    def gather(pool: Array) -> Array:
        rows = jnp.moveaxis(pool[table], 2, 1).reshape(b, kv_heads, -1, *pool.shape[3:])
        return rows.astype(q.dtype) if pool.dtype.itemsize == 1 else rows

    grouped = q.reshape(b, t, kv_heads, -1, h)
    scores = jnp.einsum(
        "btkgh,bksh->bkgts", grouped, gather(k_pages), precision=precision, preferred_element_type=jnp.float32
    ) * scale  # fmt: skip
    if k_scale is not None:
        scores *= (k_scale[:, None] if k_scale.ndim == 1 else gather(k_scale))[..., None, None, :]
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    if alibi_slopes is not None:
        bias = -jnp.sqrt(jnp.maximum(behind, 0).astype(jnp.float32)) if alibi_sqrt else -behind.astype(jnp.float32)
        scores += alibi_slopes.astype(jnp.float32).reshape(kv_heads, -1, 1, 1) * bias[:, None, None]
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    sink = jnp.full((1, kv_heads, n // kv_heads, 1, 1), -jnp.inf)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(sink.shape)
        top = jnp.maximum(top, sink)
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sink - top)
    # Rows no query may see can hold NaN, and 0 * NaN is NaN: they are replaced, not weighted.
    seen = keys < seq_lens[:, None] if window[0] is None else visible.any(axis=1)
    values = jnp.where(seen[:, None, :, None], gather(v_pages), 0)
    share = weights / jnp.where(total > 0, total, 1.0)
    # Moved to [B, T, K, G, V] afterwards: written as one einsum, XLA's CPU backend refuses bfloat16.
    out = jnp.einsum(
        "bkgts,bksh->bkgth", share.astype(values.dtype), values, precision=precision, preferred_element_type=jnp.float32
    )  # fmt: skip
    if v_scale is not None:
        out *= v_scale.reshape(kv_heads, 1, 1, -1)
    live = (token < q_lens[:, None])[:, None, None, :, None]
    lse = jnp.where(live, top + jnp.log(total), -jnp.inf)
    out, lse = jnp.moveaxis(out, 3, 1), jnp.moveaxis(lse[..., 0], 3, 1)
    return out.reshape(b, t, n, -1).astype(q.dtype), lse.reshape(b, t, n)
