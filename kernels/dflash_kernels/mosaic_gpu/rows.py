"""Rows in registers: kernels with one warpgroup a row or a piece of an array, loads, the RMS norm, float8 words, reductions."""

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref
from jaxlib.mlir.dialects import vector as vectors

from dflash_kernels.core.device import WARP, WARPGROUP
from dflash_kernels.core.layouts import interleave_columns
from dflash_kernels.mosaic_gpu import ptx as th
from dflash_kernels.mosaic_gpu.convert import interleaved_float8
from dflash_kernels.mosaic_gpu.layouts import TILED
from dflash_kernels.mosaic_gpu.thread_op import FACTOR, GLOBAL, SCALAR, kernel, thread_op

type Reduction = Literal["add", "max", "min"]
WARPS = 4  # of a warpgroup
VECTOR = 4  # neighbouring numbers of one thread


def row_kernel(
    body: Callable[..., None], name: str, grid: tuple[int, ...], out: Any, interpret: Any = None, **scratch: Any
) -> Callable[..., Any]:
    """A kernel with a CTA of one warpgroup for each row, or for each part of one.

    Args:
      body: its axes are "row", and "part" where the grid has two.
      name: as profilers show it.
      grid: rows, or rows and parts.
      out: shapes of the results.
      interpret: not None under Pallas's interpreter.
      scratch: the body's buffers by name. Such a body has the barriers that it needs; without any, Pallas puts two around a store.
    """
    named: Any = functools.partial(body)
    named.__name__ = name
    return kernel(
        named, out_type=out, grid=grid, grid_names=("row", "part")[: len(grid)], scratch_types=scratch, interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=bool(scratch)),
    )  # fmt: skip


def load_row(ref: Any, vector: int = VECTOR) -> jax.Array:
    """A row, `vector` neighbouring numbers a thread."""
    return plgpu.load(ref, layout=plgpu.Layout.WG_STRIDED(ref.shape, vec_size=vector), optimized=False)


def _whole(width: int) -> int:
    """Numbers of as many whole vectors of all threads as hold a row."""
    return width + -width % (VECTOR * WARPGROUP)


@thread_op(
    args=(GLOBAL,),
    returns=lambda ref: plgpu.ShapeDtypeStruct(
        (_whole(ref.shape[0]),), ref.dtype, layout=_strided(_whole(ref.shape[0]), VECTOR)
    ),
    interpret=lambda ref: jnp.pad(ref[...], (0, _whole(ref.shape[0]) - ref.shape[0])),
)
def _load_padded(ref: Any) -> Any:
    (width,), kind = th.shape_and_strides(ref)[0], ir.MemRefType(ref.type).element_type
    size, whole = utils.bytewidth(kind), _whole(width)
    base, registers = th.address(ref), []
    for first in range(0, whole, VECTOR * WARPGROUP):
        place = th.add(th.mul(th.thread(), VECTOR), first)
        words = th.load(th.offset(base, th.mul(place, size)), VECTOR * size // 4, there=th.under(place, width))
        packed = vectors.from_elements(ir.VectorType.get((len(words),), th.i32()), words)
        registers.append(vectors.bitcast(ir.VectorType.get((VECTOR,), kind), packed))
    layout = mgpu.WGStridedFragLayout((whole,), VECTOR)
    return mgpu.FragmentedArray(_registers=np.array(registers, dtype=object), _layout=layout, _is_signed=None)


def _store_interpreted(ref: Any, row: Any) -> None:
    ref[...] = row[: ref.shape[0]]


@thread_op(args=lambda _, row: (GLOBAL, _strided(row.shape[0], VECTOR)), interpret=_store_interpreted)
def _store_padded(ref: Any, row: Any) -> None:
    (width,), size = th.shape_and_strides(ref)[0], utils.bytewidth(ir.MemRefType(ref.type).element_type)
    base, count = th.address(ref), VECTOR * size // 4
    for index, register in enumerate(row.registers.flat):
        place = th.add(th.mul(th.thread(), VECTOR), index * VECTOR * WARPGROUP)
        packed = vectors.bitcast(ir.VectorType.get((count,), th.i32()), register)
        words = [vectors.extract(packed, dynamic_position=[], static_position=[i]) for i in range(count)]
        names = ", ".join(f"${i + 1}" for i in range(count))
        th.when(
            th.under(place, width), f"st.global.v{count}.b32 [$0], {{{names}}};", th.offset(base, th.mul(place, size)), *words
        )  # fmt: skip


def load_padded(ref: Any) -> jax.Array:
    """A row in global memory whose length is a multiple of `VECTOR`, with zeros up to whole vectors of all threads."""
    return load_row(ref) if ref.shape[0] == _whole(ref.shape[0]) else _load_padded(ref)


def store_padded(ref: Any, row: jax.Array) -> None:
    """Stores what `load_padded` loads, without the zeros."""
    if ref.shape == row.shape:
        ref[...] = row
    else:
        _store_padded(ref, row)


def _piece_interpreted(ref: Any, place: Any, *, width: int) -> jax.Array:
    return lax.dynamic_slice(jnp.pad(ref[...], (0, -ref.shape[0] % width)), (place * width,), (width,))


@thread_op(
    args=(GLOBAL, SCALAR),
    returns=lambda ref, _, *, width: plgpu.ShapeDtypeStruct((width,), ref.dtype, layout=_strided(width, VECTOR)),
    interpret=_piece_interpreted,
)
def load_piece(ref: Any, place: Any, *, width: int) -> Any:
    """`width` numbers of a flat array in global memory, whole vectors of all threads, from `place * width` on; zeros behind its
    end, which is one of a vector."""
    (count,), kind = th.shape_and_strides(ref)[0], ir.MemRefType(ref.type).element_type
    size, base, registers = utils.bytewidth(kind), th.address(ref), []
    for first in range(0, width, VECTOR * WARPGROUP):
        number = th.add(th.mul(place, width), th.add(th.mul(th.thread(), VECTOR), first))
        words = th.load(th.offset(base, th.mul(number, size)), VECTOR * size // 4, there=th.under(number, count))
        packed = vectors.from_elements(ir.VectorType.get((len(words),), th.i32()), words)
        registers.append(vectors.bitcast(ir.VectorType.get((VECTOR,), kind), packed))
    layout = mgpu.WGStridedFragLayout((width,), VECTOR)
    return mgpu.FragmentedArray(_registers=np.array(registers, dtype=object), _layout=layout, _is_signed=None)


def _piece_stored(ref: Any, piece: Any, place: Any) -> None:
    width = piece.shape[0]
    whole, rest = divmod(ref.shape[0], width)

    for there, count in ((place < whole, width), (place == whole, rest)):
        if count:

            @pl.when(there)
            def _(count: int = count) -> None:
                ref.at[pl.ds(place * width, count)][...] = piece[:count]


@thread_op(args=lambda _, piece, __: (GLOBAL, _strided(piece.shape[0], VECTOR), SCALAR), interpret=_piece_stored)
def store_piece(ref: Any, piece: Any, place: Any) -> None:
    """Stores what `load_piece` loads, without the zeros."""
    (count,), size = th.shape_and_strides(ref)[0], utils.bytewidth(ir.MemRefType(ref.type).element_type)
    base, held, width = th.address(ref), VECTOR * size // 4, piece.shape[0]
    for index, register in enumerate(piece.registers.flat):
        number = th.add(th.mul(place, width), th.add(th.mul(th.thread(), VECTOR), index * VECTOR * WARPGROUP))
        packed = vectors.bitcast(ir.VectorType.get((held,), th.i32()), register)
        words = [vectors.extract(packed, dynamic_position=[], static_position=[i]) for i in range(held)]
        names = ", ".join(f"${i + 1}" for i in range(held))
        th.when(
            th.under(number, count), f"st.global.v{held}.b32 [$0], {{{names}}};", th.offset(base, th.mul(number, size)), *words
        )  # fmt: skip


def _kept_interpreted(target: Any, row: Any) -> None:
    for place in range(target.shape[0]):
        part = row[place * target.shape[2] : (place + 1) * target.shape[2]]
        target.at[place][...] = jnp.pad(part[None], ((0, target.shape[1] - 1), (0, 0)))


@thread_op(
    args=lambda _, row: (plgpu.RefType(TILED), _strided(row.shape[0], VECTOR)), interpret=_kept_interpreted
)  # fmt: skip
def keep_first_row(target: Any, row: Any) -> None:
    """Stores the numbers that `load_padded` loads, without the zeros, as a matrix's first row in shared memory; other rows stay.

    `target`: `[steps, 8, columns]` in tiles of 8 rows of 128 bytes, which are not swizzled in their first row: `columns` after
    `columns`.
    """
    steps, _, blocks, rows, width = th.shape_and_strides(target)[0]
    base, count = th.address(target, space=3), VECTOR * 2 // 4
    for index, register in enumerate(row.registers.flat):
        place = th.add(th.mul(th.thread(), VECTOR), index * VECTOR * WARPGROUP)
        packed = vectors.bitcast(ir.VectorType.get((count,), th.i32()), register)
        words = [vectors.extract(packed, dynamic_position=[], static_position=[i]) for i in range(count)]
        inside = th.add(th.mul(th.div(place, width), rows * width), th.rem(place, width))
        where = th.add(base, th.mul(inside, 2))
        th.when(th.under(place, steps * blocks * width), "st.shared.v2.b32 [$0], {$1, $2};", where, *words)


def rms_norm(row: jax.Array, weight: jax.Array, eps: float, *, zero_centered: bool = False) -> jax.Array:
    """A row's root-mean-square norm, rounded to its dtype, times the weight, rounded again.

    `zero_centered`: the weight is an offset from 1, added to it in float32, and the norm is rounded once, after that product.
    """
    wide = row.astype(jnp.float32)
    factor = lax.rsqrt((wide * wide).sum() * (1 / row.shape[0]) + eps)
    return weighted(wide, factor, weight, row.dtype, zero_centered=zero_centered)


def weighted(
    wide: jax.Array, factor: Any, weight: jax.Array, dtype: Any, *, zero_centered: bool, rounds_last: bool = False
) -> jax.Array:
    """A row in float32 times its norm's factor and weight, in `dtype` and rounded as `rms_norm` rounds it; with `rounds_last` once,
    after the weight."""
    weight = weight.astype(jnp.float32)
    if zero_centered or rounds_last:
        return (wide * factor * (1.0 + weight if zero_centered else weight)).astype(dtype)
    return (weight * (wide * factor).astype(dtype).astype(jnp.float32)).astype(dtype)


def _float8_words(row: jax.Array) -> jax.Array:
    most = float(jnp.finfo(jnp.float8_e4m3fn).max)
    numbers = jnp.where(jnp.isnan(row), row, jnp.clip(row, -most, most)).astype(jnp.float8_e4m3fn)
    return lax.bitcast_convert_type(interleave_columns(numbers).reshape(-1, VECTOR), jnp.int32)


def _strided(width: int, vector: int) -> Any:
    return plgpu.Layout.WG_STRIDED((width,), vec_size=vector)


@thread_op(
    args=lambda row: (_strided(row.shape[0], VECTOR),),
    returns=lambda row: plgpu.ShapeDtypeStruct(
        (row.shape[0] // VECTOR,), jnp.dtype(jnp.int32), layout=_strided(row.shape[0] // VECTOR, 1)
    ),
    interpret=_float8_words,
)
def float8_words(row: Any) -> Any:
    """A row of float32 as int32 words of four float8 numbers, columns interleaved. NaN stays, others saturate."""
    return interleaved_float8(row, _strided(row.shape[0] // VECTOR, 1).to_mgpu())


def one_each(value: Any, is_signed: bool | None = None) -> Any:
    """One number of each thread as Pallas knows it; `is_signed`: None for float32."""
    register = vectors.from_elements(ir.VectorType.get((1,), value.type), [value])
    layout = mgpu.WGStridedFragLayout((WARPGROUP,), 1)
    return mgpu.FragmentedArray(_registers=np.array([register], dtype=object), _layout=layout, _is_signed=is_signed)


def _taken(row, places):
    (size,) = row.shape
    return jnp.where(places < size, row[...][jnp.minimum(places, size - 1)].astype(jnp.float32), -jnp.inf)


@thread_op(
    args=(GLOBAL, _strided(WARPGROUP, 1)), interpret=_taken,
    returns=plgpu.ShapeDtypeStruct((WARPGROUP,), jnp.dtype(jnp.float32), layout=_strided(WARPGROUP, 1)),
)  # fmt: skip
def numbers_at(row: Any, places: Any) -> Any:
    """Numbers of a row of bfloat16 in float32, at a place for each thread; -inf behind the row's end."""
    place = vectors.extract(places.registers.item(), [], [0])
    size = th.shape_and_strides(row)[0][0]
    address = th.offset(th.address(row), th.mul(th.least(place, size - 1), 2))
    return one_each(th.select(th.below(place, size), th.bfloat16_at(address), th.real(-math.inf)))


def _reduced(row, target, scratch, line, place, *, kind, vector) -> None:
    target[line, place] = {"add": row.sum, "max": row.max, "min": row.min}[kind]()


@thread_op(
    args=lambda row, *_, **options: (_strided(row.shape[0], options["vector"]), GLOBAL, GLOBAL, SCALAR, SCALAR),
    interpret=_reduced,
)
def reduce_into(row: Any, target: Any, scratch: Any, line: Any, place: Any, *, kind: Reduction, vector: int) -> None:
    """Writes the sum, maximum or minimum of a row of float32 to `target[line, place]`, several warpgroups at a time.

    Pallas's own reductions share one place in memory.

    Args:
      row: `vector` neighbouring numbers a thread of one warpgroup.
      target: `[lines, places]` float32 in shared memory.
      scratch: `[lines, WARPS]` float32 in shared memory, a line for each warpgroup.
      line, place: int32 scalars.
    """
    line, place = (arith.index_cast(ir.IndexType.get(), value) for value in (line, place))
    found = row.reduce(kind, 0, utils.memref_slice(scratch, line)).registers.item()
    if isinstance(found.type, ir.VectorType):
        found = vectors.extract(found, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([0]))
    memref.store(found, target, [line, place])


def sums_of_warps(rows: int) -> Any:
    """The memory that `row_sums` takes for so many rows."""
    return plgpu.SMEM((rows, WARPS), jnp.float32)


@thread_op(
    args=lambda rows, _, *, vector: (_strided(rows[0].shape[0], vector), GLOBAL),
    returns=lambda rows, *_, **__: [FACTOR] * len(rows), interpret=lambda rows, _, *, vector: [row.sum() for row in rows],
)  # fmt: skip
def row_sums(rows: list[Any], scratch: Any, *, vector: int) -> list[Any]:
    """Sums of rows of float32, all at once: Pallas's own come one after the other, and each waits for the warpgroup twice.

    Its one barrier comes before the sums: all threads see what the others have stored in shared memory before.

    Args:
      rows: `vector` neighbouring numbers a thread of one warpgroup.
      scratch: of `sums_of_warps`, for this call alone.
    """
    sums, base = [_own_sum(row) for row in rows], th.address(scratch, space=3)
    for distance in (16, 8, 4, 2, 1):
        sums = [th.fadd(one, th.shuffle_xor(one, distance)) for one in sums]
    warp = th.mul(th.div(th.thread(), WARP), 4)
    for index, one in enumerate(sums):
        th.inline("st.shared.f32 [$0], $1;", th.add(th.add(base, 4 * WARPS * index), warp), one)
    th.warpgroup_barrier()
    found = [th.load(th.add(base, 4 * WARPS * index), WARPS, op="ld.shared", kind="f32") for index in range(len(sums))]
    return [th.fadd(th.fadd(a, b), th.fadd(c, d)) for a, b, c, d in found]


def _own_sum(row: Any) -> Any:
    """The sum of a thread's own numbers."""
    total = functools.reduce(th.fadd, row.registers.flat)
    size = ir.VectorType(total.type).shape[0]
    return functools.reduce(th.fadd, [vectors.extract(total, [], [i]) for i in range(size)])
