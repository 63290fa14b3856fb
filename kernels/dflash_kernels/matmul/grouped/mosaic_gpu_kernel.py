"""The Hopper kernel: a CTA multiplies one block of rows with a tile of its group's weights.

A warpgroup does nothing but start copies into a ring of shared memory, two multiply. Blocks of one group lie side by side, so that
the second one finds the weights in the L2. With a gate, a tile holds as many gate as up rows and the product is gated in registers.
"""

# Pallas declares ACC less public than it documents it.
# pyright: reportPrivateImportUsage=false

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.matmul.grouped.mosaic_gpu import BLOCK, FEATURES, Plan
from dflash_kernels.mosaic_gpu.layouts import swizzled

_ROWS = 64  # of one matrix instruction
_MEMORY = 2  # the warpgroup that copies


def products(
    plan: Plan, x: jax.Array, flat: jax.Array, groups: jax.Array, count: jax.Array, interpret: Any = None
) -> jax.Array:
    """`[M, features]` in x's dtype; `flat` is `[groups * parts * features, depth]`."""
    features = plan.tiles * plan.features
    per_group = plan.parts * features

    def body(x_gm, w_gm, groups_gm, count_gm, out_gm, w_sm, x_sm, out_sm, filled, emptied):
        block, tile = lax.axis_index("block"), lax.axis_index("tile")
        warpgroup = lax.axis_index("wg")
        row, feature = block * plan.rows, tile * plan.features
        used = block < count_gm[0]

        @pl.when(used & (warpgroup == _MEMORY))
        def _():
            first = groups_gm[block] * per_group + feature

            def bring(step, _):
                slot = lax.rem(step, jnp.int32(plan.slots))
                pl.when(step >= plan.slots)(lambda: plgpu.barrier_wait(emptied.at[slot]))
                columns = pl.ds(step * BLOCK, BLOCK)
                plgpu.copy_gmem_to_smem(x_gm.at[pl.ds(row, plan.rows), columns], x_sm.at[slot], filled.at[slot])
                for part in range(plan.parts):
                    rows = pl.ds(first + part * features, plan.features)
                    target = w_sm.at[slot, pl.ds(part * plan.features, plan.features)]
                    plgpu.copy_gmem_to_smem(w_gm.at[rows, columns], target, filled.at[slot])

            lax.fori_loop(0, plan.steps, bring, None)

        @pl.when(used & (warpgroup != _MEMORY))
        def _():
            own_row = warpgroup * _ROWS if plan.rows == 2 * _ROWS else 0
            own_feature = 0 if plan.rows == 2 * _ROWS else warpgroup * plan.width

            def multiply(*accs):
                def step(index, _):
                    slot = lax.rem(index, jnp.int32(plan.slots))
                    plgpu.barrier_wait(filled.at[slot])
                    for part, acc in enumerate(accs):
                        weights = w_sm.at[slot, pl.ds(part * plan.features + own_feature, plan.width)]
                        plgpu.wgmma(acc, x_sm.at[slot, pl.ds(own_row, _ROWS)], weights.transpose((1, 0)))
                    # All but this slot's instructions are done: the slot before can be filled again.
                    plgpu.wgmma_wait(plan.parts)
                    again = (index > 0) & (index - 1 + plan.slots < plan.steps)
                    pl.when(again)(lambda: plgpu.barrier_arrive(emptied.at[lax.rem(index - 1, jnp.int32(plan.slots))]))

                lax.fori_loop(0, plan.steps, step, None)
                return tuple(acc[...] for acc in accs)

            shape = (_ROWS, plan.width)
            tiles = pl.run_scoped(multiply, *[plgpu.ACC(shape, jnp.float32) for _ in range(plan.parts)])
            out = tiles[0]
            if plan.parts == 2:
                out = out / (1.0 + jnp.exp(-out)) * tiles[1]
            out_sm[warpgroup, ...] = out.astype(out_sm.dtype)
            plgpu.commit_smem()
            target = out_gm.at[pl.ds(row + own_row, _ROWS), pl.ds(feature + own_feature, plan.width)]
            plgpu.copy_smem_to_gmem(out_sm.at[warpgroup], target)
            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((x.shape[0], features), x.dtype),
        grid=(plan.tiles, groups.shape[0]), grid_names=("tile", "block"), num_threads=3, thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        scratch_types={
            "w_sm": plgpu.SMEM((plan.slots, FEATURES, BLOCK), x.dtype, transforms=swizzled(x.dtype, BLOCK)),
            "x_sm": plgpu.SMEM((plan.slots, plan.rows, BLOCK), x.dtype, transforms=swizzled(x.dtype, BLOCK)),
            "out_sm": plgpu.SMEM((2, _ROWS, plan.width), x.dtype, transforms=swizzled(x.dtype, BLOCK)),
            "filled": plgpu.Barrier(num_arrivals=1 + plan.parts, num_barriers=plan.slots),
            "emptied": plgpu.Barrier(num_arrivals=2, num_barriers=plan.slots),
        },
        interpret=interpret,
    )(x, flat, groups, count)  # fmt: skip
