"""Absorbed latent attention on Hopper: what the kernel takes, its launch, and the splits combined."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from dflash_kernels.attention.mla.launch import (
    KEYS,
    NARROW_ROWS,
    RANK,
    ROTATED,
    STORED,
    Launch,
    Tuning,
    longest_first,
    plan,
)
from dflash_kernels.attention.mla.selected_reference import WORKSPACE, named_rows
from dflash_kernels.core.device import require_hopper, require_page_size
from dflash_kernels.core.tuning import choose

FARTHEST = 1.5  # as in `choose`: the number of splits follows from the exact numbers of sequences, rows and keys


def mla_attention_mosaic_gpu(*args: Any, **options: Any) -> tuple[Array, Array]:
    """See `mla_attention`. Raises NotImplementedError for what it does not take."""
    require_hopper()
    return tuned(*args, **options)


def tuned(
    q: Float[Array, "B T N C"],
    latent_pages: Float[Array, "P 1 p C"],
    page_table: Int[Array, "B W"],
    seq_lens: Int[Array, "B"],
    q_lens: Int[Array, "B"],
    *,
    kv_lora_rank: int,
    scale: float,
    causal: bool,
    limits: tuple[Int[Array, "B"], Int[Array, "B"]] | None = None,
    latent_scale: Float[Array, ""] | None = None,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "B T N R"], Float[Array, "B T N"]]:
    """The implementation without the device check: for benchmarks (`tuning`) and tests on the CPU (`interpret`).

    `tuning` None: from the table.
    """
    _refuse_call(q, latent_pages, kv_lora_rank, scale)
    if limits is not None and latent_scale is not None:
        raise NotImplementedError("takes no limits with float8_e4m3fn pages")
    exact, sizes = tuning_key(q, latent_pages, page_table, causal)
    tuning = tuning or choose("attention/mla", Tuning, exact=exact, sizes=sizes, farthest=FARTHEST)
    return _attend(
        q, latent_pages, page_table, seq_lens, q_lens, limits, latent_scale, scale=scale, causal=causal, tuning=tuning,
        interpret=interpret,
    )  # fmt: skip


def tuning_key(q: Array, latent_pages: Array, page_table: Array, causal: bool) -> tuple[dict[str, Any], dict[str, int]]:
    """Key of a call in the table of tuned choices: what must be the same, and sizes that may be near."""
    b, tokens, heads, _ = q.shape
    exact = {"dtype": str(q.dtype), "stored": str(latent_pages.dtype), "causal": causal}
    page_size, table_width = latent_pages.shape[2], page_table.shape[1]
    return exact, {"b": b, "rows": tokens * heads, "page_size": page_size, "table_width": table_width}


def mla_selected_mosaic_gpu(*args: Any, **options: Any) -> tuple[Array, Array]:
    """See `mla_selected_attention`. Raises NotImplementedError for what it does not take."""
    require_hopper()
    return selected(*args, **options)


def selected(
    q: Float[Array, "B T N C"],
    latent_pages: Shaped[Array, "P 1 p stored"],
    slots: Int[Array, "B T K"],
    *,
    kv_lora_rank: int,
    scale: float,
    latent_scale: Float[Array, ""],
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "B T N R"], Float[Array, "B T N"]]:
    """The implementation without the device check. Each query token is a sequence of its own, of as many rows as it names."""
    b, t, count = slots.shape
    if latent_pages.dtype != q.dtype:
        most = WORKSPACE // (count * q.shape[3] * q.dtype.itemsize)
        if b * t > most:
            raise NotImplementedError(f"takes {most} query tokens that name {count} rows in eight bits, not {b * t}")
        # Rows in sixteen bits, of each query token those that it names, in their order.
        rows, held = named_rows(latent_pages, slots, q.dtype, kv_lora_rank=kv_lora_rank, scale=latent_scale)
        latent_pages = rows.reshape(b * t, 1, count, -1)
        slots = jnp.where(held, jnp.arange(b * t * count, dtype=jnp.int32).reshape(slots.shape), -1)
    _refuse_call(q, latent_pages, kv_lora_rank, scale, paged=False)
    return _attend_selected(q, latent_pages, slots, scale=scale, tuning=tuning or Tuning(), interpret=interpret)


@functools.partial(jax.jit, static_argnames=("scale", "tuning", "interpret"))
def _attend_selected(
    q: Array, latent_pages: Array, slots: Array, *, scale: float, tuning: Tuning, interpret: Any
) -> tuple[Array, Array]:
    from dflash_kernels.attention.mla import mosaic_gpu_sm90 as kernel
    from dflash_kernels.mosaic_gpu import combine as merging

    b, t, heads, width = q.shape
    tiles = -(-slots.shape[2] // KEYS)
    launch = plan(
        tuning, b=b * t, tokens=1, heads=heads, page_size=KEYS, table_width=tiles, quantized=False, causal=False,
        scale=scale, selected=True,
    )  # fmt: skip
    folded, table = q.reshape(b * t, heads, width), slots.reshape(b * t, -1).astype(jnp.int32)
    if table.shape[1] % KEYS:
        table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % KEYS)), constant_values=-1)
    if launch.rows > heads:
        folded = jnp.pad(folded, ((0, 0), (0, launch.rows - heads), (0, 0)))
    # Lengths are all the same, and known: an array of them would be made by a launch of its own.
    out, lse = kernel.attention(launch, folded, latent_pages, *[table] * 4, interpret=interpret)
    if launch.direct:
        out, lse = out[:, :heads], lse[:, 0, 0, :heads]
    else:
        out, lse = merging.combine_latent(out, lse, heads, q.dtype, interpret)
    return out.reshape(b, t, heads, RANK), lse.reshape(b, t, heads)


# Compiled as a function of its own, so that the layers of a model share one trace and one lowering of the kernels.
@functools.partial(jax.jit, static_argnames=("scale", "causal", "tuning", "interpret"))
def _attend(
    q: Array, latent_pages: Array, page_table: Array, seq_lens: Array, q_lens: Array,
    limits: tuple[Array, Array] | None, latent_scale: Array | None, *, scale: float, causal: bool, tuning: Tuning, interpret: Any,
) -> tuple[Array, Array]:  # fmt: skip
    # Not at the top: other machines need neither Pallas nor the time its import takes.
    from dflash_kernels.attention.mla import mosaic_gpu_sm90 as kernel
    from dflash_kernels.mosaic_gpu import combine as merging

    b, tokens, heads, width = q.shape
    launch = plan(
        tuning, b=b, tokens=tokens, heads=heads, page_size=latent_pages.shape[2], table_width=page_table.shape[1],
        quantized=latent_scale is not None, causal=causal, scale=scale, limited=limits is not None,
    )  # fmt: skip
    rows = tokens * heads
    folded = q.reshape(b, rows, width)
    if latent_scale is not None:
        # float16 holds every e4m3 number; the scale goes into the queries before, and into the output after.
        largest = float(jnp.finfo(jnp.float16).max)
        folded = jnp.clip(folded.astype(jnp.float32) * latent_scale, -largest, largest).astype(jnp.float16)
    table, lens, new_lens = (array.astype(jnp.int32) for array in (page_table, seq_lens, q_lens))
    if launch.narrow:
        out, lse = _few_rows(launch, folded, latent_pages, latent_scale, table, lens, new_lens, q.dtype, interpret)
        return out.reshape(b, tokens, heads, RANK), lse.reshape(b, tokens, heads)
    if launch.rows > rows:
        folded = jnp.pad(folded, ((0, 0), (0, launch.rows - rows), (0, 0)))
    order = longest_first(seq_lens if limits is None else limits[1]) if launch.ordered else lens
    if limits is not None:
        lens = jnp.concatenate([lens, *(limit.astype(jnp.int32) for limit in limits)])
    out, lse = kernel.attention(launch, folded, latent_pages, table, lens, new_lens, order, interpret=interpret)
    if launch.direct:
        out, lse = out[:, :rows], lse[:, 0, 0, :rows]
    else:
        out, lse = merging.combine_latent(out, lse, rows, folded.dtype, interpret)
    if latent_scale is not None:
        out = (out.astype(jnp.float32) * latent_scale).astype(q.dtype)
    return out.reshape(b, tokens, heads, RANK), lse.reshape(b, tokens, heads)


def _few_rows(
    launch: Launch, q: Array, latent_pages: Array, latent_scale: Array | None, table: Array, lens: Array, new_lens: Array,
    dtype: Any, interpret: Any,
) -> tuple[Array, Array]:  # fmt: skip
    """The kernel for float8 rows under few queries: `q [B, rows, R + r]`, the scale in it already."""
    from dflash_kernels.attention.mla import mosaic_gpu_sm90_8bit as narrow
    from dflash_kernels.mosaic_gpu import combine as merging
    from dflash_kernels.mosaic_gpu.layouts import in_key_order

    rows = launch.tokens * launch.heads
    # A row's garbage would raise the base of all rows.
    live = (jnp.arange(rows) // launch.heads)[None, :, None] < new_lens[:, None, None]
    q = jnp.pad(in_key_order(jnp.where(live, q, 0)), ((0, 0), (0, NARROW_ROWS - rows), (0, 0)))
    factor = jnp.ones((1,), jnp.float32) if latent_scale is None else latent_scale.reshape(1)
    out, lse = narrow.attention(launch, q, latent_pages, factor, table, lens, new_lens, dtype, interpret=interpret)
    if launch.direct:
        return out, lse[:, 0, 0, :rows]
    return merging.combine_latent(out, lse, rows, dtype, interpret)


def _refuse_call(q: Array, latent_pages: Array, kv_lora_rank: int, scale: float, *, paged: bool = True) -> None:
    """Raises NotImplementedError with the reason for a call the kernel cannot serve."""
    if q.dtype not in (jnp.bfloat16, jnp.float16) or latent_pages.dtype not in (q.dtype, STORED):
        given = f"q {q.dtype} with pages {latent_pages.dtype}"
        raise NotImplementedError(f"takes bfloat16 or float16, in the pages too or float8_e4m3fn there, not {given}")
    if (kv_lora_rank, q.shape[-1]) != (RANK, RANK + ROTATED):
        given = f"{kv_lora_rank} + {q.shape[-1] - kv_lora_rank}"
        raise NotImplementedError(f"takes rows of {RANK} + {ROTATED} entries, not {given}")
    if paged:
        require_page_size(latent_pages.shape[2])
    if scale <= 0:
        raise NotImplementedError(f"takes a positive scale, not {scale}")
