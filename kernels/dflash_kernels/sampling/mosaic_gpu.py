"""Sampling on Hopper: what the kernel supports, and its launch."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from dflash_kernels.core.device import WARPGROUP, require_hopper
from dflash_kernels.sampling.noise import CHUNK

MOST_TOKENS = 2**24  # of a vocabulary, whose ids float32 holds
VECTOR = CHUNK // WARPGROUP  # neighbouring entries that a thread reads


def filtered_choice_mosaic_gpu(
    logits: Float[Array, "M V"],
    keys: UInt32[Array, "R 2"],
    *,
    temperature: Float[Array, "R"],
    min_p: Float[Array, "R"],
    top_k: Int[Array, "R"],
    top_p: Float[Array, "R"],
) -> Int[Array, "R"]:
    """See `filtered_choice`."""
    require_hopper()
    return launch(logits, keys, temperature, (min_p, top_k, top_p))


def drawn_choice_mosaic_gpu(
    logits: Float[Array, "M V"], keys: UInt32[Array, "R 2"], temperature: Float[Array, "R"]
) -> Int[Array, "R"]:
    """See `drawn_choice`."""
    require_hopper()
    return launch(logits, keys, temperature)


def drawn_candidates_mosaic_gpu(
    logits: Float[Array, "M V"], keys: UInt32[Array, "R 2"], temperature: Float[Array, "R"], margin: float
) -> Int[Array, "R C"]:
    """See `drawn_candidates`."""
    require_hopper()
    return launch(logits, keys, temperature, margin=margin)


def require_rows(logits: jax.Array | jax.ShapeDtypeStruct) -> None:
    """Raises NotImplementedError, with the reason, where the kernel does not take rows like these."""
    size = logits.shape[-1]
    if logits.dtype != jnp.bfloat16 or size < CHUNK or size % VECTOR:
        raise NotImplementedError(
            f"takes bfloat16 rows of a multiple of {VECTOR}, {CHUNK} at least, not {logits.dtype} of {size}"
        )
    if size > MOST_TOKENS:
        raise NotImplementedError(f"takes rows of at most {MOST_TOKENS}, whose places float32 holds, not {size}")


@functools.partial(jax.jit, static_argnames=("margin", "warpgroups", "interpret"))
def launch(
    logits: Array, keys: Array, temperature: Array, limits: Sequence[Array] = (), *, margin: float | None = None,
    warpgroups: int | None = None, interpret: Any = None,
) -> Array:  # fmt: skip
    """The kernel without the device check: for tests on the CPU (`interpret`). `limits`: min_p, top_k and top_p."""
    # Not at the top: other machines need neither Pallas nor the time its import takes.
    from dflash_kernels.sampling import mosaic_gpu_sm90 as kernel

    require_rows(logits)
    if limits:
        min_p, top_k, top_p = limits
        limits = jnp.log(min_p.astype(jnp.float32)), top_k.astype(jnp.int32), top_p.astype(jnp.float32)
    options: Any = {"interpret": interpret, **({} if warpgroups is None else {"warpgroups": warpgroups})}
    return kernel.choose(logits, keys, temperature.astype(jnp.float32), limits, margin=margin, **options)
