"""The public function: checks shapes, then hands over to the first implementation that takes the call."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_kernels.attention.merge_states.reference import merge_states_reference
from dflash_kernels.core.dispatch import first_fitting
from dflash_kernels.core.validation import check_floats, check_rows

IMPLEMENTATIONS = {"xla": merge_states_reference}


def merge_states(
    prefix_out: Float[Array, "*rows H"],
    prefix_lse: Float[Array, "*rows"],
    suffix_out: Float[Array, "*rows H"],
    suffix_lse: Float[Array, "*rows"],
    *,
    prefix_rows: int | Int[Array, ""] | None = None,
    out_scale: Float[Array, ""] | float | None = None,
    implementation: str | Sequence[str] | None = None,
) -> tuple[Float[Array, "*rows H"], Float[Array, "*rows"]]:
    """Attention of each row over two disjoint sets of keys, from its attention over each set.

    A set without a visible key has lse -inf; +inf (the mark some kernels leave there) and NaN are read as -inf. Whatever the
    output of such a set holds, NaN included, is not looked at. Two empty sets give 0 and -inf.

    Args:
      prefix_out, suffix_out: softmax-weighted values, each normalised over its own keys.
      prefix_lse, suffix_lse: natural logarithm of each softmax's denominator, at least float32.
      prefix_rows: entries of the leading axis that have a prefix, all where None. The others are the suffix's, whatever the prefix
        holds there: tokens of prompts without context, behind those with one.
      out_scale: float32; the output is then float8_e4m3fn of the merged values over it, cut to that format's range.
      implementation: a name, names to try in order, or None for the best that takes the call.

    Returns:
      Output in `prefix_out`'s dtype, or float8_e4m3fn, and lse in `prefix_lse`'s; weights and sums are at least float32.

    Raises:
      ValueError: shapes do not agree, or an array is of another kind than said.
      NoImplementationError: nothing named takes these arguments.
    """
    check_rows(prefix_out=prefix_out, suffix_out=suffix_out)
    for name, lse in (("prefix_lse", prefix_lse), ("suffix_lse", suffix_lse)):
        if not hasattr(lse, "shape"):
            raise ValueError(f"{name} must be an array [...], not a {type(lse).__name__}")
    check_floats(prefix_lse=prefix_lse, suffix_lse=suffix_lse)
    shapes = prefix_out.shape, prefix_lse.shape, suffix_out.shape, suffix_lse.shape
    if shapes[0] != shapes[2] or shapes[1] != shapes[3] or shapes[0][:-1] != shapes[1]:
        raise ValueError(f"outputs and lse of {shapes} must be [..., H] and [...] with the same leading axes")
    if prefix_rows is not None and prefix_lse.ndim == 0:
        raise ValueError("prefix_rows counts along the leading axis; a single row has none")
    if out_scale is not None:
        out_scale = jnp.asarray(out_scale, jnp.float32)
    with jax.named_scope("merge_states"):
        return first_fitting(
            "merge_states", IMPLEMENTATIONS, implementation, prefix_out, prefix_lse, suffix_out, suffix_lse,
            prefix_rows=prefix_rows, out_scale=out_scale,
        )  # fmt: skip
