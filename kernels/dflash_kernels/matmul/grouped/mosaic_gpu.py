"""The product on Hopper: what the kernel takes, and how it is cut into tiles."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_kernels.core.device import require_half_precision, require_hopper

BLOCK = 64  # columns of one copy: 128 bytes of sixteen-bit numbers, one swizzled row of shared memory
FEATURES = 256  # weight rows of a tile; with a gate, half of them are up rows
SHARED_MEMORY = 225 * 1024  # bytes, less what barriers take


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about one launch.

    Attributes:
      rows: of a block, 64 or 128. Two warpgroups multiply: each takes half of 128 rows, or all of 64 and half of the features.
      parts: 2 with a gate; features: weight rows of a part in one tile; tiles: CTAs of a block.
      slots: of the ring; steps: of the depth.
    """

    rows: int
    parts: int
    features: int
    tiles: int
    slots: int
    steps: int

    @property
    def width(self) -> int:
        """Features of one warpgroup's accumulator."""
        return self.features if self.rows == 128 else self.features // 2


def plan(rows: int, out: int, depth: int, *, gated: bool) -> Plan:
    """Raises NotImplementedError with the reason for shapes that do not tile.

    Args:
      rows: of a block.
      out: features of the result.
    """
    parts = 1 + gated
    features = FEATURES // parts
    if rows not in (64, 128):
        raise NotImplementedError(f"takes blocks of 64 or 128 rows, not {rows}")
    if depth % BLOCK or out % features:
        raise NotImplementedError(f"takes depths in {BLOCK}s and results in {features}s, not {depth} and {out}")
    result = 2 * rows * features
    slots = min((SHARED_MEMORY - result) // ((rows + FEATURES) * BLOCK * 2), depth // BLOCK)
    return Plan(rows, parts, features, out // features, slots, depth // BLOCK)


def refuse(dtype: Any, depth: int, out: int, *, gated: bool) -> None:
    """Raises NotImplementedError, with the reason, where `grouped_linear_mosaic_gpu` would."""
    require_hopper()
    require_half_precision(dtype)
    plan(64, out, depth, gated=gated)


def grouped_linear_mosaic_gpu(*args: Array, gated: bool) -> Array:
    """See `grouped_linear`. Raises NotImplementedError for what it does not take."""
    require_hopper()
    return launch(*args, gated=gated)


def launch(
    x: Float[Array, "M D"],
    weight: Float[Array, "G F D"],
    groups: Int[Array, "blocks"],
    count: Int[Array, ""],
    *,
    gated: bool,
    interpret: Any = None,
) -> Float[Array, "M out"]:
    """The implementation without the device check: for tests on the CPU (`interpret`)."""
    require_half_precision(x.dtype, weight.dtype)
    schedule = plan(x.shape[0] // groups.shape[0], weight.shape[1] // (1 + gated), x.shape[1], gated=gated)
    flat = weight.reshape(-1, weight.shape[2])
    return _run(schedule, x, flat, groups.astype(jnp.int32), count.reshape(1).astype(jnp.int32), interpret)


# Compiled as a function of its own, so that the layers of a model share one trace and one lowering of the kernel.
@functools.partial(jax.jit, static_argnums=(0, 5))
def _run(schedule: Plan, x: Array, flat: Array, groups: Array, count: Array, interpret: Any) -> Array:
    # Not at the top: other machines need neither Pallas nor the time its import takes.
    from dflash_kernels.matmul.grouped import mosaic_gpu_kernel as kernel

    return kernel.products(schedule, x, flat, groups, count, interpret)
