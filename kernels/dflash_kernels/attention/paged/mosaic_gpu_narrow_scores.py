"""Products of keys and queries as exponents of two, in the kernel for one-byte pages: scaled, capped, with ALiBi, masked."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.attention.paged.mosaic_gpu_part import Part
from dflash_kernels.mosaic_gpu.mask import alibi_bias
from dflash_kernels.mosaic_gpu.softmax import LOG2E, precise_tanh

MATRIX = plgpu.Layout.WGMMA
COLUMN = plgpu.Layout.WGMMA.reduce(0)  # one value for each query row
KEY = plgpu.Layout.WGMMA.reduce(1)


class Scored(Part):
    """A part whose scores are `[64 keys, N query rows]`.

    Attributes:
      dtype: that pages are stored in.
      unit: what a score is multiplied with, by query row; for int8, besides the key's scale, one for all.
    """

    one_warp = True

    def __init__(self, launch, refs, buffers, dtype, interpret):
        self.streams = ("k", "v", "k_scale") if dtype == jnp.int8 else ("k", "v")
        super().__init__(launch, refs, buffers | {f"{stream}_in": buffers["tile_in"] for stream in self.streams})
        self.dtype, self.interpret = dtype, interpret
        self.unit: Any = None

    def exponents(self, scores, tile, masked: bool):
        scores = self._in_base_2(scores, self.stage(tile), tile)
        return jnp.where(self._mask(tile), scores, -jnp.inf) if masked else scores

    def _in_base_2(self, scores, stage, tile):
        """Scores as exponents of two: scaled, capped, and ALiBi's share added."""
        launch = self.launch
        if self.dtype == jnp.int8:
            of_keys = plgpu.layout_cast(self.buffers["k_scale_sm"].at[stage][...], KEY) * self.unit
            scores = scores * lax.broadcast_in_dim(of_keys, scores.shape, [0])
        else:
            scores = scores * self.spread(self.unit)
        if launch.soft_cap is not None:
            scores = precise_tanh(scores * (1 / launch.soft_cap)) * (launch.soft_cap * LOG2E)
        if "slopes" not in self.refs:
            return scores
        own_rows = pl.ds(self.first_row, launch.rows)
        slopes = plgpu.layout_cast(plgpu.load(self.refs["slopes"].at[self.head, own_rows], optimized=False), COLUMN)
        position = self.seq_len - self.q_len + self.tokens()
        keys = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, scores.shape, 0), MATRIX)
        share = alibi_bias(keys - self.spread(position - tile * launch.keys), launch.alibi_sqrt)
        return scores + share * self.spread(slopes * LOG2E)

    def spread(self, of_rows):
        """One value for each query row over a tile of scores; one for all rows stays a scalar."""
        if of_rows.ndim == 0:
            return of_rows
        return lax.broadcast_in_dim(of_rows, (self.launch.keys, self.launch.rows), [1])

    def tokens(self):
        """Query token of each row."""
        rows = plgpu.layout_cast(lax.iota(jnp.int32, self.launch.rows), COLUMN)
        return lax.div(rows + self.first_row, jnp.int32(self.launch.group))

    def _mask(self, tile):
        launch, shape = self.launch, (self.launch.keys, self.launch.rows)
        # Borders that nobody uses would have no layout.
        bounded = launch.causal or launch.window != (None, None)
        low, high = self.limits(self.tokens()) if bounded else (0, self.kv_len)
        keys = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, shape, 0), MATRIX)
        start = tile * launch.keys
        mask = keys < self.spread(high - start)
        if launch.window[0] is not None:
            mask &= keys >= self.spread(low - start)
        return mask
