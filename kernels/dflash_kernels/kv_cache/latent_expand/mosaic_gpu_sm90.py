"""The latent expansion kernel for Hopper: a CTA keeps the weights of one head's keys or values in shared memory, and rows pass by.

The producer warpgroup copies k-tiles (slabs) of 128 rows, straight from their pages, into a ring. Two consumers take whole tiles of
rows in turn, ping-pong: while one multiplies, the other writes its tile out.
"""

# Pallas declares ACC less public than it documents it.
# pyright: reportPrivateImportUsage=false

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.kv_cache.latent_expand.launch import COLUMNS, ROWS, SLAB, Plan
from dflash_kernels.mosaic_gpu.layouts import swizzled
from dflash_kernels.mosaic_gpu.pipeline import div, rem
from dflash_kernels.mosaic_gpu.thread_op import kernel

CONSUMERS = 2  # warpgroups that multiply; a third one copies
OUT = 64  # rows and columns of a piece of a tile on its way out


def scratch(plan: Plan, dtype: Any) -> dict[str, Any]:
    """Shared memory and barriers of one CTA."""

    def tiles(*shape: int) -> Any:
        return plgpu.SMEM(shape, dtype, transforms=swizzled(dtype, shape[-1]))

    # A slot of the ring has barriers for either warpgroup: each waits for nothing but its own tiles.
    barriers = CONSUMERS * plan.stages
    freed = plgpu.Barrier(num_barriers=barriers)
    if plan.cluster > 1:
        freed = plgpu.ClusterBarrier(collective_axes=("cluster",), num_barriers=barriers)
    return {
        "weights": tiles(plan.slabs, COLUMNS, SLAB),
        "ring": tiles(plan.stages, ROWS, SLAB),
        "out": tiles(CONSUMERS, plan.out_slots, OUT, OUT),
        "weights_in": plgpu.Barrier(num_arrivals=plan.slabs),
        "filled": plgpu.Barrier(num_arrivals=ROWS // plan.piece, num_barriers=barriers),
        "freed": freed,
    }


def expand(
    plan: Plan, pages: jax.Array, page_table: jax.Array, starts: jax.Array, lens: jax.Array, weights: jax.Array,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Runs the kernel.

    Args:
      plan: shapes and schedule.
      pages: `[P, 1, p, R + 64]`.
      page_table: `[B, W]` int32. Entries past the page of a sequence's last row are never read.
      starts, lens: `[B]` int32.
      weights: `[N, 256, R]`, keys before values.

    Returns:
      Keys `[B * stride, N, 192]` and values `[B * stride, N, 128]`. Tiles without a row that is wanted are not written.
    """

    def body(pages_ref, table_ref, starts_ref, lens_ref, weights_ref, k_ref, v_ref, **buffers):
        wg, unit = lax.axis_index("wg"), lax.axis_index("unit")
        if plan.cluster > 1:
            unit = unit * plan.cluster + lax.axis_index("cluster")
        part, head = div(unit, plan.heads), rem(unit, plan.heads)
        ring = _Ring(plan, part, buffers)

        @pl.when(wg < CONSUMERS)
        def _():
            plgpu.set_max_registers(232, action="increase")
            plgpu.barrier_wait(buffers["weights_in"])
            product = _Consumer(plan, ring, wg, part, head, k_ref, v_ref, buffers)
            _each_tile(plan, lens_ref, product.tile)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(wg == CONSUMERS)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            for slab in range(plan.slabs):
                source = weights_ref.at[head, pl.ds(part * COLUMNS, COLUMNS), pl.ds(slab * SLAB, SLAB)]
                plgpu.copy_gmem_to_smem(source, buffers["weights"].at[slab], buffers["weights_in"])
            copies = _Producer(plan, ring, pages_ref, table_ref, starts_ref, lens_ref, buffers)
            ring.drain(_each_tile(plan, lens_ref, copies.tile))

    cluster = {"cluster": (plan.cluster,), "cluster_names": ("cluster",)} if plan.cluster > 1 else {}
    rows = plan.sequences * plan.stride
    return kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((rows, plan.heads, COLUMNS + SLAB), pages.dtype),
            jax.ShapeDtypeStruct((rows, plan.heads, COLUMNS), pages.dtype),
        ),
        scratch_types=scratch(plan, pages.dtype),
        grid=(plan.groups, plan.units // plan.cluster), grid_names=("group", "unit"), **cluster,
        num_threads=CONSUMERS + 1, thread_name="wg",
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=0),
        interpret=interpret,
    )(pages, page_table, starts, lens, weights)  # fmt: skip


def _each_tile(plan: Plan, lens_ref: Any, work: Callable[..., None]) -> jax.Array:
    """Calls `work` with the sequence, the tile of its rows and the tiles done before, for this CTA's; returns how many."""
    group, groups = lax.axis_index("group"), jnp.int32(plan.groups)

    def sequence(b, seen):
        before, done = seen
        count = div(lens_ref[b] + (ROWS - 1), ROWS)
        # Tiles of all sequences are dealt in turn.
        first = lax.rem(group + groups - lax.rem(before, groups), groups)
        own = lax.div(jnp.maximum(count - first + groups - 1, 0), groups)

        @pl.loop(0, own)
        def _(i):
            work(b, first + i * groups, done + i)

        return before + count, done + own

    return lax.fori_loop(0, plan.sequences, sequence, (jnp.int32(0), jnp.int32(0)))[1]


class _Ring:
    """Ring of slabs: the memory and the barriers of each. Slabs of a CTA are counted from 0 on.

    Keys and values of a head take turns in copying the rotated part of their rows, one more slab of a tile.
    """

    def __init__(self, plan: Plan, part, buffers):
        self.plan, self.part, self.buffers = plan, part, buffers

    def first(self, done):
        """Number of the first slab of the tile that `done` came before."""
        return done * self.plan.slabs + div(done + 1 - self.part, 2)

    def rotated(self, done):
        """Whether the tile has the rotated part."""
        return rem(done, 2) == self.part

    def slot(self, step):
        return rem(step, self.plan.stages)

    def barrier(self, done, step):
        """Index of the barriers of a slab of the tile that `done` came before."""
        return rem(done, CONSUMERS) * self.plan.stages + self.slot(step)

    def room(self, done, step):
        """Waits until the slab before in the slot of this one is used up; it is no older than the tile before."""
        before = step - self.plan.stages
        owner = jnp.where(before < self.first(done), done + 1, done)
        pl.when(before >= 0)(lambda: plgpu.barrier_wait(self.buffers["freed"].at[self.barrier(owner, before)]))

    def drain(self, done):
        """Waits until everything copied is used up: the last slabs are the last tile's."""
        for back in range(1, self.plan.stages + 1):
            step = self.first(done) - back
            pl.when(step >= 0)(
                lambda step=step: plgpu.barrier_wait(self.buffers["freed"].at[self.barrier(done + 1, step)])
            )


class _Producer:
    """The warpgroup that copies."""

    def __init__(self, plan, ring, pages_ref, table_ref, starts_ref, lens_ref, buffers):
        self.plan, self.ring, self.buffers = plan, ring, buffers
        self.pages_ref, self.table_ref, self.starts_ref, self.lens_ref = pages_ref, table_ref, starts_ref, lens_ref

    def tile(self, sequence, tile, done):
        plan, p = self.plan, jnp.int32(self.plan.page_size)
        start = self.starts_ref[sequence]
        last = lax.div(start + self.lens_ref[sequence] - 1, p)
        places = []
        for row in range(0, ROWS, plan.piece):
            position = start + tile * ROWS + row
            page = self.table_ref[sequence, jnp.minimum(lax.div(position, p), last)]
            places.append((page, pl.multiple_of(lax.rem(position, p), plan.piece)))

        def fill(slab):
            step = self.ring.first(done) + slab
            self.ring.room(done, step)
            slot, barrier = self.buffers["ring"].at[self.ring.slot(step)], self.buffers["filled"]
            for i, (page, row) in enumerate(places):
                source = self.pages_ref.at[page, 0, pl.ds(row, plan.piece), pl.ds(slab * SLAB, SLAB)]
                target = slot.at[pl.ds(i * plan.piece, plan.piece)]
                together = "cluster" if plan.cluster > 1 else None
                here = barrier.at[self.ring.barrier(done, step)]
                plgpu.copy_gmem_to_smem(source, target, here, collective_axes=together)

        for slab in range(plan.slabs):
            fill(slab)
        pl.when(self.ring.rotated(done))(lambda: fill(plan.slabs))


class _Consumer:
    """A warpgroup that multiplies every second tile of rows."""

    def __init__(self, plan, ring, wg, part, head, k_ref, v_ref, buffers):
        self.plan, self.ring, self.wg, self.part, self.head = plan, ring, wg, part, head
        self.k_ref, self.v_ref, self.buffers = k_ref, v_ref, buffers

    def tile(self, sequence, tile, done):
        @pl.when(rem(done, CONSUMERS) == self.wg)
        def _():
            row, step = sequence * self.plan.stride + tile * ROWS, self.ring.first(done)
            product = pl.run_scoped(lambda total: self._multiply(total, step), plgpu.ACC((ROWS, COLUMNS), jnp.float32))
            self._write(product, row)
            pl.when(self.ring.rotated(done))(lambda: self._rotated(step + self.plan.slabs, row))

    def _multiply(self, total, step):
        @pl.loop(0, self.plan.slabs)
        def _(slab):
            plgpu.barrier_wait(self.buffers["filled"].at[self._barrier(step + slab)])
            rows = self.buffers["ring"].at[self.ring.slot(step + slab)]
            plgpu.wgmma(total, rows, self.buffers["weights"].at[slab].transpose((1, 0)))
            # The slab before is used up once no more than this product is on its way.
            plgpu.wgmma_wait(1)
            pl.when(slab > 0)(lambda: self._free(step + slab - 1))

        plgpu.wgmma_wait(0)
        self._free(step + self.plan.slabs - 1)
        return total[...]

    def _free(self, step):
        plgpu.barrier_arrive(self.buffers["freed"].at[self._barrier(step)])

    def _barrier(self, step):
        return self.wg * self.plan.stages + self.ring.slot(step)

    def _write(self, product, row):
        for i in range(ROWS // OUT * (COLUMNS // OUT)):
            inner, outer = i % (COLUMNS // OUT) * OUT, i // (COLUMNS // OUT) * OUT
            piece = self.buffers["out"].at[self.wg, i % self.plan.out_slots]
            plgpu.wait_smem_to_gmem(self.plan.out_slots - 1, wait_read_only=True)
            piece[...] = product[outer : outer + OUT, inner : inner + OUT].astype(piece.dtype)
            plgpu.commit_smem()
            self._store(piece, pl.ds(row + outer, OUT), pl.ds(inner, OUT))

    def _store(self, piece, rows, columns):
        for part, target in ((0, self.k_ref), (1, self.v_ref)):

            @pl.when(self.part == part)
            def _(target=target):
                plgpu.copy_smem_to_gmem(piece, target.at[rows, self.head, columns])

    def _rotated(self, step, row):
        """The rotated part goes from the ring to the keys as it is."""
        plgpu.barrier_wait(self.buffers["filled"].at[self._barrier(step)])
        target = self.k_ref.at[pl.ds(row, ROWS), self.head, pl.ds(COLUMNS, SLAB)]
        plgpu.copy_smem_to_gmem(self.buffers["ring"].at[self.ring.slot(step)], target)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self._free(step)
