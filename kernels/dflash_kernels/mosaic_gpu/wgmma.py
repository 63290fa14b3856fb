"""Products on tensor cores, each with its form in Pallas' interpreter: attention's, and 8-bit operands widened in registers."""

# Pallas declares ACC less public than it documents it.
# pyright: reportPrivateImportUsage=false

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
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
        return scores.read()

    return side_by_side(multiply, [(ROWS, count)])


def multiply_blocks(scores: Any, queries, keys):
    """Begins the product of queries in blocks of columns with keys, in an `Accumulator`."""
    first = 0
    for block in queries:
        scores.begin(block, keys.at[:, pl.ds(first, block.shape[1])].transpose((1, 0)))
        first += block.shape[1]


@dataclasses.dataclass
class Accumulator:
    """The sum of products in flight, float32.

    Pallas's interpreter has no accumulator that starts with values, and no products of what is in registers: there these are added
    when the sum is read.

    Attributes:
      sums: the instruction's accumulator; more: what the interpreter adds.
    """

    sums: Any
    more: Any = 0.0

    def begin(self, left, right) -> None:
        """Begins to add `left @ right`, the left factor in registers or in shared memory, the right one in shared memory."""
        if interpreting() and isinstance(left, jax.Array):
            factors = left.astype(jnp.float32), right[...].astype(jnp.float32)
            plgpu.commit_smem()  # the copy that comes next into this memory is not before this load
            self.more += jnp.dot(*factors, precision="highest")
        else:
            plgpu.wgmma(self.sums, left, right)

    def read(self, later: int = 0) -> Any:
        """The sum in registers, once all but the `later` last products are done."""
        found = plgpu.wgmma_accumulator_load(self.sums, wait_n=later) if later else self.sums[...]
        return found + self.more if interpreting() else found


def side_by_side(multiply: Callable[..., Any], starts: Sequence[Any]) -> Any:
    """`multiply(*accumulators)` with an `Accumulator` for each start, whose products may be in flight together.

    `starts`: sums in registers, or the shapes of those that begin empty.
    """

    def begin(*sums):
        totals = [Accumulator(one) for one in sums]
        for total, start in zip(totals, starts, strict=True):
            if interpreting() and not isinstance(start, tuple):
                total.more = start
            elif not isinstance(start, tuple):
                total.sums[...] = start
        return multiply(*totals)

    shapes = [start if isinstance(start, tuple) else start.shape for start in starts]
    return pl.run_scoped(begin, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))


def add_side_by_side(multiply: Callable[..., None], sums: Sequence[Any]) -> Any:
    """Runs `multiply(accumulators)` with an `Accumulator` that starts as each of `sums`, and returns their final values."""
    if not interpreting():
        return pl.run_state(lambda totals: multiply([Accumulator(one) for one in totals]))(
            [plgpu.ACC.init(one) for one in sums]
        )

    def added(*totals):
        multiply(totals)
        return [total.read() for total in totals]

    return side_by_side(added, sums)


def add_products(acc, multiply: Callable[[Accumulator], None]) -> Any:
    """`acc` and the products that `multiply(total)` begins, with the sum in registers."""
    return add_side_by_side(lambda totals: multiply(*totals), [acc])[0]


def add_values(acc, weights, values) -> Any:
    """`acc + weights @ values` with the weights and the sum in registers."""
    return add_products(acc, lambda total: total.begin(weights, values))


def product(left, right) -> Any:
    """`left @ right` in float32, both in shared memory."""

    def multiply(total):
        plgpu.wgmma(total, left, right)
        return total[...]

    return pl.run_scoped(multiply, plgpu.ACC((left.shape[0], right.shape[1]), jnp.float32))


def add_product(acc, left, right) -> Any:
    """`acc + left @ right` with the sum in registers, both factors in shared memory."""
    return add_products(acc, lambda total: total.begin(left, right))


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
