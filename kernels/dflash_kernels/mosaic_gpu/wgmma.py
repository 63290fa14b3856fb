"""Products on tensor cores, each with its form in Pallas' interpreter: attention's, and 8-bit operands widened in registers."""

# Pallas declares ACC less public than it documents it.
# pyright: reportPrivateImportUsage=false

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.core.device import MATRIX_ROWS as ROWS
from dflash_kernels.mosaic_gpu.convert import FLOAT8_SHIFT, widened_rows
from dflash_kernels.mosaic_gpu.layouts import in_parity_order
from dflash_kernels.mosaic_gpu.thread_op import interpreting


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


def add_products(acc, multiply) -> Any:
    """`acc` and the products that `multiply(total)` begins, with the sum in registers.

    Pallas's interpreter has no accumulator that starts with values: under it the products are added afterwards.
    """
    if not interpreting():
        return pl.run_state(multiply)(plgpu.ACC.init(acc))

    def products(total):
        multiply(total)
        return total[...]

    return acc + pl.run_scoped(products, plgpu.ACC(acc.shape, jnp.float32))


def side_by_side(
    multiply: Callable[..., Any], shapes: Sequence[tuple[int, int]], interpreted: Callable[[], Any]
) -> Any:
    """`multiply(*accumulators)` with float32 accumulators of these shapes, whose products may be in flight together.

    Pallas's interpreter has no accumulator that starts with values: there `interpreted()` gives the same, product after product.
    """
    if interpreting():
        return interpreted()
    return pl.run_scoped(multiply, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))


def add_side_by_side(multiply: Callable[..., None], sums: Sequence[Any], interpreted: Callable[[], Any]) -> Any:
    """`multiply(accumulators)` with accumulators that start as `sums`; returns what they end as. See `side_by_side`."""
    if interpreting():
        return interpreted()
    return pl.run_state(multiply)([plgpu.ACC.init(one) for one in sums])


def left_factor(weights, staged) -> Any:
    """Weights in registers, as a product takes them. Pallas's interpreter takes none: `staged` is shared memory for them there."""
    if not interpreting():
        return weights
    staged[...] = weights
    plgpu.commit_smem()
    return staged


def add_values(acc, weights, values, staged) -> Any:
    """`acc + weights @ values` with the weights and the sum in registers; for `staged` see `left_factor`."""
    weights = left_factor(weights, staged)
    return add_products(acc, lambda total: plgpu.wgmma(total, weights, values))


def product(left, right) -> Any:
    """`left @ right` in float32, both in shared memory."""

    def multiply(total):
        plgpu.wgmma(total, left, right)
        return total[...]

    return pl.run_scoped(multiply, plgpu.ACC((left.shape[0], right.shape[1]), jnp.float32))


def add_product(acc, left, right) -> Any:
    """`acc + left @ right` with the sum in registers, both factors in shared memory."""
    return add_products(acc, lambda total: plgpu.wgmma(total, left, right))


def add_tiles(acc, tiles: Iterable[tuple[Any, Any]]) -> Any:
    """`acc` and `wide @ x.T` of each `(wide, x)` in float32, `wide` in registers and x in shared memory.

    Each tile is widened while the one before is multiplied: two of them are in registers at a time.
    """
    if interpreting():
        for wide, x in tiles:
            acc = acc + jnp.dot(wide.astype(jnp.float32), x[...].astype(jnp.float32).T, precision="highest")
        return acc

    def multiply(total: Any) -> None:
        for index, (wide, x) in enumerate(tiles):
            if index:
                plgpu.wgmma_wait(0)
            plgpu.wgmma(total, wide, x.transpose((1, 0)))

    return pl.run_state(multiply)(plgpu.ACC.init(acc))


def zeros(shape):
    """A sum of products before the first one, in registers."""
    empty = jnp.zeros(shape, jnp.float32)
    return empty if interpreting() else plgpu.layout_cast(empty, plgpu.Layout.WGMMA)


def add_widened(acc, weights, x):
    """`acc + weights @ x.T` in float32, with `weights [64, K]` in eight bits, which are widened to bfloat16 in registers.

    Both operands come from shared memory. Columns of x are in parity order; float8 weights count 2^-120 times.
    """
    if interpreting():
        wide = in_parity_order(weights[...].astype(jnp.float32))
        shift = 1.0 if weights.dtype == jnp.int8 else 2.0**-FLOAT8_SHIFT
        return acc + jnp.dot(wide, x[...].astype(jnp.float32).T, precision="highest") * shift
    wide, transposed = widened_rows(weights), x.transpose((1, 0))
    return pl.run_state(lambda total: plgpu.wgmma(total, wide, transposed))(plgpu.ACC.init(acc))
