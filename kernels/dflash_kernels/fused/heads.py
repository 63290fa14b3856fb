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

from dflash_kernels.fused.layer.mosaic_gpu_plan import HEAD_DIM, KEYS, Attention
from dflash_kernels.mosaic_gpu import ptx as th
from dflash_kernels.mosaic_gpu.convert import as_float16, narrowed, numbers, packed, widened

_HALF, _ROW = HEAD_DIM // 2, 2 * HEAD_DIM  # columns of a block; bytes of a row
_THREADS_OF_ROW, ROWS_AT_ONCE = 8, 16
_LINE = 128  # bytes of a swizzled row in shared memory
_STORE = "st.shared.v4.b32 [$0], {$1, $2, $3, $4};"


def ask_for_queries(attention: Attention, qkv, cos, sin, weight, sequence, head) -> list:
    """What `put_queries` takes, four words a thread each.

    Args:
      qkv: `[B * T, N + 2 K, H]`; cos, sin: `[B * T, H / 2]` float32; weight: `[H]`.
      sequence, head: int32 scalars.
    """
    line, place = line_and_place()
    sequence, head = (value.registers.item() for value in (sequence, head))
    found = []
    for row in _rows(attention, line):
        of_call = arith.minsi(row, utils.c(attention.rows - 1, th.i32()))
        token, among = th.div(of_call, attention.group), th.rem(of_call, attention.group)
        token = th.add(th.mul(sequence, attention.tokens), token)
        found += head_places(qkv, token, th.add(th.mul(head, attention.group), among), place)
        found += angle_places(cos, sin, token, place)
    return [load4(address) for address in (*found, *weight_places(weight, place))]


def put_queries(attention: Attention, eps: float, words: list, target) -> None:
    """Normed, turned queries of a KV head to `target [2, 64, 64]` in swizzled tiles; then matrix instructions may read them.

    Rows past the live ones are copies of the last.
    """
    line, place = line_and_place()
    base, weights = th.address(target, space=3), [numbers(half) for half in words[-2:]]
    for index, row in enumerate(_rows(attention, line)):
        of_row = words[6 * index : 6 * index + 6]
        turn = Turn(of_row[2:])
        for block, held in enumerate(turn.turned(Head(of_row[:2]).normed(weights, eps))):
            held = as_float16(held) if attention.narrow_stages else held
            store_line(th.add(base, block * KEYS * _LINE), row, place, held)
    mgpu.commit_shared()


def stage_new(
    attention: Attention, eps: float, qkv, cos, sin, weight, table, pools, staged, sequence, head, limits, scales=None
) -> None:
    """New keys, normed and turned, and values of a head to `staged [2, tokens, H]`, where that is given, and to their pages.

    Args:
      qkv, cos, sin, weight: as for `ask_for_queries`.
      table: `[B, W]` int32; pools: keys' and values', `[P, K, p, H]`.
      limits: position of the first token, and the first and the last but one position that this CTA writes, int32 scalars.
      scales: what float8 pools' keys and values are to be multiplied with, `[K]` float32 each.
    """
    words = [load4(address) for address in _new_places(attention, qkv, cos, sin, weight, sequence, head)]
    new = New(attention, [value.registers.item() for value in limits])
    entry = th.add(th.mul(sequence.registers.item(), attention.table_width), th.div(new.inside, attention.page_size))
    page = utils.inline_ptx(
        "{ .reg .pred there; setp.ne.b32 there, $2, 0; mov.b32 $0, 0; @there ld.global.nc.b32 $0, [$1]; }",
        th.add(th.address(table), th.mul(th.widen_index(entry), 4)), arith.extui(th.i32(), new.writes),
        result_types=th.i32(), has_side_effects=True,
    )  # fmt: skip
    new.put(eps, words, pools, head.registers.item(), page, staged, scales)


class New:
    """A thread's share of one of sixteen new tokens, the `line`th, and whether its CTA writes it to the pages."""

    def __init__(self, attention: Attention, limits, line=None):
        self.attention, (own, self.place), (self.first, low, high) = attention, line_and_place(), limits
        self.line = own if line is None else line
        self.position = th.add(self.first, self.line)
        self.writes = functools.reduce(
            arith.andi,
            [
                th.below(self.line, attention.tokens),
                arith.cmpi(arith.CmpIPredicate.sge, self.position, low),
                arith.cmpi(arith.CmpIPredicate.slt, self.position, high),
            ],
        )
        self.inside = arith.select(self.writes, self.position, utils.c(0, th.i32()))

    def put(self, eps: float, words, pools, head, page, staged, scales=None) -> None:
        attention, place = self.attention, self.place
        key, value, turn = Head(words[:2]), Head(words[2:4]), Turn(words[4:8])
        weights = [numbers(half) for half in words[8:]]
        pool_row = th.add(th.mul(th.widen_index(page), attention.kv_heads), th.widen_index(head))
        in_page = th.rem(self.inside, attention.page_size)
        pool_row = th.add(th.mul(pool_row, attention.page_size), th.widen_index(in_page))
        narrow = 2 if scales else 1
        offset = th.add(th.mul(pool_row, _ROW // narrow), th.widen_index(th.mul(place, th.CHUNK // narrow)))
        there = th.below(self.line, attention.staged)
        for which, halves in enumerate((turn.turned(key.normed(weights, eps)), value.words)):
            for block, held in enumerate(halves):
                stored = held
                if scales:
                    stored = narrowed(numbers(held), _scale(scales[which], head))
                    held = widened(stored)
                if staged is not None:
                    shared = th.add(th.mul(th.add(self.line, which * attention.staged), _ROW), th.mul(place, th.CHUNK))
                    shared = th.add(th.add(th.address(staged, space=3), shared), block * _HALF * 2)
                    th.when(there, _STORE, shared, *held)
                target = th.add(th.add(th.address(pools[which]), offset), block * _HALF * 2 // narrow)
                places = ", ".join(f"${1 + place}" for place in range(len(stored)))
                th.when(self.writes, f"st.global.v{len(stored)}.b32 [$0], {{{places}}};", target, *stored)
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
    line, place = line_and_place()
    first, live = (value.registers.item() for value in (first, live))
    base, zero = th.address(target, space=3), utils.c(0, th.i32())
    for start in range(0, attention.staged, ROWS_AT_ONCE):
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
            store_line(th.add(base, block * KEYS * _LINE), row, place, words, inside)
    if which:
        for start in range(0, KEYS, ROWS_AT_ONCE):
            row = th.add(line, start)
            unused = arith.cmpi(arith.CmpIPredicate.sge, row, live)
            for block in range(2):
                store_line(th.add(base, block * KEYS * _LINE), row, place, [zero] * 4, unused)
    mgpu.commit_shared()


class Head:
    """A thread's share of one head of one token: the words of `head_places`."""

    def __init__(self, words):
        self.words = words

    def normed(self, weights, eps: float):
        """Two halves of eight float32, rounded as separate operations round them."""
        wide = [numbers(words) for words in self.words]
        squares = [arith.mulf(value, value) for half in wide for value in half]
        total = functools.reduce(arith.addf, squares)
        for distance in (1, 2, 4):
            total = arith.addf(total, utils.shfl_bfly(total, distance))
        f32 = ir.F32Type.get()
        mean = arith.addf(arith.mulf(total, utils.c(1 / HEAD_DIM, f32)), utils.c(eps, f32))
        inverse = mlir_math.rsqrt(mean)
        rounded = [numbers(packed([arith.mulf(value, inverse) for value in half])) for half in wide]
        return [
            numbers(packed([arith.mulf(value, weight) for value, weight in zip(half, scale, strict=True)]))
            for half, scale in zip(rounded, weights, strict=True)
        ]


class Turn:
    """A thread's share of the angles of one token: the words of `angle_places`."""

    def __init__(self, words):
        angles = [utils.bitcast(word, ir.F32Type.get()) for quad in words for word in quad]
        self.angles = angles[:8], angles[8:]

    def turned(self, halves):
        """Both halves as words of two bfloat16."""
        first, second = [], []
        for x, y, cos, sin in zip(*halves, *self.angles, strict=True):
            first.append(arith.subf(arith.mulf(x, cos), arith.mulf(y, sin)))
            second.append(arith.addf(arith.mulf(y, cos), arith.mulf(x, sin)))
        return packed(first), packed(second)


def head_places(qkv, token, head, place):
    """Addresses of the eight columns of either half that a thread has of a head."""
    row = th.add(th.mul(token, th.shape_and_strides(qkv)[0][1]), head)
    offset = th.add(th.mul(row, _ROW), th.mul(place, th.CHUNK))
    address = th.add(th.address(qkv), th.widen_index(offset))
    return [th.add(address, block * _HALF * 2) for block in range(2)]


def angle_places(cos, sin, token, place):
    offset = th.mul(th.widen_index(th.add(th.mul(token, _HALF), th.mul(place, 8))), 4)
    return [th.add(th.address(table), th.add(offset, 16 * half)) for table in (cos, sin) for half in range(2)]


def _new_places(attention: Attention, qkv, cos, sin, weight, sequence, head):
    """A thread's share of a new key and of its value, of the angles and of the norm's weight."""
    line, place = line_and_place()
    sequence, head = (value.registers.item() for value in (sequence, head))
    token = arith.minsi(line, utils.c(attention.tokens - 1, th.i32()))
    token = th.add(th.mul(sequence, attention.tokens), token)
    key = th.add(head, attention.kv_heads * attention.group)
    heads = (key, th.add(key, attention.kv_heads))
    found = [address for head in heads for address in head_places(qkv, token, head, place)]
    return [*found, *angle_places(cos, sin, token, place), *weight_places(weight, place)]


def weight_places(weight, place):
    address = th.add(th.address(weight), th.widen_index(th.mul(place, th.CHUNK)))
    return [th.add(address, block * _HALF * 2) for block in range(2)]


def _rows(attention: Attention, line):
    """Rows of queries that a thread has a share of."""
    return [th.add(line, start) for start in range(0, -(-attention.rows // ROWS_AT_ONCE) * ROWS_AT_ONCE, ROWS_AT_ONCE)]


def _scale(scales, head):
    address = th.add(th.address(scales), th.mul(th.widen_index(head), 4))
    return utils.inline_ptx("ld.global.nc.f32 $0, [$1];", address, result_types=ir.F32Type.get())


def line_and_place():
    """Row of sixteen, and place of eight in it, of this thread."""
    lane, warp = th.lane_and_warp()
    thread = th.add(th.mul(warp, 32), lane)
    return th.div(thread, _THREADS_OF_ROW), th.rem(thread, _THREADS_OF_ROW)


def load4(address, how: str = "ld"):
    return utils.inline_ptx(
        f"{how}.global.v4.b32 {{$0, $1, $2, $3}}, [$4];", address, result_types=[th.i32()] * 4, has_side_effects=True
    )


def store_line(base, row, place, words, predicate=None) -> None:
    """Eight columns of a row of a swizzled block."""
    swizzled = th.mul(th.xor(place, th.rem(row, 8)), th.CHUNK)
    address = th.add(th.add(base, th.mul(row, _LINE)), swizzled)
    if predicate is None:
        utils.inline_ptx(_STORE, address, *words, has_side_effects=True)
    else:
        th.when(predicate, _STORE, address, *words)
