"""Products of float32 matrices at full precision on tensor cores, whose own float32 keeps eleven bits.

Each number is the sum of one of eleven bits and a remainder of eleven more; a product is three of these (the remainders' own, 2^-22
of it, is left out). Matrix instructions cut their sums off where float32 rounds: eight terms are summed in one, and the sums of
eight are added outside.
"""

# pyright: reportAbstractUsage=false, reportCallIssue=false

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.mosaic_gpu import ptx as th
from dflash_kernels.mosaic_gpu.layouts import tiled
from dflash_kernels.mosaic_gpu.thread_op import GLOBAL, thread_op

STEP = 8  # rows that one instruction sums over
LEFT_PITCH = 36  # numbers from row to row: without bank conflicts for stores of four and loads of one
LEFT, RIGHT, SUMMED = 32, 128, 128  # columns of both sides, rows
_STEPS_AT_ONCE = 2


def _products(left: Any, right: Any, out: Any, gram: Any, squares: Any) -> None:
    columns = left[...][:, :LEFT]
    dot = functools.partial(jnp.dot, precision="highest")
    out[...] = dot(columns.T, right[...])
    gram.at[:LEFT][...] = dot(columns.T, columns[:, : LEFT // 2])
    squares.at[:LEFT][...] = (columns * columns).sum(axis=0)


@thread_op(args=(GLOBAL, plgpu.RefType(tiled(jnp.float32)), GLOBAL, GLOBAL, GLOBAL), interpret=_products)
def products(left: Any, right: Any, out: Any, gram: Any, squares: Any) -> None:
    """`left.T @ right`, and of the columns of `left` their products with the first half of them and their sums of squares.

    All in shared memory, float32.

    Args:
      left: `[128, LEFT_PITCH]`, of which 32 columns count.
      right: `[128, 128]`, in swizzled tiles of 8 rows.
      out: `[32, 128]`; gram: `[32 or more, 16]`; squares: `[32 or more]`.
    """
    lane, warp = th.lane_and_warp()
    # Of eight rows a thread takes two neighbours in place of two that lie four apart: the sum does not mind, banks do.
    pair, column = th.rem(lane, 4), th.div(lane, 4)
    left_at = th.add(th.address(left, space=3), th.add(th.mul(pair, 8 * LEFT_PITCH), th.mul(column, 4)))
    within = []
    for place in range(4):
        chunk = th.add(th.div(column, 4), 2 * place)
        for row in range(2):
            in_8 = th.add(th.mul(pair, 2), row)
            swizzled = th.add(th.mul(th.xor(chunk, in_8), 16), th.mul(th.rem(column, 4), 4))
            within.append(th.add(th.mul(in_8, 128), swizzled))
    right_at = th.add(th.address(right, space=3), th.mul(warp, 1024))
    right_at = [th.add(right_at, place) for place in within]

    def of_left(at: Any, step: Any, blocks: int) -> list[Any]:
        """Both rows of some columns, eight apart."""
        at = th.add(at, th.mul(step, STEP * LEFT_PITCH * 4))
        return [_shared(th.add(at, 32 * block + 4 * LEFT_PITCH * row)) for block in range(blocks) for row in range(2)]

    @th.fori(th.number(SUMMED // STEP // _STEPS_AT_ONCE), [th.real(0.0)] * 32)
    def multiplied(turn: Any, sums: list[Any]) -> list[Any]:
        for place in range(_STEPS_AT_ONCE):
            step = th.add(th.mul(turn, _STEPS_AT_ONCE), place)
            held = [_cut(number) for number in of_left(left_at, step, 4)]
            at = th.mul(step, STEP * 512)
            other = [_cut(_shared(th.add(start, at))) for start in right_at]
            sums = [
                total
                for tile in range(8)
                for total in _added(sums[4 * tile : 4 * tile + 4], _side(held, tile // 4), other[2 * (tile % 4) :][:2])
            ]
        return sums

    out_at = th.add(th.address(out, space=3), th.add(th.mul(column, 4 * RIGHT), th.mul(pair, 8)))
    out_at = th.add(out_at, th.mul(warp, 128))
    for tile in range(8):
        at = th.add(out_at, 64 * RIGHT * (tile // 4) + 32 * (tile % 4))
        _store_tile(at, 32 * RIGHT, multiplied.results[4 * tile : 4 * tile + 4])

    # A tile of sixteen by eight for each warp.
    down, across = th.div(warp, 2), th.rem(warp, 2)
    rows_at, columns_at = th.add(left_at, th.mul(down, 64)), th.add(left_at, th.mul(across, 32))

    @th.fori(th.number(SUMMED // STEP // _STEPS_AT_ONCE), [th.real(0.0)] * 6)
    def among(turn: Any, sums: list[Any]) -> list[Any]:
        tile, totals = sums[:4], sums[4:]
        for place in range(_STEPS_AT_ONCE):
            step = th.add(th.mul(turn, _STEPS_AT_ONCE), place)
            numbers = of_left(rows_at, step, 2)
            for index, number in enumerate(numbers):
                totals[index // 2] = th.fadd(totals[index // 2], th.fmul(number, number))
            other = [_cut(number) for number in of_left(columns_at, step, 1)]
            tile = _added(tile, _side([_cut(number) for number in numbers], 0), other)
        return [*tile, *totals]

    *tile, first, second = among.results
    width = LEFT // 2
    gram_at = th.add(th.address(gram, space=3), th.add(th.mul(column, 4 * width), th.mul(pair, 8)))
    gram_at = th.add(gram_at, th.add(th.mul(down, 64 * width), th.mul(across, 32)))
    _store_tile(gram_at, 32 * width, tile)
    # Both warps of sixteen rows have their squares, and store the same.
    squares_at = th.add(th.address(squares, space=3), th.add(th.mul(down, 64), th.mul(column, 4)))
    for index, total in enumerate((first, second)):
        for distance in (1, 2):
            total = th.fadd(total, th.shuffle_xor(total, distance))
        th.inline("st.shared.f32 [$0], $1;", th.add(squares_at, 32 * index), total)


def _shared(address: Any) -> Any:
    (number,) = th.load(address, op="ld.shared", kind="f32")
    return number


def _cut(number: Any) -> tuple[Any, Any]:
    """A number as two of eleven bits."""
    high = th.inline("cvt.rna.tf32.f32 $0, $1;", number, returns=th.i32())
    rest = th.fsub(number, th.as_real(high))
    return high, th.inline("cvt.rna.tf32.f32 $0, $1;", rest, returns=th.i32())


def _side(held: list[tuple[Any, Any]], half: int) -> list[tuple[Any, Any]]:
    """Sixteen columns in the order of the instruction's first operand."""
    first, below, second, below_second = (4 * half + index for index in (0, 2, 1, 3))
    return [held[index] for index in (first, below, second, below_second)]


def _added(sums: list[Any], left: list[tuple[Any, Any]], right: list[tuple[Any, Any]]) -> list[Any]:
    """Sums of a tile `[16, 8]`, and the products of eight rows."""
    found = [th.real(0.0)] * 4
    for low_left, low_right in ((1, 0), (0, 1), (0, 0)):
        operands = [*(cut[low_left] for cut in left), *(cut[low_right] for cut in right), *found]
        found = th.inline(
            "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"
            " {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
            *operands, returns=[th.f32()] * 4, convergent=True,
        )  # fmt: skip
    return [th.fadd(total, new) for total, new in zip(sums, found, strict=True)]


def _store_tile(address: Any, below: int, numbers: Sequence[Any]) -> None:
    """A tile `[16, 8]`: two neighbours in a row, and two eight rows further, `below` bytes on."""
    for half in range(2):
        th.inline("st.shared.v2.f32 [$0], {$1, $2};", th.add(address, below * half), *numbers[2 * half : 2 * half + 2])
