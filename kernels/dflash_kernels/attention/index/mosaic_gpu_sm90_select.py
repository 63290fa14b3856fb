"""The Hopper kernel of an indexer's choice: a cluster of CTAs selects from one row of scores, which their shared memories hold."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.mosaic_gpu.radix_select import DIGITS, STEP, WARPGROUPS, scratch, select_row
from dflash_kernels.mosaic_gpu.thread_op import kernel
from dflash_kernels.mosaic_gpu.tma import address_of


def words(held: int, ctas: int) -> int:
    """Words of shared memory of one of so many CTAs that hold so many numbers."""
    return held + sum(scratch(ctas).values())


def choose(scores: jax.Array, table: jax.Array, *, count: int, tokens: int, page_size: int, ctas: int) -> jax.Array:
    """Runs the kernel; int32 `[R, count]`.

    Args:
      scores: `[R, S]` float32, `tokens` rows for each row of the table.
      table: `[B, W]` int32.
      page_size: tokens of a page of the slots that come out; 0: places come out.
      ctas: of a row.
    """
    rows, size = scores.shape
    own = -(-size // (ctas * STEP)) * STEP
    cluster: dict[str, Any] = {"cluster": (ctas,), "cluster_names": ("part",)} if ctas > 1 else {}

    def body(scores_ref, table_ref, out_ref, held, *buffers) -> None:
        row = lax.axis_index("row")
        *areas, barriers = buffers
        select_row(
            scores_ref.at[row], table_ref, out_ref.at[row], lax.div(row, jnp.int32(tokens)), held, *areas, address_of(barriers),
            count=count, ctas=ctas, page_size=page_size,
        )  # fmt: skip

    body.__name__ = "index_select"  # what profilers show
    run = kernel(
        body, out_type=jax.ShapeDtypeStruct((rows, count), jnp.int32), grid=(rows,), grid_names=("row",), **cluster,
        num_threads=WARPGROUPS, thread_name="wg",
        scratch_types=[
            *(plgpu.SMEM((words,), jnp.int32) for words in (own, *scratch(ctas).values())), plgpu.Barrier(num_barriers=DIGITS)
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True),
    )  # fmt: skip
    return run(scores, table)
