"""The Hopper kernel: persistent CTAs, each with tiles of rows and features.

Rows are the left operand of the matrix instruction, features the right one: tiles may have any multiple of eight features, so
that the last round of tiles keeps nearly all multiprocessors busy. One warpgroup starts copies into a ring of shared memory and
runs ahead across tiles; two multiply, half a tile's rows each, or half its features where rows are too few.

Measured on an H200, without gain: bringing the next product's weights to the cache while this one ends, one warpgroup that is
ahead of the other, so that it writes its results while the other multiplies, one that multiplies alone, and clusters. Pairs that
share weights take as long; fours, of which 30 find room and not 33, twice as long; pairs with half the depth each that swap halves
of their sums 5 % longer.

Products of 512 rows run at the power limit, one after the other at 1.5 GHz: gate and up of an 8B model (103 GFLOP) take 116 mJ in
162 us, and 90 mJ without copies; 154 us without what follows the product. So the sizes of tiles and the number of instructions
count where the matrix units are busy 88 % of the time: tiles of 256 x 192 bring a fifth less than of 128 x 256, and plans that are
`lean` issue as few as a quarter of the instructions. On the same numbers and with the stream to add cuBLAS takes as long within the
spread: 81 and 85 us in two runs for the product down, which takes 82 and 86 here; 159 for gate and up without SiLU, 161 here with
it. A cycle of 8B takes 0.9 to 1.6 % less with cuBLAS for o and down, so these are left to it (`mosaic_gpu.onto`): as one call each,
which XLA makes of them without Triton's products to choose from; with these, an addition apart or two halves of the depth, and more
time than here, as for a 4B model in any case. Weights copied with the hint that they are read once save 0.8 % of such a cycle, and
3 % of one of eight sequences of 4B. Nothing beyond the spread: a head's product whose copies one warp starts, pages of the next
layer brought to the cache while down multiplies, weights asked for in runs of 512 bytes.

A product of 128 rows waits for memory, and hardly less for the way into a multiprocessor, 95 KB/us: of weights [2560, 9728], which
memory has in 11.7 us, a CTA brings 1.09 MB with its x, in 11.5. So 12 MB of gate_up's weights that are in the cache already save
1 us of 31; gate_up and down in one launch, whose CTAs meet while down's weights come, take 48 us as two launches do; and pairs of
CTAs with other features that share x gain nothing: of gate_up's 29 us from start to start 27 are left without products and with
hardly any of x.

Products of 128 rows run at the power limit too, at 1.4 to 1.75 GHz. Tiles that bring fewer bytes to multiprocessors save nothing of
it that shows: a cycle of eight sequences of 8B took 6.35 ms as it is, 6.39 with down in tiles of 128 x 128 and four parts (a
third less), 6.41 with o so as well, 6.42 with gate and up of 112 features; of 4B 4.01 ms, 4.02 with o and down in tiles of 128 x
80, 4.01 with gate and up of 96. One H200, in turns.

Asked for one block at a time, gate_up's weights come unevenly: launch after launch the same multiprocessors have their last block
1 us before the others of 4B or 1 us after them, and a launch waits for the last. Asked for two at a time they differ a third as
much: start to start takes 30.2 us in place of 31.4, of 8B 55.9 in place of 59.3 (with stamps), a cycle of eight sequences of 4B
0.5 % less. No better there: a ring of five blocks (30.5) or four, blocks in threes and fours, a ring that fills up slowly, tiles
for the last ten multiprocessors as well. Down's multiprocessors keep step by themselves, and its pairs take 17.2 us in place of
16.9; a cycle with all products and the heads in pairs takes 0.5 % more.

Results leave through shared memory and in bfloat16, parts of sums too: a cycle of eight sequences of 4B takes 2.1 to 2.3 % less
than with parts in float32, from registers, and no less with parts of bfloat16 from registers or of float32 through shared memory;
qkv, and gate and up, another 0.3 and 0.2 % less so. What four rounded parts lose is what tensor parallelism over four GPUs does.

Weights in blocks of 64 columns, each block in one piece of memory (`dflash_kernels.core.layouts`), come 2 to 5 % faster: products
of 128 rows of a layer take 64 us in place of 65 for 4B, 78 in place of 81 for gate, up and down of 8B, a head 180 for 187, a
layer's chain for 16 rows 54.7 for 55.9. Products of 512 rows gain nothing, and 8B's o and down, which cuBLAS cannot multiply then,
lose: `dflash_jax.execution.weight_layout` says which engines keep weights so, and what their cycles gain.

Sums and norms are launches of their own, which cost 2.8 us each in a graph. CTAs that hold the parts of a tile and add them to the
stream themselves, with squares that the next product norms with, need 3.4 us from the last product to the last result: 0.8 to
write parts, 1.7 until all are counted, 0.3 to read, 0.5 to write. The products of a layer of 4B take 77.9 us so, 78.8 as they are,
a cycle of eight sequences 4.46 and 4.50 ms; 8B's products 125.5 and 125.8 us. Words that say themselves whether they are there take
2 us more than counting, clusters and their shared memory 1.8, for only 30 of four CTAs fit at once. Tiles of 128 x 160 in eight
parts of bfloat16 take 2.9 us more than down as it is, and 2.8 more than o. Sums at the head of the next launch, whose CTAs add up
and norm a row each, meet and multiply, take longer, too: 33.7 us for 31.4 of gate_up with its norm, 15.7 for 14.6 of q, k and v,
a cycle 4.13 ms for 4.05, and 4.14 to 4.25 where the first weights come before the sums, while CTAs meet, or both.
"""

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.matmul.dense.mosaic_gpu_scales import Scales, parts_of
from dflash_kernels.matmul.dense.tiling import MULTIPLIERS, Plan
from dflash_kernels.mosaic_gpu.layouts import tiled
from dflash_kernels.mosaic_gpu.tma import address_of, copy_once

_WGMMA, _ROW = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)


def dense(
    plan: Plan, x: jax.Array, w: jax.Array, live: jax.Array | None = None, interpret: Any = None,
    scales: tuple[jax.Array, ...] = (),
) -> tuple[jax.Array, ...]:  # fmt: skip
    """Runs the kernel; what it gives is said at `Plan.results`.

    Args:
      w: `[F, D]`; where the plan is `blocked`, its blocks below one another, `[D / 64 F, 64]`.
      live: `[1]`, so many rows from the first on, no tiles of others.
      scales: of x's rows and of w's, float32, where a number has one byte.
    """
    arrays = (x, w, *scales, *(() if live is None else (live,)))

    def body(*refs, **buffers):
        _Cta(plan, refs[: len(arrays)], refs[len(arrays) :], buffers, hints=interpret is None).run()

    body.__name__ = f"dense_{plan.form}"  # what profilers show
    kernel = plgpu.kernel(
        body, out_type=plan.results(), scratch_types=_scratch(plan, x.dtype), grid=(plan.ctas,),
        grid_names=("cta",), num_threads=MULTIPLIERS + 1, thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **({} if interpret is None else {"interpret": interpret}),
    )  # fmt: skip
    return kernel(*arrays)


def _scratch(plan: Plan, dtype: Any) -> dict[str, Any]:
    """Shared memory and barriers of one CTA."""
    buffers = {
        "x_sm": plgpu.SMEM((plan.slots, plan.tile_rows, plan.block), dtype, transforms=tiled(dtype)),
        "w_sm": plgpu.SMEM((plan.slots, plan.tile_features, plan.block), dtype, transforms=tiled(dtype)),
        "filled": plgpu.Barrier(num_arrivals=1 + len(plan.pieces), num_barriers=plan.slots),
        "freed": plgpu.Barrier(num_arrivals=MULTIPLIERS, num_barriers=plan.slots),
    }
    if plan.staged:
        # Rows of eight, and columns that fill a swizzle's width.
        tiles = plgpu.TilingTransform((8, plan.staged)), plgpu.SwizzleTransform(plan.staged * 2)
        buffers["out_sm"] = plgpu.SMEM((MULTIPLIERS, plan.own_rows, plan.own_step), plan.rounded, transforms=tiles)
    return buffers


class _Cta:
    """The work of one CTA."""

    def __init__(self, plan: Plan, arrays: Any, outs: Any, buffers: dict[str, Any], *, hints: bool):
        self.plan, self.arrays, self.outs, self.buffers = plan, arrays, outs, buffers
        self.hints = hints  # what an interpreter has no copies with
        self.cta, self.wg = lax.axis_index("cta"), lax.axis_index("wg")
        scales = arrays[2 : 2 + 2 * (plan.itemsize == 1)]
        self.row_tiles, self.scales = plan.row_tiles, Scales(plan, *scales) if scales else None
        if live := arrays[2 + len(scales) :]:
            self.row_tiles = lax.div(live[0][0] + (plan.tile_rows - 1), jnp.int32(plan.tile_rows))

    def run(self) -> None:
        pl.when(self.wg != MULTIPLIERS)(self._multiply)

        @pl.when(self.wg == MULTIPLIERS)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            once = address_of(self.buffers["filled"]) if self.hints else None
            if self.plan.lean:
                plgpu.warp_map(lambda warp: pl.when(warp == 0)(lambda: self._bring(once)))
            else:
                self._bring(once)

    def _row(self, index):
        """First row of a tile."""
        row = lax.rem(index, self.row_tiles) * self.plan.tile_rows
        return jnp.minimum(row, self.plan.last_row) if self.plan.rows % self.plan.tile_rows else row

    def _tiles(self, tile, carry=None) -> Any:
        """`tile(turn, first row, first feature, part of the depth, carry)` for all tiles in turn; the last carry, and turns."""
        plan, cta = self.plan, self.cta
        tiles = self.row_tiles * plan.splits * plan.feature_tiles
        turns = lax.div(tiles - cta + (plan.ctas - 1), jnp.int32(plan.ctas))

        def one(turn, carry):
            index = cta + turn * plan.ctas
            rest = lax.div(index, self.row_tiles)
            column, number = lax.rem(rest, plan.splits), lax.div(rest, plan.splits)
            # The last tile overlaps the one before: both write the same.
            feature = jnp.minimum(number * plan.step, plan.features - plan.step)
            return tile(turn, self._row(index), feature, column, carry)

        return lax.fori_loop(0, turns, one, carry), turns

    def _slot(self, index):
        return lax.rem(index, jnp.int32(self.plan.slots))

    def _blocks(self, turn, block) -> None:
        """`block(step, number among the CTA's blocks, slot)` for the blocks of a tile."""

        def one(step, _):
            index = turn * self.plan.steps + step
            block(step, index, self._slot(index))

        lax.fori_loop(0, self.plan.steps, one, None)

    def _bring(self, once) -> None:
        plan, (x, w, *_) = self.plan, self.arrays
        x_sm, w_sm, filled, freed = (self.buffers[name] for name in ("x_sm", "w_sm", "filled", "freed"))

        def wait_for(index, slot):
            pl.when(index >= plan.slots)(lambda: plgpu.barrier_wait(freed.at[slot]))

        def tile(turn, row, feature, column, carry):
            def block(step, index, slot):
                if not plan.pairs:
                    wait_for(index, slot)
                else:

                    @pl.when(lax.rem(step, 2) == 0)
                    def _():
                        wait_for(index, slot)
                        wait_for(index + 1, self._slot(index + 1))

                columns = pl.ds((column * plan.steps + step) * plan.block, plan.block)
                present = x_sm.at[slot, pl.ds(0, plan.present)]
                plgpu.copy_gmem_to_smem(x.at[pl.ds(row, plan.present), columns], present, filled.at[slot])
                base, of_block = jnp.int32(0), columns
                if plan.blocked:
                    base, of_block = (column * plan.steps + step) * (plan.features * plan.parts), pl.ds(0, plan.block)
                for first, offset, size in plan.pieces:
                    target, rows = w_sm.at[slot, pl.ds(offset, size)], pl.ds(base + first + feature, size)
                    if once is None:
                        plgpu.copy_gmem_to_smem(w.at[rows, of_block], target, filled.at[slot])
                    else:
                        copy_once(w, rows, of_block, target, once, slot, one_warp=plan.lean)

            self._blocks(turn, block)
            return carry

        _, turns = self._tiles(tile)
        blocks = turns * plan.steps

        def drain(index, _):
            plgpu.barrier_wait(freed.at[self._slot(index)])

        # Every completion of a barrier is waited for.
        lax.fori_loop(jnp.maximum(blocks - plan.slots, 0), blocks, drain, None)

    def _multiply(self) -> None:
        plgpu.set_max_registers(232, action="increase")
        plan, wg, scales = self.plan, self.wg, self.scales
        first_row, by_features = wg * plan.own_rows * plan.by_rows, wg * (1 - plan.by_rows)

        def tile(turn, row, feature, column, best):
            rows = pl.ds(row + first_row, plan.own_rows)
            columns = pl.ds(feature + by_features * plan.own_step, plan.own_step)
            if plan.staged:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            right = pl.ds(by_features * plan.own_features, plan.own_features)
            factors = None if scales is None else scales.of_rows(rows)
            product = self._product(turn, pl.ds(first_row, plan.own_rows), right)
            parts = parts_of(plan, product) if scales is None else scales.scaled(product, factors, columns.start)
            if plan.form == "best":
                return self._better(best, parts[0], columns.start)
            self._finish(parts, pl.ds(row + first_row, min(plan.own_rows, plan.present)), columns, column)
            return best

        if plan.form != "best":
            self._tiles(tile)
            if plan.staged:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            return
        # All tiles of a CTA are of the same rows.
        nothing = jnp.full((plan.own_rows,), -jnp.inf, jnp.float32), jnp.zeros((plan.own_rows,), jnp.int32)
        best, _ = self._tiles(tile, tuple(plgpu.layout_cast(part, _ROW) for part in nothing))
        rows, number = self._row(self.cta) + first_row, lax.div(self.cta, plan.row_tiles)
        number = number if plan.by_rows else number * MULTIPLIERS + wg
        for out, part in zip(self.outs, best, strict=True):
            out.at[number, pl.ds(rows, plan.own_rows)][...] = part

    def _product(self, turn, rows, features):
        """A warpgroup's part of a tile."""
        plan = self.plan
        x_sm, w_sm, filled, freed = (self.buffers[name] for name in ("x_sm", "w_sm", "filled", "freed"))

        def accumulate(acc):
            def block(step, index, slot):
                plgpu.barrier_wait(filled.at[slot])
                plgpu.wgmma(acc, x_sm.at[slot, rows], w_sm.at[slot, features].transpose((1, 0)))
                # All but this block's instructions are done: the slot before can be filled again.
                plgpu.wgmma_wait(1)
                pl.when(step > 0)(lambda: plgpu.barrier_arrive(freed.at[self._slot(index - 1)]))

            self._blocks(turn, block)
            result = acc[...]
            plgpu.barrier_arrive(freed.at[self._slot((turn + 1) * plan.steps - 1)])
            return result

        return pl.run_scoped(accumulate, plgpu.ACC((plan.own_rows, features.size), jnp.float32))

    def _better(self, best, product, feature):
        """The largest products so far and their features, the first of equal ones, after one more tile."""
        values, ids = best
        product = product.astype(self.plan.rounded).astype(jnp.float32)
        largest = product.max(axis=1)
        places = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, product.shape, 1), _WGMMA)
        equal = product == lax.broadcast_in_dim(largest, product.shape, [0])
        first = jnp.where(equal, places, jnp.int32(product.shape[1])).min(axis=1)
        larger = largest > values
        return jnp.where(larger, largest, values), jnp.where(larger, first + feature, ids)

    def _finish(self, parts, rows, columns, column) -> None:
        """Writes a tile of products in the plan's form."""
        plan, (out,), (product, *_) = self.plan, self.outs, parts
        if plan.form == "gated":
            gate, up = parts
            root = lax.rsqrt(1.0 + jnp.exp(-gate))
            product = gate * root * (up * root)
        target = out.at[column, rows, columns] if plan.form == "parts" else out.at[rows, columns]
        if not plan.staged:
            target[...] = product.astype(out.dtype)
            return
        place = self.buffers["out_sm"].at[self.wg]
        place[...] = product.astype(out.dtype)
        plgpu.commit_smem()
        there = place if rows.size == plan.own_rows else place.at[pl.ds(0, rows.size)]
        plgpu.copy_smem_to_gmem(there, target)
