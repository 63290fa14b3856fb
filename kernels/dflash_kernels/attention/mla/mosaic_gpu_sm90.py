"""The Hopper kernel: one CTA attends with 64 query rows to one part of one sequence's latent rows.

A query row is one (token, head) pair, row `t * heads + n`, so that a latent row is read once for all of them. The output of
64 rows, 64 x 512 in float32, fills half of a multiprocessor's registers: there is one CTA on each, of two warpgroups that own
256 of the value columns each. Tiles of 64 keys come in pairs. The scores and the softmax of a pair's first tile are the left
warpgroup's, those of the second the right one's; they hand each other the weights and the running maximum through shared
memory, and both add both tiles' values to their half. So no product is computed twice, and the softmax of one warpgroup runs
while the tensor cores work for the other.
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

from dflash_kernels.attention.mla.launch import HALF, KEYS, PARTS, RANK, ROWS, Launch
from dflash_kernels.attention.mla.mosaic_gpu_lanes import rescale
from dflash_kernels.attention.mla.mosaic_gpu_results import ROW, SUM, TOP, Results
from dflash_kernels.attention.mla.mosaic_gpu_tiles import opaque_zero, scratch, unpack_unions
from dflash_kernels.mosaic_gpu.softmax import LOG2E

_WGMMA = plgpu.Layout.WGMMA
_SLACK = 8.0  # powers of two that scores may exceed the base of their weights by


def attention(
    launch: Launch, q: jax.Array, latent_pages: jax.Array, table: jax.Array, seq_lens: jax.Array, q_lens: jax.Array,
    order: jax.Array, interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Runs the kernel.

    Args:
      launch: shapes and schedule.
      q: `[B, rows, R + r]`.
      latent_pages: `[P, 1, p, R + r]`. Rows at or past `seq_lens` may hold anything.
      table: `[B, W]` int32. Entries past a sequence's last page are never read.
      seq_lens, q_lens: `[B]` int32.
      order: `[B]` int32, the sequences in the order in which they begin, read where `launch.ordered`.

    Returns:
      Output `[B, rows, R]` where `launch.direct`, else partial outputs `[B, splits, rows, R]` in `PARTS`, whose empty splits are
      not written. Float32 `[B, splits, 1, rows or 64]` natural lse, -inf where empty; `[B, splits, 3, rows or 64]` of parts, whose
      last two are what the left and the right half of a part's columns have to be multiplied with.
    """
    b = q.shape[0]
    if launch.direct:
        out = jax.ShapeDtypeStruct((b, launch.rows, RANK), q.dtype)
    else:
        out = jax.ShapeDtypeStruct((b, launch.splits, launch.rows, RANK), PARTS)
    stats = (b, launch.splits, 1 if launch.direct else 3, max(launch.rows, ROWS))

    def body(q_ref, pages_ref, table_ref, seq_ref, live_ref, order_ref, o_ref, lse_ref, **buffers):
        unpack_unions(buffers)
        _Block(launch, q_ref, pages_ref, table_ref, seq_ref, live_ref, order_ref, o_ref, lse_ref, buffers).run()

    return plgpu.kernel(
        body,
        out_type=(out, jax.ShapeDtypeStruct(stats, jnp.float32)),
        scratch_types=scratch(launch, q.dtype, interpret),
        grid=(b, launch.splits, launch.row_tiles), grid_names=("b", "split", "rows"),
        num_threads=2, thread_name="wg",
        # Row reductions of a matrix tile stay within a warp: no scratch. A barrier at every access of shared memory, as is put in
        # by default, is several times what the hand-over between the warpgroups needs; `_together` stands where one is due.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )(q, latent_pages, table, seq_lens, q_lens, order)  # fmt: skip


class _Block(Results):
    """One CTA's arithmetic."""

    def run(self):
        self.unit = self.launch.scale * LOG2E
        for wg, pair, single in ((0, self._left_pair, self._left_single), (1, self._right_pair, self._right_single)):

            @pl.when((self.wg == wg) & (self.begin < self.end))
            def _(wg=wg, pair=pair, single=single):
                self._start(wg)
                self._widen(wg, 0)
                top = plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), ROW)
                total = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), ROW)
                acc = plgpu.layout_cast(jnp.zeros((ROWS, HALF), jnp.float32), _WGMMA)
                masked = functools.partial(pair, masked=True)
                coming = self._coming(0)
                self._ask(self.begin + 2 + wg, coming[wg])
                carry = (acc, top, total, *coming)
                carry = lax.fori_loop(0, self.whole_pairs, pair, carry)
                carry = lax.fori_loop(self.whole_pairs, self.pairs, masked, carry)
                acc, top, total = lax.fori_loop(self.pairs, self.pairs + self.odd, single, carry[:3])
                self._finish(wg, acc, top, total)

            @pl.when((self.wg == wg) & (self.begin >= self.end))
            def _(wg=wg):
                self._nothing(wg)

    def _coming(self, pair):
        """Page ids of the two tiles after a pair, read an iteration before they are needed."""
        return [self._pages(self.begin + 2 * pair + 2 + stage) for stage in range(2)]

    def _left_pair(self, pair, carry, *, masked=False):
        """The left warpgroup's part of two tiles."""
        memory, tile, coming = self.memory, self.begin + 2 * pair, carry[3:]
        later = self._coming(pair + 1)
        self.zero = opaque_zero(pair)
        acc, top, total = self._left_first(tile, carry[:3], masked, lambda: self._widen(0, 1))
        self._fill_half(0, 0, tile + 2, coming[0])
        self._ask(tile + 4, later[0])
        plgpu.barrier_wait(memory["weights_in"].at[1])
        new_top = self._stat(TOP + 1)
        kept = jnp.exp2(top - _finite(new_top))
        if masked:
            self._clear_unused_values(0, 1, tile + 1)
        acc = self._add_values(self._rescaled(acc, kept), self._second_weights, 0, 1, lambda: self._widen_next(0, tile))
        self._fill_half(0, 1, tile + 3, coming[1])
        return acc, new_top, total * kept, *later

    def _left_single(self, pair, carry):
        self.zero = opaque_zero(pair)
        return self._left_first(self.begin + 2 * pair, carry, True)

    def _left_first(self, tile, carry, masked, meanwhile=None):
        """Scores, with other work under them, and softmax of a first tile, handed to the other warpgroup, and its left values."""
        acc, top, total = carry
        memory = self.memory
        found, highest = self._scores(0, tile, masked, meanwhile)
        new_top, kept, wide = self._softmax(found, highest, top)
        weights = wide.astype(memory["q_sm"].dtype)
        # The rotated keys of this tile are used up: the weights take their place.
        self._together()
        memory["rotated"].at[0][...] = weights
        memory["stats"].at[TOP][...] = new_top
        plgpu.commit_smem()
        plgpu.barrier_arrive(memory["weights_in"].at[0])
        # After the other warpgroup has what it waits for.
        total = total * kept + wide.sum(axis=1)
        if masked:
            self._clear_unused_values(0, 0, tile)
        acc = self._rescaled(acc, kept)
        if "staged" in memory:
            # The interpreter has no weights from registers.
            memory["staged"][...] = weights
            plgpu.commit_smem()
            weights = memory["staged"]
        return self._add_values(acc, lambda: weights, 0, 0), new_top, total

    def _right_pair(self, pair, carry, *, masked=False):
        """The right warpgroup's part of two tiles: its softmax of the second runs under the product of the first."""
        memory, tile, coming = self.memory, self.begin + 2 * pair, carry[3:]
        later = self._coming(pair + 1)
        self.zero = opaque_zero(pair)
        self._widen(1, 1)
        # The maximum is found before the first tile's weights are there: the rest of the softmax is as long as the product.
        found, highest = self._scores(1, tile + 1, masked)
        self._fill_rotated(1, tile + 3, coming[1])
        acc, top, total = self._right_values(*carry[:3])
        if masked:
            self._clear_unused_values(1, 0, tile)

        def hand_over():
            new_top, _, weights = self._softmax(found, highest, top)
            memory["weights"][...] = weights.astype(memory["weights"].dtype)
            memory["stats"].at[TOP + 1][...] = new_top
            plgpu.commit_smem()
            plgpu.barrier_arrive(memory["weights_in"].at[1])
            memory["stats"].at[SUM][...] = weights.sum(axis=1)
            self._together()

        acc = self._add_values(acc, self._first_weights, 1, 0, hand_over)
        self._fill_half(1, 0, tile + 2, coming[0])
        self._fill_rotated(0, tile + 2, coming[0])
        self._ask(tile + 5, later[1])
        new_top = self._stat(TOP + 1)
        kept = jnp.exp2(top - _finite(new_top))
        if masked:
            self._clear_unused_values(1, 1, tile + 1)
        acc = self._add_values(self._rescaled(acc, kept), self._second_weights, 1, 1, lambda: self._widen_next(1, tile))
        self._fill_half(1, 1, tile + 3, coming[1])
        return acc, new_top, total * kept + self._stat(SUM), *later

    def _right_single(self, pair, carry):
        self.zero = opaque_zero(pair)
        acc, top, total = self._right_values(*carry)
        self._clear_unused_values(1, 0, self.begin + 2 * pair)
        return self._add_values(acc, self._first_weights, 1, 0), top, total

    def _right_values(self, acc, top, total):
        """The right warpgroup's sums under the maximum of the left one's tile, whose weights are there on return."""
        plgpu.barrier_wait(self.memory["weights_in"].at[0])
        new_top = self._stat(TOP)
        kept = jnp.exp2(top - _finite(new_top))
        return self._rescaled(acc, kept), new_top, total * kept

    def _multiply_keys(self, scores, stage):
        """Starts to add `[64, 576] @ [64, 576].T` in float32; each product starts as its part arrives."""
        memory, quantised = self.memory, self.launch.quantised
        if quantised:
            plgpu.barrier_wait(memory["widened"].at[stage])
        for half in range(2):
            if not quantised:
                plgpu.barrier_wait(memory["halves_in"].at[2 * stage + half])
            keys = memory["latents"].at[half, self.zero + stage].transpose((1, 0))
            plgpu.wgmma(scores, memory["q_sm"].at[self.zero + half], keys)
        if not quantised:
            plgpu.barrier_wait(memory["rotated_in"].at[stage])
        keys = memory["rotated"].at[self.zero + stage].transpose((1, 0))
        plgpu.wgmma(scores, memory["q_rotated"].at[self.zero], keys)

    def _scores(self, stage, tile, masked, meanwhile=None):
        """A tile's scores, with other work under them, and the highest of each row in powers of two."""

        def multiply(scores):
            self._multiply_keys(scores, stage)
            if meanwhile is not None:
                meanwhile()
            return scores[...]

        scores = pl.run_scoped(multiply, plgpu.ACC((ROWS, KEYS), jnp.float32))
        if masked:
            scores = jnp.where(self._mask(tile), scores, -jnp.inf)
        return scores, scores.max(axis=1) * self.unit

    def _softmax(self, scores, highest, top):
        """Base of the weights, `_SLACK` or less below the highest score; what is kept of sums from before; the weights."""
        # Nearly always the maximum stays, and what was added up under it with it.
        new_top = jnp.where(highest > top + _SLACK, highest, top)
        base = _finite(new_top)
        weights = jnp.exp2(scores * self.unit - lax.broadcast_in_dim(base, scores.shape, [0]))
        return new_top, jnp.exp2(top - base), weights

    def _add_values(self, acc, weights, half, stage, meanwhile=None) -> Any:
        """`acc + weights() @ values`, the values in shared memory, with other work under it."""

        # References are made inside: made outside, their constant indices would not lower.
        def multiply(total):
            plgpu.wgmma(total, weights(), self.memory["latents"].at[half, self.zero + stage])
            if meanwhile is not None:
                meanwhile()

        if "staged" not in self.memory:
            return pl.run_state(multiply)(plgpu.ACC.init(acc))

        # The interpreter has no accumulator that starts with values.
        def product(total):
            multiply(total)
            return total[...]

        return acc + pl.run_scoped(product, plgpu.ACC(acc.shape, jnp.float32))

    def _rescaled(self, acc, kept):
        if "staged" in self.memory:
            return acc * lax.broadcast_in_dim(kept, acc.shape, [0])
        return rescale(acc, kept)

    def _first_weights(self):
        return self.memory["rotated"].at[self.zero]

    def _second_weights(self):
        return self.memory["weights"]

    def _mask(self, tile):
        keys = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (ROWS, KEYS), 1), _WGMMA)
        if not self.launch.causal:
            return keys < self.kv_len - tile * KEYS
        limit = self._limit(self._row_tokens()) - tile * KEYS
        return keys < lax.broadcast_in_dim(limit, (ROWS, KEYS), [0])


def _finite(top):
    """A row that has seen nothing yet keeps -inf as its maximum; 0 in its place makes every weight 0 instead of NaN."""
    return jnp.where(top == -jnp.inf, 0.0, top)
