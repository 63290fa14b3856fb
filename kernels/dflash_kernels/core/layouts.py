"""Matrices that lie in memory in blocks of 64 columns, as copies to shared memory take them: each block in one piece.

A copy of 64 columns of some rows takes 128 bytes of every row. Where rows lie one after the other these are as far apart as a row
is long; in blocks they are neighbours, and memory gives them faster and with less energy. What that brings to a cycle is said at
`dflash_jax.execution.weight_layout`.
"""

from dataclasses import dataclass
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

COLUMNS = 64  # of a block: 128 bytes of numbers of two


@no_type_check  # JAX rebuilds pytrees with shapes and placeholders in place of arrays
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ColumnBlocks:
    """A matrix `[F, D]`, stored as `blocks[d // 64, f, d % 64]`.

    Attributes:
      blocks: `[D / 64, F, 64]`.
    """

    blocks: Shaped[Array, "b F c"]

    @property
    def shape(self) -> tuple[int, int]:
        blocks, rows, columns = self.blocks.shape
        return rows, blocks * columns

    @property
    def dtype(self) -> Any:
        return self.blocks.dtype

    @property
    def size(self) -> int:
        return self.blocks.size

    @property
    def stacked(self) -> Shaped[Array, "bF c"]:
        """The blocks below one another: row f of block b is row `b F + f`. No copy."""
        return self.blocks.reshape(-1, self.blocks.shape[-1])

    def matrix(self) -> Shaped[Array, "F D"]:
        """A copy row by row, for products that take nothing else."""
        return jnp.swapaxes(self.blocks, 0, 1).reshape(self.shape)

    def __getitem__(self, all_of_it: Any) -> "ColumnBlocks":
        """Itself for `...`, as a module's parameter is read."""
        if all_of_it is not Ellipsis:
            raise TypeError(f"a matrix in column blocks has no part {all_of_it!r}: take `matrix()`")
        return self


def in_column_blocks(matrix: Shaped[Array, "F D"]) -> ColumnBlocks:
    """A copy in blocks.

    Raises:
      ValueError: the columns are not so many whole blocks.
    """
    rows, columns = matrix.shape
    if columns % COLUMNS:
        raise ValueError(f"columns must be whole blocks of {COLUMNS}, not {columns}")
    return ColumnBlocks(jnp.swapaxes(matrix.reshape(rows, columns // COLUMNS, COLUMNS), 0, 1))


def row_by_row(weight: Any) -> Any:
    """A matrix as an array, however it is stored."""
    return weight.matrix() if isinstance(weight, ColumnBlocks) else weight


def as_stored(weight: Any) -> Any:
    """What kernels bring rows and columns of: an array, or its blocks below one another.

    Raises:
      NotImplementedError: blocks of another width.
    """
    if isinstance(weight, ColumnBlocks) and weight.blocks.shape[-1] != COLUMNS:
        raise NotImplementedError(f"takes blocks of {COLUMNS} columns, not of {weight.blocks.shape[-1]}")
    return weight.stacked if isinstance(weight, ColumnBlocks) else weight
