"""The product on Hopper: what the kernel takes, and how it is cut into tiles."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from dflash_kernels.core.device import require_hopper, target
from dflash_kernels.core.layouts import deinterleave_columns

ROWS = 128  # weight rows of a tile: 64 for each of two warpgroups
BLOCK = 128  # columns of one copy: bytes of one swizzled row of shared memory
MOST_TOKENS = 64
RING = 96 * 1024  # bytes of shared memory: two CTAs fit on a multiprocessor, and one multiplies while the other waits


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about one launch.

    Attributes:
      tokens: rows of x, padded to what the matrix instruction takes.
      tiles: CTAs side by side along the features, the last one shifted back to end with the matrix.
      splits: CTAs that share the depth; steps: blocks of the whole depth.
      slots: of the ring.
    """

    tokens: int
    tiles: int
    splits: int
    steps: int
    slots: int


def plan(live: int, features: int, depth: int, multiprocessors: int) -> Plan:
    """Raises NotImplementedError with the reason for shapes that do not tile."""
    if not 0 < live <= MOST_TOKENS:
        raise NotImplementedError(f"takes 1 to {MOST_TOKENS} rows, not {live}")
    if depth % BLOCK or features < ROWS or features % 8:
        raise NotImplementedError(
            f"takes {BLOCK} | depth and at least {ROWS} features in eights, not {features, depth}"
        )
    tokens = next(size for size in (8, 16, 32, 64) if live <= size)
    tiles, steps = -(-features // ROWS), depth // BLOCK
    # One wave of two CTAs a multiprocessor at most, and at least four blocks each, or there is nothing to run ahead of.
    splits = max(1, min(multiprocessors * 2 // tiles, steps // 4, 8))
    slot = ROWS * BLOCK + tokens * BLOCK * 2
    return Plan(tokens, tiles, splits, steps, min(RING // slot, -(-steps // splits)))


def quantized_linear_mosaic_gpu(
    x: Float[Array, "M D"], values: Shaped[Array, "F D"], scales: Float[Array, "F"], *, paired: bool = False
) -> Float[Array, "M F"]:
    """See `quantized_linear`. Raises NotImplementedError for what it does not take."""
    require_hopper()
    return launch(x, values, scales, paired=paired, multiprocessors=target().multiprocessors)


def launch(
    x: Float[Array, "M D"],
    values: Shaped[Array, "F D"],
    scales: Float[Array, "F"],
    *,
    multiprocessors: int,
    paired: bool = False,
    interpret: Any = None,
) -> Float[Array, "M F"]:
    """The implementation without the device check: for tests on the CPU (`interpret`)."""
    if x.dtype != jnp.bfloat16 or values.dtype not in (jnp.int8, jnp.float8_e4m3fn):
        raise NotImplementedError(f"takes bfloat16 and weights in int8 or float8_e4m3fn, not {x.dtype}, {values.dtype}")
    schedule = plan(x.shape[0], values.shape[0], values.shape[1], multiprocessors)
    parts = _run(schedule, paired, x, values, interpret)
    # One after the other: a reduction may add in another order in another program.
    total = functools.reduce(jnp.add, parts)
    return (total[:, : x.shape[0]].T * scales).astype(x.dtype)


# Compiled as a function of its own, so that the layers of a model share one trace and one lowering of the kernel.
@functools.partial(jax.jit, static_argnums=(0, 1, 4))
def _run(schedule: Plan, paired: bool, x: Array, values: Array, interpret: Any) -> Array:
    # Not at the top: other machines need neither Pallas nor the time its import takes.
    from dflash_kernels.matmul.weight_only import mosaic_gpu_kernel as kernel

    return kernel.products(schedule, x if paired else deinterleave_columns(x), values, interpret)
