"""What one CTA attends to, and the ring of shared memory its keys and values come through; both Hopper kernels build on it."""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


class Part:
    """One part of a sequence's tiles under one block of query rows. Scalars are read once, at construction.

    Keys come in tiles through a ring of shared memory filled by TMA, one copy for each page. There is no producer warpgroup: the
    first warpgroup refills a stage as soon as its tile is used up, which keeps a CTA at 128 threads and lets two of them share a
    multiprocessor and hide each other's softmax.

    Args:
      launch: shapes and schedule.
      refs: the kernel's arrays in global memory, by name: `table`, `seq_lens` and `q_lens` are read here, and `k` and `v` or
        whatever else `streams` names.
      buffers: shared memory and barriers, by name: `<stream>_sm`, `<stream>_in` and, where warpgroups share stages, `<stream>_out`.
    """

    def __init__(self, launch, refs, buffers):
        self.launch, self.refs, self.buffers = launch, refs, buffers
        self.b, self.split, self.parts = self._place()
        self.wg = lax.axis_index("wg")
        heads = lax.axis_index("heads")
        self.head = lax.rem(heads, jnp.int32(launch.kv_heads))
        self.row_block = lax.div(heads, jnp.int32(launch.kv_heads))
        self.first_row = self.row_block * launch.block_rows + self.wg * launch.rows
        self.seq_len, self.q_len = refs["seq_lens"][self.b], refs["q_lens"][self.b]
        # A sequence longer than its table is cut to it; positions still count from the true length.
        self.kv_len = jnp.minimum(self.seq_len, launch.table_width * launch.page_size)
        self._ranges()

    def _place(self):
        """Sequence, which of its parts, and how many those are."""
        return lax.axis_index("b"), lax.axis_index("split"), jnp.int32(self.launch.splits)

    def limits(self, token):
        """First key a query token sees, and the key after the last one."""
        position = self.seq_len - self.q_len + token
        left, right = self.launch.window
        low, high = 0 if left is None else position - left, self.kv_len
        if self.launch.causal:
            high = jnp.minimum(high, position + 1)
        if right is not None:
            high = jnp.minimum(high, position + (right + 1))
        return low, high

    def _ranges(self):
        """Tiles of this split: [begin, end); all live rows see the whole of tiles [full_begin, full_end)."""
        launch, keys = self.launch, jnp.int32(self.launch.keys)
        first = lax.div(self.row_block * launch.block_rows, jnp.int32(launch.group))
        last = lax.div(self.row_block * launch.block_rows + (launch.block_rows - 1), jnp.int32(launch.group))
        last = jnp.minimum(last, self.q_len - 1)
        (low, full_high), (full_low, high) = self.limits(first), self.limits(last)
        low, high = jnp.maximum(low, 0), jnp.where(first < self.q_len, jnp.maximum(high, 0), 0)
        low_tile, high_tile = lax.div(low, keys), lax.div(high + (keys - 1), keys)
        tiles = jnp.maximum(high_tile - low_tile, 0)
        share = jnp.maximum(lax.div(tiles + (self.parts - 1), self.parts), launch.min_tiles)
        self.begin = low_tile + self.split * share
        self.end = jnp.maximum(jnp.minimum(self.begin + share, low_tile + tiles), self.begin)
        self.full_begin = self.begin
        if launch.window[0] is not None:
            first_whole = lax.div(jnp.maximum(full_low, 0) + (keys - 1), keys)
            self.full_begin = jnp.clip(first_whole, self.begin, self.end)
        self.full_end = jnp.clip(lax.div(jnp.maximum(full_high, 0), keys), self.full_begin, self.end)

    def walk(self, step, carry, *, skip: int = 0):
        """`step(tile, carry, masked=...)` over all tiles but the first `skip`; the mask is left out where all rows see all keys."""
        masked = functools.partial(step, masked=True)
        begin, full_begin, full_end = self.begin, self.full_begin, self.full_end
        if skip:
            begin = begin + skip
            full_begin, full_end = jnp.maximum(full_begin, begin), jnp.maximum(full_end, begin)
        if self.launch.window[0] is not None:
            carry = lax.fori_loop(begin, full_begin, masked, carry)
        carry = lax.fori_loop(full_begin, full_end, functools.partial(step, masked=False), carry)
        return lax.fori_loop(full_end, self.end, masked, carry)

    def fill_ring(self, streams, *, least=None, below=None):
        """Starts the first tiles of the ring, of those from `least` on and below `below`. Page ids are read for all of them before
        the first copy needs one."""
        tiles = [self.begin + stage for stage in range(self.launch.stages)]
        pages = [self.pages(tile) for tile in tiles]
        for tile, held in zip(tiles, pages, strict=True):
            wanted = tile < (self.end if below is None else jnp.minimum(self.end, below))

            @pl.when(wanted if least is None else wanted & (tile >= least))
            def _(tile=tile, held=held):
                for stream in streams:
                    self.fill(stream, tile, held)

    def pages(self, tile):
        """Ids of the pages that hold a tile. Entries past the sequence's last page are replaced by it, not read."""
        launch = self.launch
        last = lax.div(self.kv_len - 1, jnp.int32(launch.page_size))
        if launch.page_size >= launch.keys:
            entries = [lax.div(tile, jnp.int32(launch.page_size // launch.keys))]
        else:
            entries = [tile * launch.copies + copy for copy in range(launch.copies)]
        return [self.refs["table"][self.b, jnp.minimum(entry, last)] for entry in entries]

    def fill(self, stream, tile, pages):
        """Starts the copies of one tile."""
        launch, stage = self.launch, self.stage(tile)
        pool, memory, barrier = self.refs[stream], self.buffers[f"{stream}_sm"], self.buffers[f"{stream}_in"].at[stage]
        if launch.page_size >= launch.keys:
            part = lax.rem(tile, jnp.int32(launch.page_size // launch.keys))
            rows = pl.ds(part * launch.keys, launch.keys)
            plgpu.copy_gmem_to_smem(pool.at[pages[0], self.head, rows], memory.at[stage], barrier)
            return
        for copy, page in enumerate(pages):
            rows = pl.ds(copy * launch.page_size, launch.page_size)
            plgpu.copy_gmem_to_smem(pool.at[page, self.head], memory.at[stage, rows], barrier)

    def stage(self, tile):
        return lax.rem(tile - self.begin, jnp.int32(self.launch.stages))
