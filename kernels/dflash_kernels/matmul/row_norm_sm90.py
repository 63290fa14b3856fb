"""Row kernels that follow a matrix product on Hopper: split-K reduction, residual, RMS norm, and a router's scores or float8 rows.

One warpgroup has a row in registers from its first load to its last store.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from dflash_kernels.mosaic_gpu.layouts import store
from dflash_kernels.mosaic_gpu.rows import (
    VECTOR,
    float8_words,
    load_padded,
    load_row,
    rms_norm,
    row_kernel,
    row_sums,
    store_padded,
    sums_of_warps,
    weighted,
)
from dflash_kernels.quantize.reference import E4M3_MAX, ROW_FLOOR

SCORES = 4  # of one row in one CTA
SCORES_ALONE = 2  # the same where there is no other row: a router of 257 then has a CTA on nearly every multiprocessor


def add_norm(
    parts: jax.Array, residual: jax.Array, weight: jax.Array, *, eps: float, zero_centered: bool = False,
    rounds_last: bool = False, interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """`residual + sum(parts)` and its norm; `parts [split_k, M, D]`, `residual [M, D]`."""

    def body(parts, before, weight, residual, normed):
        row = lax.axis_index("row")
        added, scaled = add_norm_row(parts, before, weight, row, eps, zero_centered, rounds_last)
        store_padded(residual.at[row], added)
        store_padded(normed.at[row], scaled)

    out = jax.ShapeDtypeStruct(residual.shape, residual.dtype)
    return row_kernel(body, "add_norm", residual.shape[:1], (out, out), interpret)(parts, residual, weight)


def add_norm_scores(
    parts: jax.Array, residual: jax.Array, weight: jax.Array, scorer: jax.Array, bias: jax.Array | None = None, *,
    eps: float, zero_centered: bool = False, rounds_last: bool = False, interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """`add_norm`, and the norm's products with the rows of `scorer [E, D]`, a bias added to each: each CTA takes some of these, and
    norms for itself."""

    (rows, _), count = residual.shape, scorer.shape[0]
    each = SCORES_ALONE if rows == 1 else SCORES
    whole = count % each == 0

    def body(parts, before, weight, scorer, *rest, sums):
        *biases, residual, normed, scores = rest
        row, first = lax.axis_index("row"), lax.axis_index("part") * each
        # Asked for before anything else: they do not depend on what the kernel before leaves.
        places = [first + index for index in range(each)]
        scorers = [_load(scorer.at[place if whole else jnp.minimum(place, count - 1)]) for place in places]
        added, scaled = add_norm_row(parts, before, weight, row, eps, zero_centered, rounds_last)

        @pl.when(first == 0)
        def _():
            store_padded(residual.at[row], added)
            store_padded(normed.at[row], scaled)

        wide = scaled.astype(jnp.float32)
        found = row_sums([other * wide for other in scorers], sums, vector=VECTOR)
        for place, score in zip(places, found, strict=True):

            def keep(place: Any = place, score: Any = score) -> None:
                scores[row, place] = score + biases[0][place].astype(jnp.float32) if biases else score

            keep() if whole else pl.when(place < count)(keep)

    out = jax.ShapeDtypeStruct(residual.shape, residual.dtype)
    shapes = (out, out, jax.ShapeDtypeStruct((rows, count), jnp.float32))
    kernel = row_kernel(body, "add_norm_scores", (rows, -(-count // each)), shapes, interpret, sums=sums_of_warps(each))
    return kernel(parts, residual, weight, scorer, *(() if bias is None else (bias,)))


def add_norm_float8(
    parts: jax.Array, residual: jax.Array, weight: jax.Array, *, eps: float, zero_centered: bool = False,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """`residual + sum(parts)`, and its norm as `float8_rows` gives it; `parts [split_k, M, D]`, `residual [M, D]`."""

    def body(parts, before, weight, residual, words, scales):
        row = lax.axis_index("row")
        added, normed = add_norm_row(parts, before, weight, row, eps, zero_centered)
        store(residual.at[row], added)
        _store_float8(normed.astype(jnp.float32), words, scales, row)

    out = jax.ShapeDtypeStruct(residual.shape, residual.dtype), *_float8_types(*residual.shape)
    return row_kernel(body, "add_norm_float8", residual.shape[:1], out, interpret)(parts, residual, weight)


def float8_rows(x: jax.Array, interpret: Any = None) -> tuple[jax.Array, jax.Array]:
    """Rows of `x [M, D]` in float8: words of four interleaved columns, `[M, D / 4]` int32, and row scales."""

    def body(x, words, scales):
        row = lax.axis_index("row")
        _store_float8(_load(x.at[row]), words, scales, row)

    return row_kernel(body, "float8_rows", x.shape[:1], _float8_types(*x.shape), interpret)(x)


def norm_rows(
    rows: jax.Array, weight: jax.Array, eps: float, interpret: Any = None, *, zero_centered: bool = False
) -> jax.Array:
    """The norm of `rows [M, D]`, for products that end in the residual."""

    def body(rows, weight, normed):
        row = lax.axis_index("row")
        normed.at[row][...] = rms_norm(load_row(rows.at[row]), load_row(weight), eps, zero_centered=zero_centered)

    out = jax.ShapeDtypeStruct(rows.shape, rows.dtype)
    return row_kernel(body, "norm_rows", rows.shape[:1], out, interpret)(rows, weight)


def _load(ref: Any) -> jax.Array:
    return load_padded(ref).astype(jnp.float32)


def add_norm_row(
    parts: Any, before: Any, weight: Any, row: Any, eps: float, zero_centered: bool, rounds_last: bool = False
) -> tuple[jax.Array, jax.Array]:
    """One row of the residual with split-K's partial products added, and its norm."""
    factors = load_padded(weight)  # first: after the sum's barrier it would be waited for
    total = _load(before.at[row])
    for part in range(parts.shape[0]):
        total = total + _load(parts.at[part, row])
    rounded = total.astype(before.dtype)
    wide = rounded.astype(jnp.float32)
    factor = lax.rsqrt((wide * wide).sum() * (1 / before.shape[1]) + eps)
    how = {"zero_centered": zero_centered, "rounds_last": rounds_last}
    return rounded, weighted(wide, factor, factors, before.dtype, **how)


def _float8_types(rows: int, width: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    return jax.ShapeDtypeStruct((rows, width // VECTOR), jnp.int32), jax.ShapeDtypeStruct((rows,), jnp.float32)


def _store_float8(row: Any, words: Any, scales: Any, index: Any) -> None:
    """Writes one row, float32, scaled so that its largest number is float8's largest."""
    largest = jnp.maximum(jnp.abs(row).max(), ROW_FLOOR)
    scales[index] = largest * (1 / E4M3_MAX)
    store(words.at[index], float8_words(row * (E4M3_MAX / largest)))
