"""Choices of block sizes and stages that were measured: a small table for each op, written by benchmarks/tune.py.

A table is the file tuning.json in the op's folder. It maps the name of a device to entries, each of which says for which call it
was measured and what was fastest there:

    {"NVIDIA H200": [{"exact": {"head_dim": 128}, "sizes": {"tokens": 16384}, "choice": {"stages": 3}, "us": 9, "default_us": 10}]}

A call takes the choice of the entry that is the same in everything under `exact` and nearest in `sizes`, and the op's default
where there is none near enough or the device is another one.
"""

import functools
import json
import math
from collections.abc import Mapping
from importlib import resources
from typing import Any

from dflash_kernels.core.device import target

FARTHEST = 8.0


def choose[T](
    op: str, make: type[T], *, exact: Mapping[str, Any], sizes: Mapping[str, int], farthest: float = FARTHEST
) -> T:
    """The choice for a call on the device that is traced for.

    Args:
      op: name of the op's folder.
      make: what a choice becomes, from keyword arguments; without any it is the default. Raises ValueError for what is impossible.
      exact: properties that decide what a choice means: dtypes, head dims, kinds of mask.
      sizes: lengths and numbers, from 0 on, of which the nearest that were measured serve.
      farthest: times as large or small, all sizes together, that the nearest may be.

    Raises:
      ValueError: the table holds a choice that `make` does not take.
    """
    entry = nearest(table(op).get(target().kind, ()), exact, sizes, farthest)
    if entry is None:
        return make()
    try:
        return make(**entry["choice"])
    except (TypeError, ValueError) as wrong:
        raise ValueError(f"{op}/tuning.json: {entry}: {wrong}; run benchmarks/tune.py {op} again") from wrong


def nearest(
    entries: Any, exact: Mapping[str, Any], sizes: Mapping[str, int], farthest: float = FARTHEST
) -> dict[str, Any] | None:
    """The entry measured for a call most like this one; None where none is near enough."""
    found = [(_distance(entry["sizes"], sizes), entry) for entry in entries if entry["exact"] == dict(exact)]
    distance, entry = min(found, key=_first, default=(math.inf, None))
    return entry if distance <= math.log2(farthest) else None


@functools.cache
def table(op: str) -> dict[str, list[dict[str, Any]]]:
    """Entries by device, as they are in the op's folder; none where the op has no table. Read once."""
    file = resources.files("dflash_kernels").joinpath(op, "tuning.json")
    return json.loads(file.read_text()) if file.is_file() else {}


def _distance(measured: Mapping[str, int], sizes: Mapping[str, int]) -> float:
    """Doublings and halvings between two calls, all sizes together."""
    if measured.keys() != sizes.keys():
        return math.inf
    return sum(abs(math.log2(max(measured[name], 1) / max(sizes[name], 1))) for name in sizes)


def _first(pair: tuple[float, Any]) -> float:
    return pair[0]
