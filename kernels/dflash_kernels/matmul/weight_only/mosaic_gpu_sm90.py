"""The weight-only GEMM kernel for Hopper (W8A16): weights go from shared memory to registers as bytes and widen there.

Weights are the left operand of the matrix instruction and tokens the right one, so that few tokens waste nothing. A producer
warpgroup starts copies into a ring of shared memory; two consumers multiply, each its half of a tile's weight rows. Where there are
too few tiles for all multiprocessors, split-K gives several CTAs a part of K each; they store partial products in float32, which
the caller adds in order.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.matmul.weight_only.tiling import TILE_K, TILE_N, Plan
from dflash_kernels.mosaic_gpu.convert import FLOAT8_SHIFT
from dflash_kernels.mosaic_gpu.layouts import swizzled
from dflash_kernels.mosaic_gpu.pipeline import Ring
from dflash_kernels.mosaic_gpu.thread_op import kernel
from dflash_kernels.mosaic_gpu.tma import within_copies
from dflash_kernels.mosaic_gpu.wgmma import add_widened, zeros

_WG_N = TILE_N // 2  # weight rows of one consumer
_X_SHIFT = (
    FLOAT8_SHIFT // 2
)  # x is times 2 to this, the result makes up for the rest: neither leaves the range of its type
_PRODUCER = 2  # the warpgroup that copies


def weight_only_gemm(plan: Plan, x: jax.Array, values: jax.Array, interpret: Any = None) -> jax.Array:
    """`values @ x.T` in float32 `[split_k, N, tile_m]`: partial products; columns past x's rows hold zeros.

    Columns of x come in the order in which those of `values` widen.
    """
    features = values.shape[0]
    if values.dtype != jnp.int8:
        x = x * jnp.bfloat16(2.0**_X_SHIFT)
    x = within_copies(x, plan.tile_m, interpret)
    # More than eight rows must come in eights.
    if x.shape[0] > 8 and x.shape[0] % 8:
        x = jnp.pad(x, ((0, plan.tile_m - x.shape[0]), (0, 0)))

    def body(x_gm, w_gm, out_gm, empty, full, w_sm, x_sm):
        part, warpgroup = lax.axis_index("part"), lax.axis_index("wg")
        row = jnp.minimum(lax.axis_index("tile") * TILE_N, features - TILE_N)
        first, last = (lax.div(place * plan.k_tiles, jnp.int32(plan.split_k)) for place in (part, part + 1))
        ring = Ring(plan.stages, full, empty)

        @pl.when(warpgroup == _PRODUCER)
        def _():
            def k_tile(step, _):
                stage = ring.stage(step - first)
                ring.producer_acquire(step - first, stage)
                columns = pl.ds(step * TILE_K, TILE_K)
                plgpu.copy_gmem_to_smem(w_gm.at[pl.ds(row, TILE_N), columns], w_sm.at[stage], full.at[stage])
                plgpu.copy_gmem_to_smem(x_gm.at[pl.ds(0, plan.tile_m), columns], x_sm.at[stage], full.at[stage])

            lax.fori_loop(first, last, k_tile, None)

        @pl.when(warpgroup != _PRODUCER)
        def _():
            half = pl.ds(warpgroup * _WG_N, _WG_N)

            def k_tile(step, product):
                stage = ring.stage(step - first)
                ring.consumer_wait(stage)
                product = add_widened(product, w_sm.at[stage, half], x_sm.at[stage])
                pl.when(step + plan.stages < last)(lambda: ring.consumer_release(stage))
                return product

            product = lax.fori_loop(first, last, k_tile, zeros((_WG_N, plan.tile_m)))
            out_gm.at[part, pl.ds(row + warpgroup * _WG_N, _WG_N)][...] = product

    parts = kernel(
        body,
        out_type=jax.ShapeDtypeStruct((plan.split_k, features, plan.tile_m), jnp.float32),
        grid=(plan.n_tiles, plan.split_k), grid_names=("tile", "part"), num_threads=3, thread_name="wg",
        scratch_types=[
            plgpu.Barrier(num_arrivals=2, num_barriers=plan.stages),
            plgpu.Barrier(num_arrivals=2, num_barriers=plan.stages),
            plgpu.SMEM((plan.stages, TILE_N, TILE_K), values.dtype, transforms=swizzled(values.dtype, TILE_K)),
            plgpu.SMEM((plan.stages, plan.tile_m, TILE_K), x.dtype, transforms=swizzled(x.dtype, TILE_K)),
        ],
        interpret=interpret,
    )(x, values)  # fmt: skip
    return parts if values.dtype == jnp.int8 else parts * 2.0 ** (FLOAT8_SHIFT - _X_SHIFT)
