"""Ragged attention on Hopper: what the kernel takes, and the call cut into blocks."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int8

from dflash_kernels.attention.ragged.launch import BLOCK, Tuning, block_counts, block_table, plan
from dflash_kernels.core.device import require_hopper, require_page_size
from dflash_kernels.core.tuning import choose
from dflash_kernels.core.validation import FLOAT8

HEAD_DIMS = (64, 128, 192, 256)  # rows that a copy of a single one may start at: whole 128 bytes


def ragged_attention_mosaic_gpu(*args: Array, **options: Any) -> tuple[Array, Array]:
    """See `ragged_attention`. Raises NotImplementedError for what it does not take."""
    require_hopper(causal=options["causal"])
    return tuned_dense(*args, **options)


def ragged_paged_attention_mosaic_gpu(*args: Array, **options: Any) -> tuple[Array, Array]:
    """See `ragged_paged_attention`. Raises NotImplementedError for what it does not take."""
    require_hopper(causal=options["causal"])
    return tuned_paged(*args, **options)


def tuned_dense(
    q: Float[Array, "T N H"],
    k: Float[Array, "S K H"],
    v: Float[Array, "S K V"],
    cu_q_lens: Int[Array, "C"],
    cu_kv_lens: Int[Array, "C"],
    *,
    tuning: Tuning | None = None,
    interpret: Any = None,
    **options: Any,
) -> tuple[Float[Array, "T N V"], Float[Array, "T N"]]:
    """`ragged_attention` without the device check: for benchmarks (`tuning`) and tests on the CPU (`interpret`).

    Head dims that the kernel does not have are filled up with zeros, which is exact. `tuning` None: from the table.
    """
    _refuse_call(q, [k.dtype, v.dtype], v.shape[-1], options)
    value_dim = v.shape[-1]
    q, k, v = (_widened(array) for array in (q, k, v))
    exact, sizes = tuning_key(q, k, v, options["causal"])
    tuning = tuning or choose("attention/ragged", Tuning, exact=exact, sizes=sizes)
    out, lse = _attend(q, k, v, cu_q_lens, cu_kv_lens, None, tuning=tuning, interpret=interpret, **options)
    return out[..., :value_dim], lse


def tuned_paged(
    q: Float[Array, "T N H"],
    k_pages: Float[Array, "P K p H"] | Int8[Array, "P K p H"],
    v_pages: Float[Array, "P K p V"] | Int8[Array, "P K p V"],
    cu_q_lens: Int[Array, "C"],
    page_table: Int[Array, "B W"],
    seq_lens: Int[Array, "B"],
    *,
    k_scale: Float[Array, "K"] | Float[Array, "P K p"] | None = None,
    v_scale: Float[Array, "K"] | Float[Array, "K V"] | None = None,
    tuning: Tuning | None = None,
    interpret: Any = None,
    **options: Any,
) -> tuple[Float[Array, "T N V"], Float[Array, "T N"]]:
    """`ragged_paged_attention` without the device check: for benchmarks (`tuning`) and tests on the CPU (`interpret`).

    `tuning` None: from the table.

    Pages that the kernel cannot read, because of their head dim or in eight bits, are copied into ones that it can, all that the
    table names, before it starts. Numbers in eight bits are rounded to q's dtype there once their scale is in them, so scales that
    are powers of two cost no precision.
    """
    page_size, value_dim = k_pages.shape[2], v_pages.shape[3]
    require_page_size(page_size)
    narrow = {pages.dtype for pages in (k_pages, v_pages)} & {jnp.dtype(jnp.int8), *map(jnp.dtype, FLOAT8)}
    _refuse_call(q, [pages.dtype for pages in (k_pages, v_pages) if pages.dtype not in narrow], value_dim, options)
    if narrow or not {q.shape[2], value_dim} <= set(HEAD_DIMS):
        k_pages = _copied_pages(k_pages, page_table, k_scale, q.dtype)
        v_pages = _copied_pages(v_pages, page_table, v_scale, q.dtype)
        page_table = jnp.arange(page_table.size, dtype=jnp.int32).reshape(page_table.shape)
        q = _widened(q)
    exact, sizes = tuning_key(q, k_pages, v_pages, options["causal"])
    tuning = tuning or choose("attention/ragged", Tuning, exact=exact, sizes=sizes)
    out, lse = _attend(
        q, k_pages, v_pages, cu_q_lens, seq_lens, page_table, tuning=tuning, interpret=interpret, **options
    )
    return out[..., :value_dim], lse


def _copied_pages(pages: Array, page_table: Int[Array, "B W"], scale: Array | None, dtype: Any) -> Array:
    """The pages that a table names, row after row of it, in `dtype` and in a head dim of the kernel: `[B * W, K, p, H]`."""
    entries = jnp.clip(page_table.reshape(-1), 0, pages.shape[0] - 1)
    held = pages[entries]
    if scale is not None:
        # Of each head, of each head and channel, or of each row of each page.
        factor = scale[entries][..., None] if scale.ndim == 3 else scale.reshape(scale.shape[0], 1, -1)
        held = held.astype(jnp.float32) * factor
    return _widened(held.astype(dtype))


def tuning_key(q: Array, k: Array, v: Array, causal: bool) -> tuple[dict[str, Any], dict[str, int]]:
    """Key of a call in the tuning table; keys packed or in pages."""
    paged = k.ndim == 4
    exact = {"dtype": str(q.dtype), "head_dim": q.shape[-1], "value_dim": v.shape[-1], "causal": causal, "paged": paged}
    heads = {"heads": q.shape[1], "kv_heads": k.shape[1]}
    return exact, {"tokens": q.shape[0], **heads, "page_size": k.shape[2] if paged else 0}


# Compiled as a function of its own, so that the layers of a model share one trace and one lowering of the kernel.
@functools.partial(
    jax.jit, static_argnames=("causal", "window", "soft_cap", "alibi_sqrt", "scale", "tuning", "interpret")
)
def _attend(
    q: Array, k: Array, v: Array, cu_q_lens: Array, kv_lens: Array, page_table: Array | None, *, sinks: Array | None,
    alibi_slopes: Array | None, tuning: Tuning, interpret: Any, **mask: Any,
) -> tuple[Array, Array]:  # fmt: skip
    # Not at the top: other machines need neither Pallas nor the time its import takes.
    from dflash_kernels.attention.ragged import mosaic_gpu_sm90 as kernel

    tokens, sequences = q.shape[0], cu_q_lens.shape[0] - 1
    if tokens == 0:
        return jnp.zeros((0, q.shape[1], v.shape[-1]), q.dtype), jnp.zeros((0, q.shape[1]), jnp.float32)
    cu_q_lens, kv_lens = cu_q_lens.astype(jnp.int32), kv_lens.astype(jnp.int32)
    shapes = {
        "tokens": tokens,
        "sequences": sequences,
        "heads": q.shape[1],
        "head_dim": q.shape[2],
        "value_dim": v.shape[-1],
    }
    given = {"has_sinks": sinks is not None, "has_slopes": alibi_slopes is not None}
    kv_starts = None
    if page_table is None:
        launch = plan(tuning, kv_heads=k.shape[1], kv_rows=k.shape[0], **shapes, **given, **mask)
        kv_starts, kv_lens = kv_lens[:-1], jnp.diff(kv_lens)
        k, v = (_padded(array, launch.keys) for array in (k, v))
    else:
        pages, kv_heads, page_size = k.shape[:3]
        rows = min(pages, page_table.size) * page_size
        launch = plan(
            tuning,
            kv_heads=kv_heads,
            kv_rows=rows,
            page_size=page_size,
            table_width=page_table.shape[1],
            **shapes,
            **given,
            **mask,
        )
        page_table = page_table.astype(jnp.int32)
    table, order = block_table(launch, tokens, cu_q_lens, kv_lens, kv_starts)
    extra = [array.astype(jnp.float32) for array in (sinks, alibi_slopes) if array is not None]
    out, lse = kernel.attention(launch, _padded(q, BLOCK), k, v, table, page_table, extra, interpret)
    return out[:tokens], _packed_lse(lse, order, cu_q_lens, tokens)


def _widened(array: Array) -> Array:
    wide = next(dim for dim in HEAD_DIMS if dim >= array.shape[-1])
    missing = [(0, 0)] * (array.ndim - 1) + [(0, wide - array.shape[-1])]
    return array if wide == array.shape[-1] else jnp.pad(array, missing)


def _padded(array: Array, least: int) -> Array:
    """A copy is never larger than the array it is from, and tiles of 8 rows divide it."""
    rows = max(-(-array.shape[0] // 8) * 8, least)
    return array if rows == array.shape[0] else jnp.pad(array, ((0, rows - array.shape[0]), (0, 0), (0, 0)))


def _packed_lse(
    lse: Float[Array, "N M 128"], order: Int[Array, "M"], cu_q_lens: Int[Array, "C"], tokens: int
) -> Float[Array, "T N"]:
    """From blocks as they were worked through to packed rows; -inf for padding."""
    starts, lens = cu_q_lens[:-1], jnp.diff(cu_q_lens)
    counts = block_counts(starts, lens)
    row = jnp.arange(tokens)
    sequence = jnp.minimum(jnp.sum(cu_q_lens[1:] <= row[:, None], axis=1), counts.shape[0] - 1)
    inside = row - starts[sequence] // 8 * 8
    block = (jnp.cumsum(counts) - counts)[sequence] + inside // BLOCK
    place = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=order.dtype))[block]
    return jnp.where(row[:, None] < cu_q_lens[-1], lse[:, place, inside % BLOCK].T, -jnp.inf)


def _refuse_call(q: Array, stored: Sequence[Any], value_dim: int, options: dict[str, Any]) -> None:
    """Raises NotImplementedError with the reason for a call the kernel cannot serve; `stored`: dtypes that must be q's."""
    if q.dtype not in (jnp.bfloat16, jnp.float16) or any(dtype != q.dtype for dtype in stored):
        given = f"q {q.dtype} with {' and '.join(map(str, stored)) or 'pages in eight bits'}"
        raise NotImplementedError(f"takes bfloat16 or float16 throughout, or pages in eight bits, not {given}")
    if max(q.shape[-1], value_dim) > HEAD_DIMS[-1]:
        raise NotImplementedError(f"takes head dims to {HEAD_DIMS[-1]}, not {q.shape[-1]} and {value_dim}")
    if options["scale"] <= 0 or (options["soft_cap"] is not None and options["soft_cap"] <= 0):
        raise NotImplementedError(
            f"takes a positive scale and soft cap, not {options['scale']} and {options['soft_cap']}"
        )
