"""What one CTA attends to, and the ring of shared memory its keys and values come through; both Hopper kernels build on it."""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.mosaic_gpu import tma as once


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

    Attributes:
      stride: from one of its tiles to the next. 1: a part is tiles in a row; the number of parts: they take turns.
      one_warp: starts copies, unless all threads of a warpgroup do.
    """

    one_warp = False

    @property
    def stride(self) -> int:
        return 1

    def __init__(self, launch, refs, buffers):
        self.launch, self.refs, self.buffers = launch, refs, buffers
        self.b, self.split, self.parts = self._place()
        self.wg = lax.axis_index("wg")
        self.arrivals = once.addresses(buffers) if launch.once else {}
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
        if self.stride > 1:
            self.begin, self.end = low_tile + self.split, jnp.maximum(low_tile + tiles, low_tile + self.split)
        elif launch.splits == 1 and not launch.items:
            # Known before the sequence's length is.
            self.begin, self.end = low_tile, low_tile + tiles
        else:
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
        begin = self.begin + skip * self.stride
        full_begin, full_end = jnp.maximum(self.full_begin, begin), jnp.maximum(self.full_end, begin)
        if self.launch.window[0] is not None:
            carry = lax.fori_loop(begin, full_begin, masked, carry)
        whole = functools.partial(step, masked=False)
        if self.stride == 1:
            carry = lax.fori_loop(full_begin, full_end, whole, carry)
            return lax.fori_loop(full_end, self.end, masked, carry)
        counts = [
            lax.div(jnp.maximum(end - begin, 0) + (self.stride - 1), jnp.int32(self.stride))
            for end in (full_end, self.end)
        ]
        carry = lax.fori_loop(0, counts[0], lambda i, held: whole(begin + i * self.stride, held), carry)
        return lax.fori_loop(counts[0], counts[1], lambda i, held: masked(begin + i * self.stride, held), carry)

    def ring_pages(self):
        """Ids of the pages of the ring's first tiles, all read before the first copy needs one."""
        return [self.pages(self.begin + stage * self.stride) for stage in range(self.launch.stages)]

    def fill_ring(self, streams, pages, *, least=None, below=None):
        """Starts the first tiles of the ring, of those from `least` on and below `below`. `pages`: of `ring_pages`."""
        for stage, held in enumerate(pages):
            tile = self.begin + stage * self.stride
            wanted = tile < (self.end if below is None else jnp.minimum(self.end, below))

            @pl.when(wanted if least is None else wanted & (tile >= least))
            def _(tile=tile, held=held):
                for stream in streams:
                    self.fill(stream, tile, held)

    def pages(self, tile):
        """Ids of the pages that hold a tile: any number for tiles past the last one."""
        launch = self.launch
        if launch.page_size >= launch.keys:
            # Read without knowing the sequence's length.
            entry = lax.div(tile, jnp.int32(launch.page_size // launch.keys))
            return [self.refs["table"][self.b, jnp.minimum(entry, launch.table_width - 1)]]
        # A tile's pages past the sequence's last one are replaced by it.
        last = lax.div(self.kv_len - 1, jnp.int32(launch.page_size))
        entries = [tile * launch.copies + copy for copy in range(launch.copies)]
        return [self.refs["table"][self.b, jnp.minimum(entry, last)] for entry in entries]

    def fill(self, stream, tile, pages):
        """Starts the copies of one tile."""
        launch, stage = self.launch, self.stage(tile)
        pool, memory, barrier = self.refs[stream], self.buffers[f"{stream}_sm"], self.buffers[f"{stream}_in"].at[stage]
        if launch.page_size >= launch.keys:
            part = lax.rem(tile, jnp.int32(launch.page_size // launch.keys))
            copies = [(pages[0], pl.ds(part * launch.keys, launch.keys), memory.at[stage])]
        else:
            places = [pl.ds(copy * launch.page_size, launch.page_size) for copy in range(len(pages))]
            whole = pl.ds(0, launch.page_size)
            copies = [(page, whole, memory.at[stage, rows]) for page, rows in zip(pages, places, strict=True)]
        for page, rows, target in copies:
            if launch.once:
                arrival = once.arrival(self.arrivals[f"{stream}_in"], stage)
                once.copy_page_once(pool, page, self.head, rows, target, arrival, one_warp=self.one_warp)
            else:
                plgpu.copy_gmem_to_smem(pool.at[page, self.head, rows], target, barrier)

    def stage(self, tile):
        return lax.rem(lax.div(tile - self.begin, jnp.int32(self.stride)), jnp.int32(self.launch.stages))

    def next_in_stage(self, tile):
        """The tile that takes another one's place in the ring."""
        return tile + self.launch.stages * self.stride
