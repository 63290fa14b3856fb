"""The products of attention on tensor cores, each with its form in Pallas' interpreter."""

# Pallas declares ACC less public than it documents it.
# pyright: reportPrivateImportUsage=false

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.core.device import MATRIX_ROWS as ROWS


def scores_of(queries, keys, count):
    """`[64, H] @ [count, H].T` in float32, both in shared memory."""

    def multiply(scores):
        plgpu.wgmma(scores, queries, keys.transpose((1, 0)))
        return scores[...]

    return pl.run_scoped(multiply, plgpu.ACC((ROWS, count), jnp.float32))


def scores_of_blocks(queries, keys, count):
    """`scores_of` of queries in blocks of columns."""

    def multiply(scores):
        multiply_blocks(scores, queries, keys)
        return scores[...]

    return pl.run_scoped(multiply, plgpu.ACC((ROWS, count), jnp.float32))


def multiply_blocks(scores, queries, keys):
    """Begins the product of queries in blocks of columns with keys."""
    first = 0
    for block in queries:
        plgpu.wgmma(scores, block, keys.at[:, pl.ds(first, block.shape[1])].transpose((1, 0)))
        first += block.shape[1]


def add_values(acc, weights, values, staged):
    """`acc + weights @ values` with the weights and the sum in registers.

    Pallas's interpreter has neither weights from registers nor an accumulator that starts with values: under it `staged` is
    shared memory for the weights, and the product is added afterwards.
    """
    if staged is None:
        return pl.run_state(lambda total: plgpu.wgmma(total, weights, values))(plgpu.ACC.init(acc))
    staged[...] = weights
    plgpu.commit_smem()

    def multiply(product):
        plgpu.wgmma(product, staged, values)
        return product[...]

    return acc + pl.run_scoped(multiply, plgpu.ACC(acc.shape, jnp.float32))
