"""The order of a matrix's columns in memory.

Four bytes of a row widen to two pairs of sixteen bits, the even columns in one and the odd ones in the other. So a row whose
columns are stored in pairs, each of a block's first eight beside one of its last, widens to its own order, and what it is
multiplied with can stay in its own.
"""

import jax

BLOCK = 16


def in_pairs(matrix: jax.Array) -> jax.Array:
    """`[..., D]` as it is stored in pairs, D in sixteens: columns 0, 8, 1, 9, ... 7, 15 of each block."""
    return matrix.reshape(*matrix.shape[:-1], -1, 2, BLOCK // 2).swapaxes(-1, -2).reshape(matrix.shape)


def out_of_pairs(stored: jax.Array) -> jax.Array:
    """The other way round: the even columns of each block, then the odd ones."""
    return stored.reshape(*stored.shape[:-1], -1, BLOCK // 2, 2).swapaxes(-1, -2).reshape(stored.shape)
