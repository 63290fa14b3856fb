"""Putting the parts of split sequences together, in the parts' order, so that the same call gives the same bits."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from dflash_kernels.attention.paged.mosaic_gpu_ops import LOG2E

EARLY = 32  # parts
RESIDENT = 1100  # CTAs of one warpgroup with so much on its way


def merge(
    parts: Float[Array, "B splits padded R"], stats: Float[Array, "B splits kinds wide"], rows: int, dtype: Any,
    interpret: Any = None,
) -> tuple[Float[Array, "B rows R"], Float[Array, "B rows"]]:  # fmt: skip
    """Output and natural lse of all parts, one CTA for each query row, or for several of a large batch.

    Of the stats the first is a part's natural lse, the next two, if there are any, the factors of the left and the right half of
    its columns. Parts of lse -inf were never written: what lies there is not used.
    """
    b, splits, _, rank = parts.shape

    def factor_of(stats_ref, batch, split, row, weight):
        """Of a part's columns, in the sum."""
        if stats.shape[2] == 1:
            return jnp.broadcast_to(weight, (rank,))
        left, right = (jnp.broadcast_to(weight * stats_ref[batch, split, half, row], (rank,)) for half in (1, 2))
        factor = jnp.where(lax.iota(jnp.int32, rank) < rank // 2, left, right)
        # Unwritten stats may be NaN as well.
        return jnp.where(jnp.broadcast_to(weight, (rank,)) > 0, factor, 0.0)

    at_once = rows_at_once(b, splits, rows)

    def body(parts_ref, stats_ref, out_ref, total_ref):
        batch, first = lax.axis_index("b"), lax.axis_index("block") * at_once
        # As much as registers hold is asked for before the first weight is known, so that a CTA waits for memory once.
        early = [
            [parts_ref[batch, split, first + step] for split in range(min(splits, EARLY))] for step in range(at_once)
        ]
        logits = [[stats_ref[batch, split, 0, first + step] for split in range(splits)] for step in range(at_once)]
        for step in range(at_once):
            row = first + step
            top = functools.reduce(jnp.maximum, logits[step])
            top = jnp.where(top == -jnp.inf, 0.0, top)
            weights = [jnp.exp2((logit - top) * LOG2E) for logit in logits[step]]
            total = functools.reduce(jnp.add, weights)
            share = 1 / jnp.where(total == 0, 1.0, total)
            out = jnp.zeros((rank,), jnp.float32)
            for split, weight in enumerate(weights):
                value = early[step][split] if split < EARLY else parts_ref[batch, split, row]
                factor = factor_of(stats_ref, batch, split, row, weight * share)
                # What lies in an empty part is skipped, not weighted.
                out += jnp.where(factor != 0, value.astype(jnp.float32) * factor, 0.0)
            out_ref[batch, row] = out.astype(dtype)
            total_ref[batch, row] = jnp.where(total == 0, -jnp.inf, top + jnp.log2(total) * (1 / LOG2E))

    return plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct((b, rows, rank), dtype), jax.ShapeDtypeStruct((b, rows), jnp.float32)),
        grid=(b, rows // at_once), grid_names=("b", "block"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(parts, stats)  # fmt: skip


def rows_at_once(b: int, splits: int, rows: int) -> int:
    """Rows of a CTA: few enough for registers, and CTAs few enough to run all at once."""
    at_once = 1
    while b * rows // at_once > RESIDENT and rows % (2 * at_once) == 0 and 2 * at_once * splits <= EARLY:
        at_once *= 2
    return at_once
