"""The Hopper kernel for float8 rows under few queries: products turned round, so that a row is widened on its way to them only.

A CTA is one warpgroup, two to a multiprocessor. Scores are `[64 keys, 16 query rows]` and the output `[512, 16]`: the latents are
the first operand of both products, which may lie in registers, where bytes widen to float16. See the kernel for one-byte pages
of `paged_attention`, whose steps these are, for the order of columns and for the base that weights are taken from.
"""

# Pallas declares ACC less public than it documents it.
# pyright: reportPrivateImportUsage=false

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.attention.mla import mosaic_gpu_latents as latents
from dflash_kernels.attention.mla.launch import KEYS, NARROW_ROWS, RANK, ROTATED, STORED, Launch
from dflash_kernels.attention.paged import mosaic_gpu_narrow_ops as ops
from dflash_kernels.attention.paged.mosaic_gpu_part import Part
from dflash_kernels.mosaic_gpu.layouts import swizzled
from dflash_kernels.mosaic_gpu.softmax import LOG2E

# As there: what the highest score weighs when a base is raised, what weights may add up to, a base below every score.
RAISED_TO, LIMIT, _NOTHING_SEEN = 2**5, 2**15, -1e30
_STAGES = 2
_WIDTH = RANK + ROTATED
_THIRD, _QUARTER = _WIDTH // 3, RANK // 4
_MATRIX = plgpu.Layout.WGMMA
_COLUMN = plgpu.Layout.WGMMA.reduce(0)  # one value for each query row


def attention(
    launch: Launch, q: jax.Array, latent_pages: jax.Array, factor: jax.Array, table: jax.Array, seq_lens: jax.Array,
    q_lens: jax.Array, dtype: Any, interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Runs the kernel.

    Args:
      launch: shapes and schedule.
      q: `[B, 16, R + r]` float16, columns in the keys' order (`in_key_order`); the first `launch.tokens * launch.heads` rows count.
      latent_pages: `[P, 1, p, R + r]` float8_e4m3fn. Rows at or past `seq_lens` may hold anything.
      factor: float32 `[1]` that the output is multiplied with.
      table, seq_lens, q_lens: as for the other kernel.
      dtype: of the output.

    Returns:
      Output `[B, rows, R]` where `launch.direct`, else float32 partial outputs `[B, splits, rows, R]`, each normalised, whose empty
      splits are not written; natural lse `[B, splits, 1, 16]` float32, -inf where empty.
    """
    b, rows = q.shape[0], (launch.tokens, launch.heads)
    shape = (b, *rows, RANK) if launch.direct else (b, launch.splits, *rows, RANK)
    names = ("q", "k", "factor", "table", "seq_lens", "q_lens", "o", "lse")

    def body(*refs, **buffers):
        _Block(launch, dict(zip(names, refs, strict=True)), buffers, interpret).run()

    out, lse = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct(shape, dtype if launch.direct else jnp.float32),
            jax.ShapeDtypeStruct((b, launch.splits, 1, NARROW_ROWS), jnp.float32),
        ),
        scratch_types={
            "q_sm": plgpu.SMEM((NARROW_ROWS, _WIDTH), jnp.float16, transforms=swizzled(jnp.float16, _WIDTH)),
            "p_sm": plgpu.SMEM((2, KEYS, NARROW_ROWS), jnp.float16, transforms=swizzled(jnp.float16, NARROW_ROWS)),
            "k_sm": plgpu.SMEM((_STAGES, KEYS, _WIDTH), STORED, transforms=swizzled(STORED, _WIDTH)),
            "k_in": plgpu.Barrier(num_arrivals=launch.copies, num_barriers=_STAGES),
            "q_in": plgpu.Barrier(),
        },
        grid=(b, launch.splits, 1), grid_names=("b", "split", "heads"),
        num_threads=1, thread_name="wg",
        # Scratch for maxima and sums of query rows, across the warps.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=1024),
        interpret=interpret,
    )(q, latent_pages, factor, table, seq_lens, q_lens)  # fmt: skip
    return out.reshape(*out.shape[: -len(rows) - 1], math.prod(rows), RANK), lse


class _Launch:
    """What `Part` reads of a launch, for one key head and no window."""

    stages, keys, kv_heads, heads_at_once, window, items, once = _STAGES, KEYS, 1, 1, (None, None), 0, False
    block_rows = rows = NARROW_ROWS

    def __init__(self, launch: Launch):
        self.group, self.splits = launch.heads, launch.splits
        for name in ("tokens", "page_size", "table_width", "min_tiles", "causal", "copies", "direct", "scale"):
            setattr(self, name, getattr(launch, name))


class _Block(Part):
    """One CTA's work."""

    def __init__(self, launch, refs, buffers, interpret):
        super().__init__(_Launch(launch), refs, buffers)
        self.interpret, self.unit = interpret, launch.scale * LOG2E

    def run(self):
        @pl.when(self.begin < self.end)
        def _():
            plgpu.copy_gmem_to_smem(self.refs["q"].at[self.b], self.buffers["q_sm"], self.buffers["q_in"])
            self.fill_ring(("k",), self.ring_pages())
            quarter = plgpu.layout_cast(jnp.zeros((_QUARTER, NARROW_ROWS), jnp.float32), _MATRIX)
            total = plgpu.layout_cast(jnp.zeros((KEYS, NARROW_ROWS), jnp.float32), _MATRIX)
            base = plgpu.layout_cast(jnp.full((NARROW_ROWS,), _NOTHING_SEEN, jnp.float32), _COLUMN)
            plgpu.barrier_wait(self.buffers["q_in"])
            self._finish(*self.walk(self._step, (base, total, *[quarter] * 4)))

        @pl.when(self.begin >= self.end)
        def _():
            self._write_lse(plgpu.layout_cast(jnp.full((NARROW_ROWS,), -jnp.inf, jnp.float32), _COLUMN))
            if self.launch.direct:
                for quarter in range(4):
                    self._write(quarter, plgpu.layout_cast(jnp.zeros((_QUARTER, NARROW_ROWS), jnp.float32), _MATRIX))

    def _step(self, tile, carry, *, masked):
        """One tile of keys: scores, weights, values. The running sum of weights stays apart in every thread."""
        stage, (base, total, *sums) = self.stage(tile), carry
        following = tile + _STAGES
        coming = self.pages(following)
        shared, held = self.buffers["p_sm"].at[lax.rem(tile, jnp.int32(2))], self.buffers["k_sm"].at[stage]
        plgpu.barrier_wait(self.buffers["k_in"].at[stage])
        exponents = self._scores(held) * self.unit
        if masked:
            exponents = jnp.where(self._mask(tile), exponents, -jnp.inf)

        def raised(base, total, added, *sums):
            """Base so that the highest score so far weighs `RAISED_TO`, and everything that counts from it."""
            del added
            higher = jnp.maximum(base, exponents.max(axis=0) - math.log2(RAISED_TO))
            kept = jnp.exp2(base - higher)
            weights = jnp.exp2(exponents - self._spread(higher))
            ops.publish(weights, shared, LIMIT, self.interpret)
            sums = (quarter * lax.broadcast_in_dim(kept, quarter.shape, [1]) for quarter in sums)
            added = ops.sum_weights(weights, self.interpret)
            return higher, ops.add_sums(total * self._spread(kept), added, self.interpret), *sums

        def as_it_is(base, total, added, *sums):
            return base, ops.add_sums(total, added, self.interpret), *sums

        weights = jnp.exp2(exponents - self._spread(base))
        over = ops.publish(weights, shared, LIMIT, self.interpret)
        added = ops.sum_weights(weights, self.interpret)
        base, total, *sums = lax.cond(over, raised, as_it_is, base, total, added, *sums)

        def refill():
            # Everybody has read the values.
            plgpu.commit_smem()

            @pl.when(following < self.end)
            def _():
                self.fill("k", following, coming)

        return base, total, *self._add_values(sums, held, shared, masked, refill)

    def _scores(self, tile):
        queries = self.buffers["q_sm"]
        if self.interpret is not None:
            keys = latents.keys(tile, 0, _WIDTH, self.interpret)
            return jnp.dot(keys, queries[...].astype(jnp.float32).T, precision=lax.Precision.HIGHEST)

        # No more than two thirds of the columns have room in registers.
        def multiply(product):
            for third in range(3):
                if third == 2:
                    plgpu.wgmma_wait(1)
                keys = latents.keys(tile, third * _THIRD, _THIRD, None)
                plgpu.wgmma(product, keys, queries.at[:, pl.ds(third * _THIRD, _THIRD)].transpose((1, 0)))
            return product[...]

        return pl.run_scoped(multiply, plgpu.ACC((KEYS, NARROW_ROWS), jnp.float32))

    def _add_values(self, sums, tile, weights, masked, refill):
        def values(quarter):
            # Only where rows are unused can they hold NaN.
            return latents.values(tile, quarter * _QUARTER, _QUARTER, self.interpret, finite=masked)

        if self.interpret is not None:
            weights = weights[...].astype(jnp.float32)
            highest = lax.Precision.HIGHEST
            sums = [acc + jnp.dot(values(i), weights, precision=highest) for i, acc in enumerate(sums)]
            refill()
            return sums

        # A quarter widens while the one before is multiplied.
        def multiply(sums):
            for quarter, total in enumerate(sums):
                if quarter > 1:
                    plgpu.wgmma_wait(1)
                plgpu.wgmma(total, values(quarter), weights)
            refill()

        return pl.run_state(multiply)([plgpu.ACC.init(quarter) for quarter in sums])

    def _spread(self, of_rows):
        """One value for each query row over a tile of scores."""
        return lax.broadcast_in_dim(of_rows, (KEYS, NARROW_ROWS), [1])

    def _tokens(self):
        """Query token of each row."""
        rows = plgpu.layout_cast(lax.iota(jnp.int32, NARROW_ROWS), _COLUMN)
        return lax.div(rows, jnp.int32(self.launch.group))

    def _mask(self, tile):
        keys = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (KEYS, NARROW_ROWS), 0), _MATRIX)
        start = tile * KEYS
        if not self.launch.causal:
            return keys < self.kv_len - start
        return keys < self._spread(self.limits(self._tokens())[1] - start)

    def _finish(self, base, total, *sums):
        """Normalises and writes."""
        total = total.sum(axis=0)
        live = (self._tokens() < self.q_len) & (total != 0)
        counted = jnp.where(live, total, 1.0)
        self._write_lse(jnp.where(live, (base + jnp.log2(counted)) * (1 / LOG2E), -jnp.inf))
        factor = jnp.where(live, self.refs["factor"][0] / counted, 0.0)
        for quarter, acc in enumerate(sums):
            spread = lax.broadcast_in_dim(factor, acc.shape, [1])
            # Not a product alone: rows past the live ones may hold NaN.
            self._write(quarter, jnp.where(spread != 0, acc * spread, 0.0))

    def _write_lse(self, lse):
        self.refs["lse"].at[self.b, self.split, 0][...] = lse

    def _write(self, quarter, out):
        target = self.refs["o"].at[self.b] if self.launch.direct else self.refs["o"].at[self.b, self.split]
        columns = target.at[:, :, pl.ds(quarter * _QUARTER, _QUARTER)]
        ops.store(out, columns, jnp.int32(0), self.launch.tokens * self.launch.group, None, self.interpret)
