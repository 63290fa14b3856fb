"""Parts of keys in float8 pages: they widen to float16 on their way to the products."""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.fused import mosaic_gpu_ops as ops
from dflash_kernels.fused.layer.mosaic_gpu_sm90_attention import Item
from dflash_kernels.mosaic_gpu.pipeline import rem


class NarrowItem(Item):
    """A CTA's part of float8 pages.

    The warpgroup that has tiles brought widens them as well: copies go to a ring of their own, and what attends finds them as it
    finds others. Pages are not scaled: their scales go to the scores and to the sums.
    """

    def bring(self, asked):
        """See `Item.bring`."""
        ahead = self.attention.narrow_stages

        def start(tile, _):
            pages = self._pages(tile)
            for which in range(2):
                self._fill_narrow(which, tile, pages)

        lax.fori_loop(self.begin, jnp.minimum(self.begin + ahead, self.end), start, None)
        asked()

        def bring(tile, _):
            coming, stage = self._pages(tile + ahead), self._stage(tile)
            for which, name in enumerate(("k", "v")):
                plgpu.barrier_wait(self._arrived(which, tile))
                self._await_stage(name, tile)
                source = self.buffers["narrow_sm"].at[self._place(which, tile)]
                ops.widen(source, self.buffers["kv_sm"], self._slot(which, stage), self.interpret)
                plgpu.barrier_arrive(self.buffers[f"{name}_in"].at[stage])
                pl.when(tile + ahead < self.end)(functools.partial(self._fill_narrow, which, tile + ahead, coming))

        lax.fori_loop(self.begin, self.end, bring, None)

    def _fill_narrow(self, which: int, tile, pages):
        for rows, source in self._sources("kv"[which], tile, pages):
            target = self.buffers["narrow_sm"].at[self._place(which, tile), rows]
            plgpu.copy_gmem_to_smem(source, target, self._arrived(which, tile))

    def _arrived(self, which: int, tile):
        return self.buffers[f"{'kv'[which]}_narrow_in"].at[rem(tile - self.begin, self.attention.narrow_stages)]

    def _place(self, which: int, tile):
        """Of a tile as it comes: two lie in the memory of one slot, before the slots of those that are widened."""
        stages, ahead = self.attention.stages, self.attention.narrow_stages
        first = 2 * (self._queries() - 2 * stages - ahead)
        return first + 2 * rem(tile - self.begin, ahead) + which

    def _unit(self):
        return super()._unit() * self.refs["k_scale"][self.head]

    def _of_values(self, inverse):
        return inverse * self.refs["v_scale"][self.head]
