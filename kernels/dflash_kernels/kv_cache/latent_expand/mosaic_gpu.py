"""Latent expansion on Hopper: what the kernel supports, and its launch."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_kernels.core.device import require_hopper
from dflash_kernels.kv_cache.latent_expand.launch import COLUMNS, ROWS, SLAB, Plan, Tuning, plan

CHOSEN = Tuning()


def latent_expand_mosaic_gpu(*args: Any, rows: int) -> tuple[Array, Array]:
    """See `latent_expand`. Raises NotImplementedError for what the kernel does not support."""
    require_hopper()
    return launch(*args, rows=rows)


def launch(
    latent_pages: Float[Array, "P 1 p C"],
    page_table: Int[Array, "B W"],
    starts: Int[Array, "B"],
    lens: Int[Array, "B"],
    w_uk: Float[Array, "N nope R"],
    w_uv: Float[Array, "N V R"],
    *,
    rows: int,
    tuning: Tuning = CHOSEN,
    interpret: Any = None,
) -> tuple[Float[Array, "B rows N H"], Float[Array, "B rows N V"]]:
    """The implementation without the device check: for benchmarks (`tuning`) and tests on the CPU (`interpret`)."""
    _require(latent_pages, w_uk, w_uv)
    schedule = plan(
        tuning, heads=w_uk.shape[0], rank=w_uk.shape[2], page_size=latent_pages.shape[2],
        sequences=page_table.shape[0], rows=rows,
    )  # fmt: skip
    k, v = _expand(latent_pages, page_table, starts, lens, w_uk, w_uv, schedule=schedule, interpret=interpret)
    k, v = (x.reshape(schedule.sequences, schedule.stride, *x.shape[1:])[:, :rows] for x in (k, v))
    return k, v


# Compiled as a function of its own, so that the layers of a model share one trace and one lowering of the kernel.
@functools.partial(jax.jit, static_argnames=("schedule", "interpret"))
def _expand(
    latent_pages: Array, page_table: Array, starts: Array, lens: Array, w_uk: Array, w_uv: Array, *, schedule: Plan,
    interpret: Any,
) -> tuple[Array, Array]:  # fmt: skip
    # Not at the top: other machines need neither Pallas nor the time its import takes.
    from dflash_kernels.kv_cache.latent_expand import mosaic_gpu_sm90 as kernel

    # Both are halves of one array in a model, which this puts together again without a copy.
    weights = jnp.concatenate([w_uk, w_uv], axis=1)
    page_table, starts, lens = (x.astype(jnp.int32) for x in (page_table, starts, lens))
    return kernel.expand(schedule, latent_pages, page_table, starts, lens, weights, interpret)


def _require(latent_pages: Array, w_uk: Array, w_uv: Array) -> None:
    """Raises NotImplementedError, with the reason, for a call that the kernel does not support."""
    if latent_pages.dtype not in (jnp.bfloat16, jnp.float16) or {w_uk.dtype, w_uv.dtype} != {latent_pages.dtype}:
        raise NotImplementedError(
            f"takes bfloat16 or float16 throughout, not pages of {latent_pages.dtype} with {w_uk.dtype} and {w_uv.dtype}"
        )
    rank, rotated = w_uk.shape[2], latent_pages.shape[3] - w_uk.shape[2]
    if w_uk.shape[1] != COLUMNS or w_uv.shape[1] != COLUMNS or rotated != SLAB or rank % SLAB or not 128 <= rank <= 512:
        raise NotImplementedError(
            f"takes heads of {COLUMNS} and {SLAB}, values of {COLUMNS} and latents of a multiple of {SLAB} from 128 to 512, not "
            f"heads of {w_uk.shape[1]} and {rotated}, values of {w_uv.shape[1]} and latents of {rank}"
        )
    if math.gcd(latent_pages.shape[2], ROWS) < 8:
        raise NotImplementedError(f"takes page sizes that are a multiple of 8, not {latent_pages.shape[2]}")
