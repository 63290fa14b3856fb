"""The gated delta rule on Hopper: what the kernels support, and their launches."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflash_kernels.core.device import require_hopper
from dflash_kernels.recurrent.delta_rule.inputs import DeltaFactors, DeltaShape, DeltaState, DeltaWeights

WIDTH, MOST = 128, 16  # of heads; tokens


def delta_verify_mosaic_gpu(
    projected: Float[Array, "B T W"], weights: DeltaWeights, state: DeltaState, shape: DeltaShape, *, eps: float
) -> tuple[Float[Array, "B T O"], DeltaFactors]:
    """See `delta_verify`. Raises NotImplementedError for what it does not take."""
    require_hopper()
    return launch_verify(projected, weights, state, shape, eps=eps)


def delta_fold_mosaic_gpu(state: DeltaState, factors: DeltaFactors, counts: Int[Array, "B"]) -> DeltaState:
    """See `delta_fold`. Raises NotImplementedError for what it does not take."""
    require_hopper()
    return launch_fold(state, factors, counts)


def delta_step_mosaic_gpu(
    projected: Float[Array, "B 1 W"],
    weights: DeltaWeights,
    state: DeltaState,
    live: Bool[Array, "B"],
    shape: DeltaShape,
    *,
    eps: float,
) -> tuple[Float[Array, "B 1 O"], DeltaState]:
    """See `delta_step`. Raises NotImplementedError for what it does not take."""
    require_hopper()
    return launch_step(projected, weights, state, live, shape, eps=eps)


# Compiled as a function of its own, so that the layers of a model share one trace and one lowering of the kernel.
@functools.partial(jax.jit, static_argnames=("shape", "eps", "interpret"))
def launch_verify(
    projected: Array, weights: DeltaWeights, state: DeltaState, shape: DeltaShape, *, eps: float, interpret: Any = None
) -> tuple[Array, DeltaFactors]:
    """`delta_verify` without the device check."""
    _require(projected, weights, shape)
    # Not at the top: other machines need neither Pallas nor the time its import takes.
    from dflash_kernels.recurrent.delta_rule import mosaic_gpu_sm90 as kernel

    return kernel.verify(projected, weights, state, shape, eps, interpret)


@functools.partial(jax.jit, static_argnames="interpret")
def launch_fold(state: DeltaState, factors: DeltaFactors, counts: Array, *, interpret: Any = None) -> DeltaState:
    """`delta_fold` without the device check, in place where `state` is given up."""
    tokens, widths = factors.cum.shape[1], state.s.shape[2:]
    if widths != (WIDTH, WIDTH) or tokens > MOST:
        raise NotImplementedError(
            f"takes heads of {WIDTH} and up to {MOST} tokens, not {tokens} of {widths[0]} and {widths[1]}"
        )
    if state.conv.dtype not in (jnp.bfloat16, jnp.float32) or factors.rows.dtype != state.conv.dtype:
        raise NotImplementedError(
            f"takes rows in bfloat16 and float32, not {factors.rows.dtype} for {state.conv.dtype}"
        )
    from dflash_kernels.recurrent.delta_rule import mosaic_gpu_sm90_fold as kernel

    return kernel.fold(state, factors, counts, interpret)


@functools.partial(jax.jit, static_argnames=("shape", "eps", "interpret"))
def launch_step(
    projected: Array, weights: DeltaWeights, state: DeltaState, live: Array, shape: DeltaShape, *, eps: float,
    interpret: Any = None,
) -> tuple[Array, DeltaState]:  # fmt: skip
    """`delta_step` without the device check, in place where `state` is given up."""
    _require(projected, weights, shape)
    from dflash_kernels.recurrent.delta_rule import mosaic_gpu_sm90_step as kernel

    return kernel.step(projected, weights, state, live.astype(jnp.int32), shape, eps, interpret)


def _require(projected: Array, weights: DeltaWeights, shape: DeltaShape) -> None:
    if (shape.key_dim, shape.value_dim) != (WIDTH, WIDTH) or projected.shape[1] > MOST:
        raise NotImplementedError(
            f"takes heads of {WIDTH} and up to {MOST} tokens, not {projected.shape[1]} of {shape.key_dim} and {shape.value_dim}"
        )
    if projected.dtype not in (jnp.bfloat16, jnp.float32) or weights.norm.dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(
            f"takes bfloat16 and float32, not {projected.dtype} with norms of {weights.norm.dtype}"
        )
