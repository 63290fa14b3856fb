"""Combine: partial attention results of a split sequence combined by their log-sum-exp.

A split leaves its output, normalized over its own keys, and its natural lse, -inf where it has none. There are four ways to
combine: a launch of its own or XLA's (`combine_rows`, `combine_items`, `combine_fragments`, `combine_latent`, `combine_xla`), the
last CTA that finishes (`combine_last`), the CTAs of a cluster over distributed shared memory (`combine_cluster`,
`swap_with_peer`), and CTAs that read a mailbox (`combine_mailbox`). All add up in the order of the splits, so that the same call
gives the same bits, and skip what an empty split never wrote.

In terms of single threads, every eight rows of a split lie in memory as the lanes of a warp have them of a matrix instruction's
result, sixteen columns after sixteen columns (`..._fragments`): sixteen bytes of each lane, columns `2 c`, `2 c + 1`, `2 c + 8` and
`2 c + 9` of row r: lane `4 r + c`. So a warp writes and reads 512 bytes in a row.
"""

# pyright: reportAbstractUsage=false, reportCallIssue=false, reportPrivateImportUsage=false

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector
from jaxtyping import Array, Float, Int

from dflash_kernels.core.device import MATRIX_ROWS as ROWS
from dflash_kernels.core.device import WARPGROUP
from dflash_kernels.core.layouts import EMPTY, interleave_columns
from dflash_kernels.mosaic_gpu import ptx as th
from dflash_kernels.mosaic_gpu.convert import packed
from dflash_kernels.mosaic_gpu.softmax import LOG2E, counted, finite, rescaled
from dflash_kernels.mosaic_gpu.thread_op import GLOBAL, MATRIX, ROW, SCALAR, matrix, thread_op
from dflash_kernels.mosaic_gpu.thread_op import row as row_vector

LANES = 128  # threads of a warpgroup
_ORDERED = "ld.volatile.global"  # asked for where it stands in the code
_UNIT = 512  # bytes: eight rows of sixteen columns
_ROWS_AT_ONCE, _LOADS_AT_ONCE, _LOGITS_AT_ONCE = 8, 24, 8  # of a thread, while it adds up splits
_VOTE = (
    "{ .reg .pred mine, last, anyones; .reg .b32 before; setp.eq.b32 mine, $1, 0; mov.b32 before, 0;"
    " @mine atom.acq_rel.gpu.global.add.u32 before, [$2], 1; setp.eq.and.b32 last, before, $3, mine;"
    " bar.red.or.pred anyones, $4, 128, last; selp.b32 $0, 1, 0, anyones; }"
)
_FEW_SPLITS = 4  # of a sequence, where a schedule says how many it has
EARLY = 32  # splits
RESIDENT = 1100  # CTAs of one warpgroup with so much on its way


@dataclasses.dataclass(frozen=True)
class SplitHeads:
    """Shapes of splits in a mailbox: `tokens * group` query rows of a KV head in `splits` splits.

    `interleaved`: outputs lie with their columns interleaved, as what they are multiplied with is.
    """

    tokens: int
    group: int
    splits: int
    head_dim: int
    interleaved: bool = False

    @property
    def rows(self) -> int:
        return self.tokens * self.group

    @property
    def quads(self) -> int:
        """Groups of four columns of a head's output."""
        return self.rows * self.head_dim // 4

    @property
    def combiners(self) -> int:
        """CTAs of a head that combine splits."""
        return min(-(-self.quads // WARPGROUP), self.splits)


def combined_lse(
    parts_lse: Float[Array, "B K splits rows"],
    q_lens: Int[Array, "B"],
    sinks: Float[Array, "N"] | None,
    tokens: int,
    group: int,
) -> Float[Array, "B T N"]:
    """Natural-log sum of exponentials over all splits and the sink; -inf in rows past `q_lens`."""
    b, kv_heads, _, _ = parts_lse.shape
    lse = jax.nn.logsumexp(parts_lse[..., : tokens * group], axis=2).reshape(b, kv_heads, tokens, group)
    lse = jnp.moveaxis(lse, 1, 2).reshape(b, tokens, -1)
    if sinks is not None:
        lse = jnp.where((jnp.arange(tokens) < q_lens[:, None])[..., None], jnp.logaddexp(lse, sinks), -jnp.inf)
    return lse


def combine_xla(
    parts: Float[Array, "B K splits rows H"],
    parts_lse: Float[Array, "B K splits blocks"],
    sinks: Float[Array, "N"] | None,
    tokens: int,
    group: int,
    dtype: Any,
) -> Float[Array, "B T N H"]:
    """Written split by split instead of as a reduction, and weights for each number, so that XLA makes one launch of it: those of
    rows would have one of their own.
    """
    b, kv_heads, splits, _, head_dim = parts.shape
    rows = tokens * group
    logits = [parts_lse[:, :, split, :rows] for split in range(splits)]
    if sinks is not None:
        logits.append(jnp.broadcast_to(jnp.tile(sinks.reshape(kv_heads, group), tokens), (b, kv_heads, rows)))
    logits = [jnp.broadcast_to(one[..., None], (b, kv_heads, rows, head_dim)) for one in logits]
    top = finite(functools.reduce(jnp.maximum, logits))
    weights = [jnp.exp(logit - top) for logit in logits]
    total = functools.reduce(jnp.add, weights)
    # Empty splits were never written: what lies there is skipped, not weighted.
    kept = [jnp.where(weights[split] > 0, parts[:, :, split, :rows] * weights[split], 0.0) for split in range(splits)]
    out = functools.reduce(jnp.add, kept) / jnp.where(total > 0, total, 1.0)
    out = jnp.moveaxis(out.reshape(b, kv_heads, tokens, group, head_dim), 1, 2)
    return out.reshape(b, tokens, kv_heads * group, head_dim).astype(dtype)


def combines_rows(group: int, head_dim: int) -> bool:
    """Whether rows of one token fill whole warpgroups, as `combine_rows` needs."""
    at_once = max(LANES // head_dim, 1)
    return at_once * head_dim % LANES == 0 and group % at_once == 0


def combine_rows(
    parts: Float[Array, "B K splits rows H"],
    parts_lse: Float[Array, "B K splits blocks"],
    sinks: Float[Array, "N"] | None,
    tokens: int,
    group: int,
    dtype: Any,
    interpret: Any = None,
) -> Float[Array, "B T N H"]:
    """One CTA for each query row, or two heads' rows where a row is half a warpgroup wide.

    All splits are loaded before the first is used, so a CTA waits for memory once.
    """
    b, kv_heads, splits, _, head_dim = parts.shape
    at_once = max(LANES // head_dim, 1)
    width = at_once * head_dim
    blocks = group // at_once

    def body(parts_ref, lse_ref, *rest):
        sinks_ref, out_ref = rest if sinks is not None else (None, *rest)
        batch, head, block = lax.axis_index("b"), lax.axis_index("head"), lax.axis_index("block")
        values = [parts_ref[batch, head, split, pl.ds(block * width, width)] for split in range(splits)]
        row, of_group = block * at_once, lax.rem(block, jnp.int32(blocks)) * at_once
        factors = []
        for step in range(at_once):
            logits = [lse_ref[batch, head, split, row + step] for split in range(splits)]
            sink = None if sinks_ref is None else sinks_ref[head * group + of_group + step]
            factors.append(_factors(logits, sink))
        out = _weighted_rows(values, factors, head_dim)
        out_ref[batch, lax.div(block, jnp.int32(blocks)), head, lax.rem(block, jnp.int32(blocks))] = out.astype(dtype)

    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((b, tokens, kv_heads, blocks, width), dtype),
        grid=(b, kv_heads, tokens * blocks), grid_names=("b", "head", "block"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(parts.reshape(b, kv_heads, splits, -1), parts_lse, *(() if sinks is None else (sinks,)))  # fmt: skip
    return out.reshape(b, tokens, kv_heads * group, head_dim)


def combine_items(
    parts: Float[Array, "I K rows H"],
    parts_lse: Float[Array, "I K blocks"],
    places: Int[Array, "B 2"],
    tokens: int,
    group: int,
    most: int,
    dtype: Any,
    interpret: Any = None,
) -> Float[Array, "B T N H"]:
    """`combine_rows` of splits that a schedule dealt out: those of a sequence follow one another, and sequences have different
    numbers of them.

    Args:
      places: first item and number of items of each sequence, at least one and at most `most`.
    """
    last, kv_heads, _, head_dim = parts.shape[0] - 1, *parts.shape[1:]
    at_once = max(LANES // head_dim, 1)
    width = at_once * head_dim
    blocks = group // at_once

    def body(parts_ref, lse_ref, places_ref, out_ref):
        batch, head, block = lax.axis_index("b"), lax.axis_index("head"), lax.axis_index("block")
        first, count = places_ref[batch, 0], places_ref[batch, 1]

        def combined(splits: int) -> None:
            # What lies past a sequence's own splits is another's, and is skipped.
            items = [jnp.minimum(first + split, last) for split in range(splits)]
            values = [parts_ref[item, head, pl.ds(block * width, width)] for item in items]
            factors = []
            for row in range(at_once):
                logits = [lse_ref[item, head, block * at_once + row] for item in items]
                factors.append(_factors([jnp.where(i < count, one, -math.inf) for i, one in enumerate(logits)], None))
            out = _weighted_rows(values, factors, head_dim)
            token, among = lax.div(block, jnp.int32(blocks)), lax.rem(block, jnp.int32(blocks))
            out_ref[batch, token, head, among] = out.astype(dtype)

        # Where all are alike each sequence has few: all loads of as many as it may have would take most of the time.
        few = min(_FEW_SPLITS, most)
        pl.when(count <= few)(functools.partial(combined, few))
        if few < most:
            pl.when(count > few)(functools.partial(combined, most))

    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((places.shape[0], tokens, kv_heads, blocks, width), dtype),
        grid=(places.shape[0], kv_heads, tokens * blocks), grid_names=("b", "head", "block"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(parts.reshape(*parts.shape[:2], -1), parts_lse, places)  # fmt: skip
    return out.reshape(places.shape[0], tokens, kv_heads * group, head_dim)


def _weighted_rows(values: list[Array], factors: list[list[Array]], head_dim: int) -> Array:
    """The sum of splits of one row, or of several that lie one behind another, each row with factors of its own."""
    out = jnp.zeros(values[0].shape, jnp.float32)
    for split, value in enumerate(values):
        factor = jnp.broadcast_to(factors[0][split], out.shape)
        for step in range(1, len(factors)):
            later = lax.iota(jnp.int32, out.shape[0]) >= step * head_dim
            factor = jnp.where(later, jnp.broadcast_to(factors[step][split], out.shape), factor)
        # Empty splits were never written: what lies there is skipped, not weighted.
        out += jnp.where(factor != 0, value * factor, 0.0)
    return out


def combine_fragments(
    parts: Float[Array, "B K splits rows H"],
    parts_lse: Float[Array, "B K splits blocks"],
    sinks: Float[Array, "N"] | None,
    tokens: int,
    group: int,
    dtype: Any,
    interpret: Any = None,
) -> Float[Array, "B T N H"]:
    """`combine_rows` of splits that `store_fragments` wrote: a thread has four columns of a row.

    In the interpreter they lie as `combine_rows` has them.
    """
    if interpret is not None:
        combined = functools.partial(combine_rows, interpret=interpret)
        combined = combined if combines_rows(group, parts.shape[4]) else combine_xla
        return combined(parts, parts_lse, sinks, tokens, group, dtype)
    b, kv_heads, _, rows, head_dim = parts.shape
    units = rows // 8 * (head_dim // 16)

    def body(parts_ref, lse_ref, *rest):
        sinks_ref, out_ref = rest if sinks is not None else (None, *rest)
        batch, head, block = lax.axis_index("b"), lax.axis_index("head"), lax.axis_index("block")
        of_head = None if sinks_ref is None else sinks_ref.at[head]
        given = parts_ref.at[batch, head], lse_ref.at[batch, head], out_ref.at[batch].at[:, head], of_head
        _combine_fragments(block, *given, rows=tokens * group)

    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((b, tokens, kv_heads, group, head_dim), dtype),
        grid=(b, kv_heads, -(-units // 4)), grid_names=("b", "head", "block"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(parts, parts_lse, *(() if sinks is None else (sinks.reshape(kv_heads, group),)))  # fmt: skip
    return out.reshape(b, tokens, kv_heads * group, head_dim)


def _weights(logits: list[Array], sink: Array | None = None) -> tuple[list[Array], Array, Array, Array]:
    """Combine weights of one row: one for each split, their offset, their sum with the sink's, and their normalizing factor."""
    top = finite(functools.reduce(jnp.maximum, logits if sink is None else [*logits, sink]))
    weights = [jnp.exp2((logit - top) * LOG2E) for logit in logits]
    total = functools.reduce(jnp.add, weights if sink is None else [*weights, jnp.exp2((sink - top) * LOG2E)])
    return weights, top, total, 1 / jnp.where(total == 0, 1.0, total)


def _factors(logits: list[Array], sink: Array | None) -> list[Array]:
    """Weight of each split of one row: scalars that add up to 1, less the sink's share."""
    weights, _, _, share = _weights(logits, sink)
    return [weight * share for weight in weights]


def rows_stored(target: Any, tile: Any, first_row: Any) -> None:
    """In the interpreter: a tile to the rows of `target [R, H]` from `first_row` on, as far as it has rows."""
    rows = target.shape[0]

    @pl.when(first_row + ROWS <= rows)
    def _() -> None:
        target.at[pl.ds(first_row, ROWS)][...] = tile

    @pl.when(first_row + ROWS > rows)
    def _() -> None:
        @pl.loop(0, rows - first_row)
        def _(row: Any) -> None:
            target.at[first_row + row][...] = lax.dynamic_index_in_dim(tile, row, keepdims=False)


@thread_op(args=(GLOBAL, MATRIX, SCALAR), interpret=rows_stored)
def store_fragments(target, tile, first_row) -> None:
    """A tile `[64, H]` of float32 to rows `first_row` and on of `target [R, H]` in global memory, as far as it has rows.

    `first_row` and R are multiples of eight.
    """
    lane, warp = th.lane_and_warp()
    (rows, _), (head_dim, _) = th.shape_and_strides(target)
    base, places = th.add(th.address(target), th.widen_index(th.mul(lane, 16))), []
    for half in range(2):
        row = th.add(th.add(first_row, th.mul(warp, 16)), 8 * half)
        places.append((th.below(row, rows), th.add(base, th.widen_index(th.mul(row, 4 * head_dim)))))
    # Rows take turns, eight columns after eight columns.
    held = [tile.registers[index] for index in np.ndindex(tile.registers.shape)]
    for half, (exists, address) in enumerate(places):
        for unit in range(len(held) // 4):
            pairs = held[4 * unit + half], held[4 * unit + 2 + half]
            four = [vector.extract(pair, [], [i]) for pair in pairs for i in range(2)]
            place = th.add(address, _UNIT * unit)
            th.when(exists, "st.global.v4.f32 [$0], {$1, $2, $3, $4};", place, *four)


@thread_op(args=(SCALAR, *[GLOBAL] * 4))
def _combine_fragments(block, parts, lses, target, sinks, *, rows: int) -> None:
    """Four units of a KV head, a warp each, all of whose splits are asked for before the first is used.

    Args:
      block: int32 scalar, which four units.
      parts: `[splits, R, H]` float32 in global memory, each normalized; lses: `[splits, R or more]`, natural, -inf where empty.
      target: `[T, G, H]` in global memory, of whose rows `t * G + g` the first `rows` exist.
      sinks: `[G]` float32 in global memory, or None.
    """
    i32, f32 = th.i32(), ir.F32Type.get()
    (splits, held, head_dim), (part_stride, _, _) = th.shape_and_strides(parts)
    (_, group, _), (token_stride, group_stride, _) = th.shape_and_strides(target)
    dtype, lse_stride = ir.MemRefType(target.type).element_type, th.shape_and_strides(lses)[1][0]
    lane, warp = th.lane_and_warp()
    across, last = head_dim // 16, held // 8 * (head_dim // 16) - 1
    unit = th.add(th.mul(block, 4), warp)
    inside = arith.cmpi(arith.CmpIPredicate.sle, unit, utils.c(last, i32))
    unit = arith.minsi(unit, utils.c(last, i32))
    row = th.add(th.mul(th.div(unit, across), 8), th.div(lane, 4))
    column = th.add(th.mul(th.rem(unit, across), 16), th.mul(th.rem(lane, 4), 2))
    token = th.div(row, group)
    of_group = th.sub(row, th.mul(token, group))
    place = th.add(th.address(lses), th.widen_index(th.mul(row, 4)))
    logits = [th.load(th.add(place, 4 * lse_stride * split), op=_ORDERED, kind="f32")[0] for split in range(splits)]
    place = th.add(th.address(parts), th.widen_index(th.add(th.mul(unit, _UNIT), th.mul(lane, 16))))
    found = [th.load(th.add(place, 4 * part_stride * split), 4, op=_ORDERED, kind="f32") for split in range(splits)]
    if sinks is not None:
        logits.append(
            th.load(th.add(th.address(sinks), th.widen_index(th.mul(of_group, 4))), op=_ORDERED, kind="f32")[0]
        )
    zero, one, lowest = (utils.c(value, f32) for value in (0.0, 1.0, -math.inf))
    offset = _finite(functools.reduce(arith.maximumf, logits), lowest, zero)
    weights = [th.exp(arith.subf(logit, offset)) for logit in logits]
    share = _inverse(functools.reduce(arith.addf, weights), zero, one)
    sums: list[Any] = [zero] * 4
    for weight, values in zip(weights, found, strict=False):
        factor = arith.mulf(weight, share)
        some = arith.cmpf(arith.CmpFPredicate.UNE, factor, zero)
        # Empty splits were never written: what lies there is skipped, not weighted.
        added = [arith.select(some, arith.mulf(factor, value), zero) for value in values]
        sums = [arith.addf(a, b) for a, b in zip(sums, added, strict=True)]
    exists = arith.andi(inside, th.below(row, rows))
    of_element = th.add(th.add(th.mul(token, token_stride), th.mul(of_group, group_stride)), column)
    address = th.add(th.address(target), th.mul(th.widen_index(of_element), 2))
    for start in range(2):
        pair = vector.from_elements(ir.VectorType.get((2,), f32), sums[2 * start : 2 * start + 2])
        word = utils.bitcast(arith.truncf(ir.VectorType.get((2,), dtype), pair), i32)
        th.when(exists, "st.global.b32 [$0], $1;", th.add(address, 16 * start), word)


def combine_latent(
    parts: Float[Array, "B splits padded R"], stats: Float[Array, "B splits kinds wide"], rows: int, dtype: Any,
    interpret: Any = None,
) -> tuple[Float[Array, "B rows R"], Float[Array, "B rows"]]:  # fmt: skip
    """Output and natural lse of all splits, one CTA for each query row, or for several of a large batch.

    Of the stats the first is a split's natural lse, the next two, if there are any, the factors of the left and the right half of
    its columns. Parts of lse -inf were never written: what lies there is not used.
    """
    b, splits, _, rank = parts.shape

    def factor_of(stats_ref, batch, split, row, weight):
        """Factor of a split's columns in the sum."""
        if stats.shape[2] == 1:
            return jnp.broadcast_to(weight, (rank,))
        left, right = (jnp.broadcast_to(weight * stats_ref[batch, split, half, row], (rank,)) for half in (1, 2))
        factor = jnp.where(lax.iota(jnp.int32, rank) < rank // 2, left, right)
        # Unwritten stats may be NaN as well.
        return jnp.where(jnp.broadcast_to(weight, (rank,)) > 0, factor, 0.0)

    at_once = rows_at_once(b, splits, rows)
    # What Mosaic would find by itself, in minutes where there are a hundred splits.
    strided = plgpu.Layout.WG_STRIDED((rank,), vec_size=rank // LANES)

    def part(parts_ref, *place):
        return plgpu.layout_cast(parts_ref[place], strided)

    def body(parts_ref, stats_ref, out_ref, total_ref):
        batch, first = lax.axis_index("b"), lax.axis_index("block") * at_once
        # As much as registers hold is asked for before the first weight is known, so that a CTA waits for memory once.
        early = [
            [part(parts_ref, batch, split, first + step) for split in range(min(splits, EARLY))]
            for step in range(at_once)
        ]
        logits = [[stats_ref[batch, split, 0, first + step] for split in range(splits)] for step in range(at_once)]
        for step in range(at_once):
            row = first + step
            weights, top, total, share = _weights(logits[step])
            out = jnp.zeros((rank,), jnp.float32)
            for split, weight in enumerate(weights):
                value = early[step][split] if split < EARLY else part(parts_ref, batch, split, row)
                factor = plgpu.layout_cast(factor_of(stats_ref, batch, split, row, weight * share), strided)
                # What lies in an empty split is skipped, not weighted.
                out += jnp.where(factor != 0, value.astype(jnp.float32) * factor, 0.0)
            out_ref[batch, row] = out.astype(dtype)
            total_ref[batch, row] = jnp.where(total == 0, -jnp.inf, top + jnp.log2(total) * (1 / LOG2E))

    return plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct((b, rows, rank), dtype), jax.ShapeDtypeStruct((b, rows), jnp.float32)),
        grid=(b, rows // at_once), grid_names=("b", "block"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(parts, stats)  # fmt: skip


def rows_at_once(b: int, splits: int, rows: int) -> int:
    """Rows of a CTA: few enough for registers, and CTAs few enough to run all at once."""
    at_once = 1
    while b * rows // at_once > RESIDENT and rows % (2 * at_once) == 0 and 2 * at_once * splits <= EARLY:
        at_once *= 2
    return at_once


def _combined_last(own, target, parts, lses, arrived, item, part, count, *, rows: int) -> None:
    """The interpreter runs CTAs in the order of work items: a sequence's last one finds the other splits."""
    del arrived
    parts.at[item][...] = own[pl.ds(0, rows)]

    @pl.when(part == count - 1)
    def _():
        index = jnp.arange(parts.shape[0])
        logits = jnp.where(((index > item - count) & (index <= item))[:, None], lses[...][:, :rows], -jnp.inf)
        weights = jnp.exp(logits - finite(logits.max(axis=0)))[..., None]
        total, held = weights.sum(axis=0), jnp.where(weights > 0, weights * parts[...], 0.0).sum(axis=0)
        target[...] = (held / jnp.where(total == 0, 1.0, total)).reshape(target.shape).astype(target.dtype)


@thread_op(args=(*[GLOBAL] * 5, *[SCALAR] * 3), interpret=_combined_last)
def combine_last(own, target, parts, lses, arrived, item, part, count, *, rows: int) -> None:
    """Writes the output where the split is the only one; else the last CTA to finish combines all, in the splits' order.

    Args:
      own: `[64, H]` float32 in shared memory, normalized.
      target: `[T, G, H]` in global memory, of whose rows `t * G + g` the first `rows` exist.
      parts: `[I, R, H]` float32 in global memory; lses: `[I, 64]`, natural, the own row written already.
      arrived: counter of the sequence's head, 0 between calls.
      item, part, count: place of this split in `parts`, and among the sequence's, and how many those are.
    """
    quads = _Quads(target, rows)
    utils.warpgroup_barrier()
    with utils.when(arith.cmpi(arith.CmpIPredicate.eq, count, utils.c(1, th.i32()))):
        for row in quads.rows():
            quads.store(row, th.load(quads.place(own, row, space=3), 4, op="ld.shared", kind="f32"))
    with utils.when(arith.cmpi(arith.CmpIPredicate.sgt, count, utils.c(1, th.i32()))):
        for row in quads.rows():
            values = th.load(quads.place(own, row, space=3), 4, op="ld.shared", kind="f32")
            there = quads.place(parts, row, index=item)
            th.when(th.below(row, rows), "st.global.v4.f32 [$0], {$1, $2, $3, $4};", there, *values)
        last = _arrive(arrived, quads.thread, th.sub(count, 1))
        with utils.when(arith.cmpi(arith.CmpIPredicate.ne, last, utils.c(0, th.i32()))):
            first = arith.subi(item, part)
            is_first_thread = arith.cmpi(arith.CmpIPredicate.eq, quads.thread, utils.c(0, th.i32()))
            th.when(is_first_thread, "st.global.b32 [$0], 0;", th.address(arrived))
            _weigh(own, lses, quads.thread, first, count, rows)
            held = quads.rows()
            for begin in range(0, len(held), _ROWS_AT_ONCE):
                _add_up(quads, held[begin : begin + _ROWS_AT_ONCE], parts, own, first, count)


class _Quads:
    """Four columns for every thread: a row is `H / 4` threads, and a thread has one row in every `512 / H`."""

    def __init__(self, target, rows: int):
        (_, self.group, self.head_dim), (self.token_stride, self.group_stride, _) = th.shape_and_strides(target)
        self.target, self.dtype, self.count = th.address(target), ir.MemRefType(target.type).element_type, rows
        lane, warp = th.lane_and_warp()
        self.thread, self.threads = th.add(th.mul(warp, 32), lane), self.head_dim // 4
        self.column = th.mul(th.rem(self.thread, self.threads), 4)

    def rows(self) -> list[Any]:
        at_once = 128 // self.threads
        own = th.div(self.thread, self.threads)
        return [th.add(own, step) for step in range(0, self.count, at_once)]

    def place(self, ref, row, *, space: int = 0, index: Any = None):
        """Address of the thread's columns in `ref [rows, H]` or in `ref[index]`; of the last row for those past it."""
        strides = th.shape_and_strides(ref)[1]
        row = arith.minsi(row, utils.c(self.count - 1, th.i32()))
        inner = th.mul(th.add(th.mul(row, strides[-2]), self.column), 4)
        if space == 3:
            return th.add(th.address(ref, 3), inner)
        outer = th.mul(th.widen_index(index), 4 * strides[0])
        return th.add(th.add(th.address(ref), outer), th.widen_index(inner))

    def store(self, row, values) -> None:
        """Rounded, to the output."""
        quad = vector.from_elements(ir.VectorType.get((4,), ir.F32Type.get()), list(values))
        rounded = arith.truncf(ir.VectorType.get((4,), self.dtype), quad)
        rounded = utils.bitcast(rounded, ir.VectorType.get((2,), th.i32()))
        token = th.div(row, self.group)
        of_group = th.sub(row, th.mul(token, self.group))
        offset = th.add(th.mul(token, self.token_stride), th.mul(of_group, self.group_stride))
        address = th.add(self.target, th.mul(th.widen_index(th.add(offset, self.column)), 2))
        low, high = (vector.extract(rounded, [], [i]) for i in range(2))
        th.when(th.below(row, self.count), "st.global.v2.b32 [$0], {$1, $2};", address, low, high)


def _weigh(own, lses, row, first, count, rows: int) -> None:
    """Weights of all splits in their sum, `[splits, 64]` float32, to shared memory that held the own one; a thread has one row."""
    f32 = ir.F32Type.get()
    zero, one, lowest = (utils.c(value, f32) for value in (0.0, 1.0, -math.inf))
    rounds = th.div(th.add(count, _LOGITS_AT_ONCE - 1), _LOGITS_AT_ONCE)

    def logits(index):
        for step in range(_LOGITS_AT_ONCE):
            part = th.add(th.mul(index, _LOGITS_AT_ONCE), step)
            there = arith.cmpi(arith.CmpIPredicate.slt, part, count)
            yield part, there, _lse(lses, th.add(first, part), row, rows, there)

    @utils.fori(rounds, [lowest, zero])
    def totals(index, state):
        top, total = state
        found = [logit for _, _, logit in logits(index)]
        new_top = functools.reduce(arith.maximumf, found, top)
        base = _finite(new_top, lowest, zero)
        total = arith.mulf(total, th.exp(arith.subf(top, base)))
        return [new_top, functools.reduce(arith.addf, [th.exp(arith.subf(logit, base)) for logit in found], total)]

    top, total = totals.results
    some = arith.cmpf(arith.CmpFPredicate.OGT, total, zero)
    base, share = _finite(top, lowest, zero), arith.divf(one, arith.select(some, total, one))

    @utils.fori(rounds, [])
    def _(index, state):
        for part, there, logit in logits(index):
            weight = arith.mulf(th.exp(arith.subf(logit, base)), share)
            exists = arith.andi(there, th.below(row, rows))
            th.when(exists, "st.shared.f32 [$0], $1;", _weight_place(own, part, row), weight)
        return state

    utils.warpgroup_barrier()


def _add_up(quads: _Quads, rows, parts, own, first, count) -> None:
    """Some rows of all splits times their weights, as many loads on their way as registers hold."""
    f32, at_once = ir.F32Type.get(), min(_LOADS_AT_ONCE // len(rows), 16)
    zero = utils.c(0.0, f32)

    @utils.fori(th.div(th.add(count, at_once - 1), at_once), [[zero] * 4 for _ in rows])
    def loop(index, sums):
        found = []
        for row in rows:
            for step in range(at_once):
                part = th.add(th.mul(index, at_once), step)
                there = arith.cmpi(arith.CmpIPredicate.slt, part, count)
                values = th.load(
                    quads.place(parts, row, index=th.add(first, part)), 4, op="ld.global", kind="f32", there=there
                )
                last = arith.minsi(row, utils.c(quads.count - 1, th.i32()))
                found.append((_weight(_weight_place(own, part, last), there), values))
        added = []
        for i, total in enumerate(sums):
            for weight, values in found[i * at_once : (i + 1) * at_once]:
                total = [arith.addf(a, arith.mulf(weight, b)) for a, b in zip(total, values, strict=True)]
            added.append(total)
        return added

    for row, sums in zip(rows, loop.results, strict=True):
        quads.store(row, sums)


def _weight_place(own, part, row):
    return th.add(th.address(own, 3), th.mul(th.add(th.mul(part, 64), row), 4))


def _weight(address, there):
    return th.load(address, op="ld.shared", kind="f32", there=there)[0]


def _finite(top, lowest, zero):
    """0 for a row that no split has anything of, whose weights are then 0 instead of NaN."""
    return arith.select(arith.cmpf(arith.CmpFPredicate.OEQ, top, lowest), zero, top)


def _inverse(total, zero, one):
    """Inverse of a sum of weights; 1 where there is none."""
    return arith.divf(one, arith.select(arith.cmpf(arith.CmpFPredicate.OGT, total, zero), total, one))


def _arrive(arrived, thread, last: Any):
    """Counts this CTA after all its threads' stores; 1 in all threads of the last one, which then see everybody's stores."""
    utils.warpgroup_barrier()
    return utils.inline_ptx(
        _VOTE, thread, th.address(arrived), last, utils.warpgroup_barrier_idx(sync=False), result_types=th.i32(),
        has_side_effects=True, convergent=True,
    )  # fmt: skip


def _lse(lses, index, row, rows: int, there):
    stride = th.shape_and_strides(lses)[1][0]
    row = arith.minsi(row, utils.c(rows - 1, th.i32()))
    offset = th.add(th.mul(th.widen_index(index), stride), th.widen_index(row))
    place = th.add(th.address(lses), th.mul(offset, 4))
    return th.load(place, kind="f32", there=there, otherwise="0xff800000")[0]


@thread_op(args=(GLOBAL,) * 3)
def combine_cluster(part, lse, target, *, rows: int, parts: int) -> None:
    """Combines the splits that the CTAs of a cluster hold in their shared memories, each CTA some of the rows.

    A thread has four columns. No CTA leaves before all are read.

    Args:
      part: `[64, H]` float32, normalized; lse: `[64]`, natural, -inf where the split holds nothing.
      target: `[T, G, H]` in global memory, of whose rows `t * G + g` the first `rows` exist.
    """
    i32, f32 = th.i32(), ir.F32Type.get()
    (_, group, head_dim), (token_stride, group_stride, _) = th.shape_and_strides(target)
    dtype = ir.MemRefType(target.type).element_type
    lane, warp = th.lane_and_warp()
    thread, threads = th.add(th.mul(warp, 32), lane), head_dim // 4
    at_once = 128 // threads
    rank = utils.inline_ptx("mov.u32 $0, %cluster_ctarank;", result_types=i32)
    column, held, held_lse, base = th.rem(thread, threads), th.address(part, 3), th.address(lse, 3), th.address(target)
    th.cluster_barrier()
    zero, one, lowest = (utils.c(value, f32) for value in (0.0, 1.0, -math.inf))
    # CTAs take turns, so that few rows are everybody's and nobody has more steps than it must.
    for step in range(0, rows, parts * at_once):
        row = th.add(th.add(th.mul(rank, at_once), th.div(thread, threads)), step)
        # Everything is asked for before the first answer is needed. Rows past the last lie in shared memory all the same.
        row_held = arith.minsi(row, utils.c(63, i32))
        place = th.add(held, th.add(th.mul(row_held, 4 * head_dim), th.mul(column, 16)))
        logits = [_load_peer(th.add(held_lse, th.mul(row_held, 4)), other, 1)[0] for other in range(parts)]
        loaded = [_load_peer(place, other, 4) for other in range(parts)]
        offset = _finite(functools.reduce(arith.maximumf, logits), lowest, zero)
        total, sums = zero, [zero] * 4
        for logit, values in zip(logits, loaded, strict=True):
            weight = th.exp(arith.subf(logit, offset))
            some = arith.cmpf(arith.CmpFPredicate.OGT, weight, zero)
            # Empty splits were never written: what lies there is skipped, not weighted.
            kept = [arith.select(some, value, zero) for value in values]
            sums = [arith.addf(one_sum, arith.mulf(weight, value)) for one_sum, value in zip(sums, kept, strict=True)]
            total = arith.addf(total, weight)
        share = _inverse(total, zero, one)
        quad = vector.from_elements(ir.VectorType.get((4,), f32), [arith.mulf(value, share) for value in sums])
        rounded = utils.bitcast(arith.truncf(ir.VectorType.get((4,), dtype), quad), ir.VectorType.get((2,), i32))
        token = th.div(row, group)
        of_row = th.add(th.mul(token, token_stride), th.mul(th.sub(row, th.mul(token, group)), group_stride))
        address = th.add(base, th.mul(th.widen_index(th.add(of_row, th.mul(column, 4))), 2))
        low, high = (vector.extract(rounded, [], [i]) for i in range(2))
        th.when(th.below(row, rows), "st.global.v2.b32 [$0], {$1, $2};", address, low, high)
    th.cluster_barrier()


def _load_peer(address, rank: int, count: int):
    """Float32 from the shared memory of the cluster's CTA `rank`, at an address of the own."""
    f32, vectors = ir.F32Type.get(), "" if count == 1 else ".v4"
    names = ", ".join(f"${i}" for i in range(count))
    return utils.inline_ptx(
        f"{{ .reg .b32 there; mapa.shared::cluster.u32 there, ${count}, {rank};"
        f" ld.shared::cluster{vectors}.f32 {names if count == 1 else '{' + names + '}'}, [there]; }}",
        address, result_types=[f32] * count, has_side_effects=True,
    )  # fmt: skip


@thread_op(
    args=(MATRIX, ROW, ROW, GLOBAL),
    returns=lambda tile, row_max, *_: [matrix(tile.shape), *[row_vector(row_max.shape[0])] * 2],
)
def swap_with_peer(tile, top, total, memory):
    """Gives the cluster's other CTA a tile and two numbers of every row, and returns what that gives.

    A thread's numbers go to the thread in its place over there, so that any layout will do: in `memory` lie sixteen bytes of each
    thread, then the next sixteen.
    """
    lane, warp = th.lane_and_warp()
    own = th.add(th.address(memory, space=3), th.mul(th.add(th.mul(warp, 32), lane), 16))
    there = _at_peer(own)
    flat = [number for array in (tile, top, total) for number in _numbers(array)]
    for start in range(0, len(flat), 4):
        place = th.add(there, 128 * 4 * start)
        four = flat[start : start + 4]
        utils.inline_ptx("st.shared::cluster.v4.f32 [$0], {$1, $2, $3, $4};", place, *four, has_side_effects=True)
    th.cluster_barrier()
    found = []
    for start in range(0, len(flat), 4):
        found += th.load(th.add(own, 128 * 4 * start), 4, op="ld.shared", kind="f32")
    arrays = []
    for array in (tile, top, total):
        count = len(_numbers(array))
        arrays.append(_like(array, found[:count]))
        found = found[count:]
    return arrays


@thread_op(args=(MATRIX, GLOBAL, SCALAR))
def give_peer(tile, memory, barrier) -> None:
    """Begins to give the cluster's other CTA a tile, and expects one of it.

    A thread's numbers go to the thread in its place over there, as in `swap_with_peer`, from where `add_given` takes them.

    Args:
      tile: float32 in registers.
      memory: float32 `[elements of the tile]` in shared memory, where the other CTA's tile arrives.
      barrier: int32 scalar, the address of the barrier that completes once it is there.
    """
    flat, lane_and_warp = _numbers(tile), th.lane_and_warp()
    own = th.add(th.address(memory, space=3), th.mul(th.add(th.mul(lane_and_warp[1], 32), lane_and_warp[0]), 16))
    utils.inline_ptx(
        f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {4 * len(flat)};", barrier, has_side_effects=True
    )
    there, arrival = _at_peer(own), _at_peer(barrier)
    for start in range(0, len(flat), 4):
        utils.inline_ptx(
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [$0], {$1, $2, $3, $4}, [$5];",
            th.add(there, 128 * 4 * start), *flat[start : start + 4], arrival, has_side_effects=True,
        )  # fmt: skip


@thread_op(args=(MATRIX, GLOBAL, SCALAR), returns=lambda tile, *_: matrix(tile.shape))
def add_given(tile, memory, taken):
    """The sum of a tile and of what the other CTA has given, and tells that it is taken.

    Args:
      tile: float32 in registers.
      memory: float32, see `give_peer`.
      taken: int32 scalar, the address of the other CTA's barrier for that, in the own shared memory.
    """
    flat, (lane, warp) = _numbers(tile), th.lane_and_warp()
    own, found = th.add(th.address(memory, space=3), th.mul(th.add(th.mul(warp, 32), lane), 16)), []
    for start in range(0, len(flat), 4):
        found += th.load(th.add(own, 128 * 4 * start), 4, op="ld.shared", kind="f32")
    utils.inline_ptx(
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [$0];", _at_peer(taken), has_side_effects=True
    )
    return _like(tile, [arith.addf(one, other) for one, other in zip(flat, found, strict=True)])


@thread_op()
def await_cluster() -> None:
    """All threads of the cluster's CTAs wait for each other."""
    th.cluster_barrier()


def _at_peer(address):
    """The same address in the shared memory of the other CTA of a cluster of two."""
    return utils.inline_ptx(
        "{ .reg .b32 rank; mov.u32 rank, %cluster_ctarank; xor.b32 rank, rank, 1; mapa.shared::cluster.u32 $0, $1, rank; }",
        address, result_types=th.i32(), has_side_effects=True,
    )  # fmt: skip


def _numbers(array) -> list:
    """A thread's numbers, which its registers hold in vectors."""
    held = array.registers.flat
    return [vector.extract(some, [], [i]) for some in held for i in range(ir.VectorType(some.type).shape[0])]


def _like(array, numbers):
    held, width = np.empty_like(array.registers), ir.VectorType(array.registers.flat[0].type).shape[0]
    for index, place in enumerate(np.ndindex(held.shape)):
        held[place] = vector.from_elements(array.registers.flat[0].type, numbers[index * width : (index + 1) * width])
    return mgpu.FragmentedArray(_registers=held, _layout=array.layout, _is_signed=None)


def _store_split_interpreted(parts: Any, lses: Any, blocks: list[Any], lse: Any) -> None:
    rows, first = parts.shape[0], 0
    lses[...] = lax.bitcast_convert_type(lse, jnp.int32)
    for block in blocks:
        width = block.shape[1]
        parts.at[:, pl.ds(first, width)][...] = lax.bitcast_convert_type(block[:rows], jnp.int32)
        first += width


def store_split(parts: Any, lses: Any, blocks: list[Any], lse: Any) -> None:
    """Leaves a split for `combine_mailbox`: its first rows in `parts [rows, H]`, one number for each row in `lses [64]`.

    Args:
      blocks: columns after columns, matrix instructions' results.
    """
    _store_split(parts, lses, blocks, lse, rows=parts.shape[0])


@thread_op(
    args=(GLOBAL, GLOBAL, MATRIX, ROW),
    interpret=lambda parts, lses, blocks, lse, *, rows: _store_split_interpreted(parts, lses, blocks, lse),
)
def _store_split(parts: Any, lses: Any, blocks: list[Any], lse: Any, *, rows: int) -> None:
    columns = 0
    for index, block in enumerate(blocks):
        base, pitch = th.address(parts), th.shape_and_strides(parts)[1][0]
        for position, place in zip(
            block.layout.thread_idxs(block.shape), np.ndindex(block.registers.shape), strict=True
        ):
            row, first = (arith.index_cast(th.i32(), at) for at in position)
            pair = block.registers[place]
            low, high = (vector.extract(pair, [], [i]) for i in range(2))
            address = th.add(base, th.mul(th.widen_index(th.add(th.mul(row, pitch), th.add(first, columns))), 4))
            th.when(th.below(row, rows), "st.relaxed.gpu.global.v2.f32 [$0], {$1, $2};", address, low, high)
        columns += block.shape[1]
        if index == 0:
            _store_split_lse(lses, lse, rows)


def _store_split_lse(lses: Any, lse: Any, rows: int) -> None:
    for position, place in zip(lse.layout.thread_idxs(lse.shape), np.ndindex(lse.registers.shape), strict=True):
        row = arith.index_cast(th.i32(), position[0])
        value = lse.registers[place]
        if isinstance(value.type, ir.VectorType):
            value = vector.extract(value, [], [0])
        address = th.add(th.address(lses), th.mul(th.widen_index(row), 4))
        th.when(th.below(row, rows), "st.relaxed.gpu.global.f32 [$0], $1;", address, value)


def _combine_interpreted(
    parts: Any, lses: Any, target: Any, first_item: Any, sequence: Any, head: Any, split: Any, busy: Any, *,
    shapes: SplitHeads,
) -> None:  # fmt: skip
    @pl.when(split == 0)
    def _():
        there = lax.broadcasted_iota(jnp.int32, (shapes.splits, shapes.rows), 0) < busy
        held_lses, held = (
            lax.bitcast_convert_type(ref.at[pl.ds(first_item, shapes.splits)][...], jnp.float32)
            for ref in (lses, parts)
        )
        held_lses = jnp.where(there, held_lses[:, : shapes.rows], -jnp.inf)
        row_max = held_lses.max(axis=0)
        weights = jnp.exp(held_lses - jnp.where(row_max == -jnp.inf, 0.0, row_max))
        row_sum = weights.sum(axis=0)
        out = jnp.where(there[..., None], weights[..., None] * held, 0.0).sum(axis=0)
        out = out / jnp.where(row_sum > 0, row_sum, 1.0)[:, None]
        width = shapes.group * shapes.head_dim
        out = out.reshape(shapes.tokens, width).astype(jnp.bfloat16)
        out = interleave_columns(out) if shapes.interleaved else out
        words = lax.bitcast_convert_type(out.reshape(shapes.tokens, width // 2, 2), jnp.int32)
        target.at[pl.ds(sequence * shapes.tokens, shapes.tokens), pl.ds(head * (width // 2), width // 2)][...] = words


@thread_op(args=(*[GLOBAL] * 3, *[SCALAR] * 5), interpret=_combine_interpreted)
def combine_mailbox(
    parts: Any, lses: Any, target: Any, first_item: Any, sequence: Any, head: Any, split: Any, busy: Any, *,
    shapes: SplitHeads,
) -> None:  # fmt: skip
    """Combines all splits of some rows of a head, in the splits' order, and writes them as bfloat16 to `target`.

    Reads what `store_split` leaves until no word is EMPTY, and makes the words EMPTY again.

    Args:
      parts: `[items, rows, H]`, float32 bits, normalized; lses: `[items, 64]`, natural.
      target: `[B * T, N * H / 2]` words.
      first_item: of the head; split: which of its CTAs this is; busy: how many of its splits have keys, int32 scalars.
    """
    lane, _ = th.lane_and_warp()
    for exists, row, column, address in _quads(shapes, target, sequence, head, split):
        of_lse = th.add(th.mul(first_item, ROWS), row)
        of_part = th.add(th.mul(th.add(th.mul(first_item, shapes.rows), row), shapes.head_dim), column)
        lse, values = (
            th.add(th.address(ref), th.mul(th.widen_index(of), 4)) for ref, of in ((lses, of_lse), (parts, of_part))
        )
        wanted = arith.select(exists, busy, utils.c(0, th.i32()))
        low, high = packed(_weighted(_take_parts(shapes, lse, values, wanted)))
        if shapes.interleaved:
            _store_interleaved(exists, address, column, low, high)
        else:
            th.when(exists, "st.relaxed.gpu.global.v2.b32 [$0], {$1, $2};", address, low, high)
        # Only now: others wait for the row.
        _empty_parts(shapes, lse, values, wanted, lane)


def _store_interleaved(exists, address, column, low, high) -> None:
    """Writes four columns, two in a word, where they lie when columns are in pairs; `address` is theirs when they are not."""
    i16, i64 = (ir.IntegerType.get_signless(bits) for bits in (16, 64))
    among = arith.andi(column, utils.c(15, th.i32()))
    place = th.add(th.mul(arith.andi(column, utils.c(7, th.i32())), 2), th.div(among, 8))
    address = arith.addi(address, arith.extsi(i64, th.mul(th.sub(place, among), 2)))
    halves = [
        arith.trunci(i16, half) for word in (low, high) for half in (word, arith.shrui(word, utils.c(16, th.i32())))
    ]
    for index, half in enumerate(halves):
        th.when(exists, f"st.relaxed.gpu.global.b16 [$0 + {4 * index}], $1;", address, half)


@thread_op(args=(GLOBAL, *[SCALAR] * 3), interpret=lambda *_, shapes: None)
def empty_heads(target: Any, sequence: Any, head: Any, split: Any, *, shapes: SplitHeads) -> None:
    """Makes the words EMPTY that `combine_mailbox` has written."""
    for exists, _, _, address in _quads(shapes, target, sequence, head, split):
        th.when(exists, "st.relaxed.gpu.global.v2.b32 [$0], {$1, $1};", address, utils.c(EMPTY, th.i32()))


def _quads(shapes: SplitHeads, target, sequence, head, split):
    """Elements that this thread of a head's CTA combines: whether it has any, row and column of the head, and address.

    A row is a warp's: all its threads exist or none.
    """
    lane, warp = th.lane_and_warp()
    thread = th.add(th.add(th.mul(warp, 32), lane), th.mul(split, WARPGROUP))
    words = th.shape_and_strides(target)[0][1]
    for start in range(0, shapes.quads, shapes.combiners * WARPGROUP):
        quad = th.add(thread, start)
        exists = th.below(quad, shapes.quads)
        quad = arith.minsi(quad, utils.c(shapes.quads - 1, th.i32()))
        row, column = th.div(quad, shapes.head_dim // 4), th.mul(th.rem(quad, shapes.head_dim // 4), 4)
        token, among = th.div(row, shapes.group), th.rem(row, shapes.group)
        token = th.add(th.mul(sequence, shapes.tokens), token)
        word = th.div(th.add(th.mul(th.add(th.mul(head, shapes.group), among), shapes.head_dim), column), 2)
        offset = th.add(th.mul(token, words), word)
        yield exists, row, column, th.add(th.address(target), th.mul(th.widen_index(offset), 4))


def _take_parts(shapes: SplitHeads, lse, values, busy) -> list[list]:
    """A row's lse and a thread's four columns of the first `busy` splits, as soon as all are there; -inf for the others.

    Args:
      lse, values: addresses in the first split.
    """
    count, f32 = shapes.splits, ir.F32Type.get()
    strides = _strides(shapes)
    lines = ["{", f".reg .pred p, q<{count}>; .reg .b32 m, busy; .reg .b64 l, v;"]
    lines += [f"mov.b64 l, ${5 * count}; mov.b64 v, ${5 * count + 1}; mov.b32 busy, ${5 * count + 2};"]
    for part in range(count):
        lines += [f"setp.gt.s32 q{part}, busy, {part}; mov.b32 ${5 * part}, 0xff800000;"]
        lines += [f"mov.b32 ${5 * part + word}, 0;" for word in range(1, 5)]
    lines += ["again:"]
    for part in range(count):
        words = ", ".join(f"${5 * part + word}" for word in range(1, 5))
        lines += [f"@q{part} ld.relaxed.gpu.global.b32 ${5 * part}, [l + {part * strides[0]}];"]
        lines += [f"@q{part} ld.relaxed.gpu.global.v4.b32 {{{words}}}, [v + {part * strides[1]}];"]
    lines += ["mov.b32 m, $0;", *(f"max.u32 m, m, ${word};" for word in range(1, 5 * count))]
    lines += [f"setp.eq.u32 p, m, {EMPTY & 0xFFFFFFFF}; vote.sync.any.pred p, p, 0xffffffff; @p bra again;", "}"]
    found = utils.inline_ptx(
        "\n".join(lines), lse, values, busy, result_types=[th.i32()] * (5 * count), has_side_effects=True
    )
    return [[utils.bitcast(word, f32) for word in found[5 * part : 5 * part + 5]] for part in range(count)]


def _empty_parts(shapes: SplitHeads, lse, values, busy, lane) -> None:
    """Makes the words EMPTY again that `_take_parts` has read."""
    strides = _strides(shapes)
    empty, first_lane = utils.c(EMPTY, th.i32()), arith.cmpi(arith.CmpIPredicate.eq, lane, utils.c(0, th.i32()))
    for part in range(shapes.splits):
        there = arith.cmpi(arith.CmpIPredicate.sgt, busy, utils.c(part, th.i32()))
        th.when(there, "st.global.v4.b32 [$0], {$1, $1, $1, $1};", th.add(values, part * strides[1]), empty)
        one = arith.andi(there, first_lane)
        th.when(one, "st.global.b32 [$0], $1;", th.add(lse, part * strides[0]), empty)


def _strides(shapes: SplitHeads) -> tuple[int, int]:
    """Bytes from one split's lse and values to the next one's."""
    return 4 * ROWS, 4 * shapes.rows * shapes.head_dim


def _weighted(found: list[list]) -> list:
    """The sum of splits, each its lse and four columns; zeros where no split holds anything."""
    f32 = ir.F32Type.get()
    lowest, zero, one = (utils.c(value, f32) for value in (-math.inf, 0.0, 1.0))
    offset = _finite(functools.reduce(arith.maximumf, [lse for lse, *_ in found]), lowest, zero)
    total, sums = zero, [zero] * 4
    for lse, *values in found:
        weight = th.exp(arith.subf(lse, offset))
        total = arith.addf(total, weight)
        sums = [arith.addf(a, arith.mulf(weight, b)) for a, b in zip(sums, values, strict=True)]
    share = _inverse(total, zero, one)
    return [arith.mulf(value, share) for value in sums]


def exchange_halves(acc, row_max, row_sum, rank, memory):
    """Exchanges half of the columns, maxima and sums with the cluster's other CTA over distributed shared memory.

    What one has of the other's columns goes straight from its registers to the other's shared memory.

    Args:
      acc: `[64, H]`, not normalized; row_max, row_sum: `[64]`.
      rank: 0 or 1, which half of the columns is the own one.
      memory: float32 `[128 * (H / 4 + 4)]` in shared memory, which the other CTA writes to.

    Returns:
      The own half `[64, H / 2]`; the peer's of the same columns, its maxima and its sums.
    """
    half = acc.shape[1] // 2
    low, high = acc[:, :half], acc[:, half:]
    first = lax.broadcast_in_dim(rank == 0, low.shape, ())
    mine, theirs = jnp.where(first, low, high), jnp.where(first, high, low)
    return mine, swap_with_peer(theirs, row_max, row_sum, memory)


def combine_halves(mine, peer, live):
    """Normalized output of two splits, each its columns, its maxima and its sums; 0 in rows that are not live.

    `live`: which rows count, a function of their sums.
    """
    (acc, row_max, row_sum), (other, other_max, other_sum) = mine, peer
    offset = finite(jnp.maximum(row_max, other_max))
    kept, added = jnp.exp2(row_max - offset), jnp.exp2(other_max - offset)
    total = row_sum * kept + other_sum * added
    some = live(total)
    inverse = jnp.where(some, 1.0 / counted(total, some), 0.0)
    out = rescaled(acc, kept * inverse) + rescaled(other, added * inverse)
    # Not a product alone: rows past the live ones may hold NaN.
    return jnp.where(lax.broadcast_in_dim(inverse, acc.shape, [0]) != 0, out, 0.0)
