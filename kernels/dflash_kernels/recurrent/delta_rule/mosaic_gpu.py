"""The gated delta rule on Hopper: what the kernels support, and their launches."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dflash_kernels.core.device import require_hopper
from dflash_kernels.recurrent.delta_rule.inputs import (
    DeltaFactors,
    DeltaShape,
    DeltaState,
    DeltaWeights,
    einsum,
    gated_norm,
)
from dflash_kernels.recurrent.delta_rule.prompts import CHUNK, prompts_of

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


def delta_prefill_mosaic_gpu(
    projected: Float[Array, "n L W"],
    weights: DeltaWeights,
    state: DeltaState,
    shape: DeltaShape,
    *,
    eps: float,
    slots: Int[Array, "n"],
    follows: Bool[Array, "n"],
    fresh: Bool[Array, "n"],
    lengths: Int[Array, "n"],
) -> tuple[Float[Array, "n L O"], DeltaState]:
    """See `delta_prefill`. Raises NotImplementedError for what it does not take."""
    require_hopper()
    return launch_prefill(projected, weights, state, slots, follows, fresh, lengths, shape, eps=eps)


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


@functools.partial(jax.jit, static_argnames=("shape", "eps", "interpret", "parts"))
def launch_step(
    projected: Array, weights: DeltaWeights, state: DeltaState, live: Array, shape: DeltaShape, *, eps: float,
    interpret: Any = None, parts: int | None = None,
) -> tuple[Array, DeltaState]:  # fmt: skip
    """`delta_step` without the device check, in place where `state` is given up; `parts`: see the kernel's `step`."""
    _require(projected, weights, shape)
    from dflash_kernels.recurrent.delta_rule import mosaic_gpu_sm90_step as kernel

    return kernel.step(projected, weights, state, live.astype(jnp.int32), shape, eps, interpret, parts)


@functools.partial(jax.jit, static_argnames=("shape", "eps", "interpret"))
def launch_prefill(
    projected: Array, weights: DeltaWeights, state: DeltaState, slots: Array, follows: Array, fresh: Array, lengths: Array,
    shape: DeltaShape, *, eps: float, interpret: Any = None,
) -> tuple[Array, DeltaState]:  # fmt: skip
    """`delta_prefill` without the device check: products of bfloat16 numbers, sums and states in float32."""
    if (shape.key_dim, shape.value_dim) != (WIDTH, WIDTH) or projected.dtype != jnp.bfloat16:
        raise NotImplementedError(
            f"takes heads of {WIDTH} in bfloat16, not of {shape.key_dim} and {shape.value_dim} in {projected.dtype}"
        )
    from dflash_kernels.recurrent.delta_rule import mosaic_gpu_sm90_chunks, mosaic_gpu_sm90_scan

    n, length, _ = projected.shape
    prompts = prompts_of(
        projected, weights, state, shape, CHUNK, slots=slots, follows=follows, fresh=fresh, lengths=lengths
    )
    tokens = prompts.tokens
    q, k, v = (x.reshape(-1, CHUNK, x.shape[2] * WIDTH).astype(jnp.bfloat16) for x in tokens[:3])
    beta, g = (jnp.swapaxes(x.reshape(-1, CHUNK, shape.value_heads), 1, 2) for x in (tokens.beta, tokens.g))
    cum = einsum("chj,ij->chi", g, np.tri(CHUNK, dtype=np.float32))
    w, new, seen = mosaic_gpu_sm90_chunks.chunks(q, k, v, beta, cum, interpret)

    # A prompt's chunks lie one after the other: all rows but its last are full.
    begins = jax.lax.cummax(jnp.where(follows, 0, jnp.arange(n)))
    each = -(-lengths // CHUNK)
    counts = jnp.where(begins == jnp.arange(n)[:, None], each, 0).sum(axis=1)
    sources = jnp.where(prompts.known, prompts.sources, -1)
    # A prompt leaves its state where its last row does.
    left = jnp.where(prompts.targets < state.s.shape[0], prompts.targets, -1)
    targets = jnp.where(begins == jnp.arange(n)[:, None], left, -1).max(axis=1)
    of_rows = [x.astype(jnp.int32) for x in (counts, sources, targets)]
    out, s = mosaic_gpu_sm90_scan.scan(q, k, cum, w, new, seen, state.s, *of_rows, interpret=interpret)
    out = out.reshape(n, -1, shape.value_heads, WIDTH)[:, :length]
    out = jnp.where(prompts.live[..., None, None], out, 0)  # nothing is written past a prompt's last chunk
    conv = state.conv.at[prompts.targets].set(prompts.conv, mode="drop")
    return gated_norm(out, prompts.projected, weights, shape, eps), DeltaState(s, conv)


def _require(projected: Array, weights: DeltaWeights, shape: DeltaShape) -> None:
    if shape.gate != "silu":
        raise NotImplementedError(f"takes gates of silu, not of {shape.gate}")
    if (shape.key_dim, shape.value_dim) != (WIDTH, WIDTH) or projected.shape[1] > MOST:
        raise NotImplementedError(
            f"takes heads of {WIDTH} and up to {MOST} tokens, not {projected.shape[1]} of {shape.key_dim} and {shape.value_dim}"
        )
    if projected.dtype not in (jnp.bfloat16, jnp.float32) or weights.norm.dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(
            f"takes bfloat16 and float32, not {projected.dtype} with norms of {weights.norm.dtype}"
        )
