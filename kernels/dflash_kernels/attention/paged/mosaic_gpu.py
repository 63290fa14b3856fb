"""Paged attention on Hopper: what the kernels take, heads folded into rows, and the splits combined."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int8

from dflash_kernels.attention.paged.launch import (
    KERNEL_COMBINES,
    KERNEL_COMBINES_FRAGMENTS,
    Tuning,
    plan,
    plan_narrow,
    plan_wide,
)
from dflash_kernels.attention.paged.schedule import PagedSchedule
from dflash_kernels.core.device import require_hopper, require_page_size
from dflash_kernels.core.tuning import choose

HEAD_DIMS = (64, 72, 80, 96, 128, 192, 256, 512)
WIDE = 512  # a head dim whose sums fill the registers of two warpgroups
NARROW_HEAD_DIMS = (64, 128, 192, 256)
FEW_ROWS = 8
FARTHEST = 1.5  # as in `choose`: the number of splits follows from the exact numbers of sequences, rows and keys


def paged_attention_mosaic_gpu(*args: Any, **options: Any) -> tuple[Array, Array]:
    """See `paged_attention`. Raises NotImplementedError for what it does not take."""
    require_hopper(causal=options["causal"])
    return tuned(*args, **options)


def tuned(
    q: Float[Array, "B T N H"],
    k_pages: Float[Array, "P K p H"] | Int8[Array, "P K p H"],
    v_pages: Float[Array, "P K p Hv"] | Int8[Array, "P K p Hv"],
    page_table: Int[Array, "B W"],
    seq_lens: Int[Array, "B"],
    q_lens: Int[Array, "B"],
    *,
    causal: bool,
    window: tuple[int | None, int | None],
    soft_cap: float | None,
    sinks: Float[Array, "N"] | None,
    scale: float,
    alibi_slopes: Float[Array, "N"] | None = None,
    alibi_sqrt: bool = False,
    k_scale: Float[Array, "K"] | Float[Array, "P K p"] | None = None,
    v_scale: Float[Array, "K"] | Float[Array, "K Hv"] | None = None,
    schedule: PagedSchedule | None = None,
    batch_invariant: bool = False,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """The implementation without the device check: for benchmarks (`tuning`) and tests on the CPU (`interpret`).

    `tuning` None: from the table.
    """
    _refuse_call(q, k_pages, v_pages, soft_cap, scale)
    if batch_invariant and k_scale is not None and (soft_cap is not None or alibi_slopes is not None):
        raise NotImplementedError(
            "takes batch_invariant over pages of one byte without a soft cap and ALiBi, whose shares it may round in two ways"
        )
    exact, sizes = tuning_key(q, k_pages, page_table, causal, dealt=schedule is not None)
    tuning = tuning or choose("attention/paged", Tuning, exact=exact, sizes=sizes, farthest=FARTHEST)
    return _attend(
        q, k_pages, v_pages, page_table, seq_lens, q_lens, sinks, alibi_slopes, k_scale, v_scale, schedule, causal=causal,
        window=tuple(window), soft_cap=soft_cap, scale=scale, alibi_sqrt=alibi_sqrt, invariant=batch_invariant, tuning=tuning,
        interpret=interpret,
    )  # fmt: skip


def tuning_key(
    q: Array, k_pages: Array, page_table: Array, causal: bool, *, dealt: bool = False
) -> tuple[dict[str, Any], dict[str, int]]:
    """Key of a call in the table of tuned choices; `dealt`: its splits are a schedule's work items."""
    b, tokens, heads, head_dim = q.shape
    _, kv_heads, page_size, _ = k_pages.shape
    exact = {"dtype": str(q.dtype), "stored": str(k_pages.dtype), "head_dim": head_dim, "causal": causal}
    exact |= {"dealt": True} if dealt else {}
    sizes = {"b": b, "rows": tokens * heads // kv_heads, "kv_heads": kv_heads}
    return exact, sizes | {"page_size": page_size, "table_width": page_table.shape[1]}


# Compiled as a function of its own, so that the layers of a model share one trace and one lowering of the kernels.
@functools.partial(
    jax.jit, static_argnames=("causal", "window", "soft_cap", "scale", "alibi_sqrt", "invariant", "tuning", "interpret")
)  # fmt: skip
def _attend(
    q: Array, k_pages: Array, v_pages: Array, page_table: Array, seq_lens: Array, q_lens: Array, sinks: Array | None,
    slopes: Array | None, k_scale: Array | None, v_scale: Array | None, schedule: PagedSchedule | None, *, invariant: bool,
    tuning: Tuning, interpret: Any, **mask: Any,
) -> tuple[Array, Array]:  # fmt: skip
    # Not at the top: other machines need neither Pallas nor the time its import takes.
    from dflash_kernels.attention.paged import mosaic_gpu_sm90 as sm90
    from dflash_kernels.attention.paged import mosaic_gpu_sm90_8bit as sm90_8bit
    from dflash_kernels.attention.paged import mosaic_gpu_sm90_wide as sm90_wide
    from dflash_kernels.mosaic_gpu import combine

    b, tokens, n, head_dim = q.shape
    kv_heads, page_size = k_pages.shape[1:3]
    group = n // kv_heads
    rows = tokens * group
    dealt: dict[str, Any] = {} if schedule is None else {"items": schedule.items.shape[0]}
    if k_scale is not None:
        dealt["invariant"] = invariant  # which those over pages in sixteen bits are
    launch = (plan_narrow if k_scale is not None else plan_wide if head_dim == WIDE else plan)(
        tuning, b=b, tokens=tokens, group=group, head_dim=head_dim, page_size=page_size, kv_heads=kv_heads,
        table_width=page_table.shape[1], has_sinks=sinks is not None, **dealt, **mask,
    )  # fmt: skip
    launch = launch.traced_for(interpret)
    integers = [array.astype(jnp.int32) for array in (page_table, seq_lens, q_lens)]

    def of_rows(of_heads: Array) -> Array:
        """`[N]` as `[K, rows]`, padded to whole blocks."""
        each = jnp.tile(of_heads.astype(jnp.float32).reshape(kv_heads, 1, group), (1, tokens, 1))
        return jnp.pad(each.reshape(kv_heads, rows), ((0, 0), (0, launch.row_blocks * launch.block_rows - rows)))

    slopes = None if slopes is None else of_rows(slopes)
    grouped = q.reshape(b, tokens, kv_heads, group, head_dim)
    if launch.items and schedule is not None:
        if k_scale is None or v_scale is None:
            out, lse = sm90.attention_by_items(
                launch, schedule, grouped, k_pages, v_pages, slopes, *integers, interpret=interpret
            )
        else:
            out, lse = sm90_8bit.attention_by_items(
                launch, schedule, grouped, k_pages, v_pages, k_scale, v_scale, slopes, *integers, interpret=interpret
            )
        return out.reshape(q.shape), combine.combined_lse(lse, q_lens, None, tokens, group)
    whole = launch.direct or launch.together
    # Of few rows a split in token order is as quick.
    fragments = k_scale is None and rows > FEW_ROWS and head_dim % 16 == 0 and not launch.halves
    fewest = KERNEL_COMBINES_FRAGMENTS if fragments else KERNEL_COMBINES
    merge = tuning.merge or ("kernel" if launch.splits >= fewest else "xla")
    if k_scale is None or v_scale is None:
        if merge == "kernel" and not whole and fragments:
            launch = dataclasses.replace(launch, fragments=True)
        if launch.halves:
            out, parts_lse = sm90_wide.attention(
                launch, grouped, k_pages, v_pages, slopes, *integers, interpret=interpret
            )
        else:
            sunk = of_rows(sinks) if sinks is not None and launch.direct else None
            out, parts_lse = sm90.attention(
                launch, grouped, k_pages, v_pages, slopes, *integers, sinks=sunk, interpret=interpret
            )
    else:
        out, parts_lse = sm90_8bit.attention(
            launch, grouped, k_pages, v_pages, k_scale, v_scale, slopes, *integers, interpret=interpret
        )  # fmt: skip
    sinks = None if sinks is None else sinks.astype(jnp.float32)
    lse = combine.combined_lse(parts_lse, q_lens, sinks, tokens, group)
    if whole:
        return out.reshape(q.shape), lse
    if launch.fragments:
        return combine.combine_fragments(out, parts_lse, sinks, tokens, group, q.dtype, interpret), lse
    if merge == "xla" or not combine.combines_rows(group, head_dim):
        return combine.combine_xla(out, parts_lse, sinks, tokens, group, q.dtype), lse
    return combine.combine_rows(out, parts_lse, sinks, tokens, group, q.dtype, interpret), lse


def _refuse_call(q: Array, k_pages: Array, v_pages: Array, soft_cap: float | None, scale: float) -> None:
    """Raises NotImplementedError with the reason for a call the kernel cannot serve."""
    given = f"q {q.dtype} with pages {k_pages.dtype} and {v_pages.dtype}"
    if jnp.float8_e5m2 in (k_pages.dtype, v_pages.dtype):
        raise NotImplementedError(f"takes float8_e4m3fn alone of the float8 formats, not {given}")
    if k_pages.dtype in (jnp.float8_e4m3fn, jnp.int8):
        if q.dtype not in (jnp.bfloat16, jnp.float16) or v_pages.dtype != k_pages.dtype:
            raise NotImplementedError(f"takes pages of one byte, both alike, with queries of two, not {given}")
        if q.shape[-1] not in NARROW_HEAD_DIMS:
            raise NotImplementedError(f"takes head dims {NARROW_HEAD_DIMS} with pages of one byte, not {q.shape[-1]}")
    elif q.dtype not in (jnp.bfloat16, jnp.float16) or k_pages.dtype != q.dtype or v_pages.dtype != q.dtype:
        raise NotImplementedError(f"takes bfloat16 or float16 throughout, or pages of one byte, not {given}")
    elif q.shape[-1] not in HEAD_DIMS:
        raise NotImplementedError(f"takes head dims {HEAD_DIMS}, not {q.shape[-1]}")
    if v_pages.shape[3] != k_pages.shape[3]:
        raise NotImplementedError(f"takes values of the keys' head dim {k_pages.shape[3]}, not {v_pages.shape[3]}")
    page_size = k_pages.shape[2]
    require_page_size(page_size)
    if k_pages.dtype == jnp.int8 and page_size < 32:
        # The scales of a smaller page would land in shared memory where a copy may not start.
        raise NotImplementedError(f"takes int8 pages of 32 tokens and more, not {page_size}")
    if scale <= 0 or (soft_cap is not None and soft_cap <= 0):
        raise NotImplementedError(f"takes a positive scale and soft cap, not {scale} and {soft_cap}")
