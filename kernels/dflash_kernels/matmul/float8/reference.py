"""The definitions in plain jnp; each result is rounded as separate operations round it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_kernels.core.layouts import interleave_columns
from dflash_kernels.matmul.dense.reference import add_norm_reference
from dflash_kernels.quantize.reference import E4M3_MAX, ROW_FLOOR


class Float8Rows(NamedTuple):
    """Rows in float8 with a scale each: `values [M, D]` float8_e4m3fn times `scales [M]` float32, columns in the weights' order."""

    values: Array
    scales: Array


def float8_rows_reference(x: Float[Array, "M D"], *, paired: bool = False) -> Float8Rows:
    """See `float8_rows`."""
    wide = x.astype(jnp.float32)
    largest = jnp.maximum(jnp.max(jnp.abs(wide), axis=1), ROW_FLOOR)
    scaled = wide * (E4M3_MAX / largest)[:, None]
    # A quotient may round to above the largest number, past which float8 has nothing but NaN.
    values = jnp.where(jnp.isnan(scaled), scaled, jnp.clip(scaled, -E4M3_MAX, E4M3_MAX)).astype(jnp.float8_e4m3fn)
    return Float8Rows(interleave_columns(values) if paired else values, largest * (1 / E4M3_MAX))


def float8_dense_reference(
    x: Float8Rows, weight: Float[Array, "F D"], scales: Float[Array, "F"], dtype: jnp.dtype, *,
    live: Int[Array, ""] | None = None,
) -> Float[Array, "M F"]:  # fmt: skip
    """See `float8_dense`. Of all rows."""
    # bfloat16 holds every number of float8, float32 every product of two.
    wide = x.values.astype(jnp.bfloat16), weight.astype(jnp.bfloat16)
    product = jnp.einsum("md,fd->mf", *wide, preferred_element_type=jnp.float32)
    return (product * x.scales[:, None] * scales[None]).astype(dtype)


def float8_gated_reference(
    x: Float8Rows, weight: Float[Array, "twoF D"], scales: Float[Array, "twoF"], dtype: jnp.dtype
) -> Float[Array, "M F"]:
    """See `float8_gated`."""
    gate, up = jnp.split(float8_dense_reference(x, weight, scales, dtype), 2, axis=-1)
    return jax.nn.silu(gate) * up


def float8_onto_reference(
    x: Float8Rows, weight: Float[Array, "D F"], scales: Float[Array, "D"], stream: Float[Array, "M D"],
    norm: Float[Array, "D"], *, eps: float, paired: bool, zero_centered: bool = False,
) -> tuple[Float[Array, "M D"], Float8Rows]:  # fmt: skip
    """See `float8_onto`."""
    parts = float8_dense_reference(x, weight, scales, jnp.dtype(jnp.float32))[None]
    stream, normed = add_norm_reference(parts, stream, norm, eps=eps, zero_centered=zero_centered)
    return stream, float8_rows_reference(normed, paired=paired)


def float8_best_reference(
    x: Float8Rows, weight: Float[Array, "F D"], scales: Float[Array, "F"], dtype: jnp.dtype
) -> Int[Array, "M"]:
    """See `float8_best`."""
    return jnp.argmax(float8_dense_reference(x, weight, scales, dtype), axis=-1).astype(jnp.int32)


def float8_candidates_reference(
    x: Float8Rows, weight: Float[Array, "F D"], scales: Float[Array, "F"], count: int
) -> Int[Array, "M C"]:
    """See `float8_candidates`. A group has every `count`-th row."""
    products = float8_dense_reference(x, weight, scales, jnp.dtype(jnp.float32))
    groups = -(-weight.shape[0] // count)
    products = jnp.pad(products, ((0, 0), (0, groups * count - weight.shape[0])), constant_values=-jnp.inf)
    best = jnp.argmax(products.reshape(-1, groups, count), axis=1) * count + jnp.arange(count)
    return jnp.where(best < weight.shape[0], best, 0).astype(jnp.int32)
