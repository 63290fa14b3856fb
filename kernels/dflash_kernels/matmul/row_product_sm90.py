"""One row's residual, norm and product on Hopper, in one launch.

Every CTA norms the row for itself, which takes less time than to wait for another one, while the producer's copies of its rows of
the matrix are on their way: memory is never idle. With one row a matrix instruction would be nearly all zeros and its operand a
copy more, so two warpgroups multiply in registers, in float32.
"""

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.matmul.row_norm_sm90 import add_norm_row
from dflash_kernels.matmul.row_product import BLOCK, CONSUMERS, TILE, RowPlan
from dflash_kernels.mosaic_gpu.layouts import TILED, rows_of, store
from dflash_kernels.mosaic_gpu.pipeline import Ring, div
from dflash_kernels.mosaic_gpu.thread_op import COLUMN, MATRIX, kernel
from dflash_kernels.mosaic_gpu.tma import address_of, copy_once


def add_norm_product(
    plan: RowPlan, parts: jax.Array, residual: jax.Array, norm: jax.Array, weight: jax.Array, *, eps: float,
    zero_centered: bool = False, rounds_last: bool = False, interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """`residual + sum(parts)`, and its norm's product with `weight [F, D]`; `parts [S, 1, D]`, `residual [1, D]`."""

    def body(*refs: Any, **buffers: Any) -> None:
        _Cta(plan, refs, buffers, (eps, zero_centered, rounds_last)).run()

    body.__name__ = "add_norm_product"  # what profilers show
    out = (
        jax.ShapeDtypeStruct(residual.shape, residual.dtype),
        jax.ShapeDtypeStruct((1, plan.features), residual.dtype),
    )
    scratch = {
        "w_sm": plgpu.SMEM((plan.stages, plan.rows, BLOCK), weight.dtype, transforms=TILED),
        "x_sm": plgpu.SMEM((plan.depth,), jnp.float32),
        "full": plgpu.Barrier(num_barriers=plan.stages),
        "empty": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=plan.stages),
        "normed": plgpu.Barrier(),
    }
    return kernel(
        body, out_type=out, scratch_types=scratch, grid=(plan.ctas,), grid_names=("cta",), num_threads=CONSUMERS + 1,
        thread_name="wg", compiler_params=plgpu.CompilerParams(approx_math=True), interpret=interpret,
    )(parts, residual, norm, weight)  # fmt: skip


class _Cta:
    """The program of one CTA: consumers, and the producer behind them."""

    def __init__(self, plan: RowPlan, refs: tuple[Any, ...], buffers: dict[str, Any], how: tuple[float, bool, bool]):
        self.plan, self.buffers, self.how = plan, buffers, how
        self.parts, self.before, self.norm, self.weight, self.after, self.product = refs
        self.ring = Ring(plan.stages, buffers["full"], buffers["empty"])
        self.index = lax.axis_index("cta")
        self.turns = div(plan.tiles - self.index + (plan.ctas - 1), plan.ctas)

    def run(self) -> None:
        warpgroup = lax.axis_index("wg")
        for consumer in range(CONSUMERS):
            pl.when(warpgroup == consumer)(lambda consumer=consumer: self._consume(consumer))
        pl.when(warpgroup == CONSUMERS)(self._produce)

    def _first(self, turn: Any) -> Any:
        """First row of a tile."""
        plan = self.plan
        return jnp.minimum((self.index + turn * plan.ctas) * plan.rows, plan.features - plan.rows)

    def _produce(self) -> None:
        plan, ring = self.plan, self.ring
        full = address_of(ring.full)

        def fill(step: Any, _: None) -> None:
            turn, stage = div(step, plan.blocks), ring.stage(step)
            ring.producer_acquire(step, stage)
            rows, columns = pl.ds(self._first(turn), plan.rows), pl.ds((step - turn * plan.blocks) * BLOCK, BLOCK)
            copy_once(self.weight, rows, columns, self.buffers["w_sm"].at[stage], full, stage)

        steps = self.turns * plan.blocks
        lax.fori_loop(0, steps, fill, None)
        ring.drain(steps)

    def _consume(self, consumer: int) -> None:
        if consumer == 0:
            self._norm()
        plgpu.barrier_wait(self.buffers["normed"])
        own = self.plan.offsets[consumer]

        def tile(turn: Any, _: None) -> None:
            sums = self._multiply(turn * self.plan.blocks, own).astype(self.product.dtype)
            store(self.product.at[0, pl.ds(self._first(turn) + own, TILE)], sums)

        lax.fori_loop(0, self.turns, tile, None)

    def _norm(self) -> None:
        """The row, to the residual, and its norm, to shared memory."""
        added, scaled = add_norm_row(self.parts, self.before, self.norm, 0, *self.how)

        @pl.when(self.index == 0)
        def _():
            self.after.at[0][...] = added

        self.buffers["x_sm"][...] = scaled.astype(jnp.float32)
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.buffers["normed"])

    def _multiply(self, before: Any, own: int) -> jax.Array:
        """Products of a tile's rows from `own` on."""

        def block(index: Any, sums: jax.Array) -> jax.Array:
            stage = self.ring.stage(before + index)
            x = rows_of(self.buffers["x_sm"].at[pl.ds(index * BLOCK, BLOCK)], COLUMN)
            self.ring.consumer_wait(stage)
            w = plgpu.load(self.buffers["w_sm"].at[stage, pl.ds(own, TILE)], layout=MATRIX)
            self.ring.consumer_release(stage)
            return sums + w.astype(jnp.float32) * lax.broadcast_in_dim(x, w.shape, [1])

        zeros = plgpu.layout_cast(jnp.zeros((TILE, BLOCK), jnp.float32), MATRIX)
        return lax.fori_loop(0, self.plan.blocks, block, zeros).sum(axis=1)
