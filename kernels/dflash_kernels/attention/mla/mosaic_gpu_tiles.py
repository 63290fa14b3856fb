"""What a CTA of the Hopper kernel keeps in shared memory: tiles of latent rows, how they get there and what becomes of them.

Values are the first 512 columns of the keys, in the same shared memory. A tile lies there in three parts, two halves of 256
columns and the 64 rotated ones, with a barrier each: a half is refilled by the one warpgroup that reads it last, without
waiting for the other, and the first product starts when the first part has come.

Eight-bit rows arrive in the first half of the memory that they are widened into: those of a pair's second tile widen under the
scores of its first, those of the next pair's first under the last product of this one. (Clusters of two CTAs that copy tiles for
both were 2 to 5 % slower in every case tried, parts of 128 columns with barriers of their own 6 %, of 64 columns 25 %: tiles are
there when they are needed, and more and smaller products cost more than earlier copies gain.)
"""

# Pallas declares its transforms and ACC less public than it documents them.
# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.attention.mla.launch import HALF, KEYS, PARTS, RANK, ROTATED, ROWS, STORED, Launch
from dflash_kernels.attention.mla.mosaic_gpu_lanes import widen
from dflash_kernels.mosaic_gpu.layouts import swizzled
from dflash_kernels.mosaic_gpu.tma import prefetch_rows, touch_row

_WGMMA = plgpu.Layout.WGMMA


def scratch(launch: Launch, dtype: Any, interpret: Any) -> dict[str, Any]:
    """Shared memory and barriers of one CTA."""
    wide: dict[str, Any] = {"transforms": swizzled(dtype, HALF)}
    latents, rotated = plgpu.SMEM((2, 2, KEYS, HALF), dtype, **wide), plgpu.SMEM((2, KEYS, ROTATED), dtype, **wide)
    out = plgpu.SMEM((2, ROWS, HALF), PARTS, transforms=swizzled(PARTS, HALF))
    buffers = {
        "q_sm": plgpu.SMEM((2, ROWS, HALF), dtype, **wide), "q_rotated": plgpu.SMEM((1, ROWS, ROTATED), dtype, **wide),
        "weights": plgpu.SMEM((ROWS, KEYS), dtype, **wide),
        "stats": plgpu.SMEM((5, ROWS), jnp.float32),
        "q_in": plgpu.Barrier(num_arrivals=3),
        "halves_in": plgpu.Barrier(num_arrivals=launch.copies, num_barriers=4),
        "rotated_in": plgpu.Barrier(num_arrivals=launch.copies, num_barriers=2),
        "weights_in": plgpu.Barrier(num_barriers=2), "total_in": plgpu.Barrier(num_barriers=2),
    }  # fmt: skip
    raw = []
    if launch.quantised:
        # Eight-bit rows arrive in the first half of the memory that they are widened into.
        shapes = (2, 2, 2, KEYS, HALF), (2, 2, KEYS, ROTATED)
        # A row of 576 bytes consists of tiles of 64, not of 128.
        raw = [plgpu.SMEM(shape, STORED, transforms=swizzled(STORED, ROTATED)) for shape in shapes]
        buffers["widened"] = plgpu.Barrier(num_arrivals=2, num_barriers=2)
    if interpret is not None:
        # The interpreter knows neither unions nor weights from registers.
        parts = {"latents": latents, "rotated": rotated, "out": out, "staged": plgpu.SMEM((ROWS, KEYS), dtype)}
        return buffers | parts | ({"raw": raw[0], "raw_rotated": raw[1]} if raw else {})
    if not raw:
        return buffers | {"rotated": rotated, "latents_or": plgpu.RefUnion(latents, out)}
    return buffers | {"rotated_or": plgpu.RefUnion(rotated, raw[1]), "latents_or": plgpu.RefUnion(latents, out, raw[0])}


def unpack_unions(buffers: dict[str, Any]) -> None:
    """Gives what shares memory its own names."""
    if "latents_or" in buffers:
        buffers["latents"], buffers["out"], *raw = buffers.pop("latents_or")
        if raw:
            (buffers["raw"],), (buffers["rotated"], buffers["raw_rotated"]) = raw, buffers.pop("rotated_or")


def opaque_zero(pair):
    """0 as no compiler knows it. Added to an index of shared memory it keeps the addresses of a hundred matrix instructions from
    being computed before the loop, for want of registers to hold them."""
    return lax.optimization_barrier(pair - pair)


class Tiles:
    """One CTA's part of a sequence. Scalars of its sequence and rows are read once, at construction."""

    def __init__(self, launch, q_ref, pages_ref, table_ref, seq_ref, live_ref, order_ref, o_ref, lse_ref, buffers):
        self.launch, self.memory = launch, buffers
        self.q_ref, self.pages_ref, self.table_ref = q_ref, pages_ref, table_ref
        self.o_ref, self.lse_ref = o_ref, lse_ref
        b, self.split, self.wg = (lax.axis_index(name) for name in ("b", "split", "wg"))
        self.b = order_ref[b] if launch.ordered else b
        self.first_row = jnp.minimum(lax.axis_index("rows") * ROWS, max(launch.rows - ROWS, 0))
        if not launch.direct and "staged" not in buffers:
            touch_row(table_ref.at[self.b])
        self.seq_len, self.q_len = seq_ref[self.b], live_ref[self.b]
        # A sequence longer than its table is cut to it; positions still count from the true length.
        self.kv_len = jnp.minimum(self.seq_len, launch.table_width * launch.page_size)
        self._ranges()

    def _limit(self, token):
        """The key after the last one that a query token sees."""
        if not self.launch.causal:
            return self.kv_len
        return jnp.minimum(self.kv_len, self.seq_len - self.q_len + token + 1)

    def _ranges(self):
        """Tiles of this split: [begin, end), in pairs of which the first `whole_pairs` are seen by all live rows."""
        launch, heads = self.launch, jnp.int32(self.launch.heads)
        first, last = lax.div(self.first_row, heads), lax.div(self.first_row + (ROWS - 1), heads)
        whole = jnp.maximum(self._limit(first), 0)
        high = jnp.where(first < self.q_len, jnp.maximum(self._limit(jnp.minimum(last, self.q_len - 1)), 0), 0)
        tiles = dealt = lax.div(high + (KEYS - 1), jnp.int32(KEYS))
        if launch.rows > ROWS and launch.rows % ROWS:
            # Two CTAs have some rows in common, and a part may hold what either has written: the same, if they are dealt alike.
            longest = jnp.where(self.q_len > 0, jnp.maximum(self._limit(self.q_len - 1), 0), 0)
            dealt = lax.div(longest + (KEYS - 1), jnp.int32(KEYS))
        share = jnp.maximum(lax.div(dealt + (launch.splits - 1), jnp.int32(launch.splits)), launch.min_tiles)
        self.begin = self.split * share
        self.end = jnp.maximum(jnp.minimum(self.begin + share, tiles), self.begin)
        self.pairs = lax.div(self.end - self.begin, jnp.int32(2))
        whole_tiles = jnp.clip(lax.div(whole, jnp.int32(KEYS)), self.begin, self.end) - self.begin
        self.whole_pairs = lax.div(whole_tiles, jnp.int32(2))
        self.odd = lax.rem(self.end - self.begin, jnp.int32(2))

    def _start(self, wg):
        """The queries and the first two tiles: each warpgroup copies its half, the right one the rotated parts, too."""
        memory, rows = self.memory, self.launch.tile_rows
        source = self.q_ref.at[self.b, pl.ds(self.first_row, rows)]
        # Rows past the given ones stay as they are: a row's garbage never leaves that row.
        target = memory["q_sm"].at[wg, pl.ds(0, rows)]
        plgpu.copy_gmem_to_smem(source.at[:, pl.ds(wg * HALF, HALF)], target, memory["q_in"])
        if wg == 1:
            target = memory["q_rotated"].at[0, pl.ds(0, rows)]
            plgpu.copy_gmem_to_smem(source.at[:, pl.ds(RANK, ROTATED)], target, memory["q_in"])
        pages = [self._pages(self.begin + stage) for stage in range(2)]
        for stage, held in enumerate(pages):
            self._fill_half(wg, stage, self.begin + stage, held)
            if wg == 1:
                self._fill_rotated(stage, self.begin + stage, held)
        plgpu.barrier_wait(memory["q_in"])

    def _pages(self, tile):
        """Ids of the pages that hold a tile. Entries past the sequence's last page are replaced by it, not read."""
        launch = self.launch
        last = lax.div(self.kv_len - 1, jnp.int32(launch.page_size))
        if launch.page_size >= KEYS:
            entries = [lax.div(tile, jnp.int32(launch.page_size // KEYS))]
        else:
            entries = [tile * launch.copies + copy for copy in range(launch.copies)]
        return [self.table_ref[self.b, jnp.minimum(entry, last)] for entry in entries]

    def _together(self):
        """All threads of the warpgroup have come this far, and what they read or wrote in shared memory is done."""
        plgpu.commit_smem()

    def _sources(self, columns, tile, pages):
        """Where some columns of a tile lie, in as many pieces as it has pages."""
        page_size = self.launch.page_size
        if page_size >= KEYS:
            rows = pl.ds(lax.rem(tile, jnp.int32(page_size // KEYS)) * KEYS, KEYS)
            return [self.pages_ref.at[pages[0], 0, rows, columns]]
        return [self.pages_ref.at[page, 0, :, columns] for page in pages]

    def _fill_half(self, half, stage, tile, pages):
        columns, raw = pl.ds(half * HALF, HALF), self.launch.quantised
        target = self.memory["raw"].at[half, stage, 0] if raw else self.memory["latents"].at[half, stage]
        self._fill(columns, target, self.memory["halves_in"].at[2 * stage + half], tile, pages)

    def _fill_rotated(self, stage, tile, pages):
        columns, raw = pl.ds(RANK, ROTATED), self.launch.quantised
        target = self.memory["raw_rotated"].at[stage, 0] if raw else self.memory["rotated"].at[stage]
        self._fill(columns, target, self.memory["rotated_in"].at[stage], tile, pages)

    def _fill(self, columns, target, barrier, tile, pages):
        """Starts the copies of some columns of one tile, if the split has it."""

        @pl.when(tile < self.end)
        def _():
            self._together()
            sources = self._sources(columns, tile, pages)
            height = KEYS // len(sources)
            for piece, source in enumerate(sources):
                part = target if len(sources) == 1 else target.at[pl.ds(piece * height, height)]
                plgpu.copy_gmem_to_smem(source, part, barrier)

    def _ask(self, tile, pages):
        """Starts a tile's way from memory to the L2, where the copies of all CTAs of the sequence find it a pair later.

        Gains where short parts wait for memory; costs where the GPU is at its power limit all along.
        """
        if self.launch.direct or "staged" in self.memory:
            return

        @pl.when((tile < self.end) & (lax.axis_index("rows") == 0))
        def _():
            for source in self._sources(slice(None), tile, pages):
                prefetch_rows(source)

    def _widen(self, wg, stage):
        """Makes 16-bit numbers of the eight-bit rows of this warpgroup's half, and of the rotated parts if it is the right one."""
        if not self.launch.quantised:
            return
        memory = self.memory
        plgpu.barrier_wait(memory["halves_in"].at[2 * stage + wg])
        self._widen_part(memory["raw"].at[wg, stage, 0], memory["latents"].at[wg, stage])
        if wg == 1:
            plgpu.barrier_wait(memory["rotated_in"].at[stage])
            self._widen_part(memory["raw_rotated"].at[stage, 0], memory["rotated"].at[stage])
        plgpu.commit_smem()
        plgpu.barrier_arrive(memory["widened"].at[stage])

    def _widen_next(self, wg, tile):
        """The first tile of the next pair, if there is one, while the tensor cores work for this one."""
        if self.launch.quantised:
            pl.when(tile + 2 < self.end)(functools.partial(self._widen, wg, 0))

    def _widen_part(self, source, target):
        if "staged" in self.memory:
            numbers = plgpu.load(source, layout=plgpu.Layout.WGMMA_UPCAST_2X, optimized=False)
            self._together()
            target[...] = numbers.astype(target.dtype)
        else:
            widen(source, target)

    def _clear_unused_values(self, half, stage, tile):
        """Zeroes a half's rows past the sequence: their weight is 0, and 0 * NaN is NaN."""
        live = self.kv_len - tile * KEYS

        @pl.when(live < KEYS)
        def _():
            # A few columns at a time, for lack of registers.
            for first in range(0, HALF, ROTATED):
                values = self.memory["latents"].at[half, stage, :, pl.ds(first, ROTATED)]
                rows = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (KEYS, ROTATED), 0), _WGMMA)
                held = plgpu.layout_cast(values[...], _WGMMA)
                values[...] = jnp.where(rows < live, held, jnp.zeros_like(held))
            plgpu.commit_smem()
