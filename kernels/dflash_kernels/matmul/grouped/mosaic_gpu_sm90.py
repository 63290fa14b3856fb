"""The grouped GEMM kernel for Hopper: a CTA multiplies one block of rows with a tile of its group's weights.

A producer warpgroup starts copies into a ring of shared memory, two consumers multiply. Blocks of one group lie side by side, so
that the second one finds the weights in the L2. With a gate, a tile holds as many gate as up rows, and SwiGLU follows in registers.
"""

# Pallas declares ACC less public than it documents it.
# pyright: reportPrivateImportUsage=false

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.core.device import MATRIX_ROWS
from dflash_kernels.matmul.grouped.tiling import TILE_K, TILE_W, Plan
from dflash_kernels.mosaic_gpu.layouts import swizzled
from dflash_kernels.mosaic_gpu.pipeline import Ring
from dflash_kernels.mosaic_gpu.thread_op import kernel

_PRODUCER = 2  # the warpgroup that copies


def grouped_gemm(
    plan: Plan, x: jax.Array, flat: jax.Array, groups: jax.Array, count: jax.Array, interpret: Any = None
) -> jax.Array:
    """`[M, N]` in x's dtype; `flat` is `[groups * matrices * N, K]`."""
    features = plan.n_tiles * plan.tile_n
    per_group = plan.matrices * features

    def body(x_gm, w_gm, groups_gm, count_gm, out_gm, empty, full, out_sm, w_sm, x_sm):
        block, tile = lax.axis_index("block"), lax.axis_index("tile")
        warpgroup = lax.axis_index("wg")
        row, feature = block * plan.tile_m, tile * plan.tile_n
        used, ring = block < count_gm[0], Ring(plan.stages, full, empty)

        @pl.when(used & (warpgroup == _PRODUCER))
        def _():
            first = groups_gm[block] * per_group + feature

            def k_tile(step, _):
                stage = ring.stage(step)
                ring.producer_acquire(step, stage)
                columns = pl.ds(step * TILE_K, TILE_K)
                plgpu.copy_gmem_to_smem(x_gm.at[pl.ds(row, plan.tile_m), columns], x_sm.at[stage], full.at[stage])
                for matrix in range(plan.matrices):
                    rows = pl.ds(first + matrix * features, plan.tile_n)
                    target = w_sm.at[stage, pl.ds(matrix * plan.tile_n, plan.tile_n)]
                    plgpu.copy_gmem_to_smem(w_gm.at[rows, columns], target, full.at[stage])

            lax.fori_loop(0, plan.k_tiles, k_tile, None)

        @pl.when(used & (warpgroup != _PRODUCER))
        def _():
            own_row = warpgroup * MATRIX_ROWS if plan.split_m else 0
            own_feature = 0 if plan.split_m else warpgroup * plan.wg_n

            def mainloop(*accs):
                def k_tile(step, _):
                    stage = ring.stage(step)
                    ring.consumer_wait(stage)
                    for matrix, acc in enumerate(accs):
                        weights = w_sm.at[stage, pl.ds(matrix * plan.tile_n + own_feature, plan.wg_n)]
                        plgpu.wgmma(acc, x_sm.at[stage, pl.ds(own_row, MATRIX_ROWS)], weights.transpose((1, 0)))
                    # All but this stage's instructions are done: the stage before can be filled again.
                    plgpu.wgmma_wait(plan.matrices)
                    again = (step > 0) & (step - 1 + plan.stages < plan.k_tiles)
                    pl.when(again)(lambda: ring.consumer_release(ring.stage(step - 1)))

                lax.fori_loop(0, plan.k_tiles, k_tile, None)
                return tuple(acc[...] for acc in accs)

            shape = (MATRIX_ROWS, plan.wg_n)
            products = pl.run_scoped(mainloop, *[plgpu.ACC(shape, jnp.float32) for _ in range(plan.matrices)])
            # Epilogue.
            out = products[0]
            if plan.matrices == 2:
                out = out / (1.0 + jnp.exp(-out)) * products[1]
            out_sm[warpgroup, ...] = out.astype(out_sm.dtype)
            plgpu.commit_smem()
            target = out_gm.at[pl.ds(row + own_row, MATRIX_ROWS), pl.ds(feature + own_feature, plan.wg_n)]
            plgpu.copy_smem_to_gmem(out_sm.at[warpgroup], target)
            plgpu.wait_smem_to_gmem(0)

    return kernel(
        body,
        out_type=jax.ShapeDtypeStruct((x.shape[0], features), x.dtype),
        grid=(plan.n_tiles, groups.shape[0]), grid_names=("tile", "block"), num_threads=3, thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        scratch_types=[
            plgpu.Barrier(num_arrivals=2, num_barriers=plan.stages),
            plgpu.Barrier(num_arrivals=1 + plan.matrices, num_barriers=plan.stages),
            plgpu.SMEM((2, MATRIX_ROWS, plan.wg_n), x.dtype, transforms=swizzled(x.dtype, TILE_K)),
            plgpu.SMEM((plan.stages, TILE_W, TILE_K), x.dtype, transforms=swizzled(x.dtype, TILE_K)),
            plgpu.SMEM((plan.stages, plan.tile_m, TILE_K), x.dtype, transforms=swizzled(x.dtype, TILE_K)),
        ],
        interpret=interpret,
    )(x, flat, groups, count)  # fmt: skip
