"""Query, key and value heads of a QKV projection: QK norm where there is one, RoPE, operands in shared memory, new keys and values
to their pages.

Shared by the fused kernels with attention. A head's row belongs to eight threads: thread j has columns `8 j` to `8 j + 7` and the
ones 64 further on that they rotate with.
"""

# Pallas declares its Refs' types less public than it documents them.
# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.fused.plan import HEAD_DIM, KEYS, Attention
from dflash_kernels.mosaic_gpu import ptx as th
from dflash_kernels.mosaic_gpu.convert import as_float16, narrowed, numbers, packed, widened
from dflash_kernels.mosaic_gpu.layouts import TILED
from dflash_kernels.mosaic_gpu.thread_op import GLOBAL, SCALAR, thread_op
from dflash_kernels.quantize.reference import to_e4m3

TILES = plgpu.RefType(TILED)
ROWS_AT_ONCE = 16  # of a warpgroup
LINE = 128  # bytes of a swizzled row in shared memory
_HALF, _ROW = HEAD_DIM // 2, 2 * HEAD_DIM  # columns of a block; bytes of a row
_THREADS_OF_ROW = 8
_STORE = "st.shared.v4.b32 [$0], {$1, $2, $3, $4};"


def blocks(tile: Any) -> list[Any]:
    """Rows `[128, 64]` in shared memory as the two blocks of 64 columns of a tile of 64 rows."""
    return [tile.at[pl.ds(block * KEYS, KEYS)] for block in range(2)]


# Operations


def _load_queries_interpreted(
    qkv: Any, cos: Any, sin: Any, norm: Any, sequence: Any, head: Any, target: Any, *, shapes: Attention, eps: float
) -> None:
    tokens, group = shapes.tokens, shapes.group
    held = qkv.at[pl.ds(sequence * tokens, tokens), pl.ds(head * group, group)][...]
    rotated = _normed_and_rotated(held, cos, sin, norm, sequence, shapes, eps).reshape(shapes.rows, HEAD_DIM)
    rotated = jnp.pad(rotated, ((0, KEYS - shapes.rows), (0, 0))).astype(target.dtype)
    for block, place in enumerate(blocks(target)):
        place[...] = rotated[:, block * _HALF : (block + 1) * _HALF]
    plgpu.commit_smem()


@thread_op(args=(*[GLOBAL] * 4, *[SCALAR] * 2, TILES), interpret=_load_queries_interpreted)
def load_queries(
    qkv: Any, cos: Any, sin: Any, norm: Any, sequence: Any, head: Any, target: Any, *, shapes: Attention, eps: float
) -> None:
    """Normed, rotated queries of a KV head to shared memory; rows past the live ones are copies of the last.

    Args:
      qkv: `[B * T, N + 2 K, H]`; cos, sin: `[B * T, H / 2]` float32; norm: `[H]`, or None for none.
      sequence, head: int32 scalars.
      target: `[2 * 64, 64]`, a block of columns below the other; afterwards matrix instructions may read it.
    """
    line, place = line_and_place()
    rows = [th.add(line, start) for start in range(0, -(-shapes.rows // ROWS_AT_ONCE) * ROWS_AT_ONCE, ROWS_AT_ONCE)]
    found = []
    for row in rows:
        of_call = th.least(row, shapes.rows - 1)
        token, among = th.div(of_call, shapes.group), th.rem(of_call, shapes.group)
        token = th.add(th.mul(sequence, shapes.tokens), token)
        found += head_places(qkv, token, th.add(th.mul(head, shapes.group), among), place)
        found += angle_places(cos, sin, token, place)
    words = [th.load(address, 4, op="ld.global") for address in (*found, *weight_places(norm, place))]
    line, place = line_and_place()
    base, weights = th.address(target, space=3), [numbers(half) for half in words[6 * len(rows) :]]
    for index, row in enumerate([th.add(line, start) for start in range(0, len(rows) * ROWS_AT_ONCE, ROWS_AT_ONCE)]):
        of_row = words[6 * index : 6 * index + 6]
        turn = angles(of_row[2:])
        for block, held in enumerate(rotated(normed(of_row[:2], weights, eps), turn)):
            held = as_float16(held) if shapes.stages_8bit else held
            store_line(th.add(base, block * KEYS * LINE), row, place, held)
    th.commit_shared()


def _write_new_interpreted(
    qkv: Any, cos: Any, sin: Any, norm: Any, table: Any, pools: Any, scales: Any, staged: Any, sequence: Any, head: Any,
    limits: Any, *, shapes: Attention, eps: float,
) -> None:  # fmt: skip
    tokens, queries, (first, low, high) = shapes.tokens, shapes.kv_heads * shapes.group, limits
    for which, start in enumerate((queries, queries + shapes.kv_heads)):
        held = qkv.at[pl.ds(sequence * tokens, tokens), pl.ds(start + head, 1)][...]
        if which == 0:
            held = _normed_and_rotated(held, cos, sin, norm, sequence, shapes, eps)
        held = held.reshape(tokens, HEAD_DIM)
        if scales is not None:
            held = to_e4m3(held.astype(jnp.float32) / scales[which][head])
        if staged is not None:
            staged.at[which][...] = jnp.pad(held.astype(staged.dtype), ((0, shapes.staged - tokens), (0, 0)))
        for token in range(tokens):

            @pl.when((first + token >= low) & (first + token < high))
            def _(token=token, which=which, held=held):
                position = first + token
                page = table[sequence, lax.div(position, jnp.int32(shapes.page_size))]
                row = lax.rem(position, jnp.int32(shapes.page_size))
                pools[which].at[page, head, row][...] = held[token]


@thread_op(args=(*[GLOBAL] * 8, *[SCALAR] * 3), interpret=_write_new_interpreted)
def write_new(
    qkv: Any, cos: Any, sin: Any, norm: Any, table: Any, pools: Any, scales: Any, staged: Any, sequence: Any, head: Any,
    limits: Any, *, shapes: Attention, eps: float,
) -> None:  # fmt: skip
    """New keys, normed and rotated, and new values of a head to `staged [2, tokens, H]`, where that is given, and to their pages.

    Args:
      qkv, cos, sin, norm: as for `load_queries`.
      table: `[B, W]` int32; pools: of keys and of values, `[P, K, p, H]`.
      scales: what float8 pools' keys and values are to be multiplied with, `[K]` float32 each; None for other pools.
      staged: in shared memory, or None.
      limits: position of the first new token, and the first and the last but one position that this CTA writes, int32 scalars.
    """
    line, place = line_and_place()
    token = th.least(line, shapes.tokens - 1)
    token = th.add(th.mul(sequence, shapes.tokens), token)
    key = th.add(head, shapes.kv_heads * shapes.group)
    both = (key, th.add(key, shapes.kv_heads))
    found = [address for own in both for address in head_places(qkv, token, own, place)]
    found += [*angle_places(cos, sin, token, place), *weight_places(norm, place)]
    words = [th.load(address, 4, op="ld.global") for address in found]
    new = New(shapes, limits)
    entry = th.add(th.mul(sequence, shapes.table_width), th.div(new.inside, shapes.page_size))
    address = th.add(th.address(table), th.mul(th.widen_index(entry), 4))
    (page,) = th.load(address, op="ld.global.nc", there=new.writes)
    new.put(eps, words, pools, head, page, staged, scales)


def _overlay_interpreted(staged: Any, target: Any, first: Any, live: Any, *, shapes: Attention, which: int) -> None:
    rows = lax.broadcasted_iota(jnp.int32, (KEYS, _HALF), 0)
    new = staged.at[which][...]
    for block, place in enumerate(blocks(target)):
        held = place[...]
        for token in range(shapes.tokens):
            mine = (rows == first + token) & (rows < live)
            held = jnp.where(mine, new[token, block * _HALF : (block + 1) * _HALF], held)
        place[...] = jnp.where(rows < live, held, jnp.zeros_like(held)) if which else held
    plgpu.commit_smem()


@thread_op(args=(GLOBAL, TILES, SCALAR, SCALAR), interpret=_overlay_interpreted)
def overlay(staged: Any, target: Any, first: Any, live: Any, *, shapes: Attention, which: int) -> None:
    """Puts the new rows over those of a tile that came from the pages; zeros in value rows past the sequence.

    Args:
      staged: `[2, tokens, H]` of `write_new`; which: 0 for keys, 1 for values.
      target: `[2 * 64, 64]`, a block of columns below the other.
      first: row of the tile that the first new token has, negative where it lies before; live: rows that hold keys.
    """
    line, place = line_and_place()
    base, zero = th.address(target, space=3), th.number(0)
    for start in range(0, shapes.staged, ROWS_AT_ONCE):
        token = th.add(line, start)
        row = th.add(first, token)
        inside = th.every(
            th.below(token, shapes.tokens), th.compare(row, "sge", zero), th.compare(row, "slt", live), th.below(row, KEYS)
        )  # fmt: skip
        held = th.add(th.mul(th.add(token, which * shapes.staged), _ROW), th.mul(place, th.CHUNK))
        held = th.add(th.address(staged, space=3), held)
        for block in range(2):
            words = th.load(th.add(held, block * _HALF * 2), 4, op="ld.shared", there=inside)
            store_line(th.add(base, block * KEYS * LINE), row, place, words, inside)
    if which:
        for start in range(0, KEYS, ROWS_AT_ONCE):
            row = th.add(line, start)
            unused = th.compare(row, "sge", live)
            for block in range(2):
                store_line(th.add(base, block * KEYS * LINE), row, place, [zero] * 4, unused)
    th.commit_shared()


def _normed_and_rotated(held: Any, cos: Any, sin: Any, norm: Any, sequence: Any, shapes: Attention, eps: float) -> Any:
    """`[T, heads, H]` in the interpreter."""
    wide = held.astype(jnp.float32)
    if norm is not None:
        wide = wide * lax.rsqrt((wide * wide).mean(axis=-1, keepdims=True) + eps)
        wide = (norm[...] * wide.astype(held.dtype)).astype(jnp.float32)
    of_call = pl.ds(sequence * shapes.tokens, shapes.tokens)
    cosine, sine = cos.at[of_call][...][:, None], sin.at[of_call][...][:, None]
    first, second = wide[..., :_HALF], wide[..., _HALF:]
    return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1).astype(held.dtype)


# What one thread does


class New:
    """A thread's share of one of sixteen new tokens, the `line`th, and whether its CTA writes it to the pages."""

    def __init__(self, shapes: Attention, limits: Any, line: Any = None):
        self.shapes, (own, self.place), (self.first, low, high) = shapes, line_and_place(), limits
        self.line = own if line is None else line
        self.position = th.add(self.first, self.line)
        self.writes = th.every(
            th.below(self.line, shapes.tokens), th.compare(self.position, "sge", low), th.compare(self.position, "slt", high)
        )  # fmt: skip
        self.inside = th.select(self.writes, self.position, th.number(0))

    def put(self, eps: float, words: list, pools: Any, head: Any, page: Any, staged: Any, scales: Any = None) -> None:
        """Stores a head to shared memory and to a page. `words`: of key and value, angles, norm's weight where there is one."""
        shapes, place = self.shapes, self.place
        key, value, turn = words[:2], words[2:4], angles(words[4:8])
        weights = [numbers(half) for half in words[8:]]
        pool_row = th.add(th.mul(th.widen_index(page), shapes.kv_heads), th.widen_index(head))
        in_page = th.rem(self.inside, shapes.page_size)
        pool_row = th.add(th.mul(pool_row, shapes.page_size), th.widen_index(in_page))
        smaller = 2 if scales else 1
        offset = th.add(th.mul(pool_row, _ROW // smaller), th.widen_index(th.mul(place, th.CHUNK // smaller)))
        there = th.below(self.line, shapes.staged)
        for which, halves in enumerate((rotated(normed(key, weights, eps), turn), value)):
            for block, held in enumerate(halves):
                stored = held
                if scales:
                    stored = narrowed(numbers(held), _scale(scales[which], head))
                    held = widened(stored)
                if staged is not None:
                    shared = th.add(th.mul(th.add(self.line, which * shapes.staged), _ROW), th.mul(place, th.CHUNK))
                    shared = th.add(th.add(th.address(staged, space=3), shared), block * _HALF * 2)
                    th.when(there, _STORE, shared, *held)
                target = th.add(th.add(th.address(pools[which]), offset), block * _HALF * 2 // smaller)
                places = ", ".join(f"${1 + place}" for place in range(len(stored)))
                th.when(self.writes, f"st.global.v{len(stored)}.b32 [$0], {{{places}}};", target, *stored)
        th.warpgroup_barrier()


def normed(words: list, weights: list, eps: float) -> list:
    """RMS norm of a head: two halves of eight float32, rounded as separate operations round them. No weights: no norm."""
    wide = [numbers(half) for half in words]
    if not weights:
        return wide
    squares = [th.fmul(value, value) for half in wide for value in half]
    total = functools.reduce(th.fadd, squares)
    for distance in (1, 2, 4):
        total = th.fadd(total, th.shuffle_xor(total, distance))
    mean = th.fadd(th.fmul(total, th.real(1 / HEAD_DIM)), th.real(eps))
    inverse = th.rsqrt(mean)
    rounded = [numbers(packed([th.fmul(value, inverse) for value in half])) for half in wide]
    return [
        numbers(packed([th.fmul(value, weight) for value, weight in zip(half, scale, strict=True)]))
        for half, scale in zip(rounded, weights, strict=True)
    ]


def angles(words: list) -> tuple[list, list]:
    """Cosines and sines of a token, of the words at `angle_places`."""
    found = [th.as_real(word) for quad in words for word in quad]
    return found[:8], found[8:]


def rotated(halves: list, turn: tuple[list, list]) -> tuple[list, list]:
    """RoPE of a head: both halves as words of two bfloat16."""
    first, second = [], []
    for x, y, cos, sin in zip(*halves, *turn, strict=True):
        first.append(th.fsub(th.fmul(x, cos), th.fmul(y, sin)))
        second.append(th.fadd(th.fmul(y, cos), th.fmul(x, sin)))
    return packed(first), packed(second)


def head_places(qkv: Any, token: Any, head: Any, place: Any) -> list:
    """Addresses of the eight columns of either half that a thread has of a head."""
    row = th.add(th.mul(token, th.shape_and_strides(qkv)[0][1]), head)
    offset = th.add(th.mul(row, _ROW), th.mul(place, th.CHUNK))
    address = th.add(th.address(qkv), th.widen_index(offset))
    return [th.add(address, block * _HALF * 2) for block in range(2)]


def angle_places(cos: Any, sin: Any, token: Any, place: Any) -> list:
    offset = th.mul(th.widen_index(th.add(th.mul(token, _HALF), th.mul(place, 8))), 4)
    return [th.add(th.address(table), th.add(offset, 16 * half)) for table in (cos, sin) for half in range(2)]


def weight_places(weight: Any, place: Any) -> list:
    """Addresses of a thread's columns of a norm's weight; none of None."""
    if weight is None:
        return []
    address = th.add(th.address(weight), th.widen_index(th.mul(place, th.CHUNK)))
    return [th.add(address, block * _HALF * 2) for block in range(2)]


def line_and_place() -> tuple[Any, Any]:
    """Row of sixteen, and place of eight in it, of this thread."""
    lane, warp = th.lane_and_warp()
    thread = th.add(th.mul(warp, 32), lane)
    return th.div(thread, _THREADS_OF_ROW), th.rem(thread, _THREADS_OF_ROW)


def store_line(base: Any, row: Any, place: Any, words: list, predicate: Any = None) -> None:
    """Eight columns of a row of a swizzled block."""
    swizzled = th.mul(th.xor(place, th.rem(row, 8)), th.CHUNK)
    address = th.add(th.add(base, th.mul(row, LINE)), swizzled)
    if predicate is None:
        th.inline(_STORE, address, *words)
    else:
        th.when(predicate, _STORE, address, *words)


def _scale(scales: Any, head: Any) -> Any:
    address = th.add(th.address(scales), th.mul(th.widen_index(head), 4))
    return th.load(address, op="ld.global.nc", kind="f32", ordered=False)[0]
