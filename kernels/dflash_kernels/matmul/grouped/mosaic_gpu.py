"""The grouped product on Hopper: what the kernel supports, and its launch."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_kernels.core.device import require_half_precision, require_hopper
from dflash_kernels.matmul.grouped.tiling import Plan, plan


def grouped_linear_mosaic_gpu(*args: Array, gated: bool) -> Array:
    """See `grouped_linear`. Raises NotImplementedError for what the kernel does not support."""
    require_hopper()
    return launch(*args, gated=gated)


def require_experts(dtype: Any, k: int, n: int, *, gated: bool) -> None:
    """Raises NotImplementedError, with the reason, where `grouped_linear_mosaic_gpu` would."""
    require_hopper()
    require_half_precision(dtype)
    plan(64, n, k, gated=gated)


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
    from dflash_kernels.matmul.grouped.mosaic_gpu_sm90 import grouped_gemm

    return grouped_gemm(schedule, x, flat, groups, count, interpret)
