"""Queries over their sequences' pages, by the op that suits their number."""

from typing import Any, cast

import jax.numpy as jnp
from dflash_kernels import NoImplementationError, PagedSchedule, paged_attention, ragged_paged_attention
from dflash_kernels.core.device import target
from jaxtyping import Array, Float, Int

from dflash_jax.execution import switches

# The kernel for prompts gives a CTA 128 queries of one head and all their keys; the one for decoding splits the keys until every
# multiprocessor has work. So the former is for calls that have blocks of queries for nearly all of them. Measured on an H200 over
# 4,096 keys, 32 heads (benchmarks/chunks.py): for one prompt it is slower by a third with 256 queries and faster by a sixth with
# 512, for eight slower by a third with 64 and faster by a fifth with 128.
BLOCK, FILLED = 128, 0.9
WIDE = 256  # heads wider than that are `switches.WIDE_HEADS`'


def attend_to_pages(
    q: Float[Array, "B T N H"],
    k_pages: Array,
    v_pages: Array,
    page_table: Int[Array, "B W"],
    seq_lens: Int[Array, "B"],
    *,
    q_lens: Int[Array, "B"],
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    schedule: PagedSchedule | None = None,
    batch_invariant: bool = False,
    **options: Any,
) -> Float[Array, "B T N V"]:
    """`paged_attention`; long chunks of a prompt go through the kernel for prompts where there is one that takes them."""
    keys = (k_pages, v_pages, page_table, seq_lens)
    if fills(*q.shape[:3]) and k_pages.dtype == q.dtype:  # the kernel for prompts takes no scaled pages
        try:
            return long_chunks(q, *keys, q_lens=q_lens, implementation="mosaic_gpu", **options)
        except NoImplementationError:
            pass
    if q.shape[-1] > WIDE and not switches.WIDE_HEADS:
        options["implementation"] = "xla"
    options |= {"k_scale": k_scale, "v_scale": v_scale, "schedule": schedule, "batch_invariant": batch_invariant}
    return cast(Array, paged_attention(q, *keys, q_lens=q_lens, **options))


def fills(sequences: int, tokens: int, heads: int) -> bool:
    """Whether a call has enough blocks of queries for the kernel for prompts."""
    blocks = sequences * (tokens // BLOCK) * heads
    return blocks > 0 and blocks >= FILLED * target().multiprocessors


def long_chunks(
    q: Float[Array, "B T N H"],
    k_pages: Float[Array, "P K p H"],
    v_pages: Float[Array, "P K p V"],
    page_table: Int[Array, "B W"],
    seq_lens: Int[Array, "B"],
    *,
    q_lens: Int[Array, "B"],
    **options: Any,
) -> Float[Array, "B T N V"]:
    """`paged_attention` by way of `ragged_paged_attention`, which packs: rows past `q_lens` become sequences without keys."""
    b, t = q.shape[:2]
    starts = jnp.arange(b, dtype=jnp.int32) * t
    cu_q_lens = jnp.append(jnp.stack([starts, starts + q_lens], axis=1).reshape(-1), b * t)
    lens = jnp.stack([seq_lens, jnp.zeros_like(seq_lens)], axis=1).reshape(-1)
    out = ragged_paged_attention(
        q.reshape(b * t, *q.shape[2:]), k_pages, v_pages, cu_q_lens, jnp.repeat(page_table, 2, axis=0), lens, **options
    )
    return cast(Array, out).reshape(*q.shape[:3], -1)
