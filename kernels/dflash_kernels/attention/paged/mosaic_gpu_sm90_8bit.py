"""The Hopper kernel for 8-bit pages: transposed products, so that what is stored in eight bits widens at most once.

A CTA is one warpgroup, two to a multiprocessor. Scores are `[64 keys, N query rows]` and the output `[H, N]`: the first operand
of a matrix instruction may lie in registers, where bytes widen, and only the second must be in shared memory, where queries and
softmax weights are small (`mosaic_gpu/transposed.py`). Bytes widen to float16, for which the hardware has an instruction or two;
queries are brought into its range by a power of two of each row (`queries.put_scaled`), weights by the offset that they are taken
from. int8 keys need not widen: they multiply as they lie with queries of two bytes, the hi ones as one set of rows and the lo
ones as another, under one scale for all rows.

The softmax's maximum is one for each query row, so it would have to be found across all warps for every tile. An offset is kept
instead, and only raised when some weight grows past `LIMIT`. The barrier behind which weights are multiplied finds that out.

With `launch.invariant` a row's bits depend on no other row and not on how many keys there are: splits take turns tile by tile, an
offset is raised where the row's own weights ask for it, and queries of int8 keys have a power of two for each row.

int8 values multiply as float16 without an exponent, 128 too large, and outputs are less 128 in the end. Weights are added up before
they are rounded, so they are off by up to 2^-12 of 128 more than with values that are less 128 in registers, which cost
instructions.

A tile's values multiply while the next tile's weights are made (FlashAttention-3's order within a warpgroup, arXiv:2407.08608
section 3.2). Measurements, and what was tried besides, are in docs/attention.md.
"""

# Pallas declares ACC and its transforms less public than it documents them.
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

from dflash_kernels.attention.paged.launch import Launch
from dflash_kernels.attention.paged.schedule import PagedSchedule, lse_of_items, most_splits, places_of_items
from dflash_kernels.mosaic_gpu import combine, queries, softmax, transposed
from dflash_kernels.mosaic_gpu.layouts import swizzled
from dflash_kernels.mosaic_gpu.mask import alibi_bias, places, spread
from dflash_kernels.mosaic_gpu.paged_kv import PagedKV, Place, Work, paged_kv
from dflash_kernels.mosaic_gpu.pipeline import by_one_warp
from dflash_kernels.mosaic_gpu.softmax import LOG2E
from dflash_kernels.mosaic_gpu.thread_op import COLUMN, MATRIX, ROW, kernel

# Weight of the highest score when an offset is raised, and what two weights may add up to until it is raised again: float16 ends at
# 2^16, and below 2^-14 it has fewer bits.
RAISED_TO = 2**5
LIMIT = 2**15
# By how many powers of two a row's own score exceeds its offset for that to be raised, where rows are not to know of one another:
# more than makes any thread ask for it, so that a row which is to be raised always is, and less than float16 holds.
_OWN_LIMIT = 15.5
# An offset that every score exceeds by more. Not -inf: less itself that is NaN.
_NOTHING_SEEN = -1e30
# All threads meet where weights are published, and nowhere else in a step: what they read of a tile before that may be overwritten
# after it.
_PARAMS = plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True)
_WEIGHTS = 3  # tiles of weights, so that one barrier a tile is enough: the slowest warp may still multiply with the last but one


def scratch(launch: Launch, dtype: Any) -> dict[str, Any]:
    """Shared memory and barriers of one CTA."""
    ring = plgpu.SMEM(
        (launch.stages, launch.keys, launch.head_dim), dtype, transforms=swizzled(dtype, launch.head_dim)
    )  # fmt: skip
    rows, multiplied = queries.query_rows(dtype, launch.rows)
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
      launch: shapes and tiling.
      q: `[B, T, K, G, H]` bfloat16 or float16.
      k_pages, v_pages: `[P, K, p, H]` float8_e4m3fn or int8. Rows at or past `seq_lens` may hold anything.
      k_scale: float32 `[K]` with float8, `[P, K, p]` with int8.
      v_scale: float32 `[K]` with float8, `[K, H]` with int8.
      slopes: float32 `[K, row_blocks * rows]` ALiBi slope of each row, or None.
      table: `[B, W]` int32. Entries past a sequence's last page are never read.
      seq_lens, q_lens: `[B]` int32.

    Returns:
      Output `[B, T, K, G, H]` in q's dtype where `launch.direct`, else float32 partial outputs `[B, K, splits, T * G, H]`, each
      normalized, those of empty splits not written; natural lse `[B, K, splits, rows]` float32, -inf where empty.
    """
    b, rows = q.shape[0], launch.row_blocks * launch.rows
    if launch.direct:
        out = jax.ShapeDtypeStruct((b, launch.tokens, launch.kv_heads, launch.group, launch.head_dim), q.dtype)
    else:
        out = (b, launch.kv_heads, launch.splits, launch.tokens, launch.group, launch.head_dim)
        out = jax.ShapeDtypeStruct(out, jnp.float32)
    given = _given(
        q=q, k=k_pages, v=v_pages, k_scale=k_scale, v_scale=v_scale, slopes=slopes, table=table, seq_lens=seq_lens,
        q_lens=q_lens,
    )  # fmt: skip

    def body(*refs, **buffers):
        named = dict(zip([*given, "o", "lse"], refs, strict=True))
        arrivals = _arrivals(k_pages.dtype, buffers)
        kv = paged_kv(launch, named, buffers | arrivals, stride=launch.splits if launch.invariant else 1, one_warp=True)
        sequence, head, split = kv.work.place.sequence, kv.work.head, kv.work.place.split
        out = named["o"].at[sequence].at[:, head] if launch.direct else named["o"].at[sequence].at[head, split]
        _attend(Cta(launch, named, buffers, kv, k_pages.dtype, out, named["lse"].at[sequence, head, split]))

    out, lse = kernel(
        body,
        out_type=(out, jax.ShapeDtypeStruct((b, launch.kv_heads, launch.splits, rows), jnp.float32)),
        scratch_types=scratch(launch, k_pages.dtype),
        grid=(b, launch.splits, launch.row_blocks * launch.kv_heads), grid_names=("b", "split", "heads"),
        num_threads=1, thread_name="wg", compiler_params=_PARAMS, interpret=interpret,
    )(*given.values())  # fmt: skip
    return (out if launch.direct else out.reshape(b, launch.kv_heads, launch.splits, -1, launch.head_dim)), lse


def attention_by_items(
    launch: Launch, schedule: PagedSchedule, q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, k_scale: jax.Array,
    v_scale: jax.Array, slopes: jax.Array | None, table: jax.Array, seq_lens: jax.Array, q_lens: jax.Array,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Runs the kernel with the work items of a schedule, a CTA for each, and combines the splits. Arguments as for `attention`.

    Returns:
      Output `[B, T, N, H]` and natural lse `[B, K, 1, rows]` float32 of all splits together.
    """
    given = _given(
        q=q, k=k_pages, v=v_pages, k_scale=k_scale, v_scale=v_scale, slopes=slopes, items=schedule.items, table=table,
        seq_lens=seq_lens, q_lens=q_lens,
    )  # fmt: skip

    def body(*refs, **buffers):
        named = dict(zip([*given, "o", "lse"], refs, strict=True))
        item, items = lax.axis_index("item"), named["items"]
        place = Place(items[item, 0], items[item, 1], jnp.maximum(items[item, 2], 1))
        kv = paged_kv(launch, named, buffers | _arrivals(k_pages.dtype, buffers), place=place, one_warp=True)
        out, lse = named["o"].at[item].at[kv.work.head], named["lse"].at[item, kv.work.head]
        pl.when(items[item, 2] > 0)(
            functools.partial(_attend, Cta(launch, named, buffers, kv, k_pages.dtype, out, lse))
        )

    parts = (launch.items, launch.kv_heads, launch.tokens, launch.group, launch.head_dim)
    parts, lse = kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct(parts, jnp.float32),
            jax.ShapeDtypeStruct((launch.items, launch.kv_heads, launch.rows), jnp.float32),
        ),
        scratch_types=scratch(launch, k_pages.dtype),
        grid=(launch.items, launch.kv_heads), grid_names=("item", "heads"),
        num_threads=1, thread_name="wg", compiler_params=_PARAMS, interpret=interpret,
    )(*given.values())  # fmt: skip
    parts, places = parts.reshape(*parts.shape[:2], -1, launch.head_dim), places_of_items(schedule.items, q.shape[0])
    out = combine.combine_items(
        parts, lse, places, launch.tokens, launch.group, most_splits(launch.tokens * launch.group), q.dtype, interpret
    )
    return out, lse_of_items(schedule.items, lse, q.shape[0])[:, :, None]


def _given(**arrays: jax.Array | None) -> dict[str, jax.Array]:
    return {name: array for name, array in arrays.items() if array is not None}


def _streams(stored: Any) -> tuple[str, ...]:
    """Keys, values and scales of int8 keys."""
    return ("k", "v", "k_scale") if stored == jnp.int8 else ("k", "v")


def _arrivals(stored: Any, buffers: dict[str, Any]) -> dict[str, Any]:
    return {f"{stream}_in": buffers["tile_in"] for stream in _streams(stored)}


@dataclass(frozen=True)
class Cta:
    """State of a CTA's program, which its functions share.

    Attributes:
      refs, buffers: arrays in global memory, and shared memory and barriers, by name.
      kv: producer of keys, values and scales of int8 keys.
      stored: dtype of the pages.
      out: `[T, G, H]`, and lse: `[rows]`, where the split's belong.
    """

    launch: Launch
    refs: dict[str, Any]
    buffers: dict[str, Any]
    kv: PagedKV
    stored: Any
    out: Any
    lse: Any

    @property
    def work(self) -> Work:
        return self.kv.work

    def per_row(self, of_rows: Any) -> Any:
        """One value for each query row over a tile of scores; one for all rows stays a scalar."""
        return spread(of_rows, (self.launch.keys, self.launch.rows), 0)


def _attend(cta: Cta) -> None:
    """The program of a CTA."""
    launch, work, kv, source = cta.launch, cta.work, cta.kv, _queries(cta)
    # Asked for before the first copies, behind which it would wait.
    pages, asked = _ring_pages(cta), queries.ask_for_scaled(source, work.first_row, count=launch.rows)

    @pl.when(work.begin < work.end)
    def _():
        by_one_warp(lambda: kv.fill_ring(_streams(cta.stored), pages), work.begin < work.end)
        common = queries.put_scaled(
            source, cta.buffers["q_sm"], cta.buffers["q_factor_sm"], cta.buffers["columns_sm"], work.first_row,
            jnp.minimum(work.q_len, launch.tokens) * launch.group, asked, by_row=launch.invariant,
        )  # fmt: skip
        scale_log2 = _scale_log2(cta, common)
        acc = plgpu.layout_cast(jnp.zeros((launch.head_dim, launch.rows), jnp.float32), MATRIX)
        carry = (acc, *_first(cta, scale_log2), jnp.int32(0), kv.pages(work.begin + launch.stages * work.stride))
        acc, offset, row_sum, place, _ = work.walk(functools.partial(_step, cta, scale_log2), carry, skip=1)
        acc = _start_values(cta, acc, work.last, place, finite=True)
        _epilogue(cta, transposed.finish(acc), offset, row_sum)

    @pl.when(work.begin >= work.end)
    def _():
        _write_lse(cta, plgpu.layout_cast(jnp.full((launch.rows,), -jnp.inf, jnp.float32), COLUMN))
        if launch.direct:
            _write(cta, plgpu.layout_cast(jnp.zeros((launch.head_dim, launch.rows), jnp.float32), MATRIX))


# Prologue


def _queries(cta: Cta) -> Any:
    return cta.refs["q"].at[cta.work.place.sequence].at[:, cta.work.head]


def _ring_pages(cta: Cta) -> list[Any]:
    """Ids of the pages of the ring's first tiles."""
    launch, tiles = cta.launch, cta.launch.page_size // cta.launch.keys
    if tiles == 0:
        return cta.kv.ring_pages()
    entries = [lax.div(cta.work.begin + stage * cta.work.stride, jnp.int32(tiles)) for stage in range(launch.stages)]
    row = cta.refs["table"].at[cta.work.place.sequence]
    return [[transposed.entry(row, jnp.minimum(entry, launch.table_width - 1))] for entry in entries]


def _scale_log2(cta: Cta, common: Any) -> Any:
    """Factor of a score by query row; for int8, besides the key's scale, `common` for all rows if there is one."""
    unit = cta.launch.scale * (1.0 if cta.launch.soft_cap else LOG2E)
    if cta.stored == jnp.int8:
        return _factors(cta) * unit if common is None else common * unit
    return _factors(cta) * (cta.refs["k_scale"][cta.work.head] * unit)


def _factors(cta: Cta) -> Any:
    return plgpu.layout_cast(cta.buffers["q_factor_sm"][...], COLUMN)


def _first(cta: Cta, scale_log2: Any) -> tuple[Any, Any]:
    """Offset and sum of weights after the first tile's scores."""
    plgpu.barrier_wait(cta.buffers["tile_in"].at[0])
    nothing = plgpu.layout_cast(jnp.full((cta.launch.rows,), _NOTHING_SEEN, jnp.float32), COLUMN)
    if cta.stored == jnp.int8 and not cta.launch.invariant:
        nothing += _factors(cta)  # NaN for a row that is not finite
    return _raised(cta, scale_log2, cta.work.begin, nothing, 0, masked=True)


# Mainloop


def _step(cta: Cta, scale_log2: Any, tile: Any, carry: Any, *, masked: bool) -> tuple[Any, ...]:
    """One tile's scores and weights, made while the values of the tile before multiply; that tile's stage is filled again.

    The running sum of weights stays apart in every thread.
    """
    launch, kv, (acc, offset, row_sum, before, coming) = cta.launch, cta.kv, carry
    place = jnp.where(before == _WEIGHTS - 1, 0, before + 1)
    plgpu.barrier_wait(cta.buffers["tile_in"].at[kv.stage(tile)])
    scores = _start_scores(cta, tile)
    stride = cta.work.stride
    following = tile + (launch.stages - 1) * stride
    later = kv.pages(following + stride)
    # Keys of wide heads that wait in registers leave none for values.
    together = launch.head_dim <= 128 or cta.stored == jnp.int8
    if not together:
        scores = transposed.finish_scores(scores)
    acc = _start_values(cta, acc, tile - stride, before, finite=False)
    if together:
        scores = transposed.finish_scores(scores, later=1)
    scores = _exponents(cta, scale_log2, scores, tile, masked)
    weights = _weights(cta, scale_log2, scores, offset, tile, masked)
    over = transposed.publish(weights, cta.buffers["p_sm"].at[place], limit=LIMIT)
    sums = transposed.sum_weights(weights)

    def refill():
        for stream in _streams(cta.stored):
            kv.fill(stream, following, coming)

    by_one_warp(refill, following < cta.work.end)
    acc = transposed.finish(acc)

    def raised(acc, offset, row_sum, sums):
        """Everything counted from a new offset. Scores are made again: there are no registers to keep them in."""
        del sums
        higher, sums = _raised(cta, scale_log2, tile, offset, place, masked=masked)
        alpha = jnp.exp2(offset - higher)
        acc = acc * lax.broadcast_in_dim(alpha, acc.shape, [1])
        return acc, higher, transposed.add_sums(row_sum * cta.per_row(alpha), sums)

    def as_it_is(acc, offset, row_sum, sums):
        return acc, offset, transposed.add_sums(row_sum, sums)

    return *lax.cond(over, raised, as_it_is, acc, offset, row_sum, sums), place, later


def _raised(cta: Cta, scale_log2: Any, tile: Any, offset: Any, place: Any, *, masked: bool) -> tuple[Any, Any]:
    """Offset so that a tile's highest score, if it is the highest so far, weighs `RAISED_TO`; sums of its weights, published."""
    scores = transposed.finish_scores(_start_scores(cta, tile))
    scores = _exponents(cta, scale_log2, scores, tile, masked)
    seen = _masked(cta, scores * cta.per_row(scale_log2), tile, masked) if cta.launch.invariant else scores
    highest = transposed.over_keys(seen, offset, cta.buffers["columns_sm"], highest=True)
    higher = jnp.maximum(offset, highest - math.log2(RAISED_TO))
    offset = jnp.where(highest - offset > _OWN_LIMIT, higher, offset) if cta.launch.invariant else higher
    weights = _weights(cta, scale_log2, scores, offset, tile, masked)
    transposed.publish(weights, cta.buffers["p_sm"].at[place], limit=LIMIT)
    return offset, transposed.sum_weights(weights)


def _start_scores(cta: Cta, tile: Any) -> Any:
    return transposed.start_scores(cta.buffers["k_sm"].at[cta.kv.stage(tile)], cta.buffers["q_sm"])


def _start_values(cta: Cta, acc: Any, tile: Any, place: Any, *, finite: bool) -> Any:
    """Adds a tile of values times the weights that were published for it. Only where rows are unused can they hold NaN."""
    values = transposed.values(cta.buffers["v_sm"].at[cta.kv.stage(tile)], finite=finite)
    return transposed.start_values(acc, values, cta.buffers["p_sm"].at[place])


def _exponents(cta: Cta, scale_log2: Any, scores: Any, tile: Any, masked: bool) -> Any:
    """Scores as exponents of two: scaled, capped, with ALiBi's share added, masked. With `launch.invariant` by the keys' own scales
    alone: `_weights` does the rest."""
    launch, work = cta.launch, cta.work
    stage = cta.kv.stage(tile)
    if cta.stored == jnp.int8:
        of_keys = plgpu.layout_cast(cta.buffers["k_scale_sm"].at[stage][...], ROW)
        of_keys = of_keys if launch.invariant else of_keys * scale_log2
        scores = scores * lax.broadcast_in_dim(of_keys, scores.shape, [0])
    elif not launch.invariant:
        scores = scores * cta.per_row(scale_log2)
    if launch.invariant:
        return scores
    if launch.soft_cap is not None:
        scores = softmax.precise_tanh(scores * (1 / launch.soft_cap)) * (launch.soft_cap * LOG2E)
    if "slopes" in cta.refs:
        own_rows = pl.ds(work.first_row, launch.rows)
        slopes = plgpu.layout_cast(plgpu.load(cta.refs["slopes"].at[work.head, own_rows], optimized=False), COLUMN)
        position = work.seq_len - work.q_len + work.tokens(COLUMN)
        keys, _ = places(launch.keys, launch.rows, 0)
        share = alibi_bias(keys - cta.per_row(position - tile * launch.keys), launch.alibi_sqrt)
        scores = scores + share * cta.per_row(slopes * LOG2E)
    return _masked(cta, scores, tile, masked)


def _masked(cta: Cta, scores: Any, tile: Any, masked: bool) -> Any:
    return jnp.where(cta.work.mask(tile, COLUMN, keys_axis=0), scores, -jnp.inf) if masked else scores


def _weights(cta: Cta, scale_log2: Any, scores: Any, offset: Any, tile: Any, masked: bool) -> Any:
    """Weights of what `_exponents` gives, less the rows' offsets."""
    if not cta.launch.invariant:
        return jnp.exp2(scores - cta.per_row(offset))
    return jnp.exp2(
        _masked(cta, transposed.exponents(scores, cta.per_row(scale_log2), cta.per_row(offset)), tile, masked)
    )


# Epilogue


def _epilogue(cta: Cta, acc: Any, offset: Any, row_sum: Any) -> None:
    """Normalizes and writes."""
    row_sum = transposed.over_keys(row_sum, offset, cta.buffers["columns_sm"], highest=False)
    live = cta.work.live(row_sum, COLUMN)
    counted = softmax.counted(row_sum, live)
    _write_lse(cta, softmax.natural_lse(offset, counted, live))
    whole = cta.stored == jnp.int8
    scale = 1 / transposed.SHRUNK if whole else cta.refs["v_scale"][cta.work.head]
    factor = lax.broadcast_in_dim(jnp.where(live, scale / counted, 0.0), acc.shape, [1])
    # Not a product alone: rows past the live ones may hold NaN.
    out = acc * factor - transposed.LIFT if whole else acc * factor
    _write(cta, jnp.where(factor != 0, out, 0.0))


def _write_lse(cta: Cta, lse: Any) -> None:
    cta.lse.at[pl.ds(cta.work.first_row, cta.launch.rows)][...] = lse


def _write(cta: Cta, out: Any) -> None:
    factors = cta.refs["v_scale"].at[cta.work.head] if cta.stored == jnp.int8 else None
    transposed.store(out, cta.out, cta.work.first_row, factors, rows=cta.launch.tokens * cta.launch.group)
