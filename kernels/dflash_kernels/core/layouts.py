"""Layouts of arrays in memory: column blocks, interleaved columns, and arrays that a kernel writes in place.

Column blocks. A matrix in `ColumnBlocks` lies in blocks of 64 columns, as copies to shared memory take them, each block in one
piece. A copy of 64 columns of some rows takes 128 bytes of every row. In row-major order these are as far apart as a row is long;
in blocks they are neighbours, and memory gives them faster and with less energy. What that brings to a cycle is said at
`dflash_jax.execution.weight_layout`.

Interleaved columns. Four bytes of a row widen to two pairs of sixteen bits, the even columns in one and the odd ones in the other.
So a row of interleaved columns, each of a block's first eight beside one of its last eight, widens to its own order, and what it is
multiplied with can stay in its own.

Aliased refs. XLA hands a kernel the address of a slice where it would hand it a copy of one, and the address in a larger array
where its result is to be put (dynamic slice fusion). It does so for an array that the kernel writes, too, and leaves out the copy
which that one needs: of a stack of pools the caller's own was written, and the result was not. Barriers keep slices out of such a
call; they are gone from the finished program, and nothing is copied that was not a slice.
"""

from dataclasses import dataclass
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

COLUMNS = 64  # of a column block: 128 bytes of numbers of two
EMPTY = -1  # a word of a mailbox that nobody has written: two bfloat16 or a float32 that arithmetic does not produce
INTERLEAVE_BLOCK = 16  # columns that are interleaved among themselves


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
        """A row-major copy, for products that take nothing else."""
        return jnp.swapaxes(self.blocks, 0, 1).reshape(self.shape)

    def __getitem__(self, all_of_it: Any) -> "ColumnBlocks":
        """Itself for `...`, as a module's parameter is read."""
        if all_of_it is not Ellipsis:
            raise TypeError(f"a matrix in column blocks has no part {all_of_it!r}: take `matrix()`")
        return self


def in_column_blocks(matrix: Shaped[Array, "F D"]) -> ColumnBlocks:
    """Stores a matrix in column blocks of 64, a copy.

    Raises:
      ValueError: the columns are not so many whole blocks.
    """
    rows, columns = matrix.shape
    if columns % COLUMNS:
        raise ValueError(f"columns must be whole blocks of {COLUMNS}, not {columns}")
    return ColumnBlocks(jnp.swapaxes(matrix.reshape(rows, columns // COLUMNS, COLUMNS), 0, 1))


def row_by_row(weight: Any) -> Any:
    """The row-major array of a matrix, however it is stored."""
    return weight.matrix() if isinstance(weight, ColumnBlocks) else weight


def as_stored(weight: Any) -> Any:
    """The array that kernels copy rows and columns of: the matrix, or its column blocks below one another.

    Raises:
      NotImplementedError: blocks of another width.
    """
    if isinstance(weight, ColumnBlocks) and weight.blocks.shape[-1] != COLUMNS:
        raise NotImplementedError(f"takes blocks of {COLUMNS} columns, not of {weight.blocks.shape[-1]}")
    return weight.stacked if isinstance(weight, ColumnBlocks) else weight


def interleave_columns(matrix: Shaped[Array, "*rows D"]) -> Shaped[Array, "*rows D"]:
    """`[..., D]` with interleaved columns, D a multiple of 16: columns 0, 8, 1, 9, ... 7, 15 of each block of sixteen."""
    return matrix.reshape(*matrix.shape[:-1], -1, 2, INTERLEAVE_BLOCK // 2).swapaxes(-1, -2).reshape(matrix.shape)


def deinterleave_columns(stored: Shaped[Array, "*rows D"]) -> Shaped[Array, "*rows D"]:
    """The inverse of `interleave_columns`: the even columns of each block, then the odd ones."""
    return stored.reshape(*stored.shape[:-1], -1, INTERLEAVE_BLOCK // 2, 2).swapaxes(-1, -2).reshape(stored.shape)


def aliased_ref(array: jax.Array) -> Any:
    """A Ref of an array that a kernel writes in place; `freeze_aliased` gives the array back."""
    return jax.new_ref(jax.lax.optimization_barrier(array))


def freeze_aliased(ref: Any) -> jax.Array:
    """Contents of an `aliased_ref` after the kernel has run."""
    return jax.lax.optimization_barrier(jax.freeze(ref))
