"""Tiling of products of a few rows: columns, stages, parts. Arithmetic on shapes only."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from dflash_kernels.core.device import MATRIX_ROWS as TILE
from dflash_kernels.core.device import MULTIPROCESSORS, SHARED_MEMORY

MOST_ROWS = 16
BLOCK = 64  # columns that a swizzled row of shared memory holds
_BARRIERS = 512  # bytes, more than there are


@dataclasses.dataclass(frozen=True)
class RowNorm:
    """A norm's static part; see `add_norm`."""

    eps: float
    zero_centered: bool = False
    rounds_last: bool = False


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about one launch.

    Attributes:
      rows: M; columns: of a product, M in eights.
      features, depth: F and D.
      blocks: of a stage; stages: of the ring.
      split: CTAs that share the columns of a tile of weights.
      parts: whether their results are left to be added.
      norm: how the one row of x is made: the residual stream with what is added to it, normed; None where x is given.
    """

    rows: int
    columns: int
    features: int
    depth: int
    blocks: int
    stages: int
    split: int
    parts: bool
    norm: RowNorm | None = None

    @property
    def steps(self) -> int:
        """Stages that a tile of weights takes."""
        return self.depth // BLOCK // self.blocks


def plan(
    rows: int, dtype: Any, features: int, depth: int, *, parts: bool, room: int = 0, norm: RowNorm | None = None
) -> Plan:
    """Raises NotImplementedError with the reason for what does not tile; `room`: bytes of shared memory for somebody else."""
    if dtype != jnp.bfloat16:
        raise NotImplementedError(f"takes bfloat16, not {jnp.dtype(dtype)}")
    if not 0 < rows <= MOST_ROWS:
        raise NotImplementedError(f"takes 1 to {MOST_ROWS} rows, not {rows}")
    if norm is not None and rows != 1:
        raise NotImplementedError(f"norms one row, not {rows}: every CTA norms for itself")
    if features % TILE or depth % BLOCK:
        raise NotImplementedError(f"takes features and columns in {TILE}s, not {features} and {depth}")
    tiles, units, columns = features // TILE, depth // BLOCK, rows + -rows % 8
    blocks = next(count for count in (5, 4, 3, 2, 1) if units % count == 0)
    split = max(min(MULTIPROCESSORS // tiles, units // blocks), 1) if parts else 1
    together = 1 if tiles * split <= MULTIPROCESSORS else 2  # CTAs of a multiprocessor
    room = SHARED_MEMORY // together - _BARRIERS - 1024 * (together - 1) - room
    beside = 0 if norm is None else columns  # rows of x in a stage, or all of them once
    room -= depth * 2 * beside
    stages = min(room // (blocks * BLOCK * 2 * (TILE + columns - beside)), -(-units // blocks // split))
    return Plan(rows, columns, features, depth, blocks, max(stages, 2), split, parts, norm)
