"""Paged keys and values: which tiles a CTA attends to, and their way from the pages to a ring of shared memory.

There is no producer warpgroup: the first warpgroup refills a stage as soon as its tile is used up, which keeps a CTA at 128 threads
and lets two of them share a multiprocessor and hide each other's softmax. One TMA copy brings the part of a tile that a page holds.

Whatever a CTA reads after its first copies waits until all of those have arrived, be it in the cache or not. So entries of the page
table are asked for before, in loads that compilers leave where they stand.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from dflash_kernels.core.device import WARP, WARPGROUP
from dflash_kernels.mosaic_gpu import ptx as th
from dflash_kernels.mosaic_gpu import tma
from dflash_kernels.mosaic_gpu.layouts import swizzled, tile_of
from dflash_kernels.mosaic_gpu.mask import places, row_tokens, spread
from dflash_kernels.mosaic_gpu.pipeline import by_one_warp
from dflash_kernels.mosaic_gpu.thread_op import GLOBAL, NUMBER, SCALAR, interpreting, thread_op

_STORE = "st.shared.v4.b32 [$0], {$1, $2, $3, $4};"
_ENTRIES = plgpu.ShapeDtypeStruct((128,), jnp.dtype(jnp.int32), layout=plgpu.Layout.WG_STRIDED((128,), vec_size=1))


@runtime_checkable
class Launch(Protocol):
    """Interface of a launch over pages.

    Attributes:
      group: query heads of a KV head; page_size, table_width, kv_heads: shapes of the pages and their table.
      rows: query rows of a warpgroup; block_rows: of a CTA.
      keys: of a tile; copies: that fill one; stages: tiles in flight.
      splits, min_tiles: how many CTAs share a sequence's tiles, fewest tiles worth one; items: work items of a schedule, or 0.
      causal, window: which keys a query sees.
      evict_first: whether pages are copied evict-first.
    """

    @property
    def group(self) -> int: ...
    @property
    def page_size(self) -> int: ...
    @property
    def table_width(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def block_rows(self) -> int: ...
    @property
    def keys(self) -> int: ...
    @property
    def copies(self) -> int: ...
    @property
    def stages(self) -> int: ...
    @property
    def splits(self) -> int: ...
    @property
    def min_tiles(self) -> int: ...
    @property
    def items(self) -> int: ...
    @property
    def causal(self) -> bool: ...
    @property
    def window(self) -> tuple[int | None, int | None]: ...
    @property
    def evict_first(self) -> bool: ...


@dataclass(frozen=True)
class Place:
    """A CTA's place in the grid: which split of which sequence, of how many splits."""

    sequence: Any
    split: Any
    splits: Any


@dataclass(frozen=True)
class Work:
    """One CTA's work: a split of a sequence's tiles under a block of query rows of one KV head. Scalars are read once.

    Attributes:
      sequence, split, splits: of `Place`; warpgroup, head, row_block, first_row: of its first query row.
      seq_len, q_len: of the sequence; kv_len: keys that its table holds.
      begin, end: tiles of this split; all live rows see the whole of tiles `[full_begin, full_end)`.
      stride: from one of its tiles to the next. 1: tiles in a row; the number of splits: they take turns.
    """

    launch: Launch
    place: Place
    stride: int
    warpgroup: Any
    head: Any
    row_block: Any
    first_row: Any
    seq_len: Any
    q_len: Any
    kv_len: Any
    begin: Any
    end: Any
    full_begin: Any
    full_end: Any

    def limits(self, token: Any) -> tuple[Any, Any]:
        """First key a query token sees, and the key after the last one."""
        return limits(self.launch, self.seq_len, self.q_len, self.kv_len, token)

    def walk(self, step: Callable[..., Any], carry: Any, *, skip: int = 0) -> Any:
        """`step(tile, carry, masked=...)` over all tiles but the first `skip`; the mask is left out where all rows see all keys."""
        masked = functools.partial(step, masked=True)
        begin = self.begin + skip * self.stride
        full_begin, full_end = jnp.maximum(self.full_begin, begin), jnp.maximum(self.full_end, begin)
        whole, windowed = functools.partial(step, masked=False), self.launch.window[0] is not None
        if self.stride == 1:
            carry = lax.fori_loop(begin, full_begin, masked, carry) if windowed else carry
            carry = lax.fori_loop(full_begin, full_end, whole, carry)
            return lax.fori_loop(full_end, self.end, masked, carry)
        first, *counts = [self.count(begin, end) for end in (full_begin, full_end, self.end)]
        in_turn = lambda which: lambda i, held: which(begin + i * self.stride, held)  # noqa: E731
        if windowed:
            carry = lax.fori_loop(0, first, in_turn(masked), carry)
        carry = lax.fori_loop(first if windowed else 0, counts[0], in_turn(whole), carry)
        return lax.fori_loop(counts[0], counts[1], in_turn(masked), carry)

    def count(self, begin: Any, end: Any) -> Any:
        """Tiles of this split from one of its own on and below `end`."""
        return lax.div(jnp.maximum(end - begin, 0) + (self.stride - 1), jnp.int32(self.stride))

    @property
    def last(self) -> Any:
        """The last tile of a split that has any."""
        return self.end - 1 if self.stride == 1 else self.begin + (self.count(self.begin, self.end) - 1) * self.stride

    def tokens(self, layout: Any, rows: int | None = None) -> Any:
        """Query token of each row of a warpgroup."""
        return row_tokens(rows or self.launch.rows, self.first_row, self.launch.group, layout)

    def live(self, row_sum: Any, layout: Any) -> Any:
        """Mask of the rows that count: those of live tokens that see a key."""
        return (self.tokens(layout) < self.q_len) & (row_sum != 0)

    def mask(self, tile: Any, layout: Any, keys_axis: int = 1, rows: int | None = None) -> Any:
        """Mask of the keys of a tile that each row sees."""
        launch, rows = self.launch, rows or self.launch.rows
        # Bounds that nobody uses would have no layout.
        bounded = launch.causal or launch.window != (None, None)
        low, high = self.limits(self.tokens(layout, rows)) if bounded else (0, self.kv_len)
        keys, shape = places(launch.keys, rows, keys_axis)
        mask = keys < spread(high - tile * launch.keys, shape, keys_axis)
        if launch.window[0] is not None:
            mask &= keys >= spread(low - tile * launch.keys, shape, keys_axis)
        return mask


@dataclass(frozen=True)
class PagedKV:
    """Producer of tiles of keys and values, and of what else comes in pages.

    Attributes:
      refs: the kernel's arrays in global memory, by name: `table`, and the pools that streams name.
      buffers: shared memory and barriers, by name: `<stream>_sm`, `<stream>_in` and, where warpgroups share stages, `<stream>_out`.
      arrivals: addresses of the barriers that evict-first copies arrive at.
      one_warp: starts copies, unless all threads of a warpgroup do.
      entries: of the table, for the first tiles, where `with_entries` has asked for them.
      own: index of the warpgroup where each has tiles and barriers of its own, the first index of the memory and of the barriers.
      first_column: of the columns that tiles hold, where those are not all.
    """

    work: Work
    refs: dict[str, Any]
    buffers: dict[str, Any]
    arrivals: dict[str, Any]
    one_warp: bool = False
    entries: Any = None
    own: Any = None
    first_column: Any = None

    def with_entries(self) -> "PagedKV":
        """Asks for the table's entries, before the sequence's length is there."""
        if interpreting() or self.work.launch.page_size < self.work.launch.keys:
            return self
        entries = hold_entries(
            self._row_of_table(), self.work.begin, stride=self.work.stride, per_page=self._tiles_of_page()
        )
        return dataclasses.replace(self, entries=entries)

    def pages(self, tile: Any) -> list[Any]:
        """Ids of the pages that hold a tile: any number for tiles past the last one."""
        launch, table = self.work.launch, self.refs["table"]
        if self.entries is not None:
            index = lax.div(tile - self.work.begin, jnp.int32(self.work.stride))
            operands = (self.entries, self._row_of_table(), self.work.begin, index)
            return [held_entry(*operands, stride=self.work.stride, per_page=self._tiles_of_page())]
        if launch.page_size >= launch.keys:
            # Read without knowing the sequence's length.
            entry = lax.div(tile, jnp.int32(launch.page_size // launch.keys))
            return [table[self.work.place.sequence, jnp.minimum(entry, launch.table_width - 1)]]
        # A tile's pages past the sequence's last one are replaced by it.
        last = lax.div(self.work.kv_len - 1, jnp.int32(launch.page_size))
        entries = [tile * launch.copies + copy for copy in range(launch.copies)]
        return [table[self.work.place.sequence, jnp.minimum(entry, last)] for entry in entries]

    def ring_pages(self) -> list[Any]:
        """Ids of the pages of the ring's first tiles, all read before the first copy needs one."""
        return [self.pages(self.work.begin + stage * self.work.stride) for stage in range(self.work.launch.stages)]

    def fill_ring(self, streams: Sequence[str], pages: list[Any], *, least: Any = None, below: Any = None) -> None:
        """Starts the first tiles of the ring, of those from `least` on and below `below`. `pages`: of `ring_pages`."""
        for stage, held in enumerate(pages):
            tile = self.work.begin + stage * self.work.stride
            wanted = tile < (self.work.end if below is None else jnp.minimum(self.work.end, below))

            @pl.when(wanted if least is None else wanted & (tile >= least))
            def _(tile=tile, held=held):
                for stream in streams:
                    self.fill(stream, tile, held)

    def fill(self, stream: str, tile: Any, pages: list[Any]) -> None:
        """Starts the copies of one tile."""
        launch, stage, head = self.work.launch, self.stage(tile), self.work.head
        pool, memory, slot, columns = self.refs[stream], self._memory(stream), self._slot(stage), {}
        if self.first_column is not None:
            columns = {"first_column": self.first_column, "swizzle": most_swizzled(stream, launch.keys)}
        if launch.page_size >= launch.keys:
            part = lax.rem(tile, jnp.int32(launch.page_size // launch.keys))
            copies = [(pages[0], pl.ds(part * launch.keys, launch.keys), memory.at[stage])]
        else:
            places = [pl.ds(copy * launch.page_size, launch.page_size) for copy in range(len(pages))]
            whole = pl.ds(0, launch.page_size)
            copies = [(page, whole, memory.at[stage, rows]) for page, rows in zip(pages, places, strict=True)]
        for page, rows, target in copies:
            if launch.evict_first:
                arrival = tma.arrival(self.arrivals[f"{stream}_in"], slot)
                tma.copy_page_once(pool, page, head, rows, target, arrival, one_warp=self.one_warp, **columns)
            else:
                source = pool.at[page, head, rows]
                if columns:
                    source = source.at[:, pl.ds(self.first_column, memory.shape[-1])]
                plgpu.copy_gmem_to_smem(source, target, self.buffers[f"{stream}_in"].at[slot])

    def stage(self, tile: Any) -> Any:
        tiles_before = lax.div(tile - self.work.begin, jnp.int32(self.work.stride))
        return lax.rem(tiles_before, jnp.int32(self.work.launch.stages))

    def _slot(self, stage: Any) -> Any:
        """Index of a stage's barrier."""
        return stage if self.own is None else self.own * self.work.launch.stages + stage

    def _memory(self, stream: str) -> Any:
        memory = self.buffers[f"{stream}_sm"]
        return memory if self.own is None else memory.at[self.own]

    def held(self, stream: str, tile: Any) -> Any:
        """A tile's shared memory."""
        return self._memory(stream).at[self.stage(tile)]

    def next_in_stage(self, tile: Any) -> Any:
        """The tile that takes another one's place in the ring."""
        return tile + self.work.launch.stages * self.work.stride

    def wait(self, stream: str, tile: Any) -> Any:
        """A tile's shared memory, once its copies have arrived."""
        stage = self.stage(tile)
        plgpu.barrier_wait(self.buffers[f"{stream}_in"].at[self._slot(stage)])
        return self._memory(stream).at[stage]

    def release(self, stream: str, tile: Any, pages: list[Any]) -> None:
        """Gives a used stage back and, once all warpgroups have, starts the tile that comes next in it."""
        stage, freed = self.stage(tile), self.buffers[f"{stream}_out"]
        plgpu.barrier_arrive(freed.at[stage])

        @pl.when(self.work.warpgroup == 0)
        def _():
            plgpu.barrier_wait(freed.at[stage])
            coming = self.next_in_stage(tile)
            pl.when(coming < self.work.end)(functools.partial(self.fill, stream, coming, pages))

    def refill_ring(self, streams: Sequence[str], pages: list[Any], *, least: Any = None, below: Any = None) -> None:
        """`fill_ring` by one warp."""
        by_one_warp(functools.partial(self.fill_ring, streams, pages, least=least, below=below))

    def _row_of_table(self) -> Any:
        return self.refs["table"].at[self.work.place.sequence]

    def _tiles_of_page(self) -> int:
        return self.work.launch.page_size // self.work.launch.keys


def paged_kv(
    launch: Launch, refs: dict[str, Any], buffers: dict[str, Any], *, place: Place | None = None, stride: int = 1,
    one_warp: bool = False,
) -> PagedKV:  # fmt: skip
    """The producer of a CTA, and with it the CTA's work.

    Args:
      refs: `table`, `seq_lens` and `q_lens` besides the pools.
      place: None: as the axes `b` and `split` of the grid say; `heads` and `wg` say the rest.
    """
    if place is None:
        place = Place(lax.axis_index("b"), lax.axis_index("split"), jnp.int32(launch.splits))
    warpgroup = lax.axis_index("wg")
    arrivals = tma.addresses(buffers) if launch.evict_first else {}
    heads = lax.axis_index("heads")
    head, row_block = lax.rem(heads, jnp.int32(launch.kv_heads)), lax.div(heads, jnp.int32(launch.kv_heads))
    first_row = row_block * launch.block_rows + warpgroup * launch.rows
    seq_len, q_len = refs["seq_lens"][place.sequence], refs["q_lens"][place.sequence]
    # A sequence longer than its table is cut to it; positions still count from the true length.
    kv_len = jnp.minimum(seq_len, launch.table_width * launch.page_size)
    tiles = _tiles(launch, place, stride, row_block, seq_len, q_len, kv_len)
    work = Work(launch, place, stride, warpgroup, head, row_block, first_row, seq_len, q_len, kv_len, *tiles)
    return PagedKV(work, refs, buffers, arrivals, one_warp)


def limits(launch: Launch, seq_len: Any, q_len: Any, kv_len: Any, token: Any) -> tuple[Any, Any]:
    """First key a query token sees, and the key after the last one."""
    position = seq_len - q_len + token
    left, right = launch.window
    low, high = 0 if left is None else position - left, kv_len
    if launch.causal:
        high = jnp.minimum(high, position + 1)
    if right is not None:
        high = jnp.minimum(high, position + (right + 1))
    return low, high


def _tiles(
    launch: Launch, place: Place, stride: int, row_block: Any, seq_len: Any, q_len: Any, kv_len: Any
) -> tuple[Any, Any, Any, Any]:
    """Tiles of a split: [begin, end); all live rows see the whole of tiles [full_begin, full_end)."""
    keys = jnp.int32(launch.keys)
    first = lax.div(row_block * launch.block_rows, jnp.int32(launch.group))
    last = lax.div(row_block * launch.block_rows + (launch.block_rows - 1), jnp.int32(launch.group))
    last = jnp.minimum(last, q_len - 1)
    (low, full_high), (full_low, high) = (limits(launch, seq_len, q_len, kv_len, token) for token in (first, last))
    low, high = jnp.maximum(low, 0), jnp.where(first < q_len, jnp.maximum(high, 0), 0)
    low_tile, high_tile = lax.div(low, keys), lax.div(high + (keys - 1), keys)
    tiles = jnp.maximum(high_tile - low_tile, 0)
    share = jnp.maximum(lax.div(tiles + (place.splits - 1), place.splits), launch.min_tiles)
    if stride > 1:
        # By its number: which part a tile is in depends on where it lies, not on how many there are.
        begin = low_tile + lax.rem(place.split + stride - lax.rem(low_tile, jnp.int32(stride)), jnp.int32(stride))
        end = jnp.maximum(low_tile + tiles, begin)
    elif launch.splits == 1 and not launch.items:
        # Known before the sequence's length is.
        begin, end = low_tile, low_tile + tiles
    else:
        begin = low_tile + place.split * share
        end = jnp.maximum(jnp.minimum(begin + share, low_tile + tiles), begin)
    full_begin = begin
    if launch.window[0] is not None:
        first_whole = lax.div(jnp.maximum(full_low, 0) + (keys - 1), keys)
        full_begin = jnp.clip(first_whole, begin, end)
    return begin, end, full_begin, jnp.clip(lax.div(jnp.maximum(full_high, 0), keys), full_begin, end)


@thread_op(args=(GLOBAL, SCALAR), returns=_ENTRIES)
def hold_entries(table, begin, *, stride: int, per_page: int):
    """Table entries of a split's first 32 tiles, `begin`, `begin + stride` and on, `per_page` to a page: one in each lane of a
    warp.

    They are asked for here, whatever is known later: an entry past the last one is any number.
    """
    lane, _ = th.lane_and_warp()
    # Volatile: as a plain load it would be moved behind the first branch.
    address = _entry_address(table, th.add(begin, th.mul(lane, stride)), per_page)
    word = th.load(address, op="ld.volatile.global")
    held = np.array([vector.from_elements(ir.VectorType.get((1,), th.i32()), word)], dtype=object)
    return mgpu.FragmentedArray(_registers=held, _layout=mgpu.WGStridedFragLayout((128,), 1), _is_signed=True)


@thread_op(args=(_ENTRIES.layout, GLOBAL, SCALAR, SCALAR), returns=NUMBER)
def held_entry(entries, table, begin, index, *, stride: int, per_page: int):
    """The entry of the split's tile number `index`; read again from tile 32 on. Arguments as of `hold_entries`."""
    word = vector.extract(entries.registers.item(), [], [0])
    address = _entry_address(table, th.add(begin, th.mul(index, stride)), per_page)
    return utils.inline_ptx(
        "{ .reg .pred far; .reg .b32 lane; setp.ge.s32 far, $3, 32; and.b32 lane, $3, 31;"
        " shfl.sync.idx.b32 $0, $1, lane, 31, -1; @far ld.global.b32 $0, [$2]; }",
        word, address, index, result_types=th.i32(), has_side_effects=True, convergent=True,
    )  # fmt: skip


def _entry_address(table, tile, per_page: int):
    last = th.shape_and_strides(table)[0][0] - 1
    entry = arith.minsi(th.div(tile, per_page), utils.c(last, th.i32()))
    return th.add(th.address(table), th.mul(th.widen_index(entry), 4))


def ring(launch: Any, dtype: Any) -> dict[str, Any]:
    """Shared memory that 16-bit keys and values come through, and its barriers.

    `launch` also has `head_dim`, `width`, the columns that a row has in shared memory, and `warpgroups`.
    """
    tiles: dict[str, Any] = {"transforms": swizzled(dtype, launch.width)}
    # Rows that have to be padded come as they are and are moved to a tile of their own.
    padded = launch.width > launch.head_dim
    tile = plgpu.SMEM((launch.stages, launch.keys, launch.head_dim), dtype, **({} if padded else tiles))
    filled = plgpu.Barrier(num_arrivals=launch.copies, num_barriers=launch.stages)
    buffers = {"k_sm": tile, "v_sm": tile, "k_in": filled, "v_in": filled}
    freed = plgpu.Barrier(num_arrivals=launch.warpgroups, num_barriers=launch.stages)
    buffers |= {"k_out": freed, "v_out": freed}
    if padded:
        buffers |= {name: plgpu.SMEM((launch.keys, launch.width), dtype, **tiles) for name in ("k_wide", "v_wide")}
    return buffers


def grid(launch: Any, b: int) -> dict[str, Any]:
    """A CTA for each split and block of rows; those of a sequence in a cluster where they are `together`."""
    heads = launch.row_blocks * launch.kv_heads
    if launch.together:
        cluster = {"cluster": (launch.splits,), "cluster_names": ("split",)}
        return {"grid": (heads, b), "grid_names": ("heads", "b"), **cluster}
    return {"grid": (b, launch.splits, heads), "grid_names": ("b", "split", "heads")}


def most_swizzled(stream: str, keys: int) -> int:
    """Most bytes that a tile may be swizzled over: a product takes as many rows of 16-bit values at a time as numbers of that."""
    return min(2 * keys, 128) if stream == "v" else 128


def _padded(source, target) -> None:
    target[...] = jnp.pad(source[...], ((0, 0), (0, target.shape[1] - source.shape[1])))


@thread_op(args=lambda source, target: (GLOBAL, tile_of(target)), interpret=_padded)
def pad_columns(source, target) -> None:
    """A tile of rows in shared memory, packed, to one with more columns, zeros there, that matrix instructions can read."""
    (count, columns), width = th.rows_and_columns(target), th.swizzle(target)
    packed = 2 * th.shape_and_strides(source)[0][1]
    units = 2 * columns // th.CHUNK
    lane, warp = th.lane_and_warp()
    base, place = th.address(source, space=3), th.address(target, space=3)
    for start in range(0, count * units, WARPGROUP):
        unit = th.add(th.add(th.mul(warp, WARP), lane), start)
        row, column = th.div(unit, units), th.mul(th.rem(unit, units), th.CHUNK)
        inside = th.below(row, count)
        address = th.add(base, th.add(th.mul(row, packed), column))
        words = th.load(address, 4, op="ld.shared", there=arith.andi(inside, th.below(column, packed)))
        th.when(inside, _STORE, th.add(place, th.within(row, column, columns, width)), *words)
    mgpu.commit_shared()


def _cleared(tile, first, *, swizzle: int = 128) -> None:
    del swizzle
    held = tile[...]
    tile[...] = jnp.where(lax.broadcasted_iota(jnp.int32, tile.shape, 0) < first, held, jnp.zeros_like(held))
    plgpu.commit_smem()


@thread_op(args=lambda tile, first, swizzle=128: (tile_of(tile, swizzle), SCALAR), interpret=_cleared)
def clear_rows(tile, first, *, swizzle: int = 128) -> None:
    """Zeroes rows of a tile in shared memory from the `first` on, an int32 scalar; then matrix instructions may read it.

    `swizzle`: the most bytes that the tile is swizzled over.
    """
    del swizzle
    (count, columns), width = th.rows_and_columns(tile), th.swizzle(tile)
    units, (lane, warp) = 2 * columns // th.CHUNK, th.lane_and_warp()
    zero, base = utils.c(0, th.i32()), th.address(tile, space=3)
    for start in range(0, count * units, WARPGROUP):
        unit = th.add(th.add(th.mul(warp, WARP), lane), start)
        row, column = th.div(unit, units), th.mul(th.rem(unit, units), th.CHUNK)
        unused = arith.andi(arith.cmpi(arith.CmpIPredicate.sge, row, first), th.below(row, count))
        th.when(unused, _STORE, th.add(base, th.within(row, column, columns, width)), *[zero] * 4)
    mgpu.commit_shared()
