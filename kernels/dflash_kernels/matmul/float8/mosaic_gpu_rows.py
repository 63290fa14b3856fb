"""The Hopper kernels that round rows to float8: one warpgroup a row, which it keeps in registers until its scale is known."""

# Pallas declares what it inlines with the context that it passes itself.
# pyright: reportAbstractUsage=false, reportCallIssue=false, reportPrivateImportUsage=false

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.core.layouts import interleave_columns
from dflash_kernels.matmul.dense.add_norm import VECTOR, load, normed_row
from dflash_kernels.matmul.float8.reference import LARGEST, SMALLEST


def rows(x: jax.Array, interpret: Any = None) -> tuple[jax.Array, jax.Array]:
    """Rows of `x [M, D]` as words of four columns in pairs, `[M, D / 4]` int32, and their scales."""

    def body(x, words, scales):
        row = lax.axis_index("row")
        _put(load(x.at[row]), words, scales, row, interpret)

    return _kernel(body, "float8_rows", *x.shape, (), interpret)(x)


def add_norm(
    parts: jax.Array, stream: jax.Array, weight: jax.Array, *, eps: float, interpret: Any = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`stream + sum(parts)`, and its norm's rows as `rows` gives them; `parts [S, M, D]`, `stream [M, D]`."""

    def body(parts, before, weight, stream, words, scales):
        row = lax.axis_index("row")
        rounded, normed = normed_row(parts, before, weight, row, eps)
        stream.at[row][...] = rounded
        _put(normed.astype(jnp.float32), words, scales, row, interpret)

    out = jax.ShapeDtypeStruct(stream.shape, stream.dtype)
    return _kernel(body, "add_norm_float8", *stream.shape, (out,), interpret)(parts, stream, weight)


def _kernel(body: Any, name: str, count: int, width: int, first: tuple[Any, ...], interpret: Any) -> Any:
    named: Any = functools.partial(body)
    named.__name__ = name  # what profilers show
    shapes = jax.ShapeDtypeStruct((count, width // 4), jnp.int32), jax.ShapeDtypeStruct((count,), jnp.float32)
    return plgpu.kernel(
        named, out_type=(*first, *shapes), grid=(count,), grid_names=("row",),
        compiler_params=plgpu.CompilerParams(approx_math=True), **({} if interpret is None else {"interpret": interpret}),
    )  # fmt: skip


def _put(row: Any, words: Any, scales: Any, index: Any, interpret: Any) -> None:
    """Writes one row, float32, with its largest number at the largest of float8."""
    top = jnp.maximum(jnp.abs(row).max(), SMALLEST)
    scales[index] = top * (1 / LARGEST)
    words.at[index][...] = _words(row * (LARGEST / top), interpret)


def _words(row: Any, interpret: Any) -> Any:
    """Numbers of a row as words of four float8 ones, columns in pairs."""
    if interpret is not None:
        values = interleave_columns(
            jnp.where(jnp.isnan(row), row, jnp.clip(row, -LARGEST, LARGEST)).astype(jnp.float8_e4m3fn)
        )
        return lax.bitcast_convert_type(values.reshape(-1, VECTOR), jnp.int32)

    from dflash_kernels.mosaic_gpu import convert as mosaic_gpu_words

    whole, of_words = (plgpu.Layout.WG_STRIDED((row.shape[0] // by,), vec_size=VECTOR // by) for by in (1, VECTOR))
    result = plgpu.ShapeDtypeStruct((row.shape[0] // VECTOR,), jnp.dtype(jnp.int32), layout=of_words)

    @plgpu.inline_mgpu(arg_types=(whole,), return_type=result)
    def make(_ctx, array):
        return mosaic_gpu_words.interleaved_float8(array, of_words.to_mgpu())

    return make(row)
