"""The Hopper kernel: a CTA attends with 128 query rows of one sequence and head at a time, two warpgroups computing, one copying.

The third warpgroup fills a ring of tiles of keys and values in shared memory by TMA, from packed rows or from pages, and runs
ahead into the next block of queries. The other two have 64 rows each and go through the tiles side by side, neither waiting for the
other: each has products on their way while it has its softmax.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.attention.ragged.launch import BLOCK, ROWS, WARPGROUPS, Launch
from dflash_kernels.attention.ragged.mosaic_gpu_block import Block
from dflash_kernels.attention.ragged.mosaic_gpu_compute import Compute
from dflash_kernels.mosaic_gpu.layouts import swizzled


def scratch(launch: Launch, dtype: Any, interpret: Any) -> dict[str, Any]:
    """Shared memory and barriers of one CTA."""

    def tiles(*shape: int) -> Any:
        return plgpu.SMEM(shape, dtype, transforms=swizzled(dtype, shape[-1]))

    # A block that does not fill 64 rows leaves in slices of a row, which a tiled layout cannot give.
    out = (tiles(WARPGROUPS, ROWS, launch.value_dim), plgpu.SMEM((WARPGROUPS, ROWS, launch.value_dim), dtype))
    q = tiles(WARPGROUPS, ROWS, launch.head_dim)
    filled = plgpu.Barrier(num_arrivals=launch.copies, num_barriers=launch.stages)
    freed = plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=launch.stages)
    buffers = {
        "k_sm": tiles(launch.stages, launch.keys, launch.head_dim),
        "v_sm": tiles(launch.stages, launch.keys, launch.value_dim),
        "k_in": filled, "v_in": filled, "k_out": freed, "v_out": freed,
        "v_raw": plgpu.Barrier(num_arrivals=launch.copies),
        "q_in": plgpu.Barrier(num_arrivals=WARPGROUPS), "q_out": plgpu.Barrier(num_arrivals=WARPGROUPS),
    }  # fmt: skip
    if launch.separate_out:
        buffers |= {"q_sm": q, "o_sm": plgpu.RefUnion(*out)}
    else:
        buffers |= {"q_sm": plgpu.RefUnion(q, *out)}
    if interpret is not None:
        buffers["p_sm"] = plgpu.SMEM((WARPGROUPS, ROWS, launch.keys), dtype)
    return buffers


def attention(
    launch: Launch, q: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array, page_table: jax.Array | None,
    extra: list[jax.Array], interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Runs the kernel.

    Args:
      launch: shapes and schedule.
      q: `[T, N, H]`, at least a block of rows.
      k, v: `[S, K, H]` and `[S, K, V]`, at least a tile of rows, or `[P, K, p, H]` and `[P, K, p, V]`.
      table: `[M, 7]` int32, from `block_table`.
      page_table: `[B, W]` int32, or None for packed keys. Entries past a sequence's last page are never read.
      extra: sinks, slopes: float32 `[N]`, those that the launch has.

    Returns:
      Output `[T, N, V]`, all rows of all blocks written; natural lse `[N, M, 128]` float32 of the rows of each block.
    """

    def body(q_ref, k_ref, v_ref, table_ref, *rest, **buffers):
        rest = list(rest)
        pages_ref = rest.pop(0) if launch.page_size else None
        sinks_ref = rest.pop(0) if launch.has_sinks else None
        slopes_ref = rest.pop(0) if launch.has_slopes else None
        out_ref, lse_ref = rest
        if launch.separate_out:
            buffers["o_sm"], buffers["tail_sm"] = buffers["o_sm"]
        else:
            buffers["q_sm"], buffers["o_sm"], buffers["tail_sm"] = buffers["q_sm"]
        wg = lax.axis_index("wg")

        @pl.when(wg < WARPGROUPS)
        def _():
            plgpu.set_max_registers(232, action="increase")
            compute = Compute(launch, wg, sinks_ref, slopes_ref, out_ref, lse_ref, buffers)
            _each_block(launch, table_ref, compute.block)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(wg == WARPGROUPS)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            copies = _Copies(launch, q_ref, k_ref, v_ref, pages_ref, buffers)
            copies.finish(_each_block(launch, table_ref, copies.block))

    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((q.shape[0], launch.heads, launch.value_dim), q.dtype),
            jax.ShapeDtypeStruct((launch.heads, launch.blocks, BLOCK), jnp.float32),
        ),
        scratch_types=scratch(launch, q.dtype, interpret),
        grid=(launch.ctas,), grid_names=("cta",), num_threads=WARPGROUPS + 1, thread_name="wg",
        # Row reductions of a matrix tile stay within a warp and need no scratch.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )(q, k, v, table, *(() if page_table is None else (page_table,)), *extra)  # fmt: skip


def _each_block(launch: Launch, table_ref: Any, work: Callable[[Block, jax.Array], None]) -> jax.Array:
    """Calls `work` with every block of this CTA and the tiles of keys done before; returns the tiles done in all.

    Blocks of a section lie in order of their work and are dealt there and back again: who has the longest of one round has the
    shortest of the next.
    """
    cta, rounds = lax.axis_index("cta"), jnp.int32(launch.rounds)

    def one(i, done):
        section, turn = lax.div(i, rounds), lax.rem(i, rounds)
        back = lax.rem(section + turn, jnp.int32(2)) == 1
        block = Block(launch, table_ref, section, turn * launch.ctas + jnp.where(back, launch.ctas - 1 - cta, cta))
        pl.when(block.there)(functools.partial(work, block, done))
        return done + block.tiles

    return lax.fori_loop(0, launch.heads // launch.heads_at_once * launch.rounds, one, jnp.int32(0))


class _Copies:
    """The warpgroup that copies."""

    def __init__(self, launch, q_ref, k_ref, v_ref, pages_ref, buffers):
        self.launch, self.buffers = launch, buffers
        self.q_ref, self.k_ref, self.v_ref, self.pages_ref = q_ref, k_ref, v_ref, pages_ref

    def block(self, block: Block, done):
        """Queries, keys and values of one block. Page ids are read a tile ahead of the copy that needs them."""
        stages = self.launch.stages

        def one(tile, pages):
            step = done + tile - block.begin
            slot, used = lax.rem(step, jnp.int32(stages)), step >= stages
            coming = self._pages(block, tile + 1)
            pl.when(used)(lambda: plgpu.barrier_wait(self.buffers["k_out"].at[slot]))
            self._fill(self.k_ref, block, tile, pages, self.buffers["k_sm"].at[slot], self.buffers["k_in"].at[slot])
            pl.when(tile == block.begin)(functools.partial(self._queries, block, done))
            pl.when(used)(lambda: plgpu.barrier_wait(self.buffers["v_out"].at[slot]))
            self._values(block, tile, pages, slot)
            return coming

        lax.fori_loop(block.begin, block.end, one, self._pages(block, block.begin))

    def finish(self, done):
        """Waits until everything copied is used up."""
        for back in range(1, self.launch.stages + 1):

            @pl.when(done >= back)
            def _(back=back):
                slot = lax.rem(done - back, jnp.int32(self.launch.stages))
                plgpu.barrier_wait(self.buffers["k_out"].at[slot])
                plgpu.barrier_wait(self.buffers["v_out"].at[slot])

        pl.when(done > 0)(lambda: plgpu.barrier_wait(self.buffers["q_out"]))

    def _queries(self, block, done):
        # Rows that are not the block's own stay what they are in their rows; rows past the array come as zeros.
        pl.when(done > 0)(lambda: plgpu.barrier_wait(self.buffers["q_out"]))
        for wg in range(WARPGROUPS):
            source = self.q_ref.at[pl.ds(block.first_row + wg * ROWS, ROWS), block.head]
            plgpu.copy_gmem_to_smem(source, self.buffers["q_sm"].at[wg], self.buffers["q_in"])

    def _pages(self, block, tile):
        """Ids of the pages that hold a tile. Entries past the sequence's last page are replaced by it, not read."""
        launch = self.launch
        if not launch.page_size:
            return []
        last = lax.div(jnp.maximum(block.keys_end - 1, 0), jnp.int32(launch.page_size))
        if launch.page_size >= launch.keys:
            entries = [lax.div(tile, jnp.int32(launch.page_size // launch.keys))]
        else:
            entries = [tile * launch.copies + copy for copy in range(launch.copies)]
        return [self.pages_ref[block.origin, jnp.minimum(entry, last)] for entry in entries]

    def _values(self, block, tile, pages, slot):
        """Starts the copies of a tile of values, or waits for them and hands the tile over once its strange rows are zeros."""
        keys, memory, filled = self.launch.keys, self.buffers["v_sm"].at[slot], self.buffers["v_in"].at[slot]
        begin, end = block.shift - tile * keys, block.keys_end - tile * keys
        strange = (begin > 0) | (end < keys)

        @pl.when(jnp.logical_not(strange))
        def _():
            self._fill(self.v_ref, block, tile, pages, memory, filled)

        @pl.when(strange)
        def _():
            self._fill(self.v_ref, block, tile, pages, memory, self.buffers["v_raw"])
            plgpu.barrier_wait(self.buffers["v_raw"])
            self._clear(memory, begin, end)
            for _ in range(self.launch.copies):
                plgpu.barrier_arrive(filled)

    def _clear(self, memory, begin, end):
        """Zeroes the rows of a tile of values outside of these: their weight is 0, and 0 * NaN is NaN."""
        rows, columns = ROWS, 64
        places = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (rows, columns), 0), plgpu.Layout.WGMMA)

        @pl.loop(0, memory.shape[0] // rows)
        def _(part):
            own = (places >= begin - part * rows) & (places < end - part * rows)
            for column in range(0, memory.shape[1], columns):
                values = memory.at[pl.ds(part * rows, rows), pl.ds(column, columns)]
                held = plgpu.layout_cast(values[...], plgpu.Layout.WGMMA)
                values[...] = jnp.where(own, held, jnp.zeros_like(held))

        plgpu.commit_smem()

    def _fill(self, source, block, tile, pages, memory, barrier):
        """Starts the copies of one tile of keys or values."""
        launch = self.launch
        if not launch.page_size:
            rows = pl.ds(block.origin + tile * launch.keys, launch.keys)
            plgpu.copy_gmem_to_smem(source.at[rows, block.kv_head], memory, barrier)
        elif launch.page_size >= launch.keys:
            part = lax.rem(tile, jnp.int32(launch.page_size // launch.keys))
            rows = pl.ds(part * launch.keys, launch.keys)
            plgpu.copy_gmem_to_smem(source.at[pages[0], block.kv_head, rows], memory, barrier)
        else:
            for copy, page in enumerate(pages):
                rows = pl.ds(copy * launch.page_size, launch.page_size)
                plgpu.copy_gmem_to_smem(source.at[page, block.kv_head], memory.at[rows], barrier)
