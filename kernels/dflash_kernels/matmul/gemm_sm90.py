"""The persistent, warp-specialized GEMM kernel for Hopper, shared by `dense` (bfloat16) and `float8_dense` (W8A8).

Activations are the left operand of the matrix instruction, weights the right one: tiles may have any multiple of eight features, so
that the last wave of tiles keeps nearly all multiprocessors busy. The producer warpgroup starts copies into a ring of shared memory
and runs ahead across tiles; two consumer warpgroups multiply, half a tile's rows each, or half its features where rows are too few.
Epilogues: store, split-K partial products, SwiGLU, and a first argmax. What was tried and measured is told in docs/matmul.md.
"""

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.matmul.tiling import CONSUMERS, Plan
from dflash_kernels.mosaic_gpu.layouts import store, tiled
from dflash_kernels.mosaic_gpu.pipeline import Ring, div
from dflash_kernels.mosaic_gpu.thread_op import kernel
from dflash_kernels.mosaic_gpu.tma import address_of, copy_once

_WGMMA, _ROW = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)


def gemm(
    plan: Plan, x: jax.Array, w: jax.Array, live: jax.Array | None = None, interpret: Any = None,
    scales: tuple[jax.Array, ...] = (),
) -> tuple[jax.Array, ...]:  # fmt: skip
    """Runs the kernel; see `Plan.out_types` for what it gives.

    Args:
      x: `[M, K]`.
      w: `[N, K]`, gate's rows before up's; where the plan is `blocked`, its column blocks below one another, `[K / 64 N, 64]`.
      live: `[1]`, rows that are asked for, from the first on: there are no tiles of others.
      scales: row scales of x and of w, float32, where a number has one byte.
    """
    arrays, scratch = (x, w, *scales, *(() if live is None else (live,))), _scratch(plan, x.dtype)

    def body(*refs):
        ins, outs = refs[: len(arrays)], refs[len(arrays) : -len(scratch)]
        buffers = dict(zip(scratch, refs[-len(scratch) :], strict=True))
        _Cta(plan, ins, outs, buffers).run()

    body.__name__ = f"gemm_{plan.epilogue}"  # what profilers show
    launch = kernel(
        body, out_type=plan.out_types(), scratch_types=list(scratch.values()), grid=(plan.ctas,),
        grid_names=("cta",), num_threads=CONSUMERS + 1, thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True), interpret=interpret,
    )  # fmt: skip
    return launch(*arrays)


def _scratch(plan: Plan, dtype: Any) -> dict[str, Any]:
    """Shared memory and barriers of one CTA: the ring, and a tile of results on its way out."""
    buffers: dict[str, Any] = {
        "full": plgpu.Barrier(num_arrivals=1 + len(plan.w_copies), num_barriers=plan.stages),
        "empty": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=plan.stages),
    }
    if plan.staged:
        # Rows of eight, and columns that fill a swizzle's width.
        tiles = plgpu.TilingTransform((8, plan.staged)), plgpu.SwizzleTransform(plan.staged * 2)
        buffers["out_sm"] = plgpu.SMEM((CONSUMERS, plan.wg_m, plan.wg_n), plan.out_dtype, transforms=tiles)
    buffers["w_sm"] = plgpu.SMEM((plan.stages, plan.tile_w, plan.tile_k), dtype, transforms=tiled(dtype))
    buffers["x_sm"] = plgpu.SMEM((plan.stages, plan.tile_m, plan.tile_k), dtype, transforms=tiled(dtype))
    return buffers


class _Cta:
    """The program of one persistent CTA."""

    def __init__(self, plan: Plan, arrays: Any, outs: Any, buffers: dict[str, Any]):
        self.plan, self.arrays, self.outs, self.buffers = plan, arrays, outs, buffers
        self.ring = Ring(plan.stages, buffers["full"], buffers["empty"])
        self.cta, self.wg = lax.axis_index("cta"), lax.axis_index("wg")
        scales = arrays[2 : 2 + 2 * (plan.itemsize == 1)]
        self.m_tiles, self.scales = plan.m_tiles, scales or None
        if live := arrays[2 + len(scales) :]:
            self.m_tiles = div(live[0][0] + (plan.tile_m - 1), plan.tile_m)

    def run(self) -> None:
        pl.when(self.wg != CONSUMERS)(self._consume)

        @pl.when(self.wg == CONSUMERS)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            full = address_of(self.ring.full)
            if self.plan.one_warp:
                plgpu.warp_map(lambda warp: pl.when(warp == 0)(lambda: self._produce(full)))
            else:
                self._produce(full)

    # Tile scheduler and ring, the same for producer and consumers.

    def _tiles(self, tile, carry=None) -> Any:
        """`tile(wave, first row, first feature, part of K, carry)` for the CTA's tiles; returns the last carry, and waves."""
        plan, cta = self.plan, self.cta
        tiles = self.m_tiles * plan.split_k * plan.n_tiles
        waves = div(tiles - cta + (plan.ctas - 1), plan.ctas)

        def one(wave, carry):
            index = cta + wave * plan.ctas
            rest = lax.div(index, self.m_tiles)
            part, number = lax.rem(rest, plan.split_k), lax.div(rest, plan.split_k)
            # The last tile overlaps the one before: both write the same.
            feature = jnp.minimum(number * plan.tile_n, plan.n - plan.tile_n)
            return tile(wave, self._row(index), feature, part, carry)

        return lax.fori_loop(0, waves, one, carry), waves

    def _row(self, index):
        """First row of a tile."""
        row = lax.rem(index, self.m_tiles) * self.plan.tile_m
        return jnp.minimum(row, self.plan.last_row) if self.plan.m % self.plan.tile_m else row

    def _k_tiles(self, wave, k_tile) -> None:
        """`k_tile(its number in the tile, its number in the CTA, stage)` for the k-tiles of a tile."""

        def one(number, _):
            index = wave * self.plan.k_tiles + number
            k_tile(number, index, self.ring.stage(index))

        lax.fori_loop(0, self.plan.k_tiles, one, None)

    # Producer.

    def _produce(self, full) -> None:
        plan, ring, (x, w, *_) = self.plan, self.ring, self.arrays
        x_sm, w_sm = self.buffers["x_sm"], self.buffers["w_sm"]

        def tile(wave, row, feature, part, carry):
            def k_tile(number, index, stage):
                if not plan.in_twos:
                    ring.producer_acquire(index, stage)
                else:

                    @pl.when(lax.rem(number, 2) == 0)
                    def _():
                        ring.producer_acquire(index, stage)
                        ring.producer_acquire(index + 1, ring.stage(index + 1))

                columns = pl.ds((part * plan.k_tiles + number) * plan.tile_k, plan.tile_k)
                valid = x_sm.at[stage, pl.ds(0, plan.valid_rows)]
                plgpu.copy_gmem_to_smem(x.at[pl.ds(row, plan.valid_rows), columns], valid, ring.full.at[stage])
                base, w_columns = jnp.int32(0), columns
                if plan.blocked:
                    base = (part * plan.k_tiles + number) * (plan.n * plan.matrices)
                    w_columns = pl.ds(0, plan.tile_k)
                for first, offset, size in plan.w_copies:
                    target, rows = w_sm.at[stage, pl.ds(offset, size)], pl.ds(base + first + feature, size)
                    copy_once(w, rows, w_columns, target, full, stage, one_warp=plan.one_warp)

            self._k_tiles(wave, k_tile)
            return carry

        _, waves = self._tiles(tile)
        ring.drain(waves * plan.k_tiles)

    # Consumers: mainloop and epilogue of each tile.

    def _consume(self) -> None:
        plgpu.set_max_registers(232, action="increase")
        plan, wg = self.plan, self.wg
        own_row, own_half = wg * plan.wg_m * plan.split_m, wg * (1 - plan.split_m)

        def tile(wave, row, feature, part, best):
            rows = pl.ds(row + own_row, plan.wg_m)
            columns = pl.ds(feature + own_half * plan.wg_n, plan.wg_n)
            if plan.staged:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            own_w = pl.ds(own_half * plan.wg_w, plan.wg_w)
            # Row scales are asked for before the mainloop and there after it.
            row_scales = None if self.scales is None else _load(self.scales[0].at[rows], 1)
            accumulator = self._mainloop(wave, pl.ds(own_row, plan.wg_m), own_w)
            products = self._scaled(accumulator, row_scales, columns.start)
            if plan.epilogue == "argmax":
                return self._larger(best, products[0], columns.start)
            self._store(products, pl.ds(row + own_row, min(plan.wg_m, plan.valid_rows)), columns, part)
            return best

        if plan.epilogue != "argmax":
            self._tiles(tile)
            if plan.staged:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            return
        # All tiles of a CTA are of the same rows.
        nothing = jnp.full((plan.wg_m,), -jnp.inf, jnp.float32), jnp.zeros((plan.wg_m,), jnp.int32)
        best, _ = self._tiles(tile, tuple(plgpu.layout_cast(part, _ROW) for part in nothing))
        rows, number = self._row(self.cta) + own_row, lax.div(self.cta, plan.m_tiles)
        number = number if plan.split_m else number * CONSUMERS + wg
        for out, part in zip(self.outs, best, strict=True):
            store(out.at[number, pl.ds(rows, plan.wg_m)], part)

    def _mainloop(self, wave, rows, w_rows):
        """A consumer's accumulator `[wg_m, wg_w]` of one tile."""
        plan, ring, x_sm, w_sm = self.plan, self.ring, self.buffers["x_sm"], self.buffers["w_sm"]

        def accumulate(acc):
            def k_tile(number, index, stage):
                ring.consumer_wait(stage)
                plgpu.wgmma(acc, x_sm.at[stage, rows], w_sm.at[stage, w_rows].transpose((1, 0)))
                # All but this k-tile's instructions are done: the stage before can be filled again.
                plgpu.wgmma_wait(1)
                pl.when(number > 0)(lambda: ring.consumer_release(ring.stage(index - 1)))

            self._k_tiles(wave, k_tile)
            result = acc[...]
            ring.consumer_release(ring.stage((wave + 1) * plan.k_tiles - 1))
            return result

        return pl.run_scoped(accumulate, plgpu.ACC((plan.wg_m, w_rows.size), jnp.float32))

    def _scaled(self, accumulator, row_scales, feature) -> list[Any]:
        """The accumulator's product, or gate's and up's, times row scales and the weights' scales where there are any."""
        plan, n = self.plan, self.plan.wg_n
        products = [accumulator] if plan.matrices == 1 else [accumulator[:, :n], accumulator[:, n:]]
        if self.scales is None:
            return products
        scaled = []
        for number, product in enumerate(products):
            w_scales = _load(self.scales[1].at[pl.ds(number * plan.n + feature, n)], 0)
            factors = (
                lax.broadcast_in_dim(one, product.shape, [axis]) for axis, one in enumerate((row_scales, w_scales))
            )
            scaled.append(product * next(factors) * next(factors))
        return scaled

    def _store(self, products, rows, columns, part) -> None:
        """Writes a tile: the product, its part of split-K, or SwiGLU of gate and up."""
        plan, (out,), (result, *_) = self.plan, self.outs, products
        if plan.epilogue == "swiglu":
            gate, up = products
            root = lax.rsqrt(1.0 + jnp.exp(-gate))
            result = gate * root * (up * root)
        target = out.at[part, rows, columns] if plan.epilogue == "split_k" else out.at[rows, columns]
        if not plan.staged:
            store(target, result.astype(out.dtype))
            return
        staged = self.buffers["out_sm"].at[self.wg]
        staged[...] = result.astype(out.dtype)
        plgpu.commit_smem()
        valid = staged if rows.size == plan.wg_m else staged.at[pl.ds(0, rows.size)]
        plgpu.copy_smem_to_gmem(valid, target)

    def _larger(self, best, product, feature):
        """The largest products so far and their features, the first of equal ones, after one more tile."""
        values, ids = best
        product = product.astype(self.plan.out_dtype).astype(jnp.float32)
        largest = product.max(axis=1)
        places = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, product.shape, 1), _WGMMA)
        equal = product == lax.broadcast_in_dim(largest, product.shape, [0])
        first = jnp.where(equal, places, jnp.int32(product.shape[1])).min(axis=1)
        larger = largest > values
        return jnp.where(larger, largest, values), jnp.where(larger, first + feature, ids)


def _load(ref: Any, axis: int) -> Any:
    return plgpu.load(ref, layout=_WGMMA.reduce(axis), optimized=False)
