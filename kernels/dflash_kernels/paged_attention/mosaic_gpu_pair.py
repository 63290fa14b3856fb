"""The Hopper kernel for sequences in two parts: the two CTAs of a cluster swap halves and write the output, each half the columns.

What one has of the other's columns goes straight from its registers to the other's shared memory, together with the maximum and
the total of every row; nobody waits for more than that to arrive.
"""

# Pallas declares what it inlines with the context that it passes itself.
# pyright: reportAbstractUsage=false, reportCallIssue=false, reportPrivateImportUsage=false

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.paged_attention.mosaic_gpu_kernel import Block
from dflash_kernels.paged_attention.mosaic_gpu_ops import LOG2E, scratch, swizzled
from dflash_kernels.paged_attention.mosaic_gpu_schedule import ROWS, Launch

_WGMMA = plgpu.Layout.WGMMA
_ROW = plgpu.Layout.WGMMA.reduce(1)
_STATISTICS = 8  # columns: the narrowest tile; the maximum in the first ones, the total in the others


class Pair(Block):
    """One CTA's work."""

    @staticmethod
    def scratch(launch: Launch, dtype: Any, interpret: Any) -> dict[str, Any]:
        """Besides what every CTA has, memory that the other CTA writes to, and the barrier that says when it has."""
        half, buffers = launch.head_dim // 2, scratch(launch, dtype, interpret)
        del buffers["o_sm"], buffers["lse_sm"]
        shapes = {"half_sm": (ROWS, half), "statistics_sm": (ROWS, _STATISTICS)}
        for name, shape in shapes.items():
            buffers[name] = plgpu.SMEM(shape, jnp.float32, transforms=swizzled(jnp.float32, shape[1]))
        return buffers | {"received": plgpu.Barrier(num_arrivals=len(shapes))}

    def run(self):
        pl.when(self.begin < self.end)(self._start)
        rows = plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), _ROW)
        total = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), _ROW)
        acc = plgpu.layout_cast(jnp.zeros((ROWS, self.launch.width), jnp.float32), _WGMMA)
        acc, top, total = self.walk(self._step, (acc, rows, total))
        live = (self._row_tokens() < self.q_len) & (total != 0)
        lse = jnp.where(live, (top + jnp.log2(jnp.where(live, total, 1.0))) * (1 / LOG2E), -jnp.inf)
        self._lse_row()[...] = lse
        for own in range(2):
            pl.when(self.split == own)(lambda own=own: self._swap(own, acc, top, total))

    def _swap(self, own, acc, top, total):
        half, received = self.launch.head_dim // 2, self.buffers["received"]
        columns = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (ROWS, _STATISTICS), 1), _WGMMA)
        first = columns < _STATISTICS // 2
        statistics = jnp.where(first, _along(top, columns.shape), _along(total, columns.shape))
        peer = {"cluster_idx": jnp.int32(1 - own), "cluster_dim": "split", "optimized": False}
        plgpu.async_store_smem(statistics, self.buffers["statistics_sm"], received, **peer)
        theirs = acc[:, (1 - own) * half : (2 - own) * half]
        plgpu.async_store_smem(theirs, self.buffers["half_sm"], received, **peer)
        plgpu.barrier_wait(received)
        held = plgpu.load(self.buffers["statistics_sm"], layout=_WGMMA, optimized=False)
        other_top = jnp.where(first, held, -jnp.inf).max(axis=1)
        other_total = jnp.where(first, -jnp.inf, held).max(axis=1)
        new_top = jnp.maximum(top, other_top)
        base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        kept, added = jnp.exp2(top - base), jnp.exp2(other_top - base)
        total = total * kept + other_total * added
        live = (self._row_tokens() < self.q_len) & (total != 0)
        inverse = jnp.where(live, 1.0 / jnp.where(live, total, 1.0), 0.0)
        mine = acc[:, own * half : (own + 1) * half]
        other = plgpu.load(self.buffers["half_sm"], layout=_WGMMA, optimized=False)
        out = mine * _along(kept * inverse, mine.shape) + other * _along(added * inverse, mine.shape)
        # Not a product alone: rows past the live ones may hold NaN.
        out = jnp.where(_along(inverse, mine.shape) != 0, out, 0.0)
        self._store(own * half, out)

    def _store(self, column, out):
        from dflash_kernels.paged_attention import mosaic_gpu_lanes as lanes

        target, rows = self.refs["o"].at[self.b].at[:, self.head], self.launch.tokens * self.launch.group

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _WGMMA))
        def store(_ctx, target, out):
            lanes.store_rows(target, out, column, rows)

        store(target, out.astype(self.refs["o"].dtype))


def _along(vector, shape):
    return lax.broadcast_in_dim(vector, shape, [0])
