"""Tiling of the grouped GEMM: tiles, stages and shared memory, as pure arithmetic."""

import dataclasses

from dflash_kernels.core.device import MATRIX_ROWS

TILE_K = 64  # columns of a k-tile: 128 bytes of sixteen-bit numbers, one swizzled row of shared memory
TILE_W = 256  # weight rows of a tile; with a gate, half of them are up rows
SHARED_MEMORY = 225 * 1024  # bytes, less what barriers take


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static shapes and schedule of one launch.

    Attributes:
      tile_m: rows of a block, 64 or 128. Each consumer takes half of 128 rows, or all of 64 and half of the features.
      matrices: 2 with gate and up, else 1.
      tile_n: features of a tile; gate and up have so many each.
      n_tiles: CTAs of a block.
      stages: of the ring.
      k_tiles: of a tile.
    """

    tile_m: int
    matrices: int
    tile_n: int
    n_tiles: int
    stages: int
    k_tiles: int

    @property
    def split_m(self) -> bool:
        """Whether the consumers share a tile's rows, or its features."""
        return self.tile_m == 2 * MATRIX_ROWS

    @property
    def wg_n(self) -> int:
        """Features of one consumer's accumulator."""
        return self.tile_n if self.split_m else self.tile_n // 2


def plan(tile_m: int, n: int, k: int, *, gated: bool) -> Plan:
    """Raises NotImplementedError with the reason for shapes that do not tile.

    Args:
      tile_m: rows of a block.
      n: features of the result.
      k: features of x.
    """
    matrices = 1 + gated
    tile_n = TILE_W // matrices
    if tile_m not in (64, 128):
        raise NotImplementedError(f"takes blocks of 64 or 128 rows, not {tile_m}")
    if k % TILE_K or n % tile_n:
        raise NotImplementedError(f"takes depths in {TILE_K}s and results in {tile_n}s, not {k} and {n}")
    result = 2 * tile_m * tile_n
    stages = min((SHARED_MEMORY - result) // ((tile_m + TILE_W) * TILE_K * 2), k // TILE_K)
    return Plan(tile_m, matrices, tile_n, n // tile_n, stages, k // TILE_K)
