"""The Hopper kernel, warp-specialized: a CTA has 128 query rows of one sequence and head at a time, two consumers and a producer.

The third warpgroup fills a ring of tiles of keys and values in shared memory by TMA, from packed rows or from pages, and runs
ahead into the next block of queries. The other two have 64 rows each and go through the tiles side by side, neither waiting for the
other: each has products on their way while it has its softmax.

Scores, weights and sums stay in registers; the softmax is online, in base 2, in float32.

A warpgroup starts the scores of a tile and the values of the tile before together, has the softmax of the scores while the values
are multiplied (FlashAttention-3, arXiv 2407.08608, section 3.2), and waits for them halfway through its exponentials, so that the
multiplications of the sums fill the other half.

What bounds it is measured in docs/attention.md, and what was tried besides.
"""

# Pallas declares ACC less public than it documents it.
# pyright: reportPrivateImportUsage=false

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.attention.ragged.launch import BLOCK, ROWS, WARPGROUPS, Launch
from dflash_kernels.mosaic_gpu import softmax
from dflash_kernels.mosaic_gpu.layouts import swizzled
from dflash_kernels.mosaic_gpu.mask import places, spread
from dflash_kernels.mosaic_gpu.pipeline import Ring
from dflash_kernels.mosaic_gpu.softmax import FOLDED, LOG2E, partial_reduce
from dflash_kernels.mosaic_gpu.thread_op import MATRIX, ROW, kernel
from dflash_kernels.mosaic_gpu.wgmma import add_products, scores_of, side_by_side

_PIECE = 64  # keys whose weights and values a product takes at least


def scratch(launch: Launch, dtype: Any) -> dict[str, Any]:
    """Shared memory and barriers of one CTA."""

    def tiles(*shape: int) -> Any:
        return plgpu.SMEM(shape, dtype, transforms=swizzled(dtype, shape[-1]))

    # A block that does not fill 64 rows leaves in slices of a row, which a tiled layout cannot give.
    out = (tiles(WARPGROUPS, ROWS, launch.value_dim), plgpu.SMEM((WARPGROUPS, ROWS, launch.value_dim), dtype))
    q = tiles(WARPGROUPS, ROWS, launch.head_dim)
    filled = plgpu.Barrier(num_arrivals=launch.copies, num_barriers=launch.stages)
    freed = plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=launch.stages)
    buffers = {
        "k_sm": tiles(launch.stages, launch.keys, launch.head_dim),
        "v_sm": tiles(launch.stages, launch.keys, launch.value_dim),
        "k_in": filled, "v_in": filled, "k_out": freed, "v_out": freed,
        "v_raw": plgpu.Barrier(num_arrivals=launch.copies),
        "q_in": plgpu.Barrier(num_arrivals=WARPGROUPS), "q_out": plgpu.Barrier(num_arrivals=WARPGROUPS),
    }  # fmt: skip
    if launch.separate_out:
        buffers |= {"q_sm": q, "o_sm": plgpu.RefUnion(*out)}
    else:
        buffers |= {"q_sm": plgpu.RefUnion(q, *out)}
    return buffers


def attention(
    launch: Launch, q: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array, page_table: jax.Array | None,
    extra: list[jax.Array], interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Runs the kernel.

    Args:
      launch: shapes and tiling.
      q: `[T, N, H]`, at least a block of rows.
      k, v: `[S, K, H]` and `[S, K, V]`, at least a tile of rows, or `[P, K, p, H]` and `[P, K, p, V]`.
      table: `[M, 7]` int32, from `block_table`.
      page_table: `[B, W]` int32, or None for packed keys. Entries past a sequence's last page are never read.
      extra: sinks, slopes: float32 `[N]`, those that the launch has.

    Returns:
      Output `[T, N, V]`, all rows of all blocks written; natural lse `[N, M, 128]` float32 of the rows of each block.
    """

    def body(q_ref, k_ref, v_ref, table_ref, *rest, **buffers):
        rest = list(rest)
        pages_ref = rest.pop(0) if launch.page_size else None
        sinks_ref = rest.pop(0) if launch.has_sinks else None
        slopes_ref = rest.pop(0) if launch.has_slopes else None
        out_ref, lse_ref = rest
        if launch.separate_out:
            buffers["o_sm"], buffers["tail_sm"] = buffers["o_sm"]
        else:
            buffers["q_sm"], buffers["o_sm"], buffers["tail_sm"] = buffers["q_sm"]
        wg = lax.axis_index("wg")

        @pl.when(wg < WARPGROUPS)
        def _():
            plgpu.set_max_registers(232, action="increase")
            consumer = Consumer(launch, wg, sinks_ref, slopes_ref, out_ref, lse_ref, buffers)
            _each_block(launch, table_ref, consumer.block)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(wg == WARPGROUPS)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            producer = Producer(launch, q_ref, k_ref, v_ref, pages_ref, buffers)
            producer.finish(_each_block(launch, table_ref, producer.block))

    return kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((q.shape[0], launch.heads, launch.value_dim), q.dtype),
            jax.ShapeDtypeStruct((launch.heads, launch.blocks, BLOCK), jnp.float32),
        ),
        scratch_types=scratch(launch, q.dtype),
        grid=(launch.ctas,), grid_names=("cta",), num_threads=WARPGROUPS + 1, thread_name="wg",
        # Row reductions of a matrix tile stay within a warp and need no scratch.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )(q, k, v, table, *(() if page_table is None else (page_table,)), *extra)  # fmt: skip


def _each_block(launch: Launch, table_ref: Any, work: Callable[["Block", jax.Array], None]) -> jax.Array:
    """Calls `work` with every block of this CTA and the tiles of keys done before; returns the tiles done in all.

    Blocks of a section lie in order of their work and are dealt there and back again: who has the longest of one round has the
    shortest of the next.
    """
    cta, rounds = lax.axis_index("cta"), jnp.int32(launch.rounds)

    def one(i, done):
        section, turn = lax.div(i, rounds), lax.rem(i, rounds)
        back = lax.rem(section + turn, jnp.int32(2)) == 1
        block = Block(launch, table_ref, section, turn * launch.ctas + jnp.where(back, launch.ctas - 1 - cta, cta))
        pl.when(block.there)(functools.partial(work, block, done))
        return done + block.tiles

    return lax.fori_loop(0, launch.heads // launch.heads_at_once * launch.rounds, one, jnp.int32(0))


def _rings(launch: Launch, buffers: dict[str, Any]) -> list[Ring]:
    """Rings of keys and of values."""
    return [Ring(launch.stages, buffers[f"{stream}_in"], buffers[f"{stream}_out"]) for stream in ("k", "v")]


class Block:
    """Work item: one block of query rows of one head, by its place in a section, and which keys its rows see.

    Keys are counted from the first row of the first tile: a sequence's own first key is number `shift`.

    Attributes:
      there: whether there is such a block at all.
      index: its place in the table; head, kv_head: of the queries, of the keys.
      first_row: of its 128 rows; own_begin, own_end: those of them that are its sequence's.
      position: in its sequence, of the first of the 128 rows.
      keys_end: number of the key after the sequence's last; shift: keys of the first tile that are not the sequence's.
      origin: row of the first tile, or the sequence's index where keys are in pages.
      begin, end: tiles of keys that some row sees something of.
    """

    def __init__(self, launch: Launch, table_ref, section, place):
        self.launch = launch
        at_once = jnp.int32(launch.heads_at_once)
        self.index = jnp.minimum(lax.div(place, at_once), launch.blocks - 1)
        self.head = section * at_once + lax.rem(place, at_once)
        self.kv_head = lax.div(self.head, jnp.int32(launch.group))
        columns = [table_ref[self.index, i] for i in range(7)]
        self.first_row, self.own_begin, self.own_end, self.position = columns[0] * 8, *columns[1:4]
        self.shift = 0 if launch.page_size else columns[6]
        self.keys_end = columns[4] + self.shift
        self.origin = columns[5] if launch.page_size else columns[5] * 8
        keys = jnp.int32(launch.keys)
        low, _ = self.limits(self.position + self.own_begin)
        _, high = self.limits(self.position + self.own_end - 1)
        self.begin = lax.div(low, keys)
        end = lax.div(jnp.maximum(high, 0) + (keys - 1), keys)
        self.there = (self.own_end > 0) & (place < launch.section)
        self.end = jnp.where(self.there, jnp.maximum(end, self.begin), self.begin)

    @property
    def tiles(self):
        return self.end - self.begin

    def limits(self, position):
        """First key that the query at a position sees, and the key after the last one."""
        left, right = self.launch.window
        low = jnp.int32(0) if left is None else jnp.maximum(position - left, 0)
        high = self.keys_end
        if self.launch.causal:
            high = jnp.minimum(high, position + (self.shift + 1))
        if right is not None:
            high = jnp.minimum(high, position + (self.shift + right + 1))
        return low + self.shift, high

    def whole(self, wg):
        """Tiles that all own rows of a warpgroup see the whole of: from, to."""
        keys, first = jnp.int32(self.launch.keys), wg * ROWS
        (low, _), (_, high) = (
            self.limits(self.position + row)
            for row in (jnp.minimum(first + (ROWS - 1), self.own_end - 1), jnp.maximum(first, self.own_begin))
        )
        begin = jnp.clip(lax.div(low + (keys - 1), keys), self.begin, self.end)
        return begin, jnp.clip(lax.div(jnp.maximum(high, 0), keys), begin, self.end)


class Producer:
    """The warpgroup that copies."""

    def __init__(self, launch, q_ref, k_ref, v_ref, pages_ref, buffers):
        self.launch, self.buffers = launch, buffers
        self.q_ref, self.k_ref, self.v_ref, self.pages_ref = q_ref, k_ref, v_ref, pages_ref
        self.keys, self.values = _rings(launch, buffers)

    def block(self, block: Block, done):
        """Queries, keys and values of one block. Page ids are read a tile ahead of the copy that needs them."""

        def one(tile, pages):
            step = done + tile - block.begin
            stage, used = self.keys.stage(step), step >= self.launch.stages
            coming = self._pages(block, tile + 1)
            self.keys.await_empty(used, stage)
            self._fill(self.k_ref, block, tile, pages, self.buffers["k_sm"].at[stage], self.keys.full.at[stage])
            pl.when(tile == block.begin)(functools.partial(self._queries, block, done))
            self.values.await_empty(used, stage)
            self._values(block, tile, pages, stage)
            return coming

        lax.fori_loop(block.begin, block.end, one, self._pages(block, block.begin))

    def finish(self, done):
        """Waits until everything copied is used up."""
        for back in range(1, self.launch.stages + 1):

            @pl.when(done >= back)
            def _(back=back):
                stage = self.keys.stage(done - back)
                for ring in (self.keys, self.values):
                    plgpu.barrier_wait(ring.empty.at[stage])

        pl.when(done > 0)(lambda: plgpu.barrier_wait(self.buffers["q_out"]))

    def _queries(self, block, done):
        # Rows that are not the block's own stay what they are in their rows; rows past the array come as zeros.
        pl.when(done > 0)(lambda: plgpu.barrier_wait(self.buffers["q_out"]))
        for wg in range(WARPGROUPS):
            source = self.q_ref.at[pl.ds(block.first_row + wg * ROWS, ROWS), block.head]
            plgpu.copy_gmem_to_smem(source, self.buffers["q_sm"].at[wg], self.buffers["q_in"])

    def _pages(self, block, tile):
        """Ids of the pages that hold a tile. Entries past the sequence's last page are replaced by it, not read."""
        launch = self.launch
        if not launch.page_size:
            return []
        last = lax.div(jnp.maximum(block.keys_end - 1, 0), jnp.int32(launch.page_size))
        if launch.page_size >= launch.keys:
            entries = [lax.div(tile, jnp.int32(launch.page_size // launch.keys))]
        else:
            entries = [tile * launch.copies + copy for copy in range(launch.copies)]
        return [self.pages_ref[block.origin, jnp.minimum(entry, last)] for entry in entries]

    def _values(self, block, tile, pages, stage):
        """Starts the copies of a tile of values, or waits for them and hands the tile over once its strange rows are zeros."""
        keys, memory, filled = self.launch.keys, self.buffers["v_sm"].at[stage], self.values.full.at[stage]
        begin, end = block.shift - tile * keys, block.keys_end - tile * keys
        strange = (begin > 0) | (end < keys)

        @pl.when(jnp.logical_not(strange))
        def _():
            self._fill(self.v_ref, block, tile, pages, memory, filled)

        @pl.when(strange)
        def _():
            self._fill(self.v_ref, block, tile, pages, memory, self.buffers["v_raw"])
            plgpu.barrier_wait(self.buffers["v_raw"])
            self._clear(memory, begin, end)
            for _ in range(self.launch.copies):
                plgpu.barrier_arrive(filled)

    def _clear(self, memory, begin, end):
        """Zeroes the rows of a tile of values outside of these: their weight is 0, and 0 * NaN is NaN."""
        rows, columns = ROWS, 64
        places = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (rows, columns), 0), MATRIX)

        @pl.loop(0, memory.shape[0] // rows)
        def _(part):
            own = (places >= begin - part * rows) & (places < end - part * rows)
            for column in range(0, memory.shape[1], columns):
                values = memory.at[pl.ds(part * rows, rows), pl.ds(column, columns)]
                held = plgpu.layout_cast(values[...], MATRIX)
                values[...] = jnp.where(own, held, jnp.zeros_like(held))

        plgpu.commit_smem()

    def _fill(self, source, block, tile, pages, memory, barrier):
        """Starts the copies of one tile of keys or values."""
        launch = self.launch
        if not launch.page_size:
            rows = pl.ds(block.origin + tile * launch.keys, launch.keys)
            plgpu.copy_gmem_to_smem(source.at[rows, block.kv_head], memory, barrier)
        elif launch.page_size >= launch.keys:
            part = lax.rem(tile, jnp.int32(launch.page_size // launch.keys))
            rows = pl.ds(part * launch.keys, launch.keys)
            plgpu.copy_gmem_to_smem(source.at[pages[0], block.kv_head, rows], memory, barrier)
        else:
            for copy, page in enumerate(pages):
                rows = pl.ds(copy * launch.page_size, launch.page_size)
                plgpu.copy_gmem_to_smem(source.at[page, block.kv_head], memory.at[rows], barrier)


class Consumer:
    """One of the two warpgroups that compute."""

    def __init__(self, launch: Launch, wg, sinks_ref, slopes_ref, out_ref, lse_ref, buffers):
        self.launch, self.wg, self.buffers = launch, wg, buffers
        self.keys, self.values = _rings(launch, buffers)
        self.sinks_ref, self.slopes_ref, self.out_ref, self.lse_ref = sinks_ref, slopes_ref, out_ref, lse_ref

    def block(self, block: Block, done):
        """All of one block of query rows; `done` tiles came before it."""
        launch = self.launch
        self.slope = None if self.slopes_ref is None else self.slopes_ref[block.head] * LOG2E
        pl.when(block.tiles > 0)(lambda: plgpu.barrier_wait(self.buffers["q_in"]))
        first = jnp.minimum(block.begin + 1, block.end)
        full_begin, full_end = (jnp.maximum(edge, first) for edge in block.whole(self.wg))
        step = functools.partial(self._step, block, done, masked=False)
        masked = functools.partial(self._step, block, done, masked=True)
        carry = lax.fori_loop(block.begin, first, functools.partial(self._first, block, done), self._nothing(block))
        if launch.window[0] is None:
            full_begin = first  # what is left of a sequence lies in its first tile
        else:
            carry = lax.fori_loop(first, full_begin, masked, carry)
        carry = lax.fori_loop(full_begin, full_end, step, carry)
        carry = lax.fori_loop(full_end, block.end, masked, carry)
        last = jnp.maximum(block.end - 1, block.begin)
        acc, _, row_max, row_sum = lax.fori_loop(last, block.end, functools.partial(self._last, block, done), carry)
        self._finish(block, acc, row_max, row_sum.sum(axis=1))
        pl.when(block.tiles > 0)(self._give_back_queries)

    def _nothing(self, block):
        """Before any tile: sums, weights not yet multiplied, maximum, and the sum of weights, each thread's own part of it."""
        launch = self.launch
        row_max, row_sum = jnp.full((ROWS,), -jnp.inf, jnp.float32), jnp.zeros((ROWS, FOLDED), jnp.float32)
        if self.sinks_ref is not None:
            # A sink is a key that everyone sees, whose value is 0.
            row_max, row_sum = (
                jnp.broadcast_to(self.sinks_ref[block.head] * LOG2E, (ROWS,)),
                jnp.full_like(row_sum, 1 / FOLDED),
            )
        acc = jnp.zeros((ROWS, launch.value_dim), jnp.float32)
        piece = jnp.zeros((ROWS, _PIECE), self.buffers["v_sm"].dtype)
        acc, piece, row_sum = (plgpu.layout_cast(array, MATRIX) for array in (acc, piece, row_sum))
        return acc, [piece] * (launch.keys // _PIECE), plgpu.layout_cast(row_max, ROW), row_sum

    def _finish(self, block, acc, row_max, row_sum):
        empty = row_sum == 0
        safe = jnp.where(empty, 1.0, row_sum)
        lse = jnp.where(empty, -jnp.inf, (row_max + jnp.log2(safe)) * (1 / LOG2E))
        self.lse_ref.at[block.head, block.index, pl.ds(self.wg * ROWS, ROWS)][...] = lse
        self._write(block, softmax.rescaled(acc, 1.0 / safe))

    def _give_back_queries(self):
        if not self.launch.separate_out:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(self.buffers["q_out"])

    def _stage(self, block, done, tile):
        return self.keys.stage(done + tile - block.begin)

    def _first(self, block, done, tile, carry):
        """The first tile of keys, up to its weights."""
        acc, _, row_max, row_sum = carry
        stage = self._stage(block, done, tile)
        self.keys.consumer_wait(stage)
        _, exponents, row_max, row_sum = self._weigh(
            block, tile, stage, self._scores(stage), row_max, row_sum, masked=True
        )
        return (acc, *self._rest_of_weights(exponents, row_max, row_sum))

    def _scores(self, stage):
        return scores_of(self.buffers["q_sm"].at[self.wg], self.buffers["k_sm"].at[stage], self.launch.keys)

    def _step(self, block, done, tile, carry, *, masked):
        """A tile of keys up to its weights, and the values of the tile before, which are multiplied beside its softmax."""
        acc, weights, row_max, row_sum = carry
        stage, before = self._stage(block, done, tile), self._stage(block, done, tile - 1)
        weigh = functools.partial(self._weigh, block, tile, stage, row_max=row_max, row_sum=row_sum, masked=masked)
        values = self.buffers["v_sm"].at[before]
        self.keys.consumer_wait(stage)

        def multiply(scores, sums):
            scores.begin(self.buffers["q_sm"].at[self.wg], self.buffers["k_sm"].at[stage].transpose((1, 0)))
            for piece, rows in self._pieces(weights, values):
                sums.begin(piece, rows)
            found = weigh(lax.optimization_barrier(scores.read(later=len(weights))))
            return (sums.read(), *found)

        found = side_by_side(multiply, ((ROWS, self.launch.keys), acc))
        self.values.consumer_release(before)
        # Registers that a product reads must not be written while one is on its way: the assembler would then let none be.
        acc, alpha, exponents, row_max, row_sum = lax.optimization_barrier(found)
        acc = softmax.rescaled(acc, alpha)
        return (acc, *self._rest_of_weights(exponents, row_max, row_sum))

    def _last(self, block, done, tile, carry):
        """The values of the last tile."""
        acc, weights, row_max, row_sum = carry
        stage = self._stage(block, done, tile)
        if self.launch.separate_out:
            plgpu.barrier_arrive(self.buffers["q_out"])
        acc = self._add_values(acc, weights, self.buffers["v_sm"].at[stage])
        self.values.consumer_release(stage)
        return acc, weights, row_max, row_sum

    def _add_values(self, acc, weights, values):
        """`acc + weights @ values` with the weights and the sum in registers."""

        def multiply(sums):
            for piece, rows in self._pieces(weights, values):
                sums.begin(piece, rows)

        return add_products(acc, multiply)

    def _pieces(self, weights, values):
        """Weights with the values that they multiply."""
        return [(piece, values.at[pl.ds(number * _PIECE, _PIECE)]) for number, piece in enumerate(weights)]

    def _weigh(self, block, tile, stage, scores, row_max, row_sum, *, masked):
        """A tile's first weights and the exponents of its others, with the factor of what came before, the new maximum and a sum.

        Its values are there then. What is left of the exponentials is for the time after the product that is on its way: the
        multiplications of its sums fit between them.
        """
        self.keys.consumer_release(stage)
        exponents, alpha, row_max = self._softmax(block, tile, scores, row_max, masked)
        first, *others = (
            lax.slice(exponents, (0, at), (ROWS, at + _PIECE)) for at in range(0, self.launch.keys, _PIECE)
        )
        first = jnp.exp2(first)
        row_sum = softmax.rescaled(row_sum, alpha) + partial_reduce(jnp.add, first)
        # The assembler moves no exponential over a loop, and a wait for a barrier is one; over a wait for a product it would.
        found = lax.optimization_barrier((alpha, [first, *others], row_max, row_sum))
        self.values.consumer_wait(stage)
        return found

    def _rest_of_weights(self, exponents, row_max, row_sum):
        """Rest of the results of `_weigh`: all weights as the values' dtype, the maximum, and the sum of all."""
        first, *others = exponents
        others = [jnp.exp2(other) for other in others]
        row_sum = sum((partial_reduce(jnp.add, other) for other in others), row_sum)
        return [piece.astype(self.buffers["v_sm"].dtype) for piece in (first, *others)], row_max, row_sum

    def _softmax(self, block, tile, scores, row_max, masked):
        """Exponents of a tile's keys, the factor of what came before, and the new maximum, in base 2."""
        launch = self.launch
        scale_log2 = launch.scale * LOG2E
        if launch.soft_cap is not None:
            scores, scale_log2 = (
                softmax.precise_tanh(scores * (launch.scale / launch.soft_cap)),
                launch.soft_cap * LOG2E,
            )
        if self.slope is not None:
            scores, scale_log2 = scores * scale_log2 + self._bias(block, tile) * self.slope, 1.0
        if masked:
            scores = jnp.where(self._mask(block, tile), scores, -jnp.inf)
        new_max = jnp.maximum(row_max, partial_reduce(jnp.maximum, scores).max(axis=1) * scale_log2)
        offset = softmax.finite(new_max) if masked else new_max
        return softmax.exponents(scores, scale_log2, offset), jnp.exp2(row_max - offset), new_max

    def _positions(self, block):
        rows = plgpu.layout_cast(lax.iota(jnp.int32, ROWS), ROW)
        return rows + (block.position + self.wg * ROWS)

    def _mask(self, block, tile):
        launch, (keys, shape) = self.launch, places(self.launch.keys, ROWS)
        bounded = launch.causal or launch.window != (None, None)
        low, high = block.limits(self._positions(block) if bounded else block.position)
        mask = keys < spread(high - tile * launch.keys, shape)
        if launch.window[0] is not None or not launch.page_size:
            mask &= keys >= spread(low - tile * launch.keys, shape)
        return mask

    def _bias(self, block, tile):
        """Factor of ALiBi's slope."""
        keys, shape = places(self.launch.keys, ROWS)
        ahead = keys - spread(self._positions(block) + block.shift - tile * self.launch.keys, shape)
        if self.launch.alibi_sqrt:
            return jnp.sqrt(jnp.maximum(-ahead, 0).astype(jnp.float32)) * -1.0
        return ahead.astype(jnp.float32)

    def _write(self, block, out):
        """Writes the own rows of this warpgroup and nothing else: the ones around them are other sequences'."""
        first = block.first_row + self.wg * ROWS
        begin, end = (jnp.clip(row - self.wg * ROWS, 0, ROWS) for row in (block.own_begin, block.own_end))
        whole = end - begin == ROWS
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(whole)
        def _():
            rows = self.buffers["o_sm"].at[self.wg]
            rows[...] = out.astype(rows.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(rows, self.out_ref.at[pl.ds(first, ROWS), block.head])

        @pl.when(jnp.logical_not(whole))
        def _():
            rows = self.buffers["tail_sm"].at[self.wg]
            rows[...] = out.astype(rows.dtype)
            plgpu.commit_smem()

            def copy(count, row):
                target = self.out_ref.at[pl.ds(first + row, count), block.head]
                plgpu.copy_smem_to_gmem(rows.at[pl.ds(row, count)], target)

            eights = jnp.minimum(lax.div(begin + 7, jnp.int32(8)) * 8, end)
            after = jnp.maximum(lax.div(end, jnp.int32(8)) * 8, eights)
            pl.loop(begin, eights)(functools.partial(copy, 1))
            pl.loop(lax.div(eights, jnp.int32(8)), lax.div(after, jnp.int32(8)))(lambda eight: copy(8, eight * 8))
            pl.loop(after, end)(functools.partial(copy, 1))
