"""A column for each thread of a warpgroup: causal convolutions, triangular systems, matrices, and rows that become columns.

A matrix may lie in the registers of a cluster of CTAs, some of the rows in each; sums over rows are then of all of them.

Written out for one thread, since these are hundreds of operations that layouts need not be found for.
"""

# pyright: reportAbstractUsage=false, reportCallIssue=false

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

from dflash_kernels.mosaic_gpu import ptx as th
from dflash_kernels.mosaic_gpu.softmax import sigmoid
from dflash_kernels.mosaic_gpu.thread_op import GLOBAL, SCALAR, thread_op

WIDTH, _AT_ONCE = 128, 4  # columns; rows whose numbers are loaded by one instruction
_BLOCK = 32  # rows that are summed before others are added
VECTOR = plgpu.Layout.WG_STRIDED((WIDTH,), vec_size=1)  # a number of each thread
_NUMBERS = plgpu.ShapeDtypeStruct((WIDTH,), jnp.dtype(jnp.float32), layout=VECTOR)


def _convolved(rows: list[Any], taps: list[Any]) -> list[Any]:
    sums = [
        sum(tap * row for tap, row in zip(taps, rows[start : start + len(taps)], strict=True))
        for start in range(len(rows) - len(taps) + 1)
    ]
    return [x * sigmoid(x) for x in sums]


@thread_op(
    args=(VECTOR, VECTOR), returns=lambda rows, taps: [_NUMBERS] * (len(rows) - len(taps) + 1), interpret=_convolved
)
def convolved(rows: list[Any], taps: list[Any]) -> list[Any]:
    """SiLU of sums of as many rows as there are taps, each times its own: lists of 128 float32, one of each for a thread."""
    values, weights, found = [_number(row) for row in rows], [_number(tap) for tap in taps], []
    for start in range(len(rows) - len(taps) + 1):
        total = th.fmul(weights[0], values[start])
        for tap in range(1, len(taps)):
            total = th.fadd(total, th.fmul(weights[tap], values[start + tap]))
        found.append(_array(th.fdiv(total, th.fadd(th.real(1.0), th.exp(th.fsub(th.real(0.0), total))))))
    return found


def _stored_columns(target: Any, columns: list[Any], *, first: int) -> None:
    for place, column in enumerate(columns):
        target.at[:, first + place][...] = column


@thread_op(args=(GLOBAL, VECTOR), interpret=_stored_columns)
def store_columns(target: Any, columns: list[Any], *, first: int) -> None:
    """Columns of 128 float32 to `target [128, pitch]` in shared memory, from column `first` on: a row of each thread.

    A multiple of four of them; `first` and the pitch are such multiples, too.
    """
    pitch = th.shape_and_strides(target)[0][1]
    row = th.add(th.address(target, space=3), th.mul(th.thread(), 4 * pitch))
    values = [_number(column) for column in columns]
    for place in range(0, len(values), 4):
        at = th.add(row, 4 * (first + place))
        th.inline("st.shared.v4.f32 [$0], {$1, $2, $3, $4};", at, *values[place : place + 4])


def _solved(rows: Any, weights: Any, entries: Any, betas: Any, values: list[Any]) -> None:
    count, found = len(values), list[Any]()
    half = rows.shape[0] // 2
    for token, value in enumerate(values):
        new = betas[token] * value - rows[token] * entries[token]
        for before, written in enumerate(found):
            new = new - weights[token, before] * written
        found.append(new)
    for token in range(count):
        out = rows[half + token] * entries[half + token]
        for before, written in enumerate(found[: token + 1]):
            out = out + weights[half + token, before] * written
        rows.at[half + token][...] = out
    for token, new in enumerate(found):
        rows.at[token][...] = new


@thread_op(args=(GLOBAL, GLOBAL, GLOBAL, GLOBAL, VECTOR), interpret=_solved)
def solve(rows: Any, weights: Any, entries: Any, betas: Any, values: list[Any]) -> None:
    """Solves for u, and sums it up: of each column, with L and M the first and the second half of `weights`,

        u[i] = betas[i] values[i] - entries[i] rows[i] - sum of L[i, j] u[j] over j < i
        out[i] = entries[n + i] rows[n + i] + sum of M[i, j] u[j] over j <= i

    All but `values` in shared memory, float32; u and out take the place of `rows`.

    Args:
      rows: `[2 n, 128]`.
      weights: `[2 n or more, n]`, n a multiple of 4; entries: `[2 n or more]`; betas: `[n or more]`.
      values: up to n times 128 numbers.
    """
    (total, width), size = th.shape_and_strides(rows)[0], th.shape_and_strides(weights)[0][1]
    half, count = total // 2, len(values)
    own = th.add(th.address(rows, space=3), th.mul(th.thread(), 4))
    weights_at, entries_at, betas_at = (th.address(ref, space=3) for ref in (weights, entries, betas))

    def entering(row: int) -> Any:
        return th.fmul(_shared(th.add(own, 4 * width * row))[0], _shared(th.add(entries_at, 4 * row))[0])

    def weights_of(row: int, columns: int) -> list[Any]:
        starts = range(0, columns, 4)
        return [w for start in starts for w in _shared(th.add(weights_at, 4 * (size * row + start)), 4)][:columns]

    found = []
    for token, value in enumerate(values):
        new = th.fmul(_shared(th.add(betas_at, 4 * token))[0], _number(value))
        new = th.fsub(new, entering(token))
        for weight, written in zip(weights_of(token, token), found, strict=True):
            new = th.fsub(new, th.fmul(weight, written))
        found.append(new)
    for token in range(count):
        out = entering(half + token)
        for weight, written in zip(weights_of(half + token, token + 1), found, strict=False):
            out = th.fadd(out, th.fmul(weight, written))
        _store(th.add(own, 4 * width * (half + token)), out)
    for token, new in enumerate(found):
        _store(th.add(own, 4 * width * token), new)


def _held_interpreted(source: Any, first: Any, second: Any, part: Any, *, parts: int) -> list[Any]:
    rows = source.shape[2] // parts
    return [source[first, second, pl.ds(part * rows, rows)]]


@thread_op(
    args=(GLOBAL, SCALAR, SCALAR, SCALAR), returns=lambda source, *_, parts: [_NUMBERS] * (source.shape[2] // parts),
    interpret=_held_interpreted,
)  # fmt: skip
def held_columns(source: Any, first: Any, second: Any, part: Any, *, parts: int) -> list[Any]:
    """Part number `part`, of so many of its rows, of the matrix `source[first, second]` of float32 `[a, b, rows, 128]` in global
    memory: rows of it, a column in every thread."""
    rows, start = _matrix(source, first, second, part, parts)
    step = 4 * WIDTH
    return [_array(th.load(th.add(start, step * row), op="ld.global", kind="f32")[0]) for row in range(rows)]


def _summed_interpreted(held: list[Any], vectors: list[Any]) -> list[Any]:
    return [(held[0] * vector[...][:, None]).sum(axis=0) for vector in vectors]


@thread_op(args=(VECTOR, GLOBAL), returns=lambda _, vectors: [_NUMBERS] * len(vectors), interpret=_summed_interpreted)
def summed_columns(held: list[Any], vectors: list[Any]) -> list[Any]:
    """Sums over rows of what `held_columns` gave, times each row's number in every one of `vectors` in shared memory.

    Rows are added up in blocks, and blocks in pairs, as `taken_sums` goes on: the bits do not tell how many CTAs share a matrix.
    """
    places, found = [th.address(one, space=3) for one in vectors], [list[Any]() for _ in vectors]
    for first in range(0, len(held), _BLOCK):
        sums = [[th.real(0.0) for _ in range(_AT_ONCE)] for _ in vectors]
        for row in range(first, first + _BLOCK, _AT_ONCE):
            numbers = [_number(one) for one in held[row : row + _AT_ONCE]]
            for place, parts in zip(places, sums, strict=True):
                weights = _shared(th.add(place, 4 * row), _AT_ONCE)
                parts[:] = [th.fadd(part, th.fmul(*pair)) for part, *pair in zip(parts, numbers, weights, strict=True)]
        for blocks, parts in zip(found, sums, strict=True):
            blocks.append(_in_pairs(parts))
    return [_array(_in_pairs(blocks)) for blocks in found]


def _written_interpreted(
    target: Any, first: Any, second: Any, part: Any, held: list[Any], key: Any, decay: Any, new: Any, live: Any, *, parts: int
) -> None:  # fmt: skip
    rows = target.shape[2] // parts
    place = target.at[first, second, pl.ds(part * rows, rows)]
    place[...] = jnp.where(live > 0, held[0] * decay + key[...][:, None] * new, held[0])


@thread_op(
    args=(GLOBAL, SCALAR, SCALAR, SCALAR, VECTOR, GLOBAL, SCALAR, VECTOR, SCALAR), interpret=_written_interpreted
)
def write_columns(
    target: Any, first: Any, second: Any, part: Any, held: list[Any], key: Any, decay: Any, new: Any, live: Any, *, parts: int
) -> None:  # fmt: skip
    """The part's rows of `target[first, second]` are `decay * held + key[:, None] * new` where `live` is more than 0.

    Args:
      target: where `held_columns` gave `held` from.
      key: a number of each of the part's rows, in shared memory.
      decay: float32; new: a number of each column.
    """
    _, start = _matrix(target, first, second, part, parts)
    place, number, writes = th.address(key, space=3), _number(new), th.compare(live, "sgt", 0)
    for row in range(0, len(held), _AT_ONCE):
        for index, weight in enumerate(_shared(th.add(place, 4 * row), _AT_ONCE), row):
            value = th.fadd(th.fmul(_number(held[index]), decay), th.fmul(weight, number))
            th.when(writes, "st.global.f32 [$0], $1;", th.add(start, 4 * WIDTH * index), value)


@thread_op(args=(VECTOR, GLOBAL, SCALAR), interpret=lambda pair, memory, arrived, *, parts: None)
def give_sums(pair: list[Any], memory: Any, arrived: Any, *, parts: int) -> None:
    """Begins to give every CTA of a cluster, the own one as well, two numbers of each column, and expects as many of each CTA.

    Args:
      pair: two times 128 float32, sums over the own part's rows.
      memory: float32 `[parts, 128, 2]` in shared memory, where those of all CTAs arrive, and from where `taken_sums` adds them up.
      arrived: int32 scalar, the address of the barrier that completes once they are there.
      parts: CTAs of the cluster.
    """
    th.expect_bytes(arrived, 8 * parts)
    word = th.add(th.mul(th.cta_of_cluster(), 2 * WIDTH), th.mul(th.thread_of_cta(), 2))
    for cta in range(parts):
        th.push(th.address(memory, space=3), word, th.number(cta), [_number(one) for one in pair], arrived)


def _taken_interpreted(memory: Any, arrived: Any, matrix: Any, vectors: Any, met: Any, *, parts: int) -> list[Any]:
    sums = _summed_interpreted([matrix[...]], vectors)
    plgpu.barrier_arrive(met)
    plgpu.barrier_wait(met)
    return sums


@thread_op(
    args=(GLOBAL, SCALAR, None, None, None), returns=lambda *_, **__: [_NUMBERS] * 2, interpret=_taken_interpreted
)
def taken_sums(memory: Any, arrived: Any, matrix: Any, vectors: Any, met: Any, *, parts: int) -> list[Any]:
    """Both numbers of every column, summed over the CTAs of a cluster. Waits for what `give_sums` sends, once.

    Args:
      memory, arrived, parts: see `give_sums`.
      matrix, vectors: all rows, and what is found in them, for the interpreter, whose CTAs share no memory; met: a barrier of its
        cluster, before which no CTA writes what another one reads.
    """
    th.await_phase(arrived, th.number(0))
    own = th.add(th.address(memory, space=3), th.mul(th.thread_of_cta(), 8))
    of_ctas = [_shared(th.add(own, 8 * WIDTH * cta), 2) for cta in range(parts)]
    return [_array(_in_pairs(list(sums))) for sums in zip(*of_ctas, strict=True)]


def _in_pairs(numbers: list[Any]) -> Any:
    """The sum of a power of two of numbers, neighbours first."""
    while len(numbers) > 1:
        numbers = [th.fadd(*pair) for pair in itertools.batched(numbers, 2)]
    return numbers[0]


def _matrix(ref: Any, first: Any, second: Any, part: Any, parts: int) -> tuple[int, Any]:
    """Rows of a part of the matrix `ref[first, second]`, and where its first number of a thread's column is."""
    _, count, rows, width = th.shape_and_strides(ref)[0]
    rows //= parts
    block = th.add(th.mul(th.add(th.mul(first, count), second), parts), part)
    return rows, th.word_address(ref, th.add(th.mul(block, rows * width), th.thread()))


def _number(array: Any) -> Any:
    """This thread's element of an array of one number a thread."""
    held = array.registers.item()
    return vector.extract(held, [], [0]) if isinstance(held.type, ir.VectorType) else held


def _array(number: Any) -> Any:
    """The array of one number a thread."""
    held = vector.from_elements(ir.VectorType.get((1,), th.f32()), [number])
    return mgpu.FragmentedArray(
        _registers=np.array([held], dtype=object), _layout=mgpu.WGStridedFragLayout((WIDTH,), 1), _is_signed=None
    )


def _shared(address: Any, count: int = 1) -> list[Any]:
    return th.load(address, count, op="ld.shared", kind="f32")


def _store(address: Any, number: Any) -> None:
    th.inline("st.shared.f32 [$0], $1;", address, number)
