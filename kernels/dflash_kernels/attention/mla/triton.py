"""Absorbed latent attention through jax-triton, for NVIDIA GPUs from Ampere on: what it takes, its tiling, and its launch.

The kernel itself lies in `triton_kernel.py`, since Triton, which that imports, is an extra.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_kernels.attention.split_kv import best_splits, combine_splits
from dflash_kernels.core.device import Target
from dflash_kernels.core.triton_call import (
    FIRST_WITH_FLOAT8,
    MULTIPROCESSORS,
    SHARED_MEMORY,
    jax_triton,
    power_of_two,
    usable_target,
)

LARGEST_RANK = 512
# Shared memory of a program on GPUs for data centres, where most of the others have `SHARED_MEMORY`.
LARGE_SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024, 103: 227 * 1024}


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Choices that change speed and rounding only. None: chosen from the shapes and the device.

    Attributes:
      splits: programs that share a sequence's pages (split-KV).
      rows: query rows of a program, a power of two from 16.
      keys: keys of a tile, a power of two from 16.
      stages: depth of the compiler's pipeline: tiles are double buffered from 5.
      warps: of a program.
    """

    splits: int | None = None
    rows: int | None = None
    keys: int | None = None
    stages: int = 5
    warps: int = 8


CHOSEN = Tuning()


def mla_attention_triton(
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
    tuning: Tuning = CHOSEN,
) -> tuple[Float[Array, "B T N R"], Float[Array, "B T N"]]:
    """See `mla_attention`. Raises NotImplementedError for what it does not take; `tuning` is for benchmarks."""
    if limits is not None:
        raise NotImplementedError("takes no limits")
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"takes queries in bfloat16 or float16, not {q.dtype}")
    if latent_pages.dtype not in (q.dtype, jnp.float8_e4m3fn):
        raise NotImplementedError(f"takes pages in the queries' {q.dtype} or float8_e4m3fn, not {latent_pages.dtype}")
    if kv_lora_rank > LARGEST_RANK or not 0 < q.shape[-1] - kv_lora_rank <= LARGEST_RANK // 4:
        given = f"{kv_lora_rank} and {q.shape[-1] - kv_lora_rank}"
        raise NotImplementedError(
            f"takes up to {LARGEST_RANK} latents and {LARGEST_RANK // 4} rotated parts, not {given}"
        )
    return _attend(
        q, latent_pages, page_table, seq_lens, q_lens, latent_scale, rank=kv_lora_rank, scale=scale, causal=causal, tuning=tuning,
        device=usable_target(),
    )  # fmt: skip


# Compiled as a function of its own, so that the layers of a model share one trace and one lowering of the kernels.
@functools.partial(jax.jit, static_argnames=("rank", "scale", "causal", "tuning", "device"))
def _attend(
    q: Array, latent_pages: Array, page_table: Array, seq_lens: Array, q_lens: Array, latent_scale: Array | None, *, rank: int,
    scale: float, causal: bool, tuning: Tuning, device: Target,
) -> tuple[Array, Array]:  # fmt: skip
    # Not at the top: Triton is an extra.
    from dflash_kernels.attention.mla.triton_kernel import attend

    b, tokens, heads, width = q.shape
    # Older GPUs have no float8: they take the bytes apart.
    bits = latent_pages.dtype == jnp.float8_e4m3fn and device.capability < FIRST_WITH_FLOAT8
    pool = jax.lax.bitcast_convert_type(latent_pages, jnp.uint8) if bits else latent_pages
    grid, constants = plan(
        tuning, device, b=b, tokens=tokens, heads=heads, page_size=pool.shape[2], table_width=page_table.shape[1]
    )
    splits = constants["SPLITS"]
    seq_lens, q_lens, page_table = (array.astype(jnp.int32) for array in (seq_lens, q_lens, page_table))
    # Something has to stand where there is no scale; the kernel does not look at it.
    given = seq_lens if latent_scale is None else latent_scale.astype(jnp.float32).reshape(1)
    direct = splits == 1
    parts = (b, tokens, heads, splits)
    out, lse = jax_triton().triton_call(
        q, pool, page_table, seq_lens, q_lens, given, kernel=attend, grid=grid, num_warps=tuning.warps, num_stages=tuning.stages,
        compute_capability=device.capability,
        out_shape=(
            jax.ShapeDtypeStruct((*parts, rank), q.dtype if direct else jnp.float32),
            jax.ShapeDtypeStruct(parts, jnp.float32),
        ),
        RANK=rank, ROTATED=width - rank, RANK_PADDED=max(power_of_two(rank), 16),
        ROTATED_PADDED=max(power_of_two(width - rank), 16), SCALE=scale, CAUSAL=causal, SCALED=latent_scale is not None,
        FLOAT8_BITS="e4m3" if bits else None, **constants,
    )  # fmt: skip
    if direct:
        return out[..., 0, :], lse[..., 0]
    return combine_splits(out, lse, q.dtype)


def plan(
    tuning: Tuning, device: Target, *, b: int, tokens: int, heads: int, page_size: int, table_width: int
) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """Cuts a call into programs: the grid, and what the kernel is told about it.

    All rows read the same latents, so the more rows a program has the better, as far as its sums fit into registers and its queries
    and two tiles of latents into shared memory.
    """
    large = LARGE_SHARED_MEMORY.get(device.capability, SHARED_MEMORY) > SHARED_MEMORY
    rows = tuning.rows or min(max(power_of_two(tokens * heads), 16), 64 if large else 32)
    keys = tuning.keys or (32 if rows == 16 else 16)
    row_blocks = -(-tokens * heads // rows)
    slots = device.multiprocessors or MULTIPROCESSORS
    splits = tuning.splits or best_splits(b * row_blocks, slots, table_width * page_size, keys, rows)
    constants = {
        "TOKENS": tokens, "HEADS": heads, "PAGE": page_size, "WIDTH": table_width, "ROWS": rows, "KEYS": keys, "SPLITS": splits,
    }  # fmt: skip
    return (row_blocks, splits, b), constants
