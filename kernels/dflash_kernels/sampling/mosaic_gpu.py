"""Sampling on Hopper: what the kernel supports, and its launch."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from dflash_kernels.core.device import MULTIPROCESSORS, WARPGROUP, require_hopper
from dflash_kernels.sampling.noise import CHUNK

PARTS = 8  # of a row that is not filtered, a CTA each
MANY_CTAS = 2048  # beyond which one warpgroup each is fastest
MOST_TOKENS = 2**24  # of a vocabulary, whose ids float32 holds
VECTOR = CHUNK // WARPGROUP  # neighbouring entries that a thread reads


class Choices(NamedTuple):
    """What the parts of rows have: the place of each one's choice, its sum less the part's largest logit, and that logit."""

    places: Int[Array, "R P"]
    sums: Float[Array, "R P"]
    tops: Float[Array, "R P"]


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
    return launch(logits, keys, temperature, (min_p, top_k, top_p)).places[:, 0]


def drawn_choice_mosaic_gpu(
    logits: Float[Array, "M V"], keys: UInt32[Array, "R 2"], temperature: Float[Array, "R"]
) -> Int[Array, "R"]:
    """See `drawn_choice`."""
    require_hopper()
    return best_of_parts(launch(logits, keys, temperature, parts=PARTS), temperature)


def drawn_candidates_mosaic_gpu(
    logits: Float[Array, "M V"], keys: UInt32[Array, "R 2"], temperature: Float[Array, "R"]
) -> Int[Array, "R C"]:
    """See `drawn_candidates`. A group has every eighth chunk of noise."""
    require_hopper()
    return launch(logits, keys, temperature, parts=PARTS).places


def best_of_parts(found: Choices, temperature: Float[Array, "R"]) -> Int[Array, "R"]:
    """The choice of each row; of equal sums the first place."""
    top = jnp.max(found.tops, axis=1, keepdims=True)
    factor = jnp.where(temperature > 0, jnp.maximum(temperature.astype(jnp.float32), jnp.finfo(jnp.float32).tiny), 1.0)
    sums = jnp.where(found.tops > -jnp.inf, found.sums + (found.tops - top) / factor[:, None], -jnp.inf)
    return jnp.min(
        jnp.where(sums == jnp.max(sums, axis=1, keepdims=True), found.places, jnp.iinfo(jnp.int32).max), axis=1
    )


def require_rows(logits: jax.Array | jax.ShapeDtypeStruct) -> None:
    """Raises NotImplementedError, with the reason, where the kernel does not take rows like these."""
    size = logits.shape[-1]
    if logits.dtype != jnp.bfloat16 or size < CHUNK or size % VECTOR:
        raise NotImplementedError(
            f"takes bfloat16 rows of a multiple of {VECTOR}, {CHUNK} at least, not {logits.dtype} of {size}"
        )
    if size > MOST_TOKENS:
        raise NotImplementedError(f"takes rows of at most {MOST_TOKENS}, whose places float32 holds, not {size}")


@functools.partial(jax.jit, static_argnames=("parts", "warpgroups", "interpret"))
def launch(
    logits: Array, keys: Array, temperature: Array, limits: Sequence[Array] = (), *, parts: int = 1,
    warpgroups: int | None = None, interpret: Any = None,
) -> Choices:  # fmt: skip
    """The kernel without the device check: for tests on the CPU (`interpret`). `limits`: min_p, top_k and top_p."""
    # Not at the top: other machines need neither Pallas nor the time its import takes.
    from dflash_kernels.sampling import mosaic_gpu_sm90 as kernel

    require_rows(logits)
    if limits:
        min_p, top_k, top_p = limits
        limits = jnp.log(min_p.astype(jnp.float32)), top_k.astype(jnp.int32), top_p.astype(jnp.float32)
    ctas = keys.shape[0] * parts
    if warpgroups is None:
        warpgroups = (
            kernel.WARPGROUPS if parts == 1 else 4 if ctas <= MULTIPROCESSORS else 2 if ctas <= MANY_CTAS else 1
        )
    # Of CTAs that share a multiprocessor, fewer registers each let more of them do so.
    at_once = kernel.AT_ONCE if parts == 1 or ctas <= MULTIPROCESSORS else 2
    options: Any = {"parts": parts, "warpgroups": warpgroups, "at_once": at_once, "interpret": interpret}
    return Choices(*kernel.choose(logits, keys, temperature.astype(jnp.float32), limits, **options))
