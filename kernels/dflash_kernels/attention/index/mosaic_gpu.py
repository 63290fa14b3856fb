"""An indexer's scores and choice on Hopper: what the kernels take, and their launches."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_kernels.attention.index.launch import KEYS, MOST_COLUMNS, WIDTH, Tuning, plan
from dflash_kernels.core.device import MULTIPROCESSORS, SHARED_MEMORY, require_hopper, target

MOST_CTAS, CLUSTERS = 8, 14  # of a cluster that every GPU can launch, and how many clusters of so many run at once
LARGE_CTAS = 16  # of one that fits into a part of a GPU with 132 multiprocessors
LARGEST = 11 * 4096  # numbers of a row that a CTA holds


def index_scores_mosaic_gpu(*args: Any, **options: Any) -> Array:
    """See `index_scores`. Raises NotImplementedError for what the kernel does not take."""
    require_hopper()
    return launch_scores(*args, **options)


@functools.partial(jax.jit, static_argnames=("tuning", "interpret"))
def launch_scores(
    q: Float[Array, "B T I E"],
    weights: Float[Array, "B T I"],
    index_pages: Float[Array, "P 1 p E"],
    page_table: Int[Array, "B W"],
    seq_lens: Int[Array, "B"],
    q_lens: Int[Array, "B"],
    *,
    index_scale: Float[Array, "P 1 p"] | None,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> Float[Array, "B T S"]:
    """The implementation without the device check: for benchmarks (`tuning`) and tests on the CPU (`interpret`)."""
    # Not at the top: other machines need neither Pallas nor the time its import takes.
    from dflash_kernels.attention.index import mosaic_gpu_sm90 as kernel

    (b, t, heads, width), page_size = q.shape, index_pages.shape[2]
    if q.dtype != jnp.float8_e4m3fn or index_scale is None or weights.dtype != jnp.float32:
        scaled = "without" if index_scale is None else "with"
        raise NotImplementedError(
            f"takes float8_e4m3fn keys with scales under float32 weights, not {q.dtype} {scaled} scales under {weights.dtype}"
        )
    if width != WIDTH or heads % 8 or heads > MOST_COLUMNS or page_size % KEYS:
        raise NotImplementedError(
            f"takes keys of {WIDTH} numbers, a multiple of 8 heads up to {MOST_COLUMNS} and pages of a multiple of {KEYS} tokens, "
            f"not {width}, {heads} and {page_size}"
        )
    launch = plan(tuning, b=b, tokens=t, heads=heads, page_size=page_size, table_width=page_table.shape[1])
    missing = launch.groups * launch.group - t
    q, weights = (jnp.pad(x, ((0, 0), (0, missing)) + ((0, 0),) * (x.ndim - 2)) for x in (q, weights))
    table, lens, live = (x.astype(jnp.int32) for x in (page_table, seq_lens, q_lens))
    q = q.reshape(b, launch.groups, launch.columns, width)
    return kernel.scores(launch, q, weights, index_pages, index_scale, table, lens, live, interpret)


def index_select_mosaic_gpu(*args: Any, **options: Any) -> Array:
    """See `index_select`. Raises NotImplementedError for what the kernel does not take."""
    require_hopper()
    return launch_select(*args, **options)


@functools.partial(jax.jit, static_argnames=("count", "page_size", "ctas"))
def launch_select(
    scores: Float[Array, "*rows S"],
    *,
    count: int,
    page_table: Int[Array, "B W"] | None = None,
    page_size: int | None = None,
    ctas: int | None = None,
) -> Int[Array, "*rows count"]:
    """The implementation without the device check; `ctas` of a row, a power of two."""
    from dflash_kernels.attention.index import mosaic_gpu_sm90_select as kernel
    from dflash_kernels.mosaic_gpu.radix_select import MOST_PLACES, STEP

    *rows, size = scores.shape
    if ctas is None:
        ctas = _ctas(math.prod(rows), size, STEP)
    held = -(-size // (ctas * STEP)) * STEP
    if scores.dtype != jnp.float32 or size % 4 or kernel.words(held, ctas) * 4 > SHARED_MEMORY:
        raise NotImplementedError(
            f"takes float32 rows of a multiple of 4 that shared memories hold, not {scores.dtype} of {size}"
        )
    if count >= MOST_PLACES:
        raise NotImplementedError(f"takes fewer than {MOST_PLACES} places, not {count}")
    table = jnp.zeros((1, 1), jnp.int32) if page_table is None else page_table.astype(jnp.int32)
    flat = scores.reshape(-1, size)
    tokens = max(flat.shape[0] // table.shape[0], 1)
    found = kernel.choose(flat, table, count=count, tokens=tokens, page_size=page_size or 0, ctas=ctas)
    return found.reshape(*rows, count)


def _ctas(rows: int, size: int, step: int) -> int:
    """The number of CTAs of a row.

    On an H200 rows of 131,072 take, one 6.8 us with sixteen, two 8.9 with eight each, 16 rows 18.6 with eight and 15.7 with four:
    clusters of eight CTAs have to wait for one another there.
    """
    ctas = next((some for some in (1, 2, 4) if size <= some * step), MOST_CTAS)
    if rows == 1 and size > LARGE_CTAS * step and target().multiprocessors >= MULTIPROCESSORS:
        return LARGE_CTAS
    if rows > CLUSTERS and ctas == MOST_CTAS and size <= MOST_CTAS // 2 * LARGEST:
        return MOST_CTAS // 2
    return ctas
