"""Where a sequence's tokens lie that several ranks share: the definition that the package's lengths and bounds are held against."""

import numpy as np
from jaxtyping import Int


def local_slot(
    positions: Int[np.ndarray, "..."], *, ranks: int, interleave: int
) -> tuple[Int[np.ndarray, "..."], Int[np.ndarray, "..."]]:
    """Rank of each position, and its place among that rank's tokens."""
    turn = ranks * interleave
    return positions // interleave % ranks, positions // turn * interleave + positions % interleave
