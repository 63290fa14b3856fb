"""What a CTA of the kernel for one-byte pages asks for before its first copies, and what becomes of it, in words that Pallas has.

Whatever is read after copies were started waits until all of those have arrived, be it in the cache or not. So entries of the page
table and queries are asked for before, in loads that compilers leave where they stand.
"""

# Pallas declares what it inlines as if it were called as written.
# pyright: reportPrivateImportUsage=false, reportCallIssue=false

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.mosaic_gpu.layouts import in_key_order, tile_of
from dflash_kernels.mosaic_gpu.thread_op import NUMBER, SCALAR, WORDS


def query_rows(stored: Any, rows: int) -> tuple[int, Any]:
    """Rows in shared memory of so many queries of keys that are `stored` so, and their dtype."""
    return (2 * rows, jnp.int8) if stored == jnp.int8 else (rows, jnp.float16)


def ask_for_queries(source, first_row, count: int, interpret: Any) -> list[Any]:
    """Query rows of `source [T, G, H]`, `count` from `first_row` on, on their way to registers: bfloat16 or float16."""
    if interpret is not None:
        return []

    from dflash_kernels.attention.paged import mosaic_gpu_narrow_queries as queries
    from dflash_kernels.mosaic_gpu import ptx as th

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), SCALAR), return_type=[WORDS] * queries.asked_words(count, source.shape[2])
    )
    def ask(_ctx, source, first_row):
        return [th.as_array(words) for words in queries.ask_for_queries(source, first_row, count)]

    return ask(source, first_row)


def entry(row, index, interpret: Any):
    """An entry of a row of the page table, asked for here and not where it is needed."""
    if interpret is not None:
        return row[index]

    from dflash_kernels.attention.paged import mosaic_gpu_narrow_lanes as lanes

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR), return_type=NUMBER)
    def ask(_ctx, row, index):
        return lanes.entry(row, index)

    return ask(row, index)


def put_queries(asked: list[Any], source, target, factors, memory, first_row, rows, interpret: Any):
    """What was asked for of `source` to shared memory, times powers of two that bring a largest number to between 2^14 and 2^15.

    Args:
      rows: of the source's rows `t * G + g` the first so many are wanted, zeros take the place of others.
      target: in shared memory, given rows `first_row` and on: `[N, H]` float16 in the keys' order, each row times its own power,
        those of float16 as they are; or `[2 N, H]` int8, numbers times the power of the largest finite row, rounded to
        `256 * upper + lower`, all upper bytes first.
      factors: `[N]` float32 in shared memory, given what scores have to be multiplied with; for int8, NaN where a row is not
        finite throughout and 0 elsewhere.
      memory: four words of shared memory for int8.

    Returns:
      What all scores have to be multiplied with, a float32 scalar, for int8; else None.
    """
    if interpret is not None:
        count = factors.shape[0]
        plain = source[...].reshape(-1, source.shape[2])
        plain = jnp.pad(plain, ((0, -plain.shape[0] % count + count), (0, 0)))
        plain = lax.dynamic_slice_in_dim(plain, first_row, count).astype(jnp.float32)
        plain = jnp.where((first_row + jnp.arange(count) < rows)[:, None], plain, 0.0)
        top = jnp.max(jnp.where(jnp.isfinite(plain), jnp.abs(plain), 0.0), axis=1)
        exponent = jnp.clip(jnp.frexp(top)[1] - 1, -107, 127) - 14
        finite = jnp.isfinite(plain).all(axis=1)
        if source.dtype == target.dtype:
            exponent = jnp.zeros_like(exponent)
        if target.dtype == jnp.int8:
            exponent = jnp.full_like(exponent, jnp.max(jnp.where(finite, exponent, -107 - 14)))
        scaled, factor = (jnp.ldexp(x, e) for x, e in ((plain, -exponent[:, None]), (jnp.ones_like(top), exponent)))
        if target.dtype == jnp.int8:
            factors[...] = jnp.where(finite, 0.0, jnp.nan)
            whole = jnp.minimum(jnp.round(jnp.where(jnp.isfinite(scaled), scaled, 0.0)).astype(jnp.int32), 2**15 - 129)
            upper = (whole + 128) >> 8
            target[...] = jnp.concatenate([upper, whole - 256 * upper]).astype(jnp.int8)
            return factor[0]
        target[...] = in_key_order(scaled).astype(target.dtype)
        factors[...] = factor
        return None

    from dflash_kernels.attention.paged import mosaic_gpu_narrow_queries as queries
    from dflash_kernels.mosaic_gpu import ptx as th

    arg_types = (plgpu.RefType(), tile_of(target), *[plgpu.RefType()] * 2, SCALAR, SCALAR, *[WORDS.layout] * len(asked))
    one = plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.float32), layout=SCALAR)

    @plgpu.inline_mgpu(arg_types=arg_types, return_type=one if target.dtype == jnp.int8 else ())
    def put(_ctx, source, target, factors, memory, first_row, rows, *held):
        words = [th.as_words(array) for array in held]
        return queries.put_queries(words, source, target, factors, first_row, rows, memory) or ()

    return put(source, target, factors, memory, first_row, rows, *asked)
