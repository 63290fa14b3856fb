"""Tiling of the weight-only GEMM: tiles, split-K, stages and shared memory, as pure arithmetic."""

import dataclasses

TILE_N = 128  # weight rows of a tile: 64 for each of two consumers
TILE_K = 128  # columns of a k-tile: bytes of one swizzled row of shared memory
MOST_ROWS = 64
RING = 96 * 1024  # bytes of shared memory: two CTAs fit on a multiprocessor, and one multiplies while the other waits


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static shapes and schedule of one launch.

    Attributes:
      tile_m: rows of x, padded to what the matrix instruction takes.
      n_tiles: CTAs side by side along the features, the last one shifted back to end with the matrix.
      split_k: CTAs that share the K of one tile.
      k_tiles: of the whole K.
      stages: of the ring.
    """

    tile_m: int
    n_tiles: int
    split_k: int
    k_tiles: int
    stages: int


def plan(rows: int, n: int, k: int, multiprocessors: int) -> Plan:
    """Raises NotImplementedError with the reason for shapes that do not tile."""
    if not 0 < rows <= MOST_ROWS:
        raise NotImplementedError(f"takes 1 to {MOST_ROWS} rows, not {rows}")
    if k % TILE_K or n < TILE_N or n % 8:
        raise NotImplementedError(f"takes {TILE_K} | depth and at least {TILE_N} features in eights, not {n, k}")
    tile_m = next(size for size in (8, 16, 32, 64) if rows <= size)
    n_tiles, k_tiles = -(-n // TILE_N), k // TILE_K
    # One wave of two CTAs a multiprocessor at most, and at least four k-tiles each, or there is nothing to run ahead of.
    split_k = max(1, min(multiprocessors * 2 // n_tiles, k_tiles // 4, 8))
    stage = TILE_N * TILE_K + tile_m * TILE_K * 2
    return Plan(tile_m, n_tiles, split_k, k_tiles, min(RING // stage, -(-k_tiles // split_k)))
