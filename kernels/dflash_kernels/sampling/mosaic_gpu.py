"""Sampling on Hopper: what the kernel supports, and its launch."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_kernels.core.device import require_hopper

MOST_TOKENS = 2**24  # of a vocabulary, whose ids float32 holds


def filtered_choice_mosaic_gpu(
    logits: Float[Array, "R V"],
    noise: Float[Array, "R V"],
    *,
    temperature: Float[Array, "R"],
    min_p: Float[Array, "R"],
    top_k: Int[Array, "R"],
    top_p: Float[Array, "R"],
) -> Int[Array, "R"]:
    """See `filtered_choice`."""
    require_hopper()
    return launch(logits, noise, temperature, min_p, top_k, top_p)


@functools.partial(jax.jit, static_argnames=("warpgroups", "interpret"))
def launch(
    logits: Array, noise: Array, temperature: Array, min_p: Array, top_k: Array, top_p: Array, *,
    warpgroups: int | None = None, interpret: Any = None,
) -> Array:  # fmt: skip
    """The kernel without the device check: for tests on the CPU (`interpret`)."""
    # Not at the top: other machines need neither Pallas nor the time its import takes.
    from dflash_kernels.sampling import mosaic_gpu_sm90 as kernel

    size = logits.shape[1]
    if logits.dtype != jnp.bfloat16 or size < kernel.CHUNK or size % kernel.VECTOR:
        raise NotImplementedError(
            f"takes bfloat16 rows of a multiple of {kernel.VECTOR}, {kernel.CHUNK} at least, not {logits.dtype} of {size}"
        )
    if size > MOST_TOKENS:
        raise NotImplementedError(f"takes rows of at most {MOST_TOKENS}, whose places float32 holds, not {size}")
    wide = [given.astype(jnp.float32) for given in (noise, temperature, jnp.log(min_p), top_p)]
    noise, temperature, log_min_p, top_p = wide
    options: Any = {"interpret": interpret, **({} if warpgroups is None else {"warpgroups": warpgroups})}
    return kernel.choose(logits, noise, temperature, log_min_p, top_k.astype(jnp.int32), top_p, **options)
