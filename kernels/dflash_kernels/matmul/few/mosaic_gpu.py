"""Products of a few rows on Hopper: what the kernel takes, and its launch."""

import functools
from typing import Any

import jax
from jaxtyping import Array

from dflash_kernels.core.device import require_hopper
from dflash_kernels.matmul.few_tiling import Plan, plan


def few_linear_mosaic_gpu(x: Array, weight: Array, bias: Array | None, *, parts: bool) -> Array:
    """See `few_linear`. Raises NotImplementedError for what it does not take."""
    require_hopper()
    return launch(x, weight, bias, parts=parts)


def refuse(rows: int, dtype: Any, features: int, depth: int) -> None:
    """Raises NotImplementedError, with the reason, where `few_linear_mosaic_gpu` would."""
    require_hopper()
    plan(rows, dtype, features, depth, parts=False)


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
