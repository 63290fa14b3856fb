"""The definitions in plain jnp; each result is rounded as separate operations round it."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_kernels.core.layouts import ColumnBlocks, row_by_row
from dflash_kernels.norm.reference import weighted_norm


def dense_reference(
    x: Float[Array, "M D"], weight: Float[Array, "F D"] | ColumnBlocks, *, live: Int[Array, ""] | None = None
) -> Float[Array, "M F"]:
    """See `dense`. Of all rows."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum("md,fd->mf", x, row_by_row(weight), precision=precision)


def dense_gated_reference(x: Float[Array, "M D"], weight: Float[Array, "twoF D"] | ColumnBlocks) -> Float[Array, "M F"]:
    """See `dense_gated`."""
    gate, up = jnp.split(dense_reference(x, weight), 2, axis=-1)
    return jax.nn.silu(gate) * up


def dense_parts_reference(
    x: Float[Array, "M D"], weight: Float[Array, "F D"] | ColumnBlocks, *, live: Int[Array, ""] | None = None
) -> Float[Array, "S M F"]:
    """See `dense_parts`."""
    return dense_reference(x, weight)[None]


def dense_onto_reference(
    x: Float[Array, "M F"],
    weight: Float[Array, "D F"] | ColumnBlocks,
    stream: Float[Array, "M D"],
    norm: Float[Array, "D"],
    *,
    eps: float,
    zero_centered: bool = False,
) -> tuple[Float[Array, "M D"], Float[Array, "M D"]]:
    """See `dense_onto`."""
    return add_norm_reference(dense_parts_reference(x, weight), stream, norm, eps=eps, zero_centered=zero_centered)


def dense_best_reference(x: Float[Array, "M D"], weight: Float[Array, "F D"]) -> Int[Array, "M"]:
    """See `dense_best`."""
    return jnp.argmax(dense_reference(x, weight), axis=-1).astype(jnp.int32)


def add_norm_reference(
    parts: Float[Array, "S M D"],
    stream: Float[Array, "M D"],
    weight: Float[Array, "D"],
    *,
    eps: float,
    zero_centered: bool = False,
    rounds_last: bool = False,
) -> tuple[Float[Array, "M D"], Float[Array, "M D"]]:
    """See `add_norm`."""
    stream = (stream + jnp.sum(parts, axis=0)).astype(stream.dtype)
    return stream, weighted_norm(stream, weight, eps, zero_centered=zero_centered, rounds_last=rounds_last)


def add_norm_scores_reference(
    parts: Float[Array, "S M D"],
    stream: Float[Array, "M D"],
    weight: Float[Array, "D"],
    scorer: Float[Array, "E D"],
    bias: Float[Array, "E"] | None,
    **how: Any,
) -> tuple[Float[Array, "M D"], Float[Array, "M D"], Float[Array, "M E"]]:
    """See `add_norm_scores`."""
    stream, normed = add_norm_reference(parts, stream, weight, **how)
    return stream, normed, biased_scores(normed, scorer, bias)


def biased_scores(
    x: Float[Array, "M D"], scorer: Float[Array, "E D"], bias: Float[Array, "E"] | None
) -> Float[Array, "M E"]:
    """`dense_scores`, plus a bias where there is one."""
    scores = dense_scores(x, scorer)
    return scores if bias is None else scores + bias.astype(jnp.float32)


def add_norm_dense_reference(
    parts: Float[Array, "S M D"],
    stream: Float[Array, "M D"],
    weight: Float[Array, "D"],
    matrix: Float[Array, "F D"],
    *,
    eps: float,
    zero_centered: bool = False,
    rounds_last: bool = False,
) -> tuple[Float[Array, "M D"], Float[Array, "M F"]]:
    """See `add_norm_dense`."""
    stream, normed = add_norm_reference(
        parts, stream, weight, eps=eps, zero_centered=zero_centered, rounds_last=rounds_last
    )
    return stream, dense_reference(normed, matrix)


def dense_scores(x: Float[Array, "M D"], scorer: Float[Array, "E D"]) -> Float[Array, "M E"]:
    """Router logits: products in float32, whatever the arguments' dtypes."""
    if x.dtype != scorer.dtype:
        x, scorer = x.astype(jnp.float32), scorer.astype(jnp.float32)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    # Products of sixteen-bit numbers are exact in float32: widening them first would only move more bytes.
    return jnp.einsum("md,ed->me", x, scorer, precision=precision, preferred_element_type=jnp.float32)
