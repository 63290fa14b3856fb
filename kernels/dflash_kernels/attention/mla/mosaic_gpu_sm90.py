"""The Hopper kernel: one CTA attends with 64 query rows to one split of one sequence's latent rows.

A query row is one (token, head) pair, row `t * heads + n`, so that a latent row is read once for all of them. The output of
64 rows, 64 x 512 in float32, fills half of a multiprocessor's registers: there is one CTA on each, of two warpgroups that own
256 of the value columns each. Tiles of 64 keys come in pairs. The scores and the softmax of a pair's first tile are the left
warpgroup's, those of the second the right one's; they hand each other the weights and the running maximum through shared
memory, and both add both tiles' values to their half. So no product is computed twice, and the softmax of one warpgroup runs
while the tensor cores work for the other.

Values are the first 512 columns of the keys, in the same shared memory. A tile lies there in three parts, two halves of 256 columns
and the 64 rotated ones, with a barrier each: a half is refilled by the one warpgroup that reads it last, without waiting for the
other, and the first product starts when the first part has come.

Rows that are named one by one (`launch.selected`) come by `cp.async`, sixteen bytes of each thread at a time, into the same tiles;
they complete the barriers that TMA completes. Rows that nobody names are zeros there, and masked. Names are read a pair of tiles
before they are needed, into registers, and all of a split's rows are asked for when it begins: 26 us in place of 35 for sixteen
tokens of 128 heads.

8-bit rows arrive in the first half of the memory that they are widened into: those of a pair's second tile widen under the scores
of its first, those of the next pair's first under the last product of this one. (Clusters of two CTAs that copy tiles for both,
and parts of 128 or 64 columns with barriers of their own, are slower: tiles are there when they are needed, and more and smaller
products cost more than earlier copies gain.)
"""

# Pallas declares its transforms and ACC less public than it documents them.
# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.attention.mla.launch import HALF, KEYS, PARTS, RANK, ROTATED, ROWS, STORED, Launch
from dflash_kernels.mosaic_gpu import softmax
from dflash_kernels.mosaic_gpu.convert import widen_rows
from dflash_kernels.mosaic_gpu.layouts import swizzled
from dflash_kernels.mosaic_gpu.mask import places, row_tokens, spread
from dflash_kernels.mosaic_gpu.softmax import LOG2E, finite
from dflash_kernels.mosaic_gpu.thread_op import COLUMN, MATRIX, ROW, kernel
from dflash_kernels.mosaic_gpu.tma import (
    address_of,
    gather_rows,
    gathered,
    named_bits,
    prefetch_named,
    prefetch_rows,
    tile_slots,
    touch_row,
)
from dflash_kernels.mosaic_gpu.wgmma import add_products

_SLACK = 8.0  # powers of two that scores may exceed the offset of their weights by
_MAX, _SUM, _TOTAL = 0, 4, 2  # rows of the exchanged statistics
_SMALLEST = 2.0**-100  # of the sums of a split's row: all below is 0


def attention(
    launch: Launch, q: jax.Array, latent_pages: jax.Array, table: jax.Array, seq_lens: jax.Array, q_lens: jax.Array,
    order: jax.Array, interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Runs the kernel.

    Args:
      launch: shapes and tiling.
      q: `[B, rows, R + r]`.
      latent_pages: `[P, 1, p, R + r]`. Rows at or past `seq_lens` may hold anything.
      table: `[B, W]` int32. Entries past a sequence's last page are never read. Where `launch.selected`, `[B, keys]`, rows of the
        pool; a negative one, or one past the pool, names none.
      seq_lens, q_lens: `[B]` int32; where `launch.limited`, behind the lengths come the fewest and the most rows seen. Neither is
        read where `launch.selected`.
      order: `[B]` int32, the sequences in the order in which they begin, read where `launch.ordered`.

    Returns:
      Output `[B, rows, R]` where `launch.direct`, else partial outputs `[B, splits, rows, R]` in `PARTS`, whose empty splits are
      not written. Float32 `[B, splits, 1, rows or 64]` natural lse, -inf where empty; `[B, splits, 3, rows or 64]` of splits, whose
      last two are what the left and the right half of a split's columns have to be multiplied with.
    """
    b = q.shape[0]
    if launch.direct:
        out = jax.ShapeDtypeStruct((b, launch.rows, RANK), q.dtype)
    else:
        out = jax.ShapeDtypeStruct((b, launch.splits, launch.rows, RANK), PARTS)
    stats = (b, launch.splits, 1 if launch.direct else 3, max(launch.rows, ROWS))

    def body(q_ref, pages_ref, table_ref, seq_ref, live_ref, order_ref, o_ref, lse_ref, **buffers):
        unpack_unions(buffers)
        Consumer(
            Tiles(launch, q_ref, pages_ref, table_ref, seq_ref, live_ref, order_ref, buffers), o_ref, lse_ref
        ).run()

    return kernel(
        body,
        out_type=(out, jax.ShapeDtypeStruct(stats, jnp.float32)),
        scratch_types=scratch(launch, q.dtype),
        grid=(b, launch.splits, launch.row_tiles), grid_names=("b", "split", "rows"),
        num_threads=2, thread_name="wg",
        # Row reductions of a matrix tile stay within a warp: no scratch. A barrier at every access of shared memory, as is put in
        # by default, is several times what the hand-over between the warpgroups needs; `together` stands where one is due.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )(q, latent_pages, table, seq_lens, q_lens, order)  # fmt: skip


def scratch(launch: Launch, dtype: Any) -> dict[str, Any]:
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
    if launch.quantized:
        # Eight-bit rows arrive in the first half of the memory that they are widened into.
        shapes = (2, 2, 2, KEYS, HALF), (2, 2, KEYS, ROTATED)
        # A row of 576 bytes consists of tiles of 64, not of 128.
        raw = [plgpu.SMEM(shape, STORED, transforms=swizzled(STORED, ROTATED)) for shape in shapes]
        buffers["widened"] = plgpu.Barrier(num_arrivals=2, num_barriers=2)
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
    """Producer: one CTA's tiles of latent rows, how they come to shared memory and what becomes of them there.

    Scalars of its sequence and rows are read once, at construction.
    """

    def __init__(self, launch, q_ref, pages_ref, table_ref, seq_ref, live_ref, order_ref, buffers):
        self.launch, self.memory = launch, buffers
        self.q_ref, self.pages_ref, self.table_ref = q_ref, pages_ref, table_ref
        b, self.split, self.wg = (lax.axis_index(name) for name in ("b", "split", "wg"))
        self.b = order_ref[b] if launch.ordered else b
        self.first_row = jnp.minimum(lax.axis_index("rows") * ROWS, max(launch.rows - ROWS, 0))
        if launch.selected or not launch.direct:
            touch_row(table_ref.at[self.b])
        if launch.selected:
            self.arrivals = {name: address_of(buffers[name]) for name in ("halves_in", "rotated_in")}
        if launch.selected:
            self.seq_len, self.q_len = jnp.int32(launch.table_width * KEYS), jnp.int32(1)
        else:
            self.seq_len, self.q_len = seq_ref[self.b], live_ref[self.b]
        self.fewest, rows = None, self.seq_len
        if launch.limited:
            sequences = live_ref.shape[0]
            self.fewest, rows = seq_ref[sequences + self.b], seq_ref[2 * sequences + self.b]
        # A sequence longer than its table is cut to it; positions still count from the true length.
        self.kv_len = jnp.minimum(rows, launch.table_width * launch.page_size)
        self._ranges()

    def limit(self, token):
        """The key after the last one that a query token sees."""
        if not self.launch.causal:
            return self.kv_len
        seen = self.seq_len - self.q_len + token + 1
        return jnp.minimum(self.kv_len, seen if self.fewest is None else jnp.maximum(seen, self.fewest))

    def _ranges(self):
        """Tiles of this split, the pairs that begin at `begin`, `begin + turn` and on, below `end`; all live rows see the first
        `whole_pairs`. Splits take turns: which one a tile is in depends on where it lies, not on how many there are.
        """
        launch, heads = self.launch, jnp.int32(self.launch.heads)
        first, last = lax.div(self.first_row, heads), lax.div(self.first_row + (ROWS - 1), heads)
        whole = jnp.maximum(self.limit(first), 0)
        high = jnp.where(first < self.q_len, jnp.maximum(self.limit(jnp.minimum(last, self.q_len - 1)), 0), 0)
        tiles = lax.div(high + (KEYS - 1), jnp.int32(KEYS))

        def own(pairs):
            return lax.div(jnp.maximum(pairs - self.split, 0) + (launch.splits - 1), jnp.int32(launch.splits))

        self.begin, self.turn = 2 * self.split, 2 * launch.splits
        self.end = jnp.maximum(tiles, self.begin)
        self.pairs = own(lax.div(tiles, jnp.int32(2)))
        self.whole_pairs = jnp.minimum(own(lax.div(whole, jnp.int32(2 * KEYS))), self.pairs)
        if launch.selected:
            self.whole_pairs = jnp.int32(0)
        self.odd = own(lax.div(tiles + 1, jnp.int32(2))) - self.pairs

    def start(self, wg):
        """The queries and the first two tiles: each warpgroup copies its half, the right one the rotated parts, too."""
        memory, rows = self.memory, self.launch.tile_rows
        source = self.q_ref.at[self.b, pl.ds(self.first_row, rows)]
        # Rows past the given ones stay as they are: a row's garbage never leaves that row.
        target = memory["q_sm"].at[wg, pl.ds(0, rows)]
        plgpu.copy_gmem_to_smem(source.at[:, pl.ds(wg * HALF, HALF)], target, memory["q_in"])
        if wg == 1:
            target = memory["q_rotated"].at[0, pl.ds(0, rows)]
            plgpu.copy_gmem_to_smem(source.at[:, pl.ds(RANK, ROTATED)], target, memory["q_in"])
        pages = [self.pages(self.begin + stage) for stage in range(2)]
        for stage, held in enumerate(pages):
            self.fill_half(wg, stage, self.begin + stage, held)
            if wg == 1:
                self.fill_rotated(stage, self.begin + stage, held)
        if self.launch.selected:
            most = -(-self.launch.table_width // (2 * self.launch.splits))
            prefetch_named(self.pages_ref, self.table_ref.at[self.b], self.begin, self.turn, self.end, pairs=most)
        plgpu.barrier_wait(memory["q_in"])
        return pages

    def pages(self, tile):
        """Ids of the pages that hold a tile, or slots. Entries past the sequence's last page are replaced by it, not read."""
        launch = self.launch
        if launch.selected:
            return tile_slots(self.table_ref.at[self.b], jnp.minimum(tile, launch.table_width - 1) * KEYS)
        last = lax.div(self.kv_len - 1, jnp.int32(launch.page_size))
        if launch.page_size >= KEYS:
            entries = [lax.div(tile, jnp.int32(launch.page_size // KEYS))]
        else:
            entries = [tile * launch.copies + copy for copy in range(launch.copies)]
        return [self.table_ref[self.b, jnp.minimum(entry, last)] for entry in entries]

    def together(self):
        """All threads of the warpgroup have come this far, and what they read or wrote in shared memory is done."""
        plgpu.commit_smem()

    def _sources(self, columns, tile, pages):
        """Sources of some columns of a tile, in as many pieces as it has pages."""
        page_size = self.launch.page_size
        if page_size >= KEYS:
            rows = pl.ds(lax.rem(tile, jnp.int32(page_size // KEYS)) * KEYS, KEYS)
            return [self.pages_ref.at[pages[0], 0, rows, columns]]
        return [self.pages_ref.at[page, 0, :, columns] for page in pages]

    def fill_half(self, half, stage, tile, pages):
        if self.launch.selected:
            self._gather(
                half * HALF, self.memory["latents"].at[half, stage], "halves_in", 2 * stage + half, tile, pages
            )
            return
        columns, raw = pl.ds(half * HALF, HALF), self.launch.quantized
        target = self.memory["raw"].at[half, stage, 0] if raw else self.memory["latents"].at[half, stage]
        self._fill(columns, target, self.memory["halves_in"].at[2 * stage + half], tile, pages)

    def fill_rotated(self, stage, tile, pages):
        if self.launch.selected:
            self._gather(RANK, self.memory["rotated"].at[stage], "rotated_in", stage, tile, pages)
            return
        columns, raw = pl.ds(RANK, ROTATED), self.launch.quantized
        target = self.memory["raw_rotated"].at[stage, 0] if raw else self.memory["rotated"].at[stage]
        self._fill(columns, target, self.memory["rotated_in"].at[stage], tile, pages)

    def _fill(self, columns, target, barrier, tile, pages):
        """Starts the copies of some columns of one tile, if the split has it."""

        @pl.when(tile < self.end)
        def _():
            self.together()
            sources = self._sources(columns, tile, pages)
            height = KEYS // len(sources)
            for piece, source in enumerate(sources):
                part = target if len(sources) == 1 else target.at[pl.ds(piece * height, height)]
                plgpu.copy_gmem_to_smem(source, part, barrier)

    def _gather(self, column, target, barrier, slot, tile, slots):
        """`_fill` of rows that the table names."""

        @pl.when(tile < self.end)
        def _():
            self.together()
            gather_rows(self.pages_ref, slots, column, target, self.arrivals[barrier], slot)

    def await_part(self, barrier, slot):
        """Waits for a part of a tile, which matrix instructions may then read."""
        plgpu.barrier_wait(self.memory[barrier].at[slot])
        self.see_gathered()

    def see_gathered(self):
        """Makes copied rows, which this warpgroup knows to have arrived, visible to matrix instructions."""
        if self.launch.selected:
            gathered()

    def bits(self, slots):
        """Bit mask, in two words, of a tile's keys that are rows of the pool, where rows are named."""
        return named_bits(self.pages_ref, slots) if self.launch.selected else []

    def named(self, bits):
        """The same for each score of a tile."""
        key = plgpu.layout_cast(lax.iota(jnp.int32, KEYS), COLUMN)
        words = jnp.where(key < 32, jnp.broadcast_to(bits[0], key.shape), jnp.broadcast_to(bits[1], key.shape))
        named = (words & jnp.left_shift(jnp.ones_like(key), key & 31)) != 0
        return lax.broadcast_in_dim(named, (ROWS, KEYS), [1])

    def ask(self, tile, pages):
        """Starts a tile's way from memory to the L2, where the copies of all CTAs of the sequence find it a pair later.

        Gains where short splits wait for memory; costs where the GPU is at its power limit all along.
        """
        if self.launch.direct or self.launch.selected:
            return

        @pl.when((tile < self.end) & (lax.axis_index("rows") == 0))
        def _():
            for source in self._sources(slice(None), tile, pages):
                prefetch_rows(source)

    def widen(self, wg, stage):
        """Makes 16-bit numbers of the 8-bit rows of this warpgroup's half, and of the rotated parts if it is the right one."""
        if not self.launch.quantized:
            return
        memory = self.memory
        plgpu.barrier_wait(memory["halves_in"].at[2 * stage + wg])
        widen_rows(memory["raw"].at[wg, stage, 0], memory["latents"].at[wg, stage])
        if wg == 1:
            plgpu.barrier_wait(memory["rotated_in"].at[stage])
            widen_rows(memory["raw_rotated"].at[stage, 0], memory["rotated"].at[stage])
        plgpu.commit_smem()
        plgpu.barrier_arrive(memory["widened"].at[stage])

    def widen_next(self, wg, tile):
        """The first tile of the next pair, if there is one, while the tensor cores work for this one."""
        if self.launch.quantized:
            pl.when(tile + self.turn < self.end)(functools.partial(self.widen, wg, 0))

    def first(self, pair):
        """The first tile of this split's pair of that number."""
        return self.begin + pair * self.turn

    def clear_unused_values(self, half, stage, tile):
        """Zeroes a half's rows past the sequence: their weight is 0, and 0 * NaN is NaN."""
        if self.launch.selected:
            return
        live = self.kv_len - tile * KEYS

        @pl.when(live < KEYS)
        def _():
            # A few columns at a time, for lack of registers.
            for first in range(0, HALF, ROTATED):
                values = self.memory["latents"].at[half, stage, :, pl.ds(first, ROTATED)]
                rows = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (KEYS, ROTATED), 0), MATRIX)
                held = plgpu.layout_cast(values[...], MATRIX)
                values[...] = jnp.where(rows < live, held, jnp.zeros_like(held))
            plgpu.commit_smem()


class Consumer:
    """Consumer of the two warpgroups: scores, softmax, values, and the epilogue."""

    def __init__(self, tiles: Tiles, o_ref, lse_ref):
        self.tiles, self.o_ref, self.lse_ref = tiles, o_ref, lse_ref

    def run(self):
        self.scale_log2 = self.tiles.launch.scale * LOG2E
        for wg, pair, single in ((0, self._left_pair, self._left_single), (1, self._right_pair, self._right_single)):

            @pl.when((self.tiles.wg == wg) & (self.tiles.begin < self.tiles.end))
            def _(wg=wg, pair=pair, single=single):
                pages = self.tiles.start(wg)
                self.tiles.widen(wg, 0)
                row_max = plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), ROW)
                total = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), ROW)
                acc = plgpu.layout_cast(jnp.zeros((ROWS, HALF), jnp.float32), MATRIX)
                masked = functools.partial(pair, masked=True)
                coming = self._coming(0)
                self.tiles.ask(self.tiles.first(1) + wg, coming[wg])
                carry = (acc, row_max, total, *coming, *self.tiles.bits(pages[wg]))
                if not self.tiles.launch.selected:
                    carry = lax.fori_loop(0, self.tiles.whole_pairs, pair, carry)
                carry = lax.fori_loop(self.tiles.whole_pairs, self.tiles.pairs, masked, carry)
                acc, row_max, total = lax.fori_loop(
                    self.tiles.pairs, self.tiles.pairs + self.tiles.odd, single, (*carry[:3], *carry[5:])
                )[:3]
                self._finish(wg, acc, row_max, total)

            @pl.when((self.tiles.wg == wg) & (self.tiles.begin >= self.tiles.end))
            def _(wg=wg):
                self._nothing(wg)

    def _coming(self, pair):
        """Page ids of the two tiles after a pair, read an iteration before they are needed."""
        return [self.tiles.pages(self.tiles.first(pair + 1) + stage) for stage in range(2)]

    def _left_pair(self, pair, carry, *, masked=False):
        """The left warpgroup's share of two tiles."""
        memory, tile, coming, bits = self.tiles.memory, self.tiles.first(pair), carry[3:5], carry[5:]
        following, later = tile + self.tiles.turn, self._coming(pair + 1)
        self.zero = opaque_zero(pair)
        acc, row_max, total = self._left_first(tile, carry[:3], bits, masked, lambda: self.tiles.widen(0, 1))
        self.tiles.fill_half(0, 0, following, coming[0])
        self.tiles.ask(following + self.tiles.turn, later[0])
        plgpu.barrier_wait(memory["weights_in"].at[1])
        self.tiles.see_gathered()
        new_max = self._stat(_MAX + 1)
        alpha = jnp.exp2(row_max - finite(new_max))
        if masked:
            self.tiles.clear_unused_values(0, 1, tile + 1)
        acc = softmax.rescaled_where_moved(acc, alpha)
        acc = self._add_values(acc, self._second_weights, 0, 1, lambda: self.tiles.widen_next(0, tile))
        self.tiles.fill_half(0, 1, following + 1, coming[1])
        return acc, new_max, total * alpha, *later, *self.tiles.bits(coming[0])

    def _left_single(self, pair, carry):
        self.zero = opaque_zero(pair)
        return *self._left_first(self.tiles.first(pair), carry[:3], carry[3:], True), *carry[3:]

    def _left_first(self, tile, carry, bits, masked, meanwhile=None):
        """Scores, with other work under them, and softmax of a first tile, handed to the other warpgroup, and its left values."""
        acc, row_max, total = carry
        memory = self.tiles.memory
        found, highest = self._scores(0, tile, bits, masked, meanwhile)
        new_max, alpha, wide = self._softmax(found, highest, row_max)
        weights = wide.astype(memory["q_sm"].dtype)
        # The rotated keys of this tile are used up: the weights take their place.
        self.tiles.together()
        memory["rotated"].at[0][...] = weights
        memory["stats"].at[_MAX][...] = new_max
        plgpu.commit_smem()
        plgpu.barrier_arrive(memory["weights_in"].at[0])
        # After the other warpgroup has what it waits for.
        total = total * alpha + wide.sum(axis=1)
        if masked:
            self.tiles.clear_unused_values(0, 0, tile)
        acc = softmax.rescaled_where_moved(acc, alpha)
        return self._add_values(acc, lambda: weights, 0, 0), new_max, total

    def _right_pair(self, pair, carry, *, masked=False):
        """The right warpgroup's share of two tiles: its softmax of the second runs under the product of the first."""
        memory, tile, coming, bits = self.tiles.memory, self.tiles.first(pair), carry[3:5], carry[5:]
        following, later = tile + self.tiles.turn, self._coming(pair + 1)
        self.zero = opaque_zero(pair)
        self.tiles.widen(1, 1)
        # The maximum is found before the first tile's weights are there: the rest of the softmax is as long as the product.
        found, highest = self._scores(1, tile + 1, bits, masked)
        self.tiles.fill_rotated(1, following + 1, coming[1])
        acc, row_max, total = self._right_values(*carry[:3])
        if masked:
            self.tiles.clear_unused_values(1, 0, tile)

        def hand_over():
            new_max, _, weights = self._softmax(found, highest, row_max)
            memory["weights"][...] = weights.astype(memory["weights"].dtype)
            memory["stats"].at[_MAX + 1][...] = new_max
            plgpu.commit_smem()
            plgpu.barrier_arrive(memory["weights_in"].at[1])
            memory["stats"].at[_SUM][...] = weights.sum(axis=1)
            self.tiles.together()

        acc = self._add_values(acc, self._first_weights, 1, 0, hand_over)
        self.tiles.fill_half(1, 0, following, coming[0])
        self.tiles.fill_rotated(0, following, coming[0])
        self.tiles.ask(following + self.tiles.turn + 1, later[1])
        new_max = self._stat(_MAX + 1)
        alpha = jnp.exp2(row_max - finite(new_max))
        if masked:
            self.tiles.clear_unused_values(1, 1, tile + 1)
        acc = softmax.rescaled_where_moved(acc, alpha)
        acc = self._add_values(acc, self._second_weights, 1, 1, lambda: self.tiles.widen_next(1, tile))
        self.tiles.fill_half(1, 1, following + 1, coming[1])
        return acc, new_max, total * alpha + self._stat(_SUM), *later, *self.tiles.bits(coming[1])

    def _right_single(self, pair, carry):
        self.zero = opaque_zero(pair)
        acc, row_max, total = self._right_values(*carry[:3])
        self.tiles.clear_unused_values(1, 0, self.tiles.first(pair))
        return self._add_values(acc, self._first_weights, 1, 0), row_max, total, *carry[3:]

    def _right_values(self, acc, row_max, total):
        """The right warpgroup's sums under the maximum of the left one's tile, whose weights are there on return."""
        plgpu.barrier_wait(self.tiles.memory["weights_in"].at[0])
        self.tiles.see_gathered()
        new_max = self._stat(_MAX)
        alpha = jnp.exp2(row_max - finite(new_max))
        return softmax.rescaled_where_moved(acc, alpha), new_max, total * alpha

    def _multiply_keys(self, scores, stage):
        """Starts to add `[64, 576] @ [64, 576].T` in float32; each product starts as its part arrives."""
        memory, quantized = self.tiles.memory, self.tiles.launch.quantized
        if quantized:
            plgpu.barrier_wait(memory["widened"].at[stage])
        for half in range(2):
            if not quantized:
                self.tiles.await_part("halves_in", 2 * stage + half)
            keys = memory["latents"].at[half, self.zero + stage].transpose((1, 0))
            plgpu.wgmma(scores, memory["q_sm"].at[self.zero + half], keys)
        if not quantized:
            self.tiles.await_part("rotated_in", stage)
        keys = memory["rotated"].at[self.zero + stage].transpose((1, 0))
        plgpu.wgmma(scores, memory["q_rotated"].at[self.zero], keys)

    def _scores(self, stage, tile, bits, masked, meanwhile=None):
        """A tile's scores, with other work under them, and the highest of each row in powers of two."""

        def multiply(scores):
            self._multiply_keys(scores, stage)
            if meanwhile is not None:
                meanwhile()
            return scores[...]

        scores = pl.run_scoped(multiply, plgpu.ACC((ROWS, KEYS), jnp.float32))
        if masked:
            scores = jnp.where(self._mask(tile, bits), scores, -jnp.inf)
        return scores, scores.max(axis=1) * self.scale_log2

    def _softmax(self, scores, highest, row_max):
        """New maximum, `_SLACK` or less below the highest score; factor of what was summed up before; the weights."""
        # Nearly always the maximum stays, and what was added up under it with it.
        new_max = jnp.where(highest > row_max + _SLACK, highest, row_max)
        offset = finite(new_max)
        weights = jnp.exp2(softmax.exponents(scores, self.scale_log2, offset))
        return new_max, jnp.exp2(row_max - offset), weights

    def _add_values(self, acc, weights, half, stage, meanwhile=None) -> Any:
        """`acc + weights() @ values`, the values in shared memory, with other work under it."""

        # References are made inside: made outside, their constant indices would not lower.
        def multiply(total):
            total.begin(weights(), self.tiles.memory["latents"].at[half, self.zero + stage])
            if meanwhile is not None:
                meanwhile()

        return add_products(acc, multiply)

    def _first_weights(self):
        return self.tiles.memory["rotated"].at[self.zero]

    def _second_weights(self):
        return self.tiles.memory["weights"]

    def _mask(self, tile, bits):
        if self.tiles.launch.selected:
            return self.tiles.named(bits)
        keys, shape = places(KEYS, ROWS)
        if not self.tiles.launch.causal:
            return keys < self.tiles.kv_len - tile * KEYS
        return keys < spread(self.tiles.limit(self._row_tokens()) - tile * KEYS, shape)

    # Epilogue

    def _stat(self, row):
        return plgpu.load(self.tiles.memory["stats"].at[row], layout=ROW)

    def _row_tokens(self):
        """Query token of each row."""
        return row_tokens(ROWS, self.tiles.first_row, self.tiles.launch.heads, ROW)

    def _finish(self, wg, acc, row_max, total):
        """Adds up both warpgroups' totals, normalizes and writes this one's columns."""
        memory = self.tiles.memory
        memory["stats"].at[_TOTAL + wg][...] = total
        plgpu.barrier_arrive(memory["total_in"].at[wg])
        largest = None if self.tiles.launch.direct else jnp.abs(acc).max(axis=1)
        plgpu.barrier_wait(memory["total_in"].at[1 - wg])
        total += self._stat(_TOTAL + 1 - wg)
        live = (self._row_tokens() < self.tiles.q_len) & (total != 0)
        inverse = jnp.where(live, 1.0 / softmax.counted(total, live), 0.0)
        if wg == 0:
            self._write_stat(0, softmax.natural_lse(row_max, softmax.counted(total, live), live))
        if largest is not None:
            # Sixteen bits of a split are as good as the float32 sum, each row's half measured by its largest number.
            some = live & (largest > _SMALLEST)
            self._write_stat(1 + wg, jnp.where(some, largest * inverse, 0.0))
            inverse = jnp.where(some, 1.0 / softmax.counted(largest, some), 0.0)
        # Combining skips what has no weight, NaN too: choosing here as well would cost time.
        self._write(wg, (softmax.scaled if self.tiles.launch.direct else softmax.rescaled)(acc, inverse))

    def _nothing(self, wg):
        """A split without keys."""
        if wg == 0:
            self._write_stat(0, plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), ROW))
        if self.tiles.launch.direct:
            self._write(wg, plgpu.layout_cast(jnp.zeros((ROWS, HALF), jnp.float32), MATRIX))

    def _write_stat(self, which, of_rows):
        self.lse_ref.at[self.tiles.b, self.tiles.split, which, pl.ds(self.tiles.first_row, ROWS)][...] = of_rows

    def _write(self, wg, out):
        """Through shared memory that nobody reads any more once totals are exchanged: the queries', or the latents'."""
        rows, columns = self.tiles.launch.tile_rows, pl.ds(wg * HALF, HALF)
        source = self.tiles.memory["q_sm" if self.tiles.launch.direct else "out"].at[wg]
        self.tiles.together()
        source[...] = out.astype(source.dtype)
        plgpu.commit_smem()
        target = (
            self.o_ref.at[self.tiles.b] if self.tiles.launch.direct else self.o_ref.at[self.tiles.b, self.tiles.split]
        )
        plgpu.copy_smem_to_gmem(source.at[pl.ds(0, rows)], target.at[pl.ds(self.tiles.first_row, rows), columns])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
