"""Products of a few rows on Hopper: what the kernel takes, and its tiling."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dflash_kernels.core.device import MATRIX_ROWS as TILE
from dflash_kernels.core.device import MULTIPROCESSORS, SHARED_MEMORY, require_hopper

MOST_ROWS = 16
BLOCK = 64  # columns that a swizzled row of shared memory holds
_BARRIERS = 512  # bytes, more than there are


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about one launch.

    Attributes:
      rows: M; columns: of a product, M in eights.
      features, depth: F and D.
      blocks: of a stage; stages: of the ring.
      split: CTAs that share the columns of a tile of weights.
      parts: whether their results are left to be added.
    """

    rows: int
    columns: int
    features: int
    depth: int
    blocks: int
    stages: int
    split: int
    parts: bool

    @property
    def steps(self) -> int:
        """Stages that a tile of weights takes."""
        return self.depth // BLOCK // self.blocks


def few_linear_mosaic_gpu(x: Array, weight: Array, bias: Array | None, *, parts: bool) -> Array:
    """See `few_linear`. Raises NotImplementedError for what it does not take."""
    require_hopper()
    return launch(x, weight, bias, parts=parts)


def refuse(rows: int, dtype: Any, features: int, depth: int) -> None:
    """Raises NotImplementedError, with the reason, where `few_linear_mosaic_gpu` would."""
    require_hopper()
    plan(rows, dtype, features, depth, parts=False)


def plan(rows: int, dtype: Any, features: int, depth: int, *, parts: bool, room: int = 0) -> Plan:
    """Raises NotImplementedError with the reason for what does not tile; `room`: bytes of shared memory for somebody else."""
    if dtype != jnp.bfloat16:
        raise NotImplementedError(f"takes bfloat16, not {jnp.dtype(dtype)}")
    if not 0 < rows <= MOST_ROWS:
        raise NotImplementedError(f"takes 1 to {MOST_ROWS} rows, not {rows}")
    if features % TILE or depth % BLOCK:
        raise NotImplementedError(f"takes features and columns in {TILE}s, not {features} and {depth}")
    tiles, units, columns = features // TILE, depth // BLOCK, rows + -rows % 8
    blocks = next(count for count in (5, 4, 3, 2, 1) if units % count == 0)
    split = max(min(MULTIPROCESSORS // tiles, units // blocks), 1) if parts else 1
    together = 1 if tiles * split <= MULTIPROCESSORS else 2  # CTAs of a multiprocessor
    room = SHARED_MEMORY // together - _BARRIERS - 1024 * (together - 1) - room
    stages = min(room // (blocks * BLOCK * 2 * (TILE + columns)), -(-units // blocks // split))
    return Plan(rows, columns, features, depth, blocks, max(stages, 2), split, parts)


def launch(x: Array, weight: Array, bias: Array | None, *, parts: bool, interpret: Any = None) -> Array:
    """The implementation without the device check: for tests on the CPU (`interpret`)."""
    if any(one is not None and one.dtype != x.dtype for one in (weight, bias)):
        raise NotImplementedError(f"takes weights in x's dtype, not {weight.dtype}")
    return _run(plan(x.shape[0], x.dtype, *weight.shape, parts=parts), x, weight, bias, interpret)


# Compiled as a function of its own, so that the layers of a model share one trace and one lowering of the kernel.
@functools.partial(jax.jit, static_argnums=(0, 4))
def _run(schedule: Plan, x: Array, weight: Array, bias: Array | None, interpret: Any) -> Array:
    # Not at the top: other machines need neither Pallas nor the time its import takes.
    from dflash_kernels.matmul.few.mosaic_gpu_sm90 import few_linear

    return few_linear(schedule, x, weight, bias, interpret)
