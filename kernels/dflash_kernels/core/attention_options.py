"""Options of attention that are numbers, as operations take them and as their implementations get them."""

import numbers
import operator
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

FARTHEST = 2**30  # no sequence is as long: from here on a window has no border


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
