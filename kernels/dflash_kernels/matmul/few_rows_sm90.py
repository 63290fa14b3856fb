"""Products of a few rows on Hopper: a CTA streams 64 rows of weights past the rows of x.

Weights are the left operand of the matrix instruction and rows of x the right one, so that few rows waste nothing. One warpgroup
starts copies into a ring that takes all of shared memory, the other one multiplies. A tile of weights is one CTA's, bias and all,
where nobody adds parts: fewer CTAs than multiprocessors read as fast, as long as enough is on its way to each.

One row may be normed here: every CTA does it for itself while its weights are on their way, as in `row_product_sm90`.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.core.device import MATRIX_ROWS as TILE
from dflash_kernels.matmul.few_tiling import BLOCK, Plan, RowNorm
from dflash_kernels.matmul.row_norm_sm90 import add_norm_row
from dflash_kernels.mosaic_gpu.layouts import TILED, row_of
from dflash_kernels.mosaic_gpu.pipeline import Ring, div
from dflash_kernels.mosaic_gpu.rows import keep_first_row, store_padded
from dflash_kernels.mosaic_gpu.thread_op import kernel
from dflash_kernels.mosaic_gpu.tma import within_copies
from dflash_kernels.mosaic_gpu.wgmma import add_product, zeros


def stream(
    name: str, plan: Plan, given: dict[str, Any], outs: dict[str, Any], epilogue: Callable[..., None], *,
    scratch: dict[str, Any] | None = None, interpret: Any = None,
) -> Any:  # fmt: skip
    """Runs the kernel: `epilogue(refs, product, tile, part)` for every tile of weights, with its bias, by one warpgroup.

    Args:
      name: what profilers show.
      given: arrays and Refs by name: `x`, `weight`, `bias` or none, and what the epilogue takes; outs: what it writes. With
        `plan.norm` x is the residual stream, to which `added [S, M, D]` is added, and `norm` the norm's weight; the sum is
        written to `stream`.
      scratch: shared memory of the epilogue's, among its `refs`.
    """
    if plan.norm is None:
        x = within_copies(given["x"], plan.columns, interpret)
        # More than eight rows must come in eights.
        given = given | {"x": jnp.pad(x, ((0, plan.columns - x.shape[0]), (0, 0))) if plan.rows > 8 else x}
    names, dtype = (*given, *outs), given["x"].dtype
    memory = {
        "full": plgpu.Barrier(num_arrivals=len(_copied(plan)), num_barriers=plan.stages),
        "empty": plgpu.Barrier(num_barriers=plan.stages),
        "w_sm": plgpu.SMEM((plan.stages, TILE, plan.blocks * BLOCK), dtype, transforms=TILED),
        "x_sm": plgpu.SMEM(
            (plan.stages if plan.norm is None else plan.steps, plan.columns, plan.blocks * BLOCK), dtype, transforms=TILED
        ),
    }  # fmt: skip

    def body(*held: Any, **buffers: Any) -> None:
        refs = dict(zip(names, held, strict=True)) | buffers
        tile, part, warpgroup = lax.axis_index("tile"), lax.axis_index("part"), lax.axis_index("wg")
        steps = [div(place * plan.steps, plan.split) for place in (part, part + 1)]

        pl.when(warpgroup == 1)(lambda: _produce(plan, refs, tile, *steps))

        @pl.when(warpgroup == 0)
        def _() -> None:
            bias = _bias(refs["bias"], tile) if "bias" in refs else None
            if plan.norm is not None:
                _norm(plan.norm, refs, (tile == 0) & (part == 0))
            product = _multiply(plan, refs, *steps)
            if bias is not None:
                bias = bias * jnp.where(part == 0, 1.0, 0.0)
                product = product + lax.broadcast_in_dim(bias, product.shape, [0])
            epilogue(refs, product, tile, part)

    body.__name__ = name
    return kernel(
        body, out_type=tuple(outs.values()), grid=(plan.features // TILE, plan.split), grid_names=("tile", "part"),
        num_threads=2, thread_name="wg", scratch_types=memory | (scratch or {}), interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=plan.norm is not None),
    )(*given.values())  # fmt: skip


def _copied(plan: Plan) -> tuple[str, ...]:
    """Sources of a stage's copies."""
    return ("weight", "x") if plan.norm is None else ("weight",)


def _ring(plan: Plan, refs: dict[str, Any]) -> Ring:
    return Ring(plan.stages, refs["full"], refs["empty"])


def _produce(plan: Plan, refs: dict[str, Any], tile: Any, first: Any, last: Any) -> None:
    ring, width = _ring(plan, refs), plan.blocks * BLOCK

    def fill(step: Any, _: None) -> None:
        place, columns = ring.stage(step - first), pl.ds(step * width, width)
        ring.producer_acquire(step - first, place)
        whose = {"weight": pl.ds(tile * TILE, TILE), "x": pl.ds(0, plan.columns)}
        for name in _copied(plan):
            rows = whose[name]
            target = refs[f"{name[0]}_sm"].at[place]
            plgpu.copy_gmem_to_smem(refs[name].at[rows, columns], target, ring.full.at[place])

    lax.fori_loop(first, last, fill, None)


def _multiply(plan: Plan, refs: dict[str, Any], first: Any, last: Any) -> Any:
    ring = _ring(plan, refs)

    def one(step: Any, product: Any) -> Any:
        place = ring.stage(step - first)
        ring.consumer_wait(place)
        x = refs["x_sm"].at[place if plan.norm is None else step]
        product = add_product(product, refs["w_sm"].at[place], x.transpose((1, 0)))
        pl.when(step + plan.stages < last)(lambda: ring.consumer_release(place))
        return product

    return lax.fori_loop(first, last, one, zeros((TILE, plan.columns)))


def _norm(norm: RowNorm, refs: dict[str, Any], writes: Any) -> None:
    """The row of x, to shared memory, and the stream, by the CTA that `writes` it."""
    added, scaled = add_norm_row(
        refs["added"], refs["x"], refs["norm"], 0, norm.eps, norm.zero_centered, norm.rounds_last
    )
    pl.when(writes)(lambda: store_padded(refs["stream"].at[0], added))
    keep_first_row(refs["x_sm"], scaled)
    plgpu.commit_smem()


def _bias(ref: Any, tile: Any) -> Any:
    """Bias of a tile's rows."""
    return row_of(ref.at[pl.ds(tile * TILE, TILE)]).astype(jnp.float32)
