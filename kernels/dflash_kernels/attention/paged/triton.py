"""Paged attention through jax-triton, for NVIDIA GPUs from Ampere on: what it takes, its tiling, and its launch.

The kernel itself lies in `triton_kernel.py`, since Triton, which that imports, is an extra.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int8

from dflash_kernels.attention.paged.schedule import PagedSchedule
from dflash_kernels.attention.split_kv import best_splits, combine_splits
from dflash_kernels.core.device import Target
from dflash_kernels.core.triton_call import FIRST_WITH_FLOAT8, MULTIPROCESSORS, jax_triton, power_of_two, usable_target
from dflash_kernels.core.validation import FLOAT8

LARGEST_HEAD_DIM = 256
FEWEST_TILES = 4  # worth a split of their own


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Choices that change speed and rounding only. None: chosen from the shapes.

    Attributes:
      splits: programs that share a sequence's pages (split-KV).
      rows: query rows of a program, a power of two from 16.
      keys: keys of a tile, a power of two from 16.
      stages: depth of the compiler's pipeline. Page numbers and the copies that follow them take two stages each: tiles are double
        buffered from 5.
      warps: of a program.
    """

    splits: int | None = None
    rows: int | None = None
    keys: int | None = None
    stages: int = 5
    warps: int = 4


@dataclasses.dataclass(frozen=True)
class Launch:
    """Grid, options and constants of one launch of the kernel."""

    grid: tuple[int, int, int]
    warps: int
    stages: int
    constants: dict[str, Any]

    @property
    def splits(self) -> int:
        return self.constants["SPLITS"]


CHOSEN = Tuning()


def paged_attention_triton(
    q: Float[Array, "B T N H"],
    k_pages: Float[Array, "P K p H"] | Int8[Array, "P K p H"],
    v_pages: Float[Array, "P K p V"] | Int8[Array, "P K p V"],
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
    v_scale: Float[Array, "K"] | Float[Array, "K V"] | None = None,
    schedule: PagedSchedule | None = None,
    batch_invariant: bool = False,
    tuning: Tuning = CHOSEN,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """See `paged_attention`. Raises NotImplementedError for what it does not take; `tuning` is for benchmarks."""
    _refuse_call(q, k_pages, v_pages, soft_cap)
    if batch_invariant:
        raise NotImplementedError("deals keys out by how many there are, which batch_invariant forbids")
    alibi = None if alibi_slopes is None else "sqrt" if alibi_sqrt else "linear"
    return _attend(
        q, k_pages, v_pages, page_table, seq_lens, q_lens, sinks, alibi_slopes, k_scale, v_scale, causal=causal,
        window=tuple(window), soft_cap=soft_cap, alibi=alibi, scale=scale, tuning=tuning, device=usable_target(),
    )  # fmt: skip


# Compiled as a function of its own, so that the layers of a model share one trace and one lowering of the kernels.
@functools.partial(jax.jit, static_argnames=("causal", "window", "soft_cap", "alibi", "scale", "tuning", "device"))
def _attend(
    q: Array, k_pages: Array, v_pages: Array, page_table: Array, seq_lens: Array, q_lens: Array, *options: Array | None,
    causal: bool, window: tuple[int | None, int | None], soft_cap: float | None, alibi: str | None, scale: float, tuning: Tuning,
    device: Target,
) -> tuple[Array, Array]:  # fmt: skip
    # Not at the top: Triton is an extra.
    from dflash_kernels.attention.paged import triton_kernel as kernel

    b, tokens, n, head_dim = q.shape
    (kv_heads, page_size), value_dim = k_pages.shape[1:3], v_pages.shape[3]
    sinks, _, k_scale, v_scale = options
    (k_pages, k_bits), (v_pages, v_bits) = (_in_bytes(pages, device) for pages in (k_pages, v_pages))
    launch = plan(
        tuning, b=b, tokens=tokens, group=n // kv_heads, head_dim=head_dim, value_dim=value_dim, page_size=page_size,
        kv_heads=kv_heads, table_width=page_table.shape[1], multiprocessors=device.multiprocessors, causal=causal, window=window,
        soft_cap=soft_cap, scale=scale, sinks=sinks is not None, alibi=alibi, k_bits=k_bits, v_bits=v_bits,
        k_scale=None if k_scale is None else "head" if k_scale.ndim == 1 else "token",
        v_scale=None if v_scale is None else "head" if v_scale.ndim == 1 else "channel",
    )  # fmt: skip
    seq_lens, q_lens, page_table = (array.astype(jnp.int32) for array in (seq_lens, q_lens, page_table))
    # Something has to stand where this call leaves an option out; the kernel does not look at it.
    given = [seq_lens if option is None else option.astype(jnp.float32) for option in options]
    direct = launch.splits == 1
    parts = (b, tokens, n, launch.splits)
    out, lse = jax_triton().triton_call(
        q, k_pages, v_pages, page_table, seq_lens, q_lens, *given, kernel=kernel.attend, grid=launch.grid,
        out_shape=(
            jax.ShapeDtypeStruct((*parts, value_dim), q.dtype if direct else jnp.float32),
            jax.ShapeDtypeStruct(parts, jnp.float32),
        ),
        num_warps=launch.warps, num_stages=launch.stages, compute_capability=device.capability, **launch.constants,
    )  # fmt: skip
    if direct:
        return out[..., 0, :], lse[..., 0]
    return combine_splits(out, lse, q.dtype, sinks, q_lens)


def _in_bytes(pages: Array, device: Target) -> tuple[Array, str | None]:
    """Pages as the kernel reads them, and of which float8 they are bytes then.

    Older GPUs have no float8_e4m3fn: they take the bytes apart. float8_e5m2 is half of a float16 on all.
    """
    if pages.dtype == jnp.float8_e5m2:
        return jax.lax.bitcast_convert_type(pages, jnp.uint8), "e5m2"
    if pages.dtype == jnp.float8_e4m3fn and device.capability < FIRST_WITH_FLOAT8:
        return jax.lax.bitcast_convert_type(pages, jnp.uint8), "e4m3"
    return pages, None


def _refuse_call(q: Array, k_pages: Array, v_pages: Array, soft_cap: float | None) -> None:
    """Raises NotImplementedError with the reason for a call the kernel cannot serve."""
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"takes queries in bfloat16 or float16, not {q.dtype}")
    if not {k_pages.dtype, v_pages.dtype} <= set(map(jnp.dtype, (q.dtype, *FLOAT8, jnp.int8))):
        given = f"{k_pages.dtype} and {v_pages.dtype}"
        raise NotImplementedError(f"takes pages in the queries' {q.dtype}, float8 or int8, not {given}")
    if max(q.shape[-1], v_pages.shape[-1]) > LARGEST_HEAD_DIM:
        raise NotImplementedError(
            f"takes head dims up to {LARGEST_HEAD_DIM}, not {max(q.shape[-1], v_pages.shape[-1])}"
        )
    if soft_cap is not None and soft_cap <= 0:
        raise NotImplementedError(f"takes a positive soft cap, not {soft_cap}")


def plan(
    tuning: Tuning, *, b: int, tokens: int, group: int, head_dim: int, page_size: int, kv_heads: int, table_width: int,
    multiprocessors: int, causal: bool, window: tuple[int | None, int | None], soft_cap: float | None, scale: float,
    sinks: bool = False, alibi: str | None = None, k_scale: str | None = None, v_scale: str | None = None,
    k_bits: str | None = None, v_bits: str | None = None, value_dim: int | None = None,
) -> Launch:  # fmt: skip
    """Cuts a call into programs."""
    value_dim = head_dim if value_dim is None else value_dim
    columns, value_columns = power_of_two(head_dim), power_of_two(value_dim)
    widest = max(columns, value_columns)
    rows = tuning.rows or min(max(power_of_two(tokens * group), 16), 64)
    keys = tuning.keys or (64 if widest <= 64 or (rows < 64 and widest <= 128) else 32 if widest <= 128 else 16)
    row_blocks = -(-tokens * group // rows)
    splits = tuning.splits
    if splits is None:
        slots = 2 * (multiprocessors or MULTIPROCESSORS)
        least = FEWEST_TILES * keys
        splits = best_splits(
            b * kv_heads * row_blocks, slots, table_width * page_size, least, min(tokens * group, rows)
        )
    left, right = window
    if causal:
        right = 0 if right is None else min(right, 0)
    constants = {
        "TOKENS": tokens, "GROUP": group, "KV_HEADS": kv_heads, "HEAD_DIM": head_dim, "PAGE": page_size, "WIDTH": table_width,
        "ROWS": rows, "KEYS": keys, "COLUMNS": columns, "ROW_BLOCKS": row_blocks, "SPLITS": splits, "SCALE": scale,
        "SOFT_CAP": soft_cap, "LEFT": left, "RIGHT": right, "SINKS": sinks and splits == 1, "ALIBI": alibi, "K_SCALE": k_scale,
        "V_SCALE": v_scale, "K_BITS": k_bits, "V_BITS": v_bits, "VALUE_DIM": value_dim, "VALUE_COLUMNS": value_columns,
    }  # fmt: skip
    return Launch((kv_heads * row_blocks, splits, b), tuning.warps, tuning.stages, constants)
