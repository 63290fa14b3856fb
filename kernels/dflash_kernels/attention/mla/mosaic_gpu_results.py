"""What a CTA of the Hopper kernel makes of its sums: the output itself, or a part in sixteen bits."""

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.attention.mla.launch import HALF, ROWS
from dflash_kernels.attention.mla.mosaic_gpu_tiles import Tiles
from dflash_kernels.mosaic_gpu.softmax import LOG2E

ROW = plgpu.Layout.WGMMA.reduce(1)
_WGMMA = plgpu.Layout.WGMMA
# Rows of the exchanged statistics.
TOP, SUM, _TOTAL = 0, 4, 2
_SMALLEST = 2.0**-100  # of the sums of a part's row: all below is 0


class Results(Tiles):
    """The end of one CTA's work."""

    def _stat(self, row):
        return plgpu.load(self.memory["stats"].at[row], layout=ROW)

    def _row_tokens(self):
        """Query token of each row."""
        rows = plgpu.layout_cast(lax.iota(jnp.int32, ROWS), ROW)
        return lax.div(rows + self.first_row, jnp.int32(self.launch.heads))

    def _finish(self, wg, acc, top, total):
        """Adds up both warpgroups' totals, normalises and writes this one's columns."""
        memory = self.memory
        memory["stats"].at[_TOTAL + wg][...] = total
        plgpu.barrier_arrive(memory["total_in"].at[wg])
        largest = None if self.launch.direct else jnp.abs(acc).max(axis=1)
        plgpu.barrier_wait(memory["total_in"].at[1 - wg])
        total += self._stat(_TOTAL + 1 - wg)
        live = (self._row_tokens() < self.q_len) & (total != 0)
        inverse = jnp.where(live, 1.0 / jnp.where(live, total, 1.0), 0.0)
        if wg == 0:
            self._write_stat(0, jnp.where(live, (top + jnp.log2(jnp.where(live, total, 1.0))) * (1 / LOG2E), -jnp.inf))
        if largest is not None:
            # Sixteen bits of a part are as good as the float32 sum, each row's half measured by its largest number.
            some = live & (largest > _SMALLEST)
            self._write_stat(1 + wg, jnp.where(some, largest * inverse, 0.0))
            inverse = jnp.where(some, 1.0 / jnp.where(some, largest, 1.0), 0.0)
        factor = lax.broadcast_in_dim(inverse, acc.shape, [0])
        if self.launch.direct:
            # Not a product alone: rows past the live ones may hold NaN.
            self._write(wg, jnp.where(factor != 0, acc * factor, 0.0))
        else:
            # Merging skips what has no weight, NaN too: choosing here as well would cost eight sequences of 16 tokens 0.7 us.
            self._write(wg, acc * factor)

    def _nothing(self, wg):
        """A part without keys."""
        if wg == 0:
            self._write_stat(0, plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), ROW))
        if self.launch.direct:
            self._write(wg, plgpu.layout_cast(jnp.zeros((ROWS, HALF), jnp.float32), _WGMMA))

    def _write_stat(self, which, of_rows):
        self.lse_ref.at[self.b, self.split, which, pl.ds(self.first_row, ROWS)][...] = of_rows

    def _write(self, wg, out):
        """Through shared memory that nobody reads any more once totals are exchanged: the queries', or the latents'."""
        rows, columns = self.launch.tile_rows, pl.ds(wg * HALF, HALF)
        source = self.memory["q_sm" if self.launch.direct else "out"].at[wg]
        self._together()
        source[...] = out.astype(source.dtype)
        plgpu.commit_smem()
        target = self.o_ref.at[self.b] if self.launch.direct else self.o_ref.at[self.b, self.split]
        plgpu.copy_smem_to_gmem(source.at[pl.ds(0, rows)], target.at[pl.ds(self.first_row, rows), columns])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
