"""Checks of shapes that several operations share. Each raises ValueError with what was expected and what came."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array


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
    """Arrays of integers by name that have a number for each sequence, and `page_table [B, W]`; None where a call has none."""
    given = {name: array for name, array in of_each.items() if array is not None}
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
