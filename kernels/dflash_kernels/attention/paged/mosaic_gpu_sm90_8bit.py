"""The Hopper kernel for pages of one byte an element: products turned round, so that what is stored narrow widens at most once.

A CTA is one warpgroup. Scores are `[64 keys, N query rows]` and the output `[H, N]`: the first operand of a matrix instruction may
lie in registers, where bytes widen, and only the second must be in shared memory, where queries and softmax weights are small.
Bytes widen to float16, for which the hardware has an instruction or two; queries are brought into its range by a power of two of
each row (`put_queries`), weights by the base that they are taken from. int8 keys need not widen: they multiply as they lie with
queries of two bytes, the upper ones as one set of rows and the lower ones as another, all in one unit: one of each row would be 30
of a tile's 440 instructions, 1.5 % of the time of 64 sequences with 4,096 keys and 16 queries.

The softmax's maximum is one for each query row, so it would have to be found across all warps for every tile. A base is kept
instead, and only raised when some weight grows past `LIMIT`. The barrier behind which weights are multiplied finds that out.

int8 values multiply as float16 without an exponent, 128 too large, and outputs are less 128 in the end. Weights are added up before
they are rounded, so they are off by up to 2^-12 of 128 more than with values that are less 128 in registers; those would take 32 of
a tile's 413 instructions, 3 % of the time of 64 sequences with 4,096 keys and 16 queries.

For float8 fewer instructions were no gain there: keys as they lie with queries of two float8 each (317 of 330, and sums of 14 bits)
took as long, and so did a base and a unit that the product of keys and queries already had (309, one matrix instruction more).

A tile's values multiply while the next tile's weights are made (FlashAttention-3's order within a warpgroup, arXiv:2407.08608
section 3.2), and two CTAs share a multiprocessor.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.attention.paged import mosaic_gpu_narrow_ops as ops
from dflash_kernels.attention.paged import mosaic_gpu_narrow_start as start
from dflash_kernels.attention.paged.launch import Launch
from dflash_kernels.attention.paged.mosaic_gpu_narrow_scores import COLUMN, MATRIX, Scored
from dflash_kernels.mosaic_gpu.layouts import swizzled
from dflash_kernels.mosaic_gpu.softmax import LOG2E

# Weight of the highest score when a base is raised, and what two weights may add up to until it is raised again: float16 ends at
# 2^16, and below 2^-14 it has fewer bits.
RAISED_TO = 2**5
LIMIT = 2**15
# A base that every score exceeds by more. Not -inf: less itself that is NaN.
_NOTHING_SEEN = -1e30
_WEIGHTS = 3  # tiles of weights, so that one barrier a tile is enough: the slowest warp may still multiply with the last but one


def scratch(launch: Launch, dtype: Any) -> dict[str, Any]:
    """Shared memory and barriers of one CTA."""
    ring = plgpu.SMEM(
        (launch.stages, launch.keys, launch.head_dim), dtype, transforms=swizzled(dtype, launch.head_dim)
    )  # fmt: skip
    rows, multiplied = start.query_rows(dtype, launch.rows)
    buffers: dict[str, Any] = {
        "q_sm": plgpu.SMEM((rows, launch.head_dim), multiplied, transforms=swizzled(multiplied, launch.head_dim)),
        "q_factor_sm": plgpu.SMEM((launch.rows,), jnp.float32),
        "p_sm": plgpu.SMEM((_WEIGHTS, launch.keys, launch.rows), jnp.float16, transforms=swizzled(jnp.float16, launch.rows)),
        "k_sm": ring, "v_sm": ring, "columns_sm": plgpu.SMEM((4, launch.rows), jnp.float32),
    }  # fmt: skip
    copies = 2 * launch.copies
    if dtype == jnp.int8:
        buffers["k_scale_sm"] = plgpu.SMEM((launch.stages, launch.keys), jnp.float32)
        copies += launch.copies
    # One for all of a tile: to wait for its keys and its values apart would take a twentieth of a step's instructions.
    buffers["tile_in"] = plgpu.Barrier(num_arrivals=copies, num_barriers=launch.stages)
    return buffers


def attention(
    launch: Launch, q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, k_scale: jax.Array, v_scale: jax.Array,
    slopes: jax.Array | None, table: jax.Array, seq_lens: jax.Array, q_lens: jax.Array, interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Runs the kernel.

    Args:
      launch: shapes and schedule.
      q: `[B, T, K, G, H]` bfloat16 or float16.
      k_pages, v_pages: `[P, K, p, H]` float8_e4m3fn or int8. Rows at or past `seq_lens` may hold anything.
      k_scale: float32 `[K]` with float8, `[P, K, p]` with int8.
      v_scale: float32 `[K]` with float8, `[K, H]` with int8.
      slopes: float32 `[K, row_blocks * rows]` ALiBi slope of each row, or None.
      table: `[B, W]` int32. Entries past a sequence's last page are never read.
      seq_lens, q_lens: `[B]` int32.

    Returns:
      Output `[B, T, K, G, H]` in q's dtype where `launch.direct`, else float32 partial outputs `[B, K, splits, T * G, H]`, each
      normalised, those of empty splits not written; natural lse `[B, K, splits, rows]` float32, -inf where empty.
    """
    b, rows = q.shape[0], launch.row_blocks * launch.rows
    if launch.direct:
        out = jax.ShapeDtypeStruct((b, launch.tokens, launch.kv_heads, launch.group, launch.head_dim), q.dtype)
    else:
        out = (b, launch.kv_heads, launch.splits, launch.tokens, launch.group, launch.head_dim)
        out = jax.ShapeDtypeStruct(out, jnp.float32)
    arrays = {"q": q, "k": k_pages, "v": v_pages, "k_scale": k_scale, "v_scale": v_scale, "slopes": slopes}
    arrays |= {"table": table, "seq_lens": seq_lens, "q_lens": q_lens}
    given = {name: array for name, array in arrays.items() if array is not None}

    def body(*refs, **buffers):
        _Block(launch, dict(zip([*given, "o", "lse"], refs, strict=True)), buffers, k_pages.dtype, interpret).run()

    out, lse = plgpu.kernel(
        body,
        out_type=(out, jax.ShapeDtypeStruct((b, launch.kv_heads, launch.splits, rows), jnp.float32)),
        scratch_types=scratch(launch, k_pages.dtype),
        grid=(b, launch.splits, launch.row_blocks * launch.kv_heads), grid_names=("b", "split", "heads"),
        num_threads=1, thread_name="wg",
        # All threads meet where weights are published, and nowhere else in a step: what they read of a tile before that may be
        # overwritten after it.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )(*given.values())  # fmt: skip
    return (out if launch.direct else out.reshape(b, launch.kv_heads, launch.splits, -1, launch.head_dim)), lse


class _Block(Scored):
    """One CTA's work."""

    def ring_pages(self):
        launch, tiles = self.launch, self.launch.page_size // self.launch.keys
        if tiles == 0:
            return super().ring_pages()
        entries = [lax.div(self.begin + stage, jnp.int32(tiles)) for stage in range(launch.stages)]
        row = self.refs["table"].at[self.b]
        return [[start.entry(row, jnp.minimum(entry, launch.table_width - 1), self.interpret)] for entry in entries]

    def run(self):
        launch, queries = self.launch, self.refs["q"].at[self.b].at[:, self.head]
        # Asked for before the first copies, behind which it would wait.
        pages, asked = self.ring_pages(), start.ask_for_queries(queries, self.first_row, launch.rows, self.interpret)

        @pl.when(self.begin < self.end)
        def _():
            ops.by_one_warp(self.begin < self.end, lambda: self.fill_ring(self.streams, pages), self.interpret)
            common = start.put_queries(
                asked, queries, self.buffers["q_sm"], self.buffers["q_factor_sm"], self.buffers["columns_sm"],
                self.first_row, jnp.minimum(self.q_len, launch.tokens) * launch.group, self.interpret,
            )  # fmt: skip
            unit = launch.scale * (1.0 if launch.soft_cap else LOG2E)
            self.unit = (
                common * unit if self.dtype == jnp.int8 else self._factors() * (self.refs["k_scale"][self.head] * unit)
            )
            acc = plgpu.layout_cast(jnp.zeros((launch.head_dim, launch.rows), jnp.float32), MATRIX)
            carry = (acc, *self._first(), jnp.int32(0), self.pages(self.begin + launch.stages))
            acc, base, total, place, _ = self.walk(self._step, carry, skip=1)
            acc = self._start_values(acc, self.end - 1, place, finite=True)
            self._finish(ops.finish(acc, self.interpret), base, total)

        @pl.when(self.begin >= self.end)
        def _():
            self._write_lse(plgpu.layout_cast(jnp.full((launch.rows,), -jnp.inf, jnp.float32), COLUMN))
            if launch.direct:
                self._write(plgpu.layout_cast(jnp.zeros((launch.head_dim, launch.rows), jnp.float32), MATRIX))

    def _factors(self):
        return plgpu.layout_cast(self.buffers["q_factor_sm"][...], COLUMN)

    def _start_scores(self, tile):
        return ops.start_scores(self.buffers["k_sm"].at[self.stage(tile)], self.buffers["q_sm"], self.interpret)

    def _start_values(self, acc, tile, place, *, finite: bool):
        """Adds a tile of values times the weights that were published for it. Only where rows are unused can they hold NaN."""
        values = ops.values(self.buffers["v_sm"].at[self.stage(tile)], self.interpret, finite=finite)
        return ops.start_values(acc, values, self.buffers["p_sm"].at[place], self.interpret)

    def _first(self):
        """Base and sum of weights after the first tile's scores."""
        plgpu.barrier_wait(self.buffers["tile_in"].at[0])
        nothing = plgpu.layout_cast(jnp.full((self.launch.rows,), _NOTHING_SEEN, jnp.float32), COLUMN)
        if self.dtype == jnp.int8:
            nothing += self._factors()  # NaN for a row that is not finite
        return self._raised(self.begin, nothing, 0, masked=True)

    def _raised(self, tile, base, place, *, masked: bool):
        """Base so that a tile's highest score, if it is the highest so far, weighs `RAISED_TO`; sums of its weights, published."""
        scores = ops.finish_scores(self._start_scores(tile), self.interpret)
        scores = self.exponents(scores, tile, masked)
        top = ops.over_keys(scores, base, self.buffers["columns_sm"], self.interpret, highest=True)
        base = jnp.maximum(base, top - math.log2(RAISED_TO))
        weights = jnp.exp2(scores - self.spread(base))
        ops.publish(weights, self.buffers["p_sm"].at[place], LIMIT, self.interpret)
        return base, ops.sum_weights(weights, self.interpret)

    def _step(self, tile, carry, *, masked):
        """One tile's scores and weights, made while the values of the tile before multiply; that tile's places are filled again.

        The running sum of weights stays apart in every thread.
        """
        acc, base, total, before, coming = carry
        place = jnp.where(before == _WEIGHTS - 1, 0, before + 1)
        plgpu.barrier_wait(self.buffers["tile_in"].at[self.stage(tile)])
        scores = self._start_scores(tile)
        following = tile - 1 + self.launch.stages
        later = self.pages(following + 1)
        # Keys of wide heads that wait in registers leave none for values.
        together = self.launch.head_dim <= 128 or self.dtype == jnp.int8
        if not together:
            scores = ops.finish_scores(scores, self.interpret)
        acc = self._start_values(acc, tile - 1, before, finite=False)
        if together:
            scores = ops.finish_scores(scores, self.interpret, later=1)
        scores = self.exponents(scores, tile, masked)
        weights = jnp.exp2(scores - self.spread(base))
        over = ops.publish(weights, self.buffers["p_sm"].at[place], LIMIT, self.interpret)
        sums = ops.sum_weights(weights, self.interpret)

        def refill():
            for stream in self.streams:
                self.fill(stream, following, coming)

        ops.by_one_warp(following < self.end, refill, self.interpret)
        acc = ops.finish(acc, self.interpret)

        def raised(acc, base, total, sums):
            """Everything counted from a new base. Scores are made again: there are no registers to keep them in."""
            del sums
            higher, sums = self._raised(tile, base, place, masked=masked)
            kept = jnp.exp2(base - higher)
            acc = acc * lax.broadcast_in_dim(kept, acc.shape, [1])
            return acc, higher, ops.add_sums(total * self.spread(kept), sums, self.interpret)

        def as_it_is(acc, base, total, sums):
            return acc, base, ops.add_sums(total, sums, self.interpret)

        return *lax.cond(over, raised, as_it_is, acc, base, total, sums), place, later

    def _finish(self, acc, base, total):
        """Normalises and writes."""
        total = ops.over_keys(total, base, self.buffers["columns_sm"], self.interpret, highest=False)
        live = (self.tokens() < self.q_len) & (total != 0)
        counted = jnp.where(live, total, 1.0)
        self._write_lse(jnp.where(live, (base + jnp.log2(counted)) * (1 / LOG2E), -jnp.inf))
        whole = self.dtype == jnp.int8
        scale = 1 / ops.SHRUNK if whole else self.refs["v_scale"][self.head]
        factor = lax.broadcast_in_dim(jnp.where(live, scale / counted, 0.0), acc.shape, [1])
        # Not a product alone: rows past the live ones may hold NaN.
        out = acc * factor - ops.LIFT if whole else acc * factor
        self._write(jnp.where(factor != 0, out, 0.0))

    def _write_lse(self, lse):
        self.refs["lse"].at[self.b, self.head, self.split, pl.ds(self.first_row, self.launch.rows)][...] = lse

    def _write(self, out):
        target = self.refs["o"].at[self.b]
        target = target.at[:, self.head] if self.launch.direct else target.at[self.head, self.split]
        factors = self.refs["v_scale"].at[self.head] if self.dtype == jnp.int8 else None
        ops.store(out, target, self.first_row, self.launch.tokens * self.launch.group, factors, self.interpret)
