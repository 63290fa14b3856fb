"""How keys and values come to a CTA of the Hopper kernel: what is read before the first copies, and who starts them.

Whatever a CTA reads after its first copies waits until all of those have arrived, be it in the cache or not. So page ids and
queries are asked for before, in loads that compilers leave where they stand, and stay in registers.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.attention.paged.mosaic_gpu_ops import held_entry, hold_entries, pad_columns
from dflash_kernels.attention.paged.mosaic_gpu_part import Part
from dflash_kernels.mosaic_gpu.pipeline import warpgroup_barrier


class Fed(Part):
    """A part whose tiles go through the ring one by one, keys and values.

    Attributes:
      ahead: read ids of all pages before the first copies, and leave copies to one warp.
    """

    ahead = False

    def __init__(self, launch, refs, buffers, interpret):
        super().__init__(launch, refs, buffers)
        self.interpret, self.entries, self.one_warp = interpret, None, self.ahead

    def hold_entries(self):
        """Asks for the table's entries, before the sequence's length is there."""
        if self.ahead and self.interpret is None and self.launch.page_size >= self.launch.keys:
            self.entries = hold_entries(self._row_of_table(), self.begin, self.stride, self._tiles_of_page())

    def pages(self, tile):
        if self.entries is None:
            return super().pages(tile)
        index = lax.div(tile - self.begin, jnp.int32(self.stride))
        return [held_entry(self.entries, self._row_of_table(), self.begin, index, self.stride, self._tiles_of_page())]

    def _row_of_table(self):
        return self.refs["table"].at[self.b]

    def _tiles_of_page(self):
        return self.launch.page_size // self.launch.keys

    def fill_ring(self, streams, pages, *, least=None, below=None):
        fill = functools.partial(super().fill_ring, streams, pages, least=least, below=below)
        self._by_one_warp(fill)

    def _by_one_warp(self, task):
        """Copies of the only warpgroup: otherwise all its threads would arrive at each barrier, and wait for each other."""
        if self.interpret is not None or not self.ahead:
            task()
        else:
            plgpu.warp_map(lambda warp: pl.when(warp == 0)(task))

    def refill_both(self, tile, pages):
        """Starts the tile that comes in place of a used one, keys and values, once all warps of the warpgroup are done with it."""
        if self.interpret is None:
            warpgroup_barrier()
        coming = self.next_in_stage(tile)

        def fill():
            @pl.when(coming < self.end)
            def _():
                for stream in ("k", "v"):
                    self.fill(stream, coming, pages)

        self._by_one_warp(fill)

    def refill(self, which, tile, pages):
        """Gives a used stage back and, once all warpgroups have, starts the tile that comes next in it."""
        stage, freed = self.stage(tile), self.buffers[f"{which}_out"]
        plgpu.barrier_arrive(freed.at[stage])

        @pl.when(self.wg == 0)
        def _():
            plgpu.barrier_wait(freed.at[stage])
            coming = self.next_in_stage(tile)
            pl.when(coming < self.end)(functools.partial(self.fill, which, coming, pages))

    def tile(self, which, tile):
        """A tile of keys or values as matrix instructions take it, once it is there."""
        stage = self.stage(tile)
        plgpu.barrier_wait(self.buffers[f"{which}_in"].at[stage])
        held = self.buffers[f"{which}_sm"].at[stage]
        if self.launch.width == self.launch.head_dim:
            return held
        pad_columns(held, self.buffers[f"{which}_wide"], self.interpret)
        return self.buffers[f"{which}_wide"]
