"""The states of prompts from chunk to chunk on Hopper: one CTA of one warpgroup for some columns of a value head's state.

The state is in registers, float32, from the first chunk of a prompt's rows to the last one of the call; a copy of it, bfloat16,
stands in shared memory for what keys and queries find in it. Chunks come through a ring. See `mosaic_gpu_sm90_chunks` for what
they hold.
"""

# Pallas declares ACC less public than it documents it.
# pyright: reportPrivateImportUsage=false

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.core.layouts import aliased_ref, freeze_aliased
from dflash_kernels.mosaic_gpu.layouts import TILED, rows_of
from dflash_kernels.mosaic_gpu.pipeline import Ring
from dflash_kernels.mosaic_gpu.thread_op import MATRIX, ROW, kernel
from dflash_kernels.mosaic_gpu.wgmma import add_product, product

WIDTH, CHUNK = 128, 64  # of heads; tokens
COLUMNS = 64  # of a CTA
STAGES = 3
_COPIES = ("w", "q", "k", "seen", "new")


def scan(
    q: jax.Array, k: jax.Array, cum: jax.Array, w: jax.Array, new: jax.Array, seen: jax.Array, s: jax.Array,
    counts: jax.Array, sources: jax.Array, targets: jax.Array, interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Outputs `[chunks, 64, Hv * 128]` bfloat16 of all chunks that rows count, and `s` in place.

    Args:
      q, k, cum: as `mosaic_gpu_sm90_chunks.chunks` takes them; w, new, seen: as it gives them.
      s: `[B, Hv, 128, 128]` float32.
      counts: `[n]` int32, a prompt's chunks in this call, from its first row's first one; 0 for rows that follow.
      sources, targets: `[n]` int32, slots whose states rows begin with and leave theirs to; below 0 zeros, and nothing.
    """
    chunks, value_heads, _ = cum.shape
    per_key, per_row = value_heads * WIDTH // k.shape[2], chunks // len(counts)

    def body(*refs: Any, **buffers: Any) -> None:
        _Columns(per_key, per_row, refs, buffers).run()

    body.__name__ = "delta_scan"  # what profilers show
    held = aliased_ref(s)
    square, columns = (CHUNK, CHUNK), (CHUNK, COLUMNS)
    of_stage = {"w": (CHUNK, WIDTH), "q": (CHUNK, WIDTH), "k": (CHUNK, WIDTH), "seen": square, "new": columns}
    scratch = {
        name: plgpu.SMEM((STAGES, *shape), jnp.bfloat16, transforms=TILED) for name, shape in of_stage.items()
    }  # fmt: skip
    scratch |= {name: plgpu.SMEM(columns, jnp.bfloat16, transforms=TILED) for name in ("written", "decayed")}
    scratch |= {
        "state": plgpu.SMEM((WIDTH, COLUMNS), jnp.bfloat16, transforms=TILED),
        "full": plgpu.Barrier(num_arrivals=len(of_stage), num_barriers=STAGES),
    }
    (out,) = kernel(
        body, out_type=(jax.ShapeDtypeStruct((chunks, CHUNK, value_heads * WIDTH), jnp.bfloat16),),
        grid=(len(counts), value_heads, WIDTH // COLUMNS), grid_names=("row", "head", "part"), scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True), interpret=interpret,
    )(q, k, cum, w, new, seen, counts, sources, targets, held)  # fmt: skip
    return out, freeze_aliased(held)


class _Columns:
    """The program of one CTA."""

    def __init__(self, per_key: int, per_row: int, refs: tuple[Any, ...], buffers: dict[str, Any]):
        (
            self.q,
            self.k,
            self.cum,
            self.w,
            self.new,
            self.seen,
            self.counts,
            self.sources,
            self.targets,
            self.s,
            self.out,
        ) = refs
        self.buffers, self.ring = buffers, Ring(STAGES, buffers["full"])
        self.row, self.head, part = (lax.axis_index(name) for name in ("row", "head", "part"))
        self.key, self.columns = lax.div(self.head, jnp.int32(per_key)), pl.ds(part * COLUMNS, COLUMNS)
        self.of_out = pl.ds(self.head * WIDTH + part * COLUMNS, COLUMNS)
        self.first, self.count = self.row * per_row, self.counts[self.row]

    def run(self) -> None:
        pl.when(self.count > 0)(self._walk)

    def _walk(self) -> None:
        for step in range(STAGES - 1):
            pl.when(step < self.count)(lambda step=step: self._fetch(jnp.int32(step)))
        source, target = self.sources[self.row], self.targets[self.row]
        held = rows_of(self.s.at[jnp.maximum(source, 0), self.head, :, self.columns], MATRIX)
        # What a slot holds that nobody goes on with may be anything.
        begins = plgpu.layout_cast(jnp.full(held.shape, source, jnp.int32), MATRIX) < 0
        state = lax.fori_loop(0, self.count, self._step, jnp.where(begins, 0.0, held))

        @pl.when(target >= 0)
        def _():
            self.s.at[target, self.head, :, self.columns][...] = state

        plgpu.wait_smem_to_gmem(0)

    def _fetch(self, step: Any) -> None:
        """Asks for the chunk of a step, whose stage nobody reads."""
        chunk, stage = self.first + step, self.ring.stage(step)
        of_key = pl.ds(self.key * WIDTH, WIDTH)
        sources = (
            self.w.at[chunk, self.head], self.q.at[chunk, :, of_key], self.k.at[chunk, :, of_key],
            self.seen.at[chunk, self.head], self.new.at[chunk, self.head, :, self.columns],
        )  # fmt: skip
        for name, source in zip(_COPIES, sources, strict=True):
            plgpu.copy_gmem_to_smem(source, self.buffers[name].at[stage], self.ring.full.at[stage])

    def _step(self, step: Any, state: jax.Array) -> jax.Array:
        b, stage, chunk = self.buffers, self.ring.stage(step), self.first + step
        cum = self.cum.at[chunk, self.head]
        since, end = rows_of(cum, ROW), cum[CHUNK - 1]
        b["state"][...] = state.astype(jnp.bfloat16)
        plgpu.commit_smem()
        # All are past what they read of the stage before.
        pl.when(step + STAGES - 1 < self.count)(lambda: self._fetch(step + STAGES - 1))
        self.ring.consumer_wait(stage)
        written = rows_of(b["new"].at[stage], MATRIX).astype(jnp.float32) - product(b["w"].at[stage], b["state"])
        out = product(b["q"].at[stage], b["state"]) * _rows(jnp.exp(since))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        b["written"][...] = written.astype(jnp.bfloat16)
        b["decayed"][...] = (written * _rows(jnp.exp(end - since))).astype(jnp.bfloat16)
        plgpu.commit_smem()
        out = add_product(out, b["seen"].at[stage], b["written"])
        state = add_product(state * jnp.exp(end), b["k"].at[stage].transpose((1, 0)), b["decayed"])
        b["written"][...] = out.astype(jnp.bfloat16)  # both products have read what was there
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(b["written"], self.out.at[chunk, :, self.of_out])
        return state


def _rows(vector: jax.Array) -> jax.Array:
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, (CHUNK, COLUMNS), [0]), MATRIX)
