"""The Hopper kernel for float8 rows under few queries: transposed products, so that a row is widened on its way to them only.

A CTA is one warpgroup, two to a multiprocessor. Scores are `[64 keys, 16 query rows]` and the output `[512, 16]`: the latents are
the first operand of both products, which may lie in registers, where bytes widen to float16 (`mosaic_gpu/transposed.py` says in
which order of columns). Weights are taken from an offset that is raised only when two of a thread's weights add up to too much.
"""

# Pallas declares ACC less public than it documents it.
# pyright: reportPrivateImportUsage=false

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.attention.mla.launch import KEYS, NARROW_ROWS, RANK, ROTATED, STORED, Launch
from dflash_kernels.mosaic_gpu import convert, softmax, transposed
from dflash_kernels.mosaic_gpu.layouts import swizzled
from dflash_kernels.mosaic_gpu.mask import spread
from dflash_kernels.mosaic_gpu.paged_kv import PagedKV, Work, paged_kv
from dflash_kernels.mosaic_gpu.softmax import LOG2E
from dflash_kernels.mosaic_gpu.thread_op import COLUMN, MATRIX, kernel
from dflash_kernels.mosaic_gpu.wgmma import add_side_by_side, side_by_side

# What the highest score weighs when an offset is raised, what weights may add up to, an offset below every score.
RAISED_TO, LIMIT, _NOTHING_SEEN = 2**5, 2**15, -1e30
_STAGES = 2
_WIDTH = RANK + ROTATED
_THIRD, _QUARTER = _WIDTH // 3, RANK // 4


def attention(
    launch: Launch, q: jax.Array, latent_pages: jax.Array, factor: jax.Array, table: jax.Array, seq_lens: jax.Array,
    q_lens: jax.Array, dtype: Any, interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Runs the kernel.

    Args:
      launch: shapes and tiling.
      q: `[B, 16, R + r]` float16, columns in the keys' order (`in_key_order`); the first `launch.tokens * launch.heads` rows count.
      latent_pages: `[P, 1, p, R + r]` float8_e4m3fn. Rows at or past `seq_lens` may hold anything.
      factor: float32 `[1]` that the output is multiplied with.
      table, seq_lens, q_lens: as for the other kernel.
      dtype: of the output.

    Returns:
      Output `[B, rows, R]` where `launch.direct`, else float32 partial outputs `[B, splits, rows, R]`, each normalized, whose empty
      splits are not written; natural lse `[B, splits, 1, 16]` float32, -inf where empty.
    """
    b, rows = q.shape[0], (launch.tokens, launch.heads)
    shape = (b, *rows, RANK) if launch.direct else (b, launch.splits, *rows, RANK)
    names: tuple[str, ...] = ("q", "k", "factor", "table", "seq_lens", "q_lens", "o", "lse")

    def body(*refs, **buffers):
        named: dict[str, Any] = dict(zip(names, refs, strict=True))
        _attend(Cta(named, buffers, paged_kv(_Launch(launch), named, buffers), launch))

    out, lse = kernel(
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
    """Launch as `paged_kv` reads it, for one key head and no window."""

    stages, keys, kv_heads, window, items, evict_first = _STAGES, KEYS, 1, (None, None), 0, False
    block_rows = rows = NARROW_ROWS

    def __init__(self, launch: Launch):
        self.group, self.splits = launch.heads, launch.splits
        self.page_size, self.table_width, self.min_tiles = launch.page_size, launch.table_width, launch.min_tiles
        self.causal, self.copies = launch.causal, launch.copies


@dataclass(frozen=True)
class Cta:
    """State of a CTA's program: arrays and buffers by name, the producer of tiles, the launch."""

    refs: dict[str, Any]
    buffers: dict[str, Any]
    kv: PagedKV
    launch: Launch

    @property
    def work(self) -> Work:
        return self.kv.work

    @property
    def scale_log2(self) -> float:
        return self.launch.scale * LOG2E


def _attend(cta: Cta) -> None:
    """The program of a CTA."""
    work, kv = cta.work, cta.kv

    @pl.when(work.begin < work.end)
    def _():
        plgpu.copy_gmem_to_smem(cta.refs["q"].at[work.place.sequence], cta.buffers["q_sm"], cta.buffers["q_in"])
        kv.fill_ring(("k",), kv.ring_pages())
        quarter = plgpu.layout_cast(jnp.zeros((_QUARTER, NARROW_ROWS), jnp.float32), MATRIX)
        row_sum = plgpu.layout_cast(jnp.zeros((KEYS, NARROW_ROWS), jnp.float32), MATRIX)
        offset = plgpu.layout_cast(jnp.full((NARROW_ROWS,), _NOTHING_SEEN, jnp.float32), COLUMN)
        plgpu.barrier_wait(cta.buffers["q_in"])
        _epilogue(cta, *work.walk(functools.partial(_step, cta), (offset, row_sum, *[quarter] * 4)))

    @pl.when(work.begin >= work.end)
    def _():
        _write_lse(cta, plgpu.layout_cast(jnp.full((NARROW_ROWS,), -jnp.inf, jnp.float32), COLUMN))
        if cta.launch.direct:
            for quarter in range(4):
                _write(cta, quarter, plgpu.layout_cast(jnp.zeros((_QUARTER, NARROW_ROWS), jnp.float32), MATRIX))


# Mainloop


def _step(cta: Cta, tile: Any, carry: Any, *, masked: bool) -> tuple[Any, ...]:
    """One tile of keys: scores, weights, values. The running sum of weights stays apart in every thread."""
    kv, (offset, row_sum, *sums) = cta.kv, carry
    stage = kv.stage(tile)
    following = tile + _STAGES
    coming = kv.pages(following)
    shared, held = cta.buffers["p_sm"].at[lax.rem(tile, jnp.int32(2))], cta.buffers["k_sm"].at[stage]
    plgpu.barrier_wait(cta.buffers["k_in"].at[stage])
    exponents = _scores(cta, held) * cta.scale_log2
    if masked:
        exponents = jnp.where(_mask(cta, tile), exponents, -jnp.inf)

    def raised(offset, row_sum, added, *sums):
        """Offset so that the highest score so far weighs `RAISED_TO`; rescales accumulators and sum."""
        del added
        higher = jnp.maximum(offset, exponents.max(axis=0) - math.log2(RAISED_TO))
        alpha = jnp.exp2(offset - higher)
        weights = jnp.exp2(exponents - _per_row(higher))
        transposed.publish(weights, shared, limit=LIMIT)
        sums = (quarter * lax.broadcast_in_dim(alpha, quarter.shape, [1]) for quarter in sums)
        added = transposed.sum_weights(weights)
        return higher, transposed.add_sums(row_sum * _per_row(alpha), added), *sums

    def as_it_is(offset, row_sum, added, *sums):
        return offset, transposed.add_sums(row_sum, added), *sums

    weights = jnp.exp2(exponents - _per_row(offset))
    over = transposed.publish(weights, shared, limit=LIMIT)
    added = transposed.sum_weights(weights)
    offset, row_sum, *sums = lax.cond(over, raised, as_it_is, offset, row_sum, added, *sums)

    def refill():
        # Everybody has read the values.
        plgpu.commit_smem()

        @pl.when(following < cta.work.end)
        def _():
            kv.fill("k", following, coming)

    return offset, row_sum, *_add_values(sums, held, shared, masked, refill)


def _scores(cta: Cta, tile: Any) -> Any:
    queries = cta.buffers["q_sm"]

    # No more than two thirds of the columns have room in registers.
    def multiply(product):
        for third in range(3):
            if third == 2:
                plgpu.wgmma_wait(1)
            keys = convert.latent_keys(tile, first=third * _THIRD, count=_THIRD)
            product.begin(keys, queries.at[:, pl.ds(third * _THIRD, _THIRD)].transpose((1, 0)))
        return product.read()

    return side_by_side(multiply, ((KEYS, NARROW_ROWS),))


def _add_values(sums: list[Any], tile: Any, weights: Any, masked: bool, refill: Any) -> list[Any]:
    def values(quarter):
        # Only where rows are unused can they hold NaN.
        return convert.latent_values(tile, first=quarter * _QUARTER, count=_QUARTER, finite=masked)

    # A quarter widens while the one before is multiplied.
    def multiply(sums):
        for quarter, total in enumerate(sums):
            if quarter > 1:
                plgpu.wgmma_wait(1)
            total.begin(values(quarter), weights)
        refill()

    return add_side_by_side(multiply, sums)


def _per_row(of_rows: Any) -> Any:
    """One value for each query row over a tile of scores."""
    return spread(of_rows, (KEYS, NARROW_ROWS), 0)


def _tokens(cta: Cta) -> Any:
    """Query token of each row: there is one block of rows."""
    rows = plgpu.layout_cast(lax.iota(jnp.int32, NARROW_ROWS), COLUMN)
    return lax.div(rows, jnp.int32(cta.launch.heads))


def _mask(cta: Cta, tile: Any) -> Any:
    keys = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (KEYS, NARROW_ROWS), 0), MATRIX)
    start = tile * KEYS
    if not cta.launch.causal:
        return keys < cta.work.kv_len - start
    return keys < _per_row(cta.work.limits(_tokens(cta))[1] - start)


# Epilogue


def _epilogue(cta: Cta, offset: Any, row_sum: Any, *sums: Any) -> None:
    """Normalizes and writes."""
    row_sum = row_sum.sum(axis=0)
    live = (_tokens(cta) < cta.work.q_len) & (row_sum != 0)
    counted = softmax.counted(row_sum, live)
    _write_lse(cta, softmax.natural_lse(offset, counted, live))
    factor = jnp.where(live, cta.refs["factor"][0] / counted, 0.0)
    for quarter, acc in enumerate(sums):
        _write(cta, quarter, softmax.scaled(acc, factor, axis=1))


def _write_lse(cta: Cta, lse: Any) -> None:
    cta.refs["lse"].at[cta.work.place.sequence, cta.work.place.split, 0][...] = lse


def _write(cta: Cta, quarter: int, out: Any) -> None:
    place, o = cta.work.place, cta.refs["o"]
    target = o.at[place.sequence] if cta.launch.direct else o.at[place.sequence, place.split]
    columns = target.at[:, :, pl.ds(quarter * _QUARTER, _QUARTER)]
    transposed.store(out, columns, jnp.int32(0), None, rows=cta.launch.tokens * cta.launch.heads)
