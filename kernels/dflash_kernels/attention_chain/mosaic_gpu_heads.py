"""New heads of a chain's attention below Pallas, in terms of single threads; written out while a kernel is lowered for a GPU.

Every function stands for code that all 128 threads of a warpgroup run together. A head's row belongs to eight threads: thread j has
columns `8 j` to `8 j + 7` and the ones 64 further on that they turn with.
"""

import functools

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from jaxlib.mlir.dialects import math as mlir_math

from dflash_kernels.attention_chain.mosaic_gpu_plan import HEAD_DIM, KEYS, Attention
from dflash_kernels.attention_chain.mosaic_gpu_widen import narrowed, widened
from dflash_kernels.paged_attention import mosaic_gpu_threads as th

_HALF, _ROW = HEAD_DIM // 2, 2 * HEAD_DIM  # columns of a block; bytes of a row
_THREADS_OF_ROW, _ROWS_AT_ONCE = 8, 16
_LINE = 128  # bytes of a swizzled row in shared memory
_STORE = "st.shared.v4.b32 [$0], {$1, $2, $3, $4};"


def load_queries(attention: Attention, eps: float, qkv, cos, sin, weight, target, sequence, head) -> None:
    """Normed, turned queries of a KV head to `target [2, 64, 64]` in swizzled tiles; then matrix instructions may read them.

    Rows past the live ones are copies of the last.

    Args:
      qkv: `[B * T, N + 2 K, H]`; cos, sin: `[B * T, H / 2]` float32; weight: `[H]`.
      sequence, head: int32 scalars.
    """
    line, place = _line_and_place()
    sequence, head = (value.registers.item() for value in (sequence, head))
    base = th.address(target, space=3)
    found = []
    for start in range(0, -(-attention.rows // _ROWS_AT_ONCE) * _ROWS_AT_ONCE, _ROWS_AT_ONCE):
        row = th.add(line, start)
        of_call = arith.minsi(row, utils.c(attention.rows - 1, th.i32()))
        token, among = th.div(of_call, attention.group), th.rem(of_call, attention.group)
        token = th.add(th.mul(sequence, attention.tokens), token)
        found.append(
            (row, _Head(qkv, token, th.add(th.mul(head, attention.group), among), place), _Turn(cos, sin, token, place))
        )
    weights = _weights(weight, place)
    for row, loaded, turn in found:
        for block, words in enumerate(turn.turned(loaded.normed(weights, eps))):
            words = _halves(words) if attention.narrow_stages else words
            _store_line(th.add(base, block * KEYS * _LINE), row, place, words)
    mgpu.commit_shared()


def stage_new(
    attention: Attention, eps: float, qkv, cos, sin, weight, table, pools, staged, sequence, head, limits, scales=None
) -> None:
    """New keys, normed and turned, and values of a head to `staged [2, tokens, H]`, where that is given, and to their pages.

    Args:
      qkv, cos, sin, weight: as for `load_queries`.
      table: `[B, W]` int32; pools: keys' and values', `[P, K, p, H]`.
      limits: position of the first token, and the first and the last but one position that this CTA writes, int32 scalars.
      scales: what float8 pools' keys and values are to be multiplied with, `[K]` float32 each.
    """
    line, place = _line_and_place()
    sequence, head, first, low, high = (value.registers.item() for value in (sequence, head, *limits))
    token = arith.minsi(line, utils.c(attention.tokens - 1, th.i32()))
    of_call = th.add(th.mul(sequence, attention.tokens), token)
    queries = attention.kv_heads * attention.group
    key = _Head(qkv, of_call, th.add(head, queries), place)
    value = _Head(qkv, of_call, th.add(head, queries + attention.kv_heads), place)
    turn, weights = _Turn(cos, sin, of_call, place), _weights(weight, place)
    position = th.add(first, line)
    writes = functools.reduce(
        arith.andi,
        [
            th.below(line, attention.tokens),
            arith.cmpi(arith.CmpIPredicate.sge, position, low),
            arith.cmpi(arith.CmpIPredicate.slt, position, high),
        ],
    )
    inside = arith.select(writes, position, utils.c(0, th.i32()))
    entry = th.add(th.mul(sequence, attention.table_width), th.div(inside, attention.page_size))
    page = utils.inline_ptx(
        "{ .reg .pred there; setp.ne.b32 there, $2, 0; mov.b32 $0, 0; @there ld.global.nc.b32 $0, [$1]; }",
        th.add(th.address(table), th.mul(th.widen_index(entry), 4)), arith.extui(th.i32(), writes), result_types=th.i32(),
        has_side_effects=True,
    )  # fmt: skip
    pool_row = th.add(th.mul(th.widen_index(page), attention.kv_heads), th.widen_index(head))
    pool_row = th.add(th.mul(pool_row, attention.page_size), th.widen_index(th.rem(inside, attention.page_size)))
    narrow = 2 if scales else 1
    offset = th.add(th.mul(pool_row, _ROW // narrow), th.widen_index(th.mul(place, th.CHUNK // narrow)))
    there = th.below(line, attention.staged)
    for which, halves in enumerate((turn.turned(key.normed(weights, eps)), value.words)):
        for block, words in enumerate(halves):
            stored = words
            if scales:
                stored = narrowed(_wide(words), _scale(scales[which], head))
                words = widened(stored)
            if staged is not None:
                shared = th.add(th.mul(th.add(line, which * attention.staged), _ROW), th.mul(place, th.CHUNK))
                shared = th.add(th.add(th.address(staged, space=3), shared), block * _HALF * 2)
                th.when(there, _STORE, shared, *words)
            target = th.add(th.add(th.address(pools[which]), offset), block * _HALF * 2 // narrow)
            places = ", ".join(f"${1 + place}" for place in range(len(stored)))
            th.when(writes, f"st.global.v{len(stored)}.b32 [$0], {{{places}}};", target, *stored)
    utils.warpgroup_barrier()


def order_copies() -> None:
    """Copies that begin afterwards find what the warpgroup's threads have stored in global memory before."""
    utils.inline_ptx("fence.proxy.async.global;", has_side_effects=True)
    utils.warpgroup_barrier()


def overlay(attention: Attention, staged, which: int, target, first, live) -> None:
    """Puts the staged rows over those of a tile that came from the pages; zeros in rows past the sequence.

    Args:
      staged: `[2, tokens, H]`; which: 0 for keys, 1 for values.
      target: `[2, 64, 64]` in swizzled tiles.
      first: row of the tile that the first new token has, negative where it lies before; live: rows that hold keys.
    """
    line, place = _line_and_place()
    first, live = (value.registers.item() for value in (first, live))
    base, zero = th.address(target, space=3), utils.c(0, th.i32())
    for start in range(0, attention.staged, _ROWS_AT_ONCE):
        token = th.add(line, start)
        row = th.add(first, token)
        inside = functools.reduce(
            arith.andi,
            [
                th.below(token, attention.tokens),
                arith.cmpi(arith.CmpIPredicate.sge, row, zero),
                arith.cmpi(arith.CmpIPredicate.slt, row, live),
                th.below(row, KEYS),
            ],
        )
        held = th.add(th.mul(th.add(token, which * attention.staged), _ROW), th.mul(place, th.CHUNK))
        held = th.add(th.address(staged, space=3), held)
        for block in range(2):
            words = utils.inline_ptx(
                "{ .reg .pred there; setp.ne.b32 there, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;"
                " @there ld.shared.v4.b32 {$0, $1, $2, $3}, [$4]; }",
                th.add(held, block * _HALF * 2), arith.extui(th.i32(), inside), result_types=[th.i32()] * 4,
                has_side_effects=True,
            )  # fmt: skip
            _store_line(th.add(base, block * KEYS * _LINE), row, place, words, inside)
    if which:
        for start in range(0, KEYS, _ROWS_AT_ONCE):
            row = th.add(line, start)
            unused = arith.cmpi(arith.CmpIPredicate.sge, row, live)
            for block in range(2):
                _store_line(th.add(base, block * KEYS * _LINE), row, place, [zero] * 4, unused)
    mgpu.commit_shared()


class _Head:
    """A thread's share of one head of one token."""

    def __init__(self, qkv, token, head, place):
        heads = th.shape_and_strides(qkv)[0][1]
        row = th.add(th.mul(token, heads), head)
        offset = th.add(th.mul(row, _ROW), th.mul(place, th.CHUNK))
        address = th.add(th.address(qkv), th.widen_index(offset))
        self.words = [_load4(th.add(address, block * _HALF * 2)) for block in range(2)]

    def normed(self, weights, eps: float):
        """Two halves of eight float32, rounded as separate operations round them."""
        wide = [_wide(words) for words in self.words]
        squares = [arith.mulf(value, value) for half in wide for value in half]
        total = functools.reduce(arith.addf, squares)
        for distance in (1, 2, 4):
            total = arith.addf(total, utils.shfl_bfly(total, distance))
        f32 = ir.F32Type.get()
        mean = arith.addf(arith.mulf(total, utils.c(1 / HEAD_DIM, f32)), utils.c(eps, f32))
        inverse = mlir_math.rsqrt(mean)
        rounded = [_wide(packed([arith.mulf(value, inverse) for value in half])) for half in wide]
        return [
            _wide(packed([arith.mulf(value, weight) for value, weight in zip(half, scale, strict=True)]))
            for half, scale in zip(rounded, weights, strict=True)
        ]


class _Turn:
    """A thread's share of the angles of one token."""

    def __init__(self, cos, sin, token, place):
        offset = th.mul(th.widen_index(th.add(th.mul(token, _HALF), th.mul(place, 8))), 4)
        self.angles = []
        for table in (cos, sin):
            address = th.add(th.address(table), offset)
            words = [*_load4(address), *_load4(th.add(address, 16))]
            self.angles.append([utils.bitcast(word, ir.F32Type.get()) for word in words])

    def turned(self, halves):
        """Both halves as words of two bfloat16."""
        first, second = [], []
        for x, y, cos, sin in zip(*halves, *self.angles, strict=True):
            first.append(arith.subf(arith.mulf(x, cos), arith.mulf(y, sin)))
            second.append(arith.addf(arith.mulf(y, cos), arith.mulf(x, sin)))
        return packed(first), packed(second)


def _weights(weight, place):
    address = th.add(th.address(weight), th.widen_index(th.mul(place, th.CHUNK)))
    return [_wide(_load4(th.add(address, block * _HALF * 2))) for block in range(2)]


def _scale(scales, head):
    address = th.add(th.address(scales), th.mul(th.widen_index(head), 4))
    return utils.inline_ptx("ld.global.nc.f32 $0, [$1];", address, result_types=ir.F32Type.get())


def _halves(words):
    """Words of two bfloat16 as words of two float16."""
    values = _wide(words)
    return [
        utils.inline_ptx("cvt.rn.f16x2.f32 $0, $1, $2;", high, low, result_types=th.i32())
        for low, high in zip(values[::2], values[1::2], strict=True)
    ]


def _line_and_place():
    """Row of sixteen, and place of eight in it, of this thread."""
    lane, warp = th.lane_and_warp()
    thread = th.add(th.mul(warp, 32), lane)
    return th.div(thread, _THREADS_OF_ROW), th.rem(thread, _THREADS_OF_ROW)


def _load4(address):
    return utils.inline_ptx(
        "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];", address, result_types=[th.i32()] * 4, has_side_effects=True
    )


def _store_line(base, row, place, words, predicate=None) -> None:
    """Eight columns of a row of a swizzled block."""
    swizzled = th.mul(th.xor(place, th.rem(row, 8)), th.CHUNK)
    address = th.add(th.add(base, th.mul(row, _LINE)), swizzled)
    if predicate is None:
        utils.inline_ptx(_STORE, address, *words, has_side_effects=True)
    else:
        th.when(predicate, _STORE, address, *words)


def _wide(words):
    """float32 numbers of words of two bfloat16."""
    values = []
    for word in words:
        values.append(utils.bitcast(th.shift_left(word, 16), ir.F32Type.get()))
        values.append(utils.bitcast(arith.andi(word, utils.c(-65536, th.i32())), ir.F32Type.get()))
    return values


def packed(values):
    """Words of two bfloat16 each, rounded to the nearest."""
    words = []
    for low, high in zip(values[::2], values[1::2], strict=True):
        words.append(utils.inline_ptx("cvt.rn.bf16x2.f32 $0, $1, $2;", high, low, result_types=th.i32()))
    return words
