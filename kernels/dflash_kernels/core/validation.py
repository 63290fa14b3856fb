"""Validation of arguments that several operations share: shapes, dtypes, attention's options and the scales of 8-bit pages.

Each check raises ValueError with what was expected and what came.
"""

import numbers
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float

FLOAT8 = (jnp.float8_e4m3fn, jnp.float8_e5m2)  # of pages of keys and values
FARTHEST = 2**30  # no sequence is as long: from here on a window has no border


def check_axes(**of_each: tuple[Any, str]) -> None:
    """Arrays by name, each with the letters of its axes."""
    for name, (array, letters) in of_each.items():
        if not hasattr(array, "shape") or len(array.shape) != len(letters.split()):
            came = array.shape if hasattr(array, "shape") else f"a {type(array).__name__}"
            raise ValueError(f"{name} must be an array [{', '.join(letters.split())}], not {came}")


def check_filled(**of_each: Array) -> None:
    """Arrays by name that have an entry or more."""
    for name, array in of_each.items():
        if 0 in array.shape:
            raise ValueError(f"{name} {array.shape} must have one entry or more along each axis")


def check_latent_pages(latent_pages: Array, width: int | None = None) -> None:
    """A pool of latent rows has one head: `[P, 1, p, C]`, C as `width` says where it is given."""
    if latent_pages.ndim != 4 or latent_pages.shape[1] != 1 or width not in (None, latent_pages.shape[-1]):
        raise ValueError(f"latent pages of {latent_pages.shape} are not [P, 1, p, {'C' if width is None else width}]")


def check_sequences(sequences: int, **of_each: Any) -> None:
    """Arrays of integers by name that have a number for each sequence, and `page_table [B, W]`; None where a call has none, but for
    the page table and `seq_lens`.
    """
    required = "page_table", "seq_lens"
    given: dict[str, Any] = {name: array for name, array in of_each.items() if array is not None or name in required}
    check_axes(**{name: (array, "B W" if name == "page_table" else "B") for name, array in given.items()})
    if sequences < 1 or any(array.shape[0] != sequences for array in given.values()):
        came = ", ".join(f"{name} {array.shape}" for name, array in given.items())
        raise ValueError(f"{came} must start with {sequences} sequences, at least one")
    check_integers(**given)


def check_integers(**of_each: Array) -> None:
    """Arrays by name that count, or point at something."""
    for name, array in of_each.items():
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(f"{name} must hold integers, not {array.dtype}")


def check_of_heads(heads: int, **of_each: Any) -> None:
    """Arrays by name that have a number for each query head; None where a call has none."""
    given = {name: array for name, array in of_each.items() if array is not None}
    check_axes(**{name: (array, "N") for name, array in given.items()})
    for name, array in given.items():
        if array.shape != (heads,):
            raise ValueError(f"{name} {array.shape} must be ({heads},), one for each query head")


def check_rows(**of_each: Any) -> None:
    """Arrays of floating-point numbers by name, of any number of axes but none."""
    for name, array in of_each.items():
        if not getattr(array, "shape", None):
            came = array.shape if hasattr(array, "shape") else f"a {type(array).__name__}"
            raise ValueError(f"{name} must be an array [..., rows], not {came}")
    check_floats(**of_each)


def check_floats(**of_each: Any) -> None:
    """Arrays or `ColumnBlocks` by name that are measured, not counted."""
    for name, array in of_each.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} must hold floating-point numbers, not {array.dtype}")


def check_count(**of_each: Any) -> None:
    """Numbers by name that are known when the program is compiled: whole, and 0 or more."""
    for name, number in of_each.items():
        if not isinstance(number, int | np.integer) or isinstance(number, bool) or number < 0:
            raise ValueError(f"{name} must be a whole number, 0 or more, not {number!r}")


def check_wide(advice: str, **arrays: Array) -> None:
    """Arrays by name whose numbers have no scale: eight bits would also round what is multiplied with them."""
    for name, array in arrays.items():
        if not is_wide(array):
            raise ValueError(f"{name} must be bfloat16, float16 or float32, not {array.dtype}: {advice}")


def is_wide(array: Array) -> bool:
    return jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize > 1


def check_stored(pages: Array, advice: str, **of_each: Array) -> None:
    """Arrays by name that become entries of pages as they are: of the pages' dtype, or both in 16 or 32 bits.

    A cast to eight bits without a scale would round 0.4 to 0 and turn what is too large into NaN.
    """
    for name, array in of_each.items():
        if array.dtype != pages.dtype and not (is_wide(array) and is_wide(pages)):
            raise ValueError(f"{name} of {array.dtype} cannot be stored in pages of {pages.dtype}: {advice}")


def fitting_options(window: Any, soft_cap: Any, scale: Any, head_dim: int) -> dict[str, Any]:
    """`window`, a pair with None on sides without a border, `soft_cap` and `scale`, plain numbers both but where they are traced.

    Raises:
      ValueError: `window` is no such pair, or `soft_cap` is not positive.
    """
    if soft_cap is not None and not isinstance(soft_cap, Tracer) and not soft_cap > 0:
        raise ValueError(f"soft_cap {soft_cap} must be positive, or None for scores without a cap")
    scale = head_dim**-0.5 if scale is None else scale
    return {"window": _fitting_window(window), "soft_cap": plain(soft_cap), "scale": plain(scale)}


def _fitting_window(window: Any) -> tuple[int | None, int | None]:
    try:
        left, right = (None, None) if window is None else window
        sides = [FARTHEST if side is None else operator.index(side) for side in (left, right)]
    except (TypeError, ValueError):
        sides = [-1]
    if min(sides) < 0:
        raise ValueError(
            f"window {window} must be a pair, keys seen to the left and to the right: 0 and more, or None for all of them"
        )
    left, right = (None if side >= FARTHEST else side for side in sides)
    return left, right


def plain(number: Any) -> Any:
    """NumPy's numbers have a width, which would become the results'; kernels are compiled for a number."""
    known = isinstance(number, numbers.Real | np.ndarray | jax.Array) and not isinstance(number, Tracer)
    return float(number) if known else number


def fitting_scale(
    scale: float | Array | None, pages: Array, name: str, int8_shape: tuple[int, ...]
) -> Float[Array, "..."] | None:
    """Float32 scales: `[K]` with float8 pages, `int8_shape` with int8 pages, None with others.

    Raises:
      ValueError: they do not fit the pages' dtype, or it is none that pages have.
    """
    kv_heads = pages.shape[1]
    shape = None if scale is None else jnp.shape(scale)
    if pages.dtype == jnp.int8:
        if scale is None or shape != int8_shape:
            raise ValueError(f"int8 pages need {name} of {int8_shape}, not {shape}")
        return jnp.asarray(scale, jnp.float32)
    if pages.dtype in FLOAT8:
        if shape not in (None, (), (kv_heads,)):
            raise ValueError(f"{pages.dtype} pages take a scalar {name} or one of ({kv_heads},), not {shape}")
        return jnp.broadcast_to(jnp.asarray(1.0 if scale is None else scale, jnp.float32), (kv_heads,))
    if not is_wide(pages):
        raise ValueError(f"pages are bfloat16, float16, float32, float8_e4m3fn, float8_e5m2 or int8, not {pages.dtype}")
    if scale is not None:
        raise ValueError(f"{name} is for float8 and int8 pages; these are {pages.dtype}")
    return None
