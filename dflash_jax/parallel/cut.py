"""Sharding of one array of a model: how it is cut, and the share that a rank holds.

A fused projection is its sources' rows one after the other, so a rank's rows are its share of each of them: no contiguous piece.
Arrays over all ranks have their shares side by side, rank 0's first, and a plain sharding along one axis cuts them.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np


@dataclass(frozen=True)
class Cut:
    """Assignment of an array's parts to ranks.

    Attributes:
      axis: that is cut: 0 for rows, of which each rank multiplies some; 1 for columns, whose products ranks add up.
      parts: along that axis, one after the other: the size of each, and how many equal units of it stay whole, such as heads or
        experts. Where there are fewer units than ranks, several ranks hold the same one.
      optional: whether the array stays whole on every rank where ranks do not divide it.
    """

    axis: Literal[0, 1]
    parts: tuple[tuple[int, int], ...]
    optional: bool = False

    def divides(self, ranks: int) -> bool:
        """Whether so many ranks can share every part."""
        return all(units % ranks == 0 or ranks % units == 0 for _, units in self.parts)

    def runs(self, rank: int, ranks: int) -> tuple[tuple[int, int], ...]:
        """Begin and end of what a rank holds, part by part."""
        found, start = [], 0
        for size, units in self.parts:
            unit, first = size // units, rank * units // ranks
            found.append((start + first * unit, start + (first + max(1, units // ranks)) * unit))
            start += size
        return tuple(found)

    def width(self, ranks: int) -> int:
        """Size of a rank's share along the axis."""
        return sum(end - begin for begin, end in self.runs(0, ranks))

    def share(self, array: np.ndarray, rank: int, ranks: int) -> np.ndarray:
        """A rank's share of an array; a view if it is one run of rows."""
        runs = self.runs(rank, ranks)
        pieces = [array[begin:end] if self.axis == 0 else array[:, begin:end] for begin, end in runs]
        return np.ascontiguousarray(pieces[0]) if len(pieces) == 1 else np.concatenate(pieces, axis=self.axis)


def by_rows(*parts: tuple[int, int], optional: bool = False) -> Cut:
    """Rows in parts of a size and so many units each; see `Cut`."""
    return Cut(0, parts, optional)


def by_columns(*parts: tuple[int, int]) -> Cut:
    """Columns in parts of a size and so many units each; see `Cut`."""
    return Cut(1, parts)
