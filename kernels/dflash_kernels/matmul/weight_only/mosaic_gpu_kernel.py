"""The Hopper kernel: a tile of weights goes from shared memory to registers as bytes, widens there, and is the left operand.

Tokens are the right operand, so that few of them waste nothing. A warpgroup does nothing but start copies into a ring of shared
memory; two multiply, each its half of the rows. Where there are too few tiles for all multiprocessors, several CTAs share the
depth of one and leave their parts in float32; whoever reads the result adds them in order.
"""

# Pallas declares ACC less public than it documents it.
# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.matmul.weight_only.mosaic_gpu import BLOCK, ROWS, Plan
from dflash_kernels.mosaic_gpu.convert import FLOAT8_SHIFT
from dflash_kernels.mosaic_gpu.layouts import in_parity_order, swizzled

_HALF = ROWS // 2  # rows of one matrix instruction
_HALF_SHIFT = FLOAT8_SHIFT // 2  # of x, the result makes up for the rest: neither leaves the range of its type
_MEMORY = 2  # the warpgroup that copies


def products(plan: Plan, x: jax.Array, values: jax.Array, interpret: Any = None) -> jax.Array:
    """`values @ x.T` in float32 `[splits, F, tokens]`: parts to be added; columns past x's rows hold zeros.

    Columns of x come in the order in which those of `values` widen.
    """
    features = values.shape[0]
    if values.dtype != jnp.int8:
        x = x * jnp.bfloat16(2.0**_HALF_SHIFT)
    # Copies past the end give zeros on a GPU, but more than 8 rows must come in eights.
    if interpret is not None or (x.shape[0] > 8 and x.shape[0] % 8):
        x = jnp.pad(x, ((0, plan.tokens - x.shape[0]), (0, 0)))

    def body(x_gm, w_gm, out_gm, w_sm, x_sm, filled, emptied):
        part, warpgroup = lax.axis_index("part"), lax.axis_index("wg")
        row = jnp.minimum(lax.axis_index("tile") * ROWS, features - ROWS)
        first, last = (lax.div(place * plan.steps, jnp.int32(plan.splits)) for place in (part, part + 1))

        @pl.when(warpgroup == _MEMORY)
        def _():
            def bring(step, _):
                slot = lax.rem(step - first, jnp.int32(plan.slots))
                pl.when(step - first >= plan.slots)(lambda: plgpu.barrier_wait(emptied.at[slot]))
                columns = pl.ds(step * BLOCK, BLOCK)
                plgpu.copy_gmem_to_smem(w_gm.at[pl.ds(row, ROWS), columns], w_sm.at[slot], filled.at[slot])
                plgpu.copy_gmem_to_smem(x_gm.at[pl.ds(0, plan.tokens), columns], x_sm.at[slot], filled.at[slot])

            lax.fori_loop(first, last, bring, None)

        @pl.when(warpgroup != _MEMORY)
        def _():
            half = pl.ds(warpgroup * _HALF, _HALF)

            def multiply(step, total):
                slot = lax.rem(step - first, jnp.int32(plan.slots))
                plgpu.barrier_wait(filled.at[slot])
                total = _add_product(total, w_sm.at[slot, half], x_sm.at[slot], interpret)
                pl.when(step + plan.slots < last)(lambda: plgpu.barrier_arrive(emptied.at[slot]))
                return total

            zeros = jnp.zeros((_HALF, plan.tokens), jnp.float32)
            zeros = zeros if interpret is not None else plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
            total = lax.fori_loop(first, last, multiply, zeros)
            out_gm.at[part, pl.ds(row + warpgroup * _HALF, _HALF)][...] = total

    parts = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((plan.splits, features, plan.tokens), jnp.float32),
        grid=(plan.tiles, plan.splits), grid_names=("tile", "part"), num_threads=3, thread_name="wg",
        scratch_types={
            "w_sm": plgpu.SMEM((plan.slots, ROWS, BLOCK), values.dtype, transforms=swizzled(values.dtype, BLOCK)),
            "x_sm": plgpu.SMEM((plan.slots, plan.tokens, BLOCK), x.dtype, transforms=swizzled(x.dtype, BLOCK)),
            "filled": plgpu.Barrier(num_arrivals=2, num_barriers=plan.slots),
            "emptied": plgpu.Barrier(num_arrivals=2, num_barriers=plan.slots),
        },
        interpret=interpret,
    )(x, values)  # fmt: skip
    return parts if values.dtype == jnp.int8 else parts * 2.0 ** (FLOAT8_SHIFT - _HALF_SHIFT)


def _add_product(total, weights, x, interpret: Any):
    """`total + weights @ x.T`, columns of x in the order in which bytes widen; of float8 weights times 2^-120."""
    if interpret is not None:
        wide = in_parity_order(weights[...].astype(jnp.float32))
        shift = 1.0 if weights.dtype == jnp.int8 else 2.0**-FLOAT8_SHIFT
        return total + jnp.dot(wide, x[...].astype(jnp.float32).T, precision="highest") * shift

    from dflash_kernels.mosaic_gpu.convert import widened_rows

    widen = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(swizzled(weights.dtype, BLOCK)),),
        return_type=plgpu.ShapeDtypeStruct((_HALF, BLOCK), jnp.dtype(jnp.bfloat16), layout=plgpu.Layout.WGMMA),
    )(widened_rows)
    wide, turned = widen(weights), x.transpose((1, 0))
    return pl.run_state(lambda acc: plgpu.wgmma(acc, wide, turned))(plgpu.ACC.init(total))
