"""The Hopper kernel for sequences in two parts: the two CTAs of a cluster swap halves and write the output, each half the columns.

What one has of the other's columns goes straight from its registers to the other's shared memory, together with the maximum and
the total of every row.
"""

# Pallas declares what it inlines with the context that it passes itself.
# pyright: reportAbstractUsage=false, reportCallIssue=false, reportPrivateImportUsage=false

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.attention.paged.launch import ROWS, SWAPPED, Launch
from dflash_kernels.attention.paged.mosaic_gpu_block import Block
from dflash_kernels.attention.paged.mosaic_gpu_ops import plain_queries, ring
from dflash_kernels.mosaic_gpu.softmax import LOG2E

_WGMMA = plgpu.Layout.WGMMA
_ROW = plgpu.Layout.WGMMA.reduce(1)


class Pair(Block):
    """One CTA's work. Without a window the two take turns, so that each knows its first tiles before the sequence's length."""

    @property
    def stride(self) -> int:
        return 2 if self.launch.window == (None, None) else 1

    @staticmethod
    def scratch(launch: Launch, dtype: Any, interpret: Any) -> dict[str, Any]:
        """Besides what every CTA has, memory that the other CTA writes to."""
        buffers = ring(launch, dtype, interpret) | {"q_sm": plain_queries(launch, dtype)}
        buffers["swapped_sm"] = plgpu.SMEM((SWAPPED * (launch.head_dim // 4 + 4),), jnp.float32)
        return buffers

    def run(self):
        pages = self.first_reads()
        pl.when(self.begin < self.end)(lambda: self._start(pages))
        rows = plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), _ROW)
        total = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), _ROW)
        acc = plgpu.layout_cast(jnp.zeros((ROWS, self.launch.width), jnp.float32), _WGMMA)
        acc, top, total = self.walk(self._step, (acc, rows, total))
        half = self.launch.head_dim // 2
        low, high = acc[:, :half], acc[:, half:]
        first = lax.broadcast_in_dim(self.split == 0, low.shape, ())
        mine, theirs = jnp.where(first, low, high), jnp.where(first, high, low)
        other, other_top, other_total = self._swap(theirs, top, total)
        if "lse" in self.refs:
            live = (self._row_tokens() < self.q_len) & (total != 0)
            lse = jnp.where(live, (top + jnp.log2(jnp.where(live, total, 1.0))) * (1 / LOG2E), -jnp.inf)
            self._lse_row()[...] = lse
        new_top = jnp.maximum(top, other_top)
        base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        kept, added = jnp.exp2(top - base), jnp.exp2(other_top - base)
        total = total * kept + other_total * added
        live = (self._row_tokens() < self.q_len) & (total != 0)
        inverse = jnp.where(live, 1.0 / jnp.where(live, total, 1.0), 0.0)
        out = mine * _along(kept * inverse, mine.shape) + other * _along(added * inverse, mine.shape)
        # Not a product alone: rows past the live ones may hold NaN.
        out = jnp.where(_along(inverse, mine.shape) != 0, out, 0.0)
        self.store(self.split * half, out)

    def _swap(self, theirs, top, total):
        """What the other CTA has of this one's columns, its maxima and totals; it gets the same."""
        from dflash_kernels.mosaic_gpu import combine as lanes

        row = plgpu.ShapeDtypeStruct((ROWS,), jnp.dtype(jnp.float32), layout=_ROW)
        tile = plgpu.ShapeDtypeStruct(theirs.shape, jnp.dtype(jnp.float32), layout=_WGMMA)

        @plgpu.inline_mgpu(arg_types=(_WGMMA, _ROW, _ROW, plgpu.RefType()), return_type=[tile, row, row])
        def swap(_ctx, *operands):
            return lanes.swap_with_peer(*operands)

        return swap(theirs, top, total, self.buffers["swapped_sm"])


def _along(vector, shape):
    return lax.broadcast_in_dim(vector, shape, [0])
