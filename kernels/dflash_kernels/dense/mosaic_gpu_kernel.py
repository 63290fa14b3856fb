"""The Hopper kernel: persistent CTAs, each with tiles of rows and features.

Rows are the left operand of the matrix instruction, features the right one: tiles may have any multiple of eight features, so
that the last round of tiles keeps nearly all multiprocessors busy. One warpgroup starts copies into a ring of shared memory and
runs ahead across tiles; two multiply, half a tile's rows each, or half its features where rows are too few.

Two things were measured on an H200 and gain nothing: sending a block of x to several CTAs at once, and bringing the next product's
weights to the cache while this one ends.
"""

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.dense.mosaic_gpu_plan import BLOCK, MULTIPLIERS, Plan

_TILED = (plgpu.TilingTransform((8, BLOCK)), plgpu.SwizzleTransform(128))
_WGMMA = plgpu.Layout.WGMMA


def dense(plan: Plan, x: jax.Array, w: jax.Array, interpret: Any = None) -> tuple[jax.Array, ...]:
    """Runs the kernel; what it gives is said at `Plan.results`."""
    buffers = {
        "x_sm": plgpu.SMEM((plan.slots, plan.tile_rows, BLOCK), x.dtype, transforms=_TILED),
        "w_sm": plgpu.SMEM((plan.slots, plan.tile_features, BLOCK), x.dtype, transforms=_TILED),
        "filled": plgpu.Barrier(num_arrivals=1 + len(plan.pieces), num_barriers=plan.slots),
        "freed": plgpu.Barrier(num_arrivals=MULTIPLIERS, num_barriers=plan.slots),
    }
    body: Any = functools.partial(_body, plan=plan)
    body.__name__ = f"dense_{plan.form}"  # what profilers show
    kernel = plgpu.kernel(
        body, out_type=plan.results(x.dtype), scratch_types=buffers, grid=(plan.ctas,), grid_names=("cta",),
        num_threads=MULTIPLIERS + 1, thread_name="wg", compiler_params=plgpu.CompilerParams(approx_math=True),
        **({} if interpret is None else {"interpret": interpret}),
    )  # fmt: skip
    return kernel(x, w)


def _place(plan: Plan, index):
    """First row, first feature and part of the depth of a tile."""
    row, rest = lax.rem(index, plan.row_tiles), lax.div(index, plan.row_tiles)
    column, tile = lax.rem(rest, plan.splits), lax.div(rest, plan.splits)
    # The last tile overlaps the one before: both write the same.
    feature = jnp.minimum(tile * plan.step, plan.features - plan.step)
    return row * plan.tile_rows, feature, column


def _body(x, w, *outs, plan: Plan, x_sm, w_sm, filled, freed):
    cta, wg = lax.axis_index("cta"), lax.axis_index("wg")
    turns = (plan.tiles - cta + plan.ctas - 1) // plan.ctas

    def bring():
        plgpu.set_max_registers(40, action="decrease")

        def tile(turn, _):
            row, feature, column = _place(plan, cta + turn * plan.ctas)

            def block(step, _):
                index = turn * plan.steps + step
                slot = lax.rem(index, plan.slots)
                pl.when(index >= plan.slots)(lambda: plgpu.barrier_wait(freed.at[slot]))
                columns = pl.ds((column * plan.steps + step) * BLOCK, BLOCK)
                plgpu.copy_gmem_to_smem(x.at[pl.ds(row, plan.tile_rows), columns], x_sm.at[slot], filled.at[slot])
                for first, offset, size in plan.pieces:
                    source = w.at[pl.ds(first + feature, size), columns]
                    plgpu.copy_gmem_to_smem(source, w_sm.at[slot, pl.ds(offset, size)], filled.at[slot])

            lax.fori_loop(0, plan.steps, block, None)

        lax.fori_loop(0, turns, tile, None)

        def drain(index, _):
            plgpu.barrier_wait(freed.at[lax.rem(index, plan.slots)])

        # Every completion of a barrier is waited for.
        lax.fori_loop(jnp.maximum(turns * plan.steps - plan.slots, 0), turns * plan.steps, drain, None)

    def multiply():
        plgpu.set_max_registers(232, action="increase")
        first_row, first_feature = wg * plan.own_rows * plan.by_rows, wg * plan.own_step * (1 - plan.by_rows)
        own = pl.ds(wg * plan.own_features * (1 - plan.by_rows), plan.own_features)

        def tile(turn, best):
            row, feature, column = _place(plan, cta + turn * plan.ctas)

            def accumulate(acc):
                def block(step, _):
                    index = turn * plan.steps + step
                    slot = lax.rem(index, plan.slots)
                    plgpu.barrier_wait(filled.at[slot])
                    left, right = x_sm.at[slot, pl.ds(first_row, plan.own_rows)], w_sm.at[slot, own]
                    plgpu.wgmma(acc, left, right.transpose((1, 0)))
                    # All but this block's instructions are done: the slot before can be filled again.
                    plgpu.wgmma_wait(1)
                    pl.when(step > 0)(lambda: plgpu.barrier_arrive(freed.at[lax.rem(index - 1, plan.slots)]))

                lax.fori_loop(0, plan.steps, block, None)
                result = acc[...]
                plgpu.barrier_arrive(freed.at[lax.rem((turn + 1) * plan.steps - 1, plan.slots)])
                return result

            product = pl.run_scoped(accumulate, plgpu.ACC((plan.own_rows, plan.own_features), jnp.float32))
            if plan.form == "best":
                return _better(plan, best, product, feature + first_feature)
            _finish(plan, product, outs[0], pl.ds(row + first_row, plan.own_rows), feature + first_feature, column)
            return best

        if plan.form != "best":
            lax.fori_loop(0, turns, tile, None)
            return
        # All tiles of a CTA are of the same rows.
        nothing = jnp.full((plan.own_rows,), -jnp.inf, jnp.float32), jnp.zeros((plan.own_rows,), jnp.int32)
        best = lax.fori_loop(0, turns, tile, tuple(plgpu.layout_cast(part, _WGMMA.reduce(1)) for part in nothing))
        rows = pl.ds(_place(plan, cta)[0] + first_row, plan.own_rows)
        number = lax.div(cta, plan.row_tiles)
        number = number if plan.by_rows else number * MULTIPLIERS + wg
        for out, part in zip(outs, best, strict=True):
            out.at[number, rows][...] = part

    pl.when(wg == MULTIPLIERS)(bring)
    pl.when(wg != MULTIPLIERS)(multiply)


def _better(plan: Plan, best, product, feature):
    """The largest products so far and their features, the first of equal ones, after one more tile."""
    values, ids = best
    product = product.astype(plan.rounded).astype(jnp.float32)
    largest = product.max(axis=1)
    places = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, product.shape, 1), _WGMMA)
    equal = product == lax.broadcast_in_dim(largest, product.shape, [0])
    first = jnp.where(equal, places, jnp.int32(plan.step)).min(axis=1)
    larger = largest > values
    return jnp.where(larger, largest, values), jnp.where(larger, first + feature, ids)


def _finish(plan: Plan, product, out, rows, feature, column):
    """Writes a tile of products in the plan's form."""
    if plan.form == "gated":
        gate, up = product[:, : plan.own_step], product[:, plan.own_step :]
        product = gate / (1.0 + jnp.exp(-gate)) * up
    columns = pl.ds(feature, plan.own_step)
    target = out.at[column, rows, columns] if plan.form == "parts" else out.at[rows, columns]
    target[...] = product.astype(out.dtype)
