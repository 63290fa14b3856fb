"""The Hopper kernel: one CTA attends with one block of query rows to one part of one sequence's pages.

A query row is one (token, head of the group) pair: row `t * group + g` of a KV head, 64 rows to a warpgroup, so that every
key and value is read once for all query tokens. Scores stay in registers; the softmax is online, in base 2, in float32.
"""

# Pallas declares what it inlines with the context that it passes itself.
# pyright: reportCallIssue=false

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.attention.paged.launch import ROWS, Launch
from dflash_kernels.attention.paged.mosaic_gpu_feed import Fed
from dflash_kernels.attention.paged.mosaic_gpu_ops import (
    ask_for_queries,
    merge_cluster,
    put_queries,
    scratch,
    store_part,
    store_part_by_lanes,
)
from dflash_kernels.mosaic_gpu.mask import alibi_bias, spread
from dflash_kernels.mosaic_gpu.softmax import LOG2E, precise_tanh
from dflash_kernels.mosaic_gpu.wgmma import add_values, scores_of

_WGMMA = plgpu.Layout.WGMMA
_ROW = plgpu.Layout.WGMMA.reduce(1)


def attention(
    launch: Launch, q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, slopes: jax.Array | None, table: jax.Array,
    seq_lens: jax.Array, q_lens: jax.Array, interpret: Any = None, block: Any = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Runs the kernel.

    Args:
      launch: shapes and schedule; block: one CTA's work, `Block` or a class of its kind.
      q: `[B, T, K, G, H]`.
      k_pages, v_pages: `[P, K, p, H]`. Rows at or past `seq_lens` may hold anything.
      slopes: float32 `[K, row_blocks * block_rows]` ALiBi slope of each row, or None.
      table: `[B, W]` int32. Entries past a sequence's last page are never read.
      seq_lens, q_lens: `[B]` int32.

    Returns:
      Output `[B, T, K, G, H]` where `launch.direct` or `launch.together`, else float32 partial outputs `[B, K, splits, rows, H]`,
      each normalised, whose rows past the live ones and whose empty splits are not written; natural lse `[B, K, splits, rows]`
      float32, -inf where empty.
    """
    b, rows = q.shape[0], launch.row_blocks * launch.block_rows
    # Rows of a part, which leaves in tiles of 8.
    written = rows if launch.row_blocks > 1 else -(-launch.tokens * launch.group // 8) * 8
    if launch.direct or launch.together:
        out = jax.ShapeDtypeStruct((b, launch.tokens, launch.kv_heads, launch.group, launch.head_dim), q.dtype)
    else:
        out = jax.ShapeDtypeStruct((b, launch.kv_heads, launch.splits, written, launch.head_dim), jnp.float32)

    arrays = {"q": q, "k": k_pages, "v": v_pages, "slopes": slopes}
    arrays |= {"table": table, "seq_lens": seq_lens, "q_lens": q_lens}
    given = {name: array for name, array in arrays.items() if array is not None}

    block = block or Block

    def body(*refs, **buffers):
        block(launch, dict(zip([*given, "o", "lse"], refs, strict=True)), buffers, interpret).run()

    return plgpu.kernel(
        body,
        out_type=(out, jax.ShapeDtypeStruct((b, launch.kv_heads, launch.splits, rows), jnp.float32)),
        scratch_types=block.scratch(launch, q.dtype, interpret),
        **grid(launch, b),
        num_threads=launch.warpgroups, thread_name="wg",
        # Row reductions of a matrix tile stay within a warp: no scratch, which two CTAs on a multiprocessor have no room for.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )(*given.values())  # fmt: skip


def grid(launch: Launch, b: int) -> dict[str, Any]:
    """A CTA for each part and block of rows, by name."""
    heads = launch.row_blocks * launch.kv_heads
    if launch.together:
        cluster = {"cluster": (launch.splits,), "cluster_names": ("split",)}
        return {"grid": (heads, b), "grid_names": ("heads", "b"), **cluster}
    return {"grid": (b, launch.splits, heads), "grid_names": ("b", "split", "heads")}


class Block(Fed):
    """One CTA's work."""

    scratch = staticmethod(scratch)

    def run(self):
        pages = self.first_reads()

        @pl.when(self.begin < self.end)
        def _():
            self._start(pages)
            rows = plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), _ROW)
            total = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), _ROW)
            acc = plgpu.layout_cast(jnp.zeros((ROWS, self.launch.width), jnp.float32), _WGMMA)
            self._finish(*self.walk(self._step, (acc, rows, total)))

        @pl.when(self.begin >= self.end)
        def _():
            self._nothing()

        if self.launch.together or self.launch.items:
            self._settle()

    def _settle(self):
        """Puts the parts in shared memory together."""
        buffers, rows = self.buffers, self.launch.tokens * self.launch.group
        target = self.refs["o"].at[self.b].at[:, self.head]
        merge_cluster(buffers["o_sm"].at[0], buffers["lse_sm"], target, rows, self.launch.splits)

    def _start(self, pages):
        """The first tiles of the ring and the queries. A row's garbage never leaves that row."""
        pl.when(self.wg == 0)(functools.partial(self.fill_ring, ("k", "v"), pages))
        put_queries(self.queries, self._queries(), self.buffers["q_sm"].at[self.wg], self.first_row, self.interpret)

    def first_reads(self):
        """Pages of the ring's first tiles, with queries on their way to registers."""
        self.hold_entries()
        self.queries: list[Any] = self._ask_for_queries()
        return self.ring_pages()

    def _ask_for_queries(self):
        launch = self.launch
        return ask_for_queries(
            self._queries(), self.first_row, launch.tokens * launch.group, launch.width, self.interpret
        )

    def _queries(self):
        return self.refs["q"].at[self.b].at[:, self.head]

    def _given_rows(self):
        """Rows that each warpgroup has in a part of the output."""
        if self.launch.row_blocks > 1:
            return [ROWS] * self.launch.warpgroups
        return [min(self.refs["o"].shape[3] - wg * ROWS, ROWS) for wg in range(self.launch.warpgroups)]

    def _step(self, tile, carry, *, masked):
        """One tile of keys: scores, online softmax, values."""
        launch, (acc, top, total) = self.launch, carry
        coming = self.pages(self.next_in_stage(tile))
        scores = self._scores(self.tile("k", tile))
        if not self.ahead:
            self.refill("k", tile, coming)
        if launch.soft_cap is None:
            unit = launch.scale * LOG2E
        else:
            scores, unit = precise_tanh(scores * (launch.scale / launch.soft_cap)), launch.soft_cap * LOG2E
        if "slopes" in self.refs:
            scores, unit = scores * unit + self._alibi(tile), 1.0
        if masked:
            scores = jnp.where(self._mask(tile), scores, -jnp.inf)
        new_top = jnp.maximum(top, scores.max(axis=1) * unit)
        # A row that has seen nothing yet keeps -inf as its maximum; 0 in its place makes every weight 0 instead of NaN.
        base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        kept = jnp.exp2(top - base)
        weights = jnp.exp2(scores * unit - lax.broadcast_in_dim(base, scores.shape, [0]))
        total = total * kept + weights.sum(axis=1)
        acc = acc * lax.broadcast_in_dim(kept, acc.shape, [0])
        weights = weights.astype(self.buffers["v_sm"].dtype)
        values = self.tile("v", tile)
        if masked:
            self._clear_unused(values, tile)
        staged = self.buffers["p_sm"].at[self.wg] if "p_sm" in self.buffers else None
        acc = add_values(acc, weights, values, staged)
        if self.ahead:
            self.refill_both(tile, coming)
        else:
            self.refill("v", tile, coming)
        return acc, new_top, total

    def _scores(self, keys):
        return scores_of(self.buffers["q_sm"].at[self.wg], keys, self.launch.keys)

    def _row_tokens(self):
        """Query token of each row of this warpgroup."""
        rows = plgpu.layout_cast(lax.iota(jnp.int32, ROWS), _ROW)
        return lax.div(rows + self.first_row, jnp.int32(self.launch.group))

    def _alibi(self, tile):
        """ALiBi's share of a tile's scores, as exponents of two."""
        shape = (ROWS, self.launch.keys)
        slopes = plgpu.load(self.refs["slopes"].at[self.head, pl.ds(self.first_row, ROWS)], optimized=False)
        slopes = plgpu.layout_cast(slopes, _ROW)
        position = self.seq_len - self.q_len + self._row_tokens()
        keys = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, shape, 1), _WGMMA)
        share = alibi_bias(keys - spread(position - tile * self.launch.keys, shape), self.launch.alibi_sqrt)
        return share * spread(slopes * LOG2E, shape)

    def _mask(self, tile):
        launch, shape = self.launch, (ROWS, self.launch.keys)
        bounded = launch.causal or launch.window != (None, None)
        low, high = self.limits(self._row_tokens()) if bounded else (0, self.kv_len)
        keys = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, shape, 1), _WGMMA)
        mask = keys < spread(high - tile * self.launch.keys, shape)
        if self.launch.window[0] is not None:
            mask &= keys >= spread(low - tile * self.launch.keys, shape)
        return mask

    def _clear_unused(self, values, tile):
        """Zeroes the value rows past the sequence: their weight is 0, and 0 * NaN is NaN.

        With two warpgroups both do it, without waiting for each other: they write the same bits.
        """
        live = self.kv_len - tile * self.launch.keys

        @pl.when(live < self.launch.keys)
        def _():
            rows = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, values.shape, 0), _WGMMA)
            held = plgpu.layout_cast(values[...], _WGMMA)
            values[...] = jnp.where(rows < live, held, jnp.zeros_like(held))
            plgpu.commit_smem()

    def _finish(self, acc, top, total):
        """Normalises and writes this warpgroup's rows."""
        live = (self._row_tokens() < self.q_len) & (total != 0)
        inverse = jnp.where(live, 1.0 / jnp.where(live, total, 1.0), 0.0)
        lse = jnp.where(live, (top + jnp.log2(jnp.where(live, total, 1.0))) * (1 / LOG2E), -jnp.inf)
        factor = lax.broadcast_in_dim(inverse, acc.shape, [0])
        # Not a product alone: rows past the live ones may hold NaN.
        self._write(jnp.where(factor != 0, acc * factor, 0.0)[:, : self.launch.head_dim], lse)

    def _nothing(self):
        lse = plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), _ROW)
        zeros = plgpu.layout_cast(jnp.zeros((ROWS, self.launch.head_dim), jnp.float32), _WGMMA)
        self._write(zeros if self.launch.direct else None, lse)

    def _write(self, out, lse):
        launch, o_sm = self.launch, self.buffers.get("o_sm")
        if "lse" in self.refs:
            self._lse_row().at[pl.ds(self.first_row, ROWS)][...] = lse
        if launch.settles:
            if launch.together:
                self.buffers["lse_sm"][...] = lse
            if out is not None:
                o_sm.at[self.wg][...] = out
            return
        if out is None:
            return
        if not launch.direct and self.interpret is None:
            store = store_part_by_lanes if launch.by_lanes else store_part
            store(out, self.refs["o"].at[self.b, self.head, self.split], self.first_row)
            return
        o_sm.at[self.wg][...] = out.astype(o_sm.dtype)
        plgpu.commit_smem()
        if launch.direct:
            self._write_tokens(o_sm.at[self.wg])
        else:
            for wg, rows in enumerate(self._given_rows()):

                @pl.when(self.wg == wg)
                def _(wg=wg, rows=rows):
                    target = self.refs["o"].at[self.b, self.head, self.split, pl.ds(self.first_row, rows)]
                    plgpu.copy_smem_to_gmem(o_sm.at[wg, pl.ds(0, rows)], target)

        plgpu.wait_smem_to_gmem(0)

    def _lse_row(self):
        return self.refs["lse"].at[self.b, self.head, self.split]

    def store(self, column, out):
        """Columns of the output from `column` on, from registers."""
        from dflash_kernels.attention.paged import mosaic_gpu_lanes as lanes

        target, rows = self.refs["o"].at[self.b].at[:, self.head], self.launch.tokens * self.launch.group

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _WGMMA, plgpu.Layout.WG_SPLAT(())))
        def store(_ctx, target, out, column):
            lanes.store_rows(target, out, column, rows)

        store(target, out.astype(self.refs["o"].dtype), column)

    def _write_tokens(self, rows):
        """The output itself, one token's group of heads after the other. Tiles hold whole tokens, or there is only one tile."""
        group = self.launch.group
        first = lax.div(self.first_row, jnp.int32(group))

        @pl.loop(0, jnp.minimum(self.launch.tokens - first, ROWS // group))
        def _(token):
            target = self.refs["o"].at[self.b, first + token, self.head]
            plgpu.copy_smem_to_gmem(rows.at[pl.ds(token * group, group)], target)
