"""The online softmax, in base 2 and float32, and what else is made of exponentials.

A row's running maximum starts at -inf. `row_max` counts in powers of two: scores times `scale_log2`, the scale times log2(e).
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf, vector

from dflash_kernels.mosaic_gpu.thread_op import MATRIX, ROW, matrix, thread_op

LOG2E = math.log2(math.e)
_VOTE = (
    "{ .reg .pred own, anyones; setp.ne.b32 own, $1, 0; vote.sync.any.pred anyones, own, 0xffffffff;"
    " selp.b32 $0, 1, 0, anyones; }"
)
FOLDED = 8  # columns of which each thread has its own: sums of so many need no exchange


def online_step(scores: Any, row_max: Any, row_sum: Any, scale_log2: Any) -> tuple[Any, Any, Any, Any]:
    """Softmax of one more tile of scores `[rows, keys]`.

    Returns:
      The tile's weights; `alpha`, what everything summed up before is multiplied with, except the sum; the new `row_max`,
      `row_sum`.
    """
    new_max = jnp.maximum(row_max, scores.max(axis=1) * scale_log2)
    offset = finite(new_max)
    alpha = jnp.exp2(row_max - offset)
    weights = jnp.exp2(exponents(scores, scale_log2, offset))
    return weights, alpha, new_max, row_sum * alpha + weights.sum(axis=1)


def exponents(scores: Any, scale_log2: Any, offset: Any) -> Any:
    """Scores as powers of two, less each row's offset."""
    return scores * scale_log2 - lax.broadcast_in_dim(offset, scores.shape, [0])


def finite(row_max: Any) -> Any:
    """A row that has seen nothing yet keeps -inf as its maximum; 0 in its place makes every weight 0 instead of NaN."""
    return jnp.where(row_max == -jnp.inf, 0.0, row_max)


def rescaled(acc: Any, alpha: Any) -> Any:
    """An accumulator times each row's factor."""
    return acc * lax.broadcast_in_dim(alpha, acc.shape, [0])


@thread_op(args=(MATRIX, ROW), returns=lambda acc, _: matrix(acc.shape), interpret=rescaled)
def rescaled_where_moved(acc, alpha):
    """`rescaled`; a warp whose rows all have the factor 1 leaves its sums alone."""
    i32, one, moved = ir.IntegerType.get_signless(32), utils.c(1.0, ir.F32Type.get()), None
    for of_row in alpha.registers.flat:
        differs = arith.cmpf(arith.CmpFPredicate.UNE, vector.extract(of_row, [], [0]), one)
        moved = differs if moved is None else arith.ori(moved, differs)
    voted = utils.inline_ptx(_VOTE, arith.extui(i32, moved), result_types=i32, has_side_effects=True, convergent=True)
    sums = list(acc.registers.flat)
    some = arith.cmpi(arith.CmpIPredicate.ne, voted, utils.c(0, i32))
    branch = scf.IfOp(some, [register.type for register in sums], has_else=True)
    changed, unchanged = (region.blocks[0] for region in branch.regions)
    with ir.InsertionPoint(changed):
        scf.yield_(list((acc * alpha.broadcast_in_dim(acc.shape, (0,), acc.layout)).registers.flat))
    with ir.InsertionPoint(unchanged):
        scf.yield_(sums)
    registers = np.empty(acc.registers.shape, dtype=object)
    registers.flat = list(branch.results)
    return mgpu.FragmentedArray(_registers=registers, _layout=acc.layout, _is_signed=None)


def finalize(acc: Any, row_max: Any, row_sum: Any, live: Any) -> tuple[Any, Any]:
    """Normalized output and natural lse; 0 and -inf in rows that are not `live`, whatever they hold."""
    inverse = jnp.where(live, 1.0 / counted(row_sum, live), 0.0)
    lse = natural_lse(row_max, counted(row_sum, live), live)
    return scaled(acc, inverse), lse


def counted(row_sum: Any, live: Any) -> Any:
    """Sums that can be divided by: 1 in rows that are not live."""
    return jnp.where(live, row_sum, 1.0)


def natural_lse(row_max: Any, row_sum: Any, live: Any) -> Any:
    """Natural log-sum-exp of each row, -inf where it is not live."""
    return jnp.where(live, (row_max + jnp.log2(row_sum)) * (1 / LOG2E), -jnp.inf)


def scaled(acc: Any, factor: Any, axis: int = 0) -> Any:
    """An accumulator times one factor for each entry of an axis; 0 where that is 0, also for NaN: rows past the live ones."""
    factor = lax.broadcast_in_dim(factor, acc.shape, [axis])
    return jnp.where(factor != 0, acc * factor, 0.0)


def partial_reduce(function: Callable[[Any, Any], Any], array: Any) -> Any:
    """Each thread's own part of a reduction over columns: no exchange, and several chains of operations side by side."""
    parts = [lax.slice(array, (0, at), (array.shape[0], at + FOLDED)) for at in range(0, array.shape[1], FOLDED)]
    return functools.reduce(function, parts)


def precise_tanh(x: Any) -> Any:
    """From exp2: the hardware's own tanh keeps eleven bits, too few under a cap of fifty."""
    return 1.0 - 2.0 / (1.0 + jnp.exp2(x * (2 * LOG2E)))


def sigmoid(x: Any) -> Any:
    return 1.0 / (1.0 + jnp.exp(-x))


def softplus(x: Any) -> Any:
    """`log(1 + exp(x))`, with the logarithm as a series: the hardware's own is as far off near 1 as elsewhere, and a decay of
    hardly anything is kept over thousands of tokens.
    """
    small = jnp.exp(-jnp.abs(x))
    ratio = small / (2.0 + small)
    square = ratio * ratio
    series = functools.reduce(lambda total, power: total * square + 1 / power, (13, 11, 9, 7, 5, 3, 1), 1 / 15)
    return jnp.maximum(x, 0.0) + 2.0 * ratio * series
