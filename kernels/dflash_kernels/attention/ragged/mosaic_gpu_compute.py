"""The warpgroups of the Hopper kernel that compute: 64 query rows each over the tiles of keys and values that are copied in.

Scores, weights and sums stay in registers; the softmax is online, in base 2, in float32.

A warpgroup starts the scores of a tile and the values of the tile before together, has the softmax of the scores while the values
are multiplied (FlashAttention-3, arXiv 2407.08608, section 3.2), and waits for them halfway through its exponentials, so that the
multiplications of the sums fill the other half.

What bounds it, on an H200 that was kept busy, which its 690 W hold at 1.65 to 1.7 GHz, all programs in turns in one process,
TFLOP/s for two prompts of 8,192 tokens, 16 heads of 128, bfloat16: 613 without and 580 with a causal mask, where one product at a
time with warpgroups that take turns made 558 and 526. Without any softmax it was 755. A sample of where a warpgroup is, before
maxima had four chains and exponentials two halves: of 2,720 cycles for a tile of 128 keys 605 hand over its 16 matrix
instructions, 125 wait for scores, none for values, and the softmax takes the rest; the tensor cores were in use for 75 of 100.

Tried there and not kept: turns of the two warpgroups (578 for 596), queries in registers (612 and 560), three warpgroups of 64
rows (2.92 million cycles for 2.74), tiles of 192 keys (557 for 568, when products came one at a time).
"""

# Pallas declares ACC less public than it documents it.
# pyright: reportPrivateImportUsage=false

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.attention.ragged.launch import ROWS, Launch
from dflash_kernels.attention.ragged.mosaic_gpu_block import Block
from dflash_kernels.mosaic_gpu.mask import spread
from dflash_kernels.mosaic_gpu.softmax import FOLDED, LOG2E, partial_reduce, precise_tanh

_WGMMA = plgpu.Layout.WGMMA
_ROW = plgpu.Layout.WGMMA.reduce(1)
_PIECE = 64  # keys whose weights and values a product takes at least


class Compute:
    """One of the two warpgroups."""

    def __init__(self, launch: Launch, wg, sinks_ref, slopes_ref, out_ref, lse_ref, buffers):
        self.launch, self.wg, self.buffers = launch, wg, buffers
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
        acc, _, top, total = lax.fori_loop(last, block.end, functools.partial(self._last, block, done), carry)
        self._finish(block, acc, top, total.sum(axis=1))
        pl.when(block.tiles > 0)(self._give_back_queries)

    def _nothing(self, block):
        """Before any tile: sums, weights not yet multiplied, maximum, and the sum of weights, each thread's own part of it."""
        launch = self.launch
        top, total = jnp.full((ROWS,), -jnp.inf, jnp.float32), jnp.zeros((ROWS, FOLDED), jnp.float32)
        if self.sinks_ref is not None:
            # A sink is a key that everyone sees, whose value is 0.
            top, total = jnp.broadcast_to(self.sinks_ref[block.head] * LOG2E, (ROWS,)), jnp.full_like(total, 1 / FOLDED)
        acc = jnp.zeros((ROWS, launch.value_dim), jnp.float32)
        piece = jnp.zeros((ROWS, _PIECE), self.buffers["v_sm"].dtype)
        acc, piece, total = (plgpu.layout_cast(array, _WGMMA) for array in (acc, piece, total))
        return acc, [piece] * (launch.keys // _PIECE), plgpu.layout_cast(top, _ROW), total

    def _finish(self, block, acc, top, total):
        empty = total == 0
        safe = jnp.where(empty, 1.0, total)
        lse = jnp.where(empty, -jnp.inf, (top + jnp.log2(safe)) * (1 / LOG2E))
        self.lse_ref.at[block.head, block.index, pl.ds(self.wg * ROWS, ROWS)][...] = lse
        self._write(block, acc * lax.broadcast_in_dim(1.0 / safe, acc.shape, [0]))

    def _give_back_queries(self):
        if not self.launch.separate_out:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(self.buffers["q_out"])

    def _slot(self, block, done, tile):
        return lax.rem(done + tile - block.begin, jnp.int32(self.launch.stages))

    def _multiply_keys(self, scores, slot):
        plgpu.wgmma(scores, self.buffers["q_sm"].at[self.wg], self.buffers["k_sm"].at[slot].transpose((1, 0)))

    def _first(self, block, done, tile, carry):
        """The first tile of keys, up to its weights."""
        acc, _, top, total = carry
        slot = self._slot(block, done, tile)
        plgpu.barrier_wait(self.buffers["k_in"].at[slot])
        _, exponents, top, total = self._weigh(block, tile, slot, self._scores(slot), top, total, masked=True)
        return (acc, *self._rest_of_weights(exponents, top, total))

    def _scores(self, slot):
        def multiply(scores):
            self._multiply_keys(scores, slot)
            return scores[...]

        return pl.run_scoped(multiply, plgpu.ACC((ROWS, self.launch.keys), jnp.float32))

    def _step(self, block, done, tile, carry, *, masked):
        """A tile of keys up to its weights, and the values of the tile before, which are multiplied beside its softmax."""
        acc, weights, top, total = carry
        slot, before = self._slot(block, done, tile), self._slot(block, done, tile - 1)
        weigh = functools.partial(self._weigh, block, tile, slot, top=top, total=total, masked=masked)
        values = self.buffers["v_sm"].at[before]
        plgpu.barrier_wait(self.buffers["k_in"].at[slot])

        def multiply(scores, sums):
            sums[...] = acc
            self._multiply_keys(scores, slot)
            for piece, rows in self._pieces(weights, values):
                plgpu.wgmma(sums, piece, rows)
            found = weigh(lax.optimization_barrier(plgpu.wgmma_accumulator_load(scores, wait_n=len(weights))))
            return (sums[...], *found)

        if "p_sm" not in self.buffers:
            shapes = ((ROWS, self.launch.keys), acc.shape)
            found = pl.run_scoped(multiply, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))
        else:
            found = (self._add_values(acc, weights, values), *weigh(self._scores(slot)))
        plgpu.barrier_arrive(self.buffers["v_out"].at[before])
        # Registers that a product reads must not be written while one is on its way: the assembler would then let none be.
        acc, kept, exponents, top, total = lax.optimization_barrier(found)
        acc = acc * lax.broadcast_in_dim(kept, acc.shape, [0])
        return (acc, *self._rest_of_weights(exponents, top, total))

    def _last(self, block, done, tile, carry):
        """The values of the last tile."""
        acc, weights, top, total = carry
        slot = self._slot(block, done, tile)
        if self.launch.separate_out:
            plgpu.barrier_arrive(self.buffers["q_out"])
        acc = self._add_values(acc, weights, self.buffers["v_sm"].at[slot])
        plgpu.barrier_arrive(self.buffers["v_out"].at[slot])
        return acc, weights, top, total

    def _add_values(self, acc, weights, values):
        """`acc + weights @ values` with the weights and the sum in registers.

        Pallas's interpreter has neither weights from registers nor an accumulator that starts with values: under it the weights
        go through shared memory, and the product is added afterwards.
        """
        if "p_sm" not in self.buffers:

            def multiply(sums):
                for piece, rows in self._pieces(weights, values):
                    plgpu.wgmma(sums, piece, rows)

            return pl.run_state(multiply)(plgpu.ACC.init(acc))
        staged = self.buffers["p_sm"].at[self.wg]
        for number, piece in enumerate(weights):
            staged.at[:, pl.ds(number * _PIECE, _PIECE)][...] = piece
        plgpu.commit_smem()

        def multiply_staged(product):
            plgpu.wgmma(product, staged, values)
            return product[...]

        return acc + pl.run_scoped(multiply_staged, plgpu.ACC(acc.shape, jnp.float32))

    def _pieces(self, weights, values):
        """Weights with the values that they multiply."""
        return [(piece, values.at[pl.ds(number * _PIECE, _PIECE)]) for number, piece in enumerate(weights)]

    def _weigh(self, block, tile, slot, scores, top, total, *, masked):
        """A tile's first weights and the exponents of its others, with the factor of what came before, the new maximum and a sum.

        Its values are there then. What is left of the exponentials is for the time after the product that is on its way: the
        multiplications of its sums fit between them.
        """
        plgpu.barrier_arrive(self.buffers["k_out"].at[slot])
        exponents, kept, top = self._softmax(block, tile, scores, top, masked)
        first, *others = (
            lax.slice(exponents, (0, at), (ROWS, at + _PIECE)) for at in range(0, self.launch.keys, _PIECE)
        )
        first = jnp.exp2(first)
        total = total * lax.broadcast_in_dim(kept, total.shape, [0]) + partial_reduce(jnp.add, first)
        # The assembler moves no exponential over a loop, and a wait for a barrier is one; over a wait for a product it would.
        found = lax.optimization_barrier((kept, [first, *others], top, total))
        plgpu.barrier_wait(self.buffers["v_in"].at[slot])
        return found

    def _rest_of_weights(self, exponents, top, total):
        """Of what `_weigh` found: all weights as the values' dtype, the maximum, and the sum of all."""
        first, *others = exponents
        others = [jnp.exp2(other) for other in others]
        total = sum((partial_reduce(jnp.add, other) for other in others), total)
        return [piece.astype(self.buffers["v_sm"].dtype) for piece in (first, *others)], top, total

    def _softmax(self, block, tile, scores, top, masked):
        """Exponents of a tile's keys, the factor of what came before, and the new maximum, in base 2."""
        launch = self.launch
        unit = launch.scale * LOG2E
        if launch.soft_cap is not None:
            scores, unit = precise_tanh(scores * (launch.scale / launch.soft_cap)), launch.soft_cap * LOG2E
        if self.slope is not None:
            scores, unit = scores * unit + self._bias(block, tile) * self.slope, 1.0
        if masked:
            scores = jnp.where(self._mask(block, tile), scores, -jnp.inf)
        new_top = jnp.maximum(top, partial_reduce(jnp.maximum, scores).max(axis=1) * unit)
        # A row that has seen nothing yet keeps -inf as its maximum; 0 in its place makes every weight 0 instead of NaN.
        base = jnp.where(new_top == -jnp.inf, 0.0, new_top) if masked else new_top
        return scores * unit - lax.broadcast_in_dim(base, scores.shape, [0]), jnp.exp2(top - base), new_top

    def _positions(self, block):
        rows = plgpu.layout_cast(lax.iota(jnp.int32, ROWS), _ROW)
        return rows + (block.position + self.wg * ROWS)

    def _keys(self):
        return plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (ROWS, self.launch.keys), 1), _WGMMA)

    def _mask(self, block, tile):
        launch, shape, keys = self.launch, (ROWS, self.launch.keys), self._keys()
        bounded = launch.causal or launch.window != (None, None)
        low, high = block.limits(self._positions(block) if bounded else block.position)
        mask = keys < spread(high - tile * launch.keys, shape)
        if launch.window[0] is not None or not launch.page_size:
            mask &= keys >= spread(low - tile * launch.keys, shape)
        return mask

    def _bias(self, block, tile):
        """What ALiBi's slope multiplies."""
        shape = (ROWS, self.launch.keys)
        ahead = self._keys() - spread(self._positions(block) + block.shift - tile * self.launch.keys, shape)
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
