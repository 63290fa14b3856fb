"""The Hopper kernel for 16-bit pages: one CTA attends with one block of query rows to one split of one sequence's pages.

A query row is one (token, head of the group) pair: row `t * group + g` of a KV head, 64 rows to a warpgroup, so that every key and
value is read once for all query tokens. Scores stay in registers; the softmax is online, in base 2, in float32. The first
warpgroup is the producer as well (`paged_kv`).

Splits are combined in one of five ways. One split is the output itself (`direct`). Two of a cluster swap halves over distributed
shared memory and write half of the columns each (`pair`). Those of a larger cluster are combined from the CTAs' shared memories
(`together`). With a `PagedSchedule` the last CTA of a sequence's that finishes combines them (`items`). Otherwise they are left
for a launch of its own (`combine`).
"""

# Pallas declares ACC and its transforms less public than it documents them.
# pyright: reportPrivateImportUsage=false

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.attention.paged.launch import ROWS, SWAPPED, Launch
from dflash_kernels.attention.paged.schedule import PagedSchedule, lse_of_items
from dflash_kernels.mosaic_gpu import epilogue, paged_kv, softmax
from dflash_kernels.mosaic_gpu.combine import combine_cluster, combine_halves, combine_last, exchange_halves
from dflash_kernels.mosaic_gpu.layouts import swizzled
from dflash_kernels.mosaic_gpu.mask import alibi_bias, places, spread
from dflash_kernels.mosaic_gpu.paged_kv import PagedKV, Place, Work
from dflash_kernels.mosaic_gpu.queries import ask_for_rows, put_rows
from dflash_kernels.mosaic_gpu.softmax import LOG2E
from dflash_kernels.mosaic_gpu.thread_op import MATRIX, ROW, kernel
from dflash_kernels.mosaic_gpu.wgmma import add_values, scores_of

# Row reductions of a matrix tile stay within a warp: no scratch, which two CTAs on a multiprocessor have no room for.
_PARAMS = plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0)


def attention(
    launch: Launch, q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, slopes: jax.Array | None, table: jax.Array,
    seq_lens: jax.Array, q_lens: jax.Array, sinks: jax.Array | None = None, interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Runs the kernel.

    Args:
      launch: shapes and tiling.
      q: `[B, T, K, G, H]`.
      k_pages, v_pages: `[P, K, p, H]`. Rows at or past `seq_lens` may hold anything.
      slopes: float32 `[K, row_blocks * block_rows]` ALiBi slope of each row, or None.
      table: `[B, W]` int32. Entries past a sequence's last page are never read.
      seq_lens, q_lens: `[B]` int32.
      sinks: float32 `[K, row_blocks * block_rows]`, of each row the logit that counts in the output as one more key without a
        value; for `launch.direct`, or None.

    Returns:
      Output `[B, T, K, G, H]` where `launch.direct` or `launch.together`, else float32 partial outputs `[B, K, splits, rows, H]`,
      each normalized, whose rows past the live ones and whose empty splits are not written; natural lse `[B, K, splits, rows]`
      float32, -inf where empty.
    """
    b, rows = q.shape[0], launch.row_blocks * launch.block_rows
    # Rows of a split, which leaves in tiles of 8.
    written = rows if launch.row_blocks > 1 else -(-launch.tokens * launch.group // 8) * 8
    if launch.direct or launch.together:
        out = jax.ShapeDtypeStruct((b, launch.tokens, launch.kv_heads, launch.group, launch.head_dim), q.dtype)
    else:
        out = jax.ShapeDtypeStruct((b, launch.kv_heads, launch.splits, written, launch.head_dim), jnp.float32)
    given = given_arrays(
        q=q, k=k_pages, v=v_pages, slopes=slopes, sinks=sinks, table=table, seq_lens=seq_lens, q_lens=q_lens
    )

    def body(*refs, **buffers):
        named = dict(zip([*given, "o", "lse"], refs, strict=True))
        kv = paged_kv.paged_kv(launch, named, buffers, stride=launch.splits)
        cta = Cta(
            launch, named, buffers, kv, named["lse"].at[kv.work.place.sequence, kv.work.head, kv.work.place.split]
        )
        (_attend_as_pair if launch.pair else _attend)(cta)

    return kernel(
        body,
        out_type=(out, jax.ShapeDtypeStruct((b, launch.kv_heads, launch.splits, rows), jnp.float32)),
        scratch_types=scratch(launch, q.dtype),
        **paged_kv.grid(launch, b),
        num_threads=launch.warpgroups, thread_name="wg", compiler_params=_PARAMS, interpret=interpret,
    )(*given.values())  # fmt: skip


def attention_by_items(
    launch: Launch, schedule: PagedSchedule, q: jax.Array, k_pages: jax.Array, v_pages: jax.Array,
    slopes: jax.Array | None, table: jax.Array, seq_lens: jax.Array, q_lens: jax.Array, interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Runs the kernel with the work items of a schedule, a CTA for each; arguments as for `attention`.

    Returns:
      Output `[B, T, K, G, H]` and natural lse `[B, K, 1, 64]` float32 of all splits together.
    """
    b, rows = q.shape[0], launch.tokens * launch.group
    given = given_arrays(
        q=q, k=k_pages, v=v_pages, slopes=slopes, items=schedule.items, table=table, seq_lens=seq_lens, q_lens=q_lens,
        arrived=schedule.arrived,
    )  # fmt: skip
    names = [*given, "o", "lse", "parts"]

    def body(*refs, **buffers):
        named = dict(zip(names, refs, strict=True))
        item, items = lax.axis_index("item"), named["items"]
        count = items[item, 2]
        place = Place(items[item, 0], items[item, 1], jnp.maximum(count, 1))
        kv = paged_kv.paged_kv(launch, named, buffers, place=place)
        cta = Cta(launch, named, buffers, kv, named["lse"].at[item, kv.work.head], item, count)
        pl.when(count > 0)(functools.partial(_attend, cta))

    out, lse, _ = kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((b, launch.tokens, launch.kv_heads, launch.group, launch.head_dim), q.dtype),
            jax.ShapeDtypeStruct((launch.items, launch.kv_heads, ROWS), jnp.float32),
            jax.ShapeDtypeStruct((launch.items, launch.kv_heads, rows, launch.head_dim), jnp.float32),
        ),
        scratch_types=scratch(launch, q.dtype),
        grid=(launch.items, launch.kv_heads), grid_names=("item", "heads"),
        num_threads=1, thread_name="wg", compiler_params=_PARAMS, interpret=interpret,
    )(*given.values())  # fmt: skip
    return out, lse_of_items(schedule.items, lse, b)[:, :, None]


def given_arrays(**arrays: Any) -> dict[str, Any]:
    return {name: array for name, array in arrays.items() if array is not None}


def scratch(launch: Launch, dtype: Any) -> dict[str, Any]:
    """Shared memory and barriers of one CTA."""
    buffers = paged_kv.ring(launch, dtype)
    queries = (launch.warpgroups, ROWS, launch.width)
    buffers["q_sm"] = plgpu.SMEM(queries, dtype, transforms=swizzled(dtype, launch.width))
    if launch.pair:
        # What the other CTA writes to.
        buffers["swapped_sm"] = plgpu.SMEM((SWAPPED * (launch.head_dim // 4 + 4),), jnp.float32)
        return buffers
    if launch.unstaged:
        return buffers
    return buffers | epilogue.scratch(launch, dtype)


@dataclass(frozen=True)
class Cta:
    """State of a CTA's program, which its functions share.

    Attributes:
      refs, buffers: arrays in global memory, and shared memory and barriers, by name.
      kv: producer of keys and values.
      lse_row: where the lse of the block's rows belongs.
      item, count: number of the work item, and how many its sequence has; None without a schedule.
    """

    launch: Launch
    refs: dict[str, Any]
    buffers: dict[str, Any]
    kv: PagedKV
    lse_row: Any
    item: Any = None
    count: Any = None

    @property
    def work(self) -> Work:
        return self.kv.work

    @property
    def queries(self) -> Any:
        """`[T, G, H]` of the sequence's KV head."""
        return self.refs["q"].at[self.work.place.sequence].at[:, self.work.head]

    @property
    def out(self) -> Any:
        """`[T, G, H]` of the sequence's KV head, where the output itself is written."""
        return self.refs["o"].at[self.work.place.sequence].at[:, self.work.head]


def _attend(cta: Cta) -> None:
    """The program of a CTA."""
    work, asked = cta.work, _ask(cta)

    @pl.when(work.begin < work.end)
    def _():
        _prologue(cta, *asked)
        acc, row_max, row_sum = work.walk(functools.partial(_step, cta), _nothing_seen(cta))
        _epilogue(cta, acc, row_max, row_sum)

    @pl.when(work.begin >= work.end)
    def _():
        _epilogue_of_nothing(cta)

    rows = cta.launch.tokens * cta.launch.group
    if cta.launch.together:
        combine_cluster(cta.buffers["o_sm"].at[0], cta.buffers["lse_sm"], cta.out, rows=rows, parts=cta.launch.splits)
    elif cta.launch.items:
        refs, counter = cta.refs, work.place.sequence * cta.launch.kv_heads + work.head
        combine_last(
            cta.buffers["o_sm"].at[0], cta.out, refs["parts"].at[:, work.head], refs["lse"].at[:, work.head],
            refs["arrived"].at[counter],
            cta.item, work.place.split, cta.count, rows=rows,
        )  # fmt: skip


def _attend_as_pair(cta: Cta) -> None:
    """The program of a CTA that has half of a sequence's tiles: it writes half of the columns, whether it has any tiles or not."""
    work, asked = cta.work, _ask(cta)
    pl.when(work.begin < work.end)(lambda: _prologue(cta, *asked))
    acc, row_max, row_sum = work.walk(functools.partial(_step, cta), _nothing_seen(cta))
    mine, peer = exchange_halves(acc, row_max, row_sum, work.place.split, cta.buffers["swapped_sm"])
    live = work.live(row_sum, ROW)
    cta.lse_row[...] = softmax.natural_lse(row_max, softmax.counted(row_sum, live), live)
    out = combine_halves((mine, row_max, row_sum), peer, functools.partial(work.live, layout=ROW))
    column, rows = work.place.split * mine.shape[1], cta.launch.tokens * cta.launch.group
    epilogue.store_columns(cta.out, out.astype(cta.refs["o"].dtype), column, rows=rows)


# Prologue


def _ask(cta: Cta) -> tuple[list[Any], list[Any]]:
    """Queries on their way to registers, and pages of the ring's first tiles."""
    launch = cta.launch
    rows = ask_for_rows(cta.queries, cta.work.first_row, rows=launch.tokens * launch.group, columns=launch.width)
    return rows, cta.kv.ring_pages()


def _prologue(cta: Cta, rows: list[Any], pages: list[Any]) -> None:
    """The first tiles of the ring and the queries. A row's garbage never leaves that row."""
    pl.when(cta.work.warpgroup == 0)(functools.partial(cta.kv.fill_ring, ("k", "v"), pages))
    put_rows(cta.queries, cta.buffers["q_sm"].at[cta.work.warpgroup], cta.work.first_row, rows)


def _nothing_seen(cta: Cta) -> tuple[Any, Any, Any]:
    row_max = plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), ROW)
    row_sum = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), ROW)
    return plgpu.layout_cast(jnp.zeros((ROWS, cta.launch.width), jnp.float32), MATRIX), row_max, row_sum


# Mainloop


def _step(cta: Cta, tile: Any, carry: Any, *, masked: bool) -> tuple[Any, Any, Any]:
    """One tile of keys: scores, online softmax, values."""
    launch, kv, (acc, row_max, row_sum) = cta.launch, cta.kv, carry
    coming = kv.pages(kv.next_in_stage(tile))
    scores = scores_of(cta.buffers["q_sm"].at[cta.work.warpgroup], _tile(cta, "k", tile), launch.keys)
    kv.release("k", tile, coming)
    weights, alpha, row_max, row_sum = weigh(cta, tile, scores, row_max, row_sum, masked=masked)
    acc = softmax.rescaled(acc, alpha)
    weights = weights.astype(cta.buffers["v_sm"].dtype)
    values = _tile(cta, "v", tile)
    if masked:
        _clear_unused(cta, values, tile)
    acc = add_values(acc, weights, values)
    kv.release("v", tile, coming)
    return acc, row_max, row_sum


def weigh(cta: Cta, tile: Any, scores: Any, row_max: Any, row_sum: Any, *, masked: bool) -> tuple[Any, Any, Any, Any]:
    """`softmax.online_step` of a tile's products of queries and keys: scaled, capped, with ALiBi's share added, masked."""
    launch = cta.launch
    if launch.soft_cap is None:
        scale_log2 = launch.scale * LOG2E
    else:
        scores, scale_log2 = softmax.precise_tanh(scores * (launch.scale / launch.soft_cap)), launch.soft_cap * LOG2E
    if "slopes" in cta.refs:
        scores, scale_log2 = scores * scale_log2 + _alibi(cta, tile), 1.0
    if masked:
        scores = jnp.where(cta.work.mask(tile, ROW), scores, -jnp.inf)
    return softmax.online_step(scores, row_max, row_sum, scale_log2)


def _tile(cta: Cta, stream: str, tile: Any) -> Any:
    """A tile of keys or values as matrix instructions take it, once it is there."""
    held = cta.kv.wait(stream, tile)
    if cta.launch.width == cta.launch.head_dim:
        return held
    paged_kv.pad_columns(held, cta.buffers[f"{stream}_wide"])
    return cta.buffers[f"{stream}_wide"]


def _alibi(cta: Cta, tile: Any) -> Any:
    """ALiBi's share of a tile's scores, as exponents of two."""
    work, shape = cta.work, (ROWS, cta.launch.keys)
    slopes = plgpu.load(cta.refs["slopes"].at[work.head, pl.ds(work.first_row, ROWS)], optimized=False)
    slopes = plgpu.layout_cast(slopes, ROW)
    position = work.seq_len - work.q_len + work.tokens(ROW)
    keys, _ = places(cta.launch.keys, ROWS)
    share = alibi_bias(keys - spread(position - tile * cta.launch.keys, shape), cta.launch.alibi_sqrt)
    return share * spread(slopes * LOG2E, shape)


def _clear_unused(cta: Cta, values: Any, tile: Any) -> None:
    """Zeroes the value rows past the sequence: their weight is 0, and 0 * NaN is NaN.

    With two warpgroups both do it, without waiting for each other: they write the same bits.
    """
    live = cta.work.kv_len - tile * cta.launch.keys

    @pl.when(live < cta.launch.keys)
    def _():
        rows = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, values.shape, 0), MATRIX)
        held = plgpu.layout_cast(values[...], MATRIX)
        values[...] = jnp.where(rows < live, held, jnp.zeros_like(held))
        plgpu.commit_smem()


# Epilogue


def _epilogue(cta: Cta, acc: Any, row_max: Any, row_sum: Any) -> None:
    """Normalizes and writes this warpgroup's rows."""
    out, lse = softmax.finalize(acc, row_max, row_sum, cta.work.live(row_sum, ROW))
    if "sinks" in cta.refs:
        sinks = plgpu.load(cta.refs["sinks"].at[cta.work.head, pl.ds(cta.work.first_row, ROWS)], optimized=False)
        # Rows that see nothing stay zeros, with a sink of minus infinity as well.
        share = jnp.exp(plgpu.layout_cast(sinks, ROW) - jnp.maximum(lse, -1e30))
        out = out * spread(1 / (1 + share), out.shape)
    _write(cta, out[:, : cta.launch.head_dim], lse)


def _epilogue_of_nothing(cta: Cta) -> None:
    """A split without keys."""
    lse = plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), ROW)
    zeros = plgpu.layout_cast(jnp.zeros((ROWS, cta.launch.head_dim), jnp.float32), MATRIX)
    _write(cta, zeros if cta.launch.direct or cta.launch.items else None, lse)


def _write(cta: Cta, out: Any, lse: Any) -> None:
    launch, work = cta.launch, cta.work
    cta.lse_row.at[pl.ds(work.first_row, ROWS)][...] = lse
    if launch.combines:
        if launch.together:
            cta.buffers["lse_sm"][...] = lse
        if out is not None:
            cta.buffers["o_sm"].at[work.warpgroup][...] = out
    elif out is None:
        return
    elif launch.direct and "o_sm" not in cta.buffers:
        rows = launch.tokens * launch.group
        epilogue.store_columns(cta.out, out.astype(cta.refs["o"].dtype), jnp.int32(0), work.first_row, rows=rows)
    elif launch.direct:
        epilogue.write_through(launch, cta.refs, work, cta.buffers["o_sm"], out)
    else:
        epilogue.write_split(launch, cta.refs, work, out)
