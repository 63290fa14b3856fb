"""The definition in jnp: label every row with its sequence and place, mask, softmax in float32. The judge of every kernel."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int8


def ragged_attention_reference(
    q: Float[Array, "T N H"],
    k: Float[Array, "S K H"],
    v: Float[Array, "S K V"],
    cu_q_lens: Int[Array, "C"],
    cu_kv_lens: Int[Array, "C"],
    **options,
) -> tuple[Float[Array, "T N V"], Float[Array, "T N"]]:
    """See `ragged_attention`."""
    sequence = _sequence_of(cu_kv_lens, k.shape[0])
    start = cu_kv_lens[jnp.minimum(sequence, cu_kv_lens.shape[0] - 2)]
    place, held = jnp.arange(k.shape[0]) - start, sequence < cu_kv_lens.shape[0] - 1
    return _attend(q, k, v, cu_q_lens, jnp.diff(cu_kv_lens), sequence, place, held, **options)


def ragged_paged_attention_reference(
    q: Float[Array, "T N H"],
    k_pages: Float[Array, "P K p H"] | Int8[Array, "P K p H"],
    v_pages: Float[Array, "P K p V"] | Int8[Array, "P K p V"],
    cu_q_lens: Int[Array, "C"],
    page_table: Int[Array, "B W"],
    seq_lens: Int[Array, "B"],
    *,
    k_scale: Float[Array, "K"] | Float[Array, "P K p"] | None = None,
    v_scale: Float[Array, "K"] | Float[Array, "K V"] | None = None,
    **options,
) -> tuple[Float[Array, "T N V"], Float[Array, "T N"]]:
    """See `ragged_paged_attention`: the pages of all sequences are laid out one after the other, whole tables of them.

    Pages in eight bits widen to q's dtype, which is exact; their scales multiply in float32.
    """
    (b, width), page_size = page_table.shape, k_pages.shape[2]
    entries = jnp.clip(page_table, 0, k_pages.shape[0] - 1)
    sequence = jnp.repeat(jnp.arange(b), width * page_size)
    place = jnp.tile(jnp.arange(width * page_size), b)

    def laid_out(pool: Array) -> Array:
        rows = jnp.swapaxes(pool[entries], 2, 3).reshape(b * width * page_size, pool.shape[1], *pool.shape[3:])
        return rows.astype(q.dtype) if pool.dtype.itemsize == 1 else rows

    if k_scale is not None:
        k_scale = laid_out(k_scale) if k_scale.ndim == 3 else k_scale[None]
    return _attend(
        q, laid_out(k_pages), laid_out(v_pages), cu_q_lens, seq_lens, sequence, place, place < seq_lens[sequence],
        k_scale=k_scale, v_scale=v_scale, **options,
    )  # fmt: skip


def _sequence_of(cu_lens: Int[Array, "C"], rows: int) -> Int[Array, "rows"]:
    """Index of the sequence that holds each packed row, B for rows after the last sequence."""
    return jnp.searchsorted(cu_lens[1:], jnp.arange(rows), side="right")


def _attend(
    q: Float[Array, "T N H"],
    k: Float[Array, "S K H"],
    v: Float[Array, "S K V"],
    cu_q_lens: Int[Array, "C"],
    kv_lens: Int[Array, "B"],
    sequence: Int[Array, "S"],
    place: Int[Array, "S"],
    held: Bool[Array, "S"],
    *,
    causal: bool,
    window: tuple[int | None, int | None],
    soft_cap: float | Float[Array, ""] | None,
    sinks: Float[Array, "N"] | None,
    alibi_slopes: Float[Array, "N"] | None,
    alibi_sqrt: bool,
    scale: float | Float[Array, ""],
    k_scale: Float[Array, "#S K"] | None = None,
    v_scale: Float[Array, "K"] | Float[Array, "K V"] | None = None,
) -> tuple[Float[Array, "T N V"], Float[Array, "T N"]]:
    """Keys carry their sequence and their place in it; those not `held` belong to nobody and may hold anything."""
    (t, n, h), (b,), kv_heads = q.shape, kv_lens.shape, k.shape[1]
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    own = _sequence_of(cu_q_lens, t)
    live, row = own < b, jnp.minimum(own, b - 1)
    position = jnp.arange(t) - cu_q_lens[row] + kv_lens[row] - jnp.diff(cu_q_lens)[row]
    behind = position[:, None] - place  # [T, S], query position minus key position
    visible = (own[:, None] == sequence) & held & live[:, None]
    if causal:
        visible &= behind >= 0
    if window[0] is not None:
        visible &= behind <= window[0]
    if window[1] is not None:
        visible &= behind >= -window[1]

    grouped = q.reshape(t, kv_heads, n // kv_heads, h)
    scores = jnp.einsum("tkgh,skh->kgts", grouped, k, precision=precision, preferred_element_type=jnp.float32) * scale
    if k_scale is not None:
        scores *= k_scale.T[:, None, None]
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    if alibi_slopes is not None:
        bias = -jnp.sqrt(jnp.maximum(behind, 0).astype(jnp.float32)) if alibi_sqrt else -behind.astype(jnp.float32)
        scores += alibi_slopes.astype(jnp.float32).reshape(kv_heads, -1, 1, 1) * bias
    scores = jnp.where(visible, scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf)
    sink = jnp.full((kv_heads, n // kv_heads, 1, 1), -jnp.inf)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(sink.shape)
        top = jnp.maximum(top, sink)
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sink - top)
    # Rows no query may see can hold NaN, and 0 * NaN is NaN: they are replaced, not weighted.
    values = jnp.where(held[:, None, None], v, jnp.zeros((), v.dtype))
    share = (weights / jnp.where(total > 0, total, 1.0)).astype(v.dtype)
    out = jnp.einsum("kgts,skv->kgtv", share, values, precision=precision, preferred_element_type=jnp.float32)
    if v_scale is not None:
        out *= v_scale.reshape(kv_heads, 1, 1, -1)
    lse = jnp.where(live, (top + jnp.log(total))[..., 0], -jnp.inf)
    out, lse = jnp.moveaxis(out, 2, 0), jnp.moveaxis(lse, 2, 0)
    return out.reshape(t, n, v.shape[-1]).astype(q.dtype), lse.reshape(t, n)
