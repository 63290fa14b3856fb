"""Numbers and flags as callers have them: Python's own, or scalars of numpy, JAX and the like, which become Python's.

A number that comes out of an array is no less a number. What would have to be rounded, counted as one or read is refused still: 5.0
for an integer, True for 1, a text, an array with an axis.
"""

import operator
from typing import Any


def as_integer(value: Any) -> int | None:
    """An integer, None for anything else."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def as_number(value: Any) -> int | float | None:
    """An integer or a floating point number, infinite ones and NaN included, None for anything else."""
    if (whole := as_integer(value)) is not None:
        return whole
    return float(value) if isinstance(value, float) or "float" in _kind(value) else None


def as_flag(value: Any) -> bool | None:
    """True or False, None for anything else."""
    return bool(value) if isinstance(value, bool) or _kind(value) == "bool" else None


def _kind(value: Any) -> str:
    """The dtype's name of a scalar or of an array without axes, empty for all else."""
    return str(getattr(value, "dtype", "")) if getattr(value, "ndim", None) == 0 else ""
