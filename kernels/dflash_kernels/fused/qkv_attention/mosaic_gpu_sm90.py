"""The Hopper kernel: the CTAs of each sequence's KV head, as in `paged_attention`, make queries and new keys themselves.

Keys that are in the pages already are on their way meanwhile. The new ones go to the pages before the copies of the tiles that hold
them begin; nobody else reads or writes them.

Measured on an H200, 16 tokens of 8 and of 32 sequences after 1,034, cold pages, in a loop with a fusion of 1.9 and 2.5 us between
launches: 17.6 and 49.2 us (19.2 and 50.0 with one product after the other, angles loaded for every head, a fence right after the
stores, and the compiler's barriers). Of 8 sequences, by stamps of each CTA: first copies at 1 us, queries ready at 1.5 to 4.3, a
tile every 0.8, which is there by then, all of them done at 8.9 to 13.1, heads written at 11.8 to 14.6. Slower there: a fourth tile
in the ring (by 0.5), all copies or all but one tile's after the queries (19.2 and 17.9), two warpgroups a CTA (17.7). Of 32 memory
is busy from the first tile to the last, at 3.9 TB/s; a third tile in the ring 50.9.
"""

# Pallas declares what it inlines with the context that it passes itself.
# pyright: reportAbstractUsage=false, reportCallIssue=false, reportPrivateImportUsage=false

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.attention.paged.launch import ROWS, SWAPPED, Launch
from dflash_kernels.core.layouts import aliased_ref, freeze_aliased
from dflash_kernels.fused import heads
from dflash_kernels.fused.plan import HEAD_DIM, KEYS, Attention
from dflash_kernels.mosaic_gpu import epilogue, paged_kv, softmax
from dflash_kernels.mosaic_gpu import ptx as th
from dflash_kernels.mosaic_gpu.combine import combine_fragments, combine_halves, combine_xla, exchange_halves
from dflash_kernels.mosaic_gpu.convert import numbers
from dflash_kernels.mosaic_gpu.layouts import TILED
from dflash_kernels.mosaic_gpu.paged_kv import PagedKV, Work
from dflash_kernels.mosaic_gpu.pipeline import by_one_warp, warpgroup_barrier
from dflash_kernels.mosaic_gpu.softmax import FOLDED, LOG2E, partial_reduce
from dflash_kernels.mosaic_gpu.thread_op import (
    GLOBAL,
    MATRIX,
    ROW,
    SCALAR,
    WORDS,
    kernel,
    thread_op,
)
from dflash_kernels.mosaic_gpu.tma import order_copies
from dflash_kernels.mosaic_gpu.wgmma import add_values, multiply_blocks, scores_of_blocks, side_by_side

_HALF = HEAD_DIM // 2


def attention(
    launch: Launch,
    shapes: Attention,
    eps: float,
    inputs: dict[str, jax.Array],
    pools: dict[str, jax.Array],
    interpret: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs the kernel: the output `[B, T, N, H]` and the pools.

    Args:
      inputs: `qkv [M, N + 2 K, H]`, `cos` and `sin` float32 `[M, H / 2]`, `q_norm` and `k_norm [H]` or neither, `table`,
        `seq_lens`, `q_lens`.
      pools: `k` and `v`, written in place.
    """
    launch = launch.traced_for(interpret)
    b, rows, whole = shapes.sequences, -(-shapes.rows // 8) * 8, launch.direct or launch.together
    shape = (b, launch.tokens, launch.kv_heads, launch.group) if whole else (b, launch.kv_heads, launch.splits, rows)
    made = {"o": jax.ShapeDtypeStruct((*shape, HEAD_DIM), jnp.bfloat16 if whole else jnp.float32)}
    if not whole:
        made["lse"] = jax.ShapeDtypeStruct((b, launch.kv_heads, launch.splits, ROWS), jnp.float32)
    names = [*inputs, *pools, *made]

    def body(*refs, **buffers):
        cta = _cta(launch, shapes, eps, dict(zip(names, refs, strict=True)), buffers)
        (_attend_as_pair if launch.pair else _attend)(cta)

    body.__name__ = "qkv_attention"  # what profilers show
    held = {name: aliased_ref(pool) for name, pool in pools.items()}
    out, *lse = kernel(
        body,
        out_type=tuple(made.values()),
        scratch_types=scratch(launch, jnp.bfloat16),
        **paged_kv.grid(launch, b), num_threads=1, thread_name="wg",
        # Row reductions of a matrix tile stay within a warp: no scratch, which two CTAs on a multiprocessor have no room for.
        # Nothing here relies on barriers of the compiler's own, of which it would put two around every refill of the ring.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )(*inputs.values(), *held.values())  # fmt: skip
    if not whole:
        given = out, lse[0], None, launch.tokens, launch.group, jnp.bfloat16
        out = combine_fragments(*given, interpret) if launch.fragments else combine_xla(*given)
    return out.reshape(b, launch.tokens, -1, HEAD_DIM), freeze_aliased(held["k"]), freeze_aliased(held["v"])


def scratch(launch: Launch, dtype: Any) -> dict[str, Any]:
    """Shared memory and barriers of one CTA. The output leaves from registers."""
    queries = plgpu.SMEM((1, 2 * ROWS, _HALF), dtype, transforms=TILED)
    buffers = paged_kv.ring(launch, dtype) | {"q_sm": queries}
    if launch.pair:
        # What the other CTA writes to.
        buffers["swapped_sm"] = plgpu.SMEM((SWAPPED * (launch.head_dim // 4 + 4),), jnp.float32)
    return buffers


# Prologue: queries and new keys, whose loads are on their way to registers before the first copies of tiles
#
# As in `heads`, a head's row belongs to eight threads. Here all rows of a thread are one token's, its new key among them, so that
# the angles are loaded once.


def _parts(shapes: Attention, loads: list[Any]) -> tuple[list[Any], ...]:
    """Loads of a thread: of its query rows, of a key and a value, of angles, and of both norms' weights where there are norms."""
    queries = 2 * _rows_of_thread(shapes)
    return loads[:queries], loads[queries : queries + 4], loads[queries + 4 : queries + 8], loads[queries + 8 :]


def _loaded(shapes: Attention, norm: Any) -> list[Any]:
    """Types of the loads of a thread: two halves of every row, and four of angles and of weights each."""
    return [WORDS] * (2 * (_rows_of_thread(shapes) + 2) + (4 if norm is None else 8))


def issue_loads(shapes: Attention, refs: Mapping[str, Any], sequence: Any, head: Any) -> list[Any]:
    """Starts the loads to registers of the operands of `put_queries` and `put_new`."""
    names = ("qkv", "cos", "sin", "q_norm", "k_norm")
    return _issue_loads(*[refs.get(name) for name in names], sequence, head, shapes=shapes)


@thread_op(
    args=(*[GLOBAL] * 5, *[SCALAR] * 2), returns=lambda *given, shapes: _loaded(shapes, given[3]),
    interpret=lambda *_, shapes: [],
)  # fmt: skip
def _issue_loads(
    qkv: Any, cos: Any, sin: Any, q_norm: Any, k_norm: Any, sequence: Any, head: Any, *, shapes: Attention
) -> list[Any]:
    _, place = heads.line_and_place()
    token = th.add(th.mul(sequence, shapes.tokens), _token(shapes))
    first, key = th.mul(head, shapes.group), th.add(head, shapes.kv_heads * shapes.group)
    rows = [*[th.add(first, among) for among in _among(shapes)], key, th.add(key, shapes.kv_heads)]
    found = [address for row in rows for address in heads.head_places(qkv, token, row, place)]
    found += heads.angle_places(cos, sin, token, place)
    found += [address for norm in (q_norm, k_norm) for address in heads.weight_places(norm, place)]
    # Volatile: as plain loads they would be moved to where they are used.
    words = [th.load(address, 4, op="ld.volatile.global") for address in found]
    return [th.as_array(four) for four in words]


def put_queries(
    shapes: Attention, eps: float, refs: Mapping[str, Any], loads: list[Any], target: Any, sequence: Any, head: Any
) -> None:
    """Normed, rotated queries of a KV head to `target [2 * 64, 64]`, a block of columns below the other."""
    queries, _, turn, weights = _parts(shapes, loads)
    given = [*[refs.get(name) for name in ("qkv", "cos", "sin", "q_norm")], sequence, head]
    _put_queries(target, [*queries, *turn, *weights[:2]], given, shapes=shapes, eps=eps)


def _queries_put(target: Any, loads: list[Any], given: list[Any], **options: Any) -> None:
    del loads  # in the interpreter there are none
    heads.load_queries(*given, target, **options)


@thread_op(args=(heads.TILES, WORDS.layout, None), interpret=_queries_put)
def _put_queries(target: Any, loads: list[Any], given: None, *, shapes: Attention, eps: float) -> None:
    del given
    words = [th.as_words(array) for array in loads]
    _, place = heads.line_and_place()
    rows = 2 * _rows_of_thread(shapes)
    base, weights = th.address(target, space=3), [numbers(half) for half in words[rows + 4 :]]
    turn = heads.angles(words[rows : rows + 4])
    first = th.mul(_token(shapes), shapes.group)
    for index, among in enumerate(_among(shapes)):
        held = heads.normed(words[2 * index : 2 * index + 2], weights, eps)
        for block, half in enumerate(heads.rotated(held, turn)):
            heads.store_line(th.add(base, block * KEYS * heads.LINE), th.add(first, among), place, half)
    th.commit_shared()


def put_new(
    shapes: Attention, eps: float, refs: Mapping[str, Any], loads: list[Any], pages: list[Any], sequence: Any, head: Any,
    limits: list[Any],
) -> None:  # fmt: skip
    """New keys, normed and rotated, and new values of a head to their pages, those at positions `limits[1]` to `limits[2] - 1`.

    `pages`: of the first new token's tile and of the next one; `limits[0]`: position of the first new token.
    """
    _, new, turn, weights = _parts(shapes, loads)
    given = [*[refs.get(name) for name in ("qkv", "cos", "sin", "k_norm", "table")], sequence]
    pools, loads = [refs["k"], refs["v"]], [*new, *turn, *weights[2:]]
    _put_new(pools, head, limits, pages, loads, given, shapes=shapes, eps=eps)


def _new_put(pools: Any, head: Any, limits: Any, pages: Any, loads: Any, given: list[Any], **options: Any) -> None:
    del pages, loads  # in the interpreter there are none
    *arrays, sequence = given
    heads.write_new(*arrays, pools, None, None, sequence, head, limits, **options)


@thread_op(args=(GLOBAL, SCALAR, SCALAR, SCALAR, WORDS.layout, None), interpret=_new_put)
def _put_new(
    pools: list[Any], head: Any, limits: list[Any], pages: list[Any], loads: list[Any], given: None, *, shapes: Attention,
    eps: float,
) -> None:  # fmt: skip
    del given
    words = [th.as_words(array) for array in loads]
    (line, _), lines = heads.line_and_place(), _lines(shapes)
    leads = th.compare(th.rem(line, lines), "eq", 0)
    token = th.select(leads, th.div(line, lines), th.number(shapes.tokens))
    new = heads.New(shapes, limits, token)
    page, following = pages
    same = th.compare(th.div(new.position, KEYS), "eq", th.div(new.first, KEYS))
    new.put(eps, words, pools, head, th.select(same, page, following), None)


def _lines(shapes: Attention) -> int:
    """Threads with the same columns that share one token's heads."""
    lines = 1
    while 2 * lines * shapes.tokens <= heads.ROWS_AT_ONCE and 2 * lines <= shapes.group:
        lines *= 2
    return lines


def _rows_of_thread(shapes: Attention) -> int:
    """Query rows that a thread makes."""
    return -(-shapes.group // _lines(shapes))


def _token(shapes: Attention) -> Any:
    """Token of a sequence that a thread has; the last one where there are fewer."""
    line, _ = heads.line_and_place()
    return th.least(th.div(line, _lines(shapes)), shapes.tokens - 1)


def _among(shapes: Attention) -> list[Any]:
    """Query heads handled per thread, clamped to the last head of the group."""
    line, _ = heads.line_and_place()
    lines, last = _lines(shapes), th.number(shapes.group - 1)
    return [th.least(th.add(th.rem(line, lines), index * lines), last) for index in range(_rows_of_thread(shapes))]


@dataclass(frozen=True)
class Cta:
    """State of a CTA's program. CTAs that share a head's keys take turns with the tiles, and all make its queries.

    Attributes:
      refs, buffers: arrays in global memory, and shared memory and barriers, by name.
      kv: producer of keys and values.
      first: position of the first new token; new: tiles from this one on have new keys, or are past the end.
    """

    launch: Launch
    shapes: Attention
    eps: float
    refs: dict[str, Any]
    buffers: dict[str, Any]
    kv: PagedKV
    first: Any
    new: Any

    @property
    def work(self) -> Work:
        return self.kv.work

    @property
    def query_blocks(self) -> list[Any]:
        return [self.buffers["q_sm"].at[0, pl.ds(block * ROWS, ROWS)] for block in range(2)]


def _cta(launch: Launch, shapes: Attention, eps: float, refs: dict[str, Any], buffers: dict[str, Any]) -> Cta:
    kv = paged_kv.paged_kv(launch, refs, buffers, stride=launch.splits, one_warp=True)
    first = kv.work.seq_len - kv.work.q_len
    return Cta(launch, shapes, eps, refs, buffers, kv, first, lax.div(first, jnp.int32(KEYS)))


def _attend(cta: Cta) -> None:
    """The program of a CTA."""
    cta, loads, pages = _first_reads(cta)
    work = cta.work

    @pl.when(work.begin < work.end)
    def _():
        _prologue(cta, loads, pages)
        acc, row_max, row_sum = _mainloop(cta)
        out, lse = softmax.finalize(acc, row_max, row_sum, work.live(row_sum, ROW))
        _write(cta, out[:, : cta.launch.head_dim], lse)

    @pl.when(work.begin >= work.end)
    def _():
        lse = plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), ROW)
        zeros = plgpu.layout_cast(jnp.zeros((ROWS, cta.launch.head_dim), jnp.float32), MATRIX)
        _write(cta, zeros if cta.launch.direct else None, lse)


def _attend_as_pair(cta: Cta) -> None:
    """The program of a CTA that has half of a head's keys: it writes half of the columns, whether it has any tiles or not."""
    cta, loads, pages = _first_reads(cta)
    work = cta.work
    pl.when(work.begin < work.end)(lambda: _prologue(cta, loads, pages))
    acc, row_max, row_sum = _mainloop(cta)
    mine, peer = exchange_halves(acc, row_max, row_sum, work.place.split, cta.buffers["swapped_sm"])
    out = combine_halves((mine, row_max, row_sum), peer, functools.partial(work.live, layout=ROW))
    _store(cta, out, work.place.split * mine.shape[1])


def _first_reads(cta: Cta) -> tuple[Cta, list[Any], list[Any]]:
    """Entries of the page table, and what queries and new keys are made of, asked for; pages of the ring's first tiles."""
    cta = dataclasses.replace(cta, kv=cta.kv.with_entries())
    loads = issue_loads(cta.shapes, cta.refs, cta.work.place.sequence, cta.work.head)
    return cta, loads, cta.kv.ring_pages()


def _prologue(cta: Cta, loads: list[Any], pages: list[Any]) -> None:
    """The first tiles of the ring, queries, and new keys and values in their pages."""
    work, kv, streams = cta.work, cta.kv, ("k", "v")
    kv.refill_ring(streams, pages, below=cta.new)
    call, place = (cta.shapes, cta.eps, cta.refs), (work.place.sequence, work.head)
    put_queries(*call, loads, cta.buffers["q_sm"].at[0], *place)
    low, high, tiles = jnp.maximum(cta.first, 0), work.kv_len, (cta.new, cta.new + 1)
    if work.stride > 1:
        # New tokens lie in two tiles at most: of a CTA in none or one.
        turn = lax.rem(cta.new, jnp.int32(work.stride))
        own = cta.new + lax.rem(work.place.split - turn + work.stride, jnp.int32(work.stride))
        low, high, tiles = jnp.maximum(low, own * KEYS), jnp.minimum(high, (own + 1) * KEYS), (own, own)

    @pl.when(low < high)
    def _():
        places = [page for tile in tiles for page in kv.pages(tile)]
        put_new(*call, loads, places, *place, [cta.first, low, high])

    # Right after the stores a fence would wait for memory: tiles that come later have it before their own copies.
    @pl.when(work.begin + cta.launch.stages * work.stride > cta.new)
    def _():
        order_copies()
        kv.refill_ring(streams, pages, least=cta.new)


# Mainloop: the values of a tile are multiplied beside the softmax of the next one (FlashAttention-3, arXiv 2407.08608, section 3.2)


def _mainloop(cta: Cta) -> tuple[Any, Any, Any]:
    """All tiles: accumulator, maximum and sum of each row."""
    row_max = plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), ROW)
    acc = plgpu.layout_cast(jnp.zeros((ROWS, cta.launch.width), jnp.float32), MATRIX)
    counts = [cta.work.count(cta.work.begin, edge) for edge in (cta.work.full_end, cta.work.end)]
    weights, row_sum = jnp.zeros((ROWS, KEYS), cta.buffers["v_sm"].dtype), jnp.zeros((ROWS, FOLDED), jnp.float32)
    weights, row_sum = (plgpu.layout_cast(array, MATRIX) for array in (weights, row_sum))
    one = jnp.minimum(counts[1], 1)
    full = jnp.maximum(counts[0], one)
    held = lax.fori_loop(0, one, functools.partial(_first_tile, cta), (acc, weights, row_max, row_sum))
    held = lax.fori_loop(one, full, functools.partial(_next_tile, cta, masked=False), held)
    held = lax.fori_loop(full, counts[1], functools.partial(_next_tile, cta, masked=True), held)
    acc, _, row_max, row_sum = lax.fori_loop(counts[1] - one, counts[1], functools.partial(_last_values, cta), held)
    return acc, row_max, row_sum.sum(axis=1)


def _tile_number(cta: Cta, index: Any) -> Any:
    return cta.work.begin + index * cta.work.stride


def _first_tile(cta: Cta, index: Any, carry: Any) -> tuple[Any, ...]:
    """The first tile of keys, up to its weights."""
    acc, _, row_max, row_sum = carry
    tile = _tile_number(cta, index)
    coming = _coming(cta, tile)
    scores = scores_of_blocks(cta.query_blocks, cta.kv.wait("k", tile), cta.launch.keys)
    weights, _, row_max, row_sum = _weigh(cta, tile, scores, row_max, row_sum, masked=True)
    _refill(cta, {"k": coming})
    return acc, weights.astype(cta.buffers["v_sm"].dtype), row_max, row_sum


def _next_tile(cta: Cta, index: Any, carry: Any, *, masked: bool) -> tuple[Any, ...]:
    """A tile of keys up to its weights, and the values of the one before, which are multiplied beside its softmax."""
    acc, weights, row_max, row_sum = carry
    tile, kv = _tile_number(cta, index), cta.kv
    coming = {"v": _coming(cta, tile - cta.work.stride), "k": _coming(cta, tile)}
    values, keys = kv.wait("v", tile - cta.work.stride), kv.wait("k", tile)

    def multiply(scores, sums):
        multiply_blocks(scores, cta.query_blocks, keys)
        sums.begin(weights, values)
        held = lax.optimization_barrier(scores.read(later=1))
        found = lax.optimization_barrier(_weigh(cta, tile, held, row_max, row_sum, masked=masked))
        return (sums.read(), *found)

    found = side_by_side(multiply, ((ROWS, KEYS), acc))
    # Registers that a product reads must not be written while one is on its way: the assembler would then let none be.
    acc, weights, alpha, row_max, row_sum = lax.optimization_barrier(found)
    acc = softmax.rescaled(acc, alpha)
    _refill(cta, coming)
    return acc, weights.astype(values.dtype), row_max, row_sum


def _last_values(cta: Cta, index: Any, carry: Any) -> tuple[Any, ...]:
    """The values of the last tile."""
    acc, weights, row_max, row_sum = carry
    tile = _tile_number(cta, index)
    values = cta.kv.wait("v", tile)
    # Rows past the sequence: their weight is 0, and 0 * NaN is NaN.
    live = cta.work.kv_len - tile * KEYS
    pl.when(live < KEYS)(lambda: paged_kv.clear_rows(values, live))
    return add_values(acc, weights, values), weights, row_max, row_sum


def _weigh(cta: Cta, tile: Any, scores: Any, row_max: Any, row_sum: Any, *, masked: bool) -> tuple[Any, ...]:
    """A tile's weights, the factor of what came before, the maximum, and what each thread has of the sum of all weights."""
    scale_log2 = cta.launch.scale * LOG2E
    if masked:
        scores = jnp.where(cta.work.mask(tile, ROW), scores, -jnp.inf)
    new_max = jnp.maximum(row_max, partial_reduce(jnp.maximum, scores).max(axis=1) * scale_log2)
    offset = softmax.finite(new_max) if masked else new_max
    weights = jnp.exp2(softmax.exponents(scores, scale_log2, offset))
    alpha = jnp.exp2(row_max - offset)
    return weights, alpha, new_max, softmax.rescaled(row_sum, alpha) + partial_reduce(jnp.add, weights)


def _coming(cta: Cta, tile: Any) -> tuple[Any, list[Any]]:
    """The tile that comes in place of this one, and its pages."""
    coming = cta.kv.next_in_stage(tile)
    return coming, cta.kv.pages(coming)


def _refill(cta: Cta, coming: dict[str, tuple[Any, list[Any]]]) -> None:
    """Starts tiles of `_coming`, by stream, once all warps of the warpgroup are done with those before them."""
    tile, _ = coming["k"]
    # New keys' copies follow a fence of everybody who has stored them.
    pl.when((tile >= cta.new) & (tile < cta.work.end))(order_copies)
    warpgroup_barrier()

    def fill():
        for stream, (tile, pages) in coming.items():
            pl.when(tile < cta.work.end)(functools.partial(cta.kv.fill, stream, tile, pages))

    by_one_warp(fill)


# Epilogue


def _write(cta: Cta, out: Any, lse: Any) -> None:
    launch, work = cta.launch, cta.work
    if launch.direct:
        _store(cta, out, jnp.int32(0))
        return
    if "lse" in cta.refs:
        row = cta.refs["lse"].at[work.place.sequence, work.head, work.place.split]
        row.at[pl.ds(work.first_row, ROWS)][...] = lse
    if out is None:
        return
    epilogue.write_split(launch, cta.refs, work, out)


def _store(cta: Cta, out: Any, column: Any) -> None:
    """Columns of the output from one on, from registers."""
    target = cta.refs["o"].at[cta.work.place.sequence].at[:, cta.work.head]
    rows = cta.launch.tokens * cta.launch.group
    epilogue.store_columns(target, out.astype(cta.refs["o"].dtype), column, rows=rows)
