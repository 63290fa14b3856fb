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
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.attention.paged.launch import ROWS, Launch
from dflash_kernels.attention.paged.mosaic_gpu_ops import clear_rows, ring, scratch
from dflash_kernels.attention.paged.mosaic_gpu_pair import Pair
from dflash_kernels.attention.paged.mosaic_gpu_sm90 import Block, grid
from dflash_kernels.core.layouts import aliased_ref, freeze_aliased
from dflash_kernels.fused import heads
from dflash_kernels.fused.plan import HEAD_DIM, KEYS, Attention
from dflash_kernels.mosaic_gpu import ptx as th
from dflash_kernels.mosaic_gpu.combine import combine_fragments, combine_xla
from dflash_kernels.mosaic_gpu.convert import numbers
from dflash_kernels.mosaic_gpu.layouts import TILED
from dflash_kernels.mosaic_gpu.pipeline import warpgroup_barrier
from dflash_kernels.mosaic_gpu.softmax import FOLDED, LOG2E, partial_reduce
from dflash_kernels.mosaic_gpu.thread_op import GLOBAL, SCALAR, WORDS, interpreting, kernel, thread_op
from dflash_kernels.mosaic_gpu.tma import order_copies
from dflash_kernels.mosaic_gpu.wgmma import add_values, multiply_blocks, scores_of_blocks

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
      inputs: `qkv [M, N + 2 K, H]`, `cos` and `sin` float32 `[M, H / 2]`, `q_norm` and `k_norm [H]`, `table`, `seq_lens`, `q_lens`.
      pools: `k` and `v`, written in place.
    """
    if interpret is not None:
        # The interpreter has no shared memory of other CTAs.
        launch = dataclasses.replace(launch, together=False, once=False, by_lanes=False)
    b, rows, whole = shapes.sequences, -(-shapes.rows // 8) * 8, launch.direct or launch.together
    shape = (b, launch.tokens, launch.kv_heads, launch.group) if whole else (b, launch.kv_heads, launch.splits, rows)
    made = {"o": jax.ShapeDtypeStruct((*shape, HEAD_DIM), jnp.bfloat16 if whole else jnp.float32)}
    if not whole:
        made["lse"] = jax.ShapeDtypeStruct((b, launch.kv_heads, launch.splits, ROWS), jnp.float32)
    names, kind = [*inputs, *pools, *made], _Pair if launch.pair else _Written
    queries = plgpu.SMEM((1, 2 * ROWS, _HALF), jnp.bfloat16, transforms=TILED)

    def body(*refs, **buffers):
        kind(launch, shapes, eps, dict(zip(names, refs, strict=True)), buffers, interpret).run()

    body.__name__ = "qkv_attention"  # what profilers show
    held = {name: aliased_ref(pool) for name, pool in pools.items()}
    out, *lse = kernel(
        body,
        out_type=tuple(made.values()),
        scratch_types=kind.scratch(launch, jnp.bfloat16, interpret) | {"q_sm": queries},
        **grid(launch, b), num_threads=1, thread_name="wg",
        # Row reductions of a matrix tile stay within a warp: no scratch, which two CTAs on a multiprocessor have no room for.
        # Nothing here relies on barriers of the compiler's own, of which it would put two around every refill of the ring.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=interpret is None
        ),
        interpret=interpret,
    )(*inputs.values(), *held.values())  # fmt: skip
    if not whole:
        merge = combine_fragments if launch.by_lanes else combine_xla
        out = merge(out, lse[0], None, launch.tokens, launch.group, jnp.bfloat16)
    return out.reshape(b, launch.tokens, -1, HEAD_DIM), freeze_aliased(held["k"]), freeze_aliased(held["v"])


# Prologue: queries and new keys, whose loads are on their way to registers before the first copies of tiles
#
# As in `heads`, a head's row belongs to eight threads. Here all rows of a thread are one token's, its new key among them, so that
# the angles are loaded once.

_SHARED = 8  # of a thread's loads: angles and both norms' weights


def _count(shapes: Attention) -> int:
    """Loads of a thread: two halves of each of its query rows, of a key and of a value, and what they share."""
    return 2 * (_rows_of_thread(shapes) + 2) + _SHARED


def issue_loads(shapes: Attention, refs: Mapping[str, Any], sequence: Any, head: Any) -> list[Any]:
    """What `put_queries` and `put_new` are made of, on its way to registers from here on."""
    names = ("qkv", "cos", "sin", "q_norm", "k_norm")
    return _issue_loads(*[refs[name] for name in names], sequence, head, shapes=shapes)


@thread_op(
    args=(*[GLOBAL] * 5, *[SCALAR] * 2), returns=lambda *_, shapes: [WORDS] * _count(shapes), interpret=lambda *_, shapes: []
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
    if interpreting():
        names = ("qkv", "cos", "sin", "q_norm")
        heads.load_queries(*[refs[name] for name in names], sequence, head, target, shapes=shapes, eps=eps)
        return
    (*queries, _, _, _, _), shared = loads[:-_SHARED], loads[-_SHARED:]
    _put_queries(target, [*queries, *shared[:6]], shapes=shapes, eps=eps)


@thread_op(args=(heads.TILES, WORDS.layout))
def _put_queries(target: Any, loads: list[Any], *, shapes: Attention, eps: float) -> None:
    words = [th.as_words(array) for array in loads]
    _, place = heads.line_and_place()
    base, weights = th.address(target, space=3), [numbers(half) for half in words[-2:]]
    turn = heads.angles(words[-6:-2])
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
    pools = [refs["k"], refs["v"]]
    if interpreting():
        given = [refs[name] for name in ("qkv", "cos", "sin", "k_norm", "table")]
        heads.write_new(*given, pools, None, None, sequence, head, limits, shapes=shapes, eps=eps)
        return
    (*_, key, key_end, value, value_end), shared = loads[:-_SHARED], loads[-_SHARED:]
    own = [key, key_end, value, value_end, *shared[:4], *shared[6:]]
    _put_new(pools, head, limits, pages, own, shapes=shapes, eps=eps)


@thread_op(args=(GLOBAL, SCALAR, SCALAR, SCALAR, WORDS.layout))
def _put_new(
    pools: list[Any], head: Any, limits: list[Any], pages: list[Any], loads: list[Any], *, shapes: Attention, eps: float
) -> None:
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


class _Written(Block):
    """One CTA's work. Those that share a head's keys take turns with the tiles, and all make its queries.

    The values of a tile are multiplied beside the softmax of the next one (FlashAttention-3, arXiv 2407.08608, section 3.2).
    """

    ahead = True

    def __init__(self, launch, shapes, eps, refs, buffers, interpret):
        super().__init__(launch, refs, buffers, interpret)
        self.shapes, self.eps = shapes, eps
        self.first = self.seq_len - self.q_len  # position of the first new token
        self.new = lax.div(self.first, jnp.int32(KEYS))  # tiles from this one on have new keys, or are past the end

    @staticmethod
    def scratch(launch: Launch, dtype: Any, interpret: Any) -> dict[str, Any]:
        """The output leaves from registers, but not in the interpreter."""
        return (ring if interpret is None else scratch)(launch, dtype, interpret)

    @property
    def stride(self) -> int:
        return self.launch.splits

    def _ask_for_queries(self):
        self.loads = issue_loads(self.shapes, self.refs, self.b, self.head)
        return self.loads

    def _start(self, pages):
        self.fill_ring(("k", "v"), pages, below=self.new)
        call, place = (self.shapes, self.eps, self.refs), (self.b, self.head)
        put_queries(*call, self.loads, self.buffers["q_sm"].at[0], *place)
        low, high, tiles = jnp.maximum(self.first, 0), self.kv_len, (self.new, self.new + 1)
        if self.stride > 1:
            # New tokens lie in two tiles at most: of a CTA in none or one.
            turn = lax.rem(self.new, jnp.int32(self.stride))
            own = self.new + lax.rem(self.split - turn + self.stride, jnp.int32(self.stride))
            low, high, tiles = jnp.maximum(low, own * KEYS), jnp.minimum(high, (own + 1) * KEYS), (own, own)

        @pl.when(low < high)
        def _():
            places = [page for tile in tiles for page in self.pages(tile)]
            put_new(*call, self.loads, places, *place, [self.first, low, high])

        # Right after the stores a fence would wait for memory: tiles that come later have it before their own copies.
        @pl.when(self.begin + self.launch.stages * self.stride > self.new)
        def _():
            order_copies()
            self.fill_ring(("k", "v"), pages, least=self.new)

    def walk(self, step, carry, *, skip: int = 0):
        """All tiles, by the steps below."""
        acc, top, _ = carry
        counts = [
            lax.div(jnp.maximum(edge - self.begin, 0) + (self.stride - 1), jnp.int32(self.stride))
            for edge in (self.full_end, self.end)
        ]
        weights, total = jnp.zeros((ROWS, KEYS), self.buffers["v_sm"].dtype), jnp.zeros((ROWS, FOLDED), jnp.float32)
        weights, total = (plgpu.layout_cast(array, plgpu.Layout.WGMMA) for array in (weights, total))
        one = jnp.minimum(counts[1], 1)
        full = jnp.maximum(counts[0], one)
        held = lax.fori_loop(0, one, self._first_tile, (acc, weights, top, total))
        held = lax.fori_loop(one, full, functools.partial(self._next_tile, masked=False), held)
        held = lax.fori_loop(full, counts[1], functools.partial(self._next_tile, masked=True), held)
        acc, _, top, total = lax.fori_loop(counts[1] - one, counts[1], self._last_values, held)
        return acc, top, total.sum(axis=1)

    def _first_tile(self, index, carry):
        """The first tile of keys, up to its weights."""
        acc, _, top, total = carry
        tile = self.begin + index * self.stride
        coming = self._coming(tile)
        weights, _, top, total = self._weigh(tile, self._scores(self.tile("k", tile)), top, total, masked=True)
        self._refill({"k": coming})
        return acc, weights.astype(self.buffers["v_sm"].dtype), top, total

    def _next_tile(self, index, carry, *, masked):
        """A tile of keys up to its weights, and the values of the one before, which are multiplied beside its softmax."""
        acc, weights, top, total = carry
        tile = self.begin + index * self.stride
        coming = {"v": self._coming(tile - self.stride), "k": self._coming(tile)}
        values, keys = self.tile("v", tile - self.stride), self.tile("k", tile)

        def multiply(scores, sums):
            sums[...] = acc
            multiply_blocks(scores, self._query_blocks(), keys)
            plgpu.wgmma(sums, weights, values)
            held = lax.optimization_barrier(plgpu.wgmma_accumulator_load(scores, wait_n=1))
            found = lax.optimization_barrier(self._weigh(tile, held, top, total, masked=masked))
            return (sums[...], *found)

        if self.interpret is None:
            found = pl.run_scoped(multiply, *(plgpu.ACC(shape, jnp.float32) for shape in ((ROWS, KEYS), acc.shape)))
        else:
            found = self._weigh(tile, self._scores(keys), top, total, masked=masked)
            found = (add_values(acc, weights, values, self.buffers["p_sm"].at[0]), *found)
        # Registers that a product reads must not be written while one is on its way: the assembler would then let none be.
        acc, weights, kept, top, total = lax.optimization_barrier(found)
        acc = acc * lax.broadcast_in_dim(kept, acc.shape, [0])
        self._refill(coming)
        return acc, weights.astype(values.dtype), top, total

    def _last_values(self, index, carry):
        """The values of the last tile."""
        acc, weights, top, total = carry
        tile = self.begin + index * self.stride
        values = self.tile("v", tile)
        self._clear_unused(values, tile)
        staged = self.buffers["p_sm"].at[0] if "p_sm" in self.buffers else None
        return add_values(acc, weights, values, staged), weights, top, total

    def _clear_unused(self, values, tile):
        """As `Block`'s, without reading the tile."""
        live = self.kv_len - tile * KEYS
        pl.when(live < KEYS)(lambda: clear_rows(values, live, self.interpret))

    def _weigh(self, tile, scores, top, total, *, masked):
        """A tile's weights, the factor of what came before, the maximum, and what each thread has of the sum of all weights."""
        unit = self.launch.scale * LOG2E
        if masked:
            scores = jnp.where(self._mask(tile), scores, -jnp.inf)
        new_top = jnp.maximum(top, partial_reduce(jnp.maximum, scores).max(axis=1) * unit)
        # A row that has seen nothing yet keeps -inf as its maximum; 0 in its place makes every weight 0 instead of NaN.
        base = jnp.where(new_top == -jnp.inf, 0.0, new_top) if masked else new_top
        weights = jnp.exp2(scores * unit - lax.broadcast_in_dim(base, scores.shape, [0]))
        kept = jnp.exp2(top - base)
        return (
            weights,
            kept,
            new_top,
            total * lax.broadcast_in_dim(kept, total.shape, [0]) + partial_reduce(jnp.add, weights),
        )

    def _coming(self, tile):
        """The tile that comes in place of this one, and its pages."""
        coming = self.next_in_stage(tile)
        return coming, self.pages(coming)

    def _refill(self, coming):
        """Starts tiles of `_coming`, by stream, once all warps of the warpgroup are done with those before them."""
        tile, _ = coming["k"]
        # New keys' copies follow a fence of everybody who has stored them.
        pl.when((tile >= self.new) & (tile < self.end))(order_copies)
        if self.interpret is None:
            warpgroup_barrier()

        def fill():
            for stream, (tile, pages) in coming.items():
                pl.when(tile < self.end)(functools.partial(self.fill, stream, tile, pages))

        self._by_one_warp(fill)

    def _write(self, out, lse):
        if self.interpret is None and self.launch.direct:
            self.store(jnp.int32(0), out)
        else:
            super()._write(out, lse)

    def _query_blocks(self):
        return [self.buffers["q_sm"].at[0, pl.ds(block * ROWS, ROWS)] for block in range(2)]

    def _scores(self, keys):
        return scores_of_blocks(self._query_blocks(), keys, self.launch.keys)


class _Pair(_Written, Pair):
    """A CTA that has half of a head's keys."""

    scratch = Pair.scratch
