"""The weight-only product on Hopper: what the kernel supports, and its launch."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from dflash_kernels.core.device import require_hopper, target
from dflash_kernels.core.layouts import deinterleave_columns
from dflash_kernels.matmul.weight_only.tiling import Plan, plan


def quantized_linear_mosaic_gpu(
    x: Float[Array, "M D"], values: Shaped[Array, "F D"], scales: Float[Array, "F"], *, paired: bool = False
) -> Float[Array, "M F"]:
    """See `quantized_linear`. Raises NotImplementedError for what the kernel does not support."""
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
    from dflash_kernels.matmul.weight_only.mosaic_gpu_sm90 import weight_only_gemm

    return weight_only_gemm(schedule, x if paired else deinterleave_columns(x), values, interpret)
