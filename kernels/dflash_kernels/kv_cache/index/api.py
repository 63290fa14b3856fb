"""An indexer's rows in eight bits: shapes, dtypes and errors; the first implementation that supports the call runs."""

from collections.abc import Sequence

import jax
from jaxtyping import Array, Float

from dflash_kernels.core.dispatch import first_fitting
from dflash_kernels.core.validation import check_rows, check_wide
from dflash_kernels.kv_cache.index.reference import index_encode_reference

IMPLEMENTATIONS = {"xla": index_encode_reference}


def index_encode(
    x: Float[Array, "*rows E"], *, implementation: str | Sequence[str] | None = None
) -> tuple[Float[Array, "*rows E"], Float[Array, "*rows"]]:
    """Turns an indexer's queries or keys by a Hadamard matrix and quantizes each row to e4m3, with a scale that is a power of two.

    Dot products of turned rows are those of the rows; what one dimension alone has large is spread over all of them. With `y` the
    turned row, the scale is `max(largest |y|, 1e-4) / 448` rounded up to a power of two, and values are `y / scale`. Multiply a
    score by both rows' scales.

    Args:
      x: bfloat16, float16 or float32; E is a power of two.
      implementation: a name, names to try in order, or None for the best that takes the call.

    Returns:
      Values in float8_e4m3fn and float32 scales.

    Raises:
      ValueError: rows are of another kind than said.
      NoImplementationError: nothing named takes these arguments.
    """
    check_rows(x=x)
    check_wide("they have eight bits already", x=x)
    width = x.shape[-1]
    if width < 1 or width & (width - 1):
        raise ValueError(f"rows of x {x.shape} must be a power of two wide, as Hadamard's matrices are")
    with jax.named_scope("index_encode"):
        return first_fitting("index_encode", IMPLEMENTATIONS, implementation, x)
