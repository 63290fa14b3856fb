"""Pictures of unequal sizes side by side, as a vision tower takes them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dflash_jax.models import Patches, VisionConfig

# The fewest patches of a call, and the pictures of one: more patches come in powers of 2, so that few programs serve all sizes.
FEWEST, MOST_PICTURES = 256, 16


def packed(
    config: VisionConfig, pixels: Sequence[np.ndarray], grids: Sequence[tuple[int, int]], rows: int | None = None
) -> Patches:
    """Patches of at most `MOST_PICTURES` pictures, padded to so many rows.

    Args:
      pixels: of each picture its patches `[height * width, W]`, squares of neighbours one after the other.
      grids: height and width of each in patches, multiples of `merge_size`.
      rows: None for the fewest that a program takes.
    """
    counts = [height * width for height, width in grids]
    size = bucket(sum(counts)) if rows is None else rows
    each = [_places(height, width, config.merge_size) for height, width in grids]
    tapped = [_taps(places, grid, config.grid_side) for places, grid in zip(each, grids, strict=True)]
    cu_lens = np.full((MOST_PICTURES + 1,), sum(counts), np.int32)
    cu_lens[: len(counts) + 1] = np.cumsum([0, *counts])

    def stacked(parts: Sequence[np.ndarray], width: int, dtype: type) -> np.ndarray:
        whole, at = np.zeros((size, width), dtype), 0
        for part in parts:
            whole[at : at + len(part)] = part
            at += len(part)
        return whole

    host: dict[str, Any] = {
        "pixels": stacked(pixels, config.patch_width, np.float32),
        "places": stacked(each, 2, np.int32),
        "taps": stacked([taps for taps, _ in tapped], 4, np.int32),
        "weights": stacked([weights for _, weights in tapped], 4, np.float32),
        "cu_lens": cu_lens,
    }
    return Patches(**host)


def bucket(patches: int) -> int:
    """Rows of the smallest program that takes so many patches."""
    return max(FEWEST, 1 << max(0, patches - 1).bit_length())


def buckets(most: int) -> list[int]:
    """Rows of all programs that so many patches, or fewer, are taken by."""
    sizes = [FEWEST]
    while sizes[-1] < most:
        sizes.append(2 * sizes[-1])
    return sizes


def _places(height: int, width: int, merge: int) -> np.ndarray:
    """Row and column of every patch `[height * width, 2]`, squares of `merge` x `merge` one after the other."""
    places = np.stack(np.meshgrid(np.arange(height), np.arange(width), indexing="ij"), axis=-1)
    squares = places.reshape(height // merge, merge, width // merge, merge, 2)
    return squares.transpose(0, 2, 1, 3, 4).reshape(-1, 2).astype(np.int32)


def _taps(places: np.ndarray, grid: tuple[int, int], side: int) -> tuple[np.ndarray, np.ndarray]:
    """The four points of a learnt grid around each place and their shares, where the corners of both grids fall together."""
    exact = places.astype(np.float32) * np.float32(side - 1) / np.maximum(np.array(grid, np.float32) - 1, 1)
    low = np.floor(exact)
    rest, low = exact - low, low.astype(np.int32)
    high = np.minimum(low + 1, side - 1)
    rows, columns = (np.stack([low[:, axis], high[:, axis]], axis=1) for axis in (0, 1))
    by_row, by_column = (np.stack([1 - rest[:, axis], rest[:, axis]], axis=1) for axis in (0, 1))
    taps = (rows[:, :, None] * side + columns[:, None, :]).reshape(-1, 4)
    return taps, (by_row[:, :, None] * by_column[:, None, :]).reshape(-1, 4)
